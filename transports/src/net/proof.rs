//! Both sides of a connection prove that they hold a secret, which is never sent.
//!
//! ```text
//! either    Opening { nonce, claim }      at once, before anything has come
//! dialer    Proof                         when it has the listener's opening
//! listener  Proof                         when the dialer's is right
//! ```
//!
//! A proof is HMAC-SHA-256 (RFC 2104, FIPS 180-4) with the secret as its key. It covers the
//! protocol with its version, the role of who proves, both nonces, and what both sides claim to be.
//! So an overheard proof is worth nothing on another connection, and one that is sent back is of
//! the wrong role. The dialer proves itself first: an unauthenticated peer gets no keyed hash.

use super::header::{BYE, OPENING, PROOF, Protocol, REFUSAL, words};
use hmac::{Hmac, KeyInit, Mac};
use rustix::io::Errno;
use sha2::Sha256;
use std::fmt;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A keyed hash.
pub type Proof = [u8; 32];

/// Random bytes of a connection.
type Nonce = [u8; 32];

/// Label in front of all that is hashed. Grows with every change to what follows.
const LABEL: [u8; 16] = *b"carrack proof 1\n";

/// The secret that both sides hold. `Debug` does not show it.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

impl Key {
    /// Returns the key that a secret stands for.
    pub fn of(secret: &[u8]) -> Self {
        // A key of HMAC may have any length.
        Self(Hmac::new_from_slice(secret).unwrap_or_else(|_| unreachable!("a key of any length")))
    }

    /// Returns a keyed hash for another purpose, which the label names.
    pub fn derive(&self, label: &[u8], bytes: &[u8]) -> Proof {
        self.0.clone().chain_update(label).chain_update(bytes).finalize().into_bytes().into()
    }

    fn hash(&self, said: &Said) -> Hmac<Sha256> {
        self.0.clone().chain_update(said.as_bytes())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The side that has called.
    Dialer,
    /// The side that was called.
    Listener,
}

/// One side's claim. Zero stands for an unknown value.
#[repr(C)]
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Claim {
    /// The run of the job.
    pub run: U64,
    /// The rank.
    pub rank: U32,
    /// The number of ranks.
    pub ranks: U32,
    /// Number of restarts of the job.
    pub restart: U32,
    /// The port at which it listens, or another number that its protocol gives a meaning.
    pub number: U32,
    /// The rank's device.
    pub device: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Opening {
    nonce: Nonce,
    claim: Claim,
}

/// The bytes that a proof hashes.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Said {
    label: [u8; 16],
    protocol: [u8; 4],
    version: U32,
    /// 1: a proof of the dialer. 2: of the listener.
    role: U32,
    dialer: Opening,
    listener: Opening,
}

/// The reason why the other side's proof failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unproven {
    /// The proof is of another secret, another connection, another side or another claim.
    #[error(
        "it does not know this job's secret: it belongs to another job; end what is left \
        of earlier ones"
    )]
    Secret,
    /// The other side has said something else.
    #[error("{0}")]
    Wrong(String),
    /// The other side does not want this side, for this reason.
    #[error("it says: {0}")]
    Refused(String),
    /// The other side ends the connection in order.
    #[error("it has ended the connection")]
    Bye,
}

/// One side of a proof: messages in, messages out, no input or output.
#[derive(Debug)]
pub struct Handshake {
    protocol: Protocol,
    key: Key,
    role: Role,
    mine: Opening,
    theirs: Option<Opening>,
}

/// The step that follows a message.
#[derive(Debug)]
pub enum Step {
    /// The other side's next message is waited for.
    Wait,
    /// Send this, then wait for its next message.
    Say(Vec<u8>),
    /// Both sides are proved: the other side is what it claims to be. The listener still has to
    /// send its own proof.
    Proven(Option<Vec<u8>>, Claim),
}

impl Handshake {
    /// Makes one side of a proof, with its claim.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn new(role: Role, protocol: Protocol, key: Key, claim: Claim) -> Result<Self, Errno> {
        let mine = Opening { nonce: super::random()?, claim };
        Ok(Self { protocol, key, role, mine, theirs: None })
    }

    /// Returns the first message, which the caller sends at once.
    pub fn opening(&self) -> Vec<u8> {
        self.protocol.message(OPENING, &[self.mine.as_bytes()])
    }

    /// Returns what the other side claims to be, proved or not.
    pub fn claim(&self) -> Option<Claim> {
        self.theirs.map(|theirs| theirs.claim)
    }

    /// Returns `true` if the other side's opening has come.
    pub fn has_heard(&self) -> bool {
        self.theirs.is_some()
    }

    /// Takes in a message.
    ///
    /// # Errors
    /// See [`Unproven`].
    pub fn hear(&mut self, bytes: &[u8]) -> Result<Step, Unproven> {
        let (kind, body) = self.protocol.read(bytes).map_err(Unproven::Wrong)?;
        match (kind, self.theirs) {
            (OPENING, None) => {
                let opening = Opening::read_from_bytes(body)
                    .map_err(|_| Unproven::Wrong("its opening has another length".into()))?;
                self.theirs = Some(opening);
                match self.role {
                    Role::Listener => Ok(Step::Wait),
                    Role::Dialer => Ok(Step::Say(self.proof(&opening))),
                }
            }
            (PROOF, Some(theirs)) => {
                let said = self.said(&theirs, role_number(other(self.role)));
                let is_right = self.key.hash(&said).verify_slice(body).is_ok();
                if !is_right {
                    return Err(Unproven::Secret);
                }
                let reply = (self.role == Role::Listener).then(|| self.proof(&theirs));
                Ok(Step::Proven(reply, theirs.claim))
            }
            (REFUSAL, _) => Err(Unproven::Refused(words(body))),
            (BYE, _) => Err(Unproven::Bye),
            (kind, _) => Err(Unproven::Wrong(format!(
                "it began with a message of kind {kind}, which is none of a greeting's here"
            ))),
        }
    }

    fn said(&self, theirs: &Opening, role: u32) -> Said {
        let (dialer, listener) = match self.role {
            Role::Dialer => (self.mine, *theirs),
            Role::Listener => (*theirs, self.mine),
        };
        let Protocol { tag, version, .. } = self.protocol;
        let (version, role) = (version.into(), role.into());
        Said { label: LABEL, protocol: tag, version, role, dialer, listener }
    }

    fn proof(&self, theirs: &Opening) -> Vec<u8> {
        let said = self.said(theirs, role_number(self.role));
        let proof: Proof = self.key.hash(&said).finalize().into_bytes().into();
        self.protocol.message(PROOF, &[&proof])
    }
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.claim.fmt(f)
    }
}

fn other(role: Role) -> Role {
    match role {
        Role::Dialer => Role::Listener,
        Role::Listener => Role::Dialer,
    }
}

fn role_number(role: Role) -> u32 {
    match role {
        Role::Dialer => 1,
        Role::Listener => 2,
    }
}

#[cfg(test)]
mod tests;
