//! Threads that sleep until another thread wakes them.
//!
//! A thread that changes a state looks for sleepers, and rings if there are any. A thread that is
//! about to sleep announces it, and looks once more at the state it waits for. Between the two
//! steps each side has a barrier; the changing thread's is the free half of [`super::barrier`]. So
//! a change made while a thread goes to sleep is seen, or rung for.

use super::barrier::{Barrier, heavy, light};
use super::primitives::{AtomicBool, AtomicU32, Ordering};

/// Threads that sleep, and the bell that wakes all of them.
#[derive(Debug)]
pub struct Sleepers {
    count: AtomicU32,
    bell: Bell,
    /// The bell may ring. Set after it is rung, so that who gets up leaves a late ring alone.
    has_rung: AtomicBool,
    barrier: Barrier,
}

impl Sleepers {
    /// Makes a bell without sleepers.
    ///
    /// # Errors
    /// No descriptor is left.
    #[cfg(not(loom))]
    pub fn new() -> Result<Self, rustix::io::Errno> {
        Ok(Self::with_bell(Bell::new()?, Barrier::within_process()))
    }

    /// Makes a bell whose two sides have a fence each, for a state that changes seldom: a thread
    /// goes to sleep without a system call.
    ///
    /// # Errors
    /// No descriptor is left.
    #[cfg(not(loom))]
    pub fn fenced() -> Result<Self, rustix::io::Errno> {
        Ok(Self::with_bell(Bell::new()?, Barrier::FENCES))
    }

    fn with_bell(bell: Bell, barrier: Barrier) -> Self {
        Self { count: AtomicU32::new(0), bell, has_rung: AtomicBool::new(false), barrier }
    }

    #[cold]
    fn ring(&self) {
        self.bell.ring();
        self.has_rung.store(true, Ordering::Release);
    }

    /// Wakes sleepers after a change, since those that wait for it may have gone to sleep.
    #[inline]
    pub fn wake(&self) {
        light(!(self.barrier.heavy && self.barrier.reachable));
        if self.count.load(Ordering::Relaxed) != 0 {
            self.ring();
        }
    }

    /// Announces a sleeper, until the value is dropped. State that it looks at after this is
    /// changed only with a ring.
    pub fn enter(&self) -> Asleep<'_> {
        self.begin();
        Asleep(self)
    }

    /// Announces a sleeper, until [`end`](Self::end) is called for it.
    pub fn begin(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        heavy(self.barrier);
    }

    /// Returns `true` while there is one.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    /// Ends the sleep of one.
    pub fn end(&self) {
        // The bell rings for all sleepers, so the last one silences it.
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1
            && self.has_rung.swap(false, Ordering::AcqRel)
        {
            self.bell.silence();
            // The bell may have rung just now for a sleeper that came meanwhile.
            if self.count.load(Ordering::Acquire) != 0 {
                self.ring();
            }
        }
    }
}

/// Descriptor on which a sleeper waits, with others if it likes: readable while the bell rings.
#[cfg(not(loom))]
impl std::os::fd::AsFd for Sleepers {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.bell.0.as_fd()
    }
}

/// A thread that sleeps, or is about to.
#[derive(Debug)]
pub struct Asleep<'a>(&'a Sleepers);

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A bell that rings until it is silenced: the kernel's eventfd, or a model of it.
#[derive(Debug)]
struct Bell(#[cfg(not(loom))] std::os::fd::OwnedFd, #[cfg(loom)] AtomicU32);

#[cfg(not(loom))]
impl Bell {
    fn new() -> Result<Self, rustix::io::Errno> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// In the model each call has the count to itself.
#[cfg(loom)]
impl Bell {
    fn ring(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn silence(&self) {
        self.0.fetch_and(0, Ordering::AcqRel);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    struct Room {
        sleepers: Sleepers,
        changed: AtomicBool,
    }

    impl Room {
        fn new() -> Arc<Self> {
            let sleepers = Sleepers::with_bell(Bell(AtomicU32::new(0)), Barrier::within_process());
            Arc::new(Self { sleepers, changed: AtomicBool::new(false) })
        }

        fn change(&self) {
            self.changed.store(true, Ordering::Relaxed);
            self.sleepers.wake();
        }

        fn has_changed(&self) -> bool {
            self.changed.load(Ordering::Relaxed)
        }

        fn rings(&self) -> bool {
            self.sleepers.bell.0.load(Ordering::Acquire) != 0
        }
    }

    #[test]
    fn loom_a_change_made_while_a_thread_goes_to_sleep_is_seen_or_rung_for() {
        loom::model(|| {
            let room = Room::new();
            let other = {
                let room = room.clone();
                thread::spawn(move || room.change())
            };
            let _asleep = room.sleepers.enter();
            let seen = room.has_changed();
            other.join().unwrap();
            assert!(seen || room.rings());
        });
    }

    #[test]
    fn loom_a_thread_that_gets_up_does_not_silence_what_was_rung_for_the_next_sleeper() {
        loom::model(|| {
            let room = Room::new();
            let others = [
                thread::spawn({
                    let room = room.clone();
                    move || drop(room.sleepers.enter())
                }),
                thread::spawn({
                    let room = room.clone();
                    move || room.change()
                }),
            ];
            let _asleep = room.sleepers.enter();
            let seen = room.has_changed();
            for other in others {
                other.join().unwrap();
            }
            assert!(seen || room.rings());
        });
    }
}

#[cfg(all(test, not(loom), not(miri)))]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::fd::AsFd;

    #[test]
    fn the_bell_rings_for_those_who_sleep_and_is_silent_when_the_last_one_is_up() {
        let sleepers = Sleepers::new().unwrap();
        let rings = || {
            let mut fds = [PollFd::from_borrowed_fd(sleepers.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        sleepers.wake();
        assert!(!rings(), "no thread sleeps");
        let (one, other) = (sleepers.enter(), sleepers.enter());
        sleepers.wake();
        assert!(rings());
        drop(one);
        assert!(rings(), "the other one may not have heard it yet");
        drop(other);
        assert!(!rings());
    }
}
