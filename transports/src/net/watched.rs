//! A descriptor in an epoll set.

use crate::fork::Owner;
use rustix::event::epoll;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A descriptor that leaves its epoll set, if it is there, before it is closed: where a forked
/// child has it too, the kernel would report its end for ever.
#[derive(Debug)]
pub struct Watched<T: AsFd> {
    fd: T,
    epoll: Arc<OwnedFd>,
    owner: Owner,
}

impl<T: AsFd> Watched<T> {
    /// Wraps a descriptor that is put into this set, or may be.
    pub fn new(fd: T, epoll: &Arc<OwnedFd>) -> Self {
        Self { fd, epoll: epoll.clone(), owner: Owner::this_process() }
    }
}

impl<T: AsFd> AsFd for Watched<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl<T: AsFd> Deref for Watched<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.fd
    }
}

impl<T: AsFd> DerefMut for Watched<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.fd
    }
}

impl<T: AsFd> Drop for Watched<T> {
    fn drop(&mut self) {
        // The epoll set is the parent's.
        if self.owner.is_here() {
            let _ = epoll::delete(&self.epoll, &self.fd);
        }
    }
}
