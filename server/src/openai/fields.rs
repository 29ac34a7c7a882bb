//! Wire types that are kinder or stricter than serde's: what JSON clients send for numbers, prompts and lists.
//!
//! Invariant: `1.0` is an integer and `"1"` is not a number (as JSON Schema has it); a token id is 32 bits wide from the
//! first byte on, so that a body of ids costs no more memory than its text. Null is absence, by `Option`.

use std::fmt;

use runtime::ids::TokenId;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// An integer; `3.0` counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int(pub i64);

struct IntVisitor;

impl Visitor<'_> for IntVisitor {
    type Value = Int;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Int, E> {
        Ok(Int(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Int, E> {
        i64::try_from(value).map(Int).map_err(|_| E::custom(format!("{value} is out of range")))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Int, E> {
        // Beyond 2^53 a float no longer says which integer was meant.
        if value.fract() == 0.0 && value.abs() <= 9_007_199_254_740_992.0 {
            return Ok(Int(value as i64));
        }
        Err(E::custom(format!("{value} is not an integer in range")))
    }
}

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IntVisitor)
    }
}

/// A token id: an integer of 32 bits; whether the vocabulary has it is checked later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(pub TokenId);

fn token_id<E: de::Error>(value: Int) -> Result<TokenId, E> {
    u32::try_from(value.0).map(TokenId).map_err(|_| E::custom(format!("{} is not a token id", value.0)))
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        token_id(Int::deserialize(deserializer)?).map(Id)
    }
}

/// One string or a list of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strings(pub Vec<String>);

struct StringsVisitor;

impl<'de> Visitor<'de> for StringsVisitor {
    type Value = Strings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Strings, E> {
        Ok(Strings(vec![value.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Strings, A::Error> {
        let mut strings = Vec::new();
        while let Some(string) = seq.next_element()? {
            strings.push(string);
        }
        Ok(Strings(strings))
    }
}

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StringsVisitor)
    }
}

/// `{"token id": bias}`, in the order of the body.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitBias(pub Vec<(TokenId, f64)>);

struct LogitBiasVisitor;

impl<'de> Visitor<'de> for LogitBiasVisitor {
    type Value = LogitBias;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from token ids to numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
        let mut biases = Vec::new();
        while let Some((key, bias)) = map.next_entry::<String, f64>()? {
            let digits = key.bytes().all(|byte| byte.is_ascii_digit());
            let id = key.parse().ok().filter(|_| digits).map(TokenId);
            let id = id.ok_or_else(|| de::Error::custom(format!("'{}' is not a token id", key.escape_debug())))?;
            biases.push((id, bias));
        }
        let mut ids: Vec<TokenId> = biases.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(de::Error::custom(format!("token {} has two biases", twice[0])));
        }
        Ok(LogitBias(biases))
    }
}

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LogitBiasVisitor)
    }
}

/// One prompt of a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenised.
    Text(String),
    /// Already tokenised.
    Ids(Vec<TokenId>),
}

/// A completion's `prompt`: a string, strings, ids, or lists of ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompts(pub Vec<Prompt>);

enum PromptItem {
    Prompt(Prompt),
    Id(TokenId),
}

struct PromptItemVisitor;

impl<'de> Visitor<'de> for PromptItemVisitor {
    type Value = PromptItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or a list of token ids")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<PromptItem, E> {
        Ok(PromptItem::Prompt(Prompt::Text(value.to_owned())))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<PromptItem, E> {
        token_id(Int(value)).map(PromptItem::Id)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<PromptItem, E> {
        token_id(IntVisitor.visit_u64(value)?).map(PromptItem::Id)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<PromptItem, E> {
        token_id(IntVisitor.visit_f64(value)?).map(PromptItem::Id)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptItem, A::Error> {
        let mut ids = Vec::new();
        while let Some(Id(id)) = seq.next_element()? {
            ids.push(id);
        }
        Ok(PromptItem::Prompt(Prompt::Ids(ids)))
    }
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptItemVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids or a list of lists of token ids")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![Prompt::Text(value.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
        let mut prompts = Vec::new();
        let mut ids = Vec::new();
        while let Some(item) = seq.next_element()? {
            match item {
                PromptItem::Prompt(prompt) => prompts.push(prompt),
                PromptItem::Id(id) => ids.push(id),
            }
            if !ids.is_empty() && !prompts.is_empty() {
                return Err(de::Error::custom("token ids and whole prompts are mixed in one list"));
            }
        }
        if !ids.is_empty() {
            prompts.push(Prompt::Ids(ids));
        }
        Ok(Prompts(prompts))
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::parse;

    #[test]
    fn integers_may_be_written_as_floats_and_never_as_strings() {
        assert_eq!(parse::<Int>(b"3"), Ok(Int(3)));
        assert_eq!(parse::<Int>(b"3.0"), Ok(Int(3)));
        for bad in ["3.5", "\"3\"", "true", "1e300", "18446744073709551615", "[3]"] {
            assert!(parse::<Int>(bad.as_bytes()).is_err(), "{bad} is not an integer");
        }
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let text = |text: &str| Prompt::Text(text.into());
        let ids = |ids: &[u32]| Prompt::Ids(ids.iter().map(|&id| TokenId(id)).collect());
        assert_eq!(parse::<Prompts>(br#""a""#), Ok(Prompts(vec![text("a")])));
        assert_eq!(parse::<Prompts>(br#"["a", "b"]"#), Ok(Prompts(vec![text("a"), text("b")])));
        assert_eq!(parse::<Prompts>(b"[1, 2.0]"), Ok(Prompts(vec![ids(&[1, 2])])));
        assert_eq!(parse::<Prompts>(b"[[1], [2, 3]]"), Ok(Prompts(vec![ids(&[1]), ids(&[2, 3])])));
        for bad in ["[1, \"a\"]", "[[1], 2]", "[-1]", "[4294967296]", "[[[1]]]", "{}", "7", "[null]"] {
            assert!(parse::<Prompts>(bad.as_bytes()).is_err(), "{bad} is not a prompt");
        }
    }
}
