//! The few messages over a Unix socket by which a sender shows its segment to a receiver.
//!
//! ```text
//! both      a greeting, which proves both sides      (net::greeting)
//! sender    Hello { geometry }                       + segment
//! receiver  Welcome { bell, fenced }                 + page of bells, eventfd
//!        or Refusal { why }
//! either    Bye, before it closes in order
//! ```

use super::Geometry;
use crate::contract::{AddressBlob, Identity};
use crate::net::greeting::Greeting;
use crate::net::header::{BYE, FIRST_OWN, Protocol, REFUSAL, words};
use crate::net::proof::{Claim, Key, Role};
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest message in bytes.
pub const MAX_MESSAGE: usize = 256;

/// Protocol of shared memory. Its version grows with every change to the messages, the segment's
/// layout or the ring's.
pub const PROTOCOL: Protocol = Protocol { tag: *b"shm ", version: 3, longest: MAX_MESSAGE };

const HELLO: u32 = FIRST_OWN;
const WELCOME: u32 = FIRST_OWN + 1;

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct HelloBody {
    slots: U32,
    chunks: U32,
    chunk_size: U32,
}

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct WelcomeBody {
    bell: U32,
    fenced: U32,
}

/// A message between two proved sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeMessage {
    /// The sender introduces itself; comes with the segment's descriptor.
    Hello {
        /// The segment's.
        geometry: Geometry,
    },
    /// The receiver lets it in; comes with the descriptors of its bells and its eventfd.
    Welcome {
        /// The bell of this link.
        bell: u32,
        /// `true` if the sender must use a real fence, since the receiver's barrier cannot replace
        /// it.
        fenced: bool,
    },
    /// The receiver refuses the sender.
    Refusal(String),
    /// The end, in order.
    Bye,
}

impl HandshakeMessage {
    /// Returns the bytes of the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello { geometry: Geometry { slots, chunks, chunk_size } } => {
                let (slots, chunks) = ((*slots).into(), (*chunks).into());
                let hello = HelloBody { slots, chunks, chunk_size: (*chunk_size).into() };
                PROTOCOL.message(HELLO, &[hello.as_bytes()])
            }
            Self::Welcome { bell, fenced } => {
                let fenced = u32::from(*fenced).into();
                let welcome = WelcomeBody { bell: (*bell).into(), fenced };
                PROTOCOL.message(WELCOME, &[welcome.as_bytes()])
            }
            Self::Refusal(why) => PROTOCOL.refusal(why),
            Self::Bye => PROTOCOL.bye(),
        }
    }

    /// Reads a peer's message.
    ///
    /// # Errors
    /// The defect of the message.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (kind, body) = PROTOCOL.read(bytes)?;
        let length = || format!("a message of kind {kind} with {} bytes", body.len());
        match kind {
            HELLO => {
                let hello = HelloBody::read_from_bytes(body).map_err(|_| length())?;
                let (slots, chunks) = (hello.slots.get(), hello.chunks.get());
                let geometry = Geometry { slots, chunks, chunk_size: hello.chunk_size.get() };
                Ok(Self::Hello { geometry })
            }
            WELCOME => {
                let welcome = WelcomeBody::read_from_bytes(body).map_err(|_| length())?;
                Ok(Self::Welcome { bell: welcome.bell.get(), fenced: welcome.fenced.get() != 0 })
            }
            REFUSAL => Ok(Self::Refusal(words(body))),
            BYE if body.is_empty() => Ok(Self::Bye),
            kind => Err(format!("a message of unknown kind {kind}")),
        }
    }
}

/// Returns the greeting with which a connection of a rank begins.
///
/// # Errors
/// The kernel has no random bytes.
pub fn greeting(role: Role, identity: &Identity) -> Result<Greeting, Errno> {
    let (rank, ranks) = (identity.me.0.into(), identity.ranks.into());
    let claim = Claim { rank, ranks, ..Claim::default() };
    Greeting::new(role, PROTOCOL, &Key::of(&identity.secret), claim)
}

/// Identity of a machine with respect to abstract sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketNamespace {
    /// The kernel's boot.
    pub boot: [u8; 16],
    /// The network namespace, which is where abstract socket names live.
    pub net_namespace: u64,
}

impl SocketNamespace {
    /// Returns the namespace of this process.
    pub fn here() -> Result<Self, String> {
        let path = "/proc/self/ns/net";
        let meta =
            std::fs::metadata(path).map_err(|error| format!("{path} cannot be read: {error}"))?;
        Ok(Self { boot: crate::net::boot_id()?, net_namespace: meta.ino() })
    }
}

/// Address of a device: its namespace, and its socket's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmAddress {
    /// The namespace of its process.
    pub namespace: SocketNamespace,
    /// Name of the socket in the abstract namespace.
    pub name: Vec<u8>,
}

/// First bytes of an encoded address; the name follows.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ShmAddressHead {
    boot: [u8; 16],
    namespace: U64,
}

impl ShmAddress {
    /// Makes an address that no other device has.
    pub fn fresh(namespace: SocketNamespace, identity: &Identity) -> Self {
        // Needs to be unique only: the secret admits a peer.
        let random = crate::net::random().unwrap_or_else(|_| {
            (&raw const namespace as u64 ^ u64::from(std::process::id())).to_ne_bytes()
        });
        let name = format!(
            "carrack-{}-{}-{:016x}",
            std::process::id(),
            identity.me.0,
            u64::from_ne_bytes(random)
        );
        Self { namespace, name: name.into_bytes() }
    }

    /// Returns the form that travels.
    pub fn encode(&self) -> AddressBlob {
        let head = ShmAddressHead {
            boot: self.namespace.boot,
            namespace: self.namespace.net_namespace.into(),
        };
        AddressBlob([head.as_bytes(), &self.name].concat())
    }

    /// Reads an address; `None` when the bytes cannot be one.
    pub fn decode(blob: &AddressBlob) -> Option<Self> {
        let (ShmAddressHead { boot, namespace }, name) =
            ShmAddressHead::ref_from_prefix(&blob.0).ok()?;
        // 107: the room in the kernel's socket addresses.
        if name.is_empty() || name.len() > 107 {
            return None;
        }
        let namespace = SocketNamespace { boot: *boot, net_namespace: namespace.get() };
        Some(Self { namespace, name: name.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::PeerId;
    use proptest::prelude::*;

    #[test]
    fn every_message_comes_back_as_it_was() {
        let geometry = Geometry { slots: 8, chunks: 3, chunk_size: 64 };
        for message in [
            HandshakeMessage::Hello { geometry },
            HandshakeMessage::Welcome { bell: 4095, fenced: true },
            HandshakeMessage::Refusal("not of this job".into()),
            HandshakeMessage::Bye,
        ] {
            assert_eq!(HandshakeMessage::decode(&message.encode()), Ok(message));
        }
        assert!(HandshakeMessage::Refusal("x".repeat(1000)).encode().len() <= MAX_MESSAGE);
    }

    #[test]
    fn an_address_comes_back_as_it_was() {
        let identity = Identity { me: PeerId(1), ranks: 2, secret: [0; 16] };
        let address = ShmAddress::fresh(SocketNamespace::here().unwrap(), &identity);
        assert_eq!(ShmAddress::decode(&address.encode()), Some(address.clone()));
        assert_ne!(ShmAddress::fresh(address.namespace.clone(), &identity), address);
    }

    proptest! {
        #[test]
        fn whatever_arrives_is_a_message_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            let _ = HandshakeMessage::decode(&bytes);
            let _ = ShmAddress::decode(&AddressBlob(bytes.clone()));
            for kind in [HELLO, WELCOME, REFUSAL, BYE] {
                let _ = HandshakeMessage::decode(&PROTOCOL.message(kind, &[&bytes]));
            }
        }
    }
}
