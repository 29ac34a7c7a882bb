//! Matrices as files of compressed-tensors keep them: what `scheme/compressed_tensors.rs` reads, written.
//!
//! ```text
//! pack-quantized   weight_packed i32 [out, in * bits / 32], weight_scale [out, groups], weight_shape i64 [2];
//!                  not symmetric: weight_zero_point i32 [out * bits / 32, groups]
//! float-quantized  weight f8_e4m3 [out, in], weight_scale f32 [out, 1]
//! ```
//! Invariant: rows are rounded by `grid`, to the closest of some grids, which is worth its time once; a tensor is computed when it is written and depends on the matrix only, not on the
//! number of threads.

use std::ops::Range;
use std::str::FromStr;

use safetensors::Dtype;
use serde_json::{Value, json};

use super::WeightFormat;
use super::grid::Grid;
use super::quantise::{fp8_code, fp8_scale};

/// What a checkpoint is rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// 4 bits and a scale for each group of inputs.
    Int4 {
        /// Inputs of a group: a multiple of 32, as this runtime reads them.
        group: usize,
        /// Whether codes lie around the middle one, or groups have a zero point of their own.
        symmetric: bool,
    },
    /// 8 bits and a scale for each output; activations stay floats.
    Int8,
    /// E4M3 and a scale for each output; activations may be rounded to E4M3 for each token.
    Fp8,
}

impl FromStr for Packing {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let int4 = |group: &str, symmetric| match group.parse() {
            Ok(group) if group > 0 && usize::is_multiple_of(group, 32) => Ok(Self::Int4 { group, symmetric }),
            _ => Err(format!("'{name}': groups are a multiple of 32 inputs")),
        };
        match name {
            "int8" => Ok(Self::Int8),
            "fp8" => Ok(Self::Fp8),
            _ => match (name.strip_prefix("int4-g"), name.strip_prefix("int4-asym-g")) {
                (Some(group), _) => int4(group, true),
                (_, Some(group)) => int4(group, false),
                _ => Err(format!("'{name}' is not one of int4-gN, int4-asym-gN (N inputs: 32, 64, 128 …), int8, fp8")),
            },
        }
    }
}

/// A tensor that stands for a matrix, without the matrix's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    Codes,
    Scales,
    Zeros,
    Shape,
}

/// Rows of floats that are to be written.
pub(crate) trait Rows: Sync {
    /// `[out_features, in_features]`.
    fn shape(&self) -> [usize; 2];
    /// Type of the scales of integers.
    fn stored(&self) -> WeightFormat;
    /// What errors count for, by input; none: all the same.
    fn counts(&self) -> Option<&[f32]>;
    fn read(&self, rows: Range<usize>, out: &mut [f32]);
}

impl Packing {
    /// `quantization_config` of a model whose linears are packed so, but for these modules.
    pub(crate) fn config(self, ignored: &[String]) -> Value {
        let weights = |bits: u32, kind: &str, group: Option<usize>, symmetric: bool| {
            json!({
                "num_bits": bits, "type": kind, "symmetric": symmetric,
                "strategy": if group.is_some() { "group" } else { "channel" },
                "group_size": group, "block_structure": null, "dynamic": false, "actorder": null,
                "observer": "minmax", "observer_kwargs": {},
            })
        };
        let mut activations = Value::Null;
        let (format, weights) = match self {
            Self::Int4 { group, symmetric } => ("pack-quantized", weights(4, "int", Some(group), symmetric)),
            Self::Int8 => ("pack-quantized", weights(8, "int", None, true)),
            Self::Fp8 => {
                activations = json!({
                    "num_bits": 8, "type": "float", "symmetric": true, "strategy": "token", "group_size": null,
                    "block_structure": null, "dynamic": true, "actorder": null, "observer": null, "observer_kwargs": {},
                });
                ("float-quantized", weights(8, "float", None, true))
            }
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "global_compression_ratio": null,
            "kv_cache_scheme": null,
            "ignore": ignored,
            "config_groups": { "group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": null,
            } },
        })
    }

    /// Inputs that share a scale, of rows of so many.
    pub(crate) fn group(self, inputs: usize) -> usize {
        match self {
            Self::Int4 { group, .. } => group,
            Self::Int8 | Self::Fp8 => inputs,
        }
    }

    fn bits(self) -> u32 {
        if matches!(self, Self::Int4 { .. }) { 4 } else { 8 }
    }

    fn is_symmetric(self) -> bool {
        !matches!(self, Self::Int4 { symmetric: false, .. })
    }

    /// A row's groups with their grids.
    fn grids<'v>(
        self,
        row: &'v [f32],
        counts: Option<&'v [f32]>,
        stored: WeightFormat,
    ) -> impl Iterator<Item = (&'v [f32], Grid)> {
        let size = self.group(row.len());
        row.chunks(size).enumerate().map(move |(i, values)| {
            let counts = counts.map(|counts| &counts[i * size..][..values.len()]);
            (values, Grid::closest(values, counts, (self.bits(), self.is_symmetric()), stored))
        })
    }

    /// What the codes of a row mean.
    pub(crate) fn rounded(self, row: &[f32], counts: Option<&[f32]>, stored: WeightFormat) -> Vec<f32> {
        if self == Self::Fp8 {
            let (scale, inverse) = fp8_scale(row);
            return row.iter().map(|&x| fp8_code(x, inverse).to_f32() * scale).collect();
        }
        let groups = self.grids(row, counts, stored);
        groups.flat_map(|(values, grid)| values.iter().map(move |&x| grid.value(grid.code(x)))).collect()
    }

    /// The tensors of a matrix: the ends of their names, their types and shapes.
    pub(crate) fn pieces(
        self,
        [rows, cols]: [usize; 2],
        stored: WeightFormat,
    ) -> Vec<(Piece, &'static str, Dtype, Vec<usize>)> {
        if self == Self::Fp8 {
            return vec![
                (Piece::Codes, "weight", Dtype::F8_E4M3, vec![rows, cols]),
                (Piece::Scales, "weight_scale", Dtype::F32, vec![rows, 1]),
            ];
        }
        let (per_word, groups) = ((32 / self.bits()) as usize, cols / self.group(cols));
        let mut pieces = vec![
            (Piece::Codes, "weight_packed", Dtype::I32, vec![rows, cols / per_word]),
            (Piece::Scales, "weight_scale", dtype(stored), vec![rows, groups]),
            (Piece::Shape, "weight_shape", Dtype::I64, vec![2]),
        ];
        if !self.is_symmetric() {
            pieces.push((Piece::Zeros, "weight_zero_point", Dtype::I32, vec![rows.div_ceil(per_word), groups]));
        }
        pieces
    }

    /// The bytes of one of them.
    pub(crate) fn bytes(self, piece: Piece, matrix: &dyn Rows) -> Vec<u8> {
        let [rows, cols] = matrix.shape();
        match piece {
            Piece::Shape => [rows, cols].iter().flat_map(|&dim| (dim as i64).to_le_bytes()).collect(),
            Piece::Codes => by_rows(matrix, |row| self.codes(row, matrix)),
            Piece::Scales => by_rows(matrix, |row| self.scales(row, matrix)),
            Piece::Zeros => self.zeros(matrix),
        }
    }

    /// The codes of a row, the first lowest in their words: in bytes, one after the other.
    fn codes(self, row: &[f32], matrix: &dyn Rows) -> Vec<u8> {
        if self == Self::Fp8 {
            let (_, inverse) = fp8_scale(row);
            return row.iter().map(|&x| fp8_code(x, inverse).0).collect();
        }
        let groups = self.grids(row, matrix.counts(), matrix.stored());
        let codes: Vec<u8> = groups.flat_map(|(values, grid)| values.iter().map(move |&x| grid.code(x))).collect();
        if self.bits() == 8 {
            return codes;
        }
        codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect()
    }

    fn scales(self, row: &[f32], matrix: &dyn Rows) -> Vec<u8> {
        if self == Self::Fp8 {
            return fp8_scale(row).0.to_le_bytes().to_vec();
        }
        let groups = self.grids(row, matrix.counts(), matrix.stored());
        groups.flat_map(|(_, grid)| float_bytes(grid.scale, matrix.stored())).collect()
    }

    /// Packed along the outputs: rows of words, a word for each group.
    fn zeros(self, matrix: &dyn Rows) -> Vec<u8> {
        let [rows, cols] = matrix.shape();
        let of_row =
            |row: &[f32]| self.grids(row, matrix.counts(), matrix.stored()).map(|(_, grid)| grid.zero()).collect();
        let (groups, per_word) = (cols / self.group(cols), (32 / self.bits()) as usize);
        let zeros = by_rows(matrix, of_row);
        let mut words = vec![0u32; rows.div_ceil(per_word) * groups];
        for (n, of_row) in zeros.chunks_exact(groups).enumerate() {
            for (group, &zero) in of_row.iter().enumerate() {
                words[n / per_word * groups + group] |= u32::from(zero) << ((n % per_word) as u32 * self.bits());
            }
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

/// The safetensors type of a format of floats.
///
/// # Panics
/// For blocks.
pub(crate) fn dtype(format: WeightFormat) -> Dtype {
    match format {
        WeightFormat::F32 => Dtype::F32,
        WeightFormat::F16 => Dtype::F16,
        WeightFormat::Bf16 => Dtype::BF16,
        _ => panic!("{format} is no type of floats"),
    }
}

/// A float as a file has it.
pub(crate) fn float_bytes(x: f32, format: WeightFormat) -> Vec<u8> {
    match format {
        WeightFormat::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        WeightFormat::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

/// What `of_row` makes of each row, one after the other; threads share the rows.
fn by_rows(matrix: &dyn Rows, of_row: impl Fn(&[f32]) -> Vec<u8> + Sync) -> Vec<u8> {
    let [rows, cols] = matrix.shape();
    let share = rows.div_ceil(num_threads()).max(1);
    let of_rows = |rows: Range<usize>| {
        let (mut row, mut bytes) = (vec![0.0; cols], Vec::new());
        for n in rows {
            matrix.read(n..n + 1, &mut row);
            bytes.extend(of_row(&row));
        }
        bytes
    };
    std::thread::scope(|scope| {
        let of_rows = &of_rows;
        let parts: Vec<_> = (0..rows)
            .step_by(share)
            .map(|first| scope.spawn(move || of_rows(first..(first + share).min(rows))))
            .collect();
        parts.into_iter().flat_map(|part| part.join().expect("rounding does not panic")).collect()
    })
}

/// Threads for work of the host.
pub(crate) fn num_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
