//! Seeded tensors for the op cases: the same bytes on every machine.
//!
//! Invariant: values are bounded, so that a tolerance relative to the output's scale is meaningful; every bit pattern of
//! a quantised block occurs, only its scales are chosen (and zero points and bytes that are no NaN). Called by `build`.

use half::{bf16, f16};

use crate::weights::{HostTensor, WeightFormat};

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(super) struct Random(u64);

impl Random {
    /// Stream `stream` of `seed`: different streams of one seed are unrelated.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next_u64();
        random
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.next_u64() >> 40) as f32 / (1u64 << 24) as f32)
    }

    /// `len` values, uniform in `[-1, 1)`.
    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.uniform(-1.0, 1.0)).collect()
    }

    /// A permutation (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, (self.next_u64() % (i as u64 + 1)) as usize);
        }
    }

    /// A tensor of about unit scale and zero mean in any format.
    pub fn tensor(&mut self, name: &str, format: WeightFormat, shape: Vec<usize>) -> HostTensor {
        let num_bytes = format.bytes_of(&shape).expect("case shapes are whole blocks");
        let mut bytes = Vec::with_capacity(num_bytes);
        while bytes.len() < num_bytes {
            self.block(format, &mut bytes);
        }
        HostTensor::owned(name, format, shape, bytes)
    }

    /// Appends one block: random bits, then scales that bring it to about `[-1, 1]` at the format's scale offsets.
    fn block(&mut self, format: WeightFormat, out: &mut Vec<u8>) {
        match format {
            WeightFormat::F32 => return out.extend(self.uniform(-1.0, 1.0).to_le_bytes()),
            WeightFormat::F16 => return out.extend(f16::from_f32(self.uniform(-1.0, 1.0)).to_le_bytes()),
            WeightFormat::Bf16 => return out.extend(bf16::from_f32(self.uniform(-1.0, 1.0)).to_le_bytes()),
            _ => {}
        }
        let start = out.len();
        out.extend(std::iter::repeat_with(|| self.next_u64() as u8).take(format.block_bytes()));
        let block = &mut out[start..];
        // Floats and zero points that may not be any bits; what is left is an f16 scale, and maybe an f16 minimum.
        match format {
            WeightFormat::Mxfp4 => return block[0] = 122 + block[0] % 4,
            WeightFormat::Int4 => block[2] %= 17,
            WeightFormat::Int8 => {
                return block[..4].copy_from_slice(&self.uniform(0.003, 0.008).to_le_bytes());
            }
            WeightFormat::Fp8E4m3 => {
                block[4..].iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|nan| *nan ^= 1);
                return block[..4].copy_from_slice(&self.uniform(0.001, 0.002).to_le_bytes());
            }
            _ => {}
        }
        // Each line: 1 / (largest quantised magnitude), and for formats with a minimum what centres the block.
        let (offset, scale, minimum) = match format {
            WeightFormat::Q8_0 => (0, 1.0 / 128.0, None),
            WeightFormat::Q4_0 => (0, 1.0 / 8.0, None),
            WeightFormat::Q5_0 => (0, 1.0 / 16.0, None),
            WeightFormat::Q4_1 => (0, 2.0 / 15.0, Some(-1.0)),
            WeightFormat::Q5_1 => (0, 2.0 / 31.0, Some(-1.0)),
            WeightFormat::Q4K => (0, 2.0 / (63.0 * 15.0), Some(1.0 / 63.0)),
            WeightFormat::Q5K => (0, 2.0 / (63.0 * 31.0), Some(1.0 / 63.0)),
            WeightFormat::Q6K => (208, 1.0 / (127.0 * 32.0), None),
            WeightFormat::Q2K => (80, 2.0 / (15.0 * 3.0), Some(1.0 / 15.0)),
            WeightFormat::Q3K => (108, 1.0 / (32.0 * 4.0), None),
            WeightFormat::Iq4Nl => (0, 1.0 / 127.0, None),
            WeightFormat::Iq4Xs => (0, 1.0 / (32.0 * 127.0), None),
            WeightFormat::Int4 => (0, 1.0 / 12.0, None),
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => unreachable!("returned above"),
            WeightFormat::Mxfp4 | WeightFormat::Int8 | WeightFormat::Fp8E4m3 => unreachable!("returned above"),
        };
        let mut put = |at: usize, value: f32, random: &mut Self| {
            let value = f16::from_f32(value * random.uniform(0.5, 1.0));
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        put(offset, scale, self);
        if let Some(minimum) = minimum {
            put(offset + 2, minimum, self);
        }
    }
}
