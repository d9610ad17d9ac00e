//! The shared table of the bootstraps that need no launcher.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::error::BootstrapError;
use super::protocol::{check_key, check_total, check_value};

/// Values by key, each written once, within the bounds of every bootstrap.
#[derive(Debug, Default)]
pub(super) struct Table {
    values: HashMap<String, Vec<u8>>,
}

impl Table {
    /// Puts a value for a rank that has put `bytes_before` bytes, and returns its new total.
    pub(super) fn put(
        &mut self,
        bytes_before: usize,
        key: &str,
        value: &[u8],
    ) -> Result<usize, BootstrapError> {
        check_key(key)?;
        check_value(value)?;
        let bytes_now = bytes_before + key.len() + value.len();
        check_total(bytes_now)?;
        match self.values.entry(key.to_owned()) {
            Entry::Vacant(entry) => {
                entry.insert(value.to_vec());
                Ok(bytes_now)
            }
            Entry::Occupied(entry) if entry.get() == value => Ok(bytes_before),
            Entry::Occupied(_) => Err(BootstrapError::AlreadyPut { key: key.to_owned() }),
        }
    }

    /// A copy of the key's value.
    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.values.get(key).cloned()
    }
}
