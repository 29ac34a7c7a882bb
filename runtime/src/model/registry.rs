//! Which architectures there are: one line each.
//!
//! Invariant: a checkpoint's own name for its architecture decides; an unknown one is an error that lists what is known.

use super::{LoadOptions, Model, gemma, gpt_oss, llama, mistral, mixtral, phi3, qwen, smollm3};
use crate::error::LoadError;
use crate::weights::{Checkpoint, Container};

/// An architecture under its names in the two kinds of container.
pub(super) struct Architecture {
    /// Class names in `config.json`.
    pub hf: &'static [&'static str],
    /// Values of `general.architecture`.
    pub gguf: &'static [&'static str],
    /// Builds the model.
    pub load: fn(&Checkpoint, &LoadOptions) -> Result<Model, LoadError>,
}

const ARCHITECTURES: &[Architecture] = &[
    Architecture { hf: &["LlamaForCausalLM"], gguf: &["llama"], load: llama::load },
    Architecture { hf: &["MistralForCausalLM", "Ministral3ForCausalLM"], gguf: &["mistral3"], load: mistral::load },
    Architecture { hf: &["Qwen2ForCausalLM"], gguf: &["qwen2"], load: qwen::load_2 },
    Architecture { hf: &["Qwen3ForCausalLM"], gguf: &["qwen3"], load: qwen::load_3 },
    Architecture { hf: &["Qwen3MoeForCausalLM"], gguf: &["qwen3moe"], load: qwen::load_3_moe },
    Architecture { hf: &["MixtralForCausalLM"], gguf: &[], load: mixtral::load },
    Architecture { hf: &["GptOssForCausalLM"], gguf: &["gpt-oss"], load: gpt_oss::load },
    Architecture { hf: &["Gemma2ForCausalLM"], gguf: &["gemma2"], load: gemma::load_2 },
    Architecture { hf: &["Gemma3ForCausalLM"], gguf: &["gemma3"], load: gemma::load_3 },
    Architecture { hf: &["Phi3ForCausalLM"], gguf: &["phi3"], load: phi3::load },
    Architecture { hf: &["SmolLM3ForCausalLM"], gguf: &["smollm3"], load: smollm3::load },
];

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let names = |a: &Architecture| match checkpoint.container {
        Container::Gguf(_) => a.gguf,
        Container::HuggingFace { .. } => a.hf,
    };
    let name = match &checkpoint.container {
        Container::Gguf(metadata) => metadata.require_str("general.architecture")?,
        Container::HuggingFace { config, .. } => {
            let name = config.get("architectures").and_then(|list| list.get(0)).and_then(|name| name.as_str());
            name.ok_or_else(|| LoadError::Config {
                path: checkpoint.path.join("config.json"),
                key: "architectures".into(),
                problem: "expected a list of one class name".into(),
            })?
        }
    };
    let Some(architecture) = ARCHITECTURES.iter().find(|a| names(a).contains(&name)) else {
        let supported: Vec<&str> = ARCHITECTURES.iter().flat_map(names).copied().collect();
        return Err(LoadError::Unsupported {
            path: checkpoint.path.clone(),
            what: "architecture",
            name: name.into(),
            supported: supported.join(", "),
        });
    };
    (architecture.load)(checkpoint, options)
}
