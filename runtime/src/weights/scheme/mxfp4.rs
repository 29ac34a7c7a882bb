//! MXFP4 as gpt-oss has it: E2M1 codes in pairs, a power of two for each 32 inputs, all experts of a layer in one tensor.
//!
//! ```text
//! <stem>_blocks u8 [experts, out, in / 32, 16]: byte j holds the inputs 2 j (low nibble) and 2 j + 1
//! <stem>_scales u8 [experts, out, in / 32]: e;  value = E2M1 * 2^(e - 127)
//! ```

use std::ops::Range;
use std::sync::Arc;

use super::settings::Settings;
use super::source::{BLOCK, CodeTensor, CodeType, Source};
use super::{Matrix, Scheme};
use crate::error::LoadError;
use crate::weights::{HostTensor, RowSource, WeightFormat};

#[derive(Debug)]
struct Mxfp4;

/// The scheme has no settings that change anything: which modules are quantised is seen by their tensors.
///
/// # Errors
/// None; the signature is that of all schemes.
pub(super) fn read(_settings: &Settings<'_>) -> Result<Arc<dyn Scheme>, LoadError> {
    Ok(Arc::new(Mxfp4))
}

impl Scheme for Mxfp4 {
    fn matrix(&self, source: &Source<'_>, stem: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        let names = [format!("{stem}_blocks"), format!("{stem}_scales")];
        let Some((&cols, outer)) = shape.split_last().filter(|(cols, _)| cols.is_multiple_of(BLOCK)) else {
            return Err(source.error(&names[0], "a multiple of 32 inputs", format!("{shape:?}")));
        };
        let scale_shape = [outer, &[cols / BLOCK]].concat();
        let codes = source.codes(&names[0], CodeType::U8, &[scale_shape.as_slice(), &[BLOCK / 2]].concat())?.clone();
        let scales = source.codes(&names[1], CodeType::U8, &scale_shape)?.clone();
        if let Some(at) = scales.bytes().iter().position(|&e| e == u8::MAX) {
            return Err(source.error(&names[1], "powers of two", format!("NaN (255) at {at}")));
        }
        let rows = Arc::new(Rows { codes, scales, blocks_per_row: cols / BLOCK });
        let tensor = HostTensor::computed(format!("{stem}.weight"), WeightFormat::Mxfp4, shape.to_vec(), rows);
        Ok(Matrix { tensor, input_order: None, names: names.to_vec() })
    }
}

#[derive(Debug)]
struct Rows {
    codes: CodeTensor,
    scales: CodeTensor,
    blocks_per_row: usize,
}

impl RowSource for Rows {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let blocks = rows.start * self.blocks_per_row..rows.end * self.blocks_per_row;
        let codes = self.codes.bytes().as_chunks::<{ BLOCK / 2 }>().0;
        let scales = self.scales.bytes();
        for (block, out) in blocks.zip(out.chunks_exact_mut(WeightFormat::Mxfp4.block_bytes())) {
            out[0] = scales[block];
            // The inputs j and j + 16 share a byte of ours.
            let (first, second) = codes[block].split_at(BLOCK / 4);
            for (pair, (a, b)) in out[1..].as_chunks_mut::<2>().0.iter_mut().zip(first.iter().zip(second)) {
                *pair = [a & 15 | b << 4, a >> 4 | b & 0xf0];
            }
        }
    }
}
