//! Names of models on the hub: `org/name[@revision][:file-or-quant]`.
//!
//! Invariant: what parses can be put into a path or an address as it is. Pure.

use std::fmt;

/// A model's repository, at a revision, and which of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// `org/name`.
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// A file, or what its name holds, e.g. `Q4_K_M`.
    pub file: Option<String>,
}

impl HubName {
    /// `None` where the text is no such name.
    pub fn parse(text: &str) -> Option<Self> {
        let (head, file) = split(text, ':');
        let (repo, revision) = split(head, '@');
        let (org, name) = repo.split_once('/')?;
        let is_name = |part: &str| {
            let ends_well = !part.starts_with(['.', '-']) && !part.ends_with(['.', '-']) && !part.contains("..");
            !part.is_empty() && ends_well && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        let is_sound = is_name(org) && is_name(name) && revision.is_none_or(is_path) && file.is_none_or(is_path);
        is_sound.then(|| Self {
            repo: repo.into(),
            revision: revision.unwrap_or("main").into(),
            file: file.map(String::from),
        })
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        self.file.as_ref().map_or(Ok(()), |file| write!(f, ":{file}"))
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at).map_or((text, None), |(head, tail)| (head, Some(tail)))
}

/// Whether a name stays inside the folder that it is joined to, and means the same in an address.
pub(super) fn is_path(name: &str) -> bool {
    let is_part = |part: &str| {
        !matches!(part, "" | "." | "..") && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-+=,()[] ".contains(c))
    };
    name.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_and_put_together() {
        for (text, repo, revision, file) in [
            ("org/name", "org/name", "main", None),
            ("Qwen/Qwen3-0.6B@v1.0", "Qwen/Qwen3-0.6B", "v1.0", None),
            ("a/b:Q4_K_M", "a/b", "main", Some("Q4_K_M")),
            ("a/b@refs/pr/1:sub/m.gguf", "a/b", "refs/pr/1", Some("sub/m.gguf")),
        ] {
            let name = HubName::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((name.repo.as_str(), name.revision.as_str(), name.file.as_deref()), (repo, revision, file));
            assert_eq!(name.to_string(), text);
        }
    }

    #[test]
    fn paths_and_worse_are_no_names() {
        for text in [
            "demo",
            "/a/b",
            "./a",
            "../a",
            "a/b/c",
            "a/",
            "a/b@",
            "a/b:",
            "a/..",
            "a/b:../../x",
            "a/b@..",
            "a b/c",
            "a/b:/x",
            "a/b?c",
            "a/b:x?y",
            "m.gguf",
        ] {
            assert_eq!(HubName::parse(text), None, "{text}");
        }
    }
}
