//! GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it: 4 and 8 bits, symmetric or not, in the order of activations or
//! not.
//!
//! ```text
//! qweight i32 [in / p, out], p = 32 / bits: the codes of p inputs, the first lowest
//! qzeros  i32 [groups, out / p]: zero points, packed in the same way along the outputs: less 1 in format 1 (`gptq`)
//! scales  [groups, out];  g_idx i32 [in]: the group of each input;  value = (code - zero) * scale
//! ```
//! Invariant: a symmetric checkpoint's zero point is the middle whatever it stores. Some files store zero points of the other
//! format than they name; where all are equal, 7 or 8 (127 or 128) tell which, and that is said.

use std::sync::Arc;

use super::integers::{Groups, Integers, Place, Zeros};
use super::settings::{Pattern, Settings};
use super::source::{BLOCK, CodeType, Source};
use super::{Matrix, Once, Scheme};
use crate::error::LoadError;

/// How a module is quantised.
#[derive(Clone, Copy, Debug)]
struct Options {
    bits: u32,
    /// `None`: all inputs.
    group_size: Option<usize>,
    sym: bool,
    desc_act: bool,
}

#[derive(Debug)]
struct Gptq {
    options: Options,
    /// The first that matches a module counts; `None`: it is not quantised.
    overrides: Vec<(Pattern, Option<Options>)>,
    /// Zero points are stored less 1.
    is_first_format: bool,
    lm_head: bool,
    widened: Once,
    contradicted: Once,
}

/// Reads the scheme's settings.
///
/// # Errors
/// A setting of the wrong type or range, or one that is not supported.
pub(super) fn read(settings: &Settings<'_>) -> Result<Arc<dyn Scheme>, LoadError> {
    let options = Options {
        bits: bits(settings)?.ok_or_else(|| settings.error("bits", "missing"))?,
        group_size: settings.group_size("group_size")?,
        sym: settings.flag("sym")?.unwrap_or(true),
        desc_act: settings.flag("desc_act")?.unwrap_or(false),
    };
    if settings.flag("is_marlin_format")?.unwrap_or(false) {
        return Err(settings.unsupported("checkpoint_format", "marlin", "gptq, gptq_v2"));
    }
    let is_first_format = match settings.text("checkpoint_format")? {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => return Err(settings.unsupported("checkpoint_format", other, "gptq, gptq_v2")),
    };
    let mut overrides = Vec::new();
    if let Some(dynamic) = settings.object("dynamic")? {
        for key in dynamic.keys() {
            let text = key.strip_prefix("-:").or(key.strip_prefix("+:")).unwrap_or(key);
            let changed = match dynamic.object(key)? {
                _ if key.starts_with("-:") => None,
                Some(changes) => Some(options.with(&changes)?),
                None => Some(options),
            };
            overrides.push((dynamic.pattern(key, text)?, changed));
        }
    }
    let lm_head = settings.flag("lm_head")?.unwrap_or(false);
    let (widened, contradicted) = (Once::default(), Once::default());
    Ok(Arc::new(Gptq { options, overrides, is_first_format, lm_head, widened, contradicted }))
}

fn bits(settings: &Settings<'_>) -> Result<Option<u32>, LoadError> {
    match settings.number("bits")? {
        Some(bits @ (4 | 8)) => Ok(Some(bits as u32)),
        Some(other) => Err(settings.unsupported("number of bits", other.to_string(), "4, 8")),
        None => Ok(None),
    }
}

impl Options {
    /// With what an override changes.
    fn with(self, changes: &Settings<'_>) -> Result<Self, LoadError> {
        let has_size = changes.get("group_size").is_some();
        Ok(Self {
            bits: bits(changes)?.unwrap_or(self.bits),
            group_size: if has_size { changes.group_size("group_size")? } else { self.group_size },
            sym: changes.flag("sym")?.unwrap_or(self.sym),
            desc_act: changes.flag("desc_act")?.unwrap_or(self.desc_act),
        })
    }
}

impl Gptq {
    /// The options of a module; `None` where the configuration leaves it as it is.
    fn options_of(&self, stem: &str) -> Result<Option<Options>, LoadError> {
        if stem.rsplit('.').next() == Some("lm_head") && !self.lm_head {
            return Ok(None);
        }
        for (pattern, options) in &self.overrides {
            if pattern.matches(stem)? {
                return Ok(*options);
            }
        }
        Ok(Some(self.options))
    }

    /// # Errors
    /// Zero points of a symmetric matrix that differ, or zero points that are absent where they count.
    fn zeros(
        &self,
        source: &Source<'_>,
        name: &str,
        [groups, rows]: [usize; 2],
        options: Options,
    ) -> Result<Zeros, LoadError> {
        let middle = 1u8 << (options.bits - 1);
        if options.sym && !source.has(name) {
            return Ok(Zeros::All(middle));
        }
        let per_word = (32 / options.bits) as usize;
        let words = source.codes(name, CodeType::I32, &[groups, rows / per_word])?.words();
        let mask = (1u32 << options.bits) - 1;
        let stored =
            words.flat_map(|word| (0..per_word).map(move |i| (word >> (i as u32 * options.bits) & mask) as u8));
        let first = stored.clone().next().unwrap_or(middle);
        let is_constant = stored.clone().all(|zero| zero == first);
        if options.sym && !is_constant {
            let got = stored.clone().find(|&zero| zero != first).unwrap_or(first);
            return Err(source.error(name, format!("equal zero points, as sym is true: {first}"), got.to_string()));
        }
        let expected = if self.is_first_format { middle - 1 } else { middle };
        let is_other_format = is_constant && first != expected && (first == middle || first == middle - 1);
        if (is_other_format || options.sym && first != expected) && self.contradicted.is_first() {
            tracing::warn!(
                "{}: {name} and maybe others store the zero point {first}, not {expected} as checkpoint_format and bits \
                 say: taken for {}",
                source.path.display(),
                if options.sym || is_other_format { middle } else { first },
            );
        }
        if options.sym || is_other_format {
            return Ok(Zeros::All(middle));
        }
        let one = u8::from(self.is_first_format);
        if options.bits == 8 && self.is_first_format && stored.clone().any(|zero| zero == u8::MAX) {
            return Err(source.error(name, "zero points below 256", "256 (255 is stored, less 1)"));
        }
        Ok(Zeros::Each(stored.map(|zero| zero + one).collect()))
    }

    fn groups(&self, source: &Source<'_>, name: &str, cols: usize, options: Options) -> Result<Groups, LoadError> {
        let size = options.group_size.unwrap_or(cols);
        if !source.has(name) {
            return match options.desc_act && size < cols {
                true => Err(source.error(name, "the group of each input, as desc_act is true", "nothing")),
                false => Ok(Groups::even(cols, size)),
            };
        }
        let groups = Groups::named(source, source.codes(name, CodeType::I32, &[cols])?, (size, cols / size))?;
        if groups.order.is_some() && !options.desc_act {
            return Err(source.error(name, "groups of neighbours, as desc_act is false", "others"));
        }
        Ok(groups)
    }
}

impl Scheme for Gptq {
    fn matrix(&self, source: &Source<'_>, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        let name = |suffix: &str| format!("{stem}.{suffix}");
        let Some(options) = self.options_of(stem)? else {
            let expected = format!("shape {shape:?}, as the module is not quantised");
            return Err(source.error(&name("weight"), expected, "nothing"));
        };
        let [rows, cols] = source.rows_and_columns(&name("qweight"), shape)?;
        let (per_word, size) = ((32 / options.bits) as usize, options.group_size.unwrap_or(cols));
        if !rows.is_multiple_of(per_word) || !cols.is_multiple_of(size) {
            let expected = format!("multiples of {per_word} outputs and of group_size {size} inputs");
            return Err(source.error(&name("qweight"), expected, format!("{shape:?}")));
        }
        let groups = cols / size;
        let codes = source.codes(&name("qweight"), CodeType::I32, &[cols / per_word, rows])?.clone();
        let scales = source.floats(&name("scales"), &[&[groups, rows]])?;
        let zeros = self.zeros(source, &name("qzeros"), [groups, rows], options)?;
        let groups = self.groups(source, &name("g_idx"), cols, options)?;
        let mut names = vec![name("qweight"), name("scales")];
        names.extend([name("qzeros"), name("g_idx")].into_iter().filter(|name| source.has(name)));
        // AutoGPTQ gives every module a bias, of zeros where the model has none.
        let is_zero =
            |name: &String| source.tensors.get(name).is_some_and(|bias| bias.to_f32().iter().all(|&x| x == 0.0));
        names.extend(Some(name("bias")).filter(is_zero));
        let (bits, place, scale_strides) = (options.bits, Place::InputWords, [rows, 1]);
        let integers = Integers { bits, shape: [rows, cols], codes, place, scales, scale_strides, zeros, groups };
        debug_assert_eq!(integers.groups.of_block.len(), cols / BLOCK);
        Ok(integers.into_matrix(stem, names, &self.widened))
    }
}
