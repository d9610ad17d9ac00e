//! What a device does while streams wait for words, as it was measured on real ones.

use super::lock;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often a waiting stream looks at its word.
const LOOK: Duration = Duration::from_micros(20);

/// The streams of a device that wait at this moment. Once they take up all connections to the
/// device, no stream moves, the library's own included; and while any waits, calls that wait for
/// the whole device block.
#[derive(Debug)]
pub(super) struct Standstill {
    connections: usize,
    waiting: Mutex<usize>,
    /// Resident kernels that were launched, and those of them that have ended.
    kernels: Mutex<(u64, u64)>,
    ended: Condvar,
    changed: Condvar,
}

impl Standstill {
    pub(super) fn over(connections: usize) -> Self {
        Self {
            connections,
            waiting: Mutex::default(),
            kernels: Mutex::default(),
            ended: Condvar::new(),
            changed: Condvar::new(),
        }
    }

    /// Before each job of a stream.
    pub(super) fn pass(&self) {
        self.block_while(|waiting| waiting >= self.connections);
    }

    /// As freeing memory does, and waiting for the device.
    pub(super) fn until_none_waits(&self) {
        self.block_while(|waiting| waiting > 0);
        let mut kernels = lock(&self.kernels);
        // For those that are there, and not for those that come.
        let there = kernels.0;
        while kernels.1 < there {
            kernels = self.ended.wait(kernels).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A resident kernel is launched; it has ended when the guard is dropped.
    pub(super) fn kernel_begins(self: &Arc<Self>) -> Running {
        lock(&self.kernels).0 += 1;
        Running(Arc::clone(self))
    }

    /// A stream waits.
    pub(super) fn hold(&self, is_released: impl Fn() -> bool) {
        if is_released() {
            return;
        }
        *lock(&self.waiting) += 1;
        while !is_released() {
            std::thread::sleep(LOOK);
        }
        *lock(&self.waiting) -= 1;
        self.changed.notify_all();
    }

    fn block_while(&self, blocks: impl Fn(usize) -> bool) {
        let mut waiting = lock(&self.waiting);
        while blocks(*waiting) {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A resident kernel runs.
pub(super) struct Running(Arc<Standstill>);

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.0.kernels).1 += 1;
        self.0.ended.notify_all();
    }
}
