//! Ends of peers: reported once each, behind what the peer sent before.

use super::device::{TcpDevice, TcpPolling};
use super::incoming::Inbound;
use crate::contract::{Batch, DownCause, Event, PeerId};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

impl TcpDevice {
    /// Reports peers that have gone, behind what they sent before.
    #[cold]
    pub(super) fn report(&self, polling: &mut TcpPolling, batch: &mut Batch) {
        let mut deaths = std::mem::take(&mut *self.shared.deaths.lock());
        // Several links may have told of the same end.
        let mut peers = BTreeSet::new();
        deaths.retain(|(peer, _)| peers.insert(*peer));
        deaths.retain(|(peer, cause)| !self.is_reported(polling, (*peer, cause), batch));
        if !deaths.is_empty() {
            deaths.append(&mut self.shared.deaths.lock());
            *self.shared.deaths.lock() = deaths;
            self.shared.news.store(true, Ordering::Relaxed);
        }
    }

    fn is_reported(
        &self,
        polling: &mut TcpPolling,
        (peer, cause): (PeerId, &DownCause),
        batch: &mut Batch,
    ) -> bool {
        // One that has just introduced itself would come up, and end, once more.
        for place in polling.pending.places() {
            self.hear_pending(polling, place);
        }
        let of_peer = |entry: &Option<Inbound>| {
            entry.as_ref().is_some_and(|entry| entry.incoming.peer == peer)
        };
        while let Some(index) = polling.inbound.iter().position(of_peer) {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            let came = self.receive(polling, index, batch);
            let longest = self.shared.packets.packet_size();
            let left = polling.inbound.get(index as usize).and_then(Option::as_ref);
            if batch.is_full() || left.is_some_and(|entry| entry.incoming.has_whole(longest)) {
                return false;
            }
            if !came {
                polling.leave(index);
            }
        }
        if batch.is_full() {
            return false;
        }
        let links = self.shared.outgoing.lock().clone();
        for link in links.iter().flatten().filter(|link| link.peer == peer) {
            link.fail(&self.shared, cause.clone());
        }
        // Failing a link has reported the peer once more.
        self.shared.deaths.lock().retain(|(other, _)| *other != peer);
        // One that waits for its turn would come up once more.
        polling.crossed.retain(|it| it.peer != peer);
        self.shared.yields(batch);
        self.shared.tell(Event::PeerDown { peer, cause: cause.clone() });
        true
    }
}
