//! What architectures share: a builder that finds tensors by house name, and the blocks of a decoder.
//!
//! Invariant: a tensor's shape is checked against the program where it is bound, and a tensor of the file that nothing
//! reads is an error: a bias or norm that this build ignored would change the answer. Called by the architectures.

use std::collections::HashMap;

use super::config::DecoderConfig;
use super::{Model, ModelInfo};
use crate::error::LoadError;
use crate::ids::{Layer, Slot, WeightId};
use crate::program::{
    Activation, FusedNorm, KvDtype, LinearEnd, LinearPart, Op, Plane, Program, RopePairing, RowDim, SlotInfo,
    StateSpec, View, WeightInfo, check::check,
};
use crate::weights::{Checkpoint, Container, HostTensor, WeightFormat};

/// One tensor's names, without `.weight` or `.bias`; `{i}` is the layer.
pub(super) struct Name {
    /// In programs and dumps.
    pub house: &'static str,
    /// In GGUF files.
    pub gguf: &'static str,
    /// In Hugging Face files.
    pub hf: &'static str,
}

/// What a decoder has besides its sizes.
pub(super) struct DecoderSpec {
    /// The architecture's house name.
    pub architecture: &'static str,
    /// Where its tensors are.
    pub names: &'static [Name],
    /// Norms of each head of q and k before RoPE.
    pub qk_norm: bool,
    /// Which pairs RoPE turns in this file.
    pub pairing: RopePairing,
}

/// A tensor that some program reads or that may be ignored, by the end of its name in the file.
const IGNORED: &[&str] = &["rotary_emb.inv_freq"];

/// A program and its tensors in the making.
struct Builder<'a> {
    checkpoint: &'a Checkpoint,
    names: &'static [Name],
    program: Program,
    weights: Vec<HostTensor>,
    /// By name in the file.
    bound: HashMap<String, WeightId>,
}

/// One matrix of a linear, by house name.
struct Part<'a> {
    name: &'a str,
    out_features: u32,
    /// `None`: if the file has one.
    bias: Option<bool>,
}

/// The pre-norm decoder of Llama and its kin: attention and gated MLP around one residual, RMS norms, grouped queries.
pub(super) fn decoder(
    checkpoint: &Checkpoint,
    kv_dtype: KvDtype,
    config: &DecoderConfig,
    spec: &DecoderSpec,
) -> Result<Model, LoadError> {
    let mut builder = Builder::new(checkpoint, spec);
    let vocab = builder.vocab_size("embed", config)?;
    let table = builder.weight("embed", &[vocab, config.hidden])?;
    let inv_freq = builder.inv_freq(config)?;
    let residual = builder.slot("residual", RowDim::Tokens, config.hidden);
    builder.push(Op::Embed { table, out: residual });
    for i in 0..config.num_layers {
        builder.attention(i, residual, Attention { config, spec, inv_freq, kv_dtype })?;
        builder.mlp(i, residual, config)?;
    }
    builder.head(residual, table, vocab, config)?;
    builder.finish(vocab, config, spec)
}

/// What an attention block is built from.
struct Attention<'a> {
    config: &'a DecoderConfig,
    spec: &'a DecoderSpec,
    inv_freq: WeightId,
    kv_dtype: KvDtype,
}

impl<'a> Builder<'a> {
    fn new(checkpoint: &'a Checkpoint, spec: &DecoderSpec) -> Self {
        let program = Program { name: spec.architecture.into(), ..Program::default() };
        Self { checkpoint, names: spec.names, program, weights: Vec::new(), bound: HashMap::new() }
    }

    fn push(&mut self, op: Op) {
        self.program.ops.push(op);
    }

    fn slot(&mut self, name: &str, rows: RowDim, width: u32) -> Slot {
        self.program.slots.push(SlotInfo { name: name.into(), rows, width });
        Slot(self.program.slots.len() as u32 - 1)
    }

    /// The name in the file of `layers.3.attn.q` and the like, with `.weight` or `.bias`.
    fn file_name(&self, house: &str, suffix: &str) -> String {
        let layer = house.strip_prefix("layers.").and_then(|rest| rest.split('.').next()).unwrap_or_default();
        let row = self.names.iter().find(|name| name.house.replace("{i}", layer) == house);
        let row = row.unwrap_or_else(|| panic!("'{house}' is not in the architecture's name table"));
        let stem = match self.checkpoint.container {
            Container::Gguf(_) => row.gguf,
            Container::HuggingFace { .. } => row.hf,
        };
        format!("{}.{suffix}", stem.replace("{i}", layer))
    }

    fn tensor_error(&self, tensor: &str, expected: impl Into<String>, got: impl Into<String>) -> LoadError {
        let (path, tensor) = (self.checkpoint.path.clone(), tensor.into());
        LoadError::Tensor { path, tensor, expected: expected.into(), got: got.into() }
    }

    /// Rows of the embedding; a config that says another number is wrong.
    fn vocab_size(&self, house: &str, config: &DecoderConfig) -> Result<u32, LoadError> {
        let name = self.file_name(house, "weight");
        let shape = match self.checkpoint.tensors.get(&name) {
            Some(tensor) => tensor.shape.as_slice(),
            None if self.checkpoint.dummy => &[config.vocab_size.unwrap_or(0) as usize],
            None => return Err(self.tensor_error(&name, "a matrix", "nothing")),
        };
        let rows = shape.first().and_then(|&rows| u32::try_from(rows).ok()).unwrap_or(0);
        let expected = config.vocab_size.unwrap_or(rows);
        if rows == 0 || rows != expected {
            return Err(self.tensor_error(&name, format!("{expected} rows (vocab_size)"), format!("{shape:?}")));
        }
        Ok(rows)
    }

    fn weight(&mut self, house: &str, shape: &[u32]) -> Result<WeightId, LoadError> {
        self.bind(house, self.file_name(house, "weight"), shape)
    }

    /// Binds a tensor of the file under a house name, once.
    fn bind(&mut self, house: &str, file_name: String, shape: &[u32]) -> Result<WeightId, LoadError> {
        let expected: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        let tensor = match self.checkpoint.tensors.get(&file_name) {
            Some(tensor) => tensor.clone(),
            None if self.checkpoint.dummy => made_up(&file_name, expected.clone(), self.weights.len() as u64),
            None => return Err(self.tensor_error(&file_name, format!("shape {expected:?}"), "nothing")),
        };
        if tensor.shape != expected {
            return Err(self.tensor_error(&file_name, format!("shape {expected:?}"), format!("{:?}", tensor.shape)));
        }
        if shape.len() == 1 && tensor.format.block_len() != 1 {
            return Err(self.tensor_error(&file_name, "a vector of floats", format!("{:?}", tensor.format)));
        }
        let id = self.add(house, tensor);
        self.bound.insert(file_name, id);
        Ok(id)
    }

    fn add(&mut self, house: &str, tensor: HostTensor) -> WeightId {
        let shape = tensor.shape.iter().map(|&d| d as u32).collect();
        self.program.weights.push(WeightInfo { name: house.into(), shape });
        self.weights.push(tensor);
        WeightId(self.weights.len() as u32 - 1)
    }

    /// RoPE's frequencies; a GGUF file of the Llama 3 kind has a divisor for each.
    fn inv_freq(&mut self, config: &DecoderConfig) -> Result<WeightId, LoadError> {
        const FACTORS: &str = "rope_freqs.weight";
        let mut inv_freq = config.rope.inv_freq(config.head_dim);
        if let Some(factors) = self.checkpoint.tensors.get(FACTORS) {
            if factors.shape != [inv_freq.len()] {
                let expected = format!("shape [{}]", inv_freq.len());
                return Err(self.tensor_error(FACTORS, expected, format!("{:?}", factors.shape)));
            }
            let factors = factors.to_f32();
            if let Some(bad) = factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
                return Err(self.tensor_error(FACTORS, "positive numbers", bad.to_string()));
            }
            inv_freq.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
        if let Some(bad) = inv_freq.iter().find(|frequency| !frequency.is_finite()) {
            let (path, problem) = (self.checkpoint.path.clone(), format!("{:?} makes a frequency {bad}", config.rope));
            return Err(LoadError::Config { path, key: "rope".into(), problem });
        }
        let tensor = HostTensor::from_f32("rope.inv_freq", vec![inv_freq.len()], &inv_freq);
        let id = self.add("rope.inv_freq", tensor);
        self.bound.insert(FACTORS.into(), id);
        Ok(id)
    }

    /// The matrix of a linear over `in_features`, with its bias.
    fn part(&mut self, part: &Part<'_>, in_features: u32) -> Result<LinearPart, LoadError> {
        let weight = self.weight(part.name, &[part.out_features, in_features])?;
        let bias = self.file_name(part.name, "bias");
        let has_bias = part.bias.unwrap_or_else(|| self.checkpoint.tensors.contains_key(&bias));
        let bias = has_bias.then(|| self.bind(&format!("{}.bias", part.name), bias, &[part.out_features]));
        Ok(LinearPart { weight, bias: bias.transpose()? })
    }

    /// The norm that a block begins with, for the linear that reads it.
    fn norm(&mut self, house: &str, normed: &str, config: &DecoderConfig) -> Result<FusedNorm, LoadError> {
        let weight = self.weight(house, &[config.hidden])?;
        Ok(FusedNorm { weight, eps: config.rms_eps, normed: self.slot(normed, RowDim::Tokens, config.hidden) })
    }

    /// `residual += x · partᵀ`, as a block ends.
    fn add_linear(&mut self, residual: Slot, x: Slot, product: &str, part: &Part<'_>) -> Result<(), LoadError> {
        let part = self.part(part, self.program.slots[x.index()].width)?;
        let SlotInfo { rows, width, .. } = self.program.slots[residual.index()];
        let end = LinearEnd::Add { product: self.slot(product, rows, width) };
        self.push(Op::FusedLinear { x, norm: None, parts: vec![part], end, out: residual });
        Ok(())
    }

    /// Norm, q, k and v in one slot, RoPE over q and k as neighbours with the store, attend, project, add.
    fn attention(&mut self, i: u32, residual: Slot, block: Attention<'_>) -> Result<(), LoadError> {
        let Attention { config, spec, inv_freq, kv_dtype } = block;
        let DecoderConfig { heads, kv_heads, head_dim, .. } = *config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let house = |name: &str| format!("layers.{i}.attn.{name}");
        let bias = config.attention_bias;
        let norm = self.norm(&house("norm"), &format!("l{i}.attn_in"), config)?;
        let mut parts = Vec::new();
        for (name, out_features) in [("q", q_width), ("k", kv_width), ("v", kv_width)] {
            parts.push(self.part(&Part { name: &house(name), out_features, bias }, config.hidden)?);
        }
        let qkv = self.slot(&format!("l{i}.qkv"), RowDim::Tokens, q_width + 2 * kv_width);
        self.push(Op::FusedLinear { x: residual, norm: Some(norm), parts, end: LinearEnd::Store, out: qkv });
        let view = |offset, width| View { slot: qkv, offset, width };
        let (q, k, v) = (view(0, q_width), view(q_width, kv_width), view(q_width + kv_width, kv_width));
        if spec.qk_norm {
            for (name, x) in [("q_norm", q), ("k_norm", k)] {
                let weight = self.weight(&house(name), &[head_dim])?;
                self.push(Op::NormHeads { x, weight, eps: config.rms_eps });
            }
        }
        let plane = Plane { heads: kv_heads, dim: head_dim, dtype: kv_dtype };
        self.program.states.push(StateSpec::kv(plane));
        let layer = Layer(i);
        let pairing = spec.pairing;
        self.push(Op::RopeStoreKv { x: view(0, q_width + kv_width), v, inv_freq, pairing, head_dim, layer });
        let out = self.slot(&format!("l{i}.attn"), RowDim::Tokens, q_width);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (window, soft_cap, sinks) = (None, None, None);
        self.push(Op::Attention { q, layer, heads, head_dim, scale, window, soft_cap, sinks, out });
        let part = Part { name: &house("o"), out_features: config.hidden, bias };
        self.add_linear(residual, out, &format!("l{i}.attn_out"), &part)
    }

    fn mlp(&mut self, i: u32, residual: Slot, config: &DecoderConfig) -> Result<(), LoadError> {
        let house = |name: &str| format!("layers.{i}.mlp.{name}");
        let (n, bias) = (config.intermediate, config.mlp_bias);
        let norm = self.norm(&house("norm"), &format!("l{i}.mlp_in"), config)?;
        let gate = self.part(&Part { name: &house("gate"), out_features: n, bias }, config.hidden)?;
        let up = self.part(&Part { name: &house("up"), out_features: n, bias }, config.hidden)?;
        let product = self.slot(&format!("l{i}.gate_up"), RowDim::Tokens, 2 * n);
        let gated = self.slot(&format!("l{i}.gated"), RowDim::Tokens, n);
        let end = LinearEnd::Gate { activation: Activation::Silu, product };
        self.push(Op::FusedLinear { x: residual, norm: Some(norm), parts: vec![gate, up], end, out: gated });
        let part = Part { name: &house("down"), out_features: config.hidden, bias };
        self.add_linear(residual, gated, &format!("l{i}.mlp_out"), &part)
    }

    /// Final norm and vocabulary projection of the chosen rows, and the draw. A vocabulary has so many rows that every
    /// workgroup's norm of its own would cost more than a dispatch.
    fn head(&mut self, residual: Slot, table: WeightId, vocab: u32, config: &DecoderConfig) -> Result<(), LoadError> {
        self.push(Op::CheckFinite { x: residual });
        let last = self.slot("last", RowDim::LogitRows, config.hidden);
        self.push(Op::SelectRows { x: residual, out: last });
        let normed = self.slot("normed", RowDim::LogitRows, config.hidden);
        let weight = self.weight("norm", &[config.hidden])?;
        self.push(Op::RmsNorm { x: last, weight, eps: config.rms_eps, out: normed });
        let weight = if config.tied { table } else { self.weight("head", &[vocab, config.hidden])? };
        if config.tied {
            // A tied file may hold the head a second time.
            self.bound.insert(self.file_name("head", "weight"), table);
        }
        let logits = self.slot("logits", RowDim::LogitRows, vocab);
        self.push(Op::Linear { x: normed, parts: vec![LinearPart { weight, bias: None }], out: logits });
        self.push(Op::Sample { logits });
        self.program.logits = Some(logits);
        Ok(())
    }

    fn finish(self, vocab: u32, config: &DecoderConfig, spec: &DecoderSpec) -> Result<Model, LoadError> {
        let mut names: Vec<&String> = self.checkpoint.tensors.keys().collect();
        names.sort_unstable();
        let is_known = |name: &str| self.bound.contains_key(name) || IGNORED.iter().any(|end| name.ends_with(end));
        if let Some(name) = names.into_iter().find(|name| !is_known(name)) {
            return Err(LoadError::Unsupported {
                path: self.checkpoint.path.clone(),
                what: "tensor",
                name: name.clone(),
                supported: format!("the tensors of {}", spec.architecture),
            });
        }
        check(&self.program, &self.checkpoint.path)?;
        let in_file = |w: &&HostTensor| w.name != "rope.inv_freq";
        let num_elements = |w: &HostTensor| w.shape.iter().product::<usize>() as u64;
        let info = ModelInfo {
            architecture: spec.architecture,
            vocab_size: vocab,
            max_position: config.max_position,
            num_parameters: self.weights.iter().filter(in_file).map(num_elements).sum(),
            num_layers: config.num_layers,
            hidden: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        Ok(Model { program: self.program, weights: self.weights, info })
    }
}

/// A tensor for `--load-format dummy`: bf16, matrices uniform in ±0.05 (by a 64-bit LCG, the same every time), vectors 1.
fn made_up(name: &str, shape: Vec<usize>, seed: u64) -> HostTensor {
    let (len, is_vector) = (shape.iter().product::<usize>(), shape.len() == 1);
    let mut state = seed;
    let values = (0..len).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = (state >> 40) as f32 / (1u32 << 24) as f32;
        half::bf16::from_f32(if is_vector { 1.0 } else { 0.1 * uniform - 0.05 }).to_le_bytes()
    });
    HostTensor::owned(name, WeightFormat::Bf16, shape, values.collect::<Vec<u8>>())
}
