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
        if !mine.is_in(&self.runtime.0.regions) {
            return Err(CollectiveError::Foreign);
        }
        let mine = mine.remote_key().to_bytes();
        let keys = self.allgatherv(&mine).map_err(|error| error.of("exchange_keys"))?;
        let key = |(bytes, rank): (&Vec<u8>, Rank)| {
            let len = bytes.len();
            RemoteKey::from_bytes(bytes).map_err(|_| CollectiveError::Key { rank, len })
        };
        keys.iter().zip(self.ranks()).map(key).collect()
    }
}

impl Runtime {
    /// Returns each rank's remote key, in the order of ranks: see [`Group::exchange_keys`].
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn exchange_keys(&self, mine: &Mr) -> Result<Vec<RemoteKey>, CollectiveError> {
        self.world().exchange_keys(mine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Region;
    use crate::settings::{GpuChoice, Settings, TransportChoice};

    #[test]
    fn an_exchange_that_fails_names_the_call_that_the_user_made() {
        let settings =
            Settings::builder().transports(vec![TransportChoice::Loopback]).gpu(GpuChoice::None);
        let mut ranks = Runtime::in_process_with(2, &settings.build().unwrap()).unwrap();
        drop(ranks.pop());
        let registered = ranks[0].register_memory(&Region::host(8)).unwrap();
        let error = ranks[0].exchange_keys(&registered).unwrap_err().to_string();
        assert!(error.starts_with("exchange_keys: rank 1 is gone"), "{error}");
    }
}
