//! Names of sockets in the epoll set.

pub(super) const LISTENER: u64 = 0;
pub(super) const BELL: u64 = 1;
pub(super) const TIMER: u64 = 2;
pub(super) const INCOMING: u64 = 1 << 32;
pub(super) const OUTGOING: u64 = 2 << 32;
pub(super) const STRANGER: u64 = 3 << 32;

#[allow(clippy::cast_possible_truncation, reason = "the low half is the number")]
pub(super) fn number(name: u64) -> u32 {
    name as u32
}

pub(super) fn name_of(index: u32) -> u64 {
    INCOMING | u64::from(index)
}

/// Returns the name of a pending connection.
pub(super) fn name_of_stranger(place: u32) -> u64 {
    STRANGER | u64::from(place)
}
