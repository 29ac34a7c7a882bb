//! Chat messages: from the wire's shapes to the plain objects that a chat template reads.
//!
//! Invariant: content is text; roles are the known ones, since a template writes them next to its control tokens.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::ApiError;

/// The roles that a message may have.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// One message of a body.
#[derive(Clone, Debug, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: Option<Content>,
    pub name: Option<String>,
    pub tool_call_id: Option<String>,
    pub tool_calls: Option<Value>,
    pub reasoning_content: Option<String>,
}

/// A message's content.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of content parts")]
pub enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// One part of a content.
#[derive(Clone, Debug, Deserialize)]
pub struct Part {
    pub r#type: String,
    pub text: Option<String>,
}

/// The messages as a template's variable.
///
/// # Errors
/// 400 naming the message, for no messages, an unknown role or content that is not text.
pub fn to_template(messages: Vec<Message>) -> Result<Value, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| one(index, message))
        .collect::<Result<Vec<_>, _>>()
        .map(Value::Array)
}

fn one(index: usize, message: Message) -> Result<Value, ApiError> {
    if !ROLES.contains(&message.role.as_str()) {
        let message = format!("the role must be one of {}", ROLES.join(", "));
        return Err(ApiError::invalid(format!("messages[{index}].role"), message));
    }
    if message.content.is_none() && message.role != "assistant" {
        return Err(ApiError::invalid(format!("messages[{index}].content"), "the message has no content"));
    }
    let mut fields = Map::new();
    fields.insert("role".into(), Value::String(message.role));
    fields.insert("content".into(), Value::String(flatten(index, message.content)?));
    let optional = [
        ("name", message.name.map(Value::String)),
        ("tool_call_id", message.tool_call_id.map(Value::String)),
        ("tool_calls", message.tool_calls),
        ("reasoning_content", message.reasoning_content.map(Value::String)),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            fields.insert(name.into(), value);
        }
    }
    Ok(Value::Object(fields))
}

/// The text of a content; parts are lines.
fn flatten(index: usize, content: Option<Content>) -> Result<String, ApiError> {
    let parts = match content {
        None => return Ok(String::new()),
        Some(Content::Text(text)) => return Ok(text),
        Some(Content::Parts(parts)) => parts,
    };
    let mut text = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        let path = format!("messages[{index}].content[{at}]");
        match (part.r#type.as_str(), part.text) {
            ("text", Some(piece)) => {
                if at > 0 {
                    text.push('\n');
                }
                text.push_str(&piece);
            }
            ("text", None) => return Err(ApiError::invalid(format!("{path}.text"), "the part has no text")),
            _ => {
                let message = "only parts of type 'text' are supported by this model";
                return Err(ApiError::invalid(format!("{path}.type"), message));
            }
        }
    }
    Ok(text)
}

/// Bytes of all contents of `to_template`'s messages.
pub fn num_bytes(messages: &Value) -> usize {
    let contents = messages.as_array().into_iter().flatten().filter_map(|message| message.get("content")?.as_str());
    contents.map(str::len).sum()
}
