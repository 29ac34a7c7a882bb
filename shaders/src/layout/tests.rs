//! Repacked matrices, read back by a plain mirror of the fragments, are bit for bit what the format defines.

use std::ops::Range;

use half::{bf16, f16};
use runtime::weights::format::{FP4_DOUBLED, IQ4_VALUES};
use runtime::weights::{HostTensor, WeightFormat};

use super::{GROUP, PANEL, codes_words, fragment_of, layout_of, pack, side_words};

/// Rows: less than a panel, one panel, several with a padded one.
const ROWS: [usize; 4] = [1, 63, 64, 150];

/// A matrix of random bytes whose floats are finite.
fn random_matrix(format: WeightFormat, rows: usize, cols: usize) -> HostTensor {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ (rows * 31 + cols) as u64;
    let mut bytes = vec![0u8; format.bytes_of(&[rows, cols]).unwrap()];
    for byte in &mut bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = (state >> 32) as u8;
    }
    // The last byte of each float in a block: without its second bit the exponent is not the one of infinity.
    let float_ends: &[usize] = match format {
        WeightFormat::F32 => &[3],
        WeightFormat::F16 | WeightFormat::Bf16 | WeightFormat::Q8_0 | WeightFormat::Q4_0 | WeightFormat::Q5_0 => &[1],
        WeightFormat::Iq4Nl | WeightFormat::Iq4Xs | WeightFormat::Int4 => &[1],
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => &[1, 3],
        WeightFormat::Q6K => &[209],
        WeightFormat::Q2K => &[81, 83],
        WeightFormat::Q3K => &[109],
        WeightFormat::Int8 | WeightFormat::Fp8E4m3 => &[3],
        WeightFormat::Mxfp4 => &[],
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        float_ends.iter().for_each(|&end| block[end] &= 0xbf);
        match format {
            WeightFormat::Int4 => block[2] %= 17,
            // No NaN.
            WeightFormat::Fp8E4m3 => block[4..].iter_mut().for_each(|code| *code &= 0xf7),
            _ => {}
        }
    }
    HostTensor::owned(format.name(), format, vec![rows, cols], bytes)
}

/// Columns that are whole blocks, with incomplete super groups where the format allows them.
fn columns_of(format: WeightFormat) -> [usize; 2] {
    if format.block_len() == 256 { [256, 768] } else { [32, 160] }
}

fn packed(tensor: &HostTensor, rows: Range<usize>) -> (Vec<u32>, Vec<u32>) {
    let cols = tensor.row_len();
    // Not zeros, so that a word that `pack` leaves out shows.
    let mut codes = vec![u32::MAX; codes_words(tensor.format, rows.len(), cols)];
    let mut side = vec![u32::MAX; side_words(tensor.format, rows.len(), cols)];
    pack(tensor, rows, &mut codes, &mut side);
    (codes, side)
}

/// The mirror of a fragment: where its `load_group` looks.
struct Address<'a> {
    format: WeightFormat,
    codes: &'a [u32],
    side: &'a [u32],
    groups: usize,
    panel: usize,
    lane: usize,
    group: usize,
}

impl Address<'_> {
    /// Word c of vector v of the group.
    fn code(&self, v: usize, c: usize) -> u32 {
        let vectors = layout_of(self.format).codes_per_group;
        self.codes[(((self.panel * self.groups + self.group) * vectors + v) * PANEL + self.lane) * 4 + c]
    }

    /// Side word s of the super group.
    fn side(&self, s: usize) -> u32 {
        let layout = layout_of(self.format);
        let super_group = self.panel * self.groups.div_ceil(layout.side_groups) + self.group / layout.side_groups;
        self.side[(super_group * layout.side_words + s) * PANEL + self.lane]
    }

    fn nibble(&self, i: usize, c: usize) -> u32 {
        self.code(0, c) >> (4 * i) & 15
    }

    /// The nibble of element 4 i + c and the bit for it in the side word s.
    fn five_bits(&self, s: usize, i: usize, c: usize) -> u32 {
        self.nibble(i, c) | (self.side(s) >> (8 * c + i) & 1) << 4
    }

    /// The two bytes of this group under nested scales.
    fn pair(&self) -> [u8; 2] {
        let word = self.side(1 + self.group % 8 / 2) >> (16 * (self.group % 2));
        [word as u8, (word >> 8) as u8]
    }

    fn byte(&self, i: usize, c: usize) -> u32 {
        self.code(i / 4, c) >> (8 * (i % 4)) & 255
    }

    /// Byte `group % 4` of the side word s of four groups.
    fn byte_of_four(&self, s: usize) -> u32 {
        self.side(s) >> (8 * (self.group % 4)) & 255
    }

    /// Element 4 i + c.
    fn value(&self, i: usize, c: usize) -> f32 {
        let code = |code: u32, zero: i32| (code as i32 - zero) as f32;
        let shared_scale = || low_half(self.side(0) >> (16 * (self.group % 2)));
        let nested = || {
            let [scale, min] = self.pair();
            (low_half(self.side(0)) * f32::from(scale), high_half(self.side(0)) * f32::from(min))
        };
        match self.format {
            WeightFormat::F32 => f32::from_bits(self.code(i, c)),
            WeightFormat::F16 => low_half(self.code(i / 2, i % 2 * 2 + c / 2) >> (16 * (c % 2))),
            WeightFormat::Bf16 => {
                bf16::from_bits((self.code(i / 2, i % 2 * 2 + c / 2) >> (16 * (c % 2))) as u16).to_f32()
            }
            WeightFormat::Q8_0 => f32::from(self.byte(i, c) as i8) * shared_scale(),
            WeightFormat::Q4_0 => code(self.nibble(i, c), 8) * shared_scale(),
            WeightFormat::Q4_1 => code(self.nibble(i, c), 0) * low_half(self.side(0)) + high_half(self.side(0)),
            WeightFormat::Q5_0 => code(self.five_bits(1 + self.group % 2, i, c), 16) * shared_scale(),
            WeightFormat::Q5_1 => code(self.five_bits(1, i, c), 0) * low_half(self.side(0)) + high_half(self.side(0)),
            WeightFormat::Q4K => {
                let (scale, min) = nested();
                code(self.nibble(i, c), 0) * scale - min
            }
            WeightFormat::Q5K => {
                let (scale, min) = nested();
                code(self.five_bits(5 + self.group % 8, i, c), 0) * scale - min
            }
            WeightFormat::Q6K => {
                let upper = self.side(5 + self.group % 8 * 2 + i / 4) >> (8 * c + 2 * (i % 4)) & 3;
                let half_scale = f32::from(self.pair()[i / 4] as i8);
                code(self.nibble(i, c) | upper << 4, 32) * half_scale * low_half(self.side(0))
            }
            WeightFormat::Q2K => {
                let pair = self.pair()[i / 4];
                let min = high_half(self.side(0)) * f32::from(pair >> 4);
                code(self.nibble(i, c), 0) * (low_half(self.side(0)) * f32::from(pair & 15)) - min
            }
            WeightFormat::Q3K => {
                code(self.nibble(i, c), 4) * f32::from(self.pair()[i / 4] as i8) * low_half(self.side(0))
            }
            WeightFormat::Iq4Nl => f32::from(IQ4_VALUES[self.nibble(i, c) as usize]) * shared_scale(),
            WeightFormat::Iq4Xs => {
                let scale = low_half(self.side(0)) * f32::from(self.pair()[0] as i8);
                f32::from(IQ4_VALUES[self.nibble(i, c) as usize]) * scale
            }
            WeightFormat::Mxfp4 => {
                let scale = 2f64.powi(self.byte_of_four(0) as i32 - 128) as f32;
                f32::from(FP4_DOUBLED[self.nibble(i, c) as usize]) * scale
            }
            WeightFormat::Int4 => (code(self.nibble(i, c), 0) - high_half(self.side(0))) * low_half(self.side(0)),
            WeightFormat::Int8 => {
                let scale = f32::from_bits(self.side(self.group % 4));
                code(self.byte(i, c), self.byte_of_four(4) as i32) * scale
            }
            WeightFormat::Fp8E4m3 => {
                let byte = self.byte(i, c);
                let bits = (byte & 0x80) << 8 | (byte & 0x7f) << 7;
                low_half(bits) * 256.0 * f32::from_bits(self.side(0))
            }
        }
    }
}

fn low_half(word: u32) -> f32 {
    f16::from_bits(word as u16).to_f32()
}

fn high_half(word: u32) -> f32 {
    low_half(word >> 16)
}

#[test]
fn mirrored_fragments_read_back_the_values_of_the_file() {
    for format in WeightFormat::all() {
        for (rows, cols) in ROWS.into_iter().flat_map(|rows| columns_of(format).map(|cols| (rows, cols))) {
            let tensor = random_matrix(format, rows, cols);
            let (codes, side) = packed(&tensor, 0..rows);
            let expected = tensor.to_f32();
            for (at, expected) in expected.into_iter().enumerate() {
                let (row, col) = (at / cols, at % cols);
                let (panel, lane, group) = (row / PANEL, row % PANEL, col / GROUP);
                let (codes, side, groups) = (codes.as_slice(), side.as_slice(), cols / GROUP);
                let value = Address { format, codes, side, groups, panel, lane, group }.value(col % GROUP / 4, col % 4);
                assert_eq!(value.to_bits(), expected.to_bits(), "{format} [{rows}, {cols}] at [{row}, {col}]");
            }
        }
    }
}

#[test]
fn rows_packed_in_ranges_are_the_whole() {
    for format in WeightFormat::all() {
        let (rows, cols) = (3 * PANEL + 7, columns_of(format)[1]);
        let tensor = random_matrix(format, rows, cols);
        let (mut codes, mut side) = packed(&tensor, 0..PANEL);
        for range in [PANEL..3 * PANEL, 3 * PANEL..rows] {
            let part = packed(&tensor, range);
            codes.extend(part.0);
            side.extend(part.1);
        }
        assert_eq!((codes, side), packed(&tensor, 0..rows), "{format}");
    }
}

#[test]
fn padded_rows_are_zeros() {
    for format in WeightFormat::all() {
        let (rows, cols) = (PANEL + 5, columns_of(format)[1]);
        let (codes, side) = packed(&random_matrix(format, rows, cols), PANEL..rows);
        let padded_codes = codes.chunks_exact(4 * PANEL).flat_map(|lanes| &lanes[4 * 5..]);
        let padded_side = side.chunks_exact(PANEL).flat_map(|lanes| &lanes[5..]);
        assert!(padded_codes.chain(padded_side).all(|&word| word == 0), "{format}");
    }
}

#[test]
fn sizes_are_those_of_the_contract() {
    let sizes = |format| {
        let layout = layout_of(format);
        (fragment_of(format), layout.codes_per_group, layout.side_words, layout.side_groups)
    };
    let expected = [
        ("f32", 8, 0, 1),
        ("f16", 4, 0, 1),
        ("bf16", 4, 0, 1),
        ("q8_0", 2, 1, 2),
        ("q4_0", 1, 1, 2),
        ("q4_1", 1, 1, 1),
        ("q5_0", 1, 3, 2),
        ("q5_1", 1, 2, 1),
        ("q4_k", 1, 5, 8),
        ("q5_k", 1, 13, 8),
        ("q6_k", 1, 21, 8),
        ("q2_k", 1, 5, 8),
        ("q3_k", 1, 5, 8),
        ("iq4_nl", 1, 1, 2),
        ("iq4_xs", 1, 5, 8),
        ("mxfp4", 1, 1, 4),
        ("int4", 1, 1, 1),
        ("int8", 2, 5, 4),
        ("fp8_e4m3", 2, 1, 1),
    ];
    assert!(WeightFormat::all().map(sizes).eq(expected));
    // 65 rows are two panels, 96 columns two super groups.
    assert_eq!(codes_words(WeightFormat::Q4_0, 65, 96), 2 * 3 * 64 * 4);
    assert_eq!(side_words(WeightFormat::Q4_0, 65, 96), 2 * 2 * 64);
}
