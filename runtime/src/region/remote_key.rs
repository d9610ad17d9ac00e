//! The remote key of a region.

use super::AtomicAgent;
use super::direct::{RemoteRegion, Remotes};
use crate::error::RemoteKeyError;
use crate::names::Rank;
use crate::protocol::rkey::{RegionKey, RegionPart};
use carrack_transports::contract::{Imported, WireKey};
use std::sync::{Arc, OnceLock};

/// The remote key of a rank's region, or of a part of one.
/// [`Mr::remote_key`](super::Mr::remote_key) makes it, and other ranks put and get by it. Clones
/// share the mapping, which is made once.
#[derive(Clone)]
pub struct RemoteKey {
    region: Arc<NamedRegion>,
    part: RegionPart,
}

struct NamedRegion {
    key: RegionKey,
    imported: OnceLock<Result<(&'static str, Imported), String>>,
    /// The entry of the first device that asked: its runtime, its number, and its knowledge.
    direct: OnceLock<((u64, u32), Arc<RemoteRegion>)>,
}

impl RemoteKey {
    pub(super) fn new(key: RegionKey, part: RegionPart) -> Self {
        let named = NamedRegion { key, imported: OnceLock::new(), direct: OnceLock::new() };
        Self { region: Arc::new(named), part }
    }

    /// Returns the rank that owns the memory.
    pub fn owner(&self) -> Rank {
        self.region.key.owner
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.part.len
    }

    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.part.len == 0
    }

    /// Returns a part of it, or `None` if the part is not inside.
    pub fn slice(&self, offset: u64, len: u64) -> Option<Self> {
        let offset = self.at(offset, len)?;
        Some(Self { region: self.region.clone(), part: RegionPart { offset, len } })
    }

    /// Returns the beginning of a part in the region, or `None` if the part is not inside.
    #[inline]
    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<u64> {
        self.part.at(offset, len)
    }

    /// Encodes it as bytes, to be sent to another rank.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.region.key.encode(self.part)
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes), from this or another rank. A missing
    /// region is noticed at its first use.
    ///
    /// # Errors
    /// The bytes are no remote key.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RemoteKeyError> {
        let (key, part) = RegionKey::decode(bytes).ok_or(RemoteKeyError(bytes.len()))?;
        Ok(Self::new(key, part))
    }

    /// Returns the coherence owner of its words.
    pub fn atomics(&self) -> AtomicAgent {
        if self.region.key.nic.is_some() { AtomicAgent::Nic } else { AtomicAgent::Owner }
    }

    /// Returns `true` unless it names a region of another job.
    #[inline]
    pub(crate) fn is_of(&self, job: u64) -> bool {
        self.region.key.is_of(job)
    }

    /// Returns the transport whose NIC is the coherence owner of its words, if one is.
    #[inline]
    pub(crate) fn nic(&self) -> Option<&str> {
        self.region.key.nic.as_deref()
    }

    pub(crate) fn number(&self) -> u64 {
        self.region.key.number
    }

    /// Returns a device's knowledge of its place, for its NIC.
    pub(crate) fn direct(
        &self,
        runtime: u64,
        (device, remotes): (u32, &Remotes),
    ) -> Arc<RemoteRegion> {
        let fresh = || remotes.of(self.region.key.owner, self.region.key.number);
        let (whose, remote) = self.region.direct.get_or_init(|| ((runtime, device), fresh()));
        if *whose == (runtime, device) { remote.clone() } else { fresh() }
    }

    /// Returns its beginning in the region.
    pub(crate) fn offset(&self) -> u64 {
        self.part.offset
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
        let found = self.region.key.keys.iter().find(|(name, _)| name == transport);
        found.map(|(_, key)| key)
    }
}

impl std::fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (RegionKey { owner, number, .. }, RegionPart { offset, len }) =
            (&self.region.key, self.part);
        write!(f, "RemoteKey({owner}, {number:#x}, {len} B at {offset})")
    }
}
