//! A borrowed range of memory that knows its kind.
//!
//! A view is what the [copy function](mod@super::copy) takes. Making one from a slice is safe,
//! since a slice is host memory by construction; making one from an address states a promise, once.

use super::MemKind;
use crate::gpu::Gpu;
use std::marker::PhantomData;
use std::sync::Arc;

/// Where bytes lie, with the engine that can reach them when the CPU cannot.
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
    /// Not known.
    Unknown,
}

impl<'a> Place<'a> {
    /// The kind of memory, as plain data.
    pub fn kind(self) -> MemKind {
        match self {
            Self::Host => MemKind::Host,
            Self::Pinned => MemKind::Pinned,
            Self::Device(gpu) => MemKind::Device(gpu.info().uuid),
            Self::Managed(gpu) => MemKind::Managed(gpu.info().uuid),
            Self::Unknown => MemKind::Unknown,
        }
    }

    /// Whether the CPU may touch it.
    #[inline]
    pub fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Pinned)
    }

    /// The GPU whose engine moves bytes here.
    pub fn gpu(self) -> Option<&'a Arc<dyn Gpu>> {
        match self {
            Self::Device(gpu) | Self::Managed(gpu) => Some(gpu),
            Self::Host | Self::Pinned | Self::Unknown => None,
        }
    }

    /// Puts a kind and the engine found for it together; `Unknown` when a device kind has no
    /// engine.
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

impl<'a> MemRef<'a> {
    /// A slice is host memory by construction.
    #[inline]
    pub fn host(bytes: &'a [u8]) -> Self {
        Self { ptr: bytes.as_ptr(), len: bytes.len(), place: Place::Host, _life: PhantomData }
    }

    /// # Safety
    /// `len` bytes at `ptr` are allocated memory of the kind that `place` says, and stay so for
    /// `'a`. They need not be initialised to any value in particular, and another process may write
    /// them meanwhile.
    #[inline]
    pub unsafe fn from_raw(ptr: *const u8, len: usize, place: Place<'a>) -> Self {
        Self { ptr, len, place, _life: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes lie.
    #[inline]
    pub fn place(&self) -> Place<'a> {
        self.place
    }

    /// The address, for a driver or a NIC. Not to be read through unless [`Place::is_host`].
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The part from `from` on, `len` bytes long, cut off at the end.
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
    /// A slice is host memory by construction.
    #[inline]
    pub fn host(bytes: &'a mut [u8]) -> Self {
        Self { ptr: bytes.as_mut_ptr(), len: bytes.len(), place: Place::Host, _life: PhantomData }
    }

    /// # Safety
    /// `len` bytes at `ptr` are writable memory of the kind that `place` says, stay so for `'a`,
    /// and no reference to them is alive meanwhile.
    #[inline]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, place: Place<'a>) -> Self {
        Self { ptr, len, place, _life: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes lie.
    #[inline]
    pub fn place(&self) -> Place<'a> {
        self.place
    }

    /// The address, for a driver or a NIC. Not to be written through unless [`Place::is_host`].
    #[inline]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The part from `from` on, `len` bytes long, cut off at the end.
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
