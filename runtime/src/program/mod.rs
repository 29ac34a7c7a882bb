//! The forward pass as data: a straight-line `Program` of a dozen op kinds over named slots.
//!
//! Invariant: no branch, no loop, no readback, and nothing that changes from step to step is a field of an op: such
//! values live in the step inputs. An architecture (`model/`) writes a program once; a backend lowers it; the reference
//! interpreter runs it. `check` refuses a bad one at load, `memory` places its slots, `segment` cuts it for replay.

mod access;
pub mod check;
mod dump;
pub mod memory;
pub mod segment;
mod state;

pub use access::{Access, AccessKind};
pub use state::{KvDtype, Plane, StateSpec};

use serde::Serialize;

use crate::ids::{Layer, Slot, WeightId};

/// The leading dimension of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum RowDim {
    /// One row per token of the step.
    Tokens,
    /// One row per token whose logits are asked for.
    LogitRows,
}

/// A planned activation: `[rows, width]` of f32, row-major.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotInfo {
    /// For dumps and errors, e.g. `l3.qkv`.
    pub name: String,
    /// What a row is.
    pub rows: RowDim,
    /// Elements per row.
    pub width: u32,
}

/// A column range of a slot: `[rows, width]` at `offset` within each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct View {
    /// The slot.
    pub slot: Slot,
    /// First column.
    pub offset: u32,
    /// Number of columns.
    pub width: u32,
}

/// An immutable tensor that the program reads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightInfo {
    /// The house name, e.g. `layers.3.attn.q`; the architecture's name table maps it to the file's.
    pub name: String,
    /// `[out_features, in_features]`, `[vocab, hidden]`, or `[n]` for vectors.
    pub shape: Vec<u32>,
}

/// Which elements of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum RopePairing {
    /// `(i, i + dim/2)`: Hugging Face files, GGUF of most families (NEOX).
    Half,
    /// `(2i, 2i + 1)`: GGUF of the llama family, whose Q and K rows the converter permuted (NORM).
    Interleaved,
}

/// The gate's nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// One matrix of a `Linear`: its output goes to the next `out_features` columns of the output slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LinearPart {
    /// `[out_features, in_features]`.
    pub weight: WeightId,
    /// `[out_features]`, added to the product.
    pub bias: Option<WeightId>,
}

/// The norm of a fused linear's input, as `RmsNorm` has it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FusedNorm {
    /// `[in_features]`.
    pub weight: WeightId,
    /// Added under the root.
    pub eps: f32,
    /// `[rows, in_features]`: room for the normed rows, for backends that run the expansion.
    pub normed: Slot,
}

/// What becomes of a fused linear's product. `product` is room for it, for backends that run the expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum LinearEnd {
    /// `out = product`.
    Store,
    /// `out = act(product[:, :n]) * product[:, n:]`, as `GatedActivation` has it.
    Gate {
        /// The gate's nonlinearity.
        activation: Activation,
        /// `[rows, 2n]`.
        product: Slot,
    },
    /// `out += product`.
    Add {
        /// `[rows, n]`.
        product: Slot,
    },
}

impl LinearEnd {
    /// Where the expansion puts the product; none where that is the linear's output itself.
    pub fn product(&self) -> Option<Slot> {
        match *self {
            Self::Store => None,
            Self::Gate { product, .. } | Self::Add { product } => Some(product),
        }
    }
}

/// Where an op's grid size comes from; every cut of a program for replay or capture follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Launch {
    /// The padded bucket size only.
    ByBucket,
    /// This step's lengths.
    ByStep,
}

/// One operation. All slots are f32; `tokens` and `logit_rows` are the leading dimensions (`RowDim`).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Op {
    /// `out[t] = table[token_ids[t]]`. Step input: token ids.
    Embed {
        /// `[vocab, hidden]`.
        table: WeightId,
        /// `[tokens, hidden]`.
        out: Slot,
    },
    /// `out = x / sqrt(mean(x^2) + eps) * weight`, per row.
    RmsNorm {
        /// `[rows, n]`.
        x: Slot,
        /// `[n]`.
        weight: WeightId,
        /// Added under the root.
        eps: f32,
        /// `[rows, n]`, another slot than `x`.
        out: Slot,
    },
    /// RMS norm of each head of `x`, in place (Qwen3's q and k norms).
    NormHeads {
        /// `[tokens, heads * head_dim]`, read and written.
        x: View,
        /// `[head_dim]`.
        weight: WeightId,
        /// Added under the root.
        eps: f32,
    },
    /// `residual += x`, in place.
    Add {
        /// `[rows, n]`, read and written.
        residual: Slot,
        /// `[rows, n]`.
        x: Slot,
    },
    /// `out = concat(x · partᵀ + bias, …)` along columns: q, k and v, or gate and up, share one read of `x`.
    Linear {
        /// `[rows, in_features]`.
        x: Slot,
        /// At least one; all with the same `in_features`.
        parts: Vec<LinearPart>,
        /// `[rows, sum of out_features]`.
        out: Slot,
    },
    /// Rotary embedding in place. Angle of pair i at position p is `p * inv_freq[i]`; step input: positions.
    Rope {
        /// `[tokens, heads * head_dim]`, read and written.
        x: View,
        /// `[head_dim / 2]`, scaling already in it; computed at load.
        inv_freq: WeightId,
        /// Which elements form a pair.
        pairing: RopePairing,
        /// Elements per head.
        head_dim: u32,
    },
    /// Rounds K and V to the cache's type and stores them. Step input: slot map (`block * block_size + offset` per token).
    StoreKv {
        /// `[tokens, kv_heads * head_dim]`.
        k: View,
        /// `[tokens, kv_heads * head_dim]`.
        v: View,
        /// Where to.
        layer: Layer,
    },
    /// Fused: turns q and k, then rounds and stores K and V. Expands to `Rope`, `StoreKv`.
    /// What the columns of k hold afterwards is open.
    RopeStoreKv {
        /// `[tokens, (heads + kv_heads) * head_dim]`: q, then k, which is as wide as `v`.
        x: View,
        /// `[tokens, kv_heads * head_dim]`.
        v: View,
        /// `[head_dim / 2]`, as `Rope` has it.
        inv_freq: WeightId,
        /// Which elements form a pair.
        pairing: RopePairing,
        /// Elements per head.
        head_dim: u32,
        /// Where K and V go.
        layer: Layer,
    },
    /// Attention over the paged cache only (the own chunk was stored before): `softmax(score) · v`, the score of a key being
    /// `scale * q · k`, capped, over the positions up to the token's own; in a tree row, over those of its path
    /// (`StepInputs::push_tree_row`). Step inputs: row starts, positions, KV lengths, block tables, tree masks.
    Attention {
        /// `[tokens, heads * head_dim]`.
        q: View,
        /// The K and V planes read.
        layer: Layer,
        /// Query heads; a multiple of the plane's heads.
        heads: u32,
        /// Elements per head.
        head_dim: u32,
        /// Multiplies q·k.
        scale: f32,
        /// Positions that a token sees, its own included, above 0: those above `position - window`.
        window: Option<u32>,
        /// Above 0: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2).
        soft_cap: Option<f32>,
        /// `[heads]`: a score per query head that joins the softmax's sum and has no value (Xiao et al. 2023, learned as in
        /// gpt-oss).
        sinks: Option<WeightId>,
        /// `[tokens, heads * head_dim]`.
        out: Slot,
    },
    /// `out = act(x[:, :n]) * x[:, n:]`.
    GatedActivation {
        /// `[tokens, 2n]`: gate, then up.
        x: Slot,
        /// The gate's nonlinearity.
        activation: Activation,
        /// `[tokens, n]`.
        out: Slot,
    },
    /// Fused: a linear with the norm of its input and what becomes of its product. Expands to `RmsNorm` where there is a
    /// norm, `Linear`, and what `end` says.
    FusedLinear {
        /// `[rows, in_features]`.
        x: Slot,
        /// What is done to `x` first.
        norm: Option<FusedNorm>,
        /// As `Linear` has them.
        parts: Vec<LinearPart>,
        /// What becomes of the product.
        end: LinearEnd,
        /// `[rows, n]`.
        out: Slot,
    },
    /// Raises `DeviceOutput::non_finite[t]` where a row of `x` holds a NaN or an infinity.
    CheckFinite {
        /// `[tokens, n]`.
        x: Slot,
    },
    /// `out[i] = x[logit_rows[i]]`. Step input: logit rows.
    SelectRows {
        /// `[tokens, n]`.
        x: Slot,
        /// `[logit_rows, n]`.
        out: Slot,
    },
    /// Writes `DeviceOutput::samples`: the drawn token, and what its log-probabilities need, of each logit row that is not
    /// read back. Step input: draws.
    Sample {
        /// `[logit_rows, vocab]`.
        logits: Slot,
    },
}

impl Op {
    /// Where this op's grid size comes from. Exhaustive: a new op must answer.
    pub fn launch(&self) -> Launch {
        match self {
            Self::Attention { .. } => Launch::ByStep,
            Self::Embed { .. }
            | Self::RmsNorm { .. }
            | Self::NormHeads { .. }
            | Self::Add { .. }
            | Self::Linear { .. }
            | Self::Rope { .. }
            | Self::StoreKv { .. }
            | Self::RopeStoreKv { .. }
            | Self::GatedActivation { .. }
            | Self::FusedLinear { .. }
            | Self::CheckFinite { .. }
            | Self::SelectRows { .. }
            | Self::Sample { .. } => Launch::ByBucket,
        }
    }

    /// The primitives that a fused op stands for, itself if it is one: what the reference runs.
    pub fn expand(&self) -> Vec<Op> {
        match *self {
            Self::RopeStoreKv { x, v, inv_freq, pairing, head_dim, layer } => {
                let k = View { offset: (x.offset + x.width).saturating_sub(v.width), width: v.width, ..x };
                vec![Self::Rope { x, inv_freq, pairing, head_dim }, Self::StoreKv { k, v, layer }]
            }
            Self::FusedLinear { x, norm, ref parts, end, out } => {
                let mut ops = Vec::new();
                let mut input = x;
                if let Some(FusedNorm { weight, eps, normed }) = norm {
                    ops.push(Self::RmsNorm { x, weight, eps, out: normed });
                    input = normed;
                }
                ops.push(Self::Linear { x: input, parts: parts.clone(), out: end.product().unwrap_or(out) });
                match end {
                    LinearEnd::Store => {}
                    LinearEnd::Gate { activation, product } => {
                        ops.push(Self::GatedActivation { x: product, activation, out });
                    }
                    LinearEnd::Add { product } => ops.push(Self::Add { residual: out, x: product }),
                }
                ops
            }
            _ => vec![self.clone()],
        }
    }
}

/// A forward pass: ops in order over slots, weights and per-layer state.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Program {
    /// The architecture's name.
    pub name: String,
    /// Indexed by `Slot`.
    pub slots: Vec<SlotInfo>,
    /// Indexed by `WeightId`.
    pub weights: Vec<WeightInfo>,
    /// Indexed by `Layer`.
    pub states: Vec<StateSpec>,
    /// In execution order.
    pub ops: Vec<Op>,
    /// `[logit_rows, vocab]`: of which the host may read rows after the last op.
    pub logits: Option<Slot>,
}
