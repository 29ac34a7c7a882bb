//! Codes of 4 or 8 bits with scales and zero points for groups of inputs, rearranged into blocks of 32 as rows are read: what GPTQ,
//! AWQ and the integer kinds of compressed-tensors have in common.
//!
//! Invariant: `value = (code - zero) * scale` is the file's, exactly: Q4_0 and Q8_0 where the zero point is the middle and f16
//! holds every scale, INT4 where f16 does, else INT8. Ranges are checked in `matrix`; reading rows cannot fail.

use std::ops::Range;
use std::sync::Arc;

use half::f16;

use super::source::{BLOCK, CodeTensor, Floats, Source};
use super::{Matrix, Once};
use crate::error::LoadError;
use crate::weights::{HostTensor, RowSource, WeightFormat};

/// Where the code of output n and input k is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// `[in / p, out]` words of p neighbours along the inputs, the first lowest (GPTQ).
    InputWords,
    /// `[in, out / 8]` words of 8 neighbours along the outputs, interleaved (AWQ, 4 bits).
    InterleavedWords,
    /// `[out, in / p]` words of p neighbours along the inputs, the first lowest (compressed-tensors).
    RowWords,
    /// `[out, in]` signed bytes; the code is the byte + 128.
    RowBytes,
}

/// The nibble of an AWQ word that holds its column j.
pub(super) const INTERLEAVED: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A block of columns of the eight outputs that share AWQ's words, kept for the next of them.
struct Eight {
    /// The first output divided by 8, and the block.
    of: Option<(usize, usize)>,
    codes: [[u8; BLOCK]; 8],
}

/// The zero points.
#[derive(Debug)]
pub(super) enum Zeros {
    All(u8),
    /// `[groups, out]`.
    Each(Vec<u8>),
}

/// A matrix as its file has it.
#[derive(Debug)]
pub(super) struct Integers {
    /// 4 or 8.
    pub(super) bits: u32,
    /// `[out, in]`.
    pub(super) shape: [usize; 2],
    pub(super) codes: CodeTensor,
    pub(super) place: Place,
    pub(super) scales: Floats,
    /// Elements of `scales` from one group to the next, and from one output to the next.
    pub(super) scale_strides: [usize; 2],
    pub(super) zeros: Zeros,
    pub(super) groups: Groups,
}

/// Which group each input belongs to.
#[derive(Debug)]
pub(super) struct Groups {
    /// By block of 32 columns of the matrix.
    pub(super) of_block: Vec<u32>,
    /// The input of each column, where groups are no neighbours.
    pub(super) order: Option<Vec<u32>>,
}

impl Groups {
    /// Groups of `size` neighbours.
    pub(super) fn even(inputs: usize, size: usize) -> Self {
        Self { of_block: (0..inputs / BLOCK).map(|block| (block * BLOCK / size) as u32).collect(), order: None }
    }

    /// Groups that an index names: inputs are sorted by it, which is how a checkpoint in the order of activations was made.
    ///
    /// # Errors
    /// An index that names no group, or a group that is not whole blocks.
    pub(super) fn named(
        source: &Source<'_>,
        index: &CodeTensor,
        (size, num): (usize, usize),
    ) -> Result<Self, LoadError> {
        let groups: Vec<u32> = index.words().collect();
        let problem = |expected: &str, got: String| Err(source.error(&index.name, expected, got));
        if let Some(bad) = groups.iter().find(|&&group| group as usize >= num) {
            return problem(&format!("groups below {num}"), (*bad as i32).to_string());
        }
        if groups.iter().enumerate().all(|(k, &group)| group as usize == k / size) {
            return Ok(Self::even(groups.len(), size));
        }
        let mut order: Vec<u32> = (0..groups.len() as u32).collect();
        order.sort_by_key(|&k| groups[k as usize]);
        let mut of_block = Vec::with_capacity(groups.len() / BLOCK);
        for block in order.chunks(BLOCK) {
            let [first, last] = [block[0], block[block.len() - 1]].map(|k| groups[k as usize]);
            if first != last || block.len() < BLOCK {
                return problem("groups of a multiple of 32 inputs", format!("group {first} of another size"));
            }
            of_block.push(first);
        }
        Ok(Self { of_block, order: Some(order) })
    }
}

impl Integers {
    /// The matrix in the narrowest format that holds it exactly. `names` are those of the file's tensors.
    pub(super) fn into_matrix(mut self, stem: &str, names: Vec<String>, widened: &Once) -> Matrix {
        let middle = 1u8 << (self.bits - 1);
        if let Zeros::Each(zeros) = &self.zeros
            && let Some(&first) = zeros.first()
            && zeros.iter().all(|&zero| zero == first)
        {
            self.zeros = Zeros::All(first);
        }
        let is_symmetric = matches!(self.zeros, Zeros::All(zero) if zero == middle);
        let format = match (self.bits, self.scales.fit_f16()) {
            (4, true) if is_symmetric => WeightFormat::Q4_0,
            (4, true) => WeightFormat::Int4,
            (8, true) if is_symmetric => WeightFormat::Q8_0,
            _ => WeightFormat::Int8,
        };
        if self.bits == 4 && format == WeightFormat::Int8 && widened.is_first() {
            tracing::warn!("scales of {stem} are not exact in f16: its 4-bit codes take 8 bits in memory");
        }
        let (shape, input_order) = (self.shape.to_vec(), self.groups.order.clone());
        let source = Arc::new(Rows { integers: self, format });
        Matrix { tensor: HostTensor::computed(format!("{stem}.weight"), format, shape, source), input_order, names }
    }

    /// The code of output n and input k.
    fn code(&self, bytes: &[u8], n: usize, k: usize) -> u8 {
        let [rows, cols] = self.shape;
        let per_word = (32 / self.bits) as usize;
        let in_word = |word: usize, place: usize| {
            let mask = (1u32 << self.bits) - 1;
            (word_at(bytes, word) >> (place * self.bits as usize) & mask) as u8
        };
        match self.place {
            Place::InputWords => in_word(k / per_word * rows + n, k % per_word),
            Place::InterleavedWords => in_word(k * (rows / 8) + n / 8, INTERLEAVED[n % 8]),
            Place::RowWords => in_word(n * (cols / per_word) + k / per_word, k % per_word),
            Place::RowBytes => bytes[n * cols + k] ^ 0x80,
        }
    }

    /// The codes of output n in a block of columns.
    fn block(&self, bytes: &[u8], n: usize, block: usize, eight: &mut Eight) -> [u8; BLOCK] {
        let first = block * BLOCK;
        let [rows, cols] = self.shape;
        let mut codes = [0; BLOCK];
        match (&self.groups.order, self.place, self.bits) {
            (Some(order), ..) => {
                codes.iter_mut().zip(&order[first..]).for_each(|(code, &k)| *code = self.code(bytes, n, k as usize));
            }
            (None, Place::InputWords, 4) => {
                for (i, eight) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    *eight = nibbles(word_at(bytes, (first / 8 + i) * rows + n));
                }
            }
            (None, Place::InputWords, _) => {
                for (i, four) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    *four = word_at(bytes, (first / 4 + i) * rows + n).to_le_bytes();
                }
            }
            (None, Place::RowWords, 4) => {
                let words = bytes[(n * cols + first) / 2..][..BLOCK / 2].as_chunks::<4>().0;
                let eights = codes.as_chunks_mut::<8>().0.iter_mut();
                eights.zip(words).for_each(|(eight, word)| *eight = nibbles(u32::from_le_bytes(*word)));
            }
            (None, Place::RowWords, _) => codes.copy_from_slice(&bytes[n * cols + first..][..BLOCK]),
            (None, Place::RowBytes, _) => {
                let bytes = &bytes[n * cols + first..][..BLOCK];
                codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte ^ 0x80);
            }
            (None, Place::InterleavedWords, _) => {
                if eight.of != Some((n / 8, block)) {
                    eight.of = Some((n / 8, block));
                    for j in 0..BLOCK {
                        let nibbles = nibbles(word_at(bytes, (first + j) * (rows / 8) + n / 8));
                        let ordered = eight.codes.iter_mut().zip(INTERLEAVED);
                        ordered.for_each(|(codes, place)| codes[j] = nibbles[place]);
                    }
                }
                codes = eight.codes[n % 8];
            }
        }
        codes
    }
}

fn word_at(bytes: &[u8], index: usize) -> u32 {
    let word = &bytes[4 * index..][..4];
    u32::from_le_bytes([word[0], word[1], word[2], word[3]])
}

/// The eight nibbles of a word, the lowest first.
pub(super) fn nibbles(word: u32) -> [u8; 8] {
    let mut wide = u64::from(word);
    wide = (wide | wide << 16) & 0x0000_ffff_0000_ffff;
    wide = (wide | wide << 8) & 0x00ff_00ff_00ff_00ff;
    ((wide | wide << 4) & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes()
}

/// Codes in pairs of neighbours, the first of two lower, as pairs of codes half a block apart.
fn halves_apart(pairs: [u8; BLOCK / 2]) -> [u8; BLOCK / 2] {
    const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    let [first, second] = bytemuck::cast::<_, [[u8; 8]; 2]>(pairs).map(u64::from_le_bytes);
    let even = first & LOW | (second & LOW) << 4;
    let odd = first >> 4 & LOW | second & !LOW;
    // Four bytes, a byte apart.
    let spread = |x: u64| {
        let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
        (x | x << 8) & 0x00ff_00ff_00ff_00ff
    };
    let four = |shift: u32| {
        let [even, odd] = [even, odd].map(|x| spread(x >> shift & u64::from(u32::MAX)));
        (even | odd << 8).to_le_bytes()
    };
    bytemuck::cast([four(0), four(32)])
}

/// Its rows in a format.
#[derive(Debug)]
struct Rows {
    integers: Integers,
    format: WeightFormat,
}

/// Rows that are computed together where a cache line of the file holds the codes of neighbouring outputs: as many at most.
const TOGETHER: usize = 64;

/// What stands before the codes of a block, and as much behind it as the format has no place for.
type Head = [u8; 5];

impl Rows {
    /// The heads of some rows, the groups of which are `[groups, rows]`.
    fn heads(&self, rows: Range<usize>, scale: &dyn Fn(usize) -> f32, out: &mut Vec<Head>) {
        let Integers { shape, scale_strides, zeros, groups, .. } = &self.integers;
        // In ascending order, with an order of columns or without.
        let num_groups = groups.of_block.last().map_or(0, |&last| last as usize + 1);
        out.clear();
        for group in 0..num_groups {
            out.extend(rows.clone().map(|n| {
                let zero = match zeros {
                    Zeros::All(zero) => *zero,
                    Zeros::Each(zeros) => zeros[group * shape[0] + n],
                };
                head(self.format, scale(group * scale_strides[0] + n * scale_strides[1]), zero)
            }));
        }
    }

    /// Writes a row of 4-bit codes in words along the row, with the first `HEAD` bytes of heads: what most checkpoints are.
    fn read_words<const HEAD: usize>(&self, words: &[u8], heads: &[Head], out: &mut [u8]) {
        let blocks = out.chunks_exact_mut(HEAD + BLOCK / 2);
        let codes = words.as_chunks::<{ BLOCK / 2 }>().0;
        for ((out, codes), &group) in blocks.zip(codes).zip(&self.integers.groups.of_block) {
            let (head, stored) = out.split_at_mut(HEAD);
            head.copy_from_slice(&heads[group as usize][..HEAD]);
            stored.copy_from_slice(&halves_apart(*codes));
        }
    }

    /// Writes some rows of codes in any place.
    fn read_blocks(&self, bytes: &[u8], first: usize, heads: &[Head], out: &mut [u8]) {
        let Integers { groups, .. } = &self.integers;
        let block_bytes = self.format.block_bytes();
        let row_bytes = groups.of_block.len() * block_bytes;
        let count = out.len() / row_bytes;
        let mut eight = Eight { of: None, codes: [[0; BLOCK]; 8] };
        for (block, &group) in groups.of_block.iter().enumerate() {
            let heads = &heads[group as usize * count..][..count];
            for (i, (head, out)) in heads.iter().zip(out.chunks_exact_mut(row_bytes)).enumerate() {
                let codes = self.integers.block(bytes, first + i, block, &mut eight);
                write_block(self.format, head, &codes, &mut out[block * block_bytes..][..block_bytes]);
            }
        }
    }
}

impl RowSource for Rows {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let Integers { shape, codes, scales, groups, place, .. } = &self.integers;
        let row_bytes = groups.of_block.len() * self.format.block_bytes();
        let together = match place {
            Place::InputWords | Place::InterleavedWords => TOGETHER,
            Place::RowWords | Place::RowBytes => 1,
        };
        let bytes = codes.bytes();
        let mut heads = Vec::new();
        scales.with(|scale| {
            for (first, out) in rows.step_by(together).zip(out.chunks_mut(together * row_bytes)) {
                let count = out.len() / row_bytes;
                self.heads(first..first + count, scale, &mut heads);
                let words = || &bytes[first * shape[1] / 2..][..shape[1] / 2];
                match (self.format, place, &groups.order) {
                    (WeightFormat::Q4_0, Place::RowWords, None) => self.read_words::<2>(words(), &heads, out),
                    (WeightFormat::Int4, Place::RowWords, None) => self.read_words::<3>(words(), &heads, out),
                    _ => self.read_blocks(bytes, first, &heads, out),
                }
            }
        });
    }

    fn blocks_per_scale(&self) -> usize {
        let of_block = &self.integers.groups.of_block;
        let share = |count: &usize| {
            let runs = of_block.chunks_exact(*count);
            runs.remainder().is_empty() && runs.into_iter().all(|run| run.iter().all(|group| *group == run[0]))
        };
        [16, 8, 4, 2].into_iter().find(share).unwrap_or(1)
    }
}

/// The head of a block as `weights::format` defines it.
fn head(format: WeightFormat, scale: f32, zero: u8) -> Head {
    match format {
        WeightFormat::Q4_0 | WeightFormat::Int4 | WeightFormat::Q8_0 => {
            let [low, high] = f16::from_f32(scale).to_le_bytes();
            [low, high, zero, 0, 0]
        }
        _ => {
            let [a, b, c, d] = scale.to_le_bytes();
            [a, b, c, d, zero]
        }
    }
}

/// Writes a block as `weights::format` defines it.
fn write_block(format: WeightFormat, head: &Head, codes: &[u8; BLOCK], out: &mut [u8]) {
    let is_packed = matches!(format, WeightFormat::Q4_0 | WeightFormat::Int4);
    let (start, stored) = out.split_at_mut(out.len() - if is_packed { BLOCK / 2 } else { BLOCK });
    start.copy_from_slice(&head[..start.len()]);
    if is_packed {
        let (low, high) = codes.split_at(BLOCK / 2);
        stored.iter_mut().zip(low).zip(high).for_each(|((byte, low), high)| *byte = low | high << 4);
    } else {
        let sign = if format == WeightFormat::Q8_0 { 0x80 } else { 0 };
        stored.iter_mut().zip(codes).for_each(|(byte, code)| *byte = code ^ sign);
    }
}
