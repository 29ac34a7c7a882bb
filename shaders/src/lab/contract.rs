//! The contract between a kernel of the table and one that takes its place: the same buffers in the same order, the same
//! numbers, and a value for every setting that the model or the grid depends on.
//!
//! Invariant: all differences are listed, each by itself. Pure; called when a user's kernel is read.

use std::collections::BTreeMap;
use std::fmt;

use crate::reflect::{Access, Interface};
use crate::table::Kernel;

/// Settings that say what is computed: the model decides them.
const GIVEN: [&str; 17] = [
    "FORMAT",
    "NORM",
    "GATED",
    "KV",
    "HEAD_DIM",
    "SPLIT",
    "PARTIAL",
    "CARRIED",
    "WINDOW",
    "SOFT_CAP",
    "SINKS",
    "ADD",
    "INTERLEAVED",
    "ACTIVATION",
    "SIGMOID",
    "SHARED",
    "EACH",
];

/// Settings that the number of workgroups is computed from.
fn grid_settings(kernel: &str) -> &'static [&'static str] {
    match kernel {
        "attention" => &["HEADS", "ITEMS"],
        "linear" => &["ROWS", "TOKENS", "LANES", "TOKEN_LANES"],
        "moe_linear" => &["ROWS", "LANES"],
        // One workgroup per row, whatever its size.
        "rms_norm" | "check_finite" | "sample_pick" | "moe_route" => &[],
        _ => &["LANES"],
    }
}

/// Whether a kernel in the place of `kernel` must have a value for a setting.
pub(crate) fn is_required(kernel: &str, setting: &str) -> bool {
    GIVEN.contains(&setting) || grid_settings(kernel).contains(&setting)
}

/// One difference between a kernel and the one whose place it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Difference {
    /// It has too few bindings or fields.
    Missing { what: String, expected: String },
    /// It has too many.
    Unknown { what: String },
    /// Another stands at its place.
    Order { what: String, expected: String, got: String },
    /// It is touched in another way.
    Access { what: String, expected: String, got: String },
    /// It holds something else.
    Type { what: String, expected: String, got: String },
    /// Nothing says what its value is.
    Setting { name: &'static str, declaration: String, doc: &'static str },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { what, expected } => write!(f, "{what} is missing: expected {expected}"),
            Self::Unknown { what } => write!(f, "{what}: the kernel has no such thing"),
            Self::Order { what, expected, got } => write!(f, "{what}: expected '{expected}' here, got '{got}'"),
            Self::Access { what, expected, got } => write!(f, "{what}: expected access {expected}, got {got}"),
            Self::Type { what, expected, got } => write!(f, "{what}: expected type {expected}, got {got}"),
            Self::Setting { name, declaration, doc } => {
                write!(
                    f,
                    "setting {name} ({doc}) is missing: declare `{declaration}`, or without the directive to fix it"
                )
            }
        }
    }
}

fn access_name(access: Access) -> &'static str {
    match access {
        Access::Uniform => "uniform",
        Access::Read => "storage, read",
        Access::ReadWrite => "storage, read_write",
    }
}

/// Differences of bindings and of the uniform struct.
pub(crate) fn differences(kernel: &Kernel, interface: &Interface) -> Vec<Difference> {
    let mut found = Vec::new();
    for (i, expected) in kernel.bindings.iter().enumerate() {
        let place = format!("@binding({i})");
        let Some(got) = interface.bindings.get(i) else {
            let expected = format!("var<{}> {}: {}", access_name(expected.access), expected.name, expected.wgsl_type);
            found.push(Difference::Missing { what: place, expected });
            continue;
        };
        if got.name != expected.name {
            found.push(Difference::Order { what: place, expected: expected.name.into(), got: got.name.clone() });
            continue;
        }
        let what = format!("{place} '{}'", got.name);
        if got.access != expected.access {
            let (expected, got) = (access_name(expected.access).into(), access_name(got.access).into());
            found.push(Difference::Access { what: what.clone(), expected, got });
        }
        if got.access != Access::Uniform && got.wgsl_type != expected.wgsl_type {
            found.push(Difference::Type { what, expected: expected.wgsl_type.into(), got: got.wgsl_type.clone() });
        }
    }
    for extra in interface.bindings.iter().skip(kernel.bindings.len()) {
        found.push(Difference::Unknown { what: format!("@binding({}) '{}'", extra.index, extra.name) });
    }
    for (i, (name, scalar)) in kernel.params.iter().enumerate() {
        let place = format!("field {i} of the uniform");
        match interface.params.get(i) {
            None => found.push(Difference::Missing { what: place, expected: format!("{name}: {scalar}") }),
            Some(got) if got.name != *name => {
                found.push(Difference::Order { what: place, expected: (*name).into(), got: got.name.clone() });
            }
            Some(got) if got.scalar != *scalar => {
                let what = format!("{place}, '{name}'");
                found.push(Difference::Type { what, expected: (*scalar).into(), got: got.scalar.into() });
            }
            Some(_) => {}
        }
    }
    for extra in interface.params.iter().skip(kernel.params.len()) {
        found.push(Difference::Unknown { what: format!("field '{}' of the uniform", extra.name) });
    }
    found
}

/// Settings that must have a value and have none.
pub(crate) fn missing_settings(
    kernel: &Kernel,
    declared: &[String],
    fixed: &BTreeMap<&'static str, String>,
) -> Vec<Difference> {
    let has_value = |name: &str| declared.iter().any(|declared| declared == name) || fixed.contains_key(name);
    let missing =
        kernel.settings.iter().filter(|setting| is_required(kernel.name, setting.name) && !has_value(setting.name));
    missing
        .map(|setting| Difference::Setting { name: setting.name, declaration: setting.declaration(), doc: setting.doc })
        .collect()
}
