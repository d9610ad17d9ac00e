//! Bytes that lie with their sender.

use super::{MemRef, Place};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Where a loan goes when it is dropped.
pub trait Lender: Send + Sync {
    /// The piece may be used again.
    fn give_back(&self, piece: u32);
}

/// Bytes that still lie in memory which the sender can write: never seen as a slice, only copied
/// out.
pub struct Loan {
    ptr: *const u8,
    len: u32,
    piece: u32,
    lender: ManuallyDrop<Arc<dyn Lender>>,
}

// SAFETY: the bytes are only read by the copy function, from any thread; the lender is Send and
// Sync.
unsafe impl Send for Loan {}
// SAFETY: as above.
unsafe impl Sync for Loan {}

impl Loan {
    /// # Safety
    /// `len` bytes at `ptr` are host memory that stays mapped while `lender` lives.
    pub unsafe fn new(ptr: *const u8, len: u32, piece: u32, lender: Arc<dyn Lender>) -> Self {
        Self { ptr, len, piece, lender: ManuallyDrop::new(lender) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, in place.
    ///
    /// # Safety
    /// The sender does not write them while they are used: no safe code of this crate's does,
    /// before the loan is dropped; another program with the job's secret could.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped and readable, as promised when it was made; that nobody writes is the
        // caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len()) }
    }

    /// The bytes, for the copy function.
    pub fn view(&self) -> MemRef<'_> {
        // SAFETY: promised when it was made; the lender is kept alive by this loan.
        unsafe { MemRef::from_raw(self.ptr, self.len(), Place::Host) }
    }
}

impl Drop for Loan {
    // All of it in a function of its own: see `mem::Buffers`.
    #[inline(never)]
    fn drop(&mut self) {
        self.lender.give_back(self.piece);
        // SAFETY: dropped here only, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.lender) };
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan(piece {}, {} B)", self.piece, self.len)
    }
}
