//! Writes to stdout or stderr without ever blocking the event loop.
//!
//! Setting O_NONBLOCK would do it too, but the flag belongs to the open file, which the user's
//! shell and others share. So each write is asked for first, and is small enough for a pipe that
//! says it has room (POLLOUT on a pipe promises a page, PIPE_BUF bytes).

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, write};

/// Bytes that a writable pipe takes without blocking.
const PIPE_BUF: usize = 4096;

/// Bytes that may wait here before the producers pause.
const FULL: usize = 1024 * 1024;

const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A queue of bytes before a descriptor of this process.
pub(super) struct Sink {
    fd: BorrowedFd<'static>,
    /// A write to a file never waits for anybody, and its size is not limited.
    chunk: usize,
    queue: Vec<u8>,
    written: usize,
}

/// Result of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    /// Everything is written.
    All,
    /// Its reader has to make room first.
    Blocked,
    /// Its reader is gone; what was queued is dropped, now and later.
    Closed,
}

impl Sink {
    /// A queue before this descriptor.
    pub(super) fn new(fd: BorrowedFd<'static>) -> Self {
        let is_file = fstat(fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        Self {
            fd,
            chunk: if is_file { usize::MAX } else { PIPE_BUF },
            queue: Vec::new(),
            written: 0,
        }
    }

    /// Returns the queue. Callers append whole lines only, because the queue is written in one
    /// piece.
    pub(super) fn queue(&mut self) -> &mut Vec<u8> {
        &mut self.queue
    }

    /// Returns `true` if producers should pause.
    pub(super) fn is_full(&self) -> bool {
        self.queue.len() - self.written >= FULL
    }

    /// Writes as much as can be written without waiting.
    pub(super) fn flush(&mut self) -> Flushed {
        while self.written < self.queue.len() {
            let mut ready = [PollFd::new(&self.fd, PollFlags::OUT)];
            match poll(&mut ready, Some(&NO_TIME)) {
                Ok(0) => return Flushed::Blocked,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return self.close(),
            }
            let rest = &self.queue[self.written..];
            match write(self.fd, &rest[..rest.len().min(self.chunk)]) {
                Ok(written) => self.written += written,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Flushed::Blocked,
                // The reader is gone, or the disk is full: this sink can report nothing.
                Err(_) => return self.close(),
            }
        }
        self.queue.clear();
        self.written = 0;
        // A burst should not be held for the rest of the job.
        self.queue.shrink_to(FULL);
        Flushed::All
    }

    fn close(&mut self) -> Flushed {
        self.queue.clear();
        self.written = 0;
        Flushed::Closed
    }

    /// Returns `true` if two descriptors lead to the same place, so that one queue must serve both.
    pub(super) fn are_one(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
        match (fstat(a), fstat(b)) {
            (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
            _ => false,
        }
    }
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd
    }
}
