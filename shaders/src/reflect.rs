//! What naga says of a composed kernel: is it valid, what does it bind, how large are its workgroups.
//!
//! Invariant: every problem comes out with the file, line and column that its author wrote. Used by `build.rs` for the
//! typed table, by the pipelines and by the kernel lab for the binding contract of a user's kernel.

use std::fmt;

use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ScalarKind, StorageAccess, TypeInner};

use crate::compose::{ComposeError, Composed};

/// How a kernel touches a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `var<uniform>`: the numbers of one dispatch.
    Uniform,
    /// `var<storage, read>`.
    Read,
    /// `var<storage, read_write>`.
    ReadWrite,
}

/// One binding of group 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingInfo {
    /// `@binding(index)`.
    pub index: u32,
    /// The variable's name.
    pub name: String,
    /// How it is touched.
    pub access: Access,
    /// The type as WGSL writes it, for the contract's messages.
    pub wgsl_type: String,
    /// Bytes of the smallest legal binding.
    pub min_bytes: u32,
}

/// One field of the uniform struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// `u32`, `i32` or `f32`.
    pub scalar: &'static str,
}

/// What a kernel needs from the outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// By index.
    pub bindings: Vec<BindingInfo>,
    /// Fields of the uniform binding, in order, each four bytes.
    pub params: Vec<Field>,
    /// Invocations per workgroup.
    pub workgroup_size: [u32; 3],
    /// Bytes of workgroup memory.
    pub workgroup_bytes: u32,
}

/// A problem in a kernel, where its author wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
    /// What is wrong, with naga's notes.
    pub message: String,
    /// The line and a caret under the place; empty where there is none.
    pub excerpt: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}{}", self.file, self.line, self.column, self.message, self.excerpt)
    }
}

impl std::error::Error for Diagnostic {}

impl From<ComposeError> for Diagnostic {
    fn from(error: ComposeError) -> Self {
        let ComposeError { file, line, problem } = error;
        Self { file, line, column: 1, message: problem, excerpt: String::new() }
    }
}

/// A valid kernel.
pub struct Checked {
    /// naga's module.
    pub module: Module,
    /// What validation found out.
    pub info: ModuleInfo,
    /// What it needs from the outside.
    pub interface: Interface,
}

/// Parses, validates and reflects.
///
/// # Errors
/// The first problem.
pub fn check(composed: &Composed) -> Result<Checked, Diagnostic> {
    let module = naga::front::wgsl::parse_str(&composed.text).map_err(|error| {
        let labels: Vec<_> = error.labels().map(|(span, label)| (span, label.to_owned())).collect();
        let notes: Vec<String> = labels.iter().skip(1).map(|(_, label)| label.clone()).collect();
        diagnostic(composed, labels.first().map(|(span, _)| *span), error.message(), &notes)
    })?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module).map_err(|error| {
        let mut notes = Vec::new();
        let mut source = std::error::Error::source(error.as_inner());
        while let Some(inner) = source {
            notes.push(inner.to_string());
            source = inner.source();
        }
        let innermost = error.spans().last().map(|(span, _)| *span);
        diagnostic(composed, innermost, &error.as_inner().to_string(), &notes)
    })?;
    let interface = reflect(composed, &module)?;
    Ok(Checked { module, info, interface })
}

pub(crate) fn diagnostic(composed: &Composed, span: Option<naga::Span>, message: &str, notes: &[String]) -> Diagnostic {
    let mut message = message.to_owned();
    for note in notes.iter().filter(|note| !note.is_empty()) {
        message.push_str(&format!("\n  {note}"));
    }
    let Some(span) = span.filter(|span| span.is_defined()) else {
        let (file, line) = composed.origin(1);
        return Diagnostic { file: file.into(), line, column: 1, message, excerpt: String::new() };
    };
    let place = span.location(&composed.text);
    let (file, line) = composed.origin(place.line_number);
    let text = composed.text.lines().nth(place.line_number as usize - 1).unwrap_or("");
    let column = place.line_position.max(1);
    let room = text.len().saturating_sub(column as usize - 1).max(1);
    let marks = "^".repeat((place.length as usize).clamp(1, room));
    let excerpt = format!("\n  | {text}\n  | {}{marks}", " ".repeat(column as usize - 1));
    Diagnostic { file: file.into(), line, column, message, excerpt }
}

fn reflect(composed: &Composed, module: &Module) -> Result<Interface, Diagnostic> {
    let at_start = |message: String| diagnostic(composed, None, &message, &[]);
    let entry = match module.entry_points.as_slice() {
        [entry] if entry.name == "main" => entry,
        _ => return Err(at_start("a kernel has one entry point, `main`".into())),
    };
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).map_err(|error| at_start(error.to_string()))?;
    let (mut bindings, mut params, mut workgroup_bytes) = (Vec::new(), Vec::new(), 0);
    for (handle, variable) in module.global_variables.iter() {
        let name = variable.name.clone().unwrap_or_default();
        let span = module.global_variables.get_span(handle);
        let access = match variable.space {
            AddressSpace::WorkGroup => {
                workgroup_bytes += layouter[variable.ty].size;
                continue;
            }
            AddressSpace::Uniform => Access::Uniform,
            AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => Access::ReadWrite,
            AddressSpace::Storage { .. } => Access::Read,
            _ => continue,
        };
        let place = match &variable.binding {
            Some(binding) if binding.group == 0 => binding.binding,
            _ => return Err(diagnostic(composed, Some(span), &format!("'{name}' is not in @group(0)"), &[])),
        };
        if access == Access::Uniform {
            params = fields(module, variable.ty)
                .ok_or_else(|| diagnostic(composed, Some(span), "a uniform is a struct of u32, i32 and f32", &[]))?;
        }
        bindings.push(BindingInfo {
            index: place,
            name,
            access,
            wgsl_type: wgsl_type(module, variable.ty),
            min_bytes: layouter[variable.ty].size,
        });
    }
    bindings.sort_by_key(|binding| binding.index);
    if bindings.iter().enumerate().any(|(i, binding)| binding.index != i as u32) {
        return Err(at_start("bindings of group 0 are numbered from 0 without gaps".into()));
    }
    Ok(Interface { bindings, params, workgroup_size: entry.workgroup_size, workgroup_bytes })
}

/// Fields of a struct of four-byte scalars.
fn fields(module: &Module, ty: naga::Handle<naga::Type>) -> Option<Vec<Field>> {
    let TypeInner::Struct { members, .. } = &module.types[ty].inner else { return None };
    let field = |(i, member): (usize, &naga::StructMember)| {
        let TypeInner::Scalar(scalar) = module.types[member.ty].inner else { return None };
        let scalar = match (scalar.kind, scalar.width) {
            (ScalarKind::Uint, 4) => "u32",
            (ScalarKind::Sint, 4) => "i32",
            (ScalarKind::Float, 4) => "f32",
            _ => return None,
        };
        (member.offset == 4 * i as u32).then(|| Field { name: member.name.clone().unwrap_or_default(), scalar })
    };
    members.iter().enumerate().map(field).collect()
}

/// A type in WGSL's words: scalars, vectors, arrays; structs by name.
fn wgsl_type(module: &Module, ty: naga::Handle<naga::Type>) -> String {
    let scalar = |scalar: naga::Scalar| match scalar.kind {
        ScalarKind::Uint => format!("u{}", scalar.width * 8),
        ScalarKind::Sint => format!("i{}", scalar.width * 8),
        ScalarKind::Float => format!("f{}", scalar.width * 8),
        _ => "bool".into(),
    };
    match &module.types[ty].inner {
        TypeInner::Scalar(s) => scalar(*s),
        TypeInner::Atomic(s) => format!("atomic<{}>", scalar(*s)),
        TypeInner::Vector { size, scalar: s } => format!("vec{}<{}>", *size as u8, scalar(*s)),
        TypeInner::Array { base, size: naga::ArraySize::Constant(n), .. } => {
            format!("array<{}, {n}>", wgsl_type(module, *base))
        }
        TypeInner::Array { base, .. } => format!("array<{}>", wgsl_type(module, *base)),
        _ => module.types[ty].name.clone().unwrap_or_else(|| "?".into()),
    }
}
