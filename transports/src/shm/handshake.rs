//! The few messages over a Unix socket by which a sender shows its segment to a receiver.
//!
//! ```text
//! sender    Hello { version, who, secret, geometry }  + segment
//! receiver  Welcome { bell, fenced }                   + page of bells, eventfd
//!        or Refusal { why }
//! either    Bye, before it closes in order
//! ```

use super::Geometry;
use crate::contract::{AddressBlob, Identity, PeerId};
use std::os::unix::fs::MetadataExt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: u32 = u32::from_le_bytes(*b"CRRK");
/// Grows with every change to the messages, the segment's layout or the ring's.
const VERSION: u32 = 2;

/// Longest message in bytes.
pub const MAX_MESSAGE: usize = 256;

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Frame {
    magic: u32,
    version: u32,
    kind: u32,
    words: [u32; 5],
    secret: [u8; 16],
}

/// Message between a sender and a receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The sender introduces itself; comes with the segment's descriptor.
    Hello {
        /// Name that the receiver uses for the sender.
        from: PeerId,
        /// The job's secret.
        secret: [u8; 16],
        /// Sizes of the segment.
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

impl Message {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame =
            Frame { magic: MAGIC, version: VERSION, kind: 0, words: [0; 5], secret: [0; 16] };
        let mut text = &[][..];
        match self {
            Self::Hello { from, secret, geometry } => {
                frame.kind = 1;
                frame.words = [from.0, geometry.slots, geometry.chunks, geometry.chunk_size, 0];
                frame.secret = *secret;
            }
            Self::Welcome { bell, fenced } => {
                frame.kind = 2;
                frame.words = [*bell, u32::from(*fenced), 0, 0, 0];
            }
            Self::Refusal(why) => {
                frame.kind = 3;
                let room = MAX_MESSAGE - size_of::<Frame>();
                text = why.as_bytes();
                text = &text[..text.len().min(room)];
            }
            Self::Bye => frame.kind = 4,
        }
        let mut bytes = frame.as_bytes().to_vec();
        bytes.extend(text);
        bytes
    }

    /// Reads a peer's message.
    ///
    /// # Errors
    /// The defect of the message.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (frame, text) = Frame::read_from_prefix(bytes)
            .map_err(|_| format!("a message of {} bytes is too short", bytes.len()))?;
        if frame.magic != MAGIC {
            return Err("a message that is not Carrack's".into());
        }
        if frame.version != VERSION {
            return Err(format!(
                "it speaks version {} of the protocol, this rank {VERSION}: run one build on all \
                ranks",
                frame.version
            ));
        }
        let [a, b, c, d, _] = frame.words;
        match frame.kind {
            1 => {
                let geometry = Geometry { slots: b, chunks: c, chunk_size: d };
                Ok(Self::Hello { from: PeerId(a), secret: frame.secret, geometry })
            }
            2 => Ok(Self::Welcome { bell: a, fenced: b != 0 }),
            3 => Ok(Self::Refusal(String::from_utf8_lossy(text).into_owned())),
            4 => Ok(Self::Bye),
            kind => Err(format!("a message of unknown kind {kind}")),
        }
    }
}

/// Machine and network namespace: the scope of abstract sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The kernel's boot.
    pub boot: [u8; 16],
    /// The network namespace, which is where abstract socket names live.
    pub net_namespace: u64,
}

impl Place {
    /// Returns the place of this process.
    pub fn here() -> Result<Self, String> {
        let path = "/proc/sys/kernel/random/boot_id";
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("{path} cannot be read: {error}"))?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let boot = u128::from_str_radix(&digits, 16)
            .map_err(|_| format!("{path} holds no id: {text:?}"))?;
        let path = "/proc/self/ns/net";
        let meta =
            std::fs::metadata(path).map_err(|error| format!("{path} cannot be read: {error}"))?;
        Ok(Self { boot: boot.to_be_bytes(), net_namespace: meta.ino() })
    }
}

/// Address of a device: its place, and its socket's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The place of its process.
    pub place: Place,
    /// Its socket's name in the abstract namespace.
    pub name: Vec<u8>,
}

impl Address {
    /// Makes an address that no other device has.
    pub fn fresh(place: Place, identity: &Identity) -> Self {
        let mut random = [0; 8];
        // Needs to be unique only: the secret admits a peer.
        if rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).is_err() {
            random = (&raw const random as u64 ^ u64::from(std::process::id())).to_ne_bytes();
        }
        let name = format!(
            "carrack-{}-{}-{:016x}",
            std::process::id(),
            identity.me.0,
            u64::from_ne_bytes(random)
        );
        Self { place, name: name.into_bytes() }
    }

    /// Returns the form that travels.
    pub fn encode(&self) -> AddressBlob {
        let mut bytes = self.place.boot.to_vec();
        bytes.extend(self.place.net_namespace.to_le_bytes());
        bytes.extend(&self.name);
        AddressBlob(bytes)
    }

    /// Reads an address; `None` when the bytes cannot be one.
    pub fn decode(blob: &AddressBlob) -> Option<Self> {
        let (boot, rest) = blob.0.split_first_chunk::<16>()?;
        let (namespace, name) = rest.split_first_chunk::<8>()?;
        // 107: the room in the kernel's socket addresses.
        if name.is_empty() || name.len() > 107 {
            return None;
        }
        let place = Place { boot: *boot, net_namespace: u64::from_le_bytes(*namespace) };
        Some(Self { place, name: name.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_message_comes_back_as_it_was() {
        let geometry = Geometry { slots: 8, chunks: 3, chunk_size: 64 };
        for message in [
            Message::Hello { from: PeerId(7), secret: [9; 16], geometry },
            Message::Welcome { bell: 4095, fenced: true },
            Message::Refusal("not of this job".into()),
            Message::Bye,
        ] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
        assert!(Message::Refusal("x".repeat(1000)).encode().len() <= MAX_MESSAGE);
    }

    #[test]
    fn an_address_comes_back_as_it_was() {
        let identity = Identity { me: PeerId(1), ranks: 2, secret: [0; 16] };
        let address = Address::fresh(Place::here().unwrap(), &identity);
        assert_eq!(Address::decode(&address.encode()), Some(address.clone()));
        assert_ne!(Address::fresh(address.place.clone(), &identity), address);
    }

    proptest! {
        #[test]
        fn whatever_arrives_is_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::decode(&bytes);
            let _ = Address::decode(&AddressBlob(bytes.clone()));
            let mut framed = Message::Bye.encode();
            framed.truncate(8);
            framed.extend(bytes);
            let _ = Message::decode(&framed);
        }
    }
}
