//! Which files of a repository make up a model.
//!
//! Invariant: a choice is complete or refused with what there is to choose from; nothing is guessed. Pure: it sees names only,
//! of the repository or of what lies in the cache.

use super::HubError;
use super::name::HubName;

/// A model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// One GGUF file, or all parts of a split one, in order.
    Gguf(Vec<String>),
    /// A Hugging Face directory: what is there of configuration and tokenizer, without weights.
    Directory(Vec<String>),
}

/// What a Hugging Face directory may have beside weights; the first must be there.
const PARTS: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
];

/// Names the shards of a checkpoint.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// # Errors
/// `Choose` with the candidates.
pub(super) fn choose(name: &HubName, files: &[String]) -> Result<Choice, HubError> {
    let refused = |problem: String, candidates: Vec<String>| HubError::Choose {
        name: Box::new(name.clone()),
        problem,
        candidates,
    };
    let sets = gguf_sets(files);
    let whole = |set: &Vec<String>| match part_of(&set[0]) {
        Some((_, total)) if total.parse() != Ok(set.len()) => {
            Err(refused(format!("has {} of the {total} parts of a split file", set.len()), set.clone()))
        }
        _ => Ok(Choice::Gguf(set.clone())),
    };
    let firsts = |sets: &[Vec<String>]| sets.iter().map(|set| set[0].clone()).collect::<Vec<_>>();
    let Some(asked) = &name.file else {
        if files.iter().any(|file| file == PARTS[0]) && files.iter().any(|file| is_weights(file)) {
            return Ok(Choice::Directory(
                files.iter().filter(|file| PARTS.contains(&file.as_str())).cloned().collect(),
            ));
        }
        return match sets.as_slice() {
            [only] => whole(only),
            [] => Err(refused("has no GGUF file, and no config.json with safetensors".into(), files.to_vec())),
            _ => Err(refused("has several GGUF files; say which, e.g. as :Q4_K_M".into(), firsts(&sets))),
        };
    };
    let of_name: Vec<_> = sets.iter().filter(|set| set.contains(asked)).cloned().collect();
    let found = match of_name.is_empty() {
        true => sets.iter().filter(|set| holds(&set[0], asked)).cloned().collect(),
        false => of_name,
    };
    match found.as_slice() {
        [only] => whole(only),
        [] => Err(refused(format!("has no GGUF file of the name or with '{asked}' in it"), firsts(&sets))),
        _ => Err(refused(format!("has several GGUF files with '{asked}' in their names"), firsts(&found))),
    }
}

/// The checkpoint's files: those that its index names, or the one that needs none.
///
/// # Errors
/// `Choose`: a shard is not there, or several files and no index.
pub(super) fn weights(name: &HubName, files: &[String], index: Option<&[u8]>) -> Result<Vec<String>, HubError> {
    let refused = |problem: String, candidates: Vec<String>| HubError::Choose {
        name: Box::new(name.clone()),
        problem,
        candidates,
    };
    let there: Vec<String> = files.iter().filter(|file| is_weights(file)).cloned().collect();
    let Some(index) = index else {
        return match there.as_slice() {
            [only] => Ok(vec![only.clone()]),
            _ if there.iter().any(|file| file == "model.safetensors") => Ok(vec!["model.safetensors".into()]),
            _ => Err(refused(format!("has several safetensors files and no {INDEX}"), there)),
        };
    };
    let document: serde_json::Value = serde_json::from_slice(index)
        .map_err(|error| refused(format!("has an {INDEX} that is no JSON: {error}"), Vec::new()))?;
    let map = document["weight_map"].as_object().into_iter().flat_map(|map| map.values());
    let mut shards: Vec<String> = map.filter_map(|shard| shard.as_str().map(String::from)).collect();
    shards.sort();
    shards.dedup();
    match shards.iter().find(|shard| !there.contains(shard)) {
        Some(absent) => Err(refused(format!("has no '{absent}', which its {INDEX} names"), there)),
        None if shards.is_empty() => Err(refused(format!("has an {INDEX} that names no file"), there)),
        None => Ok(shards),
    }
}

/// Whether a file is of the checkpoint, and not a second copy of it in another layout.
fn is_weights(file: &str) -> bool {
    file.ends_with(".safetensors") && !file.contains('/') && !file.starts_with("consolidated")
}

/// GGUF files by set: a file alone, or all parts of a split one in order. Projectors of images are no models.
fn gguf_sets(files: &[String]) -> Vec<Vec<String>> {
    let mut names: Vec<&String> = files
        .iter()
        .filter(|file| file.ends_with(".gguf") && !file.rsplit('/').next().unwrap_or(file).starts_with("mmproj"))
        .collect();
    names.sort();
    let mut sets: Vec<Vec<String>> = Vec::new();
    for name in names {
        let stem = part_of(name);
        match sets.last_mut().filter(|set| stem.is_some() && part_of(&set[0]) == stem) {
            Some(set) => set.push(name.clone()),
            None => sets.push(vec![name.clone()]),
        }
    }
    sets
}

/// Of `x-00002-of-00003.gguf`: `x` and `00003`.
fn part_of(name: &str) -> Option<(&str, &str)> {
    let (head, total) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = head.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(part) && is_number(total)).then_some((stem, total))
}

/// Whether a file's name holds a quantisation as a word of its own: `Q4_K` is not in `x-Q4_K_M.gguf`.
fn holds(file: &str, asked: &str) -> bool {
    let (file, asked) = (file.to_lowercase(), asked.to_lowercase());
    file.match_indices(&asked).any(|(at, _)| {
        let before = file[..at].chars().next_back();
        let after = file[at + asked.len()..].chars().next();
        before.is_none_or(|c| !c.is_alphanumeric()) && after.is_none_or(|c| "-./".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn chosen(name: &str, names: &[&str]) -> Result<Choice, String> {
        let name = HubName::parse(name).expect("a name");
        choose(&name, &files(names)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_quantisation_names_one_file_or_all_its_parts() {
        let names =
            ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "q8_0/m-q8_0-00001-of-00002.gguf", "q8_0/m-q8_0-00002-of-00002.gguf"];
        assert_eq!(chosen("a/b:Q4_K_M", &names), Ok(Choice::Gguf(files(&names[..1]))));
        assert_eq!(chosen("a/b:q4_k_s", &names), Ok(Choice::Gguf(files(&names[1..2]))));
        assert_eq!(chosen("a/b:Q8_0", &names), Ok(Choice::Gguf(files(&names[2..]))));
        assert_eq!(chosen("a/b:m-Q4_K_S.gguf", &names), Ok(Choice::Gguf(files(&names[1..2]))));
        let part = chosen("a/b:q8_0/m-q8_0-00002-of-00002.gguf", &names);
        assert_eq!(part, Ok(Choice::Gguf(files(&names[2..]))), "a part stands for its set");
        let message = chosen("a/b:Q4_K", &names).expect_err("a word of its own");
        assert!(message.contains("Q4_K") && message.contains("m-Q4_K_S.gguf"), "{message}");
        let message = chosen("a/b", &names).expect_err("three to choose from");
        assert!(message.contains("m-Q4_K_M.gguf") && message.contains(":Q4_K_M"), "{message}");
        let message = chosen("a/b", &names[2..3]).expect_err("half of it");
        assert!(message.contains("1 of the 00002 parts"), "{message}");
        let message = chosen("a/b:q8_0", &["a-q8_0.gguf", "b-q8_0.gguf"]).expect_err("two");
        assert!(message.contains("a-q8_0.gguf") && message.contains("b-q8_0.gguf"), "{message}");
    }

    #[test]
    fn a_directory_is_preferred_and_one_gguf_needs_no_name() {
        let names =
            ["README.md", "config.json", "tokenizer.json", "model.safetensors", "m-f16.gguf", "original/x.safetensors"];
        assert_eq!(chosen("a/b", &names), Ok(Choice::Directory(files(&names[1..3]))));
        let only = ["mmproj-f16.gguf", "m.gguf"];
        assert_eq!(chosen("a/b", &only), Ok(Choice::Gguf(files(&only[1..]))));
        assert!(
            chosen("a/b", &["README.md", "pytorch_model.bin"]).expect_err("no weights").contains("pytorch_model.bin")
        );
    }

    #[test]
    fn shards_are_those_of_the_index() {
        let name = HubName::parse("a/b").expect("a name");
        let names = files(&["m-1.safetensors", "m-2.safetensors", "consolidated.safetensors"]);
        let of = |index: Option<&str>| weights(&name, &names, index.map(str::as_bytes)).map_err(|e| e.to_string());
        let index = r#"{"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}"#;
        assert_eq!(of(Some(index)), Ok(files(&["m-1.safetensors", "m-2.safetensors"])));
        for (index, problem) in [
            (None, INDEX),
            (Some("{"), "no JSON"),
            (Some("{}"), "names no file"),
            (Some(r#"{"weight_map": {"a": "../../x.safetensors"}}"#), "'../../x.safetensors'"),
        ] {
            let message = of(index).expect_err(problem);
            assert!(message.contains(problem), "{message}");
        }
        assert_eq!(
            weights(&name, &files(&["x.safetensors", "consolidated.00.safetensors"]), None).unwrap(),
            ["x.safetensors"]
        );
    }
}
