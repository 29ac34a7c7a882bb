//! Architectures: from a checkpoint's configuration and tensor names to a `Program` and its weights.
//!
//! Invariant: a new architecture touches two places, its own file and one line of `registry`.

mod builder;
mod config;
mod deepseek;
mod experts;
mod gemma;
mod gpt_oss;
mod latent;
mod layers;
mod llama;
mod mistral;
mod mixtral;
mod multimodal;
mod names;
mod ordered;
mod phi3;
mod qwen;
mod reader;
mod registry;
mod rope;
mod smollm3;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod traps;

pub use registry::{ARCHITECTURES, Architecture};

use fancy_regex::Regex;

use crate::error::LoadError;
use crate::program::{KvDtype, Program};
use crate::weights::{Checkpoint, HostTensor, Quantisation};

/// A model that a backend can be given: the program and, by `WeightId`, its tensors.
#[derive(Clone, Debug)]
pub struct Model {
    /// The forward pass; `program::check` has passed it.
    pub program: Program,
    /// Indexed by `WeightId`; shapes equal `program.weights`.
    pub weights: Vec<HostTensor>,
    /// What the engine and the server must know.
    pub info: ModelInfo,
}

/// What the engine and the server must know about a model.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelInfo {
    /// The architecture's house name: `llama`, `qwen3`.
    pub architecture: &'static str,
    /// Number of token ids.
    pub vocab_size: u32,
    /// The longest context the checkpoint was made for, in tokens.
    pub max_position: u32,
    /// Sum of tensor elements.
    pub num_parameters: u64,
    /// Decoder layers.
    pub num_layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
}

/// What a program depends on besides its checkpoint.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Type of the KV cache.
    pub kv_dtype: KvDtype,
    /// The context that the engine will be built for, in tokens; `None`: the checkpoint's. LongRoPE's factors depend on it.
    pub max_model_len: Option<u32>,
    /// What matrices of blocks that are floats in the file are rounded to; embedding, head and routers stay.
    pub quantisation: QuantisationRules,
}

impl From<KvDtype> for LoadOptions {
    fn from(kv_dtype: KvDtype) -> Self {
        Self { kv_dtype, max_model_len: None, quantisation: QuantisationRules::default() }
    }
}

/// Which matrices are rounded to what when a model is loaded.
#[derive(Clone, Debug)]
pub struct QuantisationRules {
    /// Where no rule below matches.
    pub default: Quantisation,
    /// By house name (`layers.3.mlp.down`), the first match counts.
    pub overrides: Vec<(Regex, Quantisation)>,
}

impl Default for QuantisationRules {
    fn default() -> Self {
        Self { default: Quantisation::None, overrides: Vec::new() }
    }
}

impl QuantisationRules {
    /// Whether the tensor of this house name belongs to a block and is no router: what is rounded unless a rule says otherwise.
    pub(crate) fn is_block(house: &str) -> bool {
        house.starts_with("layers.") && !house.ends_with(".router")
    }

    /// What the matrix of this house name becomes.
    fn of(&self, house: &str) -> Quantisation {
        let rule = self.overrides.iter().find(|(pattern, _)| pattern.is_match(house).unwrap_or(false));
        match rule {
            Some((_, to)) => *to,
            None if Self::is_block(house) => self.default,
            None => Quantisation::None,
        }
    }
}

/// Builds the model of a checkpoint.
///
/// # Errors
/// Unknown architecture, missing or misshapen tensors, bad configuration values.
pub fn load(checkpoint: &Checkpoint, options: impl Into<LoadOptions>) -> Result<Model, LoadError> {
    registry::load(checkpoint, &options.into())
}
