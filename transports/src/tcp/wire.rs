//! The first messages of a connection, before the bytes of its links.
//!
//! Both sides prove themselves ([`crate::net::greeting`]). Then the dialer says `HELLO`, and the
//! listener `WELCOME`, with the same words; it refuses links that have ended. Behind that both send
//! frames, each from the byte on that the other lacks. An acknowledgement is due at a quarter of
//! the window, or sooner where less than a message would fit.

use crate::contract::Identity;
use crate::net::greeting::Greeting;
use crate::net::header::{FIRST_OWN, Protocol, REFUSAL, words};
use crate::net::key::DeviceKey;
use crate::net::proof::{Claim, Key, Role};
use crate::net::streams::Limits;
use rustix::io::Errno;
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The messages of this transport.
pub(super) const PROTOCOL: Protocol = Protocol { tag: *b"tcp ", version: 3, longest: 512 };

pub(super) const HELLO: u32 = FIRST_OWN;
pub(super) const WELCOME: u32 = FIRST_OWN + 1;

/// Returns the bounds of a connection before its frames. `timeout`: until a silent peer counts as
/// gone.
pub(super) fn limits(timeout: Duration) -> Limits {
    Limits { longest: PROTOCOL.longest, unwritten: 8 * PROTOCOL.longest, silence: timeout / 2 }
}

/// Returns the greeting of a device that listens at this port.
///
/// # Errors
/// The kernel has no random bytes.
pub(super) fn greeting(
    role: Role,
    identity: &Identity,
    device: DeviceKey,
    port: u16,
) -> Result<Greeting, Errno> {
    let claim = Claim {
        rank: identity.me.0.into(),
        ranks: identity.ranks.into(),
        number: u32::from(port).into(),
        device: device.0,
        ..Claim::default()
    };
    Greeting::new(role, PROTOCOL, &Key::of(&identity.secret), claim)
}

/// One end of a connection, as its device introduces it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Hello {
    /// Number of the end, which its device has drawn.
    pub(super) from: U64,
    /// Number of the other end; 0 if that is not known.
    pub(super) to: U64,
    /// Bytes of messages that are sent without an acknowledgement.
    pub(super) window: U64,
    /// Number of the connection among those of both ends. A lower one that is heard of later is not
    /// taken. The listener's counts.
    pub(super) attempt: U64,
    /// Bytes of the other end that have come.
    pub(super) received: U64,
}

impl Hello {
    /// Returns the introduction as a message of a `kind`: [`HELLO`] or [`WELCOME`].
    pub(super) fn message(&self, kind: u32) -> Vec<u8> {
        PROTOCOL.message(kind, &[self.as_bytes()])
    }

    /// Reads an introduction.
    ///
    /// # Errors
    /// The fault of the message, in words.
    pub(super) fn read(expected: u32, message: &[u8]) -> Result<Self, String> {
        match PROTOCOL.read(message)? {
            (kind, body) if kind == expected => match Self::read_from_bytes(body) {
                Ok(hello) if hello.from.get() > 0 => Ok(hello),
                _ => Err(format!("an introduction of {} bytes", body.len())),
            },
            (REFUSAL, body) => Err(words(body)),
            (kind, _) => Err(format!("a message of kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_comes_back_and_another_message_does_not() {
        let [from, to, window, attempt, received] = [7, 0, 9, 3, u64::MAX].map(U64::from);
        let hello = Hello { from, to, window, attempt, received };
        assert_eq!(Hello::read(HELLO, &hello.message(HELLO)), Ok(hello));
        assert!(Hello::read(HELLO, &hello.message(WELCOME)).is_err());
        assert!(Hello::read(HELLO, &PROTOCOL.message(HELLO, &[&[0; 9]])).is_err());
        assert_eq!(Hello::read(WELCOME, &PROTOCOL.refusal("gone")), Err("gone".into()));
    }
}
