//! Watches every indexed access of a kernel: a pass over naga's IR that compares each index with the length before the
//! access is used, and notes the worst index of each place in a buffer.
//!
//! Invariant: what a kernel computes does not change; an index out of bounds is noted whatever its value does to the
//! result, with the place in the source where it was written. Reads and writes of buffers, workgroup memory and local
//! arrays alike. Used by `check`, never by a kernel that serves.

use std::collections::HashSet;

use naga::{
    AddressSpace, ArraySize, AtomicFunction, BinaryOperator, Block, Expression, Function, GlobalVariable, Handle,
    Literal, MemoryDecorations, Module, Range, ResourceBinding, Scalar, ScalarKind, Span, Statement, StorageAccess,
    Type, TypeInner,
};

use crate::compose::Composed;
use crate::reflect::{Checked, Diagnostic, diagnostic};

/// Places that a device's probe has room for.
pub(crate) const MAX_SITES: u32 = 1 << 15;
/// Words of a place: the largest index out of bounds, and the length of what was indexed.
pub(crate) const WORDS_PER_SITE: u32 = 2;

/// One place in a kernel where something is indexed.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// The variable that is indexed.
    pub(crate) variable: String,
    /// Whether the access is a write.
    pub(crate) is_write: bool,
    /// The place, with a message still to come.
    pub(crate) place: Diagnostic,
}

/// The watched module and its places; place `i` has the number `first + i`. Places from `MAX_SITES` on are left alone: the
/// caller refuses then.
pub(crate) fn instrument(checked: &Checked, composed: &Composed, first: u32) -> (Module, Vec<Site>) {
    let mut module = checked.module.clone();
    let faults = fault_buffer(&mut module);
    let mut sites = Vec::new();
    let original = &checked.module;
    let functions = original.functions.iter().map(|(handle, function)| (function, &checked.info[handle]));
    let watched: Vec<Function> = functions
        .chain([(&original.entry_points[0].function, checked.info.get_entry_point(0))])
        .map(|(function, info)| {
            let type_of = |expression: Handle<Expression>| info[expression].ty.inner_with(&original.types).clone();
            let mut pass = Pass {
                module: original,
                composed,
                type_of: &type_of,
                written: HashSet::new(),
                function: function.clone(),
                num_original: function.expressions.len(),
                faults,
                first,
                sites: &mut sites,
            };
            pass.find_written(&function.body);
            let body = pass.block(&function.body);
            pass.function.body = body;
            pass.function
        })
        .collect();
    let mut watched = watched.into_iter();
    for (_, function) in module.functions.iter_mut() {
        *function = watched.next().expect("one for each");
    }
    module.entry_points[0].function = watched.next().expect("the entry point is the last");
    (module, sites)
}

/// `@group(1) @binding(0) var<storage, read_write> faults: array<atomic<u32>, N>`.
fn fault_buffer(module: &mut Module) -> Handle<GlobalVariable> {
    let word = Type { name: None, inner: TypeInner::Atomic(Scalar::U32) };
    let base = module.types.insert(word, Span::UNDEFINED);
    let len = std::num::NonZeroU32::new(MAX_SITES * WORDS_PER_SITE).expect("a constant");
    let array = TypeInner::Array { base, size: ArraySize::Constant(len), stride: 4 };
    let ty = module.types.insert(Type { name: None, inner: array }, Span::UNDEFINED);
    let variable = GlobalVariable {
        name: Some("probe_faults".into()),
        space: AddressSpace::Storage { access: StorageAccess::LOAD | StorageAccess::STORE },
        binding: Some(ResourceBinding { group: 1, binding: 0 }),
        ty,
        init: None,
        memory_decorations: MemoryDecorations::empty(),
    };
    module.global_variables.append(variable, Span::UNDEFINED)
}

struct Pass<'a> {
    module: &'a Module,
    composed: &'a Composed,
    /// Types of the original expressions.
    type_of: &'a dyn Fn(Handle<Expression>) -> TypeInner,
    /// Accesses through which something is written.
    written: HashSet<Handle<Expression>>,
    /// Grows by the expressions of the comparisons.
    function: Function,
    /// Expressions before that.
    num_original: usize,
    faults: Handle<GlobalVariable>,
    first: u32,
    sites: &'a mut Vec<Site>,
}

/// The length of something that is indexed.
enum Length {
    /// Known when compiling.
    Fixed(u32),
    /// Of the buffer that is bound.
    Bound,
}

impl Pass<'_> {
    fn find_written(&mut self, block: &Block) {
        for statement in block.iter() {
            match statement {
                Statement::Store { pointer, .. } | Statement::Atomic { pointer, .. } => {
                    let mut at = *pointer;
                    while let Expression::Access { base, .. } | Expression::AccessIndex { base, .. } =
                        self.function.expressions[at]
                    {
                        self.written.insert(at);
                        at = base;
                    }
                }
                Statement::Block(block) => self.find_written(block),
                Statement::If { accept, reject, .. } => [accept, reject].into_iter().for_each(|b| self.find_written(b)),
                Statement::Switch { cases, .. } => cases.iter().for_each(|case| self.find_written(&case.body)),
                Statement::Loop { body, continuing, .. } => {
                    [body, continuing].into_iter().for_each(|b| self.find_written(b));
                }
                _ => {}
            }
        }
    }

    /// The block with a comparison behind each evaluation of an indexed access.
    fn block(&mut self, block: &Block) -> Block {
        let mut watched = Block::new();
        for (statement, span) in block.span_iter() {
            let statement = match statement.clone() {
                Statement::Emit(range) => {
                    watched.push(Statement::Emit(range.clone()), *span);
                    for expression in range {
                        self.compare(expression, &mut watched);
                    }
                    continue;
                }
                Statement::Block(inner) => Statement::Block(self.block(&inner)),
                Statement::If { condition, accept, reject } => {
                    Statement::If { condition, accept: self.block(&accept), reject: self.block(&reject) }
                }
                Statement::Switch { selector, mut cases } => {
                    for case in &mut cases {
                        case.body = self.block(&case.body);
                    }
                    Statement::Switch { selector, cases }
                }
                Statement::Loop { body, continuing, break_if } => {
                    Statement::Loop { body: self.block(&body), continuing: self.block(&continuing), break_if }
                }
                other => other,
            };
            watched.push(statement, *span);
        }
        watched
    }

    /// Appends `if index >= length { note it }` for an indexed access.
    fn compare(&mut self, access: Handle<Expression>, out: &mut Block) {
        let (base, index) = match self.function.expressions[access] {
            Expression::Access { base, index } => (base, Some(index)),
            Expression::AccessIndex { base, .. } => (base, None),
            _ => return,
        };
        let Some(length) = self.length_of(base) else { return };
        // A constant index into something of constant length has been checked when the kernel was validated.
        let index = match (index, &length, &self.function.expressions[access]) {
            (Some(index), ..) => index,
            (None, Length::Bound, &Expression::AccessIndex { index, .. }) => {
                self.append(Expression::Literal(Literal::U32(index)))
            }
            _ => return,
        };
        if self.sites.len() as u32 + self.first >= MAX_SITES {
            return;
        }
        let site = self.first + self.sites.len() as u32;
        self.sites.push(self.site(access, base));
        let is_signed = index.index() < self.num_original
            && matches!((self.type_of)(index), TypeInner::Scalar(scalar) if scalar.kind == ScalarKind::Sint);
        let mut emitted = Vec::new();
        let length = match length {
            Length::Fixed(length) => self.append(Expression::Literal(Literal::U32(length))),
            Length::Bound => {
                let length = self.append(Expression::ArrayLength(base));
                emitted.push(length);
                length
            }
        };
        let index = if is_signed {
            let index = self.append(Expression::As { expr: index, kind: ScalarKind::Uint, convert: Some(4) });
            emitted.push(index);
            index
        } else {
            index
        };
        let outside = Expression::Binary { op: BinaryOperator::GreaterEqual, left: index, right: length };
        let condition = self.append(outside);
        emitted.push(condition);
        out.push(Statement::Emit(Range::new_from_bounds(emitted[0], condition)), Span::UNDEFINED);
        let mut accept = Block::new();
        self.note(WORDS_PER_SITE * site, index, &mut accept);
        self.note(WORDS_PER_SITE * site + 1, length, &mut accept);
        out.push(Statement::If { condition, accept, reject: Block::new() }, Span::UNDEFINED);
    }

    /// Appends `atomicMax(&faults[word], value)`.
    fn note(&mut self, word: u32, value: Handle<Expression>, out: &mut Block) {
        let base = self.append(Expression::GlobalVariable(self.faults));
        let pointer = self.append(Expression::AccessIndex { base, index: word });
        out.push(Statement::Emit(Range::new_from_bounds(pointer, pointer)), Span::UNDEFINED);
        out.push(Statement::Atomic { pointer, fun: AtomicFunction::Max, value, result: None }, Span::UNDEFINED);
    }

    fn append(&mut self, expression: Expression) -> Handle<Expression> {
        self.function.expressions.append(expression, Span::UNDEFINED)
    }

    fn length_of(&self, base: Handle<Expression>) -> Option<Length> {
        let inner = match (self.type_of)(base) {
            TypeInner::Pointer { base, .. } => self.module.types[base].inner.clone(),
            TypeInner::ValuePointer { size: Some(size), .. } => return Some(Length::Fixed(size as u32)),
            other => other,
        };
        match inner {
            TypeInner::Array { size: ArraySize::Constant(len), .. } => Some(Length::Fixed(len.get())),
            TypeInner::Array { size: ArraySize::Dynamic, .. } => Some(Length::Bound),
            TypeInner::Vector { size, .. } => Some(Length::Fixed(size as u32)),
            TypeInner::Matrix { columns, .. } => Some(Length::Fixed(columns as u32)),
            _ => None,
        }
    }

    fn site(&self, access: Handle<Expression>, base: Handle<Expression>) -> Site {
        let mut at = base;
        let variable = loop {
            match self.function.expressions[at] {
                Expression::Access { base, .. } | Expression::AccessIndex { base, .. } => at = base,
                Expression::GlobalVariable(variable) => break self.module.global_variables[variable].name.clone(),
                Expression::LocalVariable(variable) => break self.function.local_variables[variable].name.clone(),
                Expression::FunctionArgument(i) => break self.function.arguments[i as usize].name.clone(),
                _ => break None,
            }
        };
        let span = self.function.expressions.get_span(access);
        let place = diagnostic(self.composed, Some(span), "", &[]);
        Site {
            variable: variable.unwrap_or_else(|| "an array".into()),
            is_write: self.written.contains(&access),
            place,
        }
    }
}
