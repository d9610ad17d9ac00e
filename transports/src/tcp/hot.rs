//! Sockets that polls read directly, and their place in the epoll set.

use super::device::{TcpDevice, TcpPolling};
use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::contract::Batch;

/// Sockets that polls read directly, at most. Of more, the epoll set tells sooner which have
/// something.
pub(super) const HOT: usize = 4;

/// Messages in a row, without a sleep, after which a socket that is read directly leaves the epoll
/// set.
const APART: u32 = 64;

/// Time for which a socket is read directly after something came on it.
const WARM: u64 = 1000 * TICKS_PER_MICROSECOND;

/// Socket that polls read directly.
#[derive(Debug)]
pub(super) struct Hot {
    pub(super) place: u32,
    /// Ticks at which something last came.
    since: u64,
    /// Polls since the last sleep that have read something. From [`APART`] on the socket is not in
    /// the epoll set.
    pub(super) streak: u32,
}

impl TcpDevice {
    /// Reads the sockets on which something came a moment ago.
    pub(super) fn read_hot(&self, polling: &mut TcpPolling, batch: &mut Batch) {
        let now = ticks();
        for at in (0..polling.hot.len()).rev() {
            let Some(&Hot { place, since, .. }) = polling.hot.get(at) else { continue };
            if self.receive(polling, place, batch) {
                if let Some(hot) = polling.hot.get_mut(at).filter(|hot| hot.place == place) {
                    (hot.since, hot.streak) = (now, hot.streak.saturating_add(1));
                    if hot.streak == APART {
                        self.take_apart(polling, at);
                    }
                }
            } else if now.wrapping_sub(since) > WARM
                && !Self::is_awaited(polling, place)
                && self.put_back(polling, at)
            {
                polling.hot.swap_remove(at);
                if let Some(Some(entry)) = polling.inbound.get_mut(place as usize) {
                    entry.acknowledge(&self.shared, true);
                }
            }
        }
    }

    /// Takes a hot socket out of the epoll set, unless a thread sleeps on that.
    #[cold]
    fn take_apart(&self, polling: &mut TcpPolling, at: usize) {
        let TcpPolling { hot, inbound, .. } = polling;
        let entry = inbound.get(hot[at].place as usize).and_then(Option::as_ref);
        let is_apart = !self.shared.sleepers.any()
            && entry.is_some_and(|entry| entry.link.keep_apart(&self.shared, true).is_ok());
        if !is_apart {
            hot[at].streak = 0;
        }
    }

    /// Puts a hot socket back into the epoll set. Returns `false` if the kernel lacks a resource.
    pub(super) fn put_back(&self, polling: &mut TcpPolling, at: usize) -> bool {
        let TcpPolling { hot, inbound, .. } = polling;
        let streak = std::mem::take(&mut hot[at].streak);
        let entry = inbound.get(hot[at].place as usize).and_then(Option::as_ref);
        let is_back = streak < APART
            || entry.is_none_or(|entry| entry.link.keep_apart(&self.shared, false).is_ok());
        if !is_back {
            hot[at].streak = streak;
        }
        is_back
    }

    /// Returns `true` if an operation's end is waited for on that socket.
    fn is_awaited(polling: &TcpPolling, index: u32) -> bool {
        let entry = polling.inbound.get(index as usize).and_then(Option::as_ref);
        entry.is_some_and(|entry| !entry.link.has_ended() && entry.link.has_bodies())
    }
}

impl TcpPolling {
    /// Has polls read a socket directly.
    pub(super) fn warm(&mut self, index: u32) {
        let now = ticks();
        if let Some(hot) = self.hot.iter_mut().find(|hot| hot.place == index) {
            hot.since = now;
        } else if self.hot.len() < HOT {
            self.hot.push(Hot { place: index, since: now, streak: 0 });
        }
    }
}
