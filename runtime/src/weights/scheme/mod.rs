//! Quantised Hugging Face checkpoints: config.json's `quantization_config` says which scheme gives the tensors of a module
//! their meaning. One file per scheme, one row per `quant_method` in the table below.
//!
//! Invariant: a scheme changes places, never values. Its matrices are in a format of `weights::format`, computed from the mapped
//! file when rows are read, and everything about them (shapes, ranges, groups, what is not a number) is checked when they are
//! made. A checkpoint that contradicts its configuration is an error. Called by `Checkpoint::matrix`.

mod awq;
mod compressed_tensors;
mod fp8;
mod gptq;
mod integers;
mod mxfp4;
mod settings;
mod source;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
pub(super) use source::{CodeTensor, CodeType};

use self::settings::Settings;
use self::source::Source;
use super::{Checkpoint, HostTensor};
use crate::error::LoadError;

const KEY: &str = "quantization_config";

/// What a quantised checkpoint has besides tensors of floats.
#[derive(Clone, Debug, Default)]
pub struct Quantised {
    codes: HashMap<String, CodeTensor>,
    scheme: Option<Arc<dyn Scheme>>,
}

/// The weight of a module, whatever tensors it is stored in.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// `[out_features, in_features]`, or `[experts, out_features, in_features]`.
    pub tensor: HostTensor,
    /// Column k of the tensor multiplies the input `order[k]`; none: the input k.
    pub input_order: Option<Vec<u32>>,
    /// The tensors of the file that it stands for.
    pub names: Vec<String>,
}

/// Where a scheme keeps the weight of a module.
trait Scheme: Debug + Send + Sync {
    /// The weight of the module `stem`, which has no tensor of floats.
    fn matrix(&self, source: &Source<'_>, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError>;
}

type Read = fn(&Settings<'_>) -> Result<Arc<dyn Scheme>, LoadError>;

/// By `quant_method`.
static TABLE: [(&str, Read); 5] = [
    ("gptq", gptq::read),
    ("awq", awq::read),
    ("compressed-tensors", compressed_tensors::read),
    ("fp8", fp8::read),
    ("mxfp4", mxfp4::read),
];

impl Quantised {
    /// Reads a configuration (`config.json` of `dir`) and takes the tensors of codes.
    ///
    /// # Errors
    /// `Unsupported` for a scheme, or a setting of one, that is not there, and for codes without a scheme; `Config` for settings
    /// that are wrong.
    pub(super) fn read(dir: &Path, config: &Value, codes: HashMap<String, CodeTensor>) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let Some(settings) = Settings::of(&path, config, KEY)? else {
            return match codes.values().min_by(|a, b| a.name.cmp(&b.name)) {
                Some(tensor) => Err(LoadError::Unsupported {
                    path: dir.to_path_buf(),
                    what: "tensor type",
                    name: format!("{} of {:?} without a {KEY}", tensor.kind.name(), tensor.name),
                    supported: "F32, F16, BF16".into(),
                }),
                None => Ok(Self::default()),
            };
        };
        let method = settings.text("quant_method")?.ok_or_else(|| settings.error("quant_method", "missing"))?;
        let Some((_, read)) = TABLE.iter().find(|(name, _)| *name == method) else {
            let supported = TABLE.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            return Err(settings.unsupported("quant_method", method, &supported));
        };
        Ok(Self { codes, scheme: Some(read(&settings)?) })
    }

    /// Every `quant_method`.
    pub fn methods() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|(name, _)| *name)
    }

    /// The names of its tensors of codes.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.codes.keys()
    }
}

impl Checkpoint {
    /// The weight of the module `stem`: the tensor `<stem>.weight` where the module is not quantised, else what the checkpoint's
    /// scheme makes of the module's tensors.
    ///
    /// # Errors
    /// `Tensor` for tensors that are absent or have another shape, type or range than the scheme needs, `Config` and
    /// `Unsupported` for settings of the module.
    pub fn matrix(&self, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        let name = format!("{stem}.weight");
        let source = Source { path: &self.path, tensors: &self.tensors, codes: &self.quantised.codes };
        if let Some(tensor) = self.tensors.get(&name) {
            if tensor.shape != shape {
                return Err(source.error(&name, format!("shape {shape:?}"), format!("{:?}", tensor.shape)));
            }
            return Ok(Matrix { tensor: tensor.clone(), input_order: None, names: vec![name] });
        }
        match &self.quantised.scheme {
            Some(scheme) => scheme.matrix(&source, stem, shape),
            None => Err(source.error(&name, format!("shape {shape:?}"), "nothing")),
        }
    }
}

/// Whether `part` is the name of a module or some of its parts between dots.
fn is_part_of(stem: &str, part: &str) -> bool {
    format!(".{stem}.").contains(&format!(".{part}."))
}

/// Something to be said once per model.
#[derive(Debug, Default)]
struct Once(AtomicBool);

impl Once {
    fn is_first(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}
