//! The thread that sends what was left for a poll that does not come.
//!
//! A device that gathers messages starts it with the first message that it leaves. It sleeps while
//! nothing is left, and ends with the device.

use super::shared::TcpShared;
use crate::clock::TICKS_PER_MICROSECOND;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, park, sleep};
use std::time::Duration;

/// Time that a message may be left. A device that is polled sends it far sooner.
const PATIENCE: Duration = Duration::from_millis(1);

/// The same in ticks.
const OLD: u64 = 1000 * TICKS_PER_MICROSECOND;

/// Looks that find nothing left before the thread goes to sleep.
const LOOKS: u32 = 20;

/// A device's thread, if it has one.
#[derive(Debug, Default)]
pub(super) struct Flusher {
    is_awake: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Flusher {
    /// Sees to it that the thread looks at what is left.
    #[inline]
    pub(super) fn wake(&self, shared: &Arc<TcpShared>) {
        // The swap is rare: while messages are left again and again, the thread stays awake.
        if !self.is_awake.load(Ordering::SeqCst) && !self.is_awake.swap(true, Ordering::SeqCst) {
            self.start(shared);
        }
    }

    #[cold]
    fn start(&self, shared: &Arc<TcpShared>) {
        let mut thread = self.thread.lock();
        if let Some(thread) = &*thread {
            return thread.thread().unpark();
        }
        let shared = Arc::downgrade(shared);
        let started =
            std::thread::Builder::new().name("carrack-tcp".into()).spawn(move || serve(&shared));
        match started {
            Ok(started) => *thread = Some(started),
            // The next poll sends what is left, and the next message tries again.
            Err(error) => {
                self.is_awake.store(false, Ordering::SeqCst);
                tracing::warn!(%error, "no thread to send messages while no thread polls");
            }
        }
    }

    /// Ends the thread, in the process that has started it.
    pub(super) fn end(&self) {
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            if thread.thread().id() != std::thread::current().id() {
                // It fails only if the thread has panicked.
                let _ = thread.join();
            }
        }
    }
}

fn serve(shared: &Weak<TcpShared>) {
    let mut looks = 0;
    loop {
        sleep(PATIENCE);
        let Some(shared) = shared.upgrade().filter(|shared| !shared.is_closed()) else { return };
        // A link that sends by itself needs no help, and its lock is left alone.
        looks = if shared.send_left(OLD) { 0 } else { looks + 1 };
        if looks < LOOKS {
            continue;
        }
        looks = 0;
        shared.flusher.is_awake.store(false, Ordering::SeqCst);
        // A message that was left just now saw the thread awake.
        if !shared.left.lock().is_empty() {
            shared.flusher.is_awake.store(true, Ordering::SeqCst);
            continue;
        }
        drop(shared);
        park();
    }
}
