//! Handles that a thread has left, and gives out again.
//!
//! An operation that ends leaves a handle of its completion object. The next operation of that
//! object needs one. A thread that keeps the handle touches the object's counter neither for the
//! drop nor for the clone, each of which is an atomic operation.

#![expect(unsafe_code, reason = "one handle and a number stand for several")]

use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Handles of objects. Those of one object are kept as one of them and their number.
#[derive(Debug)]
pub struct Handles<T: ?Sized> {
    same: Option<(ManuallyDrop<Arc<T>>, usize)>,
    others: Vec<Arc<T>>,
}

impl<T: ?Sized> Default for Handles<T> {
    fn default() -> Self {
        Self { same: None, others: Vec::new() }
    }
}

impl<T: ?Sized> Handles<T> {
    /// Returns `true` if there are none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.same.is_none() && self.others.is_empty()
    }

    /// Keeps a handle.
    #[inline(always)]
    pub fn push(&mut self, handle: Arc<T>) {
        match &mut self.same {
            None => self.same = Some((ManuallyDrop::new(handle), 1)),
            Some((same, count)) if Arc::ptr_eq(same, &handle) => {
                *count += 1;
                // It is one of that number.
                std::mem::forget(handle);
            }
            Some(_) => self.push_other(handle),
        }
    }

    #[cold]
    #[inline(never)]
    fn push_other(&mut self, handle: Arc<T>) {
        self.others.push(handle);
    }

    /// Takes a handle of the same object as `handle`, if one is found at once.
    #[inline(always)]
    pub fn take(&mut self, handle: &Arc<T>) -> Option<Arc<T>> {
        match &mut self.same {
            Some((same, count)) if Arc::ptr_eq(same, handle) => {
                // SAFETY: one of the handles that `push` has kept. Their number, which falls with
                // it, says that it was not given out yet.
                let given = unsafe { std::ptr::read(&**same) };
                *count -= 1;
                if *count == 0 {
                    self.same = None;
                }
                Some(given)
            }
            None if self.others.is_empty() => None,
            _ => self.take_other(handle),
        }
    }

    #[cold]
    #[inline(never)]
    fn take_other(&mut self, handle: &Arc<T>) -> Option<Arc<T>> {
        self.others.pop_if(|other| Arc::ptr_eq(other, handle))
    }

    /// Drops all handles.
    #[inline(never)]
    pub fn clear(&mut self) {
        if let Some((same, count)) = self.same.take() {
            for _ in 1..count {
                // SAFETY: one of the handles that `push` has kept. `self.same` is empty, so nothing
                // else gives them out.
                drop(unsafe { std::ptr::read(&*same) });
            }
            drop(ManuallyDrop::into_inner(same));
        }
        self.others.clear();
    }
}

impl<T: ?Sized> Drop for Handles<T> {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn object() -> Arc<dyn Send> {
        Arc::new(7)
    }

    #[test]
    fn miri_each_handle_is_given_out_or_dropped_once() {
        let (a, b, c) = (object(), object(), object());
        let mut kept = Handles::default();
        assert!(kept.take(&a).is_none() && kept.is_empty());
        for handle in [&a, &a, &b, &a, &c, &b] {
            kept.push(handle.clone());
        }
        let counts = || [&a, &b, &c].map(Arc::strong_count);
        assert_eq!((counts(), kept.is_empty()), ([4, 3, 2], false));
        let given: Vec<_> = [&a, &b, &b, &c, &a].map(|like| kept.take(like)).into();
        assert_eq!(given.iter().flatten().count(), 4, "the last but one of `b` lies below `c`");
        assert_eq!(counts(), [4, 3, 2]);
        drop(given);
        assert_eq!(counts(), [2, 2, 1]);
        kept.clear();
        assert_eq!((counts(), kept.is_empty()), ([1, 1, 1], true));
        kept.push(b.clone());
        drop(kept);
        assert_eq!(counts(), [1, 1, 1]);
    }

    /// Object that counts its drop, and panics in it.
    struct Panics<'a>(&'a AtomicU32);

    impl Drop for Panics<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
            assert!(std::thread::panicking(), "in a drop");
        }
    }

    #[test]
    fn miri_an_object_whose_last_handles_are_kept_is_dropped_once_though_its_drop_panics() {
        let drops = AtomicU32::new(0);
        let mut kept = Handles::default();
        let last = Arc::new(Panics(&drops));
        kept.push(last.clone());
        kept.push(last);
        let cleared = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| kept.clear()));
        assert!(cleared.is_err() && kept.is_empty());
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}
