//! The first messages of a connection, before the bytes of its link.
//!
//! Both sides prove themselves ([`crate::net::greeting`]). Then the dialer says `HELLO` with the
//! number of its link, its window and the bytes that it has sent over earlier connections. The
//! listener says `WELCOME` with the bytes of that link that it has; it refuses one that has ended.
//! Behind that the dialer sends frames, and the listener acknowledgements: the number of bytes that
//! it has, eight bytes each. One is due at a quarter of the window, or sooner where less than a
//! message would fit.
//!
//! The listener's own link may go the other way on the same connection. It says [`JOIN`] and its
//! `HELLO` in place of an acknowledgement. The dialer answers by a frame of its link,
//! [`Frame::Welcome`](super::frame::Frame::Welcome). From then on both directions carry frames, and
//! acknowledgements are frames, too.

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
pub(super) const PROTOCOL: Protocol = Protocol { tag: *b"tcp ", version: 2, longest: 512 };

/// Stands in place of an acknowledgement before the listener's own [`Hello`].
pub(super) const JOIN: u64 = u64::MAX - 1;

/// Answer to a link that is refused, in place of its bytes.
pub(super) const ENDED: u64 = u64::MAX;

const HELLO: u32 = FIRST_OWN;
const WELCOME: u32 = FIRST_OWN + 1;

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

/// A link, as its sender introduces it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Hello {
    /// Number of the link, which its sender has drawn.
    pub(super) link: U64,
    /// Bytes of messages that may be sent without an acknowledgement.
    pub(super) window: U64,
    /// Bytes of the link that were sent over earlier connections.
    pub(super) sent: U64,
    /// Number of the connection among those of the link, below 2^56. An earlier one that is heard
    /// of later is not taken.
    pub(super) attempt: U64,
}

impl Hello {
    pub(super) fn message(&self) -> Vec<u8> {
        PROTOCOL.message(HELLO, &[self.as_bytes()])
    }

    /// Returns the words of a listener that sends its link the other way.
    pub(super) fn join(&self) -> Vec<u8> {
        [&JOIN.to_le_bytes(), self.as_bytes()].concat()
    }

    /// Reads the introduction behind [`JOIN`], once all of it has come.
    pub(super) fn joined(words: &[[u8; 8]]) -> Option<Self> {
        const WORDS: usize = size_of::<Hello>() / 8;
        Self::read_from_bytes(words.first_chunk::<WORDS>()?.as_flattened()).ok()
    }

    /// Reads the dialer's introduction.
    ///
    /// # Errors
    /// What is wrong with the message.
    pub(super) fn read(message: &[u8]) -> Result<Self, String> {
        Self::read_from_bytes(body(message, HELLO)?).map_err(|_| "a hello too short or long".into())
    }
}

/// Returns the listener's answer.
pub(super) fn welcome(received: u64) -> Vec<u8> {
    PROTOCOL.message(WELCOME, &[&received.to_le_bytes()])
}

/// Reads the number of bytes that the listener has.
///
/// # Errors
/// What is wrong with the message.
pub(super) fn read_welcome(message: &[u8]) -> Result<u64, String> {
    let bytes = body(message, WELCOME)?.try_into();
    bytes.map(u64::from_le_bytes).map_err(|_| "a welcome too short or long".into())
}

fn body(message: &[u8], expected: u32) -> Result<&[u8], String> {
    match PROTOCOL.read(message)? {
        (kind, body) if kind == expected => Ok(body),
        (REFUSAL, body) => Err(words(body)),
        (kind, _) => Err(format!("a message of kind {kind}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_comes_back_and_another_message_does_not() {
        let hello = Hello { link: 7.into(), window: 9.into(), sent: 0.into(), attempt: 3.into() };
        let joined = hello.join();
        let (words, _) = joined.as_chunks::<8>();
        assert_eq!(words[0], JOIN.to_le_bytes());
        assert_eq!(Hello::joined(&words[1..]), Some(hello));
        assert_eq!(Hello::joined(&words[1..words.len() - 1]), None);
        assert_eq!(Hello::read(&hello.message()), Ok(hello));
        assert_eq!(read_welcome(&welcome(u64::MAX)), Ok(u64::MAX));
        assert!(Hello::read(&welcome(7)).is_err());
        assert!(Hello::read(&PROTOCOL.message(HELLO, &[&[0; 9]])).is_err());
        assert_eq!(read_welcome(&PROTOCOL.refusal("gone")), Err("gone".into()));
    }
}
