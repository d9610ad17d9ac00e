//! Bytes that lie with their sender.

use super::{MemRef, Place};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Owner of loans, to which they return when they are dropped.
pub trait Lender: Send + Sync {
    /// Takes a piece back, which may then be used again.
    fn give_back(&self, piece: u32);
}

/// Bytes that still lie in memory which the sender can write. They are copied out, and safe code
/// never sees them as a slice.
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
    /// Lends `len` bytes at `ptr`. Dropping the loan gives `piece` back to `lender`.
    ///
    /// # Safety
    /// `len` bytes at `ptr` are host memory that stays mapped while `lender` lives.
    pub unsafe fn new(ptr: *const u8, len: u32, piece: u32, lender: Arc<dyn Lender>) -> Self {
        Self { ptr, len, piece, lender: ManuallyDrop::new(lender) }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns `true` if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes, in place.
    ///
    /// # Safety
    /// The sender does not write the bytes while they are used. Safe code of this crate does not
    /// write them before the loan is dropped; another program with the job's secret could.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: `new`'s caller promised that the bytes are mapped and readable; this function's
        // caller promises that the sender does not write them.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len()) }
    }

    /// Returns the bytes, for the copy function.
    pub fn view(&self) -> MemRef<'_> {
        // SAFETY: promised when it was made; the lender is kept alive by this loan.
        unsafe { MemRef::from_raw(self.ptr, self.len(), Place::Host) }
    }
}

impl Drop for Loan {
    // In a function of its own, which is never inlined: see `mem::Buffers`.
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
