//! README's tables of families and formats, made from the registries, and what stands behind each cell: a fixture with a golden, which
//! `golden.rs` runs on the reference, cpu and wgpu backends.
//!
//! Invariant: a family, class or format that no golden covers is in no table. After a wanted change: copy the printed text.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use runtime::model::{ARCHITECTURES, Architecture};
use runtime::weights::{Checkpoint, Container, Quantised, WeightFormat};

/// What is true of the models that have a golden.
#[derive(Default)]
struct Covered {
    /// Class names, and values of `general.architecture`.
    families: BTreeSet<String>,
    formats: BTreeSet<&'static str>,
    methods: BTreeSet<String>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every model below `tests/fixtures` that has a golden.
fn models() -> Vec<PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()).collect()
    };
    let fixtures = root().join("tests/fixtures");
    let mut folders = entries(&fixtures);
    for of in ["families", "quantised"] {
        folders.extend(entries(&fixtures.join(of)));
    }
    let is_gguf = |file: &PathBuf| file.extension().is_some_and(|ext| ext == "gguf");
    let mut all: Vec<PathBuf> = entries(&fixtures.join("gguf")).into_iter().filter(is_gguf).collect();
    for folder in folders.into_iter().filter(|folder| folder.join("golden.json").exists()) {
        all.extend(entries(&folder).into_iter().filter(is_gguf));
        all.push(folder);
    }
    all
}

fn covered() -> Covered {
    let mut covered = Covered::default();
    for path in models() {
        let checkpoint = Checkpoint::open(&path).expect("a sound fixture");
        match &checkpoint.container {
            Container::Gguf(metadata) => {
                covered.families.insert(metadata.require_str("general.architecture").expect("it has one").into());
            }
            Container::HuggingFace { config, .. } => {
                covered.families.insert(config["architectures"][0].as_str().expect("a class").into());
                let method = &config["quantization_config"]["quant_method"];
                covered.methods.extend(method.as_str().map(String::from));
            }
        }
        let model = runtime::model::load(&checkpoint, runtime::program::KvDtype::F32).expect("a sound fixture");
        covered.formats.extend(model.weights.iter().map(|weight| weight.format.name()));
    }
    covered
}

fn family_table() -> String {
    let names = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let row = |family: &Architecture| {
        let gguf = if family.gguf.is_empty() { "as `llama`".into() } else { names(family.gguf) };
        format!("| {} | {} | {gguf} | yes | yes | yes |\n", family.title, names(family.hf))
    };
    let head =
        "| family | Hugging Face class | GGUF architecture | reference | cpu | wgpu |\n|---|---|---|---|---|---|\n";
    head.to_owned() + &ARCHITECTURES.iter().map(row).collect::<String>()
}

fn format_table() -> String {
    let row = |name: &str, source: &str| format!("| {name} | {source} | yes | yes | yes |\n");
    let source = |format: WeightFormat| match (format.ggml_type(), WeightFormat::from_safetensors_dtype(format.name()))
    {
        (Some(_), Some(_)) => "GGUF, safetensors",
        (Some(_), None) => "GGUF",
        (None, _) => "what quantised checkpoints become",
    };
    let mut table = String::from("| weight format | from | reference | cpu | wgpu |\n|---|---|---|---|---|\n");
    table.extend(WeightFormat::all().map(|format| row(format.name(), source(format))));
    table.extend(Quantised::methods().map(|method| row(&format!("`{method}`"), "`quantization_config`")));
    table
}

#[test]
fn every_family_and_format_has_a_golden() {
    let covered = covered();
    let families = ARCHITECTURES.iter().flat_map(|family| family.hf.iter().chain(family.gguf));
    let missing: Vec<&&str> = families.filter(|name| !covered.families.contains(**name)).collect();
    assert!(missing.is_empty(), "no golden of {missing:?}");
    let missing: Vec<&str> =
        WeightFormat::all().map(WeightFormat::name).filter(|name| !covered.formats.contains(name)).collect();
    assert!(missing.is_empty(), "no golden of {missing:?}");
    let missing: Vec<&str> = Quantised::methods().filter(|name| !covered.methods.contains(*name)).collect();
    assert!(missing.is_empty(), "no golden of {missing:?}");
}

#[test]
fn the_tables_of_the_readme_are_the_registries() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("README.md");
    for (name, table) in [("families", family_table()), ("formats", format_table())] {
        let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
        let written = readme.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end)).map(|(table, _)| table);
        assert!(written == Some(table.as_str()), "README's table of {name} should be:\n{table}");
    }
}
