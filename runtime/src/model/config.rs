//! A checkpoint's configuration under one set of names, whichever container it comes from.
//!
//! Invariant: every number is range-checked here, and what this build cannot honour (an unknown RoPE type, another
//! activation, a sliding window, experts) is an error that names the key, never ignored. Called by the architectures.

use serde_json::Value;

use super::rope::{RopeConfig, RopeScaling};
use crate::error::LoadError;
use crate::weights::gguf::Metadata;
use crate::weights::{Checkpoint, Container};

/// The same setting's key in `config.json` and, after `<architecture>.`, in GGUF metadata.
#[derive(Clone, Copy)]
pub(super) struct Key {
    hf: &'static str,
    gguf: &'static str,
}

const HIDDEN: Key = Key { hf: "hidden_size", gguf: "embedding_length" };
const LAYERS: Key = Key { hf: "num_hidden_layers", gguf: "block_count" };
const HEADS: Key = Key { hf: "num_attention_heads", gguf: "attention.head_count" };
const KV_HEADS: Key = Key { hf: "num_key_value_heads", gguf: "attention.head_count_kv" };
const HEAD_DIM: Key = Key { hf: "head_dim", gguf: "attention.key_length" };
const INTERMEDIATE: Key = Key { hf: "intermediate_size", gguf: "feed_forward_length" };
const VOCAB: Key = Key { hf: "vocab_size", gguf: "vocab_size" };
const MAX_POSITION: Key = Key { hf: "max_position_embeddings", gguf: "context_length" };
const RMS_EPS: Key = Key { hf: "rms_norm_eps", gguf: "attention.layer_norm_rms_epsilon" };

/// Settings of `config.json` that change the answer and are not built, with the value that means "off", as `null` does.
const HF_OFF: &[(&str, f64)] = &[
    ("use_sliding_window", 0.0),
    ("partial_rotary_factor", 1.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("query_pre_attn_scalar", 0.0),
    ("attention_multiplier", 0.0),
    ("embedding_multiplier", 1.0),
    ("residual_multiplier", 1.0),
    ("logits_scaling", 1.0),
    ("logit_scale", 1.0),
    ("clip_qkv", 0.0),
];

/// The same of GGUF metadata, after `<architecture>.`.
const GGUF_OFF: &[(&str, f64)] = &[
    ("attention.sliding_window", 0.0),
    ("expert_count", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("attention.scale", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.temperature_scale", 0.0),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
    ("logit_scale", 1.0),
    ("rope.scaling.attn_factor", 1.0),
];

/// Far above any model, so that products of two sizes stay in range.
const MAX_SIZE: u32 = 1 << 22;

/// The sizes of a decoder-only transformer with grouped-query attention and a gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DecoderConfig {
    pub hidden: u32,
    pub num_layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub intermediate: u32,
    /// What the configuration says; `None`: whatever the embedding has (GGUF).
    pub vocab_size: Option<u32>,
    pub max_position: u32,
    pub rms_eps: f32,
    pub rope: RopeConfig,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// What q, k, v and o have; `None`: look whether the tensors are there (GGUF has no key).
    pub attention_bias: Option<bool>,
    /// What gate, up and down have.
    pub mlp_bias: Option<bool>,
}

impl DecoderConfig {
    /// Reads and checks every setting.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let reader = Reader::new(checkpoint)?;
        let (hidden, heads) = (reader.size(HIDDEN)?, reader.size(HEADS)?);
        let head_dim = match reader.u32(HEAD_DIM)? {
            Some(_) => reader.size(HEAD_DIM)?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(reader.error(HEADS, format!("{heads} heads do not divide hidden size {hidden}"))),
        };
        let kv_heads = if reader.u32(KV_HEADS)?.is_some() { reader.size(KV_HEADS)? } else { heads };
        if !heads.is_multiple_of(kv_heads) {
            return Err(reader.error(KV_HEADS, format!("{heads} heads are not a multiple of {kv_heads}")));
        }
        let too_wide = heads.checked_mul(head_dim).is_none_or(|width| width > MAX_SIZE);
        if too_wide || !head_dim.is_multiple_of(2) {
            return Err(reader.error(HEAD_DIM, format!("{heads} heads of {head_dim} elements are out of range")));
        }
        reader.refuse_unsupported(head_dim)?;
        let (attention_bias, mlp_bias) = reader.biases()?;
        Ok(Self {
            hidden,
            num_layers: reader.size(LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            intermediate: reader.size(INTERMEDIATE)?,
            vocab_size: match reader.source {
                Source::Gguf { .. } => None,
                Source::HuggingFace { .. } => Some(reader.size(VOCAB)?),
            },
            max_position: reader.size_up_to(MAX_POSITION, 1 << 30)?,
            rms_eps: reader.positive(RMS_EPS)?,
            rope: reader.rope()?,
            tied: reader.tied()?,
            attention_bias,
            mlp_bias,
        })
    }
}

/// Typed access to the settings of either container.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    source: Source<'a>,
}

#[derive(Clone, Copy)]
enum Source<'a> {
    Gguf { metadata: &'a Metadata, architecture: &'a str },
    HuggingFace { config: &'a Value },
}

impl<'a> Reader<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Result<Self, LoadError> {
        let source = match &checkpoint.container {
            Container::Gguf(metadata) => {
                Source::Gguf { metadata, architecture: metadata.require_str("general.architecture")? }
            }
            Container::HuggingFace { config, .. } => Source::HuggingFace { config },
        };
        Ok(Self { checkpoint, source })
    }

    fn name(&self, key: Key) -> String {
        match self.source {
            Source::Gguf { architecture, .. } => format!("{architecture}.{}", key.gguf),
            Source::HuggingFace { .. } => key.hf.into(),
        }
    }

    fn error_at(&self, key: &str, problem: impl Into<String>) -> LoadError {
        let path = match self.source {
            Source::Gguf { metadata, .. } => metadata.path.clone(),
            Source::HuggingFace { .. } => self.checkpoint.path.join("config.json"),
        };
        LoadError::Config { path, key: key.into(), problem: problem.into() }
    }

    fn error(&self, key: Key, problem: impl Into<String>) -> LoadError {
        self.error_at(&self.name(key), problem)
    }

    fn unsupported(&self, what: &'static str, name: impl Into<String>, supported: &str) -> LoadError {
        let (path, name) = (self.checkpoint.path.clone(), name.into());
        LoadError::Unsupported { path, what, name, supported: supported.into() }
    }

    fn u32(&self, key: Key) -> Result<Option<u32>, LoadError> {
        match self.source {
            Source::Gguf { metadata, .. } => metadata.u32(&self.name(key)),
            Source::HuggingFace { config } => match present(config, key.hf) {
                None => Ok(None),
                Some(value) => {
                    let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
                    number.map(Some).ok_or_else(|| self.error(key, format!("expected a 32-bit number, got {value}")))
                }
            },
        }
    }

    /// A required size, at least 1.
    fn size(&self, key: Key) -> Result<u32, LoadError> {
        self.size_up_to(key, MAX_SIZE)
    }

    fn size_up_to(&self, key: Key, most: u32) -> Result<u32, LoadError> {
        match self.u32(key)? {
            None => Err(self.error(key, "missing")),
            Some(value) if (1..=most).contains(&value) => Ok(value),
            Some(value) => Err(self.error(key, format!("{value} is not within 1..={most}"))),
        }
    }

    fn positive(&self, key: Key) -> Result<f32, LoadError> {
        let value = match self.source {
            Source::Gguf { metadata, .. } => metadata.f32(&self.name(key))?,
            Source::HuggingFace { config } => self.hf_f32(config, key.hf)?,
        };
        match value {
            None => Err(self.error(key, "missing")),
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(self.error(key, format!("{value} is not a positive number"))),
        }
    }

    fn hf_f32(&self, object: &Value, key: &str) -> Result<Option<f32>, LoadError> {
        let Some(value) = present(object, key) else { return Ok(None) };
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.error_at(key, format!("expected a number, got {value}")))
    }

    fn hf_bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        let Source::HuggingFace { config } = self.source else { return Ok(None) };
        let Some(value) = present(config, key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error_at(key, format!("expected true or false, got {value}")))
    }

    /// What would change the answer and is not built.
    fn refuse_unsupported(&self, head_dim: u32) -> Result<(), LoadError> {
        match self.source {
            Source::Gguf { metadata, architecture } => self.refuse_in_gguf(metadata, architecture, head_dim),
            Source::HuggingFace { config } => self.refuse_in_config(config),
        }
    }

    fn refuse_in_gguf(&self, metadata: &Metadata, architecture: &str, head_dim: u32) -> Result<(), LoadError> {
        let widths = ["rope.dimension_count", "attention.value_length"].map(|suffix| (suffix, f64::from(head_dim)));
        for (suffix, off) in GGUF_OFF.iter().copied().chain(widths) {
            let key = format!("{architecture}.{suffix}");
            if let Some(value) = metadata.number(&key)?.filter(|&value| value != off) {
                return Err(self.unsupported("setting", format!("{key} = {value}"), &off.to_string()));
            }
        }
        let causal = format!("{architecture}.attention.causal");
        if metadata.bool(&causal)? == Some(false) {
            return Err(self.unsupported("setting", format!("{causal} = false"), "true"));
        }
        Ok(())
    }

    fn refuse_in_config(&self, config: &Value) -> Result<(), LoadError> {
        if let Some(act) = present(config, "hidden_act").filter(|act| act.as_str() != Some("silu")) {
            return Err(self.unsupported("hidden_act", act.to_string(), "silu"));
        }
        for &(key, off) in HF_OFF {
            let Some(value) = present(config, key) else { continue };
            let number = value.as_f64().or(value.as_bool().map(|on| f64::from(u8::from(on))));
            if number != Some(off) {
                return Err(self.unsupported("setting", format!("{key} = {value}"), &off.to_string()));
            }
        }
        if let Some(window) = present(config, "sliding_window").filter(|_| config.get("use_sliding_window").is_none()) {
            return Err(self.unsupported("setting", format!("sliding_window = {window}"), "none"));
        }
        let is_full = |kind: &Value| kind.as_str() == Some("full_attention");
        match present(config, "layer_types") {
            Some(kinds) if !kinds.as_array().is_some_and(|kinds| kinds.iter().all(is_full)) => {
                Err(self.unsupported("layer_types", kinds.to_string(), "full_attention"))
            }
            _ => Ok(()),
        }
    }

    fn biases(&self) -> Result<(Option<bool>, Option<bool>), LoadError> {
        match self.source {
            Source::Gguf { .. } => Ok((None, None)),
            Source::HuggingFace { .. } => Ok((
                Some(self.hf_bool("attention_bias")?.unwrap_or(false)),
                Some(self.hf_bool("mlp_bias")?.unwrap_or(false)),
            )),
        }
    }

    fn tied(&self) -> Result<bool, LoadError> {
        match self.source {
            Source::Gguf { .. } => Ok(!self.checkpoint.tensors.contains_key("output.weight")),
            Source::HuggingFace { .. } => Ok(self.hf_bool("tie_word_embeddings")?.unwrap_or(false)),
        }
    }

    fn rope(&self) -> Result<RopeConfig, LoadError> {
        let rope = match self.source {
            Source::Gguf { metadata, architecture } => self.gguf_rope(metadata, architecture)?,
            Source::HuggingFace { config } => self.hf_rope(config)?,
        };
        let valid = match rope.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => factor > 0.0,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let in_order = 0.0 < low_freq_factor && low_freq_factor < high_freq_factor;
                factor > 0.0 && in_order && original_max_position > 0.0
            }
        };
        if valid && rope.theta > 0.0 {
            return Ok(rope);
        }
        Err(self.error_at("rope", format!("values out of range: {rope:?}")))
    }

    fn gguf_rope(&self, metadata: &Metadata, architecture: &str) -> Result<RopeConfig, LoadError> {
        let key = |suffix: &str| format!("{architecture}.rope.{suffix}");
        // As in llama.cpp: `scale_linear` is the factor's old name, and a factor without a type is linear.
        let factor = match metadata.f32(&key("scaling.factor"))? {
            None => metadata.f32(&key("scale_linear"))?,
            factor => factor,
        };
        let scaling = match metadata.str(&key("scaling.type"))? {
            Some("none") => RopeScaling::None,
            None | Some("linear") => factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }),
            Some(other) => return Err(self.unsupported("rope scaling", other, "none, linear")),
        };
        Ok(RopeConfig { theta: metadata.f32(&key("freq_base"))?.unwrap_or(RopeConfig::DEFAULT_THETA), scaling })
    }

    /// Both generations of keys: `rope_parameters`, or `rope_theta` beside `rope_scaling`.
    fn hf_rope(&self, config: &Value) -> Result<RopeConfig, LoadError> {
        let [new, old] = ["rope_parameters", "rope_scaling"].map(|key| present(config, key));
        if new.is_some() && old.is_some() && new != old {
            return Err(self.error_at("rope_scaling", "contradicts rope_parameters"));
        }
        let parameters = new.or(old);
        let empty = Value::Object(serde_json::Map::new());
        let parameters = parameters.unwrap_or(&empty);
        if parameters.as_object().is_none_or(|object| object.values().any(Value::is_object)) {
            return Err(self.unsupported("rope parameters", parameters.to_string(), "one flat object"));
        }
        let theta = match self.hf_f32(parameters, "rope_theta")? {
            Some(theta) => Some(theta),
            None => self.hf_f32(config, "rope_theta")?,
        };
        if let Some(factor) = self.hf_f32(parameters, "partial_rotary_factor")?.filter(|&factor| factor != 1.0) {
            return Err(self.unsupported("partial_rotary_factor", factor.to_string(), "1"));
        }
        let need = |key: &str| self.hf_f32(parameters, key)?.ok_or_else(|| self.error_at(key, "missing"));
        // As in transformers: beside the parameters it counts more than among them, and the default is the whole context.
        const ORIGINAL: &str = "original_max_position_embeddings";
        let original = || {
            let given = [config, parameters].into_iter().find(|object| present(object, ORIGINAL).is_some());
            let (object, key) = given.map_or((config, MAX_POSITION.hf), |object| (object, ORIGINAL));
            self.hf_f32(object, key)?.ok_or_else(|| self.error_at(key, "missing"))
        };
        let kind = present(parameters, "rope_type").or_else(|| present(parameters, "type"));
        let scaling = match kind.map(|kind| kind.as_str().unwrap_or_default()) {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: need("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: original()?,
            },
            Some(other) => return Err(self.unsupported("rope type", other, "default, linear, llama3")),
        };
        Ok(RopeConfig { theta: theta.unwrap_or(RopeConfig::DEFAULT_THETA), scaling })
    }
}

/// A value that is there and not null.
fn present<'a>(object: &'a Value, key: &str) -> Option<&'a Value> {
    object.get(key).filter(|value| !value.is_null())
}
