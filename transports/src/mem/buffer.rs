//! Buffers of operations in flight.

use super::Loan;
use super::{CopyError, MemKind, MemMut, MemRef, Packet, RegionSlice, copy::copy_and_wait};
use crate::gpu::Gpu;
use bytes::{Bytes, BytesMut};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Bytes held in place, at most [`SmallBytes::MAX`], so that a small message needs no packet and no
/// allocation.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SmallBytes {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl SmallBytes {
    /// Capacity of a 64-byte slot of a ring behind the header.
    pub const MAX: usize = 40;

    /// Makes an empty value.
    #[inline]
    pub fn empty() -> Self {
        Self { len: 0, bytes: [0; Self::MAX] }
    }

    /// Takes the first `len` of these bytes, all of them when `len` is more. The bytes behind are
    /// kept but never shown.
    #[inline(always)]
    pub fn first(len: usize, bytes: [u8; Self::MAX]) -> Self {
        let mut first = Self { bytes, len: 0 };
        first.fill(len);
        first
    }

    /// Sets the length, at most [`MAX`](Self::MAX), and returns the place of the bytes. The bytes
    /// behind are kept but never shown.
    #[inline(always)]
    pub fn fill(&mut self, len: usize) -> &mut [u8; Self::MAX] {
        // At most 40: the cast loses nothing.
        #[allow(clippy::cast_possible_truncation)]
        let len = if len < Self::MAX { len as u8 } else { Self::MAX as u8 };
        self.len = len;
        &mut self.bytes
    }

    /// Makes room for `len` bytes, all zero. `None` when they do not fit.
    #[inline]
    pub fn zeroed(len: usize) -> Option<Self> {
        u8::try_from(len)
            .ok()
            .filter(|_| len <= Self::MAX)
            .map(|len| Self { len, bytes: [0; Self::MAX] })
    }

    /// Returns the bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns the bytes for writing.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for SmallBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x?}", self.as_slice())
    }
}

/// Bytes with an owner: an operation holds them while it runs, and its completion returns them.
///
/// `Vec`, `Bytes` and `BytesMut` are host memory by construction; a region and a packet know their
/// kind. None of them pays for detection.
#[derive(Debug, Default)]
pub enum Buffer {
    /// No bytes.
    #[default]
    Empty,
    /// A few bytes, in place.
    Small(SmallBytes),
    /// A vector.
    Vec(Vec<u8>),
    /// Shared, immutable bytes: for sending, not for receiving.
    Bytes(Bytes),
    /// Unique, growable bytes.
    BytesMut(BytesMut),
    /// Part of a region, of any kind of memory.
    Region(RegionSlice),
    /// A packet of a pool, of any kind of memory; returns to its pool when dropped.
    Packet(Packet),
    /// A message's bytes in the sender's memory, for a completion object that takes loans. They
    /// are never seen as a slice, since the sender could still write them. The receiver drops a
    /// loan soon, because the sender's memory for loans is limited.
    Loan(Loan),
    /// Several buffers that make up one message. It has no view in one piece: its bytes are moved
    /// buffer by buffer.
    List(Buffers),
}

/// Several buffers.
///
/// A function of its own drops it. Most buffers are a few bytes in place, whose drop does nothing;
/// inlined loops for the others would cost them a dozen instructions.
pub struct Buffers(ManuallyDrop<Vec<Buffer>>);

impl Drop for Buffers {
    #[inline(never)]
    fn drop(&mut self) {
        // SAFETY: dropped here only, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl Buffers {
    /// Returns the buffers as a vector.
    pub fn into_vec(mut self) -> Vec<Buffer> {
        std::mem::take(&mut *self.0)
    }
}

impl From<Vec<Buffer>> for Buffers {
    fn from(list: Vec<Buffer>) -> Self {
        Self(ManuallyDrop::new(list))
    }
}

impl std::ops::Deref for Buffers {
    type Target = [Buffer];

    fn deref(&self) -> &[Buffer] {
        &self.0
    }
}

impl std::ops::DerefMut for Buffers {
    fn deref_mut(&mut self) -> &mut [Buffer] {
        &mut self.0
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Buffer {
    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Small(bytes) => bytes.as_slice().len(),
            Self::Vec(bytes) => bytes.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::BytesMut(bytes) => bytes.len(),
            Self::Region(slice) => slice.len(),
            Self::Packet(packet) => packet.len(),
            Self::Loan(loan) => loan.len(),
            Self::List(list) => list.iter().map(Self::len).sum(),
        }
    }

    /// Returns `true` if there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its kind of memory.
    #[inline]
    pub fn kind(&self) -> MemKind {
        match self {
            Self::Region(slice) => slice.kind(),
            Self::Packet(packet) => packet.kind(),
            _ => MemKind::Host,
        }
    }

    /// Returns the GPU of a packet, or of a part of a region that has one.
    #[inline]
    pub fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        match self {
            Self::Region(slice) => slice.region().gpu(),
            Self::Packet(packet) => packet.gpu(),
            _ => None,
        }
    }

    /// Returns the first address of its bytes in GPU memory, for a kernel's argument or a driver.
    /// `None` for host memory. Only this buffer keeps the memory alive: the caller keeps the
    /// buffer until the kernel has ended.
    pub fn device_addr(&self) -> Option<usize> {
        self.kind().gpu()?;
        match self {
            Self::Region(slice) => Some(slice.region().addr() + slice.offset()),
            Self::Packet(packet) => Some(packet.addr()),
            _ => None,
        }
    }

    /// Returns the bytes, if they are host memory that only this process may write. The bytes of a
    /// region, a loan, a list or a GPU are not. [`to_vec`](Self::to_vec) works for all.
    #[inline]
    pub fn as_slice(&self) -> Option<&[u8]> {
        match self {
            Self::Empty => Some(&[]),
            Self::Small(bytes) => Some(bytes.as_slice()),
            Self::Vec(bytes) => Some(bytes),
            Self::Bytes(bytes) => Some(bytes),
            Self::BytesMut(bytes) => Some(bytes),
            Self::Region(_) | Self::Loan(_) | Self::List(_) => None,
            Self::Packet(packet) => packet.as_slice(),
        }
    }

    /// Copies the bytes into a vector, from any kind of memory. Waits for a GPU's engine if
    /// needed.
    pub fn to_vec(&self) -> Result<Vec<u8>, CopyError> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes)?;
        Ok(bytes)
    }

    /// Copies the bytes from the beginning into `to`, as far as they fit, from any kind of memory.
    /// Waits for a GPU's engine if needed. Returns the number of bytes copied.
    pub fn copy_to(&self, to: &mut [u8]) -> Result<usize, CopyError> {
        if let Self::List(list) = self {
            let mut done = 0;
            for piece in list.iter() {
                done += piece.copy_to(&mut to[done..])?;
            }
            return Ok(done);
        }
        let len = self.len().min(to.len());
        copy_and_wait(MemMut::host(&mut to[..len]), self.view().part(0, len))?;
        Ok(len)
    }

    /// Returns the bytes, for the copy function; for a list, an empty view.
    #[inline]
    pub fn view(&self) -> MemRef<'_> {
        match self {
            Self::Empty => MemRef::host(&[]),
            Self::Small(bytes) => MemRef::host(bytes.as_slice()),
            Self::Vec(bytes) => MemRef::host(bytes),
            Self::Bytes(bytes) => MemRef::host(bytes),
            Self::BytesMut(bytes) => MemRef::host(bytes),
            Self::Region(slice) => slice.view(),
            Self::Packet(packet) => packet.view(),
            Self::Loan(loan) => loan.view(),
            Self::List(_) => MemRef::host(&[]),
        }
    }

    /// Returns `true` if there is a [`view_mut`](Self::view_mut).
    #[doc(hidden)]
    #[inline(always)]
    pub fn has_view_mut(&self) -> bool {
        match self {
            Self::Bytes(_) | Self::Loan(_) | Self::List(_) => false,
            Self::Empty | Self::Small(_) | Self::Vec(_) | Self::BytesMut(_) => true,
            Self::Region(_) | Self::Packet(_) => true,
        }
    }

    /// Returns the bytes as a target of the copy function; `None` when they may not be written, or
    /// lie in several pieces.
    #[inline]
    pub fn view_mut(&mut self) -> Option<MemMut<'_>> {
        match self {
            Self::Empty => Some(MemMut::host(&mut [])),
            Self::Small(bytes) => Some(MemMut::host(bytes.as_mut_slice())),
            Self::Vec(bytes) => Some(MemMut::host(bytes)),
            Self::Bytes(_) | Self::Loan(_) | Self::List(_) => None,
            Self::BytesMut(bytes) => Some(MemMut::host(bytes)),
            Self::Region(slice) => Some(slice.view_mut()),
            Self::Packet(packet) => Some(packet.view_mut()),
        }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Vec(bytes)
    }
}

impl From<Bytes> for Buffer {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<BytesMut> for Buffer {
    fn from(bytes: BytesMut) -> Self {
        Self::BytesMut(bytes)
    }
}

impl From<RegionSlice> for Buffer {
    fn from(slice: RegionSlice) -> Self {
        Self::Region(slice)
    }
}

impl From<Vec<Self>> for Buffer {
    fn from(list: Vec<Self>) -> Self {
        Self::List(list.into())
    }
}

impl From<Packet> for Buffer {
    fn from(packet: Packet) -> Self {
        Self::Packet(packet)
    }
}
