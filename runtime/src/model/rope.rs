//! Frequencies of the rotary embedding, computed once at load in f32 as the official implementation does.
//!
//! Invariant: scaling is all in the frequencies and one amplitude; the op knows nothing of it. An unknown kind of scaling is
//! refused. Called by the architectures; `layers` binds the tables.

use serde_json::Value;

use super::LoadOptions;
use super::config::{DecoderConfig, MAX_POSITION};
use super::reader::{Reader, Source, present};
use crate::error::LoadError;
use crate::weights::gguf::Metadata;

/// Base, width and scaling.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RopeConfig {
    /// The base of the geometric series.
    pub theta: f32,
    /// Elements of a head that turn; even.
    pub rotary_dim: u32,
    /// How long contexts stretch it.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RopeScaling {
    /// As trained.
    None,
    /// All divided by `factor` (Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    /// Interpolation").
    Linear { factor: f32 },
    /// Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1; `_compute_llama3_parameters`
    /// in transformers' `modeling_rope_utils`).
    Llama3 { factor: f32, low_freq_factor: f32, high_freq_factor: f32, original_max_position: f32 },
    /// Frequencies of few turns in the original context divided by `factor`, the fast ones kept, a ramp between (Peng et al.
    /// 2023, "YaRN").
    Yarn(Yarn),
    /// Each frequency divided by a factor of its own (Ding et al. 2024, "LongRoPE").
    PerFrequency { factors: Vec<f32>, amplitude: f32 },
}

/// See `RopeScaling::Yarn`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Yarn {
    pub factor: f32,
    pub original_max_position: f32,
    /// Turns in the original context from which on a frequency is kept.
    pub beta_fast: f32,
    /// Turns up to which it is divided.
    pub beta_slow: f32,
    /// Whether the ramp's ends are whole indices.
    pub truncate: bool,
    /// Multiplies sines and cosines.
    pub amplitude: f32,
    /// transformers' `mscale_all_dim`, which some families scale attention by; 0 where the file does not say.
    pub all_dims: f32,
}

/// What the op needs: `inv_freq` `[rotary_dim / 2]`, and what sines and cosines are multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RopeTable {
    pub inv_freq: Vec<f32>,
    pub amplitude: f32,
}

impl RopeConfig {
    /// What files that do not say mean.
    pub const DEFAULT_THETA: f32 = 10_000.0;

    /// `theta^(-2i / rotary_dim)` (Su et al. 2021, "RoFormer"), scaled.
    pub fn table(&self) -> RopeTable {
        let dim = self.rotary_dim as f32;
        let plain = (0..self.rotary_dim / 2).map(|i| 1.0 / self.theta.powf((2 * i) as f32 / dim));
        let inv_freq = plain.enumerate().map(|(i, frequency)| self.scaled(i, frequency)).collect();
        let amplitude = match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.amplitude,
            RopeScaling::PerFrequency { amplitude, .. } => *amplitude,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        };
        RopeTable { inv_freq, amplitude }
    }

    fn scaled(&self, index: usize, frequency: f32) -> f32 {
        match &self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::PerFrequency { factors, .. } => frequency / factors[index],
            RopeScaling::Yarn(yarn) => {
                let kept = 1.0 - yarn.ramp(index, self.theta, self.rotary_dim);
                frequency / yarn.factor * (1.0 - kept) + frequency * kept
            }
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let wavelength = 2.0 * std::f32::consts::PI / frequency;
                if wavelength < original_max_position / high_freq_factor {
                    frequency
                } else if wavelength > original_max_position / low_freq_factor {
                    frequency / factor
                } else {
                    let turns = original_max_position / wavelength;
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }

    fn is_valid(&self) -> bool {
        let positive = |values: &[f32]| values.iter().all(|&value| value > 0.0);
        let scaling = match &self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => *factor > 0.0,
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let in_order = 0.0 < low_freq_factor && low_freq_factor < high_freq_factor;
                factor > 0.0 && in_order && original_max_position > 0.0
            }
            RopeScaling::Yarn(yarn) => {
                positive(&[yarn.factor, yarn.original_max_position, yarn.beta_slow, yarn.amplitude])
                    && yarn.beta_slow <= yarn.beta_fast
                    // The base's logarithm divides.
                    && self.theta > 1.0
            }
            RopeScaling::PerFrequency { factors, amplitude } => positive(factors) && *amplitude > 0.0,
        };
        scaling && self.theta > 0.0
    }
}

impl Yarn {
    /// 0 where a frequency is kept, 1 where it is divided.
    fn ramp(&self, index: usize, theta: f32, dim: u32) -> f32 {
        let end = |turns: f32| {
            let wave = self.original_max_position / (turns * 2.0 * std::f32::consts::PI);
            dim as f32 * wave.ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (end(self.beta_fast), end(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim as f32 - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        ((index as f32 - low) / width).clamp(0.0, 1.0)
    }
}

/// YaRN's amplitude for a context that is `factor` times the original: `0.1 * scale * ln(factor) + 1`.
pub(super) fn yarn_amplitude(factor: f32, scale: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

/// Settings of the rotary embedding of one model.
pub(super) struct RopeReader<'a> {
    pub reader: Reader<'a>,
    pub config: &'a DecoderConfig,
    /// The context that the engine will be built for, where a flag says so: LongRoPE has two sets of factors.
    pub max_model_len: Option<u32>,
    /// The base of files that do not say.
    pub default_theta: f32,
}

impl<'a> RopeReader<'a> {
    pub fn new(reader: Reader<'a>, config: &'a DecoderConfig, options: &LoadOptions) -> Self {
        Self { reader, config, max_model_len: options.max_model_len, default_theta: RopeConfig::DEFAULT_THETA }
    }

    /// The rotary embedding of all layers; of the layers of one type where `kind` names it and the file tells types apart.
    pub fn read(&self, kind: Option<&str>) -> Result<RopeConfig, LoadError> {
        let rope = match self.reader.source() {
            Source::Gguf { metadata, architecture } => self.gguf(metadata, architecture)?,
            Source::HuggingFace { config } => self.hf(config, kind)?,
        };
        if rope.is_valid() && (2..=self.config.head_dim).contains(&rope.rotary_dim) && rope.rotary_dim.is_multiple_of(2)
        {
            return Ok(rope);
        }
        Err(self.reader.error_at("rope", format!("values out of range: {rope:?}")))
    }

    fn gguf(&self, metadata: &Metadata, architecture: &str) -> Result<RopeConfig, LoadError> {
        let key = |suffix: &str| format!("{architecture}.rope.{suffix}");
        // As in llama.cpp: `scale_linear` is the factor's old name, and a factor without a type is linear.
        let factor = match metadata.f32(&key("scaling.factor"))? {
            None => metadata.f32(&key("scale_linear"))?,
            factor => factor,
        };
        let rotary_dim = metadata.u32(&key("dimension_count"))?.unwrap_or(self.config.head_dim);
        let amplitude = metadata.f32(&key("scaling.attn_factor"))?;
        let original = metadata.u32(&key("scaling.original_context_length"))?;
        let original = original.unwrap_or(self.config.max_position) as f32;
        let kind = metadata.str(&key("scaling.type"))?;
        let scaling = match kind {
            Some("none") => RopeScaling::None,
            Some("yarn") => {
                let factor = factor.ok_or_else(|| self.reader.error_at(&key("scaling.factor"), "missing"))?;
                // transformers' `mscale_all_dim`; the amplitude is divided by what it makes of attention's scale.
                let all = metadata.f32(&key("scaling.yarn_log_multiplier"))?.unwrap_or(0.0);
                let beta = |name: &str, default| Ok::<f32, LoadError>(metadata.f32(&key(name))?.unwrap_or(default));
                RopeScaling::Yarn(Yarn {
                    factor,
                    original_max_position: original,
                    beta_fast: beta("scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: beta("scaling.yarn_beta_slow", 1.0)?,
                    truncate: true,
                    amplitude: amplitude.unwrap_or(1.0) * yarn_amplitude(factor, 1.0) / yarn_amplitude(factor, all),
                    all_dims: all,
                })
            }
            None | Some("linear") => match self.gguf_factors(original, rotary_dim)? {
                Some(factors) => RopeScaling::PerFrequency { factors, amplitude: amplitude.unwrap_or(1.0) },
                None => factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }),
            },
            Some("longrope") => {
                let factors = self.gguf_factors(original, rotary_dim)?;
                let factors =
                    factors.ok_or_else(|| self.reader.error_at(&key("scaling.type"), "no rope_factors tensors"))?;
                RopeScaling::PerFrequency { factors, amplitude: amplitude.unwrap_or(1.0) }
            }
            Some(other) => return Err(self.reader.unsupported("rope scaling", other, "none, linear, yarn, longrope")),
        };
        let has_amplitude = matches!(scaling, RopeScaling::Yarn(_) | RopeScaling::PerFrequency { .. });
        if let Some(amplitude) = amplitude.filter(|&amplitude| amplitude != 1.0 && !has_amplitude) {
            let setting = format!("{} = {amplitude}", key("scaling.attn_factor"));
            return Err(self.reader.unsupported("setting", setting, "1"));
        }
        let theta = metadata.f32(&key("freq_base"))?.unwrap_or(self.default_theta);
        Ok(RopeConfig { theta, rotary_dim, scaling })
    }

    /// LongRoPE's factors, a tensor of a GGUF file.
    fn gguf_factors(&self, original: f32, rotary_dim: u32) -> Result<Option<Vec<f32>>, LoadError> {
        let checkpoint = self.reader.checkpoint;
        let name = if self.is_long(original) { "rope_factors_long.weight" } else { "rope_factors_short.weight" };
        let Some(tensor) = checkpoint.tensors.get(name) else { return Ok(None) };
        if tensor.shape == [rotary_dim as usize / 2] {
            return Ok(Some(tensor.to_f32()));
        }
        Err(LoadError::Tensor {
            path: checkpoint.path.clone(),
            tensor: name.into(),
            expected: format!("shape [{}]", rotary_dim / 2),
            got: format!("{:?}", tensor.shape),
        })
    }

    /// Whether contexts will be longer than those that the model was trained on first.
    fn is_long(&self, original: f32) -> bool {
        self.max_model_len.unwrap_or(self.config.max_position) as f32 > original
    }

    /// All generations of keys: `rope_parameters`, flat or by type of layer, or `rope_theta` beside `rope_scaling`.
    fn hf(&self, config: &Value, kind: Option<&str>) -> Result<RopeConfig, LoadError> {
        let reader = &self.reader;
        let [new, old] = ["rope_parameters", "rope_scaling"].map(|key| present(config, key));
        if new.is_some() && old.is_some() && new != old {
            return Err(reader.error_at("rope_scaling", "contradicts rope_parameters"));
        }
        let of_kind = |parameters: &Value| kind.and_then(|kind| present(parameters, kind).cloned());
        let given = new.or(old).map(|all| of_kind(all).unwrap_or_else(|| all.clone()));
        let parameters = given.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        if parameters.as_object().is_none_or(|object| object.values().any(Value::is_object)) {
            return Err(reader.unsupported("rope parameters", parameters.to_string(), "one flat object"));
        }
        let either = |key: &str| match reader.f32_in(&parameters, key)? {
            None => reader.f32_in(config, key),
            value => Ok::<_, LoadError>(value),
        };
        let partial = either("partial_rotary_factor")?.unwrap_or(1.0);
        // As transformers cuts it: towards zero.
        let rotary_dim = (self.config.head_dim as f32 * partial) as u32;
        let name = present(&parameters, "rope_type").or_else(|| present(&parameters, "type"));
        let theta = either("rope_theta")?.unwrap_or(self.default_theta);
        let hf = HfRope { rope: self, config, parameters: &parameters };
        let scaling = match name.map(|name| name.as_str().unwrap_or_default()) {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: hf.need("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: hf.need("factor")?,
                low_freq_factor: hf.need("low_freq_factor")?,
                high_freq_factor: hf.need("high_freq_factor")?,
                original_max_position: hf.original()?,
            },
            Some("yarn") => hf.yarn()?,
            Some("longrope" | "su") => hf.long_rope(rotary_dim)?,
            Some(other) => {
                return Err(reader.unsupported("rope type", other, "default, linear, llama3, yarn, longrope"));
            }
        };
        Ok(RopeConfig { theta, rotary_dim, scaling })
    }
}

/// The rotary parameters of a `config.json`.
struct HfRope<'a> {
    rope: &'a RopeReader<'a>,
    config: &'a Value,
    parameters: &'a Value,
}

impl HfRope<'_> {
    fn f32(&self, key: &str) -> Result<Option<f32>, LoadError> {
        self.rope.reader.f32_in(self.parameters, key)
    }

    fn need(&self, key: &str) -> Result<f32, LoadError> {
        self.f32(key)?.ok_or_else(|| self.rope.reader.error_at(key, "missing"))
    }

    /// As in transformers: beside the parameters it counts more than among them, and the default is the whole context.
    fn original(&self) -> Result<f32, LoadError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        let given = [self.config, self.parameters].into_iter().find(|object| present(object, ORIGINAL).is_some());
        let (object, key) = given.map_or((self.config, MAX_POSITION.hf), |object| (object, ORIGINAL));
        self.rope.reader.f32_in(object, key)?.ok_or_else(|| self.rope.reader.error_at(key, "missing"))
    }

    fn yarn(&self) -> Result<RopeScaling, LoadError> {
        let original_max_position = self.original()?;
        let factor = match self.f32("factor")? {
            Some(factor) => factor,
            None => self.rope.config.max_position as f32 / original_max_position,
        };
        let amplitude = match (self.f32("attention_factor")?, self.f32("mscale")?, self.f32("mscale_all_dim")?) {
            (Some(amplitude), ..) => amplitude,
            (None, Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                yarn_amplitude(factor, scale) / yarn_amplitude(factor, all)
            }
            _ => yarn_amplitude(factor, 1.0),
        };
        let truncate = present(self.parameters, "truncate").is_none_or(|truncate| truncate.as_bool() != Some(false));
        Ok(RopeScaling::Yarn(Yarn {
            factor,
            original_max_position,
            beta_fast: self.f32("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.f32("beta_slow")?.unwrap_or(1.0),
            truncate,
            amplitude,
            all_dims: self.f32("mscale_all_dim")?.unwrap_or(0.0),
        }))
    }

    /// The factors are those of the context that is asked for; the amplitude is the whole context's.
    fn long_rope(&self, rotary_dim: u32) -> Result<RopeScaling, LoadError> {
        let original = self.original()?;
        let key = if self.rope.is_long(original) { "long_factor" } else { "short_factor" };
        let wrong = || self.rope.reader.error_at(key, format!("expected {} numbers", rotary_dim / 2));
        let list = present(self.parameters, key).and_then(Value::as_array).ok_or_else(wrong)?;
        let factors: Option<Vec<f32>> = list.iter().map(|factor| factor.as_f64().map(|factor| factor as f32)).collect();
        let factors = factors.filter(|factors| factors.len() == rotary_dim as usize / 2).ok_or_else(wrong)?;
        let factor = self.rope.config.max_position as f32 / original;
        let amplitude = match self.f32("attention_factor")? {
            Some(amplitude) => amplitude,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        Ok(RopeScaling::PerFrequency { factors, amplitude })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(theta: f32, rotary_dim: u32, scaling: RopeScaling) -> Vec<f32> {
        RopeConfig { theta, rotary_dim, scaling }.table().inv_freq
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192.0,
        };
        let (plain, scaled) = (table(500_000.0, 128, RopeScaling::None), table(500_000.0, 128, scaling));
        assert_eq!(scaled[0], 1.0);
        assert_eq!(scaled[63], plain[63] / 8.0);
        // Wavelength of pair 32 is 4443: 1.84 turns in 8192, so smooth is 0.281.
        assert!((scaled[32] / plain[32] - (0.719 / 8.0 + 0.281)).abs() < 1e-3);
        let ratios: Vec<f32> = scaled.iter().zip(&plain).map(|(s, p)| s / p).collect();
        assert!(ratios.windows(2).all(|pair| pair[1] <= pair[0] + 1e-6));
    }

    #[test]
    fn yarn_keeps_fast_turns_and_divides_slow_ones() {
        let yarn = Yarn {
            factor: 4.0,
            original_max_position: 32768.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            amplitude: yarn_amplitude(4.0, 1.0),
            all_dims: 0.0,
        };
        let (plain, scaled) = (table(1e6, 128, RopeScaling::None), table(1e6, 128, RopeScaling::Yarn(yarn)));
        // 32 turns in 32768: a wave of 1024, pair 23.6; one turn: pair 39.6.
        assert!(scaled[..=23] == plain[..=23] && scaled[24] < plain[24]);
        assert!(scaled[40..].iter().zip(&plain[40..]).all(|(s, p)| (s * 4.0 / p - 1.0).abs() < 1e-6));
        assert!((yarn.amplitude - 1.138_629).abs() < 1e-6);
    }
}
