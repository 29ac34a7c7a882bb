//! Architectures: from a checkpoint's configuration and tensor names to a `Program` and its weights.
//!
//! Invariant: a new architecture touches two places, its own file and one line of `registry`.

mod config;
mod layers;
mod llama;
mod ordered;
mod qwen3;
mod registry;
mod rope;
#[cfg(test)]
pub(crate) mod tests;

use crate::error::LoadError;
use crate::program::{KvDtype, Program};
use crate::weights::{Checkpoint, HostTensor};

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

/// Builds the model of a checkpoint.
///
/// # Errors
/// Unknown architecture, missing or misshapen tensors, bad configuration values.
pub fn load(checkpoint: &Checkpoint, kv_dtype: KvDtype) -> Result<Model, LoadError> {
    registry::load(checkpoint, kv_dtype)
}
