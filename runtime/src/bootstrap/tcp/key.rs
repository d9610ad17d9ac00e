//! The key that the ranks of a job share. They prove it without sending it.
//!
//! The key is `SHA-256("carrack job secret 1" 0 secret)`, or without a secret
//! `SHA-256("carrack job without secret 1" 0 MASTER_PORT 0 TORCHELASTIC_RUN_ID)`. It is never sent:
//! both sides of a connection prove that they hold it (`net::proof` of the transports). The job's
//! identity is `HMAC(key, "job" 0 salt)`, its first 16 bytes. Rank 0 draws the salt anew each time
//! it starts, so two jobs with one secret are two jobs.

#![forbid(unsafe_code)]

use carrack_transports::net::proof::Key;
use sha2::{Digest, Sha256};
use std::fmt;

use crate::bootstrap::job::JobId;

/// The least number of bytes of `CARRACK_JOB_SECRET`.
pub const LEAST_SECRET: usize = 16;

/// Random bytes of a job.
pub(super) type Salt = [u8; 16];

/// The key of a job; `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey([u8; 32]);

impl JobKey {
    /// Returns the key of this secret.
    pub fn of_secret(secret: &[u8]) -> Self {
        Self(digest(&[b"carrack job secret 1\0", secret]))
    }

    /// Returns the key of a job without a secret. It distinguishes jobs, and protects against no
    /// attacker: all of its parts are public.
    ///
    /// `MASTER_ADDR` is no part of it: a port has one rank 0, whose machine may have several names.
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

    /// Returns the identity of the job with this salt of rank 0.
    pub(super) fn job(&self, salt: &Salt) -> JobId {
        let proof = self.key().derive(b"job\0", salt);
        JobId::from_bytes(proof.first_chunk().copied().unwrap_or_default())
    }

    /// Returns the key of the ranks' proofs.
    pub(super) fn key(&self) -> Key {
        Key::of(&self.0)
    }
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
}
