//! compressed-tensors (`quant_method: compressed-tensors`), what llm-compressor writes: groups of modules, each quantised in its own
//! way. Here are those whose weights are integers of 4 or 8 bits or E4M3; activations keep their own precision.
//!
//! ```text
//! pack-quantized   weight_packed i32 [out, in / p], p = 32 / bits: code = value + 2^(bits - 1), the first input lowest;
//!                  weight_shape i64 [2];  weight_zero_point i32 [out / p, groups], packed and moved in the same way
//! int-quantized    weight i8 [out, in];  weight_zero_point i8, as weight_scale
//! float-quantized  weight f8_e4m3 [out, in]
//! weight_scale     [1], [out, 1], [out, groups], or [ceil(out / b0), ceil(in / b1)];  weight_g_idx i32 [in]
//! ```

use std::sync::Arc;

use super::integers::{Groups, Integers, Place, Zeros, nibbles};
use super::settings::{Pattern, Settings};
use super::source::{CodeType, Source};
use super::{Matrix, Once, Scheme, fp8};
use crate::error::LoadError;

#[derive(Debug)]
struct CompressedTensors {
    groups: Vec<(Vec<Target>, Kind)>,
    ignored: Vec<Target>,
    widened: Once,
}

/// Modules by what they are, or by name.
#[derive(Debug)]
enum Target {
    Linears,
    Name(String),
    Pattern(Pattern),
}

/// How the weights of a group of modules are stored.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Packed(Options),
    Bytes(Options),
    Fp8 { block: Option<[usize; 2]> },
}

/// Of integers.
#[derive(Clone, Copy, Debug)]
struct Options {
    bits: u32,
    symmetric: bool,
    /// `None`: all inputs.
    group_size: Option<usize>,
}

/// Reads the scheme's settings.
///
/// # Errors
/// A setting of the wrong type or range, or one that is not supported.
pub(super) fn read(settings: &Settings<'_>) -> Result<Arc<dyn Scheme>, LoadError> {
    for (key, off) in [("sparsity_config", "dense"), ("transform_config", "")] {
        let Some(config) = settings.object(key)?.filter(|config| config.keys().next().is_some()) else { continue };
        if config.text("format")? != Some(off) {
            return Err(settings.unsupported("setting of compressed-tensors", key, "none"));
        }
    }
    if settings.get("kv_cache_scheme").is_some() {
        return Err(settings.unsupported("setting of compressed-tensors", "kv_cache_scheme", "none"));
    }
    let groups = settings.object("config_groups")?.ok_or_else(|| settings.error("config_groups", "missing"))?;
    let format = settings.text("format")?.unwrap_or_default();
    let read_group = |name: &String| -> Result<_, LoadError> {
        let group = groups.object(name)?.ok_or_else(|| groups.error(name, "expected an object"))?;
        let targets = targets(&group, "targets")?;
        Ok((targets, kind(&group, group.text("format")?.unwrap_or(format))?))
    };
    let groups = groups.keys().map(read_group).collect::<Result<_, _>>()?;
    let ignored = targets(settings, "ignore")?;
    Ok(Arc::new(CompressedTensors { groups, ignored, widened: Once::default() }))
}

fn targets(settings: &Settings<'_>, key: &str) -> Result<Vec<Target>, LoadError> {
    let target = |text: &str| match text.strip_prefix("re:") {
        Some(pattern) => settings.pattern(key, pattern).map(Target::Pattern),
        None if text == "Linear" => Ok(Target::Linears),
        None => Ok(Target::Name(text.into())),
    };
    settings.texts(key)?.into_iter().map(target).collect()
}

fn kind(group: &Settings<'_>, format: &str) -> Result<Kind, LoadError> {
    const KINDS: &str = "pack-quantized, int-quantized, float-quantized, naive-quantized";
    let weights = group.object("weights")?.ok_or_else(|| group.error("weights", "missing"))?;
    let bits = weights.number("num_bits")?.ok_or_else(|| weights.error("num_bits", "missing"))?;
    let is_float = match weights.text("type")? {
        Some("float") => true,
        None | Some("int") => false,
        Some(other) => return Err(group.unsupported("type of weights", other, "int, float")),
    };
    let strategy = weights.text("strategy")?.unwrap_or(match weights.get("group_size") {
        Some(_) => "group",
        None => "tensor",
    });
    let mismatch = |what: &str| group.unsupported("compressed-tensors weights", format!("{what} in {format}"), KINDS);
    if is_float {
        let block = match strategy {
            "tensor" | "channel" => None,
            "block" => fp8::block(&weights, "block_structure")?,
            other => return Err(group.unsupported("strategy of float weights", other, "tensor, channel, block")),
        };
        return match (format, bits) {
            ("float-quantized" | "naive-quantized", 8) => Ok(Kind::Fp8 { block }),
            _ => Err(mismatch(&format!("floats of {bits} bits"))),
        };
    }
    let group_size = match strategy {
        "tensor" | "channel" => None,
        "group" => weights.group_size("group_size")?,
        other => return Err(group.unsupported("strategy of integer weights", other, "tensor, channel, group")),
    };
    let symmetric = weights.flag("symmetric")?.unwrap_or(true);
    let options = |bits| Options { bits, symmetric, group_size };
    match (format, bits) {
        ("pack-quantized", 4 | 8) => Ok(Kind::Packed(options(bits as u32))),
        ("int-quantized" | "naive-quantized", 8) => Ok(Kind::Bytes(options(8))),
        _ => Err(mismatch(&format!("integers of {bits} bits"))),
    }
}

impl Target {
    fn matches(&self, stem: &str) -> Result<bool, LoadError> {
        match self {
            Self::Linears => Ok(true),
            Self::Name(name) => Ok(name == stem),
            Self::Pattern(pattern) => pattern.matches(stem),
        }
    }
}

fn any_matches(targets: &[Target], stem: &str) -> Result<bool, LoadError> {
    targets.iter().try_fold(false, |found, target| Ok(found || target.matches(stem)?))
}

impl CompressedTensors {
    /// The first group that names the module, else the first that has all linears.
    fn kind_of(&self, stem: &str) -> Result<Option<Kind>, LoadError> {
        let is_linears = |target: &Target| matches!(target, Target::Linears);
        for by_name in [true, false] {
            for (targets, kind) in &self.groups {
                for target in targets.iter().filter(|target| is_linears(target) != by_name) {
                    if target.matches(stem)? {
                        return Ok(Some(*kind));
                    }
                }
            }
        }
        Ok(None)
    }

    fn integers(
        &self,
        source: &Source<'_>,
        stem: &str,
        shape: &[usize],
        options: Options,
    ) -> Result<Matrix, LoadError> {
        let name = |suffix: &str| format!("{stem}.{suffix}");
        let is_packed = source.has(&name("weight_packed"));
        let weight = name(if is_packed { "weight_packed" } else { "weight" });
        let [rows, cols] = source.rows_and_columns(&weight, shape)?;
        let (per_word, size) = ((32 / options.bits) as usize, options.group_size.unwrap_or(cols));
        if !cols.is_multiple_of(size) {
            let expected = format!("a multiple of group_size {size} inputs");
            return Err(source.error(&weight, expected, format!("{shape:?}")));
        }
        let num_groups = cols / size;
        let (codes, place) = match is_packed {
            true => (source.codes(&weight, CodeType::I32, &[rows, cols / per_word])?, Place::RowWords),
            false => (source.codes(&weight, CodeType::I8, shape)?, Place::RowBytes),
        };
        let mut names = vec![weight, name("weight_scale")];
        if is_packed {
            names.push(name("weight_shape"));
            let stored = source.codes(&name("weight_shape"), CodeType::I64, &[2])?;
            let stored = stored.bytes().as_chunks::<8>().0.iter().map(|dim| i64::from_le_bytes(*dim));
            if !stored.clone().map(|dim| dim as u64).eq(shape.iter().map(|&dim| dim as u64)) {
                let got = format!("{:?}", stored.collect::<Vec<_>>());
                return Err(source.error(&name("weight_shape"), format!("{shape:?}"), got));
            }
        }
        let scales =
            source.floats(&name("weight_scale"), &scale_shapes(rows, num_groups).each_ref().map(Vec::as_slice))?;
        let is_one = scales.shape().iter().product::<usize>() == 1;
        let zeros = match (options.symmetric, is_packed) {
            (true, _) => Zeros::All(1 << (options.bits - 1)),
            (false, true) => packed_zeros(source, &name("weight_zero_point"), [rows, num_groups], options.bits)?,
            (false, false) => byte_zeros(source, &name("weight_zero_point"), [rows, num_groups], scales.shape())?,
        };
        let index = name("weight_g_idx");
        let groups = match source.has(&index) {
            true => Groups::named(source, source.codes(&index, CodeType::I32, &[cols])?, (size, num_groups))?,
            false => Groups::even(cols, size),
        };
        let beside = ["weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"].map(name);
        names.extend(beside.into_iter().filter(|name| source.has(name)));
        let scale_strides = if is_one { [0, 0] } else { [1, num_groups] };
        let (codes, bits, shape) = (codes.clone(), options.bits, [rows, cols]);
        let integers = Integers { bits, shape, codes, place, scales, scale_strides, zeros, groups };
        Ok(integers.into_matrix(stem, names, &self.widened))
    }
}

/// Shapes that a scale may have: of the whole matrix where there is one group, of outputs and groups.
fn scale_shapes(rows: usize, groups: usize) -> [Vec<usize>; 3] {
    let all = vec![rows, groups];
    if groups == 1 { [all, vec![1], vec![]] } else { [all.clone(), all.clone(), all] }
}

/// # Errors
/// The tensor is not there or has another shape.
fn packed_zeros(source: &Source<'_>, name: &str, [rows, groups]: [usize; 2], bits: u32) -> Result<Zeros, LoadError> {
    let per_word = (32 / bits) as usize;
    let tensor = source.codes(name, CodeType::I32, &[rows.div_ceil(per_word), groups])?;
    let mut zeros = vec![0; groups * rows];
    for (first, words) in (0..rows).step_by(per_word).zip(tensor.bytes().chunks_exact(4 * groups)) {
        for (zeros, word) in zeros.chunks_exact_mut(rows).zip(words.as_chunks::<4>().0) {
            let codes = if bits == 4 { nibbles(u32::from_le_bytes(*word)) } else { bytemuck::cast([*word, [0; 4]]) };
            let zeros = &mut zeros[first..rows.min(first + per_word)];
            zeros.copy_from_slice(&codes[..zeros.len()]);
        }
    }
    Ok(Zeros::Each(zeros))
}

/// # Errors
/// The tensor is not there or has another shape than the scale.
fn byte_zeros(
    source: &Source<'_>,
    name: &str,
    [rows, groups]: [usize; 2],
    shape: &[usize],
) -> Result<Zeros, LoadError> {
    let bytes = source.codes(name, CodeType::I8, shape)?.bytes();
    if let [only] = bytes {
        return Ok(Zeros::All(only ^ 0x80));
    }
    let places = (0..groups).flat_map(|group| (0..rows).map(move |n| n * groups + group));
    Ok(Zeros::Each(places.map(|at| bytes[at] ^ 0x80).collect()))
}

impl Scheme for CompressedTensors {
    fn matrix(&self, source: &Source<'_>, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        let weight = format!("{stem}.weight");
        if any_matches(&self.ignored, stem)? {
            return Err(source.error(&weight, format!("floats {shape:?}, as the module is ignored"), "nothing"));
        }
        match self.kind_of(stem)? {
            None => Err(source.error(&weight, format!("floats {shape:?}, as no target matches"), "nothing")),
            Some(Kind::Fp8 { block }) => fp8::matrix(source, stem, shape, ("weight_scale", block)),
            Some(Kind::Packed(_)) if !source.has(&format!("{stem}.weight_packed")) => Err(source.error(
                &format!("{stem}.weight_packed"),
                "the codes of a module in pack-quantized",
                "nothing",
            )),
            Some(Kind::Packed(options) | Kind::Bytes(options)) => self.integers(source, stem, shape, options),
        }
    }
}
