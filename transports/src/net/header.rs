//! The first bytes of each message: which protocol, which version, which kind.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"carrack\n";

/// Kind of the first message of each side.
pub(super) const OPENING: u32 = 1;
/// Kind of a proof of the secret.
pub(super) const PROOF: u32 = 2;
/// Kind of a refusal, whose body is its reason in words.
pub const REFUSAL: u32 = 3;
/// Kind of the end in order.
pub const BYE: u32 = 4;
/// The first kind that a protocol gives to messages of its own.
pub const FIRST_OWN: u32 = 16;

/// A protocol: the messages between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Name of the protocol in each message.
    pub tag: [u8; 4],
    /// Version, which grows with every change to the messages. Both sides must have the same.
    pub version: u32,
    /// Longest message in bytes, its header included.
    pub longest: usize,
}

/// Bytes in front of a message's body.
pub const HEADER: usize = size_of::<MessageHeader>();

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct MessageHeader {
    magic: [u8; 8],
    protocol: [u8; 4],
    version: U32,
    kind: U32,
}

impl Protocol {
    /// Returns a message of a kind: its header, then the parts of its body.
    pub fn message(&self, kind: u32, body: &[&[u8]]) -> Vec<u8> {
        let (version, kind) = (self.version.into(), kind.into());
        let header = MessageHeader { magic: MAGIC, protocol: self.tag, version, kind };
        let mut bytes = header.as_bytes().to_vec();
        body.iter().for_each(|part| bytes.extend(*part));
        bytes
    }

    /// Returns a refusal with its reason, cut to the longest message.
    pub fn refusal(&self, why: &str) -> Vec<u8> {
        let room = self.longest - HEADER;
        let end = (0..=room.min(why.len())).rev().find(|at| why.is_char_boundary(*at));
        self.message(REFUSAL, &[&why.as_bytes()[..end.unwrap_or(0)]])
    }

    /// Returns the last message of a connection that ends in order.
    pub fn bye(&self) -> Vec<u8> {
        self.message(BYE, &[])
    }

    /// Reads a message: its kind and its body.
    ///
    /// # Errors
    /// The fault of the message, in words.
    pub fn read<'a>(&self, bytes: &'a [u8]) -> Result<(u32, &'a [u8]), String> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err("a message that is not Carrack's".into());
        }
        let (header, body) = MessageHeader::read_from_prefix(bytes)
            .map_err(|_| format!("a message of {} bytes is too short", bytes.len()))?;
        if header.protocol != self.tag {
            return Err("a message of another protocol of Carrack's".into());
        }
        if header.version.get() != self.version {
            return Err(format!(
                "it speaks version {} of the protocol, this rank {}: build all ranks from the same \
                version of Carrack",
                header.version, self.version
            ));
        }
        if bytes.len() > self.longest {
            return Err(format!("a message of {} bytes: it is no rank of Carrack's", bytes.len()));
        }
        Ok((header.kind.get(), body))
    }
}

/// Returns words that came from a process which may not have proved who it is, fit to be shown.
pub fn words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PROTOCOL: Protocol = Protocol { tag: *b"test", version: 3, longest: 64 };

    #[test]
    fn a_message_comes_back_and_one_of_another_version_or_protocol_does_not() {
        let bytes = PROTOCOL.message(20, &[b"one ", b"two"]);
        assert_eq!(PROTOCOL.read(&bytes), Ok((20, &b"one two"[..])));
        let newer = Protocol { version: 4, ..PROTOCOL };
        let why = newer.read(&bytes).unwrap_err();
        assert!(why.contains("version 3 of the protocol, this rank 4"), "{why}");
        let other = Protocol { tag: *b"xest", ..PROTOCOL };
        assert!(other.read(&bytes).unwrap_err().contains("another protocol"));
        assert!(PROTOCOL.read(b"GET").unwrap_err().contains("not Carrack's"));
        assert!(PROTOCOL.read(&bytes[..HEADER - 1]).unwrap_err().contains("too short"));
        assert!(
            PROTOCOL.read(&PROTOCOL.message(20, &[&[0; 60]])).unwrap_err().contains("80 bytes")
        );
    }

    #[test]
    fn a_refusal_is_cut_between_characters_and_shown_without_control_characters() {
        let bytes = PROTOCOL.refusal(&"ä".repeat(100));
        assert_eq!(bytes.len(), PROTOCOL.longest);
        let (kind, body) = PROTOCOL.read(&bytes).unwrap();
        assert_eq!((kind, words(body)), (REFUSAL, "ä".repeat(22)));
        assert_eq!(words(b"a\x1b[2Jb"), "a [2Jb");
    }

    proptest! {
        #[test]
        fn whatever_arrives_is_a_message_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let _ = PROTOCOL.read(&bytes);
            let mut framed = PROTOCOL.bye();
            framed.extend(bytes);
            let _ = PROTOCOL.read(&framed);
        }
    }
}
