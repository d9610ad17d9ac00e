//! A lock that is tried, not waited for.

#![expect(unsafe_code, reason = "a structure without locks shares cells between threads")]

use super::primitives::{AtomicBool, Ordering, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A lock for short sections, on which a losing thread does something else instead of waiting. LCI
/// found that this scales where a mutex does not.
pub struct TryLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a guard, and there is one guard at a time.
unsafe impl<T: Send> Send for TryLock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for TryLock<T> {}

impl<T> TryLock<T> {
    /// Makes an open lock around `value`.
    pub fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Returns the value, if no thread holds it at the moment.
    #[inline]
    pub fn try_lock(&self) -> Option<TryLockGuard<'_, T>> {
        // The plain load keeps losers from taking the cache line away from the holder.
        let held = &self.held;
        if held.load(Ordering::Relaxed)
            || held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return None;
        }
        Some(TryLockGuard { lock: self, _value: PhantomData })
    }

    /// Returns the value, once no other thread holds it. Only for sections of a few instructions,
    /// and for shutting down.
    pub fn lock(&self) -> TryLockGuard<'_, T> {
        #[cfg(not(loom))]
        let mut tries = 0_u32;
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            // Loom has to be told each time that this thread can only wait.
            #[cfg(loom)]
            loom::thread::yield_now();
            #[cfg(not(loom))]
            {
                tries += 1;
                if tries.is_multiple_of(64) {
                    // The holder may have been descheduled; on a machine with few cores it needs
                    // this thread's.
                    std::thread::yield_now();
                }
            }
            super::primitives::spin_loop();
        }
    }

    /// Returns the value, for its only owner.
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: `&mut self` says that there is no guard.
        self.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> fmt::Debug for TryLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TryLock")
    }
}

/// The lock's value; opens the lock when dropped.
///
/// The guard is `Send` and `Sync` where `&mut T` is: a shared guard hands out `&T`.
///
/// ```
/// # use carrack_transports::sync::TryLock;
/// fn shared_by_threads<T: Sync>(_: T) {}
/// shared_by_threads(TryLock::new(0).try_lock().unwrap());
/// ```
///
/// ```compile_fail,E0277
/// # use carrack_transports::sync::TryLock;
/// fn shared_by_threads<T: Sync>(_: T) {}
/// shared_by_threads(TryLock::new(std::cell::Cell::new(0)).try_lock().unwrap());
/// ```
pub struct TryLockGuard<'a, T> {
    lock: &'a TryLock<T>,
    _value: PhantomData<&'a mut T>,
}

impl<T> Deref for TryLockGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        self.lock.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for TryLockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and borrowed for writing.
        self.lock.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for TryLockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

impl<T> fmt::Debug for TryLockGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TryLockGuard")
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_two_threads_never_hold_it_together() {
        loom::model(|| {
            let lock = Arc::new(TryLock::new(0_u32));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let lock = lock.clone();
                    thread::spawn(move || lock.try_lock().map(|mut value| *value += 1).is_some())
                })
                .collect();
            let won =
                threads.into_iter().map(|thread| u32::from(thread.join().unwrap())).sum::<u32>();
            assert!(won >= 1, "one thread always wins");
            assert_eq!(*lock.lock(), won);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_held_lock_turns_others_away_and_opens_again() {
        let lock = TryLock::new(5);
        let mut guard = lock.try_lock().unwrap();
        assert!(lock.try_lock().is_none());
        *guard = 6;
        drop(guard);
        assert_eq!(*lock.try_lock().unwrap(), 6);
    }
}
