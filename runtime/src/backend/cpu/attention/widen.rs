//! Keys and values of the types that attention does not multiply with directly: 16 entries at a time as f32.
//!
//! Invariant: an element is what the reference loads, the code times its scale rounded once, so that nothing that is computed
//! depends on who widens what when. The kernel is compiled for f32 and f16 only: one per type would cost more build time than
//! the copy through the first-level cache costs attention. Called by `Work`.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::work::Run;
use crate::backend::cached::E4m3;
use crate::backend::cpu::cached::Cached;
use crate::backend::cpu::simd::{Kernel, LANES, Simd};
use crate::backend::cpu::state::LayerState;
use crate::program::KvDtype;

/// Whether a kernel for elements of `E` has them from here: what it then sees is f32.
#[inline(always)]
pub(super) fn is_widened<E>(dtype: KvDtype) -> bool {
    size_of::<E>() == size_of::<f32>() && dtype != KvDtype::F32
}

/// Where keys begin.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) block: usize,
    pub(super) entry: usize,
    pub(super) first_element: usize,
}

/// One head of a layer, whose entries attended to were stored before the last barrier.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) layer: &'a LayerState,
    pub(super) kv_head: usize,
}

impl Head<'_> {
    /// Some elements of the keys of 16 entries of a block, `[elements, 16]`; 0 past the end of the block.
    #[inline(always)]
    pub(super) fn keys<S: Simd>(self, s: S, at: Place, out: &mut [f32]) {
        match self.layer.dtype {
            KvDtype::F32 | KvDtype::F16 => unreachable!("read as they are"),
            KvDtype::Bf16 => s.call(Keys::<bf16> { head: self, at, out, element: PhantomData }),
            KvDtype::Fp8E4m3 => s.call(Keys::<E4m3> { head: self, at, out, element: PhantomData }),
            KvDtype::Int8PerTokenHead => s.call(Keys::<i8> { head: self, at, out, element: PhantomData }),
        }
    }

    /// Columns of the values of a run of up to 16 entries, `[entries, stride]`; `stride` is in whole vectors.
    #[inline(always)]
    pub(super) fn values<S: Simd>(self, s: S, run: &Run, columns: Range<usize>, (out, stride): (&mut [f32], usize)) {
        match self.layer.dtype {
            KvDtype::F32 | KvDtype::F16 => unreachable!("read as they are"),
            KvDtype::Bf16 => s.call(Values::<bf16> { head: self, run, columns, out, stride, element: PhantomData }),
            KvDtype::Fp8E4m3 => s.call(Values::<E4m3> { head: self, run, columns, out, stride, element: PhantomData }),
            KvDtype::Int8PerTokenHead => {
                s.call(Values::<i8> { head: self, run, columns, out, stride, element: PhantomData });
            }
        }
    }

    #[inline(always)]
    fn keys_as<S: Simd, E: Cached>(self, s: S, at: Place, out: &mut [f32]) {
        let (Self { layer, kv_head }, Place { block, entry, first_element }) = (self, at);
        let end = layer.block_size.min(entry + LANES);
        // SAFETY: see `Head`; what lies at entries that were not stored is widened too, but not attended to.
        let keys = unsafe { layer.head::<E>(0, block, kv_head) };
        let mut scales = s.splat(1.0);
        if E::SCALED {
            // SAFETY: as above.
            scales = s.load_part(&unsafe { layer.head::<f32>(layer.scales[0], block, kv_head) }[entry..end]);
        }
        let rows = keys[first_element * layer.block_size..].chunks_exact(layer.block_size);
        for (row, out) in rows.zip(out.as_chunks_mut().0) {
            let v = load::<S, E>(s, &row[entry..end]);
            s.store(if E::SCALED { s.mul(v, scales) } else { v }, out);
        }
    }

    #[inline(always)]
    fn values_as<S: Simd, E: Cached>(self, s: S, run: &Run, columns: Range<usize>, (out, stride): (&mut [f32], usize)) {
        let Self { layer, kv_head } = self;
        // SAFETY: see `Head`.
        let rows = unsafe { layer.head::<E>(1, run.block, kv_head) };
        let rows = rows[run.first_entry * layer.dim..].chunks_exact(layer.dim);
        for (i, (row, out)) in rows.take(run.len).zip(out.chunks_exact_mut(stride)).enumerate() {
            let mut scale = s.splat(1.0);
            if E::SCALED {
                // SAFETY: see `Head`.
                scale = s.splat(unsafe { layer.head::<f32>(layer.scales[1], run.block, kv_head) }[run.first_entry + i]);
            }
            for (values, out) in row[columns.clone()].chunks(LANES).zip(out[columns.start..].as_chunks_mut().0) {
                let v = load::<S, E>(s, values);
                s.store(if E::SCALED { s.mul(v, scale) } else { v }, out);
            }
        }
    }
}

/// `Head::keys_as`.
struct Keys<'a, E> {
    head: Head<'a>,
    at: Place,
    out: &'a mut [f32],
    element: PhantomData<E>,
}

impl<E: Cached> Kernel for Keys<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.head.keys_as::<S, E>(s, self.at, self.out);
    }
}

/// `Head::values_as`.
struct Values<'a, E> {
    head: Head<'a>,
    run: &'a Run,
    columns: Range<usize>,
    out: &'a mut [f32],
    stride: usize,
    element: PhantomData<E>,
}

impl<E: Cached> Kernel for Values<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.head.values_as::<S, E>(s, self.run, self.columns, (self.out, self.stride));
    }
}

/// Up to 16 elements; absent lanes are 0.
#[inline(always)]
fn load<S: Simd, E: Cached>(s: S, values: &[E]) -> S::F {
    if let Some(whole) = values.first_chunk() {
        return E::load(s, whole);
    }
    let mut padded = [E::zeroed(); LANES];
    padded[..values.len()].copy_from_slice(values);
    E::load(s, &padded)
}
