//! Short messages that are sent to a peer in one request.
//!
//! Many short messages in a row cost a doorbell, a packet on the wire, an acknowledgement, a
//! receive and a completion each. Together they cost one of each. The program knows that more will
//! follow at once, so it says so ([`Link::am_more`](crate::contract::Link::am_more)). Such messages
//! are gathered in a staging buffer. They are sent with the first message without that
//! announcement, when no more fits, and at the latest with the next poll.
//!
//! On the wire the header of such a request counts its bytes. The messages follow, each preceded
//! by its header and length, and padded to a whole word.

use super::bounces::Bounce;
use crate::contract::{Header, Payload, PeerId, SmallArrival};
use crate::mem::{MemMut, MemRef, SmallBytes, copy::copy_now};
use zerocopy::{FromBytes, IntoBytes};

/// Immediate of a request that holds gathered messages.
pub(super) const TOGETHER: u32 = 2;

/// Maximum bytes of a request, with its header, so that the first message does not wait for long.
pub(super) const MOST: usize = 2 << 10;

/// Bytes in front of each message: its header and its length.
const RECORD: usize = 24;

/// Messages that wait for more.
#[derive(Debug)]
pub(super) struct Aggregate {
    pub(super) bounce: Bounce,
    /// Bytes of the staging buffer that are in use.
    pub(super) len: usize,
}

/// One message in its wire format.
pub(super) struct AggregateRecord {
    words: [u64; 8],
    len: usize,
}

const _: () = assert!(RECORD + SmallBytes::MAX == 64, "the longest fills a record");

impl AggregateRecord {
    /// Builds the record of a message, if it is short enough.
    pub(super) fn of(header: Header, bytes: MemRef<'_>) -> Option<Self> {
        let [first, second] = header.0;
        let mut words = [first, second, bytes.len() as u64, 0, 0, 0, 0, 0];
        let place = words.as_mut_bytes().get_mut(RECORD..RECORD + bytes.len())?;
        copy_now(MemMut::host(place), bytes).ok()?;
        Some(Self { words, len: length(bytes.len()) })
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.words.as_bytes()[..self.len]
    }
}

/// Bytes of the longest record.
pub(super) const LONGEST: usize = RECORD + SmallBytes::MAX;

/// Returns the bytes of a message's record.
pub(super) fn length(payload: usize) -> usize {
    RECORD + payload.next_multiple_of(8)
}

/// Messages of one request that are not all taken out yet.
#[derive(Debug)]
pub struct OpenedAggregate {
    pub(super) connection: u32,
    from: PeerId,
    payload: Payload,
    at: usize,
}

impl OpenedAggregate {
    /// Wraps a payload that came through a connection from a peer.
    pub fn new(connection: u32, from: PeerId, payload: Payload) -> Self {
        Self { connection, from, payload, at: 0 }
    }

    /// Returns the next message; `None` when all were taken out.
    ///
    /// # Errors
    /// The reason why the peer's bytes are no messages.
    #[allow(clippy::should_implement_trait, reason = "it can fail")]
    pub fn next(&mut self) -> Result<Option<SmallArrival>, &'static str> {
        let all = match &self.payload {
            Payload::Small(bytes) => bytes.as_slice(),
            Payload::Packet(packet) => packet.as_slice().ok_or("they are not in host memory")?,
            Payload::Aside(bytes) => bytes,
            Payload::Loan(_) => return Err("they are on loan"),
        };
        let rest = all.get(self.at..).unwrap_or(&[]);
        if rest.is_empty() {
            return Ok(None);
        }
        let (front, rest) = <[u64; 3]>::read_from_prefix(rest).map_err(|_| "it is cut off")?;
        let [first, second, len] = front;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let mut bytes =
            SmallBytes::zeroed(len).ok_or("a message in it is longer than a short one")?;
        // The padding has to be present, too.
        let found = rest.get(..len.next_multiple_of(8)).ok_or("it is cut off")?;
        copy_now(MemMut::host(bytes.as_mut_slice()), MemRef::host(&found[..len]))
            .map_err(|_| "its bytes are not host memory")?;
        self.at += length(len);
        Ok(Some(SmallArrival::new(self.from, Header([first, second]), bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{HostAllocator, PacketPool};

    fn opened(bytes: &[u8]) -> OpenedAggregate {
        let pool = PacketPool::new(std::sync::Arc::new(HostAllocator), 4096, 1);
        let packet = pool.take_copy(MemRef::host(bytes)).unwrap();
        OpenedAggregate::new(0, PeerId(7), Payload::Packet(packet))
    }

    fn all_of(mut opened: OpenedAggregate) -> Result<Vec<(Header, Vec<u8>)>, &'static str> {
        let next = || opened.next().transpose();
        std::iter::from_fn(next)
            .map(|one| one.map(|one| (one.header, one.bytes.as_slice().to_vec())))
            .collect()
    }

    /// Returns the messages of a request. Checks that they are the same if it is in a packet and if
    /// it was copied out of one.
    fn all(bytes: &[u8]) -> Result<Vec<(Header, Vec<u8>)>, &'static str> {
        let found = all_of(opened(bytes));
        let aside = OpenedAggregate::new(0, PeerId(7), Payload::Aside(bytes.to_vec()));
        assert_eq!(all_of(aside), found);
        found
    }

    #[test]
    fn what_goes_together_comes_as_it_was_and_in_its_order() {
        let sent: Vec<_> =
            (0..=40_u8).map(|len| (Header([u64::from(len), !0]), vec![len; len.into()])).collect();
        let mut together = Vec::new();
        for (header, bytes) in &sent {
            let record = AggregateRecord::of(*header, MemRef::host(bytes)).unwrap();
            assert_eq!(record.as_bytes().len(), length(bytes.len()));
            together.extend_from_slice(record.as_bytes());
        }
        assert_eq!(all(&together).unwrap(), sent);
        assert!(AggregateRecord::of(Header([0, 0]), MemRef::host(&[0; 41])).is_none());
    }

    #[test]
    fn what_is_cut_off_or_claims_too_much_is_an_error() {
        let mut together = Vec::new();
        for len in [8, 0, 40, 3] {
            together.extend_from_slice(
                AggregateRecord::of(Header([1, 2]), MemRef::host(&vec![5; len]))
                    .unwrap()
                    .as_bytes(),
            );
        }
        let ends = [0, 32, 56, 120, 152];
        for len in 0..=together.len() {
            assert_eq!(all(&together[..len]).is_ok(), ends.contains(&len), "{len}");
        }
        for claim in [41, 64, u64::from(u32::MAX), u64::MAX] {
            let mut wrong = together.clone();
            wrong.splice(16..24, claim.to_ne_bytes());
            assert_eq!(all(&wrong).unwrap_err(), "a message in it is longer than a short one");
        }
    }
}
