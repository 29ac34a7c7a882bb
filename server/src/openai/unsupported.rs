//! Fields that other engines have and this one does not: those that would change the answer's meaning are refused.
//!
//! Invariant: a value of `UNSUPPORTED` passes only when it asks for nothing (null, false, "", an empty list where that
//! means "none", the one supported choice); a field that is in no table is ignored, as every OpenAI server does.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::body;
use crate::error::ApiError;

/// Most fields that are told apart; a body of a million names is not worth remembering.
const MAX_FIELDS: usize = 64;

/// Just enough of a value to see whether it asks for something.
#[derive(Clone, Debug, PartialEq)]
enum Given {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    /// A list's length and its first strings.
    List(usize, Vec<String>),
    /// An object's `type`, if that is a string.
    Object(Option<String>),
}

/// What a field may be without being refused.
type Harmless = fn(&Given) -> bool;

fn nothing(given: &Given) -> bool {
    matches!(given, Given::Null)
}

fn unset(given: &Given) -> bool {
    match given {
        Given::Null | Given::Bool(false) | Given::List(0, _) => true,
        Given::Number(number) => *number == 0.0,
        Given::Text(text) => text.is_empty(),
        _ => false,
    }
}

fn at_most_one(given: &Given) -> bool {
    matches!(given, Given::Null) || matches!(given, Given::Number(number) if *number == 1.0)
}

fn text_only(given: &Given) -> bool {
    match given {
        Given::Null => true,
        Given::Object(kind) => kind.as_deref() == Some("text"),
        Given::List(len, texts) => *len == 1 && texts[..] == ["text"],
        _ => false,
    }
}

fn no_choice(given: &Given) -> bool {
    matches!(given, Given::Null) || matches!(given, Given::Text(text) if text == "none")
}

const UNSUPPORTED: &[(&str, Harmless)] = &[
    ("audio", nothing),
    ("best_of", at_most_one),
    ("function_call", no_choice),
    ("functions", nothing),
    ("guided_choice", nothing),
    ("guided_decoding_backend", nothing),
    ("guided_grammar", nothing),
    ("guided_json", nothing),
    ("guided_regex", nothing),
    ("guided_whitespace_pattern", nothing),
    ("kv_transfer_params", nothing),
    ("logits_processors", unset),
    ("modalities", text_only),
    ("prompt_embeds", unset),
    ("repetition_detection", nothing),
    ("response_format", text_only),
    ("structured_outputs", nothing),
    ("suffix", unset),
    ("thinking_token_budget", nothing),
    ("tool_choice", no_choice),
    ("tools", nothing),
    ("use_beam_search", unset),
    ("web_search_options", nothing),
];

/// Refuses a body that asks for something that is not there.
///
/// # Errors
/// 400 whose `param` is the field; 400 for a body that is not an object.
pub fn refuse_unsupported(bytes: &[u8]) -> Result<(), ApiError> {
    let Fields(fields) = body::parse(bytes)?;
    for (name, given) in fields {
        let harmless = UNSUPPORTED.iter().any(|(field, harmless)| *field == name && harmless(&given));
        if !harmless {
            return Err(ApiError::invalid(name, format!("'{name}' with this value is not supported")));
        }
    }
    Ok(())
}

/// The fields of a body that are in `UNSUPPORTED`.
struct Fields(Vec<(&'static str, Given)>);

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            match UNSUPPORTED.iter().find(|(field, _)| *field == name) {
                Some((field, _)) if fields.len() < MAX_FIELDS => fields.push((*field, map.next_value()?)),
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(Fields(fields))
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct GivenVisitor;

impl<'de> Visitor<'de> for GivenVisitor {
    type Value = Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Given, E> {
        Ok(Given::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Given, E> {
        Ok(Given::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Given, E> {
        Ok(Given::Number(value as f64))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Given, E> {
        Ok(Given::Number(value as f64))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Given, E> {
        Ok(Given::Number(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Given, E> {
        Ok(Given::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Given, A::Error> {
        let (mut len, mut texts) = (0, Vec::new());
        while len < 4 {
            let Some(given) = seq.next_element()? else { return Ok(Given::List(len, texts)) };
            len += 1;
            if let Given::Text(text) = given {
                texts.push(text);
            }
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {
            len += 1;
        }
        Ok(Given::List(len, texts))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Given, A::Error> {
        let mut kind = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "type" {
                map.next_value::<IgnoredAny>()?;
            } else if let Given::Text(text) = map.next_value()? {
                kind = Some(text);
            }
        }
        Ok(Given::Object(kind))
    }
}

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(GivenVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (field, value) in [
            ("tools", "[]"),
            ("tools", r#"[{"type":"function"}]"#),
            ("tool_choice", r#""auto""#),
            ("response_format", r#"{"type":"json_object"}"#),
            ("guided_json", "{}"),
            ("best_of", "2"),
            ("suffix", r#""end""#),
            ("modalities", r#"["text","audio"]"#),
            ("use_beam_search", "true"),
        ] {
            let body = format!(r#"{{"model":"m","{field}":{value}}}"#);
            let error = refuse_unsupported(body.as_bytes()).expect_err(&body);
            assert_eq!(error.param.as_deref(), Some(field), "{body}");
        }
    }

    #[test]
    fn what_asks_for_nothing_passes() {
        let body = br#"{"tools":null,"tool_choice":"none","response_format":{"type":"text"},"best_of":1,"suffix":null,
            "modalities":["text"],"use_beam_search":false,"a_field_of_tomorrow":{"x":[1]}}"#;
        assert_eq!(refuse_unsupported(body), Ok(()));
    }
}
