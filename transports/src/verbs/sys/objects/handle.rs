//! A pointer of libibverbs's, and its identity.

use std::ptr::NonNull;

/// A pointer to a structure that libibverbs, or a device's own library, has made.
pub(super) struct VerbsPointer<T>(NonNull<T>);

impl<T> Clone for VerbsPointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for VerbsPointer<T> {}

// SAFETY: libibverbs documents that several threads may use its objects at once, except those made
// in a thread domain (`ibv_alloc_td(3)`). No object belongs to the thread that made it. Posting to
// the objects of a thread domain is `unsafe`, and the caller promises to do it from one thread at
// a time.
unsafe impl<T> Send for VerbsPointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for VerbsPointer<T> {}

impl<T> VerbsPointer<T> {
    /// Wraps the answer of a successful call.
    ///
    /// # Safety
    /// It is not null.
    pub(super) unsafe fn new(raw: *mut T) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { NonNull::new_unchecked(raw) })
    }

    #[inline(always)]
    pub(super) fn raw(self) -> *mut T {
        self.0.as_ptr()
    }
}
