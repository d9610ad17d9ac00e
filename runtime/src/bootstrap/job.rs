//! The identity of a job.

#![forbid(unsafe_code)]

use std::fmt;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

use super::error::BootstrapError;

/// Sixteen random bytes that only the ranks of a job know.
///
/// They tell a peer's connection from a stranger's, so `Debug` shows only a fingerprint of them:
/// enough to see in a log whether two ranks belong together, too little to join the job.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct JobId([u8; 16]);

impl JobId {
    /// A new identity from the kernel's random numbers.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Os`] when the kernel has none to give.
    pub fn random() -> Result<Self, BootstrapError> {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(errno) => {
                    return Err(BootstrapError::os("getting random bytes for the job id", errno));
                }
            }
        }
        Ok(Self(bytes))
    }

    /// The identity with these bytes, as it came from the launcher.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// A number by which names of one job's things are told from those of another's, for who is
    /// mistaken, not who is hostile. It may be sent to anybody: of the secret it says nothing that
    /// can be computed.
    pub(crate) fn tag(&self) -> u64 {
        let hash =
            Sha256::new().chain_update(b"carrack: a job's tag").chain_update(self.0).finalize();
        hash.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// The secret itself. Callers neither log it nor send it.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // FNV-1a folded to 16 bits. It is no cryptographic hash, and need not be one: 16 bits say
        // next to nothing about 128.
        let hash = self.0.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
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
