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

/// The end of a device whose peers have not taken everything yet.
#[derive(Debug)]
pub(super) struct TcpClosing {
    links: Vec<Arc<Outgoing>>,
    /// The fewest bytes that were left for them so far.
    left: u64,
    /// Time when the links that are left fail, unless a peer takes something before.
    until: Instant,
}

impl TcpClosing {
    /// Takes out the links whose peers have everything, and ends all others if none has taken a
    /// byte within the limit.
    fn look(&mut self, shared: &TcpShared) -> Closing {
        self.links.retain(|link| !link.has_closed(shared));
        let left = self.links.iter().map(|link| link.left()).sum();
        if self.links.is_empty() {
            return Closing::Over;
        }
        if left < self.left {
            (self.left, self.until) = (left, Instant::now() + shared.options.timeout);
            return Closing::Moving;
        }
        if Instant::now() < self.until {
            return Closing::Waiting;
        }
        for link in self.links.drain(..) {
            stderr::say(format_args!(
                "up to {} bytes to rank {} are lost, since this rank ends and that one has taken \
                 nothing for {} s: let it make progress until it has all, or raise \
                 CARRACK_PEER_TIMEOUT",
                link.left(),
                link.peer.0,
                shared.options.timeout.as_secs_f64()
            ));
            link.fail(shared, DownCause::Closed);
        }
        Closing::Over
    }
}

impl TcpDevice {
    /// Begins the device's end, or goes on with it.
    pub(super) fn advance_end(&self) -> Closing {
        let mut polling = self.polling.lock();
        if !self.shared.closed.swap(true, Ordering::AcqRel) {
            self.begin_close(&mut polling);
        }
        let Some(TcpClosing { links, .. }) = &polling.closing else { return Closing::Over };
        // All together: a peer's machine may take its time to acknowledge.
        for link in links.clone() {
            self.advance(&mut polling, link.index);
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
        polling.closing = Some(TcpClosing { links, left: u64::MAX, until });
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
