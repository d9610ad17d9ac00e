//! Atomics and cells: the standard library's, or loom's under `--cfg loom`.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
};

#[cfg(loom)]
pub(crate) use loom::sync::MutexGuard;
#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard};

/// loom's mutex with the interface of `parking_lot`: no poisoning.
#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;

#[cfg(loom)]
pub(crate) use loom::hint::spin_loop;
#[cfg(not(loom))]
pub(crate) use std::hint::spin_loop;

/// The standard cell with loom's interface: access is a closure, so that loom can see it begin and
/// end.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A word whose accesses are all sequentially consistent. A write, and a later read of another such
/// word, are not reordered. Under loom a fence stands before each read, since loom models that of
/// fences only.
#[derive(Debug)]
pub(crate) struct Sequential(AtomicU64);

impl Sequential {
    pub(crate) fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    #[inline(always)]
    pub(crate) fn load(&self) -> u64 {
        #[cfg(loom)]
        fence(Ordering::SeqCst);
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn store(&self, value: u64) {
        self.0.store(value, Ordering::SeqCst);
    }

    /// Adds, modulo 2^64.
    pub(crate) fn add(&self, value: u64) {
        self.0.fetch_add(value, Ordering::SeqCst);
    }

    #[inline(always)]
    pub(crate) fn fetch_max(&self, value: u64) {
        self.0.fetch_max(value, Ordering::SeqCst);
    }
}
