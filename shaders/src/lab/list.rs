//! `kernel list` and `kernel new`: what kernels there are, and where to start one of one's own.
//!
//! Invariant: everything is read from the table and the kernels' own headers, nothing is written down twice.

use serde::Serialize;

use super::contract::is_required;
use super::{KernelError, cases_of, kernel_named};
use crate::compose::SettingKind;
use crate::reflect::Access;
use crate::table::{self, Kernel};

/// A kernel of the table in words.
#[derive(Clone, Debug, Serialize)]
pub struct KernelInfo {
    /// The stem of its file.
    pub name: &'static str,
    /// The formula: the first line of its header.
    pub formula: String,
    /// The rest of its header.
    pub about: String,
    /// In order.
    pub bindings: Vec<BindingRow>,
    /// Fields of the uniform struct, `name: type`.
    pub params: Vec<String>,
    /// What a variant chooses.
    pub settings: Vec<SettingRow>,
    /// Languages that every variant can be translated to.
    pub targets: Vec<String>,
    /// Cases that `check` runs.
    pub num_cases: usize,
    /// How far results may be from the reference: of the loosest case.
    pub tolerance: ToleranceRow,
}

/// A binding in words.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct BindingRow {
    pub name: &'static str,
    pub access: &'static str,
    #[serde(rename = "type")]
    pub wgsl_type: &'static str,
}

/// A setting in words.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct SettingRow {
    pub name: &'static str,
    pub default: &'static str,
    /// What it means.
    pub about: &'static str,
    /// The values of a choice of files.
    pub values: Vec<String>,
    /// Whether a kernel in this place must have a value for it.
    pub required: bool,
}

/// A tolerance in words.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct ToleranceRow {
    pub relative_rms: f32,
    pub relative_max: f32,
    pub reason: &'static str,
}

/// Every kernel.
pub fn list() -> Vec<KernelInfo> {
    table::KERNELS.iter().map(info).collect()
}

fn info(kernel: &'static Kernel) -> KernelInfo {
    let text = table::source(&format!("{}.wgsl", kernel.name)).unwrap_or_default();
    let comment = |line: &str| line.strip_prefix("//").map(|line| line.trim_start().to_owned());
    let header: Vec<String> = text.lines().take_while(|line| !line.starts_with("//!")).filter_map(comment).collect();
    let targets = text.lines().find_map(|line| line.strip_prefix("//!targets ")).unwrap_or_default();
    let cases = cases_of(kernel.name);
    let loosest = cases.iter().map(|case| case.tolerance).max_by(|a, b| a.relative_rms.total_cmp(&b.relative_rms));
    KernelInfo {
        name: kernel.name,
        formula: header.first().cloned().unwrap_or_default(),
        about: header.get(1..).unwrap_or_default().join("\n"),
        bindings: kernel.bindings.iter().filter(|binding| binding.access != Access::Uniform).map(binding_row).collect(),
        params: kernel.params.iter().map(|(name, scalar)| format!("{name}: {scalar}")).collect(),
        settings: kernel.settings.iter().map(|setting| setting_row(kernel, setting)).collect(),
        targets: targets.split_whitespace().map(str::to_owned).collect(),
        num_cases: cases.len(),
        tolerance: ToleranceRow {
            relative_rms: loosest.map_or(0.0, |tolerance| tolerance.relative_rms),
            relative_max: loosest.map_or(0.0, |tolerance| tolerance.relative_max),
            reason: loosest.map_or("", |tolerance| tolerance.reason),
        },
    }
}

fn binding_row(binding: &table::Binding) -> BindingRow {
    let access = if binding.access == Access::ReadWrite { "read_write" } else { "read" };
    BindingRow { name: binding.name, access, wgsl_type: binding.wgsl_type }
}

fn setting_row(kernel: &Kernel, setting: &'static table::Default) -> SettingRow {
    let below = |path: &str| {
        let stem = path.strip_prefix(setting.doc)?.strip_prefix('/')?;
        Some(stem.trim_end_matches(".wgsl").to_owned())
    };
    let values = match setting.kind {
        SettingKind::File => table::SOURCES.iter().filter_map(|(path, _)| below(path)).collect(),
        SettingKind::U32 | SettingKind::Bool => Vec::new(),
    };
    let about = if setting.kind == SettingKind::File { "a file of its folder" } else { setting.doc };
    let required = is_required(kernel.name, setting.name);
    SettingRow { name: setting.name, default: setting.value, about, values, required }
}

/// The text of a new kernel in the place of `name`: a plain one to start from, which passes its check.
///
/// # Errors
/// No such kernel.
pub fn template(name: &str) -> Result<String, KernelError> {
    let kernel = kernel_named(name)?;
    let plain = table::source(&format!("template/{}.wgsl", kernel.name));
    let text = plain.or_else(|| table::source(&format!("{}.wgsl", kernel.name))).unwrap_or_default();
    let head = format!(
        "// A kernel in the place of the built-in '{name}'. Check it with `kittiwake kernel check FILE --op {name}`, or at each\n\
         // save with `kernel watch`; serve with it by `kittiwake serve MODEL --kernel {name}=FILE`.\n\
         // Bindings and Params stay as they are, used or not. `//!use` finds files beside this one, then the built-in ones.\n//\n"
    );
    Ok(head + &text)
}
