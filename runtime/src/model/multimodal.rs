//! Checkpoints of models that also see (`Gemma3ForConditionalGeneration`, `Mistral3ForConditionalGeneration`): their text part.
//!
//! Invariant: such a checkpoint is loaded as the text model that its `text_config` names. What belongs to the images lies under
//! known prefixes and is left out by them; any other tensor that the text model does not read is an error, as everywhere.
//! Requests with images are refused by the server. Called by `registry`; `builder` asks for the names in the file.

use serde_json::{Value, json};

use super::reader::present;
use crate::error::LoadError;
use crate::weights::{Checkpoint, Container};

const TEXT: &str = "text_config";
const TIED: &str = "tie_word_embeddings";

/// A class of such models.
struct Wrapper {
    class: &'static str,
    /// The `model_type`s of its text part; the first is what a text part means that does not say.
    text: &'static [&'static str],
    /// What a setting means that the text part does not have.
    defaults: &'static [(&'static str, f64)],
}

/// Google's files of Gemma 3 leave out what is as in the class, so that the class's numbers are part of the format.
#[rustfmt::skip]
const WRAPPERS: &[Wrapper] = &[
    Wrapper {
        class: "Gemma3ForConditionalGeneration",
        text: &["gemma3_text"],
        defaults: &[
            ("vocab_size", 262_208.0), ("hidden_size", 2304.0), ("intermediate_size", 9216.0), ("num_hidden_layers", 26.0),
            ("num_attention_heads", 8.0), ("num_key_value_heads", 4.0), ("head_dim", 256.0), ("rms_norm_eps", 1e-6),
            ("max_position_embeddings", 131_072.0), ("query_pre_attn_scalar", 256.0), ("sliding_window", 4096.0),
        ],
    },
    Wrapper { class: "Mistral3ForConditionalGeneration", text: &["mistral", "ministral3"], defaults: &[] },
];

/// Where the names of the text model begin in the file, whatever version of the library wrote it.
const BODIES: [&str; 2] = ["language_model.model.", "model.language_model."];
const HEADS: [&str; 2] = ["language_model.lm_head", "lm_head"];
const BODY: &str = "model.";
const HEAD: &str = "lm_head";

/// What belongs to the images.
const IMAGES: [&str; 4] =
    ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

fn wrapper(checkpoint: &Checkpoint) -> Option<&'static Wrapper> {
    let Container::HuggingFace { config, .. } = &checkpoint.container else { return None };
    let class = config.get("architectures")?.get(0)?.as_str()?;
    WRAPPERS.iter().find(|wrapper| wrapper.class == class)
}

/// Whether a tensor of the file has a name that begins so.
fn has(checkpoint: &Checkpoint, prefix: &str) -> bool {
    checkpoint.tensors.keys().chain(checkpoint.quantised.names()).any(|name| name.starts_with(prefix))
}

/// The checkpoint with the settings of its text part, if it is of such a class: what is not there is as `WRAPPERS` says.
pub(super) fn text_part(checkpoint: &Checkpoint) -> Result<Option<Checkpoint>, LoadError> {
    let (Some(wrapper), Container::HuggingFace { config, generation_config }) =
        (wrapper(checkpoint), &checkpoint.container)
    else {
        return Ok(None);
    };
    let error = |key: &str, problem: &str| LoadError::Config {
        path: checkpoint.path.join("config.json"),
        key: key.into(),
        problem: problem.into(),
    };
    let settings = present(config, TEXT).and_then(Value::as_object);
    let mut text = settings.cloned().ok_or_else(|| error(TEXT, "expected an object"))?;
    let kind = text.get("model_type").map_or(Some(wrapper.text[0]), Value::as_str);
    if !kind.is_some_and(|kind| wrapper.text.contains(&kind)) {
        return Err(LoadError::Unsupported {
            path: checkpoint.path.clone(),
            what: "text_config.model_type",
            name: kind.unwrap_or_default().into(),
            supported: wrapper.text.join(", "),
        });
    }
    for (key, value) in wrapper.defaults {
        let whole = *value >= 1.0;
        text.entry(*key).or_insert_with(|| if whole { json!(*value as u64) } else { json!(value) });
    }
    // The whole model's word counts; where nobody says, what the file has.
    let has_head = HEADS.iter().any(|head| has(checkpoint, head));
    let tied = present(config, TIED).or_else(|| text.get(TIED)).cloned();
    text.insert(TIED.into(), tied.unwrap_or_else(|| json!(!has_head)));
    text.insert("architectures".into(), config["architectures"].clone());
    let container =
        Container::HuggingFace { config: Value::Object(text), generation_config: generation_config.clone() };
    Ok(Some(Checkpoint { container, ..checkpoint.clone() }))
}

/// Where a file keeps the text model.
#[derive(Default)]
pub(super) struct Layout {
    /// What `model.` and `lm_head` are there; `None`: themselves.
    renamed: Option<(&'static str, &'static str)>,
}

impl Layout {
    pub fn of(checkpoint: &Checkpoint) -> Self {
        if wrapper(checkpoint).is_none() {
            return Self::default();
        }
        let found = |prefixes: [&'static str; 2]| {
            prefixes.into_iter().find(|prefix| has(checkpoint, prefix)).unwrap_or(prefixes[0])
        };
        Self { renamed: Some((found(BODIES), found(HEADS))) }
    }

    /// The name in the file of a module of the text model.
    pub fn stem(&self, stem: String) -> String {
        match (self.renamed, stem.strip_prefix(BODY)) {
            (Some((body, _)), Some(rest)) => format!("{body}{rest}"),
            (Some((_, head)), None) if stem == HEAD => head.into(),
            _ => stem,
        }
    }

    /// Whether a tensor of the file belongs to images, which nothing here reads.
    pub fn is_of_images(&self, name: &str) -> bool {
        self.renamed.is_some() && IMAGES.iter().any(|prefix| name.starts_with(prefix))
    }
}
