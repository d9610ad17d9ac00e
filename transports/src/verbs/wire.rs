//! The messages by which two devices make a connection.
//!
//! ```text
//! called   Challenge { number }
//! caller   Hello { who, which device, proof, number, its end }
//! called   Welcome { proof, its end }    or Crossed, or Refusal { why }
//! caller   Ready
//! either   Bye, before it closes in order;  or Refusal { why }, when it gives the connection up
//! ```
//!
//! Over TCP each message is preceded by its length, in two bytes. A proof is a keyed hash
//! (SipHash-2-4 of 128 bits) of the other side's number and the content of the message. The key is
//! the job's secret, which itself is never sent.

use super::address::DeviceKey;
use crate::contract::PeerId;
use siphasher::sip128::{Hasher128, SipHasher24};
use std::hash::Hasher;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: u32 = u32::from_le_bytes(*b"CRVB");
/// Increased with every change to the messages, or to the traffic of connections.
const VERSION: u32 = 2;

/// Longest message in bytes, its length not counted.
pub const MAX_MESSAGE: usize = 256;

/// A number that is used once.
pub type Nonce = [u8; 16];

/// One end of a connection, as the other side needs it.
#[repr(C)]
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct End {
    /// Its port's GID.
    pub gid: [u8; 16],
    /// Address where the other side writes how many messages it has taken in.
    pub word_addr: u64,
    /// Remote key of that word.
    pub word_key: u32,
    /// Number of its queue pair.
    pub queue_pair: u32,
    /// Packet sequence number of the first packet that it sends.
    pub first_psn: u32,
    /// Largest message that it takes in, in bytes.
    pub packet_size: u32,
    /// Messages that it can receive before it has taken any in.
    pub window: u32,
    /// Its port's LID, on InfiniBand.
    pub lid: u16,
    /// Its port's MTU, in the specification's code.
    pub mtu: u8,
    /// Reads and atomic operations that it answers at a time.
    pub reads: u8,
}

/// A message of one side to the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// The called side begins.
    Challenge(Nonce),
    /// The caller introduces itself.
    Hello {
        /// The device that calls.
        device: DeviceKey,
        /// Its rank.
        from: PeerId,
        /// The other's challenge.
        nonce: Nonce,
        /// Proof that it knows the secret.
        proof: [u8; 16],
        /// Its end.
        end: End,
    },
    /// The caller is let in.
    Welcome {
        /// Proof that this side knows the secret, too.
        proof: [u8; 16],
        /// Its end.
        end: End,
    },
    /// The called side calls, too, and its call counts.
    Crossed,
    /// The caller's queue pair is ready.
    Ready,
    /// The caller is not let in; or, later, the connection is given up.
    Refusal(String),
    /// The end, in order.
    Bye,
}

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Frame {
    magic: u32,
    version: u32,
    kind: u32,
    from: u32,
    device: [u8; 16],
    nonce: [u8; 16],
    proof: [u8; 16],
    end: End,
}

/// Returns the proof of a side that knows the secret, for itself and its end, in answer to that
/// number.
pub fn proof(
    secret: &[u8; 16],
    asked: &Nonce,
    (who, device): (PeerId, DeviceKey),
    end: &End,
) -> [u8; 16] {
    let mut hasher = SipHasher24::new_with_key(secret);
    hasher.write(asked);
    hasher.write(&who.0.to_le_bytes());
    hasher.write(&device.0);
    hasher.write(end.as_bytes());
    hasher.finish128().as_bytes()
}

impl Message {
    /// Encodes the message, without its length.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = Frame::new_zeroed_of(MAGIC, VERSION);
        let mut text = &[][..];
        match self {
            Self::Challenge(nonce) => (frame.kind, frame.nonce) = (1, *nonce),
            Self::Hello { device, from, nonce, proof, end } => {
                (frame.kind, frame.device, frame.from) = (2, device.0, from.0);
                (frame.nonce, frame.proof, frame.end) = (*nonce, *proof, *end);
            }
            Self::Welcome { proof, end } => {
                (frame.kind, frame.proof, frame.end) = (3, *proof, *end)
            }
            Self::Crossed => frame.kind = 4,
            Self::Ready => frame.kind = 5,
            Self::Refusal(why) => {
                frame.kind = 6;
                text = why.as_bytes();
                text = &text[..text.len().min(MAX_MESSAGE - size_of::<Frame>())];
            }
            Self::Bye => frame.kind = 7,
        }
        let mut bytes = frame.as_bytes().to_vec();
        bytes.extend(text);
        bytes
    }

    /// Decodes a peer's message.
    ///
    /// # Errors
    /// A description of the mistake.
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
        match frame.kind {
            1 => Ok(Self::Challenge(frame.nonce)),
            2 => Ok(Self::Hello {
                device: DeviceKey(frame.device),
                from: PeerId(frame.from),
                nonce: frame.nonce,
                proof: frame.proof,
                end: frame.end,
            }),
            3 => Ok(Self::Welcome { proof: frame.proof, end: frame.end }),
            4 => Ok(Self::Crossed),
            5 => Ok(Self::Ready),
            6 => Ok(Self::Refusal(String::from_utf8_lossy(text).into_owned())),
            7 => Ok(Self::Bye),
            kind => Err(format!("a message of unknown kind {kind}")),
        }
    }
}

impl Frame {
    fn new_zeroed_of(magic: u32, version: u32) -> Self {
        let (device, nonce, proof) = ([0; 16], [0; 16], [0; 16]);
        Self { magic, version, kind: 0, from: 0, device, nonce, proof, end: End::default() }
    }
}

impl End {
    /// Checks that a connection can be made to it.
    ///
    /// # Errors
    /// A description of the mistake.
    pub fn check(&self, packet_size: usize) -> Result<(), String> {
        if self.packet_size as usize != packet_size {
            return Err(format!(
                "its packets hold {} bytes, this rank's {packet_size}: CARRACK_PACKET_SIZE must be \
                the same on all ranks",
                self.packet_size
            ));
        }
        // The specification has 24 bits for them.
        let fits = self.queue_pair < 1 << 24 && self.first_psn < 1 << 24;
        if !fits
            || self.window == 0
            || !(1..=5).contains(&self.mtu)
            || !self.word_addr.is_multiple_of(8)
        {
            return Err(format!("its end of the connection makes no sense: {self:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn end() -> End {
        let (word_addr, word_key, queue_pair, first_psn) =
            (0x7f00_0000_1000, 77, 0x12_3456, 0x65_4321);
        let (packet_size, window, lid, mtu, reads) = (8192, 32, 3, 5, 16);
        End {
            gid: [5; 16],
            word_addr,
            word_key,
            queue_pair,
            first_psn,
            packet_size,
            window,
            lid,
            mtu,
            reads,
        }
    }

    #[test]
    fn every_message_comes_back_as_it_was() {
        let (device, from) = (DeviceKey([1; 16]), PeerId(9));
        for message in [
            Message::Challenge([3; 16]),
            Message::Hello { device, from, nonce: [2; 16], proof: [4; 16], end: end() },
            Message::Welcome { proof: [8; 16], end: end() },
            Message::Crossed,
            Message::Ready,
            Message::Refusal("not of this job".into()),
            Message::Bye,
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_MESSAGE);
            assert_eq!(Message::decode(&bytes), Ok(message));
        }
        assert!(Message::Refusal("x".repeat(1000)).encode().len() <= MAX_MESSAGE);
    }

    #[test]
    fn a_proof_is_good_for_one_secret_one_number_one_device_of_one_rank_and_one_end() {
        let who = (PeerId(7), DeviceKey([1; 16]));
        let good = proof(&[1; 16], &[2; 16], who, &end());
        assert_eq!(proof(&[1; 16], &[2; 16], who, &end()), good);
        let moved = End { word_addr: 0, ..end() };
        for other in [
            proof(&[0; 16], &[2; 16], who, &end()),
            proof(&[1; 16], &[3; 16], who, &end()),
            proof(&[1; 16], &[2; 16], (who.0, DeviceKey([2; 16])), &end()),
            proof(&[1; 16], &[2; 16], (PeerId(8), who.1), &end()),
            proof(&[1; 16], &[2; 16], who, &moved),
        ] {
            assert_ne!(other, good);
        }
    }

    #[test]
    fn an_end_that_cannot_be_is_refused() {
        end().check(8192).unwrap();
        assert!(end().check(4096).unwrap_err().contains("CARRACK_PACKET_SIZE"));
        for broken in [
            End { queue_pair: 1 << 24, ..end() },
            End { window: 0, ..end() },
            End { mtu: 6, ..end() },
            End { word_addr: 4, ..end() },
        ] {
            assert!(broken.check(8192).is_err());
        }
    }

    proptest! {
        #[test]
        fn whatever_arrives_is_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::decode(&bytes);
            let mut framed = Message::Bye.encode();
            framed.truncate(8);
            framed.extend(bytes);
            if let Ok(Message::Hello { end, .. } | Message::Welcome { end, .. }) = Message::decode(&framed) {
                let _ = end.check(8192);
            }
        }
    }
}
