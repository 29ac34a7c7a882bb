//! The linear kernels: quantised weights times 8-bit activations, and float weights (8-bit floats too) times f32.
//!
//! Formula: `out[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]`; for quantised weights per group g of 32:
//! `acc = fma(w_scale * x_scale, sum of (code - zero) * x_code, acc)`, then `acc = fma(w_min, x_scale * sum of x_code, acc)`;
//! for E4M3 `acc = fma(w_scale, sum of x * w, acc)`.
//! Operands: activations `[rows, in/32]` of `QuantGroup` (or `[rows, in]` of f32), panels of 16 output rows (`repack`),
//! `out [rows, out_features]` f32. A task owns a range of panels, all rows.
//! Accumulation: integer within a group (exact), one f32 chain over the groups in the order of k, the same for every
//! number of rows and every register tile: a row's result never depends on the batch, bitwise. Against an f32 product of
//! the dequantised weights the error is that of 8-bit activations: 1/254 of a group's largest |x| per element.
//! Limits: quantised in_features are multiples of 32 (the formats' own). Source: llama.cpp's Q8 activations per block,
//! and its interleaved rows ("repack") for the layout.

#![allow(clippy::needless_range_loop, reason = "register tiles are indexed side by side")]

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::memory::{Arena, Shared};
use super::repack::{Block, Float, Fp8, GROUP, Kind, Matrix, with_kind};
use super::simd::{Kernel, LANES, Simd, Vectors};

/// Rows of activations that pass over the panels together: they stay in the second-level cache.
const ROWS_PER_PASS: usize = 64;

/// Tiles of up to so many rows wait for weights: they ask for them ahead.
const PREFETCH_ROWS: usize = 4;
/// How far ahead, across the ends of panels: they follow each other.
const PREFETCH_BYTES: usize = 2048;

/// 32 activations of one row: `x = code * scale`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QuantGroup {
    codes: [[i8; 4]; GROUP / 4],
    scale: f32,
    /// `scale * sum of codes`.
    scaled_sum: f32,
    /// `-(sum of codes)` of each half.
    negative_sums: [i32; 2],
}

/// Quantises one row: `scale = max |x| / 127` per group. A value that is not finite makes its group's scale so.
#[inline(always)]
pub(super) fn quantise_row<S: Simd>(s: S, x: &[f32], out: &mut [QuantGroup]) {
    for (x, out) in x.as_chunks::<GROUP>().0.iter().zip(out) {
        let halves = x.as_chunks::<LANES>().0;
        let (a, b) = (s.load(&halves[0]), s.load(&halves[1]));
        let largest = f32::from_bits(s.max_lane_i(s.max_i(s.abs_bits(a), s.abs_bits(b))) as u32);
        let inverse = s.splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
        let codes = [s.round_to_i8(s.mul(a, inverse)), s.round_to_i8(s.mul(b, inverse))];
        let sums = [s.sum_i8(codes[0]), s.sum_i8(codes[1])];
        let scale = largest * (1.0 / 127.0);
        *out = QuantGroup {
            codes: bytemuck::cast(codes),
            scale,
            scaled_sum: scale * (sums[0] + sums[1]) as f32,
            negative_sums: [-sums[0], -sums[1]],
        };
    }
}

/// Where a linear's results go: columns `column ..` of rows that are `stride` floats apart.
#[derive(Clone, Copy)]
pub(super) struct Out {
    pub(super) memory: Shared,
    /// In bytes.
    pub(super) start: usize,
    pub(super) stride: usize,
    pub(super) column: usize,
}

impl Out {
    /// Writes the lanes of one panel of one row, adding the bias.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, row: usize, first: usize, count: usize, v: S::F, bias: Option<&[f32]>) {
        let start = self.start + (row * self.stride + self.column + first) * size_of::<f32>();
        // SAFETY: a panel belongs to one thread, and so do its columns of every row; readers wait for the next barrier.
        let out = unsafe { self.memory.slice_mut::<f32>(start, count) };
        let v = match bias {
            Some(bias) => s.add(v, s.load_part(&bias[first..first + count])),
            None => v,
        };
        match out.first_chunk_mut::<LANES>() {
            Some(out) => s.store(v, out),
            None => s.store_part(v, out),
        }
    }
}

/// Which rows of the activations meet a matrix, and where their results go.
#[derive(Clone, Copy)]
pub(super) enum RowMap<'a> {
    /// The first so many, each to its own place.
    All(usize),
    /// The choices `index`: row `index[i] / per_row` of the activations, row `index[i]` of the results.
    Chosen { index: &'a [u32], per_row: usize },
}

impl RowMap<'_> {
    fn len(&self) -> usize {
        match self {
            Self::All(num_rows) => *num_rows,
            Self::Chosen { index, .. } => index.len(),
        }
    }

    #[inline(always)]
    fn input(&self, i: usize) -> usize {
        match self {
            Self::All(_) => i,
            Self::Chosen { index, per_row } => index[i] as usize / per_row,
        }
    }

    #[inline(always)]
    fn output(&self, i: usize) -> usize {
        match self {
            Self::All(_) => i,
            Self::Chosen { index, .. } => index[i] as usize,
        }
    }
}

/// Some panels of one matrix times some rows.
pub(super) struct Linear<'a> {
    pub(super) arena: &'a Arena,
    pub(super) matrix: &'a Matrix,
    pub(super) panels: Range<usize>,
    pub(super) bias: Option<&'a [f32]>,
    /// `[rows, cols]`; used by float matrices.
    pub(super) x: &'a [f32],
    /// `[rows, cols / 32]`; used by quantised ones.
    pub(super) quantised_x: &'a [QuantGroup],
    pub(super) rows: RowMap<'a>,
    pub(super) out: Out,
}

impl Linear<'_> {
    /// Computes it. Each kind of matrix is a kernel of its own: one that held them all took the compiler minutes.
    pub(super) fn run(self, vectors: Vectors) {
        with_kind!(self.matrix.kind,
            B => vectors.run(Quantised::<B>(self, PhantomData)),
            E => vectors.run(Plain::<E>(self, PhantomData)),
            E4M3 => vectors.run(E4m3(self)));
    }
}

/// A linear of blocks of type `B`.
struct Quantised<'a, B>(Linear<'a>, PhantomData<B>);
/// A linear of floats of type `E`.
struct Plain<'a, E>(Linear<'a>, PhantomData<E>);
/// A linear of 8-bit floats.
struct E4m3<'a>(Linear<'a>);

impl<B: Block> Kernel for Quantised<'_, B> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.quantised::<S, B>(s);
    }
}

impl<E: Float> Kernel for Plain<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.plain::<S, E>(s);
    }
}

impl Kernel for E4m3<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.e4m3(s);
    }
}

/// Covers `$rows` with the largest register tiles that fit: `$call!(tile, first row)`.
macro_rules! tiles {
    ($wide:expr, $rows:expr, $call:ident) => {
        let mut row = $rows.start;
        while row < $rows.end {
            row += match $rows.end - row {
                8.. if $wide => $call!(8, row),
                4.. if $wide => $call!(4, row),
                2.. => $call!(2, row),
                _ => $call!(1, row),
            };
        }
    };
}

impl Linear<'_> {
    #[inline(always)]
    fn quantised<S: Simd, B: Block>(&self, s: S) {
        let groups = self.matrix.cols / GROUP;
        let count = groups / B::GROUPS;
        let blocks = self.arena.slice::<B>(self.matrix.range);
        for first in (0..self.rows.len()).step_by(ROWS_PER_PASS) {
            let rows = first..(first + ROWS_PER_PASS).min(self.rows.len());
            for panel in self.panels.clone() {
                let blocks = &blocks[panel * count..][..count];
                macro_rules! tile {
                    ($size:literal, $row:expr) => {{
                        let x =
                            std::array::from_fn(|i| &self.quantised_x[self.rows.input($row + i) * groups..][..groups]);
                        let v = quantised_tile::<S, B, $size>(s, blocks, x, self.matrix.zero_bits);
                        self.write(s, panel, $row, v);
                        $size
                    }};
                }
                tiles!(S::WIDE, rows, tile);
            }
        }
    }

    #[inline(always)]
    fn plain<S: Simd, E: Float>(&self, s: S) {
        let cols = self.matrix.cols;
        let columns = self.arena.slice::<[E; LANES]>(self.matrix.range);
        for first in (0..self.rows.len()).step_by(ROWS_PER_PASS) {
            let rows = first..(first + ROWS_PER_PASS).min(self.rows.len());
            for start in self.panels.clone().step_by(side_by_side(1)) {
                let panels = start..(start + side_by_side(1)).min(self.panels.end);
                macro_rules! tile {
                    ($size:literal, $row:expr) => {{
                        let x = std::array::from_fn(|i| &self.x[self.rows.input($row + i) * cols..][..cols]);
                        let mut panel = panels.start;
                        while panel + side_by_side($size) <= panels.end {
                            let columns = std::array::from_fn(|p| &columns[(panel + p) * cols..][..cols]);
                            let v = plain_tile::<S, E, $size, { side_by_side($size) }>(s, columns, x);
                            for v in v {
                                self.write(s, panel, $row, v);
                                panel += 1;
                            }
                        }
                        for panel in panel..panels.end {
                            let columns = &columns[panel * cols..][..cols];
                            let [v] = plain_tile::<S, E, $size, 1>(s, [columns], x);
                            self.write(s, panel, $row, v);
                        }
                        $size
                    }};
                }
                tiles!(S::WIDE, rows, tile);
            }
        }
    }

    #[inline(always)]
    fn e4m3<S: Simd>(&self, s: S) {
        let (cols, groups) = (self.matrix.cols, self.matrix.cols / GROUP);
        let blocks = self.arena.slice::<Fp8>(self.matrix.range);
        for first in (0..self.rows.len()).step_by(ROWS_PER_PASS) {
            let rows = first..(first + ROWS_PER_PASS).min(self.rows.len());
            for panel in self.panels.clone() {
                let blocks = &blocks[panel * groups..][..groups];
                macro_rules! tile {
                    ($size:literal, $row:expr) => {{
                        let x = std::array::from_fn(|i| &self.x[self.rows.input($row + i) * cols..][..cols]);
                        let v = e4m3_tile::<S, $size>(s, blocks, x);
                        self.write(s, panel, $row, v);
                        $size
                    }};
                }
                tiles!(S::WIDE, rows, tile);
            }
        }
    }

    #[inline(always)]
    fn write<S: Simd, const M: usize>(&self, s: S, panel: usize, row: usize, v: [S::F; M]) {
        let first = panel * LANES;
        let count = LANES.min(self.matrix.rows - first);
        for (i, v) in v.into_iter().enumerate() {
            self.out.write(s, self.rows.output(row + i), first, count, v, self.bias);
        }
    }
}

/// 16 outputs of `M` rows.
#[inline(always)]
fn quantised_tile<S: Simd, B: Block, const M: usize>(
    s: S,
    blocks: &[B],
    x: [&[QuantGroup]; M],
    zero_bits: u32,
) -> [S::F; M] {
    let mut acc = [s.splat(0.0); M];
    let x = x.map(|row| &row[..blocks.len() * B::GROUPS]);
    for (index, block) in blocks.iter().enumerate() {
        for part in 0..B::GROUPS {
            if M <= PREFETCH_ROWS {
                // The lines that begin in this part of a block, counted from the block's start.
                let line = |part: usize| (size_of::<B>() * part / B::GROUPS).div_ceil(64);
                let ahead = std::ptr::from_ref(block).cast::<u8>().wrapping_add(PREFETCH_BYTES);
                for line in line(part)..line(part + 1) {
                    s.prefetch(ahead.wrapping_add(line * 64));
                }
            }
            let x = x.map(|row| &row[index * B::GROUPS + part]);
            acc = group_products(s, (block, part), x, zero_bits, acc);
        }
    }
    acc
}

/// Adds the products of one group to `acc`.
#[inline(always)]
fn group_products<S: Simd, B: Block, const M: usize>(
    s: S,
    (block, part): (&B, usize),
    x: [&QuantGroup; M],
    zero_bits: u32,
    mut acc: [S::F; M],
) -> [S::F; M] {
    let codes = block.codes(s, part);
    let quads = 8 / B::HALVES;
    for half in 0..B::HALVES {
        let scale = block.scale(s, part, half);
        for m in 0..M {
            let x = x[m];
            let mut dot = if B::HAS_MIN || B::HAS_ZERO {
                s.splat_i(0)
            } else if B::HALVES == 2 {
                s.shift_left(s.splat_i(x.negative_sums[half]), zero_bits)
            } else {
                s.shift_left(s.splat_i(x.negative_sums[0] + x.negative_sums[1]), zero_bits)
            };
            for i in half * quads..(half + 1) * quads {
                dot = if B::SMALL { s.dot_small(dot, codes[i], x.codes[i]) } else { s.dot(dot, codes[i], x.codes[i]) };
            }
            let mut product = s.to_f(dot);
            if B::HAS_ZERO {
                // Exact: both are below 2^20.
                let negative_sum = (x.negative_sums[0] + x.negative_sums[1]) as f32;
                product = s.fma(block.zero(s), s.splat(negative_sum), product);
            }
            acc[m] = s.fma(s.mul(scale, s.splat(x.scale)), product, acc[m]);
        }
    }
    if B::HAS_MIN {
        for half in 0..B::HALVES {
            let min = block.min(s, part, half);
            for m in 0..M {
                let sum = if B::HALVES == 2 { x[m].scale * -x[m].negative_sums[half] as f32 } else { x[m].scaled_sum };
                acc[m] = s.fma(min, s.splat(sum), acc[m]);
            }
        }
    }
    acc
}

/// How many panels of floats a tile of `rows` rows takes at a time. A sum is one chain of additions, each of which waits for the one
/// before: with fewer than about eight of them memory waits, too.
const fn side_by_side(rows: usize) -> usize {
    match rows {
        1 => 4,
        2 | 4 => 2,
        _ => 1,
    }
}

/// 16 outputs of `M` rows, of each of `P` panels.
#[inline(always)]
fn plain_tile<S: Simd, E: Float, const M: usize, const P: usize>(
    s: S,
    columns: [&[[E; LANES]]; P],
    x: [&[f32]; M],
) -> [[S::F; M]; P] {
    let mut acc = [[s.splat(0.0); M]; P];
    let count = columns[0].len();
    let (columns, x) = (columns.map(|panel| &panel[..count]), x.map(|row| &row[..count]));
    for k in 0..count {
        for p in 0..P {
            let w = E::load(s, &columns[p][k]);
            for m in 0..M {
                acc[p][m] = s.fma(w, s.splat(x[m][k]), acc[p][m]);
            }
        }
    }
    acc
}

/// 16 outputs of `M` rows.
#[inline(always)]
fn e4m3_tile<S: Simd, const M: usize>(s: S, blocks: &[Fp8], x: [&[f32]; M]) -> [S::F; M] {
    let mut acc = [s.splat(0.0); M];
    let x = x.map(|row| &row.as_chunks::<GROUP>().0[..blocks.len()]);
    for (g, block) in blocks.iter().enumerate() {
        let mut sums = [s.splat(0.0); M];
        for (k, lanes) in block.values.iter().enumerate() {
            let w = s.load_e4m3(lanes);
            for m in 0..M {
                sums[m] = s.fma(w, s.splat(x[m][g][k]), sums[m]);
            }
        }
        let scale = s.load(&block.scales);
        for m in 0..M {
            acc[m] = s.fma(scale, sums[m], acc[m]);
        }
    }
    acc
}
