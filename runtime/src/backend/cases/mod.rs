//! The op case table: (op, shapes, format, tolerance with its reason, seed) as plain data, and how to run a case on any
//! backend through its public trait.
//!
//! Invariant: a case depends on its fields only: row r's activations do not change with the number of rows, nor a
//! position's with the chunk it is computed in, so that batch and chunk invariance can be tested on the same data.
//! Used by `tests/ops.rs`, the start-up self-test and the kernel lab.

mod build;
mod families;
mod moe;
mod random;
mod sample;
mod table;

pub use build::{BuiltCase, Observed, build_case};
pub use sample::SAMPLE_COLUMNS;
pub use table::{CODES, EXACT, FLOAT, all_cases, attention_tolerance};

use super::Backend;
use crate::error::DeviceError;
use crate::ids::WeightId;
use crate::program::{Activation, KvDtype, RopePairing, Router};
use crate::weights::WeightFormat;

/// One row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What is computed.
    pub op: CaseOp,
    /// How far a backend may be from the reference.
    pub tolerance: Tolerance,
    /// Where all its numbers come from.
    pub seed: u64,
}

/// How far a backend may be from the reference, and why so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Root mean square of the error over root mean square of the expected output.
    pub relative_rms: f32,
    /// Largest error of one element over root mean square of the expected output.
    pub relative_max: f32,
    /// Why.
    pub reason: &'static str,
}

/// An op with its shapes. `tokens` is the number of tokens of the step.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum CaseOp {
    /// Rows 0, 1, … of a table of any format.
    Embed {
        format: WeightFormat,
        width: u32,
        tokens: u32,
        scale: f32,
    },
    RmsNorm {
        width: u32,
        tokens: u32,
    },
    /// The heads lie at column `offset` of a wider slot.
    NormHeads {
        heads: u32,
        head_dim: u32,
        offset: u32,
        tokens: u32,
    },
    Add {
        width: u32,
        tokens: u32,
    },
    Linear {
        in_features: u32,
        parts: Vec<PartCase>,
        tokens: u32,
    },
    /// Positions from `start`; the heads lie at column `offset` of a wider slot.
    Rope {
        heads: u32,
        head_dim: u32,
        offset: u32,
        turn: TurnCase,
        start: u32,
        tokens: u32,
    },
    /// `StoreKv` and `Attention`: rows `(start, length)`, whose earlier positions a first step has stored.
    Attention(AttentionCase),
    GatedActivation {
        width: u32,
        tokens: u32,
        activation: Activation,
    },
    SoftCap {
        width: u32,
        tokens: u32,
        cap: f32,
    },
    /// Positions from `start`; the columns lie at column `offset` of a wider slot.
    ScaleByPosition {
        width: u32,
        offset: u32,
        period: u32,
        start: u32,
        tokens: u32,
    },
    /// The chosen ids and weights are the output.
    MoeRoute {
        experts: u32,
        router: Router,
        bias: bool,
        tokens: u32,
    },
    /// Linears of chosen experts, gates over them, linears back, and the weighted sum.
    Moe(MoeCase),
    /// A linear of experts without a route.
    Heads(HeadsCase),
    FusedLinear(FusedCase),
    /// Bad values in some rows; the flags are the output.
    CheckFinite {
        width: u32,
        tokens: u32,
    },
    /// Chosen rows in no order, some twice.
    SelectRows {
        width: u32,
        tokens: u32,
        logit_rows: u32,
    },
    /// Columns in no order, some twice.
    GatherColumns {
        width: u32,
        tokens: u32,
    },
    Sample(SampleCase),
}

/// Shapes of a sampling case. The first of the rows is drawn as the fields say; others are greedy or want no
/// log-probabilities, are read back, have many equal logits, or one that is not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleCase {
    /// Logits of a row.
    pub vocab: u32,
    /// Rows, at most 32.
    pub rows: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Alternatives whose log-probabilities are reported.
    pub logprobs: Option<u32>,
}

/// How a rotary case turns heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurnCase {
    /// Which elements form a pair.
    pub pairing: RopePairing,
    /// How many pairs of a head; the others stay.
    pub pairs: u32,
    /// See `Rotary`.
    pub amplitude: f32,
}

impl TurnCase {
    /// All pairs of a head, as they are.
    pub fn whole(pairing: RopePairing, head_dim: u32) -> Self {
        Self { pairing, pairs: head_dim / 2, amplitude: 1.0 }
    }
}

/// Shapes of a block of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeCase {
    /// Elements of a token's row.
    pub hidden: u32,
    /// Rows of an expert's gates, and of its ups.
    pub intermediate: u32,
    /// How many there are.
    pub experts: u32,
    /// How many of them a token has.
    pub top_k: u32,
    /// Of all matrices.
    pub format: WeightFormat,
    /// The gates' nonlinearity.
    pub activation: Activation,
    /// Whether the matrices have biases.
    pub bias: bool,
    /// Tokens of the step.
    pub tokens: u32,
}

/// Shapes of a linear of heads, each with a matrix of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadsCase {
    /// Matrices.
    pub heads: u32,
    /// Elements of a head.
    pub in_features: u32,
    /// Rows of each matrix.
    pub out_features: u32,
    /// Of all matrices.
    pub format: WeightFormat,
    /// Tokens of the step.
    pub tokens: u32,
}

/// One part of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartCase {
    /// Rows of the matrix.
    pub out_features: u32,
    /// Its format.
    pub format: WeightFormat,
    /// Whether it has a bias (f32).
    pub bias: bool,
}

/// Shapes of a fused linear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedCase {
    /// Elements of a row of the input.
    pub in_features: u32,
    /// Two of one shape where they are gates and ups.
    pub parts: Vec<PartCase>,
    /// Whether the input is normed first.
    pub norm: bool,
    /// What becomes of the product.
    pub end: FusedEnd,
    /// Tokens of the step.
    pub tokens: u32,
}

/// What becomes of a fused linear's product, as `LinearEnd` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FusedEnd {
    Store,
    Gate(Activation),
    Add,
}

/// Shapes of an attention case.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCase {
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Type of both planes.
    pub dtype: KvDtype,
    /// Tokens per block.
    pub block_size: u32,
    /// `(start, length)` per row; blocks of the rows lie in no order.
    pub rows: Vec<(u32, u32)>,
    /// Whether K is V too; not with `rope`.
    pub is_shared: bool,
    /// What happens to each row's first block between the two steps.
    pub moves: BlockMoves,
    /// Whether `RopeStoreKv` takes the place of `StoreKv`, and how it turns.
    pub rope: Option<TurnCase>,
    /// See `Op::Attention`.
    pub window: Option<u32>,
    /// See `Op::Attention`.
    pub soft_cap: Option<f32>,
    /// Whether there are sinks.
    pub sinks: bool,
    /// Per row the parents of its tokens, which makes it a tree; none, or past the last: a causal row.
    pub trees: Vec<Vec<Option<u32>>>,
}

impl AttentionCase {
    /// One token after nothing, causal, stored as it is.
    pub fn causal(heads: u32, kv_heads: u32, head_dim: u32, dtype: KvDtype) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            dtype,
            block_size: 16,
            rows: vec![(0, 1)],
            is_shared: false,
            moves: BlockMoves::None,
            rope: None,
            window: None,
            soft_cap: None,
            sinks: false,
            trees: Vec::new(),
        }
    }
}

/// How a case moves blocks between its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMoves {
    /// Not at all.
    None,
    /// By `copy_blocks`, to an unused block.
    Copy,
    /// By `read_block` and `write_block`, to an unused block.
    ReadWrite,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}, seed {}", self.op, self.seed)
    }
}

/// Runs a case on a fresh backend and returns the op's output, `[rows, width]` (flags as 0 and 1).
///
/// # Errors
/// What the backend says.
pub fn run_case(backend: &mut dyn Backend, case: &Case) -> Result<Vec<f32>, DeviceError> {
    run_built(backend, &build_case(case))
}

/// Runs a built case; see `run_case`.
///
/// # Errors
/// What the backend says.
pub fn run_built(backend: &mut dyn Backend, built: &BuiltCase) -> Result<Vec<f32>, DeviceError> {
    for (i, tensor) in built.tensors.iter().enumerate() {
        backend.upload(WeightId(i as u32), tensor)?;
    }
    let layout = built.step.layout();
    backend.alloc_state(&built.program.states, built.num_blocks, layout.block_size)?;
    let plan = backend.compile(&built.program, layout.bucket, layout, &mut |_, _| ())?;
    if let Some(history) = &built.history {
        let ticket = backend.submit(plan, history)?;
        backend.wait(ticket)?;
    }
    match built.moves.0 {
        BlockMoves::None => {}
        BlockMoves::Copy => backend.copy_blocks(&built.moves.1)?,
        BlockMoves::ReadWrite => {
            let mut bytes = Vec::new();
            for &(from, to) in &built.moves.1 {
                for layer in (0..built.program.states.len()).map(|l| crate::ids::Layer(l as u32)) {
                    backend.read_block(layer, from, &mut bytes)?;
                    backend.write_block(layer, to, &bytes)?;
                }
            }
        }
    }
    let ticket = backend.submit(plan, &built.step)?;
    let output = backend.wait(ticket)?;
    Ok(match built.observed {
        Observed::Logits => output.logits.to_vec(),
        Observed::Samples => sample::values(built, output.samples),
        Observed::NonFinite => output.non_finite.iter().map(|&flag| if flag == 0 { 0.0 } else { 1.0 }).collect(),
    })
}

impl Tolerance {
    /// `Err` says how far `got` is from `expected` when that is too far.
    ///
    /// # Errors
    /// The message for a failed test.
    pub fn check(&self, got: &[f32], expected: &[f32]) -> Result<(), String> {
        if got.len() != expected.len() {
            return Err(format!("{} values, expected {}", got.len(), expected.len()));
        }
        let mean_square = |sum: f64| (sum / expected.len().max(1) as f64).sqrt();
        let scale = mean_square(expected.iter().map(|&e| f64::from(e).powi(2)).sum()).max(f64::from(f32::MIN_POSITIVE));
        let errors = || got.iter().zip(expected).map(|(&g, &e)| (f64::from(g) - f64::from(e)).abs());
        let rms = mean_square(errors().map(|e| e * e).sum()) / scale;
        let (at, max) = errors().enumerate().fold((0, 0.0), |worst, (i, e)| if e <= worst.1 { worst } else { (i, e) });
        let max = max / scale;
        // Written so that a NaN fails.
        if rms <= f64::from(self.relative_rms) && max <= f64::from(self.relative_max) {
            return Ok(());
        }
        let (g, e) = (got.get(at).copied().unwrap_or_default(), expected.get(at).copied().unwrap_or_default());
        Err(format!(
            "relative rms error {rms:.2e} (allowed {:.0e}), relative max error {max:.2e} (allowed {:.0e}) at {at}: \
             got {g}, expected {e}",
            self.relative_rms, self.relative_max
        ))
    }
}
