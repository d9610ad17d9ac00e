//! Remote keys of all members.

use super::group::Group;
use crate::api::Runtime;
use crate::error::CollectiveError;
use crate::names::Rank;
use crate::region::{Mr, RemoteKey};

impl Group {
    /// Returns each member's remote key, in the group's order. All members call it, each with a
    /// registration of its own.
    ///
    /// The keys of two ranks may differ in length: a key names the transports that reach the
    /// memory.
    ///
    /// ```
    /// # use carrack::{Rank, Runtime, buffer::Region};
    /// let runtime = Runtime::start()?;
    /// let memory = Region::host(64);
    /// let registered = runtime.register_memory(&memory)?;
    /// let keys = runtime.exchange_keys(&registered)?;
    /// runtime.post_put(Rank(0), &[7; 8], &keys[0], 0).wait()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn exchange_keys(&self, mine: &Mr) -> Result<Vec<RemoteKey>, CollectiveError> {
        let mut bytes = mine.remote_key().to_bytes();
        let len = (bytes.len() as u64).to_le_bytes();
        let lengths = self.allgather(&len)?;
        let lengths = lengths.iter().map(|len| match <[u8; 8]>::try_from(&len[..]) {
            Ok(len) => usize::try_from(u64::from_le_bytes(len)).unwrap_or(usize::MAX),
            Err(_) => 0,
        });
        let lengths: Vec<_> = lengths.collect();
        // Keys are short, so a peer's length does not decide the memory that is allocated.
        let longest = lengths.iter().copied().max().unwrap_or(0).min(LONGEST);
        bytes.resize(longest, 0);
        let keys = self.allgather(&bytes)?;
        let key = |((bytes, len), rank): ((&Vec<u8>, usize), Rank)| {
            let key = bytes.get(..len).and_then(|bytes| RemoteKey::from_bytes(bytes).ok());
            key.ok_or(CollectiveError::Key { rank, len })
        };
        keys.iter().zip(lengths).zip(self.ranks()).map(key).collect()
    }
}

/// Bytes of the longest key: a key names a few transports, with a few words for each.
const LONGEST: usize = 64 << 10;

impl Runtime {
    /// Returns each rank's remote key, in the order of ranks: see [`Group::exchange_keys`].
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn exchange_keys(&self, mine: &Mr) -> Result<Vec<RemoteKey>, CollectiveError> {
        self.world().exchange_keys(mine)
    }
}
