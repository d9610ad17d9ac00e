//! The end of a device: what is left goes out, and what comes is dropped.

use super::device::{TcpDevice, TcpPolling};
use super::outgoing::Outgoing;
use super::shared::TcpShared;
use crate::contract::{Batch, Closing, DownCause};
use crate::net::pending::Pending;
use crate::net::sockets;
use crate::stderr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The links whose peers have not taken everything yet, while their device closes.
#[derive(Debug)]
pub(super) struct TcpClosing(Vec<LeavingLink>);

impl TcpClosing {
    /// Takes out the links that have ended, and ends those whose peers have taken nothing within
    /// the limit.
    fn look(&mut self, shared: &TcpShared) -> Closing {
        let mut of_all = Closing::Over;
        self.0.retain_mut(|leaving| {
            let state = leaving.look(shared);
            of_all = of_all.max(state);
            state != Closing::Over
        });
        of_all
    }
}

/// A link whose peer has not taken everything yet.
#[derive(Debug)]
struct LeavingLink {
    link: Arc<Outgoing>,
    left: BytesLeft,
    /// Time when it fails, unless the peer takes something before.
    until: Instant,
}

impl LeavingLink {
    fn look(&mut self, shared: &TcpShared) -> Closing {
        if self.link.has_closed(shared) {
            return Closing::Over;
        }
        let now = Instant::now();
        let before = std::mem::replace(&mut self.left, self.link.left());
        if self.left.has_shrunk_since(&before) {
            self.until = now + shared.options.timeout;
            return Closing::Moving;
        }
        if now < self.until {
            return Closing::Waiting;
        }
        stderr::say(format_args!(
            "up to {} bytes to rank {} may be lost, since this rank ends and that one has taken \
             nothing for {} s: let it make progress until it has all, or raise \
             CARRACK_PEER_TIMEOUT",
            self.left.bytes,
            self.link.peer.0,
            shared.options.timeout.as_secs_f64()
        ));
        self.link.fail(shared, DownCause::Closed);
        Closing::Over
    }
}

/// The bytes that a peer has not taken yet.
#[derive(Debug)]
pub(super) struct BytesLeft {
    /// Number of the connection that carries them; 0: none does.
    pub(super) connection: u64,
    /// Bytes that the peer's kernel does not have.
    pub(super) bytes: u64,
    /// Bytes that the peer has acknowledged.
    pub(super) acked: u64,
}

impl BytesLeft {
    /// Returns `true` if the peer has taken some since `before`. On another connection bytes are
    /// sent again, and only what the peer itself acknowledges tells.
    fn has_shrunk_since(&self, before: &Self) -> bool {
        let is_same = self.connection == before.connection;
        self.acked > before.acked || (is_same && self.bytes < before.bytes)
    }
}

impl TcpDevice {
    /// Begins the device's end, or goes on with it.
    pub(super) fn advance_end(&self) -> Closing {
        let mut polling = self.polling.lock();
        if !self.shared.closed.swap(true, Ordering::AcqRel) {
            self.begin_close(&mut polling);
        }
        let Some(TcpClosing(leaving)) = &polling.closing else { return Closing::Over };
        // All together: a peer's machine may take its time to acknowledge.
        let links: Vec<_> = leaving.iter().map(|leaving| leaving.link.index).collect();
        for link in links {
            self.advance(&mut polling, link);
        }
        // Peers that close at the same time wait for room here.
        let has_come = self.drop_arrivals(&mut polling);
        let Some(closing) = &mut polling.closing else { return Closing::Over };
        match closing.look(&self.shared) {
            Closing::Over => {
                polling.hot.clear();
                // Bytes that are not read would break a connection before its end is read.
                polling.inbound.drain(..).flatten().for_each(|entry| _ = entry.drain());
                Closing::Over
            }
            _ if has_come => Closing::Moving,
            state => state,
        }
    }

    /// Says to all peers that no message follows.
    fn begin_close(&self, polling: &mut TcpPolling) {
        self.shared.flusher.end();
        sockets::close(polling.listener.take());
        // Those that wait here hear no answer any more.
        polling.pending = Pending::of_ranks(self.shared.identity.ranks);
        polling.crossed.clear();
        let links = self.shared.outgoing.lock().clone();
        let links: Vec<_> = links.into_iter().flatten().collect();
        for link in &links {
            let entry = polling.inbound.get(link.index as usize).and_then(Option::as_ref);
            link.bye(&self.shared, entry.map_or(0, |entry| entry.incoming.received));
        }
        let until = Instant::now() + self.shared.options.timeout;
        let leaving = |link: Arc<Outgoing>| LeavingLink { left: link.left(), link, until };
        polling.closing = Some(TcpClosing(links.into_iter().map(leaving).collect()));
    }

    /// Drops what has come on all connections. Returns `true` if something has.
    ///
    /// A peer that has said its end may still take messages. Once its connection has ended, too, it
    /// counts as closed, and is not dialled.
    fn drop_arrivals(&self, polling: &mut TcpPolling) -> bool {
        let (mut has_come, mut none) = (false, Batch::new(1));
        for index in 0..u32::try_from(polling.inbound.len()).unwrap_or(u32::MAX) {
            let Some(Some(entry)) = polling.inbound.get(index as usize) else { continue };
            if entry.incoming.has_ended {
                if entry.drain().is_err() {
                    entry.link.fail(&self.shared, DownCause::Closed);
                }
            } else if self.receive(polling, index, &mut none) {
                has_come = true;
                if let Some(Some(entry)) = polling.inbound.get(index as usize) {
                    entry.hurry();
                }
            }
        }
        has_come
    }
}

#[cfg(test)]
mod tests {
    use super::BytesLeft;

    #[test]
    fn bytes_that_another_connection_sends_again_are_not_taken_until_they_are_acknowledged() {
        let left = |connection, bytes, acked| BytesLeft { connection, bytes, acked };
        let before = left(1, 100, 50);
        assert!(!left(1, 100, 50).has_shrunk_since(&before));
        assert!(left(1, 99, 50).has_shrunk_since(&before));
        // The kernel of a connection that is lost had more than the peer has acknowledged.
        assert!(!left(0, 300, 50).has_shrunk_since(&before));
        assert!(!left(2, 10, 50).has_shrunk_since(&left(0, 300, 50)));
        assert!(left(2, 300, 51).has_shrunk_since(&left(0, 300, 50)));
    }
}
