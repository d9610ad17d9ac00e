//! Several NICs of one rank: chunks of large messages are spread over them, and all other traffic
//! uses the first.
//!
//! Each further NIC is a device of its own. Its connections are made when a message is first
//! spread over it. It carries writes, each with a read behind it. So a completed chunk is in the
//! peer's memory, and the peer need not poll its further NICs for it. They are polled while chunks
//! are in flight on them, and else now and then.

use super::address::RdmaAddress;
use super::connection::Connection;
use super::device::{RdmaDevice, RdmaPolling};
use super::domain::DomainShared;
use super::link::RdmaLink;
use super::transfers::PlaceKey;
use crate::contract::{
    AddressBlob, Armed, Batch, BufferChunk, Device, DownCause, Event, OpToken, PeerId, Polled,
    Reach, RemotePlace, Submit, SubmitError,
};
use crate::net::parts::{self, Rest};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use zerocopy::little_endian::U16;

const MAGIC: [u8; 4] = *b"CRVR";

/// Events that are taken together.
const TOGETHER: usize = 16;

/// Maximum number of NICs that a rank spreads a message over: keys have room for this number.
pub(super) const MOST: usize = 16;

/// Joins the addresses of a rank's NICs, the first one's in front. A single one is unchanged.
pub(super) fn join(mut all: Vec<AddressBlob>) -> AddressBlob {
    if all.len() == 1
        && let Some(only) = all.pop()
    {
        return only;
    }
    let mut bytes = MAGIC.to_vec();
    for AddressBlob(one) in all.iter().take(MOST) {
        parts::push::<U16>(&mut bytes, one);
    }
    AddressBlob(bytes)
}

/// Returns the address of a rank's first NIC, and those of its others. `None`: it is no address.
pub(super) fn split(blob: &AddressBlob) -> Option<(RdmaAddress, Vec<RdmaAddress>)> {
    let Some(rest) = blob.0.strip_prefix(&MAGIC) else {
        return RdmaAddress::decode(blob).map(|first| (first, Vec::new()));
    };
    let (mut rest, mut all) = (Rest(rest), Vec::new());
    while rest.end().is_none() {
        all.push(RdmaAddress::decode(&AddressBlob(rest.part::<U16>()?.to_vec()))?);
    }
    if all.is_empty() || all.len() > MOST {
        return None;
    }
    let first = all.remove(0);
    Some((first, all))
}

/// The further NICs of a device.
pub(super) struct Rails {
    devices: Box<[Arc<RdmaDevice>]>,
    /// Number of chunks in flight on them.
    in_flight: AtomicUsize,
    /// Events to report.
    batch: Mutex<Batch>,
}

impl Rails {
    pub(super) fn new(devices: Vec<Arc<RdmaDevice>>) -> Self {
        let room = if devices.is_empty() { 0 } else { TOGETHER };
        Self {
            devices: devices.into(),
            in_flight: AtomicUsize::new(0),
            batch: Mutex::new(Batch::new(room)),
        }
    }

    pub(super) fn devices(&self) -> &[Arc<RdmaDevice>] {
        &self.devices
    }

    /// Returns `true` if they have to be polled again soon.
    pub(super) fn are_busy(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) > 0
    }

    /// Handles the events on them.
    #[cold]
    pub(super) fn poll(&self, polling: &mut RdmaPolling) {
        let mut batch = self.batch.lock();
        for rail in &self.devices {
            // Set if a chunk has failed, so that the end of its connection comes next.
            let mut has_failed = false;
            while rail.poll(&mut batch, &mut |_: &mut Batch| {}) == Polled::Some {
                for event in batch.drain() {
                    match event {
                        Event::Completion { ref outcome, .. } => {
                            self.in_flight.fetch_sub(1, Ordering::AcqRel);
                            has_failed |= outcome.is_err();
                            polling.pending.push_back(event);
                        }
                        // Chunks in flight there are lost, and it is unknown which of them have
                        // arrived.
                        Event::PeerDown { peer, cause } if std::mem::take(&mut has_failed) => {
                            polling.end_all_of(peer, &cause);
                        }
                        // A connection without chunks in flight is just not used any more.
                        // Messages come by the first NIC.
                        _ => {}
                    }
                }
            }
        }
    }

    /// Arms them to wake sleeping threads. Returns `false` if one of them has work to do now.
    pub(super) fn arm(&self) -> bool {
        for (count, rail) in self.devices.iter().enumerate() {
            if matches!(rail.arm(), Armed::Ready) {
                self.devices.iter().take(count).for_each(|rail| rail.disarm(true));
                return false;
            }
        }
        true
    }

    pub(super) fn disarm(&self) {
        self.devices.iter().for_each(|rail| rail.disarm(true));
    }
}

/// Ways from this rank's further NICs to a peer's, one to one.
pub(super) struct Ways {
    theirs: Vec<RdmaAddress>,
    links: Vec<OnceLock<RdmaLink>>,
}

/// One NIC, over which chunks of a buffer are spread.
#[derive(Debug)]
pub(super) struct Rail {
    /// Number of the NIC: 0 is the first.
    pub(super) number: u8,
    pub(super) shared: Arc<DomainShared>,
    connection: Arc<Connection>,
}

impl Rail {
    pub(super) fn of(number: usize, link: &RdmaLink) -> Self {
        let (shared, connection) = (link.shared.clone(), link.connection.clone());
        Self { number: u8::try_from(number).unwrap_or(0), shared, connection }
    }

    /// Returns `true` if it is connected. The first counts as usable: its end is reported
    /// elsewhere.
    pub(super) fn is_usable(&self) -> bool {
        self.number == 0 || self.connection.is_up()
    }
}

impl Ways {
    /// Creates the ways to NICs of those addresses. None is connected yet.
    pub(super) fn to(theirs: Vec<RdmaAddress>, rails: &Rails) -> Self {
        let reach =
            |(rail, to): &(&Arc<RdmaDevice>, &RdmaAddress)| match rail.address_of().reach(to) {
                Reach::Yes(_) => true,
                Reach::No(why) => {
                    tracing::info!(why, "a NIC less for large messages");
                    false
                }
            };
        let count = rails.devices.iter().zip(&theirs).take_while(reach).count();
        Self { theirs, links: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// Returns the number of ways, connected or not.
    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    /// Returns the way between the NICs of a number, begun when it is first needed. `None`: it
    /// cannot be made at the moment.
    pub(super) fn get(&self, number: usize, rails: &Rails, peer: PeerId) -> Option<&RdmaLink> {
        let at = number.checked_sub(1)?;
        let way = self.links.get(at)?;
        if way.get().is_none() {
            let (rail, to) = (rails.devices.get(at)?, self.theirs.get(at)?);
            match rail.link_to(&to.encode(), peer) {
                // Another thread may have set one meanwhile: either will do.
                Ok(link) => _ = way.set(link),
                Err(why) => tracing::info!(%peer, %why, "a NIC less for a large message"),
            }
        }
        way.get()
    }
}

impl RdmaDevice {
    /// Has the further NIC of a number write a chunk.
    pub(super) fn put_by_rail(
        &self,
        (ways, rail, first): (&Ways, usize, &Connection),
        to: RemotePlace,
        what: (&BufferChunk, OpToken),
    ) -> Result<Submit, SubmitError> {
        if rail > ways.len() {
            let cause =
                DownCause::Protocol(format!("it wants a chunk by NIC {rail}, of {}", ways.len()));
            return Err(first.break_off(cause));
        }
        let Some(link) = ways.get(rail, &self.rails, first.peer) else {
            return Err(SubmitError::Unregistered(
                "the NIC that it is for cannot be connected".into(),
            ));
        };
        // Counted first, since it may end before this call returns.
        self.rails.in_flight.fetch_add(1, Ordering::AcqRel);
        let submitted = link.connection.put_chunk(to, what, &link.shared.registrations);
        match submitted {
            Ok(Submit::Posted) => self.look_soon(),
            _ => {
                self.rails.in_flight.fetch_sub(1, Ordering::AcqRel);
            }
        }
        match submitted {
            // Without that NIC the peer would wait for the chunk for ever.
            Err(SubmitError::Down { cause, .. }) => Err(first.break_off(cause)),
            other => other,
        }
    }
}

impl PlaceKey {
    /// Returns the key of a chunk that the NIC of that number writes.
    pub(super) fn of_chunk(rkey: u32, rail: u8) -> Self {
        // With a further NIC, messages do not follow on the same queue pair.
        Self { rkey, read_behind: rail > 0, rail, words: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::key::DeviceKey;
    use crate::verbs::address::{Fabric, Host};
    use proptest::prelude::*;

    fn address(number: u8) -> RdmaAddress {
        let hosts = vec![Host::of("10.0.0.1".parse().unwrap())];
        let (fabric, gid) = (Fabric::InfiniBand, [3; 16]);
        RdmaAddress {
            key: DeviceKey([number; 16]),
            fabric,
            boot: [1; 16],
            gid,
            tcp_port: 4711,
            hosts,
        }
    }

    #[test]
    fn addresses_of_several_nics_come_apart_again_and_one_alone_is_itself() {
        assert_eq!(join(vec![address(1).encode()]), address(1).encode());
        assert_eq!(split(&address(1).encode()), Some((address(1), vec![])));
        let all = join((1..5).map(|number| address(number).encode()).collect());
        assert_eq!(split(&all), Some((address(1), (2..5).map(address).collect())));
        assert_eq!(split(&AddressBlob(MAGIC.to_vec())), None);
        for end in 5..all.0.len() {
            let short = split(&AddressBlob(all.0[..end].to_vec()));
            assert!(short.is_none_or(|(_, others)| others.len() < 3), "{end}");
        }
    }

    proptest! {
        #[test]
        fn whatever_was_published_is_addresses_or_nothing(
            bytes in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            let mut like = join(vec![address(1).encode(), address(2).encode()]).0;
            like.truncate(bytes.len());
            like.extend(&bytes);
            let _ = (split(&AddressBlob(bytes)), split(&AddressBlob(like)));
        }
    }
}
