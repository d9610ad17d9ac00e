//! A bound on the operations that one peer may have waiting here.
//!
//! A rank has no more operations waiting for its peers than its settings allow (`CARRACK_OFFERS`),
//! and tries again later. A rank that exceeds this would fill its peers' memory: with offers
//! without receives, with requests whose answers it does not take, with notes for groups. Such a
//! rank breaks the protocol, and is treated as gone. Operations that wait for it end with that
//! reason, and further messages of these sorts are dropped.
//!
//! The limit of another rank is not known here. It is assumed to be this rank's, and at least the
//! default.

use super::carrier::Carrier;
use super::port::Port;
use crate::matching::Content;
use crate::names::Rank;
use crate::protocol::wire::Rts;
use crate::settings::Settings;
use carrack_transports::contract::DownCause;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Allowance beyond a limit for threads that test it at the same time, before they add to the
/// count.
const THREADS: usize = 4096;
/// Requests of a peer after which its unanswered ones are counted.
const OFTEN: u32 = 1024;

/// Offers of messages that wait for their receives.
pub(crate) struct WaitingOffers {
    total: AtomicUsize,
    of: Mutex<HashMap<Rank, usize>>,
    /// The limit for each device of a peer, requests included: an honest peer stays below it.
    limit: usize,
}

impl WaitingOffers {
    /// Returns the limit for a rank that offers `offers` messages itself.
    pub(crate) fn new(offers: usize) -> Self {
        let limit = offers.max(Settings::defaults().offers()) + THREADS;
        Self { total: AtomicUsize::new(0), of: Mutex::default(), limit }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Rank, usize>> {
        self.of.lock()
    }

    pub(crate) fn add(&self, from: Rank) {
        self.total.fetch_add(1, Ordering::Relaxed);
        *self.lock().entry(from).or_default() += 1;
    }

    /// Removes an offer that has met its receive.
    pub(crate) fn sub(&self, from: Rank) {
        self.total.fetch_sub(1, Ordering::Relaxed);
        let mut of = self.lock();
        if let Some(count) = of.get_mut(&from) {
            *count -= 1;
            if *count == 0 {
                of.remove(&from);
            }
        }
    }

    /// Returns `true` if a peer has reached its limit. Takes no lock while all peers together are
    /// below it.
    fn are_full(&self, from: Rank, devices: impl FnOnce() -> usize) -> bool {
        self.total.load(Ordering::Relaxed) >= self.limit
            && self
                .lock()
                .get(&from)
                .is_some_and(|&count| count >= self.limit.saturating_mul(devices()))
    }
}

impl Carrier {
    /// Returns `true` if one more offer of a message may wait here.
    pub(crate) fn takes_offer(&self, device: &Port, from: Rank) -> bool {
        let offers = &self.waiting_offers;
        let are_full = offers.are_full(from, || self.devices().len());
        if are_full {
            let limit = offers.limit;
            let why =
                format!("it offers more than {limit} messages that this rank did not ask for");
            device.break_with(from, why);
        }
        !are_full
    }

    /// Keeps an offer that waits for its receive.
    pub(crate) fn keep_offer(&self, device: &Port, from: Rank, rts: Rts) -> Content {
        self.waiting_offers.add(from);
        Content::Offered(rts, device.index)
    }

    /// Returns `true` if a peer may ask for one more operation. Counts its operations in flight
    /// now and then.
    pub(crate) fn takes_request(&self, device: &Port, from: Rank) -> bool {
        let Some(route) = device.route(from) else { return false };
        if let Some(DownCause::Protocol(_)) = route.down() {
            return false;
        }
        if !route.asks().is_multiple_of(OFTEN) {
            return true;
        }
        let (limit, transfers) = (self.waiting_offers.limit, &device.transfers);
        let words = self.words.asked_for_by(from);
        let is_beyond = transfers.asked_for_by_all() + words > limit
            && transfers.asked_for_by(from) + words > limit
            // The messages that wait here for it are answers, and requests of this rank.
            || route.waiting() > 2 * limit + self.settings.backlog();
        if is_beyond {
            let why = format!("it asks for more than {limit} things and takes no answer");
            device.break_with(from, why);
        }
        !is_beyond
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_a_limit_of_its_own() {
        let offers = WaitingOffers::new(16);
        for _ in 0..offers.limit - 1 {
            offers.add(Rank(1));
        }
        offers.add(Rank(2));
        assert!(!offers.are_full(Rank(1), || 1));
        offers.add(Rank(1));
        assert!(
            offers.are_full(Rank(1), || 1) && !offers.are_full(Rank(1), || 2),
            "each device may have as many"
        );
        assert!(!offers.are_full(Rank(2), || 1) && !offers.are_full(Rank(3), || 1));
        offers.sub(Rank(1));
        assert!(!offers.are_full(Rank(1), || 1));
    }
}
