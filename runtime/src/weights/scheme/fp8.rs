//! FP8 checkpoints (`quant_method: fp8`) and what compressed-tensors has of the same kind: E4M3 with a scale for the whole matrix,
//! for each output, or for each block (DeepSeek and Qwen: 128 x 128).
//!
//! ```text
//! weight f8_e4m3 [out, in];  weight_scale or weight_scale_inv [], [1], [out] or [out, 1]
//! or, with blocks,           weight_scale_inv [ceil(out / b0), ceil(in / b1)]
//! value = E4M3 * scale: weight_scale_inv multiplies too, despite its name
//! ```
//! Invariant: no byte is a NaN and no scale so large that a kernel's product could overflow. Activations keep their own
//! precision, whatever `input_scale` or `activation_scale` says.

use std::ops::Range;
use std::sync::Arc;

use super::settings::Settings;
use super::source::{BLOCK, CodeTensor, CodeType, Floats, Source};
use super::{Matrix, Scheme, is_part_of};
use crate::error::LoadError;
use crate::weights::{HostTensor, RowSource, WeightFormat};

#[derive(Debug)]
struct Fp8 {
    /// Outputs and inputs of a block; `None`: one scale, or one per output.
    block: Option<[usize; 2]>,
    /// Modules that are not quantised: names, or parts of them between dots.
    left_out: Vec<String>,
}

/// Reads the scheme's settings.
///
/// # Errors
/// A setting of the wrong type or range, or one that is not supported.
pub(super) fn read(settings: &Settings<'_>) -> Result<Arc<dyn Scheme>, LoadError> {
    if let Some(other) = settings.text("fmt")?.filter(|format| *format != "e4m3") {
        return Err(settings.unsupported("format of fp8", other, "e4m3"));
    }
    let mut left_out = settings.texts("modules_to_not_convert")?;
    left_out.extend(settings.texts("ignored_layers")?);
    let left_out = left_out.into_iter().map(String::from).collect();
    Ok(Arc::new(Fp8 { block: block(settings, "weight_block_size")?, left_out }))
}

/// The sides of a block, where there is one.
///
/// # Errors
/// Not two numbers above 0, or a second one that is not a multiple of 32.
pub(super) fn block(settings: &Settings<'_>, key: &str) -> Result<Option<[usize; 2]>, LoadError> {
    let Some(value) = settings.get(key) else { return Ok(None) };
    let side = |side: &serde_json::Value| side.as_u64().and_then(|side| usize::try_from(side).ok());
    let sides: Option<Vec<usize>> = value.as_array().and_then(|sides| sides.iter().map(side).collect());
    match sides.as_deref() {
        Some(&[outputs, inputs]) if outputs > 0 && inputs > 0 && inputs.is_multiple_of(BLOCK) => {
            Ok(Some([outputs, inputs]))
        }
        _ => Err(settings.error(key, format!("expected [outputs, a multiple of {BLOCK} inputs], got {value}"))),
    }
}

impl Scheme for Fp8 {
    fn matrix(&self, source: &Source<'_>, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        if let Some(part) = self.left_out.iter().find(|part| is_part_of(stem, part)) {
            let expected = format!("floats {shape:?}, as the configuration leaves out '{part}'");
            return Err(source.error(&format!("{stem}.weight"), expected, "nothing"));
        }
        // Transformers' own layer calls the scale of a whole matrix as it calls those of blocks (Ministral 3 is stored so).
        let has_inv = source.has(&format!("{stem}.weight_scale_inv"));
        let name = if self.block.is_some() || has_inv { "weight_scale_inv" } else { "weight_scale" };
        matrix(source, stem, shape, (name, self.block))
    }
}

/// E4M3 with scales under `scale_name`, for each block where there is one, else for the whole matrix or each output.
///
/// # Errors
/// Tensors that are absent or of another shape or type, NaNs, scales that are too large.
pub(super) fn matrix(
    source: &Source<'_>,
    stem: &str,
    shape: &[usize],
    (scale_name, block): (&str, Option<[usize; 2]>),
) -> Result<Matrix, LoadError> {
    let (weight, scale) = (format!("{stem}.weight"), format!("{stem}.{scale_name}"));
    let [rows, cols] = source.rows_and_columns(&weight, shape)?;
    let codes = source.codes(&weight, CodeType::F8E4m3, shape)?;
    if let Some(at) = first_nan(codes.bytes()) {
        return Err(source.error(&weight, "numbers", format!("NaN at [{}, {}]", at / cols, at % cols)));
    }
    let (scales, block) = match block {
        Some([outputs, inputs]) => {
            let scales = source.floats(&scale, &[&[rows.div_ceil(outputs), cols.div_ceil(inputs)]])?;
            (scales, [outputs, inputs])
        }
        None => {
            let scales = source.floats(&scale, &[&[], &[1], &[1, 1], &[rows], &[rows, 1]])?;
            let is_one = scales.shape().iter().product::<usize>() == 1;
            (scales, [if is_one { rows } else { 1 }, cols])
        }
    };
    // 448 times as much is a number, and so is 256 times as much, which a kernel may want.
    let too_large = |scale: f32| !(scale * 512.0).is_finite();
    let count = scales.shape().iter().product();
    if let Some(bad) = scales.with(|scale| (0..count).map(scale).find(|&scale| too_large(scale))) {
        return Err(source.error(&scale, "scales below 2^119", bad.to_string()));
    }
    let mut names = vec![weight.clone(), scale];
    let of_inputs = ["input_scale", "activation_scale"].map(|name| format!("{stem}.{name}"));
    names.extend(of_inputs.into_iter().filter(|name| source.has(name)));
    let values = Rows { codes: codes.clone(), scales, block, cols };
    let tensor = HostTensor::computed(weight, WeightFormat::Fp8E4m3, shape.to_vec(), Arc::new(values));
    Ok(Matrix { tensor, input_order: None, names })
}

/// Where the first NaN is. Pieces are looked at whole, as compilers turn into vectors.
fn first_nan(bytes: &[u8]) -> Option<usize> {
    const PIECE: usize = 256;
    let is_nan = |byte: &u8| byte & 0x7f == 0x7f;
    let has_nan = |piece: &[u8]| piece.iter().fold(false, |found, byte| found | is_nan(byte));
    let (index, piece) = bytes.chunks(PIECE).enumerate().find(|(_, piece)| has_nan(piece))?;
    piece.iter().position(is_nan).map(|at| index * PIECE + at)
}

#[derive(Debug)]
struct Rows {
    codes: CodeTensor,
    scales: Floats,
    /// Outputs and inputs that share a scale.
    block: [usize; 2],
    cols: usize,
}

impl RowSource for Rows {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let block_bytes = WeightFormat::Fp8E4m3.block_bytes();
        let (bytes, scales_per_row) = (self.codes.bytes(), self.cols.div_ceil(self.block[1]));
        self.scales.with(|scale| {
            for (row, out) in rows.zip(out.chunks_exact_mut(self.cols / BLOCK * block_bytes)) {
                let values = bytes[row * self.cols..][..self.cols].chunks_exact(BLOCK);
                for (block, (values, out)) in values.zip(out.chunks_exact_mut(block_bytes)).enumerate() {
                    let scale = scale(row / self.block[0] * scales_per_row + block * BLOCK / self.block[1]);
                    out[..4].copy_from_slice(&scale.to_le_bytes());
                    out[4..].copy_from_slice(values);
                }
            }
        });
    }
}
