//! Behaviour of a device while streams wait for words, as measured on real ones.
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

/// Interval at which a waiting stream polls its word.
const LOOK: Duration = Duration::from_micros(20);

/// The streams of a device that wait now. Once they take up all connections to the device, no
/// stream moves, the library's own included. While any waits, calls that wait for the whole device
/// block.
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

    /// Blocks while streams that wait take up all connections. A stream calls it before each job.
    pub(super) fn pass(&self) {
        self.block_while(|waiting| waiting >= self.connections);
    }

    /// Blocks as freeing memory, and waiting for the device, do.
    pub(super) fn until_none_waits(&self) {
        self.block_while(|waiting| waiting > 0);
        let mut kernels = self.kernels.lock();
        // Waits for the present kernels, not for later ones.
        let there = kernels.0;
        while kernels.1 < there {
            self.ended.wait(&mut kernels);
        }
    }

    /// Counts the launch of a resident kernel, which ends when the guard is dropped.
    pub(super) fn kernel_begins(self: &Arc<Self>) -> Running {
        self.kernels.lock().0 += 1;
        Running(Arc::clone(self))
    }

    /// Makes a stream wait.
    pub(super) fn hold(&self, is_released: impl Fn() -> bool) {
        if is_released() {
            return;
        }
        *self.waiting.lock() += 1;
        while !is_released() {
            std::thread::sleep(LOOK);
        }
        *self.waiting.lock() -= 1;
        self.changed.notify_all();
    }

    fn block_while(&self, blocks: impl Fn(usize) -> bool) {
        let mut waiting = self.waiting.lock();
        while blocks(*waiting) {
            self.changed.wait(&mut waiting);
        }
    }
}

/// Guard of a running resident kernel.
pub(super) struct Running(Arc<Standstill>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kernels.lock().1 += 1;
        self.0.ended.notify_all();
    }
}
