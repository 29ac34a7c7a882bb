//! Memory of the CPU backend: zeroed, in 2 MiB pages where the system grants them, shared by the threads of a step.
//!
//! Invariant: a `HugeBuf` never moves, so that plans hold offsets into it for life. `Shared` hands out slices of it to
//! the threads of a job; that no two of them overlap while one is written is the duty of the split of work, stated at
//! each use. Huge pages are worth up to 2x of memory bandwidth in decode.

use std::ptr::NonNull;

use bytemuck::Pod;

use crate::error::DeviceError;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory at a 2 MiB boundary.
pub(super) struct HugeBuf {
    base: NonNull<u8>,
    len: usize,
    mapped: NonNull<u8>,
    mapped_len: usize,
    /// Whether the system took the wish for huge pages.
    pub(super) huge: bool,
}

// SAFETY: the buffer owns its mapping; access goes through `&self` with `Shared`'s contract, or through `&mut self`.
unsafe impl Send for HugeBuf {}
// SAFETY: as above.
unsafe impl Sync for HugeBuf {}

impl HugeBuf {
    /// Reserves `len` bytes for `what` (the name in an error); pages are taken when first written.
    ///
    /// # Errors
    /// The system has no such address range.
    pub(super) fn new(len: usize, what: &str) -> Result<Self, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory { what: what.to_owned(), needed_bytes: len as u64 };
        let padded = len.max(1).checked_next_multiple_of(HUGE_PAGE_BYTES).ok_or_else(out_of_memory)?;
        let mapped_len = padded.checked_add(HUGE_PAGE_BYTES).ok_or_else(out_of_memory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous private mapping at an address of the system's choice touches no existing memory.
        let mapped =
            unsafe { libc::mmap(std::ptr::null_mut(), mapped_len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(out_of_memory());
        }
        let mapped = NonNull::new(mapped.cast::<u8>()).ok_or_else(out_of_memory)?;
        let skip = mapped.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `skip` is less than a huge page, by which the mapping is longer than `padded`.
        let base = unsafe { mapped.add(skip) };
        Ok(Self { base, len, mapped, mapped_len, huge: advise_huge(base, padded) })
    }

    /// Bytes asked for.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// For the threads of a job.
    pub(super) fn shared(&self) -> Shared {
        Shared { base: self.base, len: self.len }
    }

    /// All bytes.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `len` bytes long and zeroed at first; `&mut self` excludes every other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for HugeBuf {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `mmap` gave, and nothing borrows from it any more.
        unsafe { libc::munmap(self.mapped.as_ptr().cast(), self.mapped_len) };
    }
}

#[cfg(target_os = "linux")]
fn advise_huge(base: NonNull<u8>, len: usize) -> bool {
    // SAFETY: the range lies inside a mapping of ours; the advice does not change its contents.
    unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_base: NonNull<u8>, _len: usize) -> bool {
    false
}

/// Memory that the system could still hand out, in bytes; `None` where it does not tell.
pub fn available_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A buffer as the threads of a job see it.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a `Shared` is an address; every access is unsafe and states why it does not race.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// `count` elements from byte `start`.
    ///
    /// # Safety
    /// The buffer is alive for `'a`, and no thread writes the range meanwhile.
    #[inline(always)]
    pub(super) unsafe fn slice<'a, T: Pod>(self, start: usize, count: usize) -> &'a [T] {
        let base = self.checked::<T>(start, count);
        // SAFETY: `checked` has held the range against the buffer; the caller vouches for lifetime and exclusion.
        unsafe { std::slice::from_raw_parts(base, count) }
    }

    /// `count` elements from byte `start`, to be written.
    ///
    /// # Safety
    /// The buffer is alive for `'a`, and nobody else reads or writes the range meanwhile.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the split of work excludes, not the borrow checker")]
    pub(super) unsafe fn slice_mut<'a, T: Pod>(self, start: usize, count: usize) -> &'a mut [T] {
        let base = self.checked::<T>(start, count);
        // SAFETY: `checked` has held the range against the buffer; the caller vouches for lifetime and exclusion.
        unsafe { std::slice::from_raw_parts_mut(base, count) }
    }

    /// Address of `count` elements from byte `start`, for writes one by one.
    #[inline(always)]
    pub(super) fn ptr<T: Pod>(self, start: usize, count: usize) -> *mut T {
        self.checked(start, count)
    }

    #[inline(always)]
    fn checked<T>(self, start: usize, count: usize) -> *mut T {
        assert!(start + count * size_of::<T>() <= self.len, "range passes the end of its buffer");
        // SAFETY: `start` lies inside the mapping, checked above.
        let base = unsafe { self.base.as_ptr().add(start) }.cast::<T>();
        debug_assert!(base.is_aligned());
        base
    }
}

/// Memory for many tensors: each at a cache line's boundary, packed into few large buffers.
#[derive(Default)]
pub(super) struct Arena {
    buffers: Vec<HugeBuf>,
    used_in_last: usize,
    /// Bytes handed out.
    pub(super) used_bytes: usize,
}

/// A range of an `Arena`, for its life.
#[derive(Clone, Copy)]
pub(super) struct ArenaRange {
    buffer: usize,
    start: usize,
    len: usize,
}

impl ArenaRange {
    /// The `index`-th of `of` parts of one length.
    pub(super) fn part(self, index: usize, of: usize) -> Self {
        let len = self.len / of;
        Self { start: self.start + index * len, len, ..self }
    }
}

impl Arena {
    const BUFFER_BYTES: usize = 64 << 20;
    const ALIGN_BYTES: usize = 64;

    /// Sets `len` zeroed bytes aside for `what`.
    ///
    /// # Errors
    /// The system has no more address space.
    pub(super) fn alloc(&mut self, len: usize, what: &str) -> Result<ArenaRange, DeviceError> {
        if self.buffers.last().is_none_or(|b| b.len() - self.used_in_last < len) {
            self.buffers.push(HugeBuf::new(len.max(Self::BUFFER_BYTES), what)?);
            self.used_in_last = 0;
        }
        let range = ArenaRange { buffer: self.buffers.len() - 1, start: self.used_in_last, len };
        let capacity = self.buffers[range.buffer].len();
        self.used_in_last = (self.used_in_last + len).next_multiple_of(Self::ALIGN_BYTES).min(capacity);
        self.used_bytes += len;
        Ok(range)
    }

    /// Whether the newest buffer got huge pages.
    pub(super) fn huge(&self) -> bool {
        self.buffers.last().is_none_or(|b| b.huge)
    }

    /// The bytes of a range as the threads of a job see them.
    pub(super) fn shared(&self, range: ArenaRange) -> Shared {
        let whole = self.buffers[range.buffer].shared();
        assert!(range.start + range.len <= whole.len, "range of another arena");
        // SAFETY: the range lies inside its buffer.
        Shared { base: unsafe { whole.base.add(range.start) }, len: range.len }
    }

    /// The elements of a range.
    pub(super) fn slice<T: Pod>(&self, range: ArenaRange) -> &[T] {
        // SAFETY: weights are written in `upload` only, which has `&mut` of the backend and so of this arena.
        unsafe { self.shared(range).slice(0, range.len / size_of::<T>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_ranges_are_aligned_zeroed_and_apart() {
        let mut arena = Arena::default();
        let ranges: Vec<_> = [1, 64, 100, 70 << 20, 5].map(|len| arena.alloc(len, "test").unwrap()).into();
        for (i, &range) in ranges.iter().enumerate() {
            assert!(arena.slice::<u8>(range).iter().all(|&b| b == 0));
            assert!(arena.slice::<u8>(range).as_ptr().addr().is_multiple_of(64));
            // SAFETY: nobody else looks at the range here.
            unsafe { arena.shared(range).slice_mut::<u8>(0, range.len) }.fill(i as u8 + 1);
        }
        for (i, &range) in ranges.iter().enumerate() {
            assert!(arena.slice::<u8>(range).iter().all(|&b| b == i as u8 + 1));
        }
        assert_eq!(arena.used_bytes, 1 + 64 + 100 + (70 << 20) + 5);
    }

    #[test]
    #[should_panic(expected = "passes the end")]
    fn ranges_are_checked() {
        let buf = HugeBuf::new(64, "test").unwrap();
        // SAFETY: nobody writes.
        unsafe { buf.shared().slice::<f32>(32, 9) };
    }
}
