//! Typed access to a checkpoint's settings, whichever container they are in.
//!
//! Invariant: a setting that would change the answer is read by an architecture, which says so (`honours`), or refused by
//! name here when it is not off; nothing is ignored. Every number is range-checked. Called by the architectures.

use serde_json::Value;

use crate::error::LoadError;
use crate::weights::gguf::Metadata;
use crate::weights::{Checkpoint, Container};

/// The same setting's key in `config.json` and, after `<architecture>.`, in GGUF metadata; empty where there is none.
#[derive(Clone, Copy)]
pub(super) struct Key {
    pub hf: &'static str,
    pub gguf: &'static str,
}

const LAYER_TYPES: &str = "layer_types";
const WINDOW: Key = Key { hf: "sliding_window", gguf: "attention.sliding_window" };
const WINDOW_SWITCH: Key = Key { hf: "use_sliding_window", gguf: "" };
/// Names of `OFF` and the list of layers, for architectures that read windows by `Reader::windows`.
pub(super) const WINDOWS: [&str; 4] = [WINDOW_SWITCH.hf, WINDOW.hf, WINDOW.gguf, LAYER_TYPES];

/// Settings that change the answer, and the value that means "off", as `null` does.
const OFF: &[(Key, f64)] = &[
    (WINDOW_SWITCH, 0.0),
    (WINDOW, 0.0),
    (Key { hf: "attn_logit_softcapping", gguf: "attn_logit_softcapping" }, 0.0),
    (Key { hf: "final_logit_softcapping", gguf: "final_logit_softcapping" }, 0.0),
    (Key { hf: "query_pre_attn_scalar", gguf: "" }, 0.0),
    (Key { hf: "attention_multiplier", gguf: "attention.scale" }, 0.0),
    (Key { hf: "embedding_multiplier", gguf: "embedding_scale" }, 1.0),
    (Key { hf: "residual_multiplier", gguf: "residual_scale" }, 1.0),
    (Key { hf: "logits_scaling", gguf: "" }, 1.0),
    (Key { hf: "logit_scale", gguf: "logit_scale" }, 1.0),
    (Key { hf: "use_bidirectional_attention", gguf: "" }, 0.0),
    (Key { hf: "clip_qkv", gguf: "attention.clamp_kqv" }, 0.0),
    (Key { hf: "num_local_experts", gguf: "expert_count" }, 0.0),
    (Key { hf: "num_experts", gguf: "" }, 0.0),
    (Key { hf: "n_routed_experts", gguf: "" }, 0.0),
    (Key { hf: "", gguf: "attention.max_alibi_bias" }, 0.0),
    (Key { hf: "", gguf: "attention.temperature_scale" }, 0.0),
];

/// Far above any model, so that products of two sizes stay in range.
pub(super) const MAX_SIZE: u32 = 1 << 22;

/// The settings of one checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub checkpoint: &'a Checkpoint,
    source: Source<'a>,
}

/// Where the settings are.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Gguf { metadata: &'a Metadata, architecture: &'a str },
    HuggingFace { config: &'a Value },
}

impl<'a> Reader<'a> {
    /// Settings of an architecture that `honours` these keys of `OFF`, by their name in either container.
    ///
    /// # Errors
    /// A setting is on that it does not honour.
    pub fn new(checkpoint: &'a Checkpoint, honours: &[&str]) -> Result<Self, LoadError> {
        let source = match &checkpoint.container {
            Container::Gguf(metadata) => {
                Source::Gguf { metadata, architecture: metadata.require_str("general.architecture")? }
            }
            Container::HuggingFace { config, .. } => Source::HuggingFace { config },
        };
        let reader = Self { checkpoint, source };
        let is_honoured = |key: &Key| honours.contains(&reader.name_in_container(*key));
        // A window beside a switch is what the switch says.
        let is_switched = |key: &Key| key.hf == WINDOW.hf && reader.json(WINDOW_SWITCH.hf).is_some();
        for (key, off) in OFF.iter().filter(|(key, _)| !is_honoured(key) && !is_switched(key)) {
            reader.refuse_unless(*key, *off)?;
        }
        if !honours.contains(&LAYER_TYPES)
            && let Some(kinds) = reader.json(LAYER_TYPES)
            && !kinds.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind.as_str() == Some("full_attention")))
        {
            return Err(reader.unsupported(LAYER_TYPES, kinds.to_string(), "full_attention"));
        }
        const CAUSAL: Key = Key { hf: "", gguf: "attention.causal" };
        if reader.bool(CAUSAL)? == Some(false) {
            return Err(reader.unsupported("setting", format!("{} = false", reader.name(CAUSAL)), "true"));
        }
        Ok(reader)
    }

    fn refuse_unless(&self, key: Key, off: f64) -> Result<(), LoadError> {
        let value = match self.source {
            _ if self.name_in_container(key).is_empty() => return Ok(()),
            Source::Gguf { metadata, .. } => {
                metadata.number(&self.name(key))?.map(|value| (value.to_string(), Some(value)))
            }
            Source::HuggingFace { config } => present(config, key.hf).map(|value| {
                let number = value.as_f64().or(value.as_bool().map(|on| f64::from(u8::from(on))));
                (value.to_string(), number)
            }),
        };
        match value.filter(|(_, number)| *number != Some(off)) {
            None => Ok(()),
            Some((text, _)) => {
                Err(self.unsupported("setting", format!("{} = {text}", self.name(key)), &off.to_string()))
            }
        }
    }

    pub fn source(&self) -> Source<'a> {
        self.source
    }

    /// Whether it is a directory of Hugging Face's kind.
    pub fn is_hf(&self) -> bool {
        matches!(self.source, Source::HuggingFace { .. })
    }

    fn name_in_container(&self, key: Key) -> &'static str {
        if self.is_hf() { key.hf } else { key.gguf }
    }

    /// The key as the file has it.
    pub fn name(&self, key: Key) -> String {
        match self.source {
            Source::Gguf { architecture, .. } => format!("{architecture}.{}", key.gguf),
            Source::HuggingFace { .. } => key.hf.into(),
        }
    }

    /// A value of the configuration that is wrong.
    pub fn error_at(&self, key: &str, problem: impl Into<String>) -> LoadError {
        let path = match self.source {
            Source::Gguf { metadata, .. } => metadata.path.clone(),
            Source::HuggingFace { .. } => self.checkpoint.path.join("config.json"),
        };
        LoadError::Config { path, key: key.into(), problem: problem.into() }
    }

    /// The value of a key is wrong.
    pub fn error(&self, key: Key, problem: impl Into<String>) -> LoadError {
        self.error_at(&self.name(key), problem)
    }

    /// A value that is sound and not built.
    pub fn unsupported(&self, what: &'static str, name: impl Into<String>, supported: &str) -> LoadError {
        let (path, name) = (self.checkpoint.path.clone(), name.into());
        LoadError::Unsupported { path, what, name, supported: supported.into() }
    }

    /// A number that is not negative.
    pub fn u32(&self, key: Key) -> Result<Option<u32>, LoadError> {
        match self.source {
            _ if self.name_in_container(key).is_empty() => Ok(None),
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
    pub fn size(&self, key: Key) -> Result<u32, LoadError> {
        self.size_up_to(key, MAX_SIZE)
    }

    /// A required size within `1..=most`.
    pub fn size_up_to(&self, key: Key, most: u32) -> Result<u32, LoadError> {
        match self.u32(key)? {
            None => Err(self.error(key, "missing")),
            Some(value) if (1..=most).contains(&value) => Ok(value),
            Some(value) => Err(self.error(key, format!("{value} is not within 1..={most}"))),
        }
    }

    /// A finite number.
    pub fn f32(&self, key: Key) -> Result<Option<f32>, LoadError> {
        match self.source {
            _ if self.name_in_container(key).is_empty() => Ok(None),
            Source::Gguf { metadata, .. } => metadata.f32(&self.name(key)),
            Source::HuggingFace { config } => self.f32_in(config, key.hf),
        }
    }

    /// A number above 0 where it is there.
    pub fn positive(&self, key: Key) -> Result<Option<f32>, LoadError> {
        match self.f32(key)? {
            Some(value) if value <= 0.0 => Err(self.error(key, format!("{value} is not a positive number"))),
            value => Ok(value),
        }
    }

    /// A required number above 0.
    pub fn require_positive(&self, key: Key) -> Result<f32, LoadError> {
        self.positive(key)?.ok_or_else(|| self.error(key, "missing"))
    }

    /// A finite number of an object of `config.json`.
    pub fn f32_in(&self, object: &Value, key: &str) -> Result<Option<f32>, LoadError> {
        let Some(value) = present(object, key) else { return Ok(None) };
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.error_at(key, format!("expected a number, got {value}")))
    }

    pub fn bool(&self, key: Key) -> Result<Option<bool>, LoadError> {
        match self.source {
            _ if self.name_in_container(key).is_empty() => Ok(None),
            Source::Gguf { metadata, .. } => metadata.bool(&self.name(key)),
            Source::HuggingFace { config } => {
                let Some(value) = present(config, key.hf) else { return Ok(None) };
                let bool = value.as_bool().map(Some);
                bool.ok_or_else(|| self.error(key, format!("expected true or false, got {value}")))
            }
        }
    }

    /// A setting of `config.json` by name, for architectures that know what it looks like; none in GGUF.
    pub fn json(&self, key: &str) -> Option<&'a Value> {
        match self.source {
            Source::Gguf { .. } => None,
            Source::HuggingFace { config } => present(config, key),
        }
    }

    /// Refuses another nonlinearity than the architecture's; GGUF files do not say.
    pub fn expect_activation(&self, names: &[&str]) -> Result<(), LoadError> {
        let given = ["hidden_activation", "hidden_act"].into_iter().find_map(|key| self.json(key));
        match given.filter(|act| !act.as_str().is_some_and(|act| names.contains(&act))) {
            None => Ok(()),
            Some(act) => Err(self.unsupported("hidden_act", act.to_string(), &names.join(", "))),
        }
    }

    /// Each layer's window in positions. `is_windowed` tells the layers that have one where the file has no `layer_types`.
    pub fn windows(&self, num_layers: u32, is_windowed: impl Fn(u32) -> bool) -> Result<Vec<Option<u32>>, LoadError> {
        let is_on = self.bool(WINDOW_SWITCH)?.unwrap_or(true);
        let window = if is_on { self.u32(WINDOW)?.filter(|&window| window > 0) } else { None };
        let Some(kinds) = self.json(LAYER_TYPES) else {
            return Ok((0..num_layers).map(|layer| window.filter(|_| is_windowed(layer))).collect());
        };
        let all = kinds.as_array().filter(|kinds| kinds.len() == num_layers as usize);
        let all = all.ok_or_else(|| self.error_at(LAYER_TYPES, format!("expected a list of {num_layers}")))?;
        let windows = all.iter().map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_some() => Ok(window),
            Some("sliding_attention") => Err(self.error(WINDOW, "missing, and layer_types names sliding layers")),
            _ => Err(self.unsupported(LAYER_TYPES, kind.to_string(), "full_attention, sliding_attention")),
        });
        windows.collect()
    }
}

/// A value that is there and not null.
pub(super) fn present<'a>(object: &'a Value, key: &str) -> Option<&'a Value> {
    object.get(key).filter(|value| !value.is_null())
}
