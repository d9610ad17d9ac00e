//! Names of sockets in the epoll set. The low half of a name is a place.

pub(super) const LISTENER: u64 = 0;
pub(super) const BELL: u64 = 1;
pub(super) const TIMER: u64 = 2;
pub(super) const LINK: u64 = 1 << 32;
pub(super) const STRANGER: u64 = 2 << 32;
