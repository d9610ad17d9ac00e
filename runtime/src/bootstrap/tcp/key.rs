//! What the ranks of a job have in common, and how they prove it without saying it.
//!
//! The key is `SHA-256("carrack job secret 1" 0 secret)`, or without a secret
//! `SHA-256("carrack job without secret 1" 0 MASTER_PORT 0 TORCHELASTIC_RUN_ID)`. It is never sent:
//! whoever connects answers a challenge with a keyed hash (HMAC-SHA-256, RFC 2104) over what both
//! have said. The job's identity is `HMAC(key, "job" 0 salt)`, its first 16 bytes; rank 0 draws the
//! salt anew each time it starts, so two jobs with one secret are two jobs.
//!
//! HMAC is written here, over `sha2`: the crate `hmac` would bring a licence more, for eight lines.

#![forbid(unsafe_code)]

use sha2::{Digest, Sha256};
use std::fmt;

use super::super::job::JobId;

/// The fewest bytes that `CARRACK_JOB_SECRET` may have.
pub const LEAST_SECRET: usize = 16;

/// The block of SHA-256, in bytes.
const BLOCK: usize = 64;

/// A keyed hash.
pub(super) type Proof = [u8; 32];

/// What is drawn anew for each connection, or for each job.
pub(super) type Nonce = [u8; 16];

/// The key of a job; `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey([u8; 32]);

impl JobKey {
    /// The key that this secret stands for.
    pub fn of_secret(secret: &[u8]) -> Self {
        Self(digest(&[b"carrack job secret 1\0", secret]))
    }

    /// The key of a job that has no secret. It tells jobs apart, and keeps nobody out: all of it is
    /// known to whoever asks.
    ///
    /// `MASTER_ADDR` is no part of it: there is one rank 0 at a port, by whatever name it is
    /// called.
    pub fn without_secret(master_port: u16, run_id: Option<&str>) -> Self {
        let port = master_port.to_string();
        let run_id = run_id.unwrap_or_default();
        Self(digest(&[
            b"carrack job without secret 1\0",
            port.as_bytes(),
            b"\0",
            run_id.as_bytes(),
        ]))
    }

    /// The identity of the job that rank 0 has drawn this salt for.
    pub(super) fn job(&self, salt: &Nonce) -> JobId {
        let proof = self.proof(b"job\0", &[salt]);
        JobId::from_bytes(proof.first_chunk().copied().unwrap_or_default())
    }

    /// The keyed hash of what was said, under a label for what it proves.
    pub(super) fn proof(&self, label: &[u8], said: &[&[u8]]) -> Proof {
        let pad = |with: u8| {
            let mut block = [with; BLOCK];
            for (byte, key) in block.iter_mut().zip(self.0) {
                *byte ^= key;
            }
            block
        };
        let mut inner = Sha256::new_with_prefix(pad(0x36));
        inner.update(label);
        for part in said {
            inner.update(part);
        }
        digest(&[&pad(0x5c), &inner.finalize()])
    }
}

/// Whether two proofs are the same, in a time that does not tell where they differ.
pub(super) fn is_same(one: &Proof, other: &Proof) -> bool {
    one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 6 has a key of 131 bytes of 0xaa, which is hashed first; so is ours,
    /// always. This is the keyed hash of that test with the hashed key given.
    #[test]
    fn the_keyed_hash_is_that_of_the_rfc() {
        let key = JobKey(digest(&[&[0xaa; 131]]));
        let proof =
            key.proof(b"Test Using Larger Than Block-Size Key", &[b" - ", b"Hash Key First"]);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn jobs_differ_by_secret_port_run_and_salt() {
        let keys = [
            JobKey::of_secret(b"0123456789abcdef"),
            JobKey::of_secret(b"0123456789abcdeF"),
            JobKey::without_secret(29500, None),
            JobKey::without_secret(29501, None),
            JobKey::without_secret(29500, Some("run")),
        ];
        for (at, one) in keys.iter().enumerate() {
            for other in &keys[at + 1..] {
                assert_ne!(one, other);
                assert_ne!(one.job(&[1; 16]), other.job(&[1; 16]));
            }
            assert_ne!(one.job(&[1; 16]), one.job(&[2; 16]));
            assert_eq!(one.job(&[1; 16]), one.clone().job(&[1; 16]));
        }
    }

    #[test]
    fn debug_does_not_show_the_key() {
        assert_eq!(format!("{:?}", JobKey::of_secret(b"0123456789abcdef")), "JobKey(..)");
    }

    #[test]
    fn proofs_are_compared_to_the_last_byte() {
        let one = [7; 32];
        let mut other = one;
        assert!(is_same(&one, &other));
        other[31] ^= 1;
        assert!(!is_same(&one, &other));
    }
}
