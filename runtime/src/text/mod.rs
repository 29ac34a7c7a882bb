//! Text on both sides of the engine: tokenizer, chat template, incremental detokenizer, stop strings.
//!
//! Invariant: engine code never imports this module; it sees ids only. Nothing here slices text by a byte offset that a
//! token boundary gave.

mod clock;
mod completion;
mod config;
mod decoder;
mod detokenizer;
mod gguf_vocab;
mod mask;
mod pre_tokenizers;
mod stop;
mod template;
#[cfg(test)]
mod tests;
mod tokenizer;
mod vocab;

use std::path::Path;
use std::sync::Arc;

pub use self::completion::{TextDelta, TextStream, TextStreamOptions};
pub use self::config::GenerationDefaults;
pub use self::detokenizer::Detokenizer;
pub use self::stop::StopMatcher;
pub use self::template::ChatTemplate;

use self::config::TextConfig;
use self::mask::END_OF_MESSAGE;
use self::tokenizer::Tokenizer;
use crate::error::{LoadError, RequestError};
use crate::ids::TokenId;
use crate::weights::checkpoint::malformed;
use crate::weights::{Checkpoint, Container};

/// Everything about a model's text side; cheap to clone, safe to use from any thread.
#[derive(Clone, Debug)]
pub struct TextModel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    tool_template: Option<ChatTemplate>,
    /// Template variables: `(bos_token, "<s>")` and its like.
    special_tokens: Vec<(&'static str, String)>,
    bos: Option<TokenId>,
    eos: Vec<TokenId>,
    generation: GenerationDefaults,
}

impl TextModel {
    /// Loads tokenizer, chat template and special ids from a checkpoint (GGUF metadata, or the directory's files).
    /// `tokenizer` overrides where the tokenizer comes from: a directory, a tokenizer.json or a GGUF file;
    /// `chat_template` is a file or the template itself.
    ///
    /// # Errors
    /// Missing files, an unknown pre-tokenizer, a template that does not parse.
    pub fn load(
        checkpoint: &Checkpoint,
        tokenizer: Option<&Path>,
        chat_template: Option<&str>,
    ) -> Result<Self, LoadError> {
        let mut parts = match tokenizer {
            Some(path) if path.extension().is_some_and(|extension| extension == "gguf") => {
                Parts::of_checkpoint(&Checkpoint::open(path)?)?
            }
            Some(path) => Parts::of_directory(path)?,
            None => Parts::of_checkpoint(checkpoint)?,
        };
        if let Container::HuggingFace { config, generation_config } = &checkpoint.container {
            parts.text.add_model_config(&checkpoint.path, config, generation_config.as_ref())?;
        }
        let parse = |source: &str, path: &Path| {
            ChatTemplate::parse(source).map_err(|problem| malformed(path, "chat template", problem))
        };
        let (template, tool_template) = match chat_template {
            Some(argument) => (Some(read_template(argument)?), None),
            None => (parts.text.chat_template.clone(), parts.text.tool_template.clone()),
        };
        let path =
            chat_template.filter(|argument| !argument.contains(['{', '\n'])).map_or(&*checkpoint.path, Path::new);
        let (bos, eos) = (parts.bos(), parts.eos());
        Ok(Self(Arc::new(Inner {
            template: template.map(|source| parse(&source, path)).transpose()?,
            tool_template: tool_template.map(|source| parse(&source, path)).transpose()?,
            special_tokens: parts.text.special_tokens,
            bos,
            eos,
            generation: parts.text.generation,
            tokenizer: parts.tokenizer,
        })))
    }

    /// Encodes plain text. `special`: whether special-token strings inside it become special tokens; `add_special`: whether
    /// the model's BOS (and whatever its tokenizer adds) is put around it.
    pub fn encode(&self, text: &str, add_special: bool, special: bool) -> Vec<TokenId> {
        self.0.tokenizer.encode(text, add_special, special)
    }

    /// Decodes ids; with `skip_special` special tokens are left out. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        self.0.tokenizer.decode(ids, skip_special)
    }

    /// A detokenizer. `continues`: the tokens go on after a prompt, so a leading space is text, and is kept.
    pub fn detokenizer(&self, skip_special: bool, continues: bool) -> Detokenizer {
        self.0.tokenizer.detokenizer(skip_special, continues)
    }

    /// The text side of one answer that continues a prompt.
    pub fn stream(&self, options: &TextStreamOptions) -> TextStream {
        TextStream::new(self.detokenizer(options.skip_special, true), options)
    }

    /// Renders a chat and encodes it: template text with special tokens, message text without.
    ///
    /// # Errors
    /// The template refused the messages (`raise_exception`), ran out of fuel, or there is no template: `Invalid`.
    pub fn encode_chat(&self, chat: &ChatInput<'_>) -> Result<Vec<TokenId>, RequestError> {
        self.encode_chat_with(chat, None)
    }

    /// As `encode_chat`, with another template than the model's (a request's own, where the server trusts it).
    ///
    /// # Errors
    /// As `encode_chat`.
    pub fn encode_chat_with(
        &self,
        chat: &ChatInput<'_>,
        template: Option<&ChatTemplate>,
    ) -> Result<Vec<TokenId>, RequestError> {
        Ok(self.0.tokenizer.encode_masked(&self.render_masked(chat, template)?))
    }

    /// Renders a chat to the text that `encode_chat` encodes.
    ///
    /// # Errors
    /// As `encode_chat`.
    pub fn render_chat(&self, chat: &ChatInput<'_>) -> Result<String, RequestError> {
        Ok(self.0.tokenizer.mask().restore(&self.render_masked(chat, None)?).into_owned())
    }

    /// Renders with message text masked, so that its special-token strings are not special.
    fn render_masked(&self, chat: &ChatInput<'_>, template: Option<&ChatTemplate>) -> Result<String, RequestError> {
        let inner = &*self.0;
        let mask = inner.tokenizer.mask();
        let with_tools = chat.kwargs.get("tools").is_some_and(|tools| !tools.is_null());
        let model_template = inner.tool_template.as_ref().filter(|_| with_tools).or(inner.template.as_ref());
        let template = template.or(model_template).ok_or_else(|| {
            RequestError::invalid("messages", "this model has no chat template; start the server with --chat-template")
        })?;
        if chat.continue_final_message && chat.add_generation_prompt {
            let message = "continue_final_message and add_generation_prompt cannot both be true";
            return Err(RequestError::invalid("continue_final_message", message));
        }
        let mut messages = mask.mask_json(chat.messages);
        drop_nulls(&mut messages);
        if chat.continue_final_message {
            mark_end(&mut messages)?;
        }
        // The template's own names win over what the request calls alike.
        let mut context = serde_json::Map::from_iter([("tools".into(), serde_json::Value::Null)]);
        context.insert("documents".into(), serde_json::Value::Null);
        context.extend(chat.kwargs.iter().map(|(name, value)| (name.clone(), mask.mask_json(value))));
        for (name, token) in &inner.special_tokens {
            context.insert((*name).into(), token.as_str().into());
        }
        context.insert("messages".into(), messages);
        context.insert("add_generation_prompt".into(), chat.add_generation_prompt.into());
        let input_bytes = context.iter().map(|(name, value)| name.len() + size_of_json(value)).sum();
        let rendered = template.render(&context, input_bytes).map_err(|problem| {
            RequestError::invalid("messages", format!("chat template: {}", mask.restore(&problem)))
        })?;
        if chat.continue_final_message { cut_after_end(rendered) } else { Ok(rendered) }
    }

    /// Whether chats can be rendered without a template of the request's own.
    pub fn has_chat_template(&self) -> bool {
        self.0.template.is_some()
    }

    /// The token that starts a text, if the model has one.
    pub fn bos_token_id(&self) -> Option<TokenId> {
        self.0.bos
    }

    /// Every token that ends an answer, ascending.
    pub fn eos_token_ids(&self) -> &[TokenId] {
        &self.0.eos
    }

    /// Sampling defaults of the model's authors.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.0.generation
    }

    /// Number of token ids that the tokenizer knows; the model's output may be padded past it.
    pub fn vocab_size(&self) -> usize {
        self.0.tokenizer.vocab().len()
    }

    /// The token as the vocabulary writes it (`Ġthe`, `▁the`, `<0x0A>`); empty for ids past the vocabulary.
    pub fn token_str(&self, id: TokenId) -> String {
        self.0.tokenizer.piece(id).unwrap_or_default()
    }

    /// The bytes of text that a token stands for, not necessarily whole characters: the `bytes` of log-probabilities.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.0.tokenizer.vocab().bytes(id)
    }

    /// The text that a token stands for, U+FFFD for parts of characters: the `token` of log-probabilities.
    pub fn token_text(&self, id: TokenId) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// Whether a token is a control token, which `skip_special` leaves out.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.0.tokenizer.vocab().is_special(id)
    }
}

/// A chat to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A JSON array of `{role, content, …}` objects, content already flattened to strings.
    pub messages: &'a serde_json::Value,
    /// Whether the assistant's header is appended.
    pub add_generation_prompt: bool,
    /// Whether the last (assistant) message is left open to be continued.
    pub continue_final_message: bool,
    /// Extra template variables (`tools`, `documents`, `chat_template_kwargs`).
    pub kwargs: &'a serde_json::Map<String, serde_json::Value>,
}

/// A tokenizer and what its files say, before the templates are parsed.
struct Parts {
    tokenizer: Tokenizer,
    /// Tokens that end a turn by the metadata of a GGUF file.
    end_of_turn: Vec<TokenId>,
    text: TextConfig,
}

impl Parts {
    fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let Container::Gguf(meta) = &checkpoint.container else { return Self::of_directory(&checkpoint.path) };
        let gguf = gguf_vocab::build(meta)?;
        let ids = [
            ("bos_token", gguf.bos),
            ("eos_token", gguf.eos),
            ("unk_token", gguf.unknown),
            ("pad_token", gguf.padding),
        ];
        let special_tokens =
            ids.into_iter().filter_map(|(name, id)| Some((name, gguf.tokenizer.piece(id?)?))).collect();
        let text = TextConfig {
            special_tokens,
            chat_template: meta.str("tokenizer.chat_template")?.map(str::to_owned),
            tool_template: meta.str("tokenizer.chat_template.tool_use")?.map(str::to_owned),
            ..TextConfig::default()
        };
        Ok(Self { tokenizer: gguf.tokenizer, end_of_turn: gguf.end_of_turn, text })
    }

    /// `path`: a directory, or a tokenizer.json inside one.
    fn of_directory(path: &Path) -> Result<Self, LoadError> {
        let is_file = path.is_file();
        let file = if is_file { path.to_owned() } else { path.join("tokenizer.json") };
        let dir = if is_file { path.parent().unwrap_or(Path::new(".")) } else { path };
        let tokenizer = Tokenizer::from_file(&file)?;
        Ok(Self { tokenizer, end_of_turn: Vec::new(), text: TextConfig::read(dir)? })
    }

    /// The id of a token that the tokenizer's files name.
    fn named(&self, name: &str) -> Option<TokenId> {
        let (_, token) = self.text.special_tokens.iter().find(|(known, _)| *known == name)?;
        self.tokenizer.id_of(token)
    }

    fn bos(&self) -> Option<TokenId> {
        self.named("bos_token").or_else(|| self.known(self.text.bos_id?))
    }

    /// An id from a file, if the vocabulary has it.
    fn known(&self, id: u64) -> Option<TokenId> {
        let id = u32::try_from(id).ok().map(TokenId)?;
        (id.index() < self.tokenizer.vocab().len()).then_some(id)
    }

    /// Ids from all sources that the vocabulary has.
    fn eos(&self) -> Vec<TokenId> {
        let listed = self.text.eos_ids.iter().filter_map(|&id| self.known(id));
        let mut eos: Vec<TokenId> =
            self.end_of_turn.iter().copied().chain(self.named("eos_token")).chain(listed).collect();
        eos.sort_unstable();
        eos.dedup();
        eos
    }
}

/// `--chat-template`: a file, or the template itself.
fn read_template(argument: &str) -> Result<String, LoadError> {
    if argument.contains(['{', '\n']) {
        return Ok(argument.to_owned());
    }
    let path = Path::new(argument);
    std::fs::read_to_string(path).map_err(|source| LoadError::Io { path: path.into(), source })
}

/// As in transformers: templates ask whether a field is there, and a null one is not.
fn drop_nulls(messages: &mut serde_json::Value) {
    for message in messages.as_array_mut().into_iter().flatten().filter_map(serde_json::Value::as_object_mut) {
        message.retain(|_, value| !value.is_null());
    }
}

/// Puts a mark at the end of the last message. The space after it shows later whether the template strips messages.
fn mark_end(messages: &mut serde_json::Value) -> Result<(), RequestError> {
    let last = messages.as_array_mut().and_then(|messages| messages.last_mut());
    let content = last.and_then(|message| message.get_mut("content"));
    let Some(serde_json::Value::String(content)) = content else {
        return Err(RequestError::invalid("messages", "continue_final_message needs a last message with text"));
    };
    content.push(END_OF_MESSAGE);
    content.push(' ');
    Ok(())
}

/// Cuts a rendered chat where the last message ends.
fn cut_after_end(mut rendered: String) -> Result<String, RequestError> {
    let Some(at) = rendered.rfind(END_OF_MESSAGE) else {
        return Err(RequestError::invalid(
            "continue_final_message",
            "the chat template does not render the last message",
        ));
    };
    let stripped = !rendered[at + END_OF_MESSAGE.len_utf8()..].starts_with(' ');
    rendered.truncate(at);
    if stripped {
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}

/// About how many bytes of text a JSON value holds.
fn size_of_json(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::String(text) => text.len(),
        serde_json::Value::Array(items) => items.iter().map(size_of_json).sum::<usize>() + items.len(),
        serde_json::Value::Object(fields) => fields.iter().map(|(key, item)| key.len() + size_of_json(item)).sum(),
        _ => 8,
    }
}
