//! A pointer of libibverbs's, and its identity.

use std::ptr::NonNull;

/// A pointer to a structure that libibverbs, or a device's own library, has made.
pub(super) struct Handle<T>(NonNull<T>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: by libibverbs's own word, all of its objects may be used by several threads at once, but
// for those that are made in a thread domain (`ibv_alloc_td(3)`); and none belongs to the thread
// that made it. That those of a thread domain are posted to by one thread at a time is promised
// where it is done: posting is `unsafe`.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// What a call has answered, which it has not failed to do.
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
