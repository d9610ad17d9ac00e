//! A step that one thread takes without an atomic exchange, until a second thread comes.
//!
//! A step that many threads may take, each by an atomic exchange, is most often taken by one. So
//! the first thread that comes is *alone*: it takes the step by plain loads and stores. The second
//! thread ends that for good, and from then on all take the step by exchange. Unlike
//! [`BiasedLock`](super::BiasedLock) this is no lock: a thread waits only while the first one ends
//! its last step alone.
//!
//! Correctness: the thread that is alone sets `inside`, then checks that it is still alone. The
//! thread that ends this first announces the end, then reads `inside`. Between the two steps each
//! side has a barrier; the first thread's is the free half of [`super::barrier`]. So at least one
//! of them sees the other.

use super::barrier::{Barrier, heavy, light};
use super::biased_lock::this_thread;
use super::primitives::{AtomicBool, AtomicU64, Ordering, spin_loop};

/// No thread has come so far.
const NO_THREAD: u64 = 0;
/// A second thread has come, and waits until the first one has finished its step.
const ENDING: u64 = u64::MAX - 1;
/// All threads take the step by exchange.
const SHARED: u64 = u64::MAX;

/// State of a step: taken by one thread, or by several. See the [module](self).
#[derive(Debug)]
pub(super) struct Alone {
    /// A thread's number, or one of the above.
    who: AtomicU64,
    /// Flag of the thread that is, or was, alone: only that thread writes it.
    inside: AtomicBool,
    barrier: Barrier,
}

/// This thread is alone until this is dropped.
pub(super) struct AloneGuard<'a>(&'a Alone);

impl Drop for AloneGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: the next thread sees what was done alone.
        self.0.inside.store(false, Ordering::Release);
    }
}

impl Alone {
    /// Makes the state before any thread has come. Where barriers do not reach threads, all take
    /// the step by exchange from the beginning.
    pub(super) fn new() -> Self {
        let barrier = Barrier::within_process();
        let can = cfg!(any(loom, miri)) || barrier.heavy && barrier.reachable;
        let who = if can { NO_THREAD } else { SHARED };
        Self { who: AtomicU64::new(who), inside: AtomicBool::new(false), barrier }
    }

    /// Returns `Some` if this thread takes the step alone. `None`: this and all other threads take
    /// it by exchange from now on.
    #[inline(always)]
    pub(super) fn enter(&self) -> Option<AloneGuard<'_>> {
        let me = this_thread();
        if self.who.load(Ordering::Relaxed) == me {
            self.inside.store(true, Ordering::Relaxed);
            // A real fence in models and under Miri. Elsewhere a thread is alone only if a barrier
            // reaches it.
            light(cfg!(any(loom, miri)));
            if self.who.load(Ordering::Relaxed) == me {
                return Some(AloneGuard(self));
            }
            self.inside.store(false, Ordering::Release);
        }
        // Acquire: what was done alone has ended, and is seen.
        if self.who.load(Ordering::Acquire) == SHARED { None } else { self.come(me) }
    }

    /// Registers this thread as the first, or ends the time of the first.
    #[cold]
    fn come(&self, me: u64) -> Option<AloneGuard<'_>> {
        match self.who.compare_exchange(NO_THREAD, me, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => return self.enter(),
            Err(ENDING | SHARED) => {}
            Err(other) => {
                let begun = self
                    .who
                    .compare_exchange(other, ENDING, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
                if begun {
                    heavy(self.barrier);
                    wait_until(|| !self.inside.load(Ordering::Acquire));
                    self.who.store(SHARED, Ordering::Release);
                }
            }
        }
        wait_until(|| self.who.load(Ordering::Acquire) == SHARED);
        None
    }
}

/// Waits for a thread that needs some instructions more, unless the system has taken its core.
fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        #[cfg(not(loom))]
        std::thread::yield_now();
        spin_loop();
    }
}

#[cfg(test)]
fn step(alone: &Alone, count: &super::primitives::AtomicU32) {
    match alone.enter() {
        Some(_inside) => count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
        None => _ = count.fetch_add(1, Ordering::Relaxed),
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::super::primitives::AtomicU32;
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_no_step_is_lost_when_another_thread_comes() {
        loom::model(|| {
            let shared = Arc::new((Alone::new(), AtomicU32::new(0)));
            step(&shared.0, &shared.1);
            let other = {
                let shared = shared.clone();
                thread::spawn(move || step(&shared.0, &shared.1))
            };
            step(&shared.0, &shared.1);
            step(&shared.0, &shared.1);
            other.join().unwrap();
            assert_eq!(shared.1.load(Ordering::Relaxed), 4);
        });
    }

    #[test]
    fn loom_of_two_that_come_at_once_one_is_alone_or_none() {
        loom::model(|| {
            let shared = Arc::new((Alone::new(), AtomicU32::new(0)));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let shared = shared.clone();
                    thread::spawn(move || step(&shared.0, &shared.1))
                })
                .collect();
            for other in others {
                other.join().unwrap();
            }
            assert_eq!(shared.1.load(Ordering::Relaxed), 2);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::primitives::AtomicU32;
    use super::*;

    #[test]
    fn miri_no_step_is_lost_when_others_come_in_the_midst_of_the_first_ones() {
        let rounds = if cfg!(miri) { 100 } else { 20_000 };
        for _ in 0..if cfg!(miri) { 1 } else { 20 } {
            let (alone, count) = (Alone::new(), AtomicU32::new(0));
            let steps = || (0..rounds).for_each(|_| step(&alone, &count));
            step(&alone, &count);
            std::thread::scope(|scope| {
                scope.spawn(steps);
                scope.spawn(steps);
                steps();
            });
            assert_eq!(count.into_inner(), 3 * rounds + 1);
        }
    }

    #[test]
    fn miri_the_first_thread_is_alone_until_the_second_comes() {
        let alone = Alone::new();
        let can = alone.who.load(Ordering::Relaxed) == NO_THREAD;
        for _ in 0..3 {
            assert_eq!(alone.enter().is_some(), can);
        }
        std::thread::scope(|scope| scope.spawn(|| assert!(alone.enter().is_none())).join())
            .unwrap();
        assert!(alone.enter().is_none());
    }
}
