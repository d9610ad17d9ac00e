//! Thread domains: queue pairs for which the device's library takes no locks.
//!
//! A thread that posts to a connection holds its lock, so the library's own lock inside it is
//! redundant. Each queue pair has a thread domain of its own: two in one domain could not be
//! posted to at the same time. A device has few (LCI's users ran out of 8192 on nodes of 64
//! ranks), and other programs want some. So a rank takes a limited number, and later connections
//! do without.

use super::sys::ProtectionDomain;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Thread domains of an opened port.
#[derive(Debug)]
pub(super) struct ThreadDomains {
    most: usize,
    given: Mutex<Vec<Weak<ProtectionDomain>>>,
}

impl ThreadDomains {
    /// Creates a limit of `most` domains.
    pub(super) fn new(most: u32) -> Self {
        Self { most: usize::try_from(most).unwrap_or(usize::MAX), given: Mutex::default() }
    }

    /// Returns a domain around `base` for one queue pair, which ends with it. `None`: the limit is
    /// reached, or the device gives none.
    pub(super) fn take(&self, base: &Arc<ProtectionDomain>) -> Option<Arc<ProtectionDomain>> {
        let mut given = self.given.lock();
        given.retain(|domain| domain.strong_count() > 0);
        if given.len() >= self.most {
            return None;
        }
        match base.for_one_thread() {
            Ok(domain) => {
                given.push(Arc::downgrade(&domain));
                Some(domain)
            }
            Err(error) => {
                tracing::debug!(%error, "a queue pair without a thread domain");
                None
            }
        }
    }
}
