//! The blocks of a decoder: attention and gated MLP around one residual, RMS norms, grouped queries.
//!
//! Invariant: what families have besides sizes is a field of `DecoderSpec` or `LayerSpec`; no family's name stands here.
//! Called by the architectures.

use super::builder::{Builder, Part};
use super::config::DecoderConfig;
use super::experts::ExpertsSpec;
use super::latent::LatentSpec;
use super::names::Name;
use super::rope::RopeTable;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::ids::{Layer, Slot, WeightId};
use crate::program::{
    Activation, FusedNorm, LinearEnd, LinearPart, Op, Plane, RopePairing, Rotary, RowDim, SlotInfo, StateSpec, View,
};
use crate::weights::Checkpoint;

/// What a decoder has besides its sizes.
pub(super) struct DecoderSpec {
    /// The architecture's house name.
    pub architecture: &'static str,
    /// Where its tensors are.
    pub names: &'static [&'static [Name]],
    /// Which pairs RoPE turns in this file.
    pub pairing: RopePairing,
    /// Rotary embeddings that layers choose among, with the names of their tables.
    pub ropes: Vec<(&'static str, RopeTable)>,
    /// One per layer.
    pub layers: Vec<LayerSpec>,
    /// Norms of each head of q and k before RoPE.
    pub qk_norm: bool,
    /// Whether q, k and v are one matrix, and gate and up another.
    pub is_fused: bool,
    /// Norms of what attention and MLP give before it is added.
    pub post_norms: bool,
    /// Added to every norm's weight as it is stored.
    pub norm_offset: f32,
    /// Biases; `None`: where the file has them.
    pub biases: Biases,
    /// Multiplies q·k.
    pub attention_scale: f32,
    /// Soft cap of scores.
    pub attention_cap: Option<f32>,
    /// Multiplies embeddings.
    pub embed_scale: f32,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
    /// The gate's nonlinearity.
    pub activation: Activation,
    /// Growth of queries with the context: `Op::ScaleByPosition`'s beta and period.
    pub query_growth: Option<(f32, u32)>,
    /// A learned score per head that joins each softmax.
    pub sinks: bool,
    /// Of the layers that have experts.
    pub experts: Option<ExpertsSpec>,
    /// Attention over latent rows, in all layers.
    pub latent: Option<LatentSpec>,
    /// Layers of the file past the last: they predict further tokens (DeepSeek-AI 2024, "DeepSeek-V3", 2.2), which is not built.
    pub unread_layers: u32,
}

/// Which linears have biases; `None`: look whether the tensors are there.
#[derive(Clone, Copy, Default)]
pub(super) struct Biases {
    pub qkv: Option<bool>,
    pub o: Option<bool>,
    pub mlp: Option<bool>,
}

/// What layers of one model may differ in.
#[derive(Clone, Copy)]
pub(super) struct LayerSpec {
    /// Positions that a token sees, its own included.
    pub window: Option<u32>,
    /// Index into `DecoderSpec::ropes`.
    pub rope: Option<usize>,
    /// Whether experts take the place of the MLP.
    pub has_experts: bool,
}

impl DecoderSpec {
    /// Llama's decoder: the fields that most families share.
    pub fn plain(architecture: &'static str, names: &'static [&'static [Name]], config: &DecoderConfig) -> Self {
        Self {
            architecture,
            names,
            pairing: RopePairing::Half,
            ropes: Vec::new(),
            layers: vec![LayerSpec { window: None, rope: Some(0), has_experts: false }; config.num_layers as usize],
            qk_norm: false,
            is_fused: false,
            post_norms: false,
            norm_offset: 0.0,
            biases: Biases::default(),
            attention_scale: 1.0 / (config.head_dim as f32).sqrt(),
            attention_cap: None,
            embed_scale: 1.0,
            logit_cap: None,
            activation: Activation::Silu,
            query_growth: None,
            sinks: false,
            experts: None,
            latent: None,
            unread_layers: 0,
        }
    }

    /// With one rotary embedding for all layers.
    pub fn with_rope(mut self, table: RopeTable) -> Self {
        self.ropes = vec![("rope.inv_freq", table)];
        self
    }

    /// With experts in these layers.
    pub fn with_experts(mut self, has_experts: impl Fn(u32) -> bool) -> Self {
        self.layers.iter_mut().enumerate().for_each(|(i, layer)| layer.has_experts = has_experts(i as u32));
        self
    }

    /// With these windows, one per layer; one that no context outgrows is none.
    pub fn with_windows(mut self, windows: &[Option<u32>], config: &DecoderConfig) -> Self {
        for (layer, window) in self.layers.iter_mut().zip(windows) {
            layer.window = window.filter(|&window| window < config.max_position);
        }
        self
    }
}

/// Builds a decoder.
pub(super) fn decoder(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    config: &DecoderConfig,
    spec: &DecoderSpec,
) -> Result<Model, LoadError> {
    let mut builder = Builder::new(checkpoint, options, spec.architecture, spec.names);
    let vocab = builder.vocab_size("embed", config)?;
    let table = builder.weight("embed", &[vocab, config.hidden])?;
    let mut ropes = Vec::new();
    for (name, rope) in &spec.ropes {
        ropes.push(builder.rotary(name, rope, spec.pairing)?);
    }
    let residual = builder.slot("residual", RowDim::Tokens, config.hidden);
    builder.push(Op::Embed { table, scale: spec.embed_scale, out: residual });
    let mut decoder = Decoder { builder, options, config, spec, ropes, residual };
    for (i, layer) in spec.layers.iter().enumerate() {
        match spec.latent {
            Some(latent) => decoder.latent_attention(i as u32, layer, latent)?,
            None => decoder.attention(i as u32, layer)?,
        }
        match spec.experts.as_ref().filter(|_| layer.has_experts) {
            Some(experts) => decoder.experts(i as u32, experts)?,
            None => decoder.mlp(i as u32)?,
        }
    }
    decoder.head(table, vocab)?;
    decoder.builder.ignore_layers(config.num_layers, spec.unread_layers);
    decoder.builder.finish(vocab, config)
}

/// A decoder in the making.
pub(super) struct Decoder<'a> {
    pub builder: Builder<'a>,
    pub options: &'a LoadOptions,
    pub config: &'a DecoderConfig,
    pub spec: &'a DecoderSpec,
    pub ropes: Vec<Rotary>,
    pub residual: Slot,
}

impl Decoder<'_> {
    /// The norm that a block begins with, for the linear that reads it.
    pub fn norm(&mut self, house: &str, normed: &str) -> Result<FusedNorm, LoadError> {
        let weight = self.builder.norm_weight(house, self.config.hidden, self.spec.norm_offset)?;
        let normed = self.builder.slot(normed, RowDim::Tokens, self.config.hidden);
        Ok(FusedNorm { weight, eps: self.config.rms_eps, normed })
    }

    /// `residual += x · partᵀ`, normed before it is added where the family does so, as a block ends.
    pub fn add_linear(&mut self, x: Slot, block: &str, product: &str, part: &Part<'_>) -> Result<(), LoadError> {
        let part = self.builder.part(part, self.builder.width(x))?;
        let out = self.residual;
        let SlotInfo { rows, width, .. } = self.builder.program.slots[out.index()];
        let product_slot = self.builder.slot(product, rows, width);
        if !self.spec.post_norms {
            let end = LinearEnd::Add { product: product_slot };
            self.builder.push(Op::FusedLinear { x, norm: None, parts: vec![part], end, out });
            return Ok(());
        }
        self.builder.push(Op::Linear { x, parts: vec![part], out: product_slot });
        let FusedNorm { weight, eps, normed } =
            self.norm(&format!("{block}.post_norm"), &format!("{product}_normed"))?;
        self.builder.push(Op::RmsNorm { x: product_slot, weight, eps, out: normed });
        self.builder.push(Op::Add { residual: out, x: normed });
        Ok(())
    }

    /// Norm, q, k and v in one slot, RoPE over q and k as neighbours with the store, attend, project, add.
    fn attention(&mut self, i: u32, layer: &LayerSpec) -> Result<(), LoadError> {
        let (config, spec) = (self.config, self.spec);
        let DecoderConfig { heads, kv_heads, head_dim, .. } = *config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let house = |name: &str| format!("layers.{i}.attn.{name}");
        let norm = self.norm(&house("norm"), &format!("l{i}.attn_in"))?;
        let separate: &[(&str, u32)] = &[("q", q_width), ("k", kv_width), ("v", kv_width)];
        let parts = if spec.is_fused { &[("qkv", q_width + 2 * kv_width)] } else { separate };
        let parts = self.parts(parts.iter().map(|&(name, rows)| (house(name), rows)), spec.biases.qkv)?;
        let qkv = self.builder.slot(&format!("l{i}.qkv"), RowDim::Tokens, q_width + 2 * kv_width);
        let x = self.residual;
        self.builder.push(Op::FusedLinear { x, norm: Some(norm), parts, end: LinearEnd::Store, out: qkv });
        let view = |offset, width| View { slot: qkv, offset, width };
        let (q, k, v) = (view(0, q_width), view(q_width, kv_width), view(q_width + kv_width, kv_width));
        if spec.qk_norm {
            for (name, x) in [("q_norm", q), ("k_norm", k)] {
                let weight = self.builder.norm_weight(&house(name), head_dim, spec.norm_offset)?;
                self.builder.push(Op::NormHeads { x, weight, eps: config.rms_eps });
            }
        }
        let plane = Plane { heads: kv_heads, dim: head_dim, dtype: self.options.kv_dtype };
        self.builder.program.states.push(StateSpec::kv(plane));
        let state = Layer(i);
        self.builder.push(match layer.rope {
            Some(rope) => {
                let (x, rotary) = (view(0, q_width + kv_width), self.ropes[rope]);
                Op::RopeStoreKv { x, v, rotary, head_dim, layer: state }
            }
            None => Op::StoreKv { k, v: Some(v), layer: state },
        });
        if let Some((beta, period)) = spec.query_growth {
            self.builder.push(Op::ScaleByPosition { x: q, beta, period });
        }
        let out = self.builder.slot(&format!("l{i}.attn"), RowDim::Tokens, q_width);
        let sinks = spec.sinks.then(|| self.sinks(&house("sinks"))).transpose()?;
        let (scale, window, soft_cap) = (spec.attention_scale, layer.window, spec.attention_cap);
        self.builder.push(Op::Attention { q, layer: state, heads, head_dim, scale, window, soft_cap, sinks, out });
        let part = Part { name: &house("o"), out_features: config.hidden, bias: spec.biases.o };
        self.add_linear(out, &format!("layers.{i}.attn"), &format!("l{i}.attn_out"), &part)
    }

    fn sinks(&mut self, house: &str) -> Result<WeightId, LoadError> {
        let name = self.builder.bare_name(house, "weight");
        self.builder.bind(house, name, &[self.config.heads])
    }

    /// Matrices that read one input, with their rows.
    fn parts(
        &mut self,
        parts: impl Iterator<Item = (String, u32)>,
        bias: Option<bool>,
    ) -> Result<Vec<LinearPart>, LoadError> {
        let hidden = self.config.hidden;
        parts.map(|(name, out_features)| self.builder.part(&Part { name: &name, out_features, bias }, hidden)).collect()
    }

    fn mlp(&mut self, i: u32) -> Result<(), LoadError> {
        let (n, spec) = (self.config.intermediate, self.spec);
        let house = |name: &str| format!("layers.{i}.mlp.{name}");
        let norm = self.norm(&house("norm"), &format!("l{i}.mlp_in"))?;
        let parts: &[(&str, u32)] = if spec.is_fused { &[("gate_up", 2 * n)] } else { &[("gate", n), ("up", n)] };
        let parts = self.parts(parts.iter().map(|&(name, rows)| (house(name), rows)), spec.biases.mlp)?;
        let product = self.builder.slot(&format!("l{i}.gate_up"), RowDim::Tokens, 2 * n);
        let gated = self.builder.slot(&format!("l{i}.gated"), RowDim::Tokens, n);
        let (x, end) = (self.residual, LinearEnd::Gate { activation: spec.activation, product });
        self.builder.push(Op::FusedLinear { x, norm: Some(norm), parts, end, out: gated });
        let part = Part { name: &house("down"), out_features: self.config.hidden, bias: spec.biases.mlp };
        self.add_linear(gated, &format!("layers.{i}.mlp"), &format!("l{i}.mlp_out"), &part)
    }

    /// Final norm and vocabulary projection of the chosen rows, and the draw. A vocabulary has so many rows that every
    /// workgroup's norm of its own would cost more than a dispatch.
    fn head(&mut self, table: WeightId, vocab: u32) -> Result<(), LoadError> {
        let (config, builder) = (self.config, &mut self.builder);
        builder.push(Op::CheckFinite { x: self.residual });
        let last = builder.slot("last", RowDim::LogitRows, config.hidden);
        builder.push(Op::SelectRows { x: self.residual, out: last });
        let normed = builder.slot("normed", RowDim::LogitRows, config.hidden);
        let weight = builder.norm_weight("norm", config.hidden, self.spec.norm_offset)?;
        builder.push(Op::RmsNorm { x: last, weight, eps: config.rms_eps, out: normed });
        let weight = if config.tied { table } else { builder.weight("head", &[vocab, config.hidden])? };
        if config.tied {
            // A tied file may hold the head a second time.
            builder.ignore(builder.file_name("head", "weight"));
        }
        let logits = builder.slot("logits", RowDim::LogitRows, vocab);
        builder.push(Op::Linear { x: normed, parts: vec![LinearPart { weight, bias: None }], out: logits });
        if let Some(cap) = self.spec.logit_cap {
            builder.push(Op::SoftCap { x: logits, cap });
        }
        builder.push(Op::Sample { logits });
        builder.program.logits = Some(logits);
        Ok(())
    }
}
