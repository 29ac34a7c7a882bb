//! Composes, validates and reflects every kernel and writes the typed table that `src/table.rs` includes.
//!
//! Invariant: every choice of files and switches of a kernel is valid and has the same bindings (but for the vectors that
//! a buffer is read by) and the same uniform struct, so that one Rust type per kernel serves all its variants, and a wrong
//! name or layout does not compile.

#[allow(dead_code)]
#[path = "src/compose.rs"]
mod compose;
#[allow(dead_code)]
#[path = "src/reflect.rs"]
mod reflect;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

use compose::{Composed, Setting, SettingKind, Settings, compose};
use reflect::{Access, Interface, check};

/// Paths below `wgsl/`, with the texts.
type Sources = BTreeMap<String, String>;

fn main() {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("wgsl");
    println!("cargo:rerun-if-changed={}", root.display());
    let mut sources = Sources::new();
    read(&root, "", &mut sources);
    let mut table = String::new();
    let mut rows = String::new();
    for (path, text) in sources.iter().filter(|(path, _)| !path.contains('/')) {
        let name = path.trim_end_matches(".wgsl");
        match kernel(name, text, &sources) {
            Ok((module, row)) => {
                table.push_str(&module);
                rows.push_str(&row);
            }
            Err(problem) => {
                eprintln!("{problem}");
                std::process::exit(1);
            }
        }
    }
    let files: String = sources.iter().map(|(path, text)| format!("    ({path:?}, {text:?}),\n")).collect();
    writeln!(table, "/// Every kernel, by name.\npub static KERNELS: &[Kernel] = &[\n{rows}];").expect("a string");
    writeln!(table, "/// Every WGSL file, by path.\npub static SOURCES: &[(&str, &str)] = &[\n{files}];")
        .expect("a string");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it")).join("table.rs");
    fs::write(out, table).expect("OUT_DIR is writable");
}

fn read(folder: &Path, prefix: &str, sources: &mut Sources) {
    for entry in fs::read_dir(folder).expect("wgsl/ is there").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() {
            read(&path, &format!("{prefix}{name}/"), sources);
        } else if name.ends_with(".wgsl") {
            sources.insert(format!("{prefix}{name}"), fs::read_to_string(&path).expect("a WGSL file is UTF-8"));
        }
    }
}

/// The Rust module of one kernel and its row in the table.
fn kernel(name: &str, text: &str, sources: &Sources) -> Result<(String, String), String> {
    let file = format!("{name}.wgsl");
    let source = |path: &str| sources.get(path).cloned();
    let one = |settings: &Settings| -> Result<(Composed, Interface), String> {
        let composed = compose(&file, text, settings, &source).map_err(|e| e.to_string())?;
        let checked = check(&composed).map_err(|e| e.to_string())?;
        Ok((composed, checked.interface))
    };
    let (default, mut interface) = one(&Settings::new())?;
    for settings in variants(&default.settings, sources) {
        let (_, other) = one(&settings).map_err(|e| format!("{file} with {settings}: {e}"))?;
        let same_bindings = other.bindings.len() == interface.bindings.len()
            && other.bindings.iter().zip(&interface.bindings).all(|(a, b)| (&a.name, a.access) == (&b.name, b.access));
        if !same_bindings || other.params != interface.params {
            return Err(format!("{file} with {settings}: other bindings or params than its default"));
        }
        for (binding, other) in interface.bindings.iter_mut().zip(&other.bindings) {
            binding.min_bytes = binding.min_bytes.max(other.min_bytes);
        }
    }
    Ok((module(name, &interface), row(name, &default, &interface)))
}

/// Every choice of files and switches; a weight format meets the other settings one at a time: its fragment knows nothing of
/// them, and all choices together would be many hundreds.
fn variants(settings: &[Setting], sources: &Sources) -> Vec<Settings> {
    let mut all = vec![Settings::new()];
    for setting in settings {
        let folder = format!("{}/", setting.doc);
        let values: Vec<&str> = match setting.kind {
            SettingKind::U32 => continue,
            SettingKind::Bool => vec!["false", "true"],
            SettingKind::File => {
                let stems = sources.keys().filter_map(|path| path.strip_prefix(&folder));
                stems.map(|stem| stem.trim_end_matches(".wgsl")).collect()
            }
        };
        all = all.iter().flat_map(|s| values.iter().map(|value| s.clone().with(&setting.name, value))).collect();
        all.retain(|chosen| {
            let is_changed = |setting: &&Setting| chosen.get(&setting.name).is_some_and(|value| value != setting.value);
            let (formats, others): (Vec<&Setting>, Vec<&Setting>) =
                settings.iter().filter(is_changed).partition(|setting| setting.name == "FORMAT");
            formats.is_empty() || others.len() <= 1
        });
    }
    all
}

fn module(name: &str, interface: &Interface) -> String {
    let mut code = String::new();
    let storage: Vec<_> = interface.bindings.iter().filter(|b| b.access != Access::Uniform).collect();
    let list = |each: &dyn Fn(&str) -> String| storage.iter().map(|b| each(&b.name)).collect::<String>();
    let params: String = interface.params.iter().map(|f| format!("        pub {}: {},\n", f.name, f.scalar)).collect();
    let bindings = list(&|name| format!("        pub {name}: Range<'a>,\n"));
    let names = list(&|name| format!("self.{name}, "));
    write!(
        code,
        "/// `{name}.wgsl`: the numbers and the buffers of one dispatch.\n\
         #[allow(missing_docs)]\n\
         pub mod {name} {{\n    use super::{{Bind, Range}};\n\
         \x20   #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]\n    #[repr(C)]\n\
         \x20   pub struct Params {{\n{params}    }}\n\
         \x20   #[derive(Clone, Copy, Debug)]\n    pub struct Bindings<'a> {{\n{bindings}    }}\n\
         \x20   impl<'a> Bind<'a> for Bindings<'a> {{\n        type Params = Params;\n        const KERNEL: &'static str = \"{name}\";\n\
         \x20       fn ranges(self) -> Vec<Range<'a>> {{\n            vec![{names}]\n        }}\n    }}\n}}\n\n"
    )
    .expect("a string");
    code
}

fn row(name: &str, composed: &Composed, interface: &Interface) -> String {
    let mut bindings = String::new();
    for binding in &interface.bindings {
        let (name, access, ty, min) = (&binding.name, binding.access, &binding.wgsl_type, binding.min_bytes);
        writeln!(
            bindings,
            "            Binding {{ name: {name:?}, access: Access::{access:?}, wgsl_type: {ty:?}, min_bytes: {min} }},"
        )
        .expect("a string");
    }
    let params: String = interface.params.iter().map(|f| format!("({:?}, {:?}), ", f.name, f.scalar)).collect();
    let mut settings = String::new();
    for Setting { name, kind, value, doc } in &composed.settings {
        writeln!(
            settings,
            "            Default {{ name: {name:?}, kind: SettingKind::{kind:?}, value: {value:?}, doc: {doc:?} }},"
        )
        .expect("a string");
    }
    format!(
        "    Kernel {{\n        name: {name:?},\n        bindings: &[\n{bindings}        ],\n        params: &[{params}],\n\
         \x20       settings: &[\n{settings}        ],\n    }},\n"
    )
}
