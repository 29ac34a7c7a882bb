//! What kernels are tuned for: the sizes of a model's ops, each with its weight, as cases of the op table.
//!
//! Invariant: only sizes count, so that no weight is read; a matrix of more rows than are worth measuring is measured by a
//! part of it and weighs more. Pure; called by `tune` and the command line.

use runtime::backend::cases::{
    AttentionCase, Case, CaseOp, FusedCase, FusedEnd, PartCase, Tolerance, attention_tolerance,
};
use runtime::program::{Activation, KvDtype, LinearEnd, LinearPart, Op, Program, RowDim};
use runtime::weights::{HostTensor, WeightFormat};

/// Rows of a matrix that are measured at most, all parts together.
const MAX_ROWS: u32 = 4096;
/// A head of more tokens than this is never asked for: a prefill reads the logits of its last token.
const MAX_HEAD_TOKENS: u32 = 8;

/// Sizes of ops and how much each counts.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    linears: Vec<Linear>,
    /// `(heads, kv_heads, head_dim, dtype)`, layers.
    attention: Vec<(AttentionSizes, f64)>,
    /// Widths of norms, and how many there are.
    norms: Vec<(u32, f64)>,
    /// Widths of gated activations, and how many there are.
    gates: Vec<(u32, f64)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Linear {
    in_features: u32,
    parts: Vec<PartCase>,
    of: Of,
    weight: f64,
}

/// What stands around a linear.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Of {
    /// A norm before it.
    norm: bool,
    /// Whether it makes the logits.
    is_head: bool,
}

type AttentionSizes = (u32, u32, u32, KvDtype);

/// A case that is measured, and what its time counts.
pub(super) type Weighted = (Case, f64);

impl Workload {
    /// What a step of a model asks for.
    pub fn of_model(program: &Program, weights: &[HostTensor]) -> Self {
        let mut all = Self::default();
        let width = |slot: &runtime::ids::Slot| program.slots[slot.index()].width;
        let part = |part: &LinearPart| PartCase {
            out_features: program.weights[part.weight.index()].shape[0],
            format: weights[part.weight.index()].format,
            bias: part.bias.is_some(),
        };
        for op in &program.ops {
            match op {
                Op::Linear { x, parts, .. } => {
                    let is_head = program.slots[x.index()].rows == RowDim::LogitRows;
                    all.add_linear(width(x), parts.iter().map(part).collect(), Of { is_head, ..Of::default() });
                }
                Op::Attention { layer, heads, head_dim, .. } => {
                    let runtime::program::StateSpec::Paged { planes } = &program.states[layer.index()];
                    add(&mut all.attention, (*heads, planes[0].heads, *head_dim, planes[0].dtype));
                }
                Op::RmsNorm { x, .. } => add(&mut all.norms, width(x)),
                Op::FusedLinear { x, norm, parts, end, out } => {
                    let of = Of { norm: norm.is_some(), is_head: false };
                    all.add_linear(width(x), parts.iter().map(part).collect(), of);
                    if of.norm {
                        add(&mut all.norms, width(x));
                    }
                    if matches!(end, LinearEnd::Gate { .. }) {
                        add(&mut all.gates, width(out));
                    }
                }
                Op::GatedActivation { out, .. } => add(&mut all.gates, width(out)),
                _ => {}
            }
        }
        all
    }

    /// The shapes that `kernel bench` measures when it is not told any: a layer of 2048.
    pub fn default_shapes() -> Self {
        let mut all = Self::default();
        let part = |out_features| PartCase { out_features, format: WeightFormat::Q4_1, bias: false };
        all.add_linear(2048, vec![part(2048)], Of { norm: true, is_head: false });
        all.attention.push(((32, 8, 64, KvDtype::F16), 1.0));
        all.norms.push((2048, 2.0));
        all.gates.push((2048, 1.0));
        all
    }

    fn add_linear(&mut self, in_features: u32, mut parts: Vec<PartCase>, of: Of) {
        let rows: u32 = parts.iter().map(|part| part.out_features).sum();
        let mut weight = 1.0;
        if rows > MAX_ROWS {
            let cut = |rows_of: u32| (u64::from(rows_of) * u64::from(MAX_ROWS) / u64::from(rows)).max(64) as u32;
            parts.iter_mut().for_each(|part| part.out_features = cut(part.out_features));
            weight = f64::from(rows) / f64::from(parts.iter().map(|part| part.out_features).sum::<u32>());
        }
        let is_same = |known: &&mut Linear| (known.in_features, &known.parts, known.of) == (in_features, &parts, of);
        match self.linears.iter_mut().find(is_same) {
            Some(known) => known.weight += weight,
            None => self.linears.push(Linear { in_features, parts, of, weight }),
        }
    }

    /// Whether the matrices of a case are all in formats of this workload.
    pub(super) fn has_formats(&self, parts: &[PartCase]) -> bool {
        let all = || self.linears.iter().flat_map(|linear| &linear.parts);
        parts.iter().all(|part| all().any(|known| known.format == part.format))
    }

    /// Whether attention is asked for with heads of this size and type.
    pub(super) fn has_heads(&self, case: &AttentionCase) -> bool {
        self.attention.iter().any(|((_, _, head_dim, dtype), _)| (*head_dim, *dtype) == (case.head_dim, case.dtype))
    }

    /// Query heads for each KV head, at most.
    pub(super) fn largest_group(&self) -> u32 {
        self.attention.iter().map(|((heads, kv_heads, ..), _)| heads / kv_heads).max().unwrap_or(1)
    }

    /// Elements of the widest head.
    pub(super) fn largest_head(&self) -> u32 {
        self.attention.iter().map(|((_, _, head_dim, _), _)| *head_dim).max().unwrap_or(64)
    }

    /// The linears of a step of so many tokens.
    pub(super) fn linears(&self, tokens: u32) -> Vec<Weighted> {
        let is_asked = |linear: &&Linear| !linear.of.is_head || tokens <= MAX_HEAD_TOKENS;
        let case = |Linear { in_features, parts, of, weight }: &Linear| {
            let (in_features, parts, norm, end) = (*in_features, parts.clone(), of.norm, FusedEnd::Store);
            (timed(CaseOp::FusedLinear(FusedCase { in_features, parts, norm, end, tokens })), *weight)
        };
        self.linears.iter().filter(is_asked).map(case).collect()
    }

    /// Attention of rows that are `(start, length)`.
    pub(super) fn attention(&self, rows: &[(u32, u32)]) -> Vec<Weighted> {
        let case = |&((heads, kv_heads, head_dim, dtype), weight): &(AttentionSizes, f64)| {
            let case = AttentionCase { rows: rows.to_vec(), ..AttentionCase::causal(heads, kv_heads, head_dim, dtype) };
            (Case { tolerance: attention_tolerance(&case), op: CaseOp::Attention(case), seed: 1 }, weight)
        };
        self.attention.iter().map(case).collect()
    }

    /// Norms of a step of so many tokens.
    pub(super) fn norms(&self, tokens: u32) -> Vec<Weighted> {
        let case = |&(width, weight): &(u32, f64)| (timed(CaseOp::RmsNorm { width, tokens }), weight);
        self.norms.iter().map(case).collect()
    }

    /// Gated activations of a step of so many tokens.
    pub(super) fn gates(&self, tokens: u32) -> Vec<Weighted> {
        let case = |&(width, weight): &(u32, f64)| {
            (timed(CaseOp::GatedActivation { width, tokens, activation: Activation::Silu }), weight)
        };
        self.gates.iter().map(case).collect()
    }
}

fn add<T: PartialEq>(all: &mut Vec<(T, f64)>, sizes: T) {
    match all.iter_mut().find(|(known, _)| *known == sizes) {
        Some((_, weight)) => *weight += 1.0,
        None => all.push((sizes, 1.0)),
    }
}

/// A case whose result nobody compares.
fn timed(op: CaseOp) -> Case {
    let tolerance = Tolerance { relative_rms: 0.0, relative_max: 0.0, reason: "not compared" };
    Case { op, tolerance, seed: 1 }
}
