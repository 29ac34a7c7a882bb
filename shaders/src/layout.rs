//! Weight matrices as the kernels read them: panels of 64 rows, one row per lane, repacked once at upload. The contract
//! with the kernels is written at `Layout`.
//!
//! Invariant: repacking changes places, never values: every code and every scale is bit for bit the file's. A format is
//! one row of `spec_of`, one arm of `Group::read` and its fragment, `wgsl/format/<fragment>.wgsl`. Called at upload; the
//! lowering takes sizes and fragment names from here.

mod group;

use std::ops::Range;

use group::Group;
use runtime::weights::{HostTensor, WeightFormat};

/// Rows of a panel.
pub(crate) const PANEL: usize = 64;
/// Elements of a group: neighbours in a row that share a scale (or two, one per half).
pub(crate) const GROUP: usize = 32;
/// No format has more side words per super group.
const MAX_SIDE_WORDS: usize = 24;

/// The numbers V, S and SG of the contract between `pack` and the fragments:
///
/// ```text
/// matrix [rows, cols], cols = groups * 32; row = panel * 64 + lane; the last panel is padded with rows of zeros
/// codes  array<vec4u>  ((panel * groups + group) * V + v) * 64 + lane                      v in 0..V
/// side   array<u32>    ((panel * ceil(groups / SG) + group / SG) * S + s) * 64 + lane      s in 0..S
///
/// Element e = 4 i + c of a group, i in 0..8, c in 0..4:
/// low bits   L = 4 or 8 bits per element, V = L / 4: bits (i L) % 32 and up of word c of vector (i L) / 32
/// high bits  H = 0, 1 or 2 more bits: bits 8 c + (i H) % 8 and up of side word W + (group % SG) * H + (i H) / 8
/// floats     V vectors of the row's bytes in their own order (F32: V = 8; F16, BF16: V = 4), no side words
///
/// The first W side words of a super group of SG groups hold its scales:
/// PerGroup        SG = 2, W = 1   f16 scale of the even group, then of the odd one
/// PerGroupAndMin  SG = 1, W = 1   f16 scale, f16 minimum
/// Nested          SG = 8, W = 5   f16 d, f16 dmin (or 0); then two bytes per group: its integer scale and minimum (Q2_K: a
///                                 nibble of each per half; Q3_K, Q6_K: the signed scales of its halves; IQ4_XS: one, and 0)
/// Exponents       SG = 4, W = 1   a byte per group
/// FloatPerGroup   SG = 1, W = 1   f32 scale
/// FloatsAndZeros  SG = 4, W = 5   four f32 scales; then a byte per group, its zero point
/// S = W + SG * H; the lower half or byte of a word comes first.
/// ```
///
/// Codes are the file's: signed in Q8_0, floats in FP8_E4M3, places in a table in IQ4_NL, IQ4_XS and MXFP4, else unsigned with a
/// zero point that the fragment subtracts (INT4: the f16 in the minimum's place).
///
/// A fragment has `HAS_SCALE`, `HAS_MIN` and `Group`, one group of each of a lane's ROWS rows: `load_group(panel, first,
/// group, groups)`, `first` the place in the panel of the first of them; `group_values(&g, i)`, elements 4 i .. 4 i + 4 of
/// each row; `group_scale(&g, r)`, `group_min(&g, r)`. It reads `codes` and `side` of the kernel around
/// it through `load_codes` and `load_side` of `wgsl/load/`, which says where the other rows lie. The value is
/// `group_values * group_scale + group_min`; the product is exact in f32 where there is a minimum, so that a fused
/// multiply-add gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// V: vectors of four words per group of one row.
    pub codes_per_group: usize,
    /// S: words per super group of one row; 0 where values need no scale.
    pub side_words: usize,
    /// SG: groups of a super group.
    pub side_groups: usize,
}

/// How a super group's scales lie in its first side words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scales {
    /// The elements are floats.
    None,
    PerGroup,
    PerGroupAndMin,
    Nested,
    Exponents,
    FloatPerGroup,
    FloatsAndZeros,
}

impl Scales {
    /// SG and W of the contract.
    fn groups_and_words(self) -> (usize, usize) {
        match self {
            Self::None => (1, 0),
            Self::PerGroup => (2, 1),
            Self::PerGroupAndMin | Self::FloatPerGroup => (1, 1),
            Self::Nested => (8, 5),
            Self::Exponents => (4, 1),
            Self::FloatsAndZeros => (4, 5),
        }
    }

    /// Adds the scales of the group `index` of a super group to its words, which began as zeros.
    fn place(self, group: &Group, index: usize, words: &mut [u32; MAX_SIDE_WORDS]) {
        match self {
            Self::None => {}
            Self::PerGroup => words[0] |= group.scale << (16 * index),
            Self::PerGroupAndMin | Self::FloatPerGroup => words[0] = group.scale,
            Self::Exponents => words[0] |= u32::from(group.bytes[0]) << (8 * index),
            Self::FloatsAndZeros => {
                words[index] = group.scale;
                words[4] |= u32::from(group.bytes[0]) << (8 * index);
            }
            Self::Nested => {
                words[0] = group.scale;
                words[1 + index / 2] |= u32::from(u16::from_le_bytes(group.bytes)) << (16 * (index % 2));
            }
        }
    }
}

/// What a format's layout is made of.
struct Spec {
    fragment: &'static str,
    /// L: bits of an element in the codes.
    low_bits: usize,
    /// H: bits of an element in the side words.
    high_bits: usize,
    scales: Scales,
}

fn spec_of(format: WeightFormat) -> Spec {
    let (fragment, low_bits, high_bits, scales) = match format {
        WeightFormat::F32 => ("f32", 32, 0, Scales::None),
        WeightFormat::F16 => ("f16", 16, 0, Scales::None),
        WeightFormat::Bf16 => ("bf16", 16, 0, Scales::None),
        WeightFormat::Q8_0 => ("q8_0", 8, 0, Scales::PerGroup),
        WeightFormat::Q4_0 => ("q4_0", 4, 0, Scales::PerGroup),
        WeightFormat::Q4_1 => ("q4_1", 4, 0, Scales::PerGroupAndMin),
        WeightFormat::Q5_0 => ("q5_0", 4, 1, Scales::PerGroup),
        WeightFormat::Q5_1 => ("q5_1", 4, 1, Scales::PerGroupAndMin),
        WeightFormat::Q4K => ("q4_k", 4, 0, Scales::Nested),
        WeightFormat::Q5K => ("q5_k", 4, 1, Scales::Nested),
        WeightFormat::Q6K => ("q6_k", 4, 2, Scales::Nested),
        WeightFormat::Q2K => ("q2_k", 4, 0, Scales::Nested),
        WeightFormat::Q3K => ("q3_k", 4, 0, Scales::Nested),
        WeightFormat::Iq4Nl => ("iq4_nl", 4, 0, Scales::PerGroup),
        WeightFormat::Iq4Xs => ("iq4_xs", 4, 0, Scales::Nested),
        WeightFormat::Mxfp4 => ("mxfp4", 4, 0, Scales::Exponents),
        WeightFormat::Int4 => ("int4", 4, 0, Scales::PerGroupAndMin),
        WeightFormat::Int8 => ("int8", 8, 0, Scales::FloatsAndZeros),
        WeightFormat::Fp8E4m3 => ("fp8_e4m3", 8, 0, Scales::FloatPerGroup),
    };
    Spec { fragment, low_bits, high_bits, scales }
}

/// The name of the fragment that reads this format: `wgsl/format/<name>.wgsl`.
pub(crate) fn fragment_of(format: WeightFormat) -> &'static str {
    spec_of(format).fragment
}

/// The layout of matrices of this format.
pub(crate) fn layout_of(format: WeightFormat) -> Layout {
    let spec = spec_of(format);
    let (side_groups, scale_words) = spec.scales.groups_and_words();
    Layout { codes_per_group: spec.low_bits / 4, side_words: scale_words + side_groups * spec.high_bits, side_groups }
}

/// Words of the codes of `[rows, cols]`.
pub(crate) fn codes_words(format: WeightFormat, rows: usize, cols: usize) -> usize {
    rows.next_multiple_of(PANEL) * (cols / GROUP) * layout_of(format).codes_per_group * 4
}

/// Side words of `[rows, cols]`; may be 0.
pub(crate) fn side_words(format: WeightFormat, rows: usize, cols: usize) -> usize {
    let layout = layout_of(format);
    rows.next_multiple_of(PANEL) * (cols / GROUP).div_ceil(layout.side_groups) * layout.side_words
}

/// Repacks these rows of a matrix, as if they were a matrix of their own. Every word of `codes` and `side` is written,
/// none is read.
///
/// # Panics
/// When `rows` does not start at a panel or passes the end, when a row is not whole groups, when `codes` or `side` is
/// not `codes_words` or `side_words` of these rows long.
pub(crate) fn pack(tensor: &HostTensor, rows: Range<usize>, codes: &mut [u32], side: &mut [u32]) {
    let (format, cols) = (tensor.format, tensor.row_len());
    assert!(rows.start.is_multiple_of(PANEL) && rows.end <= tensor.num_rows(), "{}: rows {rows:?}", tensor.name);
    assert!(cols.is_multiple_of(GROUP), "{}: rows of {cols} elements are not whole groups", tensor.name);
    assert_eq!(codes.len(), codes_words(format, rows.len(), cols), "{}: words of codes", tensor.name);
    assert_eq!(side.len(), side_words(format, rows.len(), cols), "{}: side words", tensor.name);

    let packer = Packer { format, spec: spec_of(format), layout: layout_of(format), groups: cols / GROUP };
    let panel_codes = codes_words(format, PANEL, cols);
    let panel_side = side_words(format, PANEL, cols);
    for (panel, first) in rows.clone().step_by(PANEL).enumerate() {
        let num_rows = PANEL.min(rows.end - first);
        packer.pack_panel(
            &tensor.rows(first..first + num_rows),
            num_rows,
            &mut codes[panel * panel_codes..][..panel_codes],
            &mut side[panel * panel_side..][..panel_side],
        );
    }
}

struct Packer {
    format: WeightFormat,
    spec: Spec,
    layout: Layout,
    groups: usize,
}

impl Packer {
    /// Repacks up to 64 rows. Neighbouring rows come in the inner loop, so that words are written in their order.
    fn pack_panel(&self, bytes: &[u8], num_rows: usize, codes: &mut [u32], side: &mut [u32]) {
        if num_rows < PANEL {
            codes.fill(0);
            side.fill(0);
        }
        let Layout { codes_per_group, side_words, side_groups } = self.layout;
        let codes = codes.as_chunks_mut::<4>().0;
        let row_bytes = bytes.len() / num_rows;
        for (super_group, first) in (0..self.groups).step_by(side_groups).enumerate() {
            let side = &mut side[super_group * side_words * PANEL..][..side_words * PANEL];
            for (lane, row) in bytes.chunks_exact(row_bytes).enumerate() {
                let mut words = [0; MAX_SIDE_WORDS];
                for group in first..self.groups.min(first + side_groups) {
                    let start = group * codes_per_group * PANEL;
                    let codes = &mut codes[start..start + codes_per_group * PANEL];
                    self.pack_group(row, group, &mut codes[lane..], &mut words);
                }
                side.iter_mut().skip(lane).step_by(PANEL).zip(words).for_each(|(place, word)| *place = word);
            }
        }
    }

    /// Writes the codes of one group of one row to `codes`, a vector every 64, and adds its side words to `side`.
    #[inline(always)]
    fn pack_group(&self, row: &[u8], index: usize, codes: &mut [[u32; 4]], side: &mut [u32; MAX_SIDE_WORDS]) {
        if self.spec.scales == Scales::None {
            let num_bytes = self.layout.codes_per_group * 16;
            let vectors = row[index * num_bytes..][..num_bytes].as_chunks::<16>().0;
            for (v, bytes) in vectors.iter().enumerate() {
                let words = bytes.as_chunks::<4>().0;
                codes[v * PANEL] = std::array::from_fn(|c| u32::from_le_bytes(words[c]));
            }
            return;
        }
        let group = Group::read(self.format, row, index);
        let in_super_group = index % self.layout.side_groups;
        self.spec.scales.place(&group, in_super_group, side);
        if self.spec.low_bits == 8 {
            let [first, second] = low_words(&group.codes);
            codes[0] = first;
            codes[PANEL] = second;
            return;
        }
        [codes[0]] = low_words(&group.codes);
        let first_high = self.layout.side_words - (self.layout.side_groups - in_super_group) * self.spec.high_bits;
        match self.spec.high_bits {
            1 => side[first_high..][..1].copy_from_slice(&high_words::<1>(&group.codes)),
            2 => side[first_high..][..2].copy_from_slice(&high_words::<2>(&group.codes)),
            _ => {}
        }
    }
}

/// The low `4 V` bits of each code.
fn low_words<const V: usize>(codes: &[u8; GROUP]) -> [[u32; 4]; V] {
    let mut vectors = [[0; 4]; V];
    for (i, quad) in codes.as_chunks::<4>().0.iter().enumerate() {
        let (v, shift) = (i * V / 8, i * V * 4 % 32);
        for (word, &code) in vectors[v].iter_mut().zip(quad) {
            *word |= (u32::from(code) & ((1 << (4 * V)) - 1)) << shift;
        }
    }
    vectors
}

/// The `H` bits above the low four of each code.
fn high_words<const H: usize>(codes: &[u8; GROUP]) -> [u32; H] {
    let mut words = [0; H];
    for (i, quad) in codes.as_chunks::<4>().0.iter().enumerate() {
        let bits: [u8; 4] = quad.map(|code| (code >> 4) << (i * H % 8));
        words[i * H / 8] |= u32::from_le_bytes(bits);
    }
    words
}

#[cfg(test)]
mod tests;
