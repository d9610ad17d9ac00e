//! A try-lock that costs its usual thread no atomic exchange.
//!
//! Most links and devices are used by one thread for as long as they live. For that thread the
//! exchange of an ordinary lock is the most expensive step of a small message. On x86 it also waits
//! until the message before has left the store buffer. In that time a cache line comes from the
//! other core. So a thread that has taken the lock `STREAK` times in a row gets a bias: it takes
//! and leaves the lock by plain stores. The first other thread that comes pays for both (a
//! [`heavy`] barrier), and from then on the lock is an ordinary one for all.
//!
//! Correctness: the owner sets `owner_in`, then checks that the bias still holds. A thread that
//! revokes the bias clears it, then reads `owner_in`. Between the two steps each side has a
//! barrier; the owner's is the free half of [`super::barrier`]. So at least one of them sees the
//! other. A bias is given only once: otherwise a former owner that was interrupted between its two
//! steps could clear its successor's flag.

#![expect(unsafe_code, reason = "a structure without locks shares cells between threads")]

use super::barrier::{Barrier, heavy, light};
#[cfg(not(loom))]
use super::primitives::spin_loop;
use super::primitives::{AtomicBool, AtomicU64, Ordering, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

/// Times in a row after which a thread gets the bias.
const STREAK: u32 = if cfg!(loom) { 1 } else { 256 };

/// No thread has the bias yet.
const NO_THREAD: u64 = 0;
/// The bias was revoked, for good.
const REVOKED: u64 = u64::MAX;

/// A lock for short sections, on which a losing thread does not wait for the holder. See the
/// [module](self).
pub struct BiasedLock<T> {
    /// Number of the thread with the bias, or one of the two constants above.
    bias: AtomicU64,
    /// Flag of the thread that has, or had, the bias: only that thread writes it.
    owner_in: AtomicBool,
    /// The ordinary lock.
    taken: AtomicBool,
    barrier: Barrier,
    inside: UnsafeCell<BiasedState<T>>,
}

struct BiasedState<T> {
    value: T,
    last: u64,
    streak: u32,
}

// SAFETY: the value is only reached through a guard, and there is one guard at a time.
unsafe impl<T: Send> Send for BiasedLock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Returns this thread's number, which no other thread has, living or dead.
#[cfg(not(loom))]
#[inline(always)]
pub(super) fn this_thread() -> u64 {
    use std::cell::Cell;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    let number = NUMBER.get();
    if number != 0 {
        return number;
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    NUMBER.set(number);
    number
}

/// Returns the thread's number in a model.
#[cfg(loom)]
pub(super) fn this_thread() -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    loom::thread::current().id().hash(&mut hasher);
    hasher.finish()
}

impl<T> BiasedLock<T> {
    /// Makes an open lock around `value`, without a bias.
    pub fn new(value: T) -> Self {
        Self::with_barrier(value, Barrier::within_process())
    }

    fn with_barrier(value: T, barrier: Barrier) -> Self {
        Self {
            bias: AtomicU64::new(NO_THREAD),
            owner_in: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            barrier,
            inside: UnsafeCell::new(BiasedState { value, last: NO_THREAD, streak: 0 }),
        }
    }

    /// Returns the value, if no thread holds it at the moment.
    ///
    /// A thread that loses repeatedly spins longer and longer before the call returns, at most some
    /// 0.05 ms. Each change of hands costs more than many short sections of one holder.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn try_lock(&self) -> Option<BiasedGuard<'_, T>> {
        let guard = self.try_lock_as(this_thread());
        match &guard {
            Some(BiasedGuard { biased: true, .. }) => {}
            Some(_) => contention::won(),
            None => contention::lost(),
        }
        guard
    }

    /// Returns the value as [`try_lock`](Self::try_lock), but a loser returns at once: for a thread
    /// that may hold another lock meanwhile, or this one.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn try_lock_at_once(&self) -> Option<BiasedGuard<'_, T>> {
        self.try_lock_as(this_thread())
    }

    /// Returns the value, once no other thread holds it.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn lock(&self) -> BiasedGuard<'_, T> {
        match self.try_lock_as(this_thread()) {
            Some(guard) => guard,
            None => self.lock_later(),
        }
    }

    #[cfg(not(loom))]
    #[cold]
    fn lock_later(&self) -> BiasedGuard<'_, T> {
        let mut tries = 0_u32;
        loop {
            if let Some(guard) = self.try_lock_as(this_thread()) {
                return guard;
            }
            tries += 1;
            if tries.is_multiple_of(64) {
                std::thread::yield_now();
            }
            spin_loop();
        }
    }

    #[inline(always)]
    fn try_lock_as(&self, me: u64) -> Option<BiasedGuard<'_, T>> {
        if self.bias.load(Ordering::Relaxed) == me {
            // Only this thread writes the flag: if it is set, this is a lock inside the lock.
            if self.owner_in.load(Ordering::Relaxed) {
                return None;
            }
            self.owner_in.store(true, Ordering::Relaxed);
            // Fenced under loom and Miri: elsewhere a bias is given only where a barrier reaches
            // this thread.
            light(cfg!(any(loom, miri)));
            // `taken` is set while a thread revokes the bias, and was set while it was given.
            if self.bias.load(Ordering::Relaxed) == me && !self.taken.load(Ordering::Acquire) {
                return Some(BiasedGuard { lock: self, biased: true, _value: PhantomData });
            }
            self.owner_in.store(false, Ordering::Release);
        }
        self.try_ordinary(me)
    }

    #[inline(never)]
    fn try_ordinary(&self, me: u64) -> Option<BiasedGuard<'_, T>> {
        // The plain load keeps losers from taking the cache line away from the holder.
        let taken = &self.taken;
        if taken.load(Ordering::Relaxed)
            || taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return None;
        }
        let bias = self.bias.load(Ordering::Relaxed);
        if bias != NO_THREAD && bias != REVOKED {
            self.bias.store(REVOKED, Ordering::Relaxed);
            heavy(self.barrier);
        }
        // Acquire: what the owner did under its bias has ended, and is seen.
        if bias != NO_THREAD && self.owner_in.load(Ordering::Acquire) {
            self.taken.store(false, Ordering::Release);
            return None;
        }
        let guard = BiasedGuard { lock: self, biased: false, _value: PhantomData };
        if bias == NO_THREAD {
            self.count(me);
        }
        Some(guard)
    }

    /// Gives the bias to a thread that keeps coming back. The ordinary lock is held.
    fn count(&self, me: u64) {
        let can = cfg!(any(loom, miri)) || self.barrier.heavy && self.barrier.reachable;
        self.inside.with_mut(|inside| {
            // SAFETY: the lock is held.
            let inside = unsafe { &mut *inside };
            inside.streak = if inside.last == me { inside.streak + 1 } else { 0 };
            inside.last = me;
            if can && inside.streak >= STREAK {
                self.bias.store(me, Ordering::Relaxed);
            }
        });
    }
}

impl<T> fmt::Debug for BiasedLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BiasedLock")
    }
}

/// The lock's value; opens the lock when dropped.
///
/// The guard is never `Send`: the biased thread alone writes its flag, and reads it without a
/// barrier. It is `Sync` where `T` is: a shared guard hands out `&T`.
///
/// ```
/// # use carrack_transports::sync::BiasedLock;
/// fn shared_by_threads<T: Sync>(_: T) {}
/// shared_by_threads(BiasedLock::new(0).lock());
/// ```
///
/// ```compile_fail,E0277
/// # use carrack_transports::sync::BiasedLock;
/// fn shared_by_threads<T: Sync>(_: T) {}
/// shared_by_threads(BiasedLock::new(std::cell::Cell::new(0)).lock());
/// ```
///
/// ```compile_fail,E0277
/// # use carrack_transports::sync::BiasedLock;
/// fn sent_to_a_thread<T: Send>(_: T) {}
/// sent_to_a_thread(BiasedLock::new(0).lock());
/// ```
pub struct BiasedGuard<'a, T> {
    lock: &'a BiasedLock<T>,
    biased: bool,
    /// `Send` and `Sync` as the standard lock's guard.
    _value: PhantomData<MutexGuard<'a, T>>,
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        self.lock.inside.with(|inside| unsafe { &(*inside).value })
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and borrowed for writing.
        self.lock.inside.with_mut(|inside| unsafe { &mut (*inside).value })
    }
}

impl<T> Drop for BiasedGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        let flag = if self.biased { &self.lock.owner_in } else { &self.lock.taken };
        flag.store(false, Ordering::Release);
    }
}

impl<T> fmt::Debug for BiasedGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BiasedGuard")
    }
}

/// Returns the number of times that this thread has spun after a lost lock, in any of them. A loop
/// that looks at the clock every few rounds looks at it when this has changed, too.
#[cfg(not(loom))]
#[inline(always)]
pub fn losses_of_this_thread() -> u32 {
    contention::COUNT.get()
}

/// Back-off of a thread that meets others at locks.
#[cfg(not(loom))]
mod contention {
    use std::cell::Cell;

    thread_local! {
        /// Score over all locks. It grows with each loss and shrinks with each win without a bias;
        /// sixteen wins make up for one loss.
        static LOSSES: Cell<u32> = const { Cell::new(0) };
        /// Number of losses.
        pub(super) static COUNT: Cell<u32> = const { Cell::new(0) };
    }

    /// Spins of the first back-off, and the limit of its doublings. On an Intel Xeon they take from
    /// below a microsecond to some fifty. More doublings give eight threads on one link a higher
    /// rate, and a longer tail of latencies (docs/adr/0011-thresholds.md).
    const SPINS: u32 = 16;
    const DOUBLINGS: u32 = 6;

    const LOSS: u32 = 16;

    pub(super) fn won() {
        LOSSES.set(LOSSES.get().saturating_sub(1));
    }

    #[cold]
    pub(super) fn lost() {
        let losses = LOSSES.get();
        COUNT.set(COUNT.get().wrapping_add(1));
        for _ in 0..SPINS << (losses / LOSS).min(DOUBLINGS) {
            std::hint::spin_loop();
        }
        LOSSES.set((losses + LOSS).min(LOSS * (DOUBLINGS + 1)));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_the_owner_and_a_thread_that_revokes_its_bias_never_hold_it_together() {
        loom::model(|| {
            let lock = Arc::new(BiasedLock::new(0_u32));
            // Thread 1 earns the bias.
            for _ in 0..2 {
                drop(lock.try_lock_as(1));
            }
            assert_eq!(lock.bias.load(Ordering::Relaxed), 1);
            let enter = |lock: &BiasedLock<u32>, me: u64| {
                // loom's cell panics when two threads are inside at a time.
                lock.try_lock_as(me).map(|mut value| *value += 1).is_some()
            };
            let other = {
                let lock = lock.clone();
                thread::spawn(move || u32::from(enter(&lock, 2)))
            };
            // Each may lose, since a try-lock gives no thread a turn. What counts is that no step
            // is lost.
            let mut won = u32::from(enter(&lock, 1));
            won += u32::from(enter(&lock, 1));
            won += other.join().unwrap();
            assert_eq!(*lock.try_lock_as(3).unwrap(), won);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_held_lock_turns_others_away_before_and_after_the_bias() {
        let lock = BiasedLock::new(0_u64);
        for turn in 0..1000 {
            let mut guard = lock.try_lock().unwrap();
            assert!(lock.try_lock().is_none(), "a lock inside the lock");
            assert_eq!(*guard, turn);
            *guard += 1;
        }
        let biased = cfg!(miri) || lock.barrier.heavy && lock.barrier.reachable;
        assert_eq!(lock.bias.load(Ordering::Relaxed) != NO_THREAD, biased);
        std::thread::scope(|scope| {
            let guard = lock.try_lock().unwrap();
            scope.spawn(|| assert!(lock.try_lock().is_none())).join().unwrap();
            drop(guard);
            scope.spawn(|| assert!(lock.try_lock().is_some())).join().unwrap();
        });
        assert_eq!(*lock.lock(), 1000);
    }

    #[test]
    fn miri_threads_count_under_it_without_losing_a_step() {
        let rounds = if cfg!(miri) { 300 } else { 50_000 };
        for _ in 0..if cfg!(miri) { 1 } else { 20 } {
            let lock = BiasedLock::new(0_u64);
            let count = |times: u64| {
                for _ in 0..times {
                    *lock.lock() += 1;
                }
            };
            // One thread earns the bias, then others come in the middle of its work.
            count(600);
            std::thread::scope(|scope| {
                scope.spawn(|| count(rounds));
                scope.spawn(|| count(rounds));
                count(rounds);
            });
            assert_eq!(*lock.lock(), 600 + 3 * rounds);
        }
    }
}
