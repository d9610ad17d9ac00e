//! The first messages of a connection, before the bytes of its link.
//!
//! Both sides prove themselves ([`crate::net::greeting`]). Then the dialer says `HELLO` with the
//! number of its link, and the listener `WELCOME` with the bytes of that link that it has. Behind
//! that the dialer sends frames, and the listener acknowledgements: the number of bytes that it
//! has, eight bytes each.

use crate::contract::Identity;
use crate::net::greeting::Greeting;
use crate::net::header::{FIRST_OWN, Protocol};
use crate::net::key::DeviceKey;
use crate::net::proof::{Claim, Key, Role};
use crate::net::streams::Limits;
use rustix::io::Errno;
use std::time::Duration;

/// The messages of this transport.
pub(super) const PROTOCOL: Protocol = Protocol { tag: *b"tcp ", version: 1, longest: 512 };

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

/// Returns the dialer's introduction of its link.
pub(super) fn hello(link: u64) -> Vec<u8> {
    PROTOCOL.message(HELLO, &[&link.to_le_bytes()])
}

/// Returns the listener's answer.
pub(super) fn welcome(received: u64) -> Vec<u8> {
    PROTOCOL.message(WELCOME, &[&received.to_le_bytes()])
}

/// Reads the number of the dialer's link.
///
/// # Errors
/// What is wrong with the message.
pub(super) fn read_hello(message: &[u8]) -> Result<u64, String> {
    number(message, HELLO)
}

/// Reads the number of bytes that the listener has.
///
/// # Errors
/// What is wrong with the message.
pub(super) fn read_welcome(message: &[u8]) -> Result<u64, String> {
    number(message, WELCOME)
}

fn number(message: &[u8], expected: u32) -> Result<u64, String> {
    let (kind, body) = PROTOCOL.read(message)?;
    match <[u8; 8]>::try_from(body) {
        Ok(number) if kind == expected => Ok(u64::from_le_bytes(number)),
        _ if kind == crate::net::header::REFUSAL => Err(crate::net::header::words(body)),
        _ => Err(format!("a message of kind {kind} and {} bytes", body.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_comes_back_and_another_message_does_not() {
        assert_eq!(read_hello(&hello(7)), Ok(7));
        assert_eq!(read_welcome(&welcome(u64::MAX)), Ok(u64::MAX));
        assert!(read_hello(&welcome(7)).is_err());
        assert!(read_hello(&PROTOCOL.message(HELLO, &[&[0; 9]])).is_err());
        assert_eq!(read_welcome(&PROTOCOL.refusal("gone")), Err("gone".into()));
    }
}
