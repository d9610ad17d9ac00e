//! Thread domains: queue pairs that the device's library takes no locks for.
//!
//! Whoever posts to a connection holds its lock, so a lock of the library's inside it keeps nobody
//! out. Each queue pair has a thread domain of its own: two of one domain would have to be posted
//! to one after the other. A device has few (LCI's users ran out of 8192 on nodes of 64 ranks), and
//! other programs want some; so a rank takes a limited number, and the connections after that go
//! without.

use super::sys::ProtectionDomain;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Those of an opened port.
#[derive(Debug)]
pub(super) struct ThreadDomains {
    most: usize,
    given: Mutex<Vec<Weak<ProtectionDomain>>>,
}

impl ThreadDomains {
    /// So many at most.
    pub(super) fn new(most: u32) -> Self {
        Self { most: usize::try_from(most).unwrap_or(usize::MAX), given: Mutex::default() }
    }

    /// A domain around `base` for one queue pair, which ends with it. `None`: there are as many as
    /// may be, or the device gives none.
    pub(super) fn take(&self, base: &Arc<ProtectionDomain>) -> Option<Arc<ProtectionDomain>> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
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
