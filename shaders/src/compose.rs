//! Composes a kernel: its file, the files that it uses, and its settings, as one WGSL text with a line map.
//!
//! Two directives, both comments to every other tool, so that each file stays plain WGSL:
//! - `const ROWS: u32 = 8u; //!set rows per lane` declares a setting; a variant of the kernel replaces the value;
//! - `//!use shared/reduce.wgsl` brings a file in once; `//!use format/q4_1.wgsl as FORMAT` makes the file's stem a setting.
//!
//! Invariant: lines are only replaced in place or brought in whole, so that every line of the text maps to a file and a line.
//! Pure; `build.rs` composes what ships, the backend composes variants, the kernel lab composes what a user wrote.

use std::collections::BTreeMap;
use std::fmt;

/// Values by name, as WGSL writes them: `ROWS` → `8`, `FORMAT` → `q4_1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// No setting: every default.
    pub fn new() -> Self {
        Self::default()
    }

    /// With one more value.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.0.insert(name.into(), value.to_string());
        self
    }

    /// The value of a setting, if it was given.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Names and values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

/// What a setting holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingKind {
    /// A WGSL `u32`.
    U32,
    /// A WGSL `bool`.
    Bool,
    /// The stem of a file.
    File,
}

/// A setting that a kernel declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name, in capitals.
    pub name: String,
    /// What it holds.
    pub kind: SettingKind,
    /// Its value in this text.
    pub value: String,
    /// What it means; for a file, its folder.
    pub doc: String,
}

/// One WGSL text and where each of its lines comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Composed {
    /// The text.
    pub text: String,
    /// In order of appearance, with the values taken.
    pub settings: Vec<Setting>,
    files: Vec<String>,
    /// Per line of the text: index of the file, line in it from 1.
    lines: Vec<(usize, u32)>,
}

impl Composed {
    /// Its files: the kernel's own, then those that it uses.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// File and line (from 1) of a line of the text (from 1).
    pub fn origin(&self, line: u32) -> (&str, u32) {
        let (file, line) =
            self.lines.get(line.saturating_sub(1) as usize).or(self.lines.last()).copied().unwrap_or((0, 1));
        (&self.files[file], line)
    }
}

/// What is wrong with a directive or a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComposeError {
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// What is wrong.
    pub problem: String,
}

impl fmt::Display for ComposeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.problem)
    }
}

impl std::error::Error for ComposeError {}

/// Composes the kernel `text` of `file`; `source(path)` gives the files that it uses.
///
/// # Errors
/// A file that is not there, a directive that cannot be read, a setting with a wrong value or that no file declares.
pub fn compose(
    file: &str,
    text: &str,
    settings: &Settings,
    source: &dyn Fn(&str) -> Option<String>,
) -> Result<Composed, ComposeError> {
    let composed = Composed { text: String::new(), settings: Vec::new(), files: Vec::new(), lines: Vec::new() };
    let mut composer = Composer { composed, settings, source };
    composer.add(file, text)?;
    let composed = composer.composed;
    for (name, _) in settings.iter() {
        if !composed.settings.iter().any(|setting| setting.name == name) {
            let known: Vec<&str> = composed.settings.iter().map(|setting| setting.name.as_str()).collect();
            let problem = format!("no setting '{name}' here (there are: {})", known.join(", "));
            return Err(ComposeError { file: file.into(), line: 1, problem });
        }
    }
    Ok(composed)
}

struct Composer<'a> {
    composed: Composed,
    settings: &'a Settings,
    source: &'a dyn Fn(&str) -> Option<String>,
}

impl Composer<'_> {
    fn add(&mut self, file: &str, text: &str) -> Result<(), ComposeError> {
        let index = self.composed.files.len();
        self.composed.files.push(file.into());
        for (i, line) in text.lines().enumerate() {
            let number = i as u32 + 1;
            let error = |problem| ComposeError { file: file.into(), line: number, problem };
            let directive = line.trim_start().strip_prefix("//!use ");
            let line = match line.split_once("//!set ") {
                Some((declaration, doc)) => self.set(declaration, doc).map_err(error)?,
                None => line.to_owned(),
            };
            // The directive's own line stays, a comment, so that the places of errors stay true.
            self.push(index, number, &line);
            if let Some(directive) = directive {
                let path = self.resolve(directive.trim()).map_err(error)?;
                if self.composed.files.contains(&path) {
                    continue;
                }
                let used = (self.source)(&path).ok_or_else(|| error(format!("there is no '{path}'")))?;
                self.add(&path, &used)?;
            }
        }
        Ok(())
    }

    fn push(&mut self, file: usize, number: u32, line: &str) {
        self.composed.text.push_str(line);
        self.composed.text.push('\n');
        self.composed.lines.push((file, number));
    }

    /// `const NAME: type = value;` with the value that was asked for.
    fn set(&mut self, declaration: &str, doc: &str) -> Result<String, String> {
        let wrong = || "a setting is declared as `const NAME: u32 = 8u; //!set doc` (or bool)".to_owned();
        let (name, rest) =
            declaration.trim().strip_prefix("const ").ok_or_else(wrong)?.split_once(':').ok_or_else(wrong)?;
        let (kind, default) = rest.split_once('=').ok_or_else(wrong)?;
        let (name, kind) = (name.trim(), kind.trim());
        let default = default.trim().trim_end_matches(';').trim_end();
        let value = self.settings.get(name).unwrap_or(default).to_owned();
        let kind = match kind {
            "u32" if value.trim_end_matches('u').parse::<u32>().is_ok() => SettingKind::U32,
            "bool" if value.parse::<bool>().is_ok() => SettingKind::Bool,
            "u32" | "bool" => return Err(format!("setting {name} is a {kind}, got '{value}'")),
            _ => return Err(wrong()),
        };
        let line = match kind {
            SettingKind::U32 => format!("const {name}: u32 = {}u;", value.trim_end_matches('u')),
            _ => format!("const {name}: bool = {value};"),
        };
        self.declare(name, kind, value.trim_end_matches('u').into(), doc.trim())?;
        Ok(line)
    }

    /// The path of `path.wgsl` or `folder/default.wgsl as NAME`.
    fn resolve(&mut self, directive: &str) -> Result<String, String> {
        let Some((path, name)) = directive.split_once(" as ") else { return Ok(directive.into()) };
        let (folder, default) = path.rsplit_once('/').ok_or("`//!use folder/default.wgsl as NAME`")?;
        let name = name.trim();
        let stem = self.settings.get(name).unwrap_or(default.trim_end_matches(".wgsl")).to_owned();
        if !stem.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(format!("setting {name} names a file of {folder}/, got '{stem}'"));
        }
        self.declare(name, SettingKind::File, stem.clone(), folder)?;
        Ok(format!("{folder}/{stem}.wgsl"))
    }

    fn declare(&mut self, name: &str, kind: SettingKind, value: String, doc: &str) -> Result<(), String> {
        if self.composed.settings.iter().any(|setting| setting.name == name) {
            return Err(format!("setting {name} is declared twice"));
        }
        self.composed.settings.push(Setting { name: name.into(), kind, value, doc: doc.into() });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAIN: &str = "// head\n//!use shared/a.wgsl\nconst ROWS: u32 = 8u; //!set rows per lane\n//!use format/x.wgsl as FORMAT\n//!use shared/a.wgsl\nfn main() {}\n";

    fn source(path: &str) -> Option<String> {
        let text = match path {
            "shared/a.wgsl" => "fn a() {}\nconst WIDE: bool = false; //!set wide loads\n",
            "format/x.wgsl" => "fn x() {}\n",
            "format/y.wgsl" => "\n\nfn y() {}\n",
            _ => return None,
        };
        Some(text.into())
    }

    #[test]
    fn every_line_knows_where_it_comes_from() {
        let settings = Settings::new().with("ROWS", 4).with("FORMAT", "y").with("WIDE", true);
        let composed = compose("main.wgsl", MAIN, &settings, &source).expect("sound");
        let at = |needle: &str| {
            let line = composed.text.lines().position(|line| line == needle).expect(needle) as u32 + 1;
            composed.origin(line)
        };
        assert_eq!(at("fn a() {}"), ("shared/a.wgsl", 1));
        assert_eq!(at("const WIDE: bool = true;"), ("shared/a.wgsl", 2));
        assert_eq!(at("const ROWS: u32 = 4u;"), ("main.wgsl", 3));
        assert_eq!(at("fn y() {}"), ("format/y.wgsl", 3));
        assert_eq!(at("fn main() {}"), ("main.wgsl", 6));
        assert_eq!(composed.text.matches("fn a()").count(), 1, "a file is brought in once");
        assert_eq!(composed.origin(1000), ("main.wgsl", 6), "an error past the end points at the end");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let problem = |text: &str, settings: Settings| {
            compose("main.wgsl", text, &settings, &source).expect_err("must be refused").to_string()
        };
        assert!(problem(MAIN, Settings::new().with("ROW", 1)).contains("no setting 'ROW'"));
        assert!(problem(MAIN, Settings::new().with("ROWS", "true")).starts_with("main.wgsl:3: setting ROWS is a u32"));
        assert!(problem(MAIN, Settings::new().with("WIDE", 1)).starts_with("shared/a.wgsl:2: setting WIDE is a bool"));
        assert!(problem(MAIN, Settings::new().with("FORMAT", "z")).starts_with("main.wgsl:4: there is no 'format/z"));
        assert!(problem(MAIN, Settings::new().with("FORMAT", "../z")).contains("names a file of format/"));
        assert!(problem("//!use nothing.wgsl", Settings::new()).contains("nothing.wgsl"));
        assert!(problem("const A = 3; //!set x", Settings::new()).contains("declared as"));
        let twice = "const A: u32 = 1u; //!set x\nconst A: u32 = 1u; //!set x";
        assert!(problem(twice, Settings::new()).contains("twice"));
    }
}
