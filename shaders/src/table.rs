//! The typed table of kernels that `build.rs` reflects from the WGSL files.
//!
//! Invariant: per kernel one module with its `Params` (the uniform struct, field by field) and its `Bindings` (buffers by
//! their WGSL names, in order): what a dispatch hands over is checked by the compiler, declared once, in WGSL.

use crate::compose::{ComposeError, Composed, SettingKind, Settings, compose};
use crate::device::Range;
pub use crate::reflect::Access;

/// A kernel of the table.
#[derive(Debug)]
pub struct Kernel {
    /// The stem of its file.
    pub name: &'static str,
    /// By index; the same for all its variants.
    pub bindings: &'static [Binding],
    /// Names and types of the uniform struct's fields.
    pub params: &'static [(&'static str, &'static str)],
    /// Its settings and their defaults.
    pub settings: &'static [Default],
}

/// One binding of group 0.
#[derive(Debug)]
pub struct Binding {
    /// The variable's name.
    pub name: &'static str,
    /// How it is touched.
    pub access: Access,
    /// Its type.
    pub wgsl_type: &'static str,
    /// Bytes of the smallest legal binding.
    pub min_bytes: u32,
}

/// A setting and its default.
#[derive(Debug)]
pub struct Default {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub kind: SettingKind,
    /// The default.
    pub value: &'static str,
    /// What it means; for a file, its folder.
    pub doc: &'static str,
}

impl Default {
    /// The line that declares it.
    pub fn declaration(&self) -> String {
        let Self { name, kind, value, doc } = self;
        match kind {
            SettingKind::U32 => format!("const {name}: u32 = {value}u; //!set {doc}"),
            SettingKind::Bool => format!("const {name}: bool = {value}; //!set {doc}"),
            SettingKind::File => format!("//!use {doc}/{value}.wgsl as {name}"),
        }
    }
}

/// The buffers of one dispatch of a kernel.
pub trait Bind<'a> {
    /// The uniform struct that goes with them.
    type Params: bytemuck::Pod;
    /// The kernel's name.
    const KERNEL: &'static str;
    /// In the order of the bindings, the uniform left out.
    fn ranges(self) -> Vec<Range<'a>>;
}

impl Kernel {
    /// The kernel of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        KERNELS.iter().find(|kernel| kernel.name == name)
    }

    /// The text of one variant.
    ///
    /// # Errors
    /// A setting that the kernel does not have or a value of the wrong kind.
    pub fn compose(&self, settings: &Settings) -> Result<Composed, ComposeError> {
        let file = format!("{}.wgsl", self.name);
        let text = source(&file).expect("a kernel of the table has its file");
        compose(&file, &text, settings, &source)
    }
}

/// A file of the table by its path.
pub fn source(path: &str) -> Option<String> {
    SOURCES.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned())
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));
