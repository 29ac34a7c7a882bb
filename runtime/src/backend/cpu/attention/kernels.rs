//! The loops of a tile as kernels of their own, each compiled apart: all of them in one function took the compiler minutes.
//!
//! Invariant: nothing is computed here. Called by `Work`.

use std::marker::PhantomData;
use std::ops::Range;

use super::work::{Values, Work};
use crate::backend::cpu::repack::Float;
use crate::backend::cpu::simd::{Kernel, Simd};

/// `Work::score` of `U` units of keys of type `E`.
pub(super) struct Score<'w, 'a, E, const U: usize> {
    pub(super) work: &'w mut Work<'a>,
    pub(super) split: usize,
    pub(super) first: usize,
    pub(super) positions: Range<usize>,
    pub(super) element: PhantomData<E>,
}

impl<E: Float, const U: usize> Kernel for Score<'_, '_, E, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.work.score::<S, E, U>(s, self.split, self.first, self.positions);
    }
}

/// `Work::weigh`.
pub(super) struct Weigh<'w, 'a> {
    pub(super) work: &'w mut Work<'a>,
    pub(super) unit: usize,
    pub(super) seen: Range<usize>,
}

impl Kernel for Weigh<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.work.weigh(s, self.unit, self.seen);
    }
}

/// `Work::value_columns` of `U` units of values of type `E`.
pub(super) struct Weighted<'w, 'a, E, const U: usize> {
    pub(super) work: &'w mut Work<'a>,
    pub(super) values: Values,
    pub(super) element: PhantomData<E>,
}

impl<E: Float, const U: usize> Kernel for Weighted<'_, '_, E, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.work.value_columns::<S, E, U>(s, self.values);
    }
}
