//! Connections between processes that do not trust each other yet: framed, bounded, authenticated.
//!
//! | module | one idea |
//! |---|---|
//! | [`header`] | the first bytes of each message: which protocol, which version, which kind |
//! | [`frames`] | messages on a stream of bytes, each with its length in front |
//! | [`parts`] | structs and parts with a length, in the bytes of a message |
//! | [`shortage`] | descriptors or memory that this process lacks for a connection |
//! | [`sockets`] | TCP sockets, dialled, listening and kept alive |
//! | [`streams`] | a TCP connection that carries frames |
//! | [`key`] | the unique name of a device |
//! | [`packets`] | a Unix socket that carries records and file descriptors |
//! | [`adopt`] | the socket that a process inherits from its launcher |
//! | [`proof`] | both sides prove that they hold a secret, which is never sent |
//! | [`greeting`] | a proof over a connection, without a blocking wait |
//! | [`pending`] | connections that have not proved anything yet: bounded in number and time |
//! | [`watched`] | a descriptor that leaves its epoll set before it is closed |
//! | [`interfaces`] | the addresses at which other machines reach this one |
//!
//! The order on a connection is fixed: a greeting, then the messages of its protocol.
//! No descriptor, key or address goes over before the greeting has proved both sides.

pub mod adopt;
pub mod frames;
pub mod greeting;
pub mod header;
pub mod interfaces;
pub mod key;
pub mod packets;
pub mod parts;
pub mod pending;
pub mod proof;
pub mod shortage;
pub mod sockets;
pub mod streams;
pub mod watched;

use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

/// Returns random bytes of the kernel.
///
/// # Errors
/// The kernel's, if it has none.
pub fn random<const N: usize>() -> rustix::io::Result<[u8; N]> {
    let (mut bytes, mut filled) = ([0; N], 0);
    while filled < N {
        filled += retry_on_intr(|| getrandom(&mut bytes[filled..], GetRandomFlags::empty()))?;
    }
    Ok(bytes)
}

/// Returns the boot id of this kernel, which differs between machines, and virtual machines.
///
/// # Errors
/// The file, and why it cannot be read.
pub fn boot_id() -> Result<[u8; 16], String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{path} cannot be read: {error}"))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16);
    Ok(id.map_err(|_| format!("{path} holds no id: {text:?}"))?.to_be_bytes())
}

/// Returns `true` if a call failed because something is short for now: descriptors, memory, or room
/// in a queue. The same call can succeed later, and its failure says nothing about a peer.
pub fn is_shortage(error: Errno) -> bool {
    matches!(
        error,
        Errno::AGAIN
            | Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
            | Errno::NOBUFS
            | Errno::NOSPC
            | Errno::TOOMANYREFS
    )
}
