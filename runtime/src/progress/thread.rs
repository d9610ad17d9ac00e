//! A thread that makes progress, for programs which ask for one.

use super::Core;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A thread that makes progress until this is dropped, and sleeps when there is nothing to do.
pub(crate) struct ProgressThread {
    inner: Arc<Core>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ProgressThread {
    pub(crate) fn start(inner: &Arc<Core>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (inner, stop) = (inner.clone(), stop.clone());
            let name = format!("carrack-{}", inner.rank.0);
            std::thread::Builder::new().name(name).spawn(move || run(&inner, &stop))?
        };
        Ok(Self { inner: inner.clone(), stop, thread: Some(thread) })
    }
}

fn run(inner: &Core, stop: &AtomicBool) {
    // Errors of progress are kept for the user's calls. The remaining error is that this is a
    // fork, which has no such thread.
    let _ = inner.wait_keeping(&|| stop.load(Ordering::Acquire), None);
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        if self.inner.is_forked() {
            // The thread is its parent's: here is none to wait for.
            return std::mem::forget(self.thread.take());
        }
        self.stop.store(true, Ordering::Release);
        self.inner.sleepers.wake();
        // The last handle may be dropped by a handler, which runs on that very thread: then it ends
        // by itself.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            let _ = thread.join();
        }
    }
}
