//! The identity of a job.

#![forbid(unsafe_code)]

use std::fmt;

use carrack_transports::fnv;
use carrack_transports::net::random;
use sha2::{Digest, Sha256};

use super::error::BootstrapError;

/// Sixteen random bytes that only the ranks of a job know.
///
/// They distinguish a peer's connection from that of a process that is not of the job. `Debug`
/// shows only a fingerprint: enough to see in a log that two ranks belong together, too little to
/// join the job.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct JobId([u8; 16]);

impl JobId {
    /// Returns a new identity from the kernel's random numbers.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Os`] when the kernel has none to give.
    pub fn random() -> Result<Self, BootstrapError> {
        let failed = |errno| BootstrapError::os("getting random bytes for the job id", errno);
        random().map(Self).map_err(failed)
    }

    /// Returns the identity with these bytes, which the launcher sent.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns a number that distinguishes names of this job from names of other jobs. It finds
    /// mistakes, and is no protection. It may be sent to any process, because the secret cannot be
    /// computed from it.
    pub(crate) fn tag(&self) -> u64 {
        let hash =
            Sha256::new().chain_update(b"carrack: a job's tag").chain_update(self.0).finalize();
        hash.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// Returns the secret. Callers must neither log nor send it.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // FNV-1a folded to 16 bits. It need not be a cryptographic hash: 16 bits tell next to
        // nothing of 128.
        let hash = fnv::of(&self.0);
        let fold = (hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48)) & 0xffff;
        write!(f, "JobId(#{fold:04x})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_jobs_are_never_the_same() {
        assert_ne!(JobId::random().unwrap(), JobId::random().unwrap());
    }

    #[test]
    fn debug_does_not_show_the_secret() {
        let id = JobId::from_bytes(*b"0123456789abcdef");
        let shown = format!("{id:?}");
        assert!(shown.len() <= 12, "{shown}");
        assert_eq!(shown, format!("{:?}", id.clone()), "the fingerprint is stable");
        assert_ne!(shown, format!("{:?}", JobId::from_bytes(*b"1123456789abcdef")));
    }
}
