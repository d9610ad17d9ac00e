//! Packets between simulated NICs, and their format on a socket.
//!
//! Packets within a process are never encoded. The form of packets from other processes is checked
//! here, and their content by the receiver, as a NIC checks input from the network.

use super::address::PortAddress;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum payload of a packet in bytes.
pub(super) const PAYLOADS: RangeInclusive<usize> = 1 << 10..=60 << 10;

/// Bytes of the largest packet on a socket.
pub(super) const LONGEST: usize = size_of::<Header>() + *PAYLOADS.end();

const MAGIC: u32 = 0x4e53_4303;

/// The number of a queue pair: 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct QueueNumber(pub(super) u32);

/// The number of a packet of a connection: 24 bits, which wrap around.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sequence(u32);

impl Sequence {
    const MASK: u32 = 0xff_ffff;

    pub(super) fn new(number: u32) -> Self {
        Self(number & Self::MASK)
    }

    pub(super) fn plus(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// Returns the number of packets from `earlier` to this. More than half of all numbers means
    /// that this is the earlier one.
    pub(super) fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0) & Self::MASK
    }

    /// Returns `true` if this comes before `other`.
    pub(super) fn is_before(self, other: Self) -> bool {
        self != other && other.since(self) <= Self::MASK / 2
    }
}

/// Position of a packet's payload in its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fragment {
    /// Bytes of the message before it.
    pub(super) offset: u32,
    /// Bytes of the whole message.
    pub(super) total: u32,
}

impl Fragment {
    /// Returns `true` if a payload of that many bytes completes the message.
    pub(super) fn ends_with(self, payload: usize) -> bool {
        u64::from(self.offset) + payload as u64 == u64::from(self.total)
    }
}

/// A place in the memory of a packet's receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Remote {
    pub(super) addr: u64,
    pub(super) key: u32,
}

/// Data for the receiver's completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Notice {
    /// Immediate as in the work request: in network order, since it is not interpreted here.
    pub(super) immediate: Option<u32>,
    pub(super) solicited: bool,
}

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    Send {
        fragment: Fragment,
        notice: Notice,
    },
    /// `to` is the target of the message, not of this part.
    Write {
        to: Remote,
        fragment: Fragment,
        notice: Notice,
    },
    /// `len` bytes, no more than fit into a packet.
    Read {
        from: Remote,
        len: u32,
    },
    FetchAdd {
        word: Remote,
        add: u64,
    },
    CompareSwap {
        word: Remote,
        compare: u64,
        swap: u64,
    },
}

/// Reason why a request was not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// A packet before it is missing. It and all behind it have to be sent again.
    OutOfSequence,
    /// No receive is posted. The request is repeated after this `min_rnr_timer`.
    NotReady(u8),
    InvalidRequest,
    Access,
    Operation,
}

/// The purpose of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Body {
    /// The next request of a connection.
    Request(Request),
    /// All requests up to this one were carried out.
    Acknowledge,
    /// The bytes that were read are the payload.
    Answer,
    /// The old value of an atomic operation's word.
    Original(u64),
    Refused(Refusal),
    /// The simulation's own answer to a request that would get none. Without it, a timeout could
    /// not be told from a busy machine.
    Lost,
}

/// A packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Packet {
    pub(super) source: (PortAddress, QueueNumber),
    pub(super) target: (PortAddress, QueueNumber),
    pub(super) sequence: Sequence,
    pub(super) body: Body,
    pub(super) payload: Vec<u8>,
}

impl Packet {
    /// Returns a packet to the sender of this one.
    pub(super) fn reply(&self, body: Body, payload: Vec<u8>) -> Self {
        Self { source: self.target, target: self.source, sequence: self.sequence, body, payload }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: U32,
    kind: u8,
    flags: u8,
    detail: u8,
    reserved: u8,
    source: U32,
    source_queue: U32,
    target: U32,
    target_queue: U32,
    sequence: U32,
    key: U32,
    addr: U64,
    first: U64,
    second: U64,
    offset: U32,
    total: U32,
    immediate: U32,
    payload: U32,
}

const IMMEDIATE: u8 = 1;
const SOLICITED: u8 = 2;

/// Wire numbers of [`Body`].
mod kind {
    pub(super) const SEND: u8 = 1;
    pub(super) const WRITE: u8 = 2;
    pub(super) const READ: u8 = 3;
    pub(super) const FETCH_ADD: u8 = 4;
    pub(super) const COMPARE_SWAP: u8 = 5;
    pub(super) const ACKNOWLEDGE: u8 = 6;
    pub(super) const ANSWER: u8 = 7;
    pub(super) const ORIGINAL: u8 = 8;
    pub(super) const OUT_OF_SEQUENCE: u8 = 9;
    pub(super) const NOT_READY: u8 = 10;
    pub(super) const INVALID_REQUEST: u8 = 11;
    pub(super) const ACCESS: u8 = 12;
    pub(super) const OPERATION: u8 = 13;
    pub(super) const LOST: u8 = 15;
}

impl Header {
    fn set_fragment(&mut self, Fragment { offset, total }: Fragment) {
        (self.offset, self.total) = (offset.into(), total.into());
    }

    fn set_remote(&mut self, Remote { addr, key }: Remote) {
        (self.addr, self.key) = (addr.into(), key.into());
    }

    fn set_notice(&mut self, notice: Notice) {
        self.immediate = notice.immediate.unwrap_or(0).into();
        self.flags = if notice.immediate.is_some() { IMMEDIATE } else { 0 };
        self.flags |= if notice.solicited { SOLICITED } else { 0 };
    }

    fn notice(&self) -> Notice {
        Notice {
            immediate: (self.flags & IMMEDIATE != 0).then(|| self.immediate.get()),
            solicited: self.flags & SOLICITED != 0,
        }
    }

    fn set_body(&mut self, body: &Body) {
        self.kind = match *body {
            Body::Request(Request::Send { fragment, notice }) => {
                self.set_fragment(fragment);
                self.set_notice(notice);
                kind::SEND
            }
            Body::Request(Request::Write { to, fragment, notice }) => {
                self.set_remote(to);
                self.set_fragment(fragment);
                self.set_notice(notice);
                kind::WRITE
            }
            Body::Request(Request::Read { from, len }) => {
                self.set_remote(from);
                self.total = len.into();
                kind::READ
            }
            Body::Request(Request::FetchAdd { word, add }) => {
                self.set_remote(word);
                self.first = add.into();
                kind::FETCH_ADD
            }
            Body::Request(Request::CompareSwap { word, compare, swap }) => {
                self.set_remote(word);
                (self.first, self.second) = (compare.into(), swap.into());
                kind::COMPARE_SWAP
            }
            Body::Acknowledge => kind::ACKNOWLEDGE,
            Body::Answer => kind::ANSWER,
            Body::Original(word) => {
                self.first = word.into();
                kind::ORIGINAL
            }
            Body::Refused(Refusal::OutOfSequence) => kind::OUT_OF_SEQUENCE,
            Body::Refused(Refusal::NotReady(timer)) => {
                self.detail = timer;
                kind::NOT_READY
            }
            Body::Refused(Refusal::InvalidRequest) => kind::INVALID_REQUEST,
            Body::Refused(Refusal::Access) => kind::ACCESS,
            Body::Refused(Refusal::Operation) => kind::OPERATION,
            Body::Lost => kind::LOST,
        };
    }

    /// Returns the content of the header, if the payload can belong to it.
    fn body(&self, payload: usize) -> Option<Body> {
        let remote = Remote { addr: self.addr.get(), key: self.key.get() };
        let fragment = Fragment { offset: self.offset.get(), total: self.total.get() };
        let fits = u64::from(fragment.offset) + payload as u64 <= u64::from(fragment.total);
        let bare = payload == 0;
        let request = |request, holds: bool| holds.then_some(Body::Request(request));
        let refused = |refusal| bare.then_some(Body::Refused(refusal));
        match self.kind {
            kind::SEND => request(Request::Send { fragment, notice: self.notice() }, fits),
            kind::WRITE => {
                request(Request::Write { to: remote, fragment, notice: self.notice() }, fits)
            }
            kind::READ => {
                let len = fragment.total;
                request(
                    Request::Read { from: remote, len },
                    bare && len as usize <= *PAYLOADS.end(),
                )
            }
            kind::FETCH_ADD => {
                request(Request::FetchAdd { word: remote, add: self.first.get() }, bare)
            }
            kind::COMPARE_SWAP => {
                let (compare, swap) = (self.first.get(), self.second.get());
                request(Request::CompareSwap { word: remote, compare, swap }, bare)
            }
            kind::ACKNOWLEDGE => bare.then_some(Body::Acknowledge),
            kind::ANSWER => Some(Body::Answer),
            kind::ORIGINAL => bare.then(|| Body::Original(self.first.get())),
            kind::OUT_OF_SEQUENCE => refused(Refusal::OutOfSequence),
            kind::NOT_READY => refused(Refusal::NotReady(self.detail)),
            kind::INVALID_REQUEST => refused(Refusal::InvalidRequest),
            kind::ACCESS => refused(Refusal::Access),
            kind::OPERATION => refused(Refusal::Operation),
            kind::LOST => bare.then_some(Body::Lost),
            _ => None,
        }
    }
}

/// Encodes the packet for another process.
pub(super) fn encode(packet: &Packet) -> Vec<u8> {
    let mut header = Header::new_zeroed();
    header.magic = MAGIC.into();
    header.source = packet.source.0.raw().into();
    header.source_queue = packet.source.1.0.into();
    header.target = packet.target.0.raw().into();
    header.target_queue = packet.target.1.0.into();
    header.sequence = packet.sequence.0.into();
    header.payload = u32::try_from(packet.payload.len()).unwrap_or(u32::MAX).into();
    header.set_body(&packet.body);
    let mut bytes = Vec::with_capacity(size_of::<Header>() + packet.payload.len());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&packet.payload);
    bytes
}

/// Decodes a packet; `None` if the bytes are malformed.
pub(super) fn decode(bytes: &[u8]) -> Option<Packet> {
    let (header, payload) = Header::ref_from_prefix(bytes).ok()?;
    let right = header.magic.get() == MAGIC
        && header.payload.get() as usize == payload.len()
        && payload.len() <= *PAYLOADS.end()
        && header.sequence.get() <= Sequence::MASK;
    let port = |raw: U32| PortAddress::from_raw(raw.get());
    right.then_some(())?;
    Some(Packet {
        source: (port(header.source)?, QueueNumber(header.source_queue.get())),
        target: (port(header.target)?, QueueNumber(header.target_queue.get())),
        sequence: Sequence(header.sequence.get()),
        body: header.body(payload.len())?,
        payload: payload.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::address::PortBlock;
    use proptest::prelude::*;

    fn packet(body: Body, payload: Vec<u8>) -> Packet {
        let port = |number| PortAddress::new(PortBlock(3), number);
        Packet {
            source: (port(1), QueueNumber(17)),
            target: (port(2), QueueNumber(0xff_fffe)),
            sequence: Sequence::new(0xff_ffff),
            body,
            payload,
        }
    }

    #[test]
    fn every_packet_arrives_as_it_was_sent() {
        let remote = Remote { addr: u64::MAX - 3, key: 0x8000_0001 };
        let notice = Notice { immediate: Some(0), solicited: true };
        let fragment = Fragment { offset: 4, total: 9 };
        let with_payload = [
            Body::Request(Request::Send { fragment, notice }),
            Body::Request(Request::Write { to: remote, fragment, notice: Notice::default() }),
            Body::Answer,
        ];
        let bare = [
            Body::Request(Request::Read { from: remote, len: 1000 }),
            Body::Request(Request::FetchAdd { word: remote, add: u64::MAX }),
            Body::Request(Request::CompareSwap { word: remote, compare: 1, swap: 2 }),
            Body::Acknowledge,
            Body::Original(77),
            Body::Refused(Refusal::OutOfSequence),
            Body::Refused(Refusal::NotReady(31)),
            Body::Refused(Refusal::InvalidRequest),
            Body::Refused(Refusal::Access),
            Body::Refused(Refusal::Operation),
            Body::Lost,
        ];
        let packets = with_payload.map(|body| packet(body, vec![9, 8, 7, 6, 5])).into_iter();
        for sent in packets.chain(bare.map(|body| packet(body, Vec::new()))) {
            assert_eq!(decode(&encode(&sent)).as_ref(), Some(&sent));
        }
    }

    #[test]
    fn a_payload_that_does_not_belong_to_its_packet_is_no_packet() {
        let fragment = Fragment { offset: 0, total: 4 };
        let long = Body::Request(Request::Send { fragment, notice: Notice::default() });
        assert_eq!(decode(&encode(&packet(long, vec![0; 5]))), None);
        assert_eq!(decode(&encode(&packet(Body::Acknowledge, vec![0]))), None);
        let mut cut = encode(&packet(Body::Answer, vec![0; 5]));
        cut.pop();
        assert_eq!(decode(&cut), None);
    }

    #[test]
    fn numbers_of_packets_go_round() {
        let last = Sequence::new(0xff_ffff);
        assert_eq!(last.plus(1), Sequence::new(0));
        assert!(
            last.is_before(last.plus(1)) && !last.plus(1).is_before(last) && !last.is_before(last)
        );
        assert_eq!(last.plus(5).since(last), 5);
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange_to_be_looked_at(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let _ = decode(&bytes);
        }

        #[test]
        fn a_packet_with_a_wrong_byte_is_another_packet_or_none(
            at in 0_usize..80, to in any::<u8>()
        ) {
            let fragment = Fragment { offset: 4, total: 9 };
            let notice = Notice { immediate: Some(1), solicited: false };
            let send = Body::Request(Request::Send { fragment, notice });
            let mut bytes = encode(&packet(send, vec![1; 5]));
            if let Some(byte) = bytes.get_mut(at) {
                *byte = to;
            }
            if let Some(found) = decode(&bytes) {
                let Body::Request(Request::Send { fragment, .. }) = found.body else {
                    return Ok(());
                };
                let end = u64::from(fragment.offset) + found.payload.len() as u64;
                prop_assert!(end <= u64::from(fragment.total));
            }
        }
    }
}
