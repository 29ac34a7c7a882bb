//! The ops of a program, and what every reader of a program wants to know of one: its launch, its expansion.
//!
//! Invariant: an op's formula stands here and nowhere else; the reference computes it as it is written, fused ops by their
//! expansion. The matches are exhaustive, so that a new op must answer.

use serde::Serialize;

use super::View;
use crate::ids::{Layer, Slot, WeightId};

/// Which elements of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum RopePairing {
    /// `(i, i + pairs)`: Hugging Face files, GGUF of most families (NEOX).
    Half,
    /// `(2i, 2i + 1)`: GGUF of the llama family, whose Q and K rows the converter permuted (NORM).
    Interleaved,
}

/// How RoPE turns heads (Su et al. 2021, "RoFormer"): the pair i of a head at position p by `p * inv_freq[i]`, scaled by
/// `amplitude`. Elements past the pairs stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rotary {
    /// `[pairs]`, at most `head_dim / 2`; scaling of the context already in it; computed at load.
    pub inv_freq: WeightId,
    /// Multiplies sines and cosines (YaRN's and LongRoPE's attention factor); 1 for most models.
    pub amplitude: f32,
    /// Which elements form a pair.
    pub pairing: RopePairing,
}

/// The gate's nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2` (Hendrycks and Gimpel 2016, the approximation).
    GeluTanh,
    /// gpt-oss: gates up to 7, ups within ±7; `gate * sigmoid(1.702 * gate) * (up + 1)` takes the place of the product.
    ClampedSwiglu,
}

/// How a token's logits over experts become chosen experts and their weights. Of equals the first is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Router {
    /// Experts of a token.
    pub top_k: u32,
    /// What a logit becomes.
    pub score: RouterScore,
    /// Experts lie in so many groups of one size, of which the best `top_groups` are chosen from; 1: no groups. A group is as
    /// good as its best expert, with sigmoids as its best two together (DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3").
    pub groups: u32,
    /// See `groups`.
    pub top_groups: u32,
    /// Whether a token's weights are divided by their sum.
    pub renormalise: bool,
    /// Multiplies the weights.
    pub scale: f32,
}

/// What a router's logit becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid.
    Sigmoid,
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
    /// `out[t] = table[token_ids[t]] * scale`. Step input: token ids.
    Embed {
        /// `[vocab, hidden]`.
        table: WeightId,
        /// 1 for most models.
        scale: f32,
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
    /// Rotary embedding in place. Step input: positions.
    Rope {
        /// `[tokens, heads * head_dim]`, read and written.
        x: View,
        /// By how much.
        rotary: Rotary,
        /// Elements per head.
        head_dim: u32,
    },
    /// Rounds K and V to the cache's type and stores them. Step input: slot map (`block * block_size + offset` per token).
    StoreKv {
        /// `[tokens, kv_heads * head_dim]`.
        k: View,
        /// `[tokens, kv_heads * head_dim]`; none where the layer's K is its V too.
        v: Option<View>,
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
        /// As `Rope` has it.
        rotary: Rotary,
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
    /// `out = act(gate) * up`, for each group of columns of `x`.
    GatedActivation {
        /// `[tokens, groups * 2n]`: a group's gates, then its ups.
        x: Slot,
        /// 1, or the experts of a token.
        groups: u32,
        /// The gate's nonlinearity.
        activation: Activation,
        /// `[tokens, groups * n]`.
        out: Slot,
    },
    /// Chooses each token's experts (Shazeer et al. 2017): `Router` has the formula.
    MoeRoute {
        /// `[tokens, experts]`.
        logits: Slot,
        /// `[experts]`: added to scores for the choice, not for the weights.
        bias: Option<WeightId>,
        /// How.
        router: Router,
        /// `[tokens, 2 * top_k]`: ids of experts, then their weights.
        out: Slot,
    },
    /// Each token's row times the matrices of its experts: `out[t, j] = concat(x · part[expert(t, j)]ᵀ + bias, …)`. Without a
    /// route there are as many choices as matrices, and choice j's is matrix j: the heads of an input, each with its own.
    MoeLinear {
        /// `[tokens, in_features]`, or an input for each choice, `[tokens, top_k * in_features]`.
        x: Slot,
        /// `[tokens, 2 * top_k]`, as `MoeRoute` has it.
        route: Option<Slot>,
        /// Weights `[experts, out_features, in_features]`, biases `[experts * out_features]`.
        parts: Vec<LinearPart>,
        /// `[tokens, top_k * sum of out_features]`.
        out: Slot,
    },
    /// `residual[t] += sum over j of weight(t, j) * x[t, j]`, in the order of j.
    MoeCombine {
        /// `[tokens, top_k * n]`.
        x: Slot,
        /// `[tokens, 2 * top_k]`, as `MoeRoute` has it.
        route: Slot,
        /// `[tokens, n]`, read and written.
        residual: Slot,
    },
    /// `out[t, k] = x[t, order[k]]`: the inputs of a linear whose weights were quantised in another order.
    GatherColumns {
        /// `[rows, n]`.
        x: Slot,
        /// `[n]`: numbers of columns, whole, exact in f32.
        order: WeightId,
        /// `[rows, n]`, another slot than `x`.
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
    /// `x[t] *= 1 + beta * ln(1 + floor(position / period))`, in place: queries that grow with the context (Ministral 3, after
    /// Llama 4). Step input: positions.
    ScaleByPosition {
        /// `[tokens, n]`, read and written.
        x: View,
        /// Above 0.
        beta: f32,
        /// Positions over which the factor stays the same.
        period: u32,
    },
    /// `x = cap * tanh(x / cap)`, in place (Gemma 2's logits).
    SoftCap {
        /// `[rows, n]`, read and written.
        x: Slot,
        /// Above 0.
        cap: f32,
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
            Self::Attention { .. } | Self::MoeLinear { .. } => Launch::ByStep,
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
            | Self::GatherColumns { .. }
            | Self::MoeRoute { .. }
            | Self::MoeCombine { .. }
            | Self::ScaleByPosition { .. }
            | Self::SoftCap { .. }
            | Self::CheckFinite { .. }
            | Self::SelectRows { .. }
            | Self::Sample { .. } => Launch::ByBucket,
        }
    }

    /// The primitives that a fused op stands for, itself if it is one: what the reference runs.
    pub fn expand(&self) -> Vec<Op> {
        match *self {
            Self::RopeStoreKv { x, v, rotary, head_dim, layer } => {
                let k = View { offset: (x.offset + x.width).saturating_sub(v.width), width: v.width, ..x };
                vec![Self::Rope { x, rotary, head_dim }, Self::StoreKv { k, v: Some(v), layer }]
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
                        ops.push(Self::GatedActivation { x: product, groups: 1, activation, out });
                    }
                    LinearEnd::Add { product } => ops.push(Self::Add { residual: out, x: product }),
                }
                ops
            }
            _ => vec![self.clone()],
        }
    }
}
