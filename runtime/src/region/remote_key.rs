//! The remote key of a region.

use super::AtomicAgent;
use super::direct::{Remote, Remotes};
use crate::error::RemoteKeyError;
use crate::names::Rank;
use carrack_transports::contract::{Imported, WireKey};
use std::sync::{Arc, OnceLock};

/// The remote key of a rank's region, or of a part of one.
/// [`Mr::remote_key`](super::Mr::remote_key) makes it, and other ranks put and get by it. Clones
/// share the mapping, which is made once.
#[derive(Clone)]
pub struct RemoteKey {
    region: Arc<Named>,
    offset: u64,
    len: u64,
}

struct Named {
    /// The tag of its owner's job, if it is told.
    job: Option<u64>,
    owner: Rank,
    /// Index, and generation above.
    number: u64,
    keys: Vec<(String, WireKey)>,
    /// The transport whose NIC does the atomic operations on its words; `None`: its owner does
    /// them.
    nic: Option<String>,
    imported: OnceLock<Result<(&'static str, Imported), String>>,
    /// The entry of the first device that asked: its runtime, its number, and its knowledge.
    direct: OnceLock<((u64, u32), Arc<Remote>)>,
}

/// Stands in the place of a transport's name on the wire. The tag of the job follows, or the name
/// of the transport whose NIC has the words.
const OF_THE_JOB: &str = "#";
const OF_THE_WORDS: &str = "";

impl Named {
    fn new(
        (job, owner): (Option<u64>, Rank),
        number: u64,
        keys: Vec<(String, WireKey)>,
        nic: Option<String>,
    ) -> Self {
        Self { job, owner, number, keys, nic, imported: OnceLock::new(), direct: OnceLock::new() }
    }
}

impl RemoteKey {
    pub(super) fn new(
        (job, owner): (u64, Rank),
        (index, generation): (u32, u32),
        len: u64,
        keys: Vec<(String, WireKey)>,
        nic: Option<&str>,
    ) -> Self {
        let number = u64::from(generation) << 32 | u64::from(index);
        Self {
            region: Arc::new(Named::new((Some(job), owner), number, keys, nic.map(str::to_owned))),
            offset: 0,
            len,
        }
    }

    /// Returns the rank that owns the memory.
    pub fn owner(&self) -> Rank {
        self.region.owner
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a part of it, or `None` if the part is not inside.
    pub fn slice(&self, offset: u64, len: u64) -> Option<Self> {
        let offset = self.at(offset, len)?;
        Some(Self { region: self.region.clone(), offset, len })
    }

    /// Returns the beginning of a part in the region, or `None` if the part is not inside.
    #[inline]
    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<u64> {
        let end = offset.checked_add(len)?;
        if end <= self.len { self.offset.checked_add(offset) } else { None }
    }

    /// Encodes it as bytes, to be sent to another rank.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Named { job, owner, number, keys, nic, .. } = &*self.region;
        let mut bytes = Vec::with_capacity(64);
        bytes.extend(owner.0.to_le_bytes());
        for word in [*number, self.offset, self.len] {
            bytes.extend(word.to_le_bytes());
        }
        let job = job.map(u64::to_le_bytes);
        let job = job.iter().map(|tag| (OF_THE_JOB, &tag[..]));
        let nic = nic.iter().map(|transport| (OF_THE_WORDS, transport.as_bytes()));
        let keys = keys.iter().map(|(transport, key)| (transport.as_str(), &*key.0));
        for (name, value) in job.chain(nic).chain(keys) {
            for part in [name.as_bytes(), value] {
                // Both are short: a word, and a few numbers.
                bytes.extend(u16::try_from(part.len()).unwrap_or(0).to_le_bytes());
                bytes.extend(part);
            }
        }
        bytes
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes), from this or another rank. A missing
    /// region is noticed at its first use.
    ///
    /// # Errors
    /// The bytes are no remote key.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RemoteKeyError> {
        Self::read(bytes).ok_or(RemoteKeyError(bytes.len()))
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (owner, mut rest) = bytes.split_first_chunk::<4>()?;
        let mut word = || -> Option<u64> {
            let (word, left) = rest.split_first_chunk::<8>()?;
            rest = left;
            Some(u64::from_le_bytes(*word))
        };
        let (number, offset, len) = (word()?, word()?, word()?);
        offset.checked_add(len)?;
        let (mut keys, mut nic, mut job) = (Vec::new(), None, None);
        while !rest.is_empty() {
            let mut part = || -> Option<&[u8]> {
                let (len, left) = rest.split_first_chunk::<2>()?;
                let (part, left) = left.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
                rest = left;
                Some(part)
            };
            let transport = String::from_utf8(part()?.to_vec()).ok()?;
            let key = part()?.to_vec();
            match transport.as_str() {
                OF_THE_JOB => job = Some(u64::from_le_bytes(key.try_into().ok()?)),
                OF_THE_WORDS => nic = Some(String::from_utf8(key).ok()?),
                _ => keys.push((transport, WireKey(key))),
            }
        }
        let owner = Rank(u32::from_le_bytes(*owner));
        Some(Self { region: Arc::new(Named::new((job, owner), number, keys, nic)), offset, len })
    }

    /// Returns the coherence owner of its words.
    pub fn atomics(&self) -> AtomicAgent {
        if self.region.nic.is_some() { AtomicAgent::Nic } else { AtomicAgent::Owner }
    }

    /// Returns `true` unless it names a region of another job.
    #[inline]
    pub(crate) fn is_of(&self, job: u64) -> bool {
        self.region.job.is_none_or(|tag| tag == job)
    }

    /// Returns the transport whose NIC is the coherence owner of its words, if one is.
    #[inline]
    pub(crate) fn nic(&self) -> Option<&str> {
        self.region.nic.as_deref()
    }

    pub(crate) fn number(&self) -> u64 {
        self.region.number
    }

    /// Returns a device's knowledge of its place, for its NIC.
    pub(crate) fn direct(&self, runtime: u64, (device, remotes): (u32, &Remotes)) -> Arc<Remote> {
        let fresh = || remotes.of(self.region.owner, self.region.number);
        let (whose, remote) = self.region.direct.get_or_init(|| ((runtime, device), fresh()));
        if *whose == (runtime, device) { remote.clone() } else { fresh() }
    }

    /// Returns its beginning in the region.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the memory that is mapped here, with its transport; or the reason why it is not.
    /// `None`: it is not known yet.
    #[inline]
    pub(crate) fn mapped(&self) -> Option<&Result<(&'static str, Imported), String>> {
        self.region.imported.get()
    }

    /// Notes the outcome of mapping it here. The first one counts.
    pub(crate) fn set_mapped(
        &self,
        mapped: Result<(&'static str, Imported), String>,
    ) -> &Result<(&'static str, Imported), String> {
        self.region.imported.get_or_init(|| mapped)
    }

    /// Returns the key by which a transport maps it, if its owner could export it there.
    pub(crate) fn key_of(&self, transport: &str) -> Option<&WireKey> {
        let found = self.region.keys.iter().find(|(name, _)| name == transport);
        found.map(|(_, key)| key)
    }
}

impl std::fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "RemoteKey({}, {:#x}, {} B at {})",
            self.region.owner, self.region.number, self.len, self.offset
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_and_nothing_makes_reading_panic(
            owner: (u64, u32), number: (u32, u32), len: u64, part: (u64, u64),
            keys: Vec<(String, Vec<u8>)>, nic: Option<String>, other: Vec<u8>,
        ) {
            let is_taken = |name: &str| [OF_THE_WORDS, OF_THE_JOB].contains(&name);
            let named = keys.into_iter().filter(|(name, _)| !is_taken(name));
            let keys: Vec<_> = named.map(|(name, key)| (name, WireKey(key))).collect();
            let owned_by = (owner.0, Rank(owner.1));
            let rmr = RemoteKey::new(owned_by, number, len, keys.clone(), nic.as_deref());
            let rmr = rmr.slice(part.0, part.1).unwrap_or(rmr);
            let again = RemoteKey::from_bytes(&rmr.to_bytes()).unwrap();
            prop_assert_eq!(format!("{:?}", &again), format!("{:?}", &rmr));
            prop_assert_eq!((&again.region.keys, &again.region.nic), (&keys, &nic));
            prop_assert!(again.is_of(owner.0) && !again.is_of(owner.0 ^ 1));
            let _ = RemoteKey::from_bytes(&other);
            let bytes = rmr.to_bytes();
            prop_assert!(RemoteKey::from_bytes(&bytes[..bytes.len().min(27)]).is_err());
        }
    }

    #[test]
    fn a_part_lies_within_the_part_that_it_is_of() {
        let rmr = RemoteKey::new((0, Rank(0)), (1, 1), 100, Vec::new(), None);
        let part = rmr.slice(10, 50).unwrap();
        assert!(part.slice(50, 0).is_some() && part.slice(49, 2).is_none());
        assert_eq!(part.slice(20, 5).unwrap().offset(), 30);
        assert!(rmr.slice(u64::MAX, 1).is_none() && rmr.slice(1, u64::MAX).is_none());
    }
}
