//! What a device does while streams wait for words, as it was measured on real ones.

use super::lock;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often a waiting stream looks at its word.
const LOOK: Duration = Duration::from_micros(20);

/// The streams of a device that wait at this moment. Once they take up all connections to the device, no stream moves, the
/// library's own included; and while any waits, calls that wait for the whole device block.
#[derive(Debug)]
pub(super) struct Standstill {
    connections: usize,
    waiting: Mutex<usize>,
    changed: Condvar,
}

impl Standstill {
    pub(super) fn over(connections: usize) -> Self {
        Self { connections, waiting: Mutex::default(), changed: Condvar::new() }
    }

    /// Before each job of a stream.
    pub(super) fn pass(&self) {
        self.block_while(|waiting| waiting >= self.connections);
    }

    /// As freeing memory does, and waiting for the device.
    pub(super) fn until_none_waits(&self) {
        self.block_while(|waiting| waiting > 0);
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
