//! Reads one group of a row of any quantised format in the common form: the wgpu backend's arm of each format.
//!
//! Invariant: codes and scales are bit for bit the file's (`runtime::weights::format` has the definitions); the fragments do
//! all arithmetic. Called by `layout::pack`.

use half::f16;
use runtime::weights::WeightFormat;

use super::GROUP;

/// One group of one row.
pub(super) struct Group {
    /// Codes of up to 8 bits.
    pub(super) codes: [u8; GROUP],
    /// An f16 in the low half, and one in the high half or zero; or an f32.
    pub(super) scale: u32,
    /// What belongs to this group beside it, as `Scales` has it.
    pub(super) bytes: [u8; 2],
}

impl Group {
    /// Group `index` of a row.
    #[inline(always)]
    pub(super) fn read(format: WeightFormat, row: &[u8], index: usize) -> Self {
        let per_block = format.block_len() / GROUP;
        let block = &row[index / per_block * format.block_bytes()..][..format.block_bytes()];
        let in_block = index % per_block;
        let (codes, scale) = match format {
            WeightFormat::Q8_0 => (bytes(&block[2..]), half_at(block, 0)),
            WeightFormat::Q4_0 | WeightFormat::Iq4Nl => (nibbles(&block[2..]), half_at(block, 0)),
            WeightFormat::Q4_1 => (nibbles(&block[4..]), word_at(block, 0)),
            WeightFormat::Q5_0 => (with_fifth_bits(nibbles(&block[6..]), word_at(block, 2)), half_at(block, 0)),
            WeightFormat::Q5_1 => (with_fifth_bits(nibbles(&block[8..]), word_at(block, 4)), word_at(block, 0)),
            WeightFormat::Int4 => {
                // Small whole numbers, exact in f16.
                let zero = f16::from_f32(f32::from(block[2])).to_bits();
                (nibbles(&block[3..]), half_at(block, 0) | u32::from(zero) << 16)
            }
            WeightFormat::Fp8E4m3 => (bytes(&block[4..]), word_at(block, 0)),
            WeightFormat::Int8 => {
                return Self { codes: bytes(&block[5..]), scale: word_at(block, 0), bytes: [block[4], 0] };
            }
            WeightFormat::Mxfp4 => return Self { codes: nibbles(&block[1..]), scale: 0, bytes: [block[0], 0] },
            WeightFormat::Q4K | WeightFormat::Q5K => return Self::read_k(block, in_block),
            WeightFormat::Q6K => return Self::read_q6_k(block, in_block),
            WeightFormat::Q2K => return Self::read_q2_k(block, in_block),
            WeightFormat::Q3K => return Self::read_q3_k(block, in_block),
            WeightFormat::Iq4Xs => return Self::read_iq4_xs(block, in_block),
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => unreachable!("not a quantised format"),
        };
        Self { codes, scale, bytes: [0; 2] }
    }

    /// Q4_K and Q5_K: f16 d and dmin, 6-bit scales and minima in 12 bytes, (fifth bits,) nibbles in runs of 64.
    fn read_k(block: &[u8], index: usize) -> Self {
        let packed = &block[4..16];
        let bytes = if index < 4 {
            [packed[index] & 63, packed[index + 4] & 63]
        } else {
            let low = packed[index + 4];
            [low & 15 | packed[index - 4] >> 6 << 4, low >> 4 | packed[index] >> 6 << 4]
        };
        let (high, low) = block[16..].split_at(block.len() - 16 - 128);
        let low = &low[index / 2 * 32..][..GROUP];
        let mut codes = std::array::from_fn(|e| low[e] >> (index % 2 * 4) & 15);
        if !high.is_empty() {
            let high = &high[..GROUP];
            codes = std::array::from_fn(|e| codes[e] | (high[e] >> index & 1) << 4);
        }
        Self { codes, scale: word_at(block, 0), bytes }
    }

    /// Q6_K: low nibbles, upper bit pairs, a signed scale per half group, f16 d.
    fn read_q6_k(block: &[u8], index: usize) -> Self {
        let (half, quarter) = (index / 4, index % 4);
        let low = &block[64 * half + 32 * (quarter % 2)..][..GROUP];
        let high = &block[128 + 32 * half..][..GROUP];
        Self {
            codes: std::array::from_fn(|e| low[e] >> (quarter / 2 * 4) & 15 | (high[e] >> (2 * quarter) & 3) << 4),
            scale: half_at(block, 208),
            bytes: [block[192 + 2 * index], block[193 + 2 * index]],
        }
    }

    /// Q2_K: a byte per half group, scale and minimum; bit pairs; f16 d and dmin.
    fn read_q2_k(block: &[u8], index: usize) -> Self {
        let pairs = &block[16 + 32 * (index / 4)..][..GROUP];
        Self {
            codes: std::array::from_fn(|e| pairs[e] >> (2 * (index % 4)) & 3),
            scale: word_at(block, 80),
            bytes: [block[2 * index], block[2 * index + 1]],
        }
    }

    /// Q3_K: third bits, bit pairs, 6-bit scales per half group around 32, f16 d.
    fn read_q3_k(block: &[u8], index: usize) -> Self {
        let (high, pairs) = (&block[..GROUP], &block[32 + 32 * (index / 4)..][..GROUP]);
        let scale = |i: usize| {
            let (low, high) = (block[96 + i % 8] >> (i / 8 * 4) & 15, block[104 + i % 4] >> (i / 4 * 2) & 3);
            (low | high << 4).wrapping_sub(32)
        };
        Self {
            codes: std::array::from_fn(|e| pairs[e] >> (2 * (index % 4)) & 3 | (high[e] >> index & 1) << 2),
            scale: half_at(block, 108),
            bytes: [scale(2 * index), scale(2 * index + 1)],
        }
    }

    /// IQ4_XS: f16 d, 6-bit scales around 32, nibbles.
    fn read_iq4_xs(block: &[u8], index: usize) -> Self {
        let low = block[4 + index / 2] >> (index % 2 * 4) & 15;
        let high = (half_at(block, 2) >> (2 * index) & 3) as u8;
        Self {
            codes: nibbles(&block[8 + 16 * index..]),
            scale: half_at(block, 0),
            bytes: [(low | high << 4).wrapping_sub(32), 0],
        }
    }
}

fn bytes(codes: &[u8]) -> [u8; GROUP] {
    let codes = &codes[..GROUP];
    std::array::from_fn(|e| codes[e])
}

/// Low nibbles of 16 bytes, then their high nibbles.
fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    let bytes = &bytes[..16];
    std::array::from_fn(|e| if e < 16 { bytes[e] & 15 } else { bytes[e - 16] >> 4 })
}

/// Bit e of `bits` is the fifth bit of code e.
fn with_fifth_bits(codes: [u8; GROUP], bits: u32) -> [u8; GROUP] {
    std::array::from_fn(|e| codes[e] | ((bits >> e & 1) as u8) << 4)
}

fn half_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    half_at(bytes, at) | half_at(bytes, at + 2) << 16
}
