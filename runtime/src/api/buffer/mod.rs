//! Buffers of operations: owned buffers, or borrowed bytes that are copied within the call.

pub mod raw;

pub use carrack_transports::contract::Loan;
use carrack_transports::gpu::Gpu;
pub use carrack_transports::mem::{Buffer, Buffers, Region, RegionSlice};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use carrack_transports::mem::{MemKind, MemRef, Packet};

/// The bytes to send: borrowed bytes, which are copied before the call returns, or a buffer that
/// the operation owns until it has finished.
#[derive(Debug)]
pub enum SendBuffer<'a> {
    /// Borrowed bytes.
    Borrowed(&'a [u8]),
    /// A buffer of the operation's own.
    Owned(Buffer),
}

impl SendBuffer<'_> {
    /// Returns the buffer, unless the bytes are only borrowed.
    #[inline]
    pub(crate) fn owned(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Borrowed(_) => None,
            Self::Owned(buffer) => Some(buffer),
        }
    }

    #[inline]
    pub(crate) fn view(&self) -> MemRef<'_> {
        match self {
            Self::Borrowed(bytes) => MemRef::host(bytes),
            Self::Owned(buffer) => buffer.view(),
        }
    }

    #[inline]
    pub(crate) fn kind(&self) -> MemKind {
        match self {
            Self::Borrowed(_) => MemKind::Host,
            Self::Owned(buffer) => buffer.kind(),
        }
    }

    pub(crate) fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        match self {
            Self::Borrowed(_) => None,
            Self::Owned(buffer) => buffer.gpu(),
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Borrowed(bytes) => bytes.len(),
            Self::Owned(buffer) => buffer.len(),
        }
    }
}

impl<'a> From<&'a [u8]> for SendBuffer<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for SendBuffer<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for SendBuffer<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Self::Borrowed(bytes)
    }
}

macro_rules! owned {
    ($($buffer:ty),+) => {$(
        impl From<$buffer> for SendBuffer<'_> {
            fn from(buffer: $buffer) -> Self {
                Self::Owned(buffer.into())
            }
        }
    )+};
}

owned!(Buffer, Vec<u8>, Bytes, BytesMut, RegionSlice, Packet, Vec<Buffer>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_and_an_array_are_lent_without_a_copy() {
        let (vector, array) = (vec![7; 3], [7; 3]);
        for (lent, bytes) in [((&vector).into(), &vector[..]), ((&array).into(), &array[..])] {
            let is_lent = matches!(lent, SendBuffer::Borrowed(lent) if std::ptr::eq(lent, bytes));
            assert!(is_lent, "{lent:?}");
        }
    }
}
