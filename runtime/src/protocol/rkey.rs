//! Remote keys as plain data: their layout, the numbers of regions, and the checks of bounds.
//!
//! ```text
//! owner 32 | number 64 | offset 64 | length 64 | pairs of a name and a value, each part behind
//!                                                its length in 16 bits | hash of all before 64
//! ```
//!
//! The hash is FNV-1a. It finds damage, not forgery: any rank of the job can compute it.
//!
//! A pair is the key by which a transport maps the region, under the transport's name. Two names
//! that no transport has are used, too. One stands for the tag of the owner's job, one for the
//! transport whose NIC is the coherence owner of the words.

use crate::names::Rank;
use carrack_transports::contract::WireKey;
use carrack_transports::fnv;
use carrack_transports::net::parts::{self, Rest};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const OF_THE_JOB: &str = "#";
const OF_THE_WORDS: &str = "";

/// Returns a region's number in messages: its index, and its generation in the upper half. So a
/// late or forged number finds nothing.
pub(crate) fn number((index, generation): (u32, u32)) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

/// Returns the index and the generation in a region's number.
pub(crate) fn of_number(number: u64) -> (u32, u32) {
    (number as u32, (number >> 32) as u32)
}

/// Returns `true` if `len` bytes from `offset` on lie within `room` bytes.
#[inline(always)]
pub(crate) fn is_within(offset: u64, len: u64, room: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= room)
}

/// A part of a region, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RegionPart {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl RegionPart {
    /// Returns the beginning in the region of a part of this part, or `None` if it is not inside.
    #[inline]
    pub(crate) fn at(self, offset: u64, len: u64) -> Option<u64> {
        is_within(offset, len, self.len).then(|| self.offset.checked_add(offset))?
    }
}

/// A region as its owner describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RegionKey {
    /// The tag of its owner's job, if it is told.
    pub(crate) job: Option<u64>,
    pub(crate) owner: Rank,
    /// Index, and generation above.
    pub(crate) number: u64,
    pub(crate) keys: Vec<(String, WireKey)>,
    /// The transport whose NIC does the atomic operations on its words; `None`: its owner does
    /// them.
    pub(crate) nic: Option<String>,
}

/// The first bytes of a key.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    owner: U32,
    number: U64,
    offset: U64,
    len: U64,
}

impl RegionKey {
    /// Encodes it, for a part of the region.
    pub(crate) fn encode(&self, RegionPart { offset, len }: RegionPart) -> Vec<u8> {
        let (owner, number) = (self.owner.0.into(), self.number.into());
        let mut bytes = Vec::with_capacity(64);
        let head = Head { owner, number, offset: offset.into(), len: len.into() };
        bytes.extend(head.as_bytes());
        let job = self.job.map(U64::new);
        let job = job.iter().map(|tag| (OF_THE_JOB, tag.as_bytes()));
        let nic = self.nic.iter().map(|transport| (OF_THE_WORDS, transport.as_bytes()));
        let keys = self.keys.iter().map(|(transport, key)| (transport.as_str(), &*key.0));
        for (name, value) in job.chain(nic).chain(keys) {
            parts::push::<U16>(&mut bytes, name.as_bytes());
            parts::push::<U16>(&mut bytes, value);
        }
        bytes.extend(U64::new(fnv::of(&bytes)).as_bytes());
        bytes
    }

    /// Decodes the bytes of another rank, with the part that they name.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, RegionPart)> {
        let (bytes, hash) = U64::ref_from_suffix(bytes).ok()?;
        if fnv::of(bytes) != hash.get() {
            return None;
        }
        let mut rest = Rest(bytes);
        let head: &Head = rest.head()?;
        let (number, offset, len) = (head.number.get(), head.offset.get(), head.len.get());
        offset.checked_add(len)?;
        let (mut keys, mut nic, mut job) = (Vec::new(), None, None);
        while rest.end().is_none() {
            let (transport, key) = (rest.text::<U16>()?, rest.part::<U16>()?);
            match transport {
                OF_THE_JOB => job = Some(U64::ref_from_bytes(key).ok()?.get()),
                OF_THE_WORDS => nic = Some(String::from_utf8(key.to_vec()).ok()?),
                _ => keys.push((transport.to_owned(), WireKey(key.to_vec()))),
            }
        }
        let owner = Rank(head.owner.get());
        Some((Self { job, owner, number, keys, nic }, RegionPart { offset, len }))
    }

    /// Returns `true` unless it names a region of another job.
    #[inline]
    pub(crate) fn is_of(&self, job: u64) -> bool {
        self.job.is_none_or(|tag| tag == job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_and_nothing_makes_reading_panic(
            owner: u32, job: Option<u64>, names: (u32, u32), part: (u64, u64),
            keys: Vec<(String, Vec<u8>)>, nic: Option<String>, other: Vec<u8>,
            at: prop::sample::Index, bit in 0_u32..8,
        ) {
            let is_taken = |name: &str| [OF_THE_WORDS, OF_THE_JOB].contains(&name);
            let named = keys.into_iter().filter(|(name, _)| !is_taken(name));
            let keys = named.map(|(name, key)| (name, WireKey(key))).collect();
            let key = RegionKey { job, owner: Rank(owner), number: number(names), keys, nic };
            prop_assert_eq!(of_number(key.number), names);
            let part = RegionPart { offset: part.0, len: part.1.min(u64::MAX - part.0) };
            let bytes = key.encode(part);
            prop_assert_eq!(RegionKey::decode(&bytes), Some((key.clone(), part)));
            let tag = job.unwrap_or(0);
            prop_assert!(key.is_of(tag) && key.is_of(tag ^ 1) == job.is_none());
            let _ = RegionKey::decode(&other);
            let hashed = [&other[..], U64::new(fnv::of(&other)).as_bytes()].concat();
            let _ = RegionKey::decode(&hashed);
            prop_assert!(RegionKey::decode(&bytes[..bytes.len() - 1]).is_none());
            let mut damaged = bytes;
            let at = at.index(damaged.len());
            damaged[at] ^= 1 << bit;
            prop_assert!(RegionKey::decode(&damaged).is_none());
        }
    }

    #[test]
    fn a_part_lies_within_the_part_that_it_is_of() {
        let part = RegionPart { offset: 10, len: 50 };
        assert!(part.at(50, 0).is_some() && part.at(49, 2).is_none());
        assert_eq!(part.at(20, 5), Some(30));
        assert!(part.at(u64::MAX, 1).is_none() && part.at(1, u64::MAX).is_none());
        assert!(RegionPart { offset: u64::MAX, len: 2 }.at(1, 1).is_none());
    }
}
