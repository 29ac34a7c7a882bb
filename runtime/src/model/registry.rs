//! Which architectures there are: one line each.
//!
//! Invariant: a checkpoint's own name for its architecture decides; an unknown one is an error that lists what is known.

use super::{LoadOptions, Model, deepseek, gemma, gpt_oss, llama, mistral, mixtral, multimodal, phi3, qwen, smollm3};
use crate::error::LoadError;
use crate::weights::{Checkpoint, Container};

/// A family of models under its names in the two kinds of container.
pub struct Architecture {
    /// What its models are called.
    pub title: &'static str,
    /// Class names in `config.json`.
    pub hf: &'static [&'static str],
    /// Values of `general.architecture`.
    pub gguf: &'static [&'static str],
    /// Builds the model.
    pub(super) load: fn(&Checkpoint, &LoadOptions) -> Result<Model, LoadError>,
}

/// Every family, in the order of README's table.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        title: "Llama 2 and 3, SmolLM2, TinyLlama and their fine-tunes",
        hf: &["LlamaForCausalLM"],
        gguf: &["llama"],
        load: llama::load,
    },
    Architecture {
        title: "Mistral (its GGUF files say `llama`), Ministral 3 (text part)",
        hf: &["MistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
        gguf: &["mistral3"],
        load: mistral::load,
    },
    Architecture { title: "Qwen2, Qwen2.5", hf: &["Qwen2ForCausalLM"], gguf: &["qwen2"], load: qwen::load_2 },
    Architecture { title: "Qwen3", hf: &["Qwen3ForCausalLM"], gguf: &["qwen3"], load: qwen::load_3 },
    Architecture { title: "Qwen3 MoE", hf: &["Qwen3MoeForCausalLM"], gguf: &["qwen3moe"], load: qwen::load_3_moe },
    Architecture { title: "Mixtral", hf: &["MixtralForCausalLM"], gguf: &[], load: mixtral::load },
    Architecture { title: "gpt-oss", hf: &["GptOssForCausalLM"], gguf: &["gpt-oss"], load: gpt_oss::load },
    Architecture { title: "Gemma 2", hf: &["Gemma2ForCausalLM"], gguf: &["gemma2"], load: gemma::load_2 },
    Architecture {
        title: "Gemma 3 (text part)",
        hf: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        gguf: &["gemma3"],
        load: gemma::load_3,
    },
    Architecture { title: "Phi-3, Phi-3.5, Phi-4", hf: &["Phi3ForCausalLM"], gguf: &["phi3"], load: phi3::load },
    Architecture {
        title: "DeepSeek-V2, V3, R1, Kimi K2",
        hf: &["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"],
        gguf: &["deepseek2"],
        load: deepseek::load,
    },
    Architecture { title: "SmolLM3", hf: &["SmolLM3ForCausalLM"], gguf: &["smollm3"], load: smollm3::load },
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
    let text_part = multimodal::text_part(checkpoint)?;
    (architecture.load)(text_part.as_ref().unwrap_or(checkpoint), options)
}
