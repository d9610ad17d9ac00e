//! A future that makes progress.

use super::Runtime;
use crate::error::ProgressError;
use crate::progress::{Core, Sleep};
use parking_lot::{Condvar, Mutex};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Calls of progress in one poll, before other tasks have their turn.
const TURNS: usize = 64;

/// The first sleep while something waits that no descriptor tells of; each further one is longer.
const NAP: Duration = Duration::from_micros(100);

impl Runtime {
    /// Returns a future that makes progress on all devices, for an executor that also runs the
    /// futures of operations. It ends when the last handle of the runtime is dropped.
    ///
    /// While there is nothing to do, a thread of its own sleeps on the descriptors of the
    /// transports and wakes it. Errors of progress are kept: the next calls of
    /// [`progress`](Self::progress) and [`wait`](Self::wait) return them.
    pub fn drive(&self) -> Drive {
        // An executor may poll an operation before this.
        self.0.note_driven();
        let (runtime, sleeper, quiet_since) = (Arc::downgrade(&self.0), None, None);
        Drive { runtime, sleeper, quiet_since, nap: NAP }
    }
}

/// Future that makes progress on all devices: [`Runtime::drive`] returns it.
#[must_use = "no progress is made until an executor runs this"]
pub struct Drive {
    runtime: Weak<Core>,
    sleeper: Option<Sleeper>,
    quiet_since: Option<Instant>,
    nap: Duration,
}

impl Future for Drive {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(inner) = self.runtime.upgrade() else { return Poll::Ready(()) };
        inner.note_driven();
        for _ in 0..TURNS {
            match inner.progress_everything_keeping() {
                Ok(true) => (self.quiet_since, self.nap) = (None, NAP),
                Ok(false) => {
                    let now = Instant::now();
                    let since = *self.quiet_since.get_or_insert(now);
                    if now - since >= inner.settings.spin() && self.sleep(&inner, context) {
                        return Poll::Pending;
                    }
                    break;
                }
                // A handler has woken a task that polls this future at once.
                Err(ProgressError::InHandler) => break,
                Err(_) => return Poll::Ready(()),
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drive {
    /// Lets the thread sleep, and then wake this future. Returns `false` if the system refused the
    /// thread.
    fn sleep(&mut self, inner: &Core, context: &Context<'_>) -> bool {
        let sleep = inner.sleep_apart(&mut self.nap);
        if self.sleeper.is_none() {
            self.sleeper = Sleeper::start(format!("carrack-drive-{}", inner.rank.0)).ok();
        }
        match &self.sleeper {
            Some(sleeper) => sleeper.sleep(sleep, context.waker().clone()),
            None => return false,
        }
        true
    }
}

/// A thread that sleeps, and then wakes a future.
///
/// It holds no runtime, and ends by itself soon after this is dropped.
struct Sleeper(Arc<SleeperShared>);

#[derive(Default)]
struct SleeperShared {
    state: Mutex<SleeperState>,
    changed: Condvar,
}

#[derive(Default)]
struct SleeperState {
    next: Option<(Sleep, Waker)>,
    /// Function that wakes the thread out of its sleep.
    end: Option<Box<dyn Fn() + Send>>,
    stops: bool,
}

impl Sleeper {
    fn start(name: String) -> std::io::Result<Self> {
        let shared = Arc::<SleeperShared>::default();
        let sleeps = shared.clone();
        std::thread::Builder::new().name(name).spawn(move || sleeps.run())?;
        Ok(Self(shared))
    }

    fn sleep(&self, sleep: Sleep, waker: Waker) {
        let mut state = self.0.state.lock();
        // A future that was polled by another waker is woken by the new one.
        let before = state.next.replace((sleep, waker));
        if let Some(end) = &state.end {
            end();
        }
        drop(state);
        self.0.changed.notify_one();
        drop(before);
    }
}

impl SleeperShared {
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.stops {
            let Some((sleep, waker)) = state.next.take() else {
                self.changed.wait(&mut state);
                continue;
            };
            state.end = Some(Box::new(sleep.end()));
            drop(state);
            sleep.run(&|| self.has_news(), None);
            // The devices go first: the future may end the runtime.
            drop(sleep);
            self.state.lock().end = None;
            // Without the lock: this may poll the future, or drop it.
            waker.wake();
            state = self.state.lock();
        }
    }

    fn has_news(&self) -> bool {
        let state = self.state.lock();
        state.stops || state.next.is_some()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.stops = true;
        if let Some(end) = &state.end {
            end();
        }
        drop(state);
        self.0.changed.notify_one();
    }
}

impl std::fmt::Debug for Drive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Drive")
    }
}
