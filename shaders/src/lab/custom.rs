//! A user's kernel in place of one of the table: its text, its settings, and the contract that it keeps.
//!
//! Invariant: what passes `CustomKernel::new` binds exactly what the table's kernel binds. A setting of the table's kernel
//! is either declared by the user's file (`//!set`, `//!use … as`), and then takes what the lowering asks for, or fixed
//! (`--set`, a plain `const`, a plain `//!use`): then the grid follows it, and variants that ask for another value of what
//! the model decides keep the table's kernel. Used by `Pipelines`, `check`, `bench` and `reload`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use runtime::error::DeviceError;

use super::contract::{self, Difference};
use crate::compose::{ComposeError, Composed, SettingKind, Settings, compose};
use crate::reflect::{Checked, Diagnostic, check};
use crate::table::{self, Kernel};

/// Why a user's kernel cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No kernel of the table has this name.
    #[error("there is no kernel '{name}' (there are: {known})")]
    UnknownKernel {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The text is not valid WGSL, or a directive or setting is wrong.
    #[error("{0}")]
    Invalid(#[from] Diagnostic),
    /// The kernel is valid but does not fit the place that it is for.
    #[error("{file} does not fit the kernel '{kernel}':{}", list(differences))]
    Contract {
        /// The file.
        file: String,
        /// The kernel of the table.
        kernel: &'static str,
        /// Every difference.
        differences: Vec<Difference>,
    },
    /// It gives other results than the reference, or reaches out of bounds.
    #[error("{file}: {problem}")]
    Wrong {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn list(differences: &[Difference]) -> String {
    differences.iter().map(|difference| format!("\n  {difference}")).collect()
}

impl From<ComposeError> for KernelError {
    fn from(error: ComposeError) -> Self {
        Self::Invalid(error.into())
    }
}

/// The kernel of the table with this name.
///
/// # Errors
/// There is none.
pub fn kernel_named(name: &str) -> Result<&'static Kernel, KernelError> {
    Kernel::named(name).ok_or_else(|| {
        let known: Vec<&str> = table::KERNELS.iter().map(|kernel| kernel.name).collect();
        KernelError::UnknownKernel { name: name.into(), known: known.join(", ") }
    })
}

/// A user's kernel that keeps the contract.
#[derive(Clone, Debug)]
pub struct CustomKernel {
    pub(crate) kernel: &'static Kernel,
    /// Its file, as the user named it.
    pub(crate) file: String,
    /// Where its `//!use` files are looked up first.
    folder: PathBuf,
    pub(crate) text: String,
    /// Values that the user pinned.
    pinned: Settings,
    /// What the text declares and nobody pinned.
    declared: Vec<String>,
    /// Settings of the table's kernel that have one value in this one.
    fixed: BTreeMap<&'static str, String>,
}

impl CustomKernel {
    /// Reads a file that is to take the place of the kernel `name`, with some settings pinned.
    ///
    /// # Errors
    /// No such kernel or file, not valid, or not the kernel's contract.
    pub fn load(name: &str, file: &Path, pinned: &Settings) -> Result<Self, KernelError> {
        let kernel = kernel_named(name)?;
        let text = std::fs::read_to_string(file).map_err(|source| KernelError::Read { file: file.into(), source })?;
        Self::new(kernel, file, text, pinned)
    }

    /// The table's own kernel, with some settings pinned.
    ///
    /// # Errors
    /// No such kernel, or a setting that it does not have.
    pub fn built_in(name: &str, pinned: &Settings) -> Result<Self, KernelError> {
        let kernel = kernel_named(name)?;
        let file = format!("{name}.wgsl");
        let text = table::source(&file).expect("a kernel of the table has its file");
        Self::new(kernel, Path::new(&file), text, pinned)
    }

    /// As `load`, of a text. `file` names it in messages, and its folder is where the files that it uses are looked up.
    ///
    /// # Errors
    /// Not valid, or not the kernel's contract.
    pub fn new(kernel: &'static Kernel, file: &Path, text: String, pinned: &Settings) -> Result<Self, KernelError> {
        let folder = file.parent().map(Path::to_owned).unwrap_or_default();
        let file = file.display().to_string();
        let mut custom =
            Self { kernel, file, folder, text, pinned: pinned.clone(), declared: Vec::new(), fixed: BTreeMap::new() };
        let composed = custom.compose(&Settings::new())?;
        let checked = check(&composed)?;
        let is_pinned = |name: &str| pinned.get(name).is_some();
        let free = composed.settings.iter().filter(|setting| !is_pinned(&setting.name));
        custom.declared = free.map(|setting| setting.name.clone()).collect();
        custom.fixed = fixed(kernel, &composed, &checked, &custom.declared);
        let mut differences = contract::differences(kernel, &checked.interface);
        differences.extend(contract::missing_settings(kernel, &custom.declared, &custom.fixed));
        if differences.is_empty() {
            return Ok(custom);
        }
        Err(KernelError::Contract { file: custom.file, kernel: kernel.name, differences })
    }

    /// The text of the variant that `asked` names; settings that this kernel does not declare are left out.
    ///
    /// # Errors
    /// A setting has a wrong value, or a file that the text uses is not there.
    pub fn compose(&self, asked: &Settings) -> Result<Composed, ComposeError> {
        let is_declared = |name: &str| self.declared.iter().any(|declared| declared == name);
        let free = asked.iter().filter(|(name, _)| is_declared(name));
        let settings = free.fold(self.pinned.clone(), |all, (name, value)| all.with(name, value));
        let source = |path: &str| {
            let own = std::fs::read_to_string(self.folder.join(path)).ok();
            own.or_else(|| table::source(path))
        };
        compose(&self.file, &self.text, &settings, &source)
    }

    /// Whether this kernel runs the variant that `asked` names: what it fixes is what is asked for.
    pub(crate) fn takes(&self, asked: &Settings) -> bool {
        self.fixed.iter().filter(|(name, _)| contract::is_required(self.kernel.name, name)).all(|(name, value)| {
            let default = self.kernel.settings.iter().find(|setting| setting.name == *name).map(|d| d.value);
            asked.get(name).or(default) == Some(value)
        })
    }

    /// The number that this kernel fixes for a setting, which the grid then follows.
    pub(crate) fn shape(&self, name: &str) -> Option<u32> {
        self.fixed.get(name)?.parse().ok()
    }

    /// What it fixes of what the model or the tuning table decide, e.g. `FORMAT=q4_1`.
    pub fn fixed(&self) -> Vec<(&'static str, &str)> {
        let required = self.fixed.iter().filter(|(name, _)| contract::is_required(self.kernel.name, name));
        required.map(|(name, value)| (*name, value.as_str())).collect()
    }

    /// The kernel whose place it takes.
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Its file, as the user named it.
    pub fn file(&self) -> &str {
        &self.file
    }
}

/// Settings of the table's kernel that have one value in a composed text and are not left open.
fn fixed(
    kernel: &Kernel,
    composed: &Composed,
    checked: &Checked,
    declared: &[String],
) -> BTreeMap<&'static str, String> {
    let module = &checked.module;
    let constant = |name: &str| {
        let (_, constant) = module.constants.iter().find(|(_, constant)| constant.name.as_deref() == Some(name))?;
        match module.global_expressions[constant.init] {
            naga::Expression::Literal(naga::Literal::U32(value)) => Some(value.to_string()),
            naga::Expression::Literal(naga::Literal::Bool(value)) => Some(value.to_string()),
            _ => None,
        }
    };
    let used = |folder: &str| {
        let below =
            |file: &String| Some(file.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".wgsl")?.to_owned());
        composed.files().iter().find_map(below)
    };
    let open = |name: &str| declared.iter().any(|declared| declared == name);
    let settings = kernel.settings.iter().filter(|setting| !open(setting.name));
    let value = |setting: &table::Default| match setting.kind {
        SettingKind::File => used(setting.doc),
        SettingKind::U32 | SettingKind::Bool => constant(setting.name),
    };
    settings.filter_map(|setting| Some((setting.name, value(setting)?))).collect()
}
