//! A job of one rank.

#![forbid(unsafe_code)]

use parking_lot::Mutex;

use super::Bootstrap;
use super::error::BootstrapError;
use super::job::JobId;
use super::protocol::check_key;
use super::table::Table;

/// The bootstrap of a program that was started without a launcher: rank 0 of 1.
#[derive(Debug)]
pub struct Alone {
    job: JobId,
    /// The table, and the total bytes of its keys and values.
    table: Mutex<(Table, usize)>,
}

impl Alone {
    /// A new job with one rank.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Os`] when the kernel has no random bytes for the job's identity.
    pub fn new() -> Result<Self, BootstrapError> {
        Ok(Self { job: JobId::random()?, table: Mutex::default() })
    }
}

impl Bootstrap for Alone {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn job(&self) -> &JobId {
        &self.job
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        let mut table = self.table.lock();
        let (table, bytes_put) = &mut *table;
        *bytes_put = table.put(*bytes_put, key, value)?;
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        check_key(key)?;
        Ok(self.table.lock().0.get(key))
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_alone_reads_what_it_wrote_and_never_waits() {
        let alone = Alone::new().unwrap();
        assert_eq!((alone.rank(), alone.size()), (0, 1));
        assert_eq!(alone.get("a").unwrap(), None);
        alone.put("a", b"1").unwrap();
        alone.put("a", b"1").unwrap();
        assert_eq!(alone.get("a").unwrap().unwrap(), b"1");
        assert!(matches!(alone.put("a", b"2"), Err(BootstrapError::AlreadyPut { .. })));
        alone.fence().unwrap();
        alone.finish().unwrap();
    }

    #[test]
    fn keys_and_values_have_bounds() {
        let alone = Alone::new().unwrap();
        let too_large = |result| matches!(result, Err(BootstrapError::TooLarge { .. }));
        assert!(too_large(alone.put(&"k".repeat(257), b"")));
        assert!(too_large(alone.put("k", &[0; 65537])));
        alone.put(&"k".repeat(256), &[0; 65536]).unwrap();
    }
}
