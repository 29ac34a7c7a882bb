//! Rounding a checkpoint of floats to fewer bits, in files that keep compressed-tensors' layout; with a text, after scaling
//! channels by their activations (AWQ).
//!
//! Invariant: scales change nothing but what is rounded: what a channel is multiplied with in one place it is divided by in
//! another, in numbers that files hold exactly (`groups` says where that is possible, `Job::scale` how norms are rounded).
//! Tensors are made one at a time. Source: Lin et al. 2023, "AWQ". Called by `kittiwake quantize`.

mod calibrate;
mod groups;
mod scaled;
mod search;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use fancy_regex::Regex;
use safetensors::Dtype;

use self::groups::{Absorber, Group, parts};
use self::scaled::{Scaled, Scaling};
use self::search::{Linears, best, candidates};
use crate::error::LoadError;
use crate::ids::{Slot, TokenId, WeightId};
use crate::model::{Model, QuantisationRules};
use crate::weights::pack::{self, Piece};
use crate::weights::safetensors::write::{NewTensor, write};
use crate::weights::{Checkpoint, Container, HostTensor, Packing};

/// Bytes of a file of weights.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// What takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The model runs over the text; counted in tokens.
    Calibrate,
    /// Scales are searched for; counted in groups of linears.
    Search,
    /// Files are written; counted in bytes.
    Write,
}

/// Hears how much of how much of a stage is done.
pub type Progress<'a> = &'a mut dyn FnMut(Stage, u64, u64);

/// How many groups of linears read inputs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaledGroups {
    /// Those that were given scales.
    pub scaled: usize,
    /// Those where 1 was the best scale, and those that cannot be scaled exactly.
    pub unscaled: usize,
}

/// A checkpoint and what is to become of it.
#[derive(Debug)]
pub struct Job<'a> {
    checkpoint: &'a Checkpoint,
    model: &'a Model,
    packing: Packing,
    /// By the name in the file.
    matrices: BTreeMap<String, &'a HostTensor>,
    /// Linears that stay floats.
    ignored: Vec<String>,
    scaling: Scaling,
}

impl<'a> Job<'a> {
    /// Settles which matrices are rounded: those of linears in blocks but for routers and names that `ignore` is found in.
    ///
    /// # Errors
    /// `Unsupported` for a checkpoint that is quantised or no Hugging Face directory, and for experts that share a tensor; `Tensor` for a
    /// matrix whose inputs are no whole groups.
    pub fn new(
        checkpoint: &'a Checkpoint,
        model: &'a Model,
        packing: Packing,
        ignore: Option<&Regex>,
    ) -> Result<Self, LoadError> {
        check_floats(checkpoint)?;
        let (mut matrices, mut ignored) = (BTreeMap::new(), vec!["lm_head".to_owned()]);
        for part in model.program.ops.iter().flat_map(parts) {
            let house = &model.program.weights[part.weight.index()].name;
            for name in file_names(&model.weights[part.weight.index()]) {
                let stem = name.strip_suffix(".weight").unwrap_or(&name);
                let is_ignored = ignore.is_some_and(|pattern| pattern.is_match(stem).unwrap_or(false));
                if QuantisationRules::is_block(house) && !is_ignored {
                    let tensor = check_matrix(checkpoint, &name, packing)?;
                    matrices.insert(name, tensor);
                } else if house != "embed" && !ignored.iter().any(|known| known == stem) {
                    ignored.push(stem.to_owned());
                }
            }
        }
        Ok(Self { checkpoint, model, packing, matrices, ignored, scaling: Scaling::default() })
    }

    /// Scales what linears read by what they are seen to read: the model runs over windows of tokens, then each group's scales
    /// are searched for.
    ///
    /// # Errors
    /// Out of memory, or activations that are not finite.
    pub fn scale(
        &mut self,
        windows: &[Vec<TokenId>],
        threads: usize,
        progress: Progress<'_>,
    ) -> Result<ScaledGroups, LoadError> {
        let num_linears = self.model.program.ops.iter().filter(|op| {
            let names = parts(op).iter().flat_map(|part| file_names(&self.model.weights[part.weight.index()]));
            names.into_iter().any(|name| self.matrices.contains_key(&name))
        });
        let num_linears = num_linears.count();
        let groups: Vec<Group> =
            groups::groups(&self.model.program).into_iter().filter(|group| self.can_scale(group)).collect();
        let slots: Vec<Slot> = groups.iter().map(|group| group.input).collect();
        let total: usize = windows.iter().map(Vec::len).sum();
        let mut calibrated = |done| progress(Stage::Calibrate, done, total as u64);
        let seen = calibrate::activations(self.model, &slots, windows, threads, &mut calibrated)?;
        let mut scaled = 0;
        for (i, (group, activations)) in groups.iter().zip(&seen).enumerate() {
            scaled += usize::from(self.search(group, activations));
            progress(Stage::Search, i as u64 + 1, groups.len() as u64);
        }
        Ok(ScaledGroups { scaled, unscaled: num_linears - scaled })
    }

    /// The tensor of a weight that is rounded; experts have one each and are none.
    fn matrix(&self, id: WeightId) -> Option<&'a HostTensor> {
        self.matrices.get(&self.model.weights[id.index()].name).copied()
    }

    /// A matrix that stays floats would be rounded by a scale.
    fn can_scale(&self, group: &Group) -> bool {
        let absorbs = match &group.absorber {
            Absorber::Norm(norm) => self.norm(*norm).is_some(),
            Absorber::Outputs(outputs) => outputs.iter().all(|output| self.matrix(output.matrix).is_some()),
        };
        absorbs && group.matrices.iter().all(|&id| self.matrix(id).is_some())
    }

    /// A norm's tensor, what is added to it, and its sum as the program has it.
    fn norm(&self, id: WeightId) -> Option<(&'a HostTensor, f32, Vec<f32>)> {
        let used = &self.model.weights[id.index()];
        let (stored, used) = (self.checkpoint.tensors.get(&used.name)?, used.to_f32());
        let values = stored.to_f32();
        let is_offset = |offset: &f32| values.iter().zip(&used).all(|(x, used)| x + offset == *used);
        let offset = [0.0, 1.0].into_iter().find(is_offset)?;
        Some((stored, offset, used))
    }

    /// Finds a group's scales; whether there are any better than 1.
    fn search(&mut self, group: &Group, activations: &calibrate::Activations) -> bool {
        let num_scales = group.scale_of.iter().max().map_or(0, |&last| last + 1);
        let (mut means, share) = (vec![0.0; num_scales], group.scale_of.len() / num_scales.max(1));
        group.scale_of.iter().zip(&activations.means).for_each(|(&scale, mean)| means[scale] += mean / share as f32);
        let norm = match group.absorber {
            Absorber::Norm(id) => Some((id, self.norm(id).expect("`can_scale` has seen it"))),
            Absorber::Outputs(_) => None,
        };
        let mut candidates = candidates(&means);
        let mut norms = Vec::new();
        if let Some((_, (stored, offset, used))) = &norm {
            // The first stays 1, whose norm is the file's.
            for scales in &mut candidates[1..] {
                norms.push(scaled::round_norm(used, (stored.format, *offset), scales));
            }
        }
        let by_channel = |scales: &Vec<f32>| group.scale_of.iter().map(|&scale| scales[scale]).collect();
        let by_channel: Vec<Vec<f32>> = candidates.iter().map(by_channel).collect();
        let matrices = group.matrices.iter().filter_map(|&id| self.matrix(id)).collect();
        let linears = Linears { matrices, packing: self.packing, activations };
        let best = best(&linears.errors(&by_channel));
        for &id in &group.matrices {
            let counts = search::counts(&activations.means, &by_channel[best]);
            self.scaling.counts.insert(self.model.weights[id.index()].name.clone(), counts);
        }
        if best == 0 {
            return false;
        }
        for &id in &group.matrices {
            self.scaling.columns.insert(self.model.weights[id.index()].name.clone(), by_channel[best].clone());
        }
        match &group.absorber {
            Absorber::Norm(id) => {
                let name = self.model.weights[id.index()].name.clone();
                self.scaling.vectors.insert(name, norms.swap_remove(best - 1));
            }
            Absorber::Outputs(outputs) => {
                let (model, checkpoint) = (self.model, self.checkpoint);
                let name = |id: WeightId| model.weights[id.index()].name.as_str();
                for (output, &scale) in outputs.iter().zip(&candidates[best]) {
                    let bias = output.bias.map(|bias| &checkpoint.tensors[name(bias)]);
                    self.scaling.divide_output(checkpoint.tensors.get(name(output.matrix)), bias, (output.row, scale));
                }
            }
        }
        true
    }

    /// Writes the model to a directory that is there: weights, the configuration, and what else belongs to it.
    ///
    /// # Errors
    /// `Io`; `Tensor` for weights that are not finite.
    pub fn write(&self, dir: &Path, shard_bytes: u64, progress: Progress<'_>) -> Result<(), LoadError> {
        let Container::HuggingFace { config, .. } = &self.checkpoint.container else {
            unreachable!("`new` takes directories only")
        };
        let mut config = config.clone();
        config["quantization_config"] = self.packing.config(&self.ignored);
        let path = dir.join("config.json");
        std::fs::write(&path, format!("{config:#}\n")).map_err(|source| LoadError::Io { path, source })?;
        copy_others(&self.checkpoint.path, dir)?;
        let not_finite = Mutex::new(None);
        let tensors = self.checkpoint.tensors.values().flat_map(|tensor| self.tensors(tensor, &not_finite)).collect();
        write(dir, tensors, shard_bytes, &mut |done, total| progress(Stage::Write, done, total))?;
        match not_finite.into_inner().expect("nobody panicked with it") {
            None => Ok(()),
            Some(tensor) => Err(LoadError::Tensor {
                path: self.checkpoint.path.clone(),
                tensor,
                expected: "finite numbers".into(),
                got: "others".into(),
            }),
        }
    }

    /// What becomes of a tensor of the file.
    fn tensors<'s>(&'s self, tensor: &'s HostTensor, not_finite: &'s Mutex<Option<String>>) -> Vec<NewTensor<'s>> {
        let HostTensor { name, format, shape, .. } = tensor;
        if self.matrices.contains_key(name) {
            let matrix = Scaled::new(tensor, &self.scaling, not_finite);
            let stem = name.strip_suffix(".weight").unwrap_or(name);
            let pieces = self.packing.pieces([shape[0], shape[1]], *format).into_iter();
            return pieces
                .map(|(piece, end, dtype, shape)| self.piece(matrix, piece, (stem, end), (dtype, shape)))
                .collect();
        }
        let replaced = self.scaling.vectors.get(name);
        vec![NewTensor {
            name: name.clone(),
            dtype: pack::dtype(*format),
            shape: shape.clone(),
            bytes: Box::new(move || match replaced {
                Some(values) => values.iter().flat_map(|&x| pack::float_bytes(x, *format)).collect(),
                None => tensor.rows(0..tensor.num_rows()),
            }),
        }]
    }

    fn piece<'s>(
        &'s self,
        matrix: Scaled<'s>,
        piece: Piece,
        (stem, end): (&str, &str),
        (dtype, shape): (Dtype, Vec<usize>),
    ) -> NewTensor<'s> {
        let packing = self.packing;
        let bytes = Box::new(move || packing.bytes(piece, &matrix).into());
        NewTensor { name: format!("{stem}.{end}"), dtype, shape, bytes }
    }
}

/// # Errors
/// It is a GGUF file, or quantised already.
fn check_floats(checkpoint: &Checkpoint) -> Result<(), LoadError> {
    let supported = "Hugging Face directories of F32, F16 or BF16";
    let refuse = |name: String| LoadError::Unsupported {
        path: checkpoint.path.clone(),
        what: "quantising",
        name,
        supported: supported.into(),
    };
    match &checkpoint.container {
        Container::Gguf(_) => Err(refuse("a GGUF file".into())),
        Container::HuggingFace { config, .. } => match config.get("quantization_config").filter(|it| !it.is_null()) {
            Some(scheme) => {
                let method = scheme.get("quant_method").and_then(|method| method.as_str()).unwrap_or("unknown");
                Err(refuse(format!("a checkpoint that is quantised ({method})")))
            }
            None => Ok(()),
        },
    }
}

/// The names in the file of what a weight of the program is made of.
fn file_names(weight: &HostTensor) -> Vec<String> {
    if !weight.name.contains("{e}") {
        return vec![weight.name.clone()];
    }
    (0..weight.shape[0]).map(|expert| weight.name.replace("{e}", &expert.to_string())).collect()
}

/// # Errors
/// It is no matrix of its own, or its inputs are no whole groups.
fn check_matrix<'a>(checkpoint: &'a Checkpoint, name: &str, packing: Packing) -> Result<&'a HostTensor, LoadError> {
    let tensor = checkpoint.tensors.get(name).filter(|tensor| tensor.shape.len() == 2 && name.ends_with(".weight"));
    let Some(tensor) = tensor else {
        return Err(LoadError::Unsupported {
            path: checkpoint.path.clone(),
            what: "quantising",
            name: format!("{name}, which is not the weight of one linear"),
            supported: "linears with a tensor of their own".into(),
        });
    };
    let inputs = tensor.row_len();
    let size = packing.group(inputs).max(32);
    if inputs.is_multiple_of(size) && inputs.is_multiple_of(32) {
        return Ok(tensor);
    }
    let fitting: Vec<String> =
        [128, 64, 32].into_iter().filter(|&size| inputs.is_multiple_of(size)).map(|size| format!("g{size}")).collect();
    let others = if fitting.is_empty() { String::new() } else { format!(" ({} would do)", fitting.join(", ")) };
    Err(LoadError::Tensor {
        path: checkpoint.path.clone(),
        tensor: name.into(),
        expected: format!("a multiple of {} inputs{others}", if size == inputs { 32 } else { size }),
        got: inputs.to_string(),
    })
}

/// Copies what is neither weights nor their index nor the configuration: tokenizer, templates, settings, licence.
fn copy_others(from: &Path, to: &Path) -> Result<(), LoadError> {
    let error = |path: &Path| {
        let path = path.to_path_buf();
        move |source| LoadError::Io { path, source }
    };
    for entry in std::fs::read_dir(from).map_err(error(from))? {
        let path = entry.map_err(error(from))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_ours = name == "config.json" || name.ends_with(".index.json");
        let ends = [".json", ".jinja", ".txt", ".model"];
        let is_wanted = ends.iter().any(|end| name.ends_with(end)) || name.starts_with("LICENSE");
        if path.is_file() && is_wanted && !is_ours {
            std::fs::copy(&path, to.join(&name)).map_err(error(&path))?;
        }
    }
    Ok(())
}
