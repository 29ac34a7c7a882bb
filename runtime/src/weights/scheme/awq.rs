//! AWQ (Lin et al. 2023) as AutoAWQ writes it, version gemm: 4 bits, a zero point for each group and output.
//!
//! ```text
//! qweight i32 [in, out / 8]: the codes of 8 outputs; nibble p holds output [0, 2, 4, 6, 1, 3, 5, 7][p]
//! qzeros  i32 [groups, out / 8]: zero points, in the same way
//! scales  [groups, out];  value = (code - zero) * scale
//! ```

use std::sync::Arc;

use super::integers::{Groups, INTERLEAVED, Integers, Place, Zeros};
use super::settings::Settings;
use super::source::{CodeType, Source};
use super::{Matrix, Once, Scheme, is_part_of};
use crate::error::LoadError;

#[derive(Debug)]
struct Awq {
    /// `None`: all inputs.
    group_size: Option<usize>,
    /// Modules that are not quantised: names, or parts of them between dots.
    left_out: Vec<String>,
    widened: Once,
}

/// Reads the scheme's settings, which have two sets of names.
///
/// # Errors
/// A setting of the wrong type or range, or one that is not supported.
pub(super) fn read(settings: &Settings<'_>) -> Result<Arc<dyn Scheme>, LoadError> {
    let key = |keys: [&'static str; 2]| keys.into_iter().find(|key| settings.get(key).is_some()).unwrap_or(keys[0]);
    let bits = key(["bits", "w_bit"]);
    match settings.number(bits)? {
        Some(4) => {}
        Some(other) => return Err(settings.unsupported("number of bits", other.to_string(), "4")),
        None => return Err(settings.error(bits, "missing")),
    }
    let version = settings.text("version")?.unwrap_or("gemm");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(settings.unsupported("version of AWQ", version, "gemm"));
    }
    let group_size = settings.group_size(key(["group_size", "q_group_size"]))?;
    let left_out = settings.texts("modules_to_not_convert")?.into_iter().map(String::from).collect();
    Ok(Arc::new(Awq { group_size, left_out, widened: Once::default() }))
}

impl Scheme for Awq {
    fn matrix(&self, source: &Source<'_>, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        let name = |suffix: &str| format!("{stem}.{suffix}");
        if let Some(part) = self.left_out.iter().find(|part| is_part_of(stem, part)) {
            let expected = format!("shape {shape:?}, as modules_to_not_convert has '{part}'");
            return Err(source.error(&name("weight"), expected, "nothing"));
        }
        let [rows, cols] = source.rows_and_columns(&name("qweight"), shape)?;
        let size = self.group_size.unwrap_or(cols);
        if !rows.is_multiple_of(8) || !cols.is_multiple_of(size) {
            let expected = format!("multiples of 8 outputs and of group_size {size} inputs");
            return Err(source.error(&name("qweight"), expected, format!("{shape:?}")));
        }
        let groups = cols / size;
        let codes = source.codes(&name("qweight"), CodeType::I32, &[cols, rows / 8])?.clone();
        let scales = source.floats(&name("scales"), &[&[groups, rows]])?;
        let words = source.codes(&name("qzeros"), CodeType::I32, &[groups, rows / 8])?.words();
        let zeros = words.flat_map(|word| INTERLEAVED.map(|nibble| (word >> (4 * nibble) & 15) as u8)).collect();
        let integers = Integers {
            bits: 4,
            shape: [rows, cols],
            codes,
            place: Place::InterleavedWords,
            scales,
            scale_strides: [rows, 1],
            zeros: Zeros::Each(zeros),
            groups: Groups::even(cols, size),
        };
        let names = ["qweight", "qzeros", "scales"].map(name).to_vec();
        Ok(integers.into_matrix(stem, names, &self.widened))
    }
}
