//! A descriptor in an epoll set.

use crate::fork::Owner;
use rustix::event::epoll;
use rustix::net::{Shutdown, shutdown};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A descriptor that leaves its epoll set, if it is in one, before it is closed, and hangs up if it
/// is a socket. Otherwise, where a forked child has it too, the kernel would report its end for
/// ever, and tell the other end nothing.
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
        // The epoll set and the connection are the parent's.
        if self.owner.is_here() {
            let _ = epoll::delete(&self.epoll, &self.fd);
            let _ = shutdown(&self.fd, Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::greeting::{Carrier as _, Fault};
    use crate::net::packets::Channel;
    use rustix::event::Timespec;
    use rustix::event::epoll::{CreateFlags, EventData, EventFlags};

    #[test]
    fn one_that_is_dropped_is_silent_and_has_hung_up_where_a_forked_child_has_it_too() {
        let set = Arc::new(epoll::create(CreateFlags::CLOEXEC).unwrap());
        let (here, mut there) = Channel::pair().unwrap();
        let _childs = rustix::io::dup(&here).unwrap();
        epoll::add(&set, &here, EventData::new_u64(1), EventFlags::IN).unwrap();
        here.send(b"last", &[]).unwrap();
        drop(Watched::new(here, &set));
        assert_eq!(there.hear(64).unwrap().unwrap(), b"last");
        assert!(matches!(there.hear(64), Err(Fault::Gone(_))));
        drop(there);
        let (mut space, now) =
            ([const { std::mem::MaybeUninit::uninit() }; 1], Timespec::default());
        assert!(epoll::wait(&set, &mut space[..], Some(&now)).unwrap().0.is_empty());
    }
}
