//! The text side of a Hugging Face directory: special tokens, chat templates, generation defaults.
//!
//! Invariant: every file but tokenizer.json may be missing; one that is there and broken is a `LoadError` that names
//! it and the key. `TextModel::load` is the only caller.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::LoadError;
use crate::request::SamplingParams;
use crate::weights::checkpoint::{self, malformed, read_file};

/// Sampling defaults that the model's authors wrote down (`--generation-config auto`); `None` where they did not.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerationDefaults {
    /// As in `SamplingParams`.
    pub temperature: Option<f32>,
    /// As in `SamplingParams`.
    pub top_p: Option<f32>,
    /// As in `SamplingParams`.
    pub top_k: Option<u32>,
    /// As in `SamplingParams`.
    pub min_p: Option<f32>,
    /// As in `SamplingParams`.
    pub repetition_penalty: Option<f32>,
    /// The default of `max_tokens`.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// The parameters of a request that says nothing, `max_tokens` aside.
    pub fn params(&self) -> SamplingParams {
        let off = SamplingParams::default();
        SamplingParams {
            temperature: self.temperature.unwrap_or(off.temperature),
            top_p: self.top_p.unwrap_or(off.top_p),
            top_k: self.top_k.unwrap_or(off.top_k),
            min_p: self.min_p.unwrap_or(off.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(off.repetition_penalty),
            ..off
        }
    }

    /// These values, and `base`'s where these are `None`.
    pub fn over(self, base: &Self) -> Self {
        Self {
            temperature: self.temperature.or(base.temperature),
            top_p: self.top_p.or(base.top_p),
            top_k: self.top_k.or(base.top_k),
            min_p: self.min_p.or(base.min_p),
            repetition_penalty: self.repetition_penalty.or(base.repetition_penalty),
            max_new_tokens: self.max_new_tokens.or(base.max_new_tokens),
        }
    }
}

/// Names of special tokens that templates may use, with the text of each.
const TEMPLATE_TOKENS: [&str; 5] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token"];

/// What the directory's files say.
#[derive(Debug, Default)]
pub(super) struct TextConfig {
    /// `(bos_token, "<s>")` and its like.
    pub(super) special_tokens: Vec<(&'static str, String)>,
    pub(super) chat_template: Option<String>,
    pub(super) tool_template: Option<String>,
    pub(super) bos_id: Option<u64>,
    pub(super) eos_ids: Vec<u64>,
    pub(super) generation: GenerationDefaults,
}

impl TextConfig {
    /// Reads what a tokenizer's directory has.
    ///
    /// # Errors
    /// A file that cannot be read or is not JSON.
    pub(super) fn read(dir: &Path) -> Result<Self, LoadError> {
        let mut text = Self::default();
        let path = dir.join("tokenizer_config.json");
        if let Some(tokenizer) = read_json(&path)? {
            text.add_tokenizer_config(&Keys { path, json: &tokenizer })?;
        }
        text.add_template_files(dir)?;
        Ok(text)
    }

    /// Adds what config.json and generation_config.json of the model in `dir` say.
    ///
    /// # Errors
    /// A value of the wrong type.
    pub(super) fn add_model_config(
        &mut self,
        dir: &Path,
        config: &Value,
        generation_config: Option<&Value>,
    ) -> Result<(), LoadError> {
        if let Some(json) = generation_config {
            self.add_generation_config(&Keys { path: dir.join("generation_config.json"), json })?;
        }
        for json in [Some(config), config.get("text_config")].into_iter().flatten() {
            let keys = Keys { path: dir.join("config.json"), json };
            self.eos_ids.extend(keys.ids("eos_token_id")?);
            self.bos_id = self.bos_id.or(keys.ids("bos_token_id")?.first().copied());
        }
        Ok(())
    }

    /// `add_bos_token` and `add_eos_token` are not read: transformers drops them where there is a tokenizer.json, whose
    /// post-processor says what is put around a text.
    fn add_tokenizer_config(&mut self, keys: &Keys<'_>) -> Result<(), LoadError> {
        for name in TEMPLATE_TOKENS {
            let token = &keys.json[name];
            match token.as_str().or_else(|| token["content"].as_str()) {
                Some(token) => self.special_tokens.push((name, token.to_owned())),
                None if token.is_null() => {}
                None => return Err(keys.wrong(name, "a token")),
            }
        }
        self.add_template(keys)
    }

    /// A template is a string, or a list of named ones.
    fn add_template(&mut self, keys: &Keys<'_>) -> Result<(), LoadError> {
        const KEY: &str = "chat_template";
        match &keys.json[KEY] {
            Value::Null => {}
            Value::String(template) => self.chat_template = Some(template.clone()),
            Value::Array(entries) => {
                for entry in entries {
                    let (Some(name), Some(template)) = (entry["name"].as_str(), entry["template"].as_str()) else {
                        return Err(keys.wrong(KEY, "a list of names and templates"));
                    };
                    match name {
                        "default" => self.chat_template = Some(template.to_owned()),
                        "tool_use" => self.tool_template = Some(template.to_owned()),
                        _ => {}
                    }
                }
            }
            _ => return Err(keys.wrong(KEY, "a template")),
        }
        Ok(())
    }

    /// Template files win over tokenizer_config.json.
    fn add_template_files(&mut self, dir: &Path) -> Result<(), LoadError> {
        let path = dir.join("chat_template.json");
        if let Some(json) = read_json(&path)? {
            self.add_template(&Keys { path, json: &json })?;
        }
        if let Some(template) = read_text(&dir.join("chat_template.jinja"))? {
            self.chat_template = Some(template);
        }
        if let Some(template) = read_text(&dir.join("additional_chat_templates").join("tool_use.jinja"))? {
            self.tool_template = Some(template);
        }
        Ok(())
    }

    fn add_generation_config(&mut self, keys: &Keys<'_>) -> Result<(), LoadError> {
        self.eos_ids.extend(keys.ids("eos_token_id")?);
        self.bos_id = keys.ids("bos_token_id")?.first().copied();
        self.generation = GenerationDefaults {
            temperature: keys.number("temperature")?,
            top_p: keys.number("top_p")?,
            top_k: keys.count("top_k")?,
            min_p: keys.number("min_p")?,
            repetition_penalty: keys.number("repetition_penalty")?,
            max_new_tokens: keys.count("max_new_tokens")?,
        };
        Ok(())
    }
}

/// A JSON object and the file that it came from.
struct Keys<'j> {
    path: PathBuf,
    json: &'j Value,
}

impl Keys<'_> {
    fn wrong(&self, key: &str, expected: &str) -> LoadError {
        let problem = format!("expected {expected}, got {}", self.json[key]);
        LoadError::Config { path: self.path.clone(), key: key.into(), problem }
    }

    fn number(&self, key: &str) -> Result<Option<f32>, LoadError> {
        match &self.json[key] {
            Value::Null => Ok(None),
            value => {
                let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
                number.map(Some).ok_or_else(|| self.wrong(key, "a number"))
            }
        }
    }

    fn count(&self, key: &str) -> Result<Option<u32>, LoadError> {
        match &self.json[key] {
            Value::Null => Ok(None),
            // -1 is "off" wherever a count can be off.
            value if value.as_i64() == Some(-1) => Ok(Some(0)),
            value => {
                let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
                count.map(Some).ok_or_else(|| self.wrong(key, "a count"))
            }
        }
    }

    /// One id or a list of them.
    fn ids(&self, key: &str) -> Result<Vec<u64>, LoadError> {
        let id = |value: &Value| value.as_u64().ok_or_else(|| self.wrong(key, "a token id or a list of them"));
        match &self.json[key] {
            Value::Null => Ok(Vec::new()),
            Value::Array(list) => list.iter().map(id).collect(),
            value => Ok(vec![id(value)?]),
        }
    }
}

/// Longest JSON file or template: tokenizer_config.json lists every added token.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The text of a file; `None` when there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    optional(read_file(path, MAX_FILE_BYTES)).and_then(|bytes| {
        bytes.map(String::from_utf8).transpose().map_err(|error| malformed(path, "text", error.to_string()))
    })
}

fn read_json(path: &Path) -> Result<Option<Value>, LoadError> {
    optional(checkpoint::read_json(path, MAX_FILE_BYTES))
}

/// `None` when there is no such file.
fn optional<T>(read: Result<T, LoadError>) -> Result<Option<T>, LoadError> {
    match read {
        Ok(content) => Ok(Some(content)),
        Err(LoadError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
