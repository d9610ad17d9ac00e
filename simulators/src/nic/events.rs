//! Events that programs wait for: a queue of them behind a descriptor that is readable while there
//! are some.
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// Events in order. The descriptor counts them, so `take` blocks unless the reader made it
/// non-blocking.
#[derive(Debug)]
pub(super) struct EventQueue<T> {
    /// `None` is an event whose object is gone: its count cannot be taken back.
    events: Mutex<VecDeque<Option<T>>>,
    fd: OwnedFd,
}

impl<T> EventQueue<T> {
    pub(super) fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC)?;
        Ok(Self { events: Mutex::default(), fd })
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(super) fn push(&self, event: T) {
        self.events.lock().push_back(Some(event));
        // A counter that is full is readable anyway.
        let _ = rustix::io::write(self.fd.as_fd(), &1_u64.to_ne_bytes());
    }

    /// Takes the next event.
    ///
    /// # Errors
    /// EAGAIN: there is none, and the descriptor does not block.
    pub(super) fn take(&self) -> Result<T, Errno> {
        loop {
            let mut count = [0; 8];
            match rustix::io::read(self.fd.as_fd(), &mut count) {
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
                Ok(_) => {}
            }
            if let Some(Some(event)) = self.events.lock().pop_front() {
                return Ok(event);
            }
        }
    }

    /// Removes the events of an object that is being destroyed.
    pub(super) fn forget(&self, gone: impl Fn(&T) -> bool) {
        for slot in self.events.lock().iter_mut() {
            if slot.as_ref().is_some_and(&gone) {
                *slot = None;
            }
        }
    }
}

/// Events of an object that the program has received and not yet acknowledged. Until it has, the
/// object may not be destroyed.
#[derive(Debug, Default)]
pub(super) struct Unacknowledged {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Unacknowledged {
    pub(super) fn given(&self) {
        *self.count.lock() += 1;
    }

    pub(super) fn acknowledge(&self, events: u32) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    /// Waits, as libibverbs does, until the program has acknowledged all received events.
    pub(super) fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.changed.wait(&mut count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{OFlags, fcntl_setfl};

    fn readable<T>(queue: &EventQueue<T>) -> bool {
        let mut fds = [PollFd::new(&queue.fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn the_descriptor_is_readable_while_there_are_events() {
        let queue = EventQueue::new().unwrap();
        fcntl_setfl(&queue.fd, OFlags::NONBLOCK).unwrap();
        assert_eq!(queue.take(), Err(Errno::AGAIN));
        queue.push(1);
        queue.push(2);
        assert!(readable(&queue));
        assert_eq!((queue.take(), queue.take()), (Ok(1), Ok(2)));
        assert!(!readable(&queue));
    }

    #[test]
    fn events_of_what_is_gone_are_not_given() {
        let queue = EventQueue::new().unwrap();
        fcntl_setfl(&queue.fd, OFlags::NONBLOCK).unwrap();
        [1, 2, 1].into_iter().for_each(|event| queue.push(event));
        queue.forget(|event| *event == 1);
        assert_eq!((queue.take(), queue.take()), (Ok(2), Err(Errno::AGAIN)));
    }
}
