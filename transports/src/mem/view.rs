//! A borrowed range of memory that knows its kind.
//!
//! A view is the argument of the [copy function](mod@super::copy). Making one from a slice is
//! safe, since a slice is host memory by construction. Making one from an address states a
//! promise, once.

use super::MemKind;
use crate::gpu::Gpu;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

/// Location of bytes, with the engine that can reach them when the CPU cannot.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// Ordinary host memory.
    Host,
    /// Host memory locked by a driver.
    Pinned,
    /// Memory of this GPU.
    Device(&'a Arc<dyn Gpu>),
    /// Managed memory whose home is this GPU.
    Managed(&'a Arc<dyn Gpu>),
    /// Unknown location.
    Unknown,
}

impl<'a> Place<'a> {
    /// Returns the kind of memory, as plain data.
    pub fn kind(self) -> MemKind {
        match self {
            Self::Host => MemKind::Host,
            Self::Pinned => MemKind::Pinned,
            Self::Device(gpu) => MemKind::Device(gpu.info().uuid),
            Self::Managed(gpu) => MemKind::Managed(gpu.info().uuid),
            Self::Unknown => MemKind::Unknown,
        }
    }

    /// Returns `true` if the CPU may touch the memory.
    #[inline]
    pub fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Pinned)
    }

    /// Returns the GPU whose engine moves bytes here.
    pub fn gpu(self) -> Option<&'a Arc<dyn Gpu>> {
        match self {
            Self::Device(gpu) | Self::Managed(gpu) => Some(gpu),
            Self::Host | Self::Pinned | Self::Unknown => None,
        }
    }

    /// Joins a kind and the engine found for it; `Unknown` when a device kind has no engine.
    pub fn of(kind: MemKind, gpu: Option<&'a Arc<dyn Gpu>>) -> Self {
        match (kind, gpu) {
            (MemKind::Host, _) => Self::Host,
            (MemKind::Pinned, _) => Self::Pinned,
            (MemKind::Device(_), Some(gpu)) => Self::Device(gpu),
            (MemKind::Managed(_), Some(gpu)) => Self::Managed(gpu),
            _ => Self::Unknown,
        }
    }
}

/// Bytes that may be read from, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub struct MemRef<'a> {
    pub(super) ptr: *const u8,
    pub(super) len: usize,
    pub(super) place: Place<'a>,
    _life: PhantomData<&'a [u8]>,
}

/// Bytes that may be written to, wherever they lie.
#[derive(Debug)]
pub struct MemMut<'a> {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    pub(super) place: Place<'a>,
    _life: PhantomData<&'a mut [u8]>,
}

/// Ranges of host memory, all of one length. The next one is looked for when it is asked for.
#[derive(Clone, Copy)]
pub struct HostViews<'a> {
    len: usize,
    at: &'a dyn Fn(usize) -> Option<NonNull<u8>>,
}

impl<'a> HostViews<'a> {
    /// Makes views of `len` bytes each. `at` returns the place of a view by its number, from 0 on,
    /// and `None` behind the last one. A place fits into a register, which a view does not.
    ///
    /// # Safety
    /// Each place is `len` bytes of host memory, as [`MemRef::from_raw`] asks for, for `'a`.
    #[inline(always)]
    pub unsafe fn new(len: usize, at: &'a dyn Fn(usize) -> Option<NonNull<u8>>) -> Self {
        Self { len, at }
    }

    /// Returns a view by its number, from 0 on. `None`: there are no further ones.
    #[inline(always)]
    pub fn get(&self, number: usize) -> Option<MemRef<'a>> {
        let place = (self.at)(number)?;
        // SAFETY: the promise of `new`.
        Some(unsafe { MemRef::from_raw(place.as_ptr(), self.len, Place::Host) })
    }
}

impl<'a> MemRef<'a> {
    /// Makes a view of a slice, which is host memory by construction.
    #[inline]
    pub fn host(bytes: &'a [u8]) -> Self {
        Self { ptr: bytes.as_ptr(), len: bytes.len(), place: Place::Host, _life: PhantomData }
    }

    /// Makes a view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// `len` bytes at `ptr` are allocated memory of the kind that `place` says, and stay so for
    /// `'a`. Their values may be anything, and another process may write them meanwhile.
    #[inline]
    pub unsafe fn from_raw(ptr: *const u8, len: usize, place: Place<'a>) -> Self {
        Self { ptr, len, place, _life: PhantomData }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the location of the bytes.
    #[inline]
    pub fn place(&self) -> Place<'a> {
        self.place
    }

    /// Returns the address, for a driver or a NIC. The CPU reads through it only if
    /// [`Place::is_host`].
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Returns the part from `from` on, `len` bytes long, cut off at the end.
    #[inline]
    pub fn part(self, from: usize, len: usize) -> Self {
        let from = from.min(self.len);
        Self {
            // SAFETY: `from` lies within the view, or is its end.
            ptr: unsafe { self.ptr.add(from) },
            len: len.min(self.len - from),
            ..self
        }
    }
}

impl<'a> MemMut<'a> {
    /// Makes a view of a slice, which is host memory by construction.
    #[inline]
    pub fn host(bytes: &'a mut [u8]) -> Self {
        Self { ptr: bytes.as_mut_ptr(), len: bytes.len(), place: Place::Host, _life: PhantomData }
    }

    /// Makes a writable view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// `len` bytes at `ptr` are writable memory of the kind that `place` says, stay so for `'a`,
    /// and no reference to them is alive meanwhile.
    #[inline]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, place: Place<'a>) -> Self {
        Self { ptr, len, place, _life: PhantomData }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the location of the bytes.
    #[inline]
    pub fn place(&self) -> Place<'a> {
        self.place
    }

    /// Returns the address, for a driver or a NIC. The CPU writes through it only if
    /// [`Place::is_host`].
    #[inline]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Returns the part from `from` on, `len` bytes long, cut off at the end.
    #[inline]
    pub fn part(self, from: usize, len: usize) -> Self {
        let from = from.min(self.len);
        Self {
            // SAFETY: `from` lies within the view, or is its end.
            ptr: unsafe { self.ptr.add(from) },
            len: len.min(self.len - from),
            ..self
        }
    }
}
