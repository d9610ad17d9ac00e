//! The messages by which two devices make a connection.
//!
//! ```text
//! both     a greeting, which proves both sides: their ranks and devices    (net::greeting)
//! caller   Hello { its end }
//! called   Welcome { its end }    or Crossed, or Refusal { why }
//! caller   Ready
//! either   Bye, before it closes in order;  or Refusal { why }, when it gives the connection up
//! ```
//!
//! Over TCP each message is preceded by its length, in four bytes (`net::frames`).

use crate::contract::Identity;
use crate::net::greeting::Greeting;
use crate::net::header::{BYE, FIRST_OWN, Protocol, REFUSAL, words};
use crate::net::key::DeviceKey;
use crate::net::proof::{Claim, Key, Role};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Longest message in bytes, its length not counted.
pub const MAX_MESSAGE: usize = 256;

/// Protocol of verbs. Its version grows with every change to the messages, or to what connections
/// carry.
pub const PROTOCOL: Protocol = Protocol { tag: *b"verb", version: 4, longest: MAX_MESSAGE };

const HELLO: u32 = FIRST_OWN;
const WELCOME: u32 = FIRST_OWN + 1;
const CROSSED: u32 = FIRST_OWN + 2;
const READY: u32 = FIRST_OWN + 3;

/// One end of a connection, as the other side needs it.
#[repr(C)]
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct QueuePairEnd {
    /// GID of the port.
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
    /// LID of the port, on InfiniBand.
    pub lid: u16,
    /// MTU of the port, in the specification's code.
    pub mtu: u8,
    /// Reads and atomic operations that it answers at a time.
    pub reads: u8,
}

/// A message between two proved sides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SetupMessage {
    /// The caller introduces itself.
    Hello(QueuePairEnd),
    /// The caller is let in. The called side introduces itself, too.
    Welcome(QueuePairEnd),
    /// The called side calls, too, and its call counts.
    Crossed,
    /// The caller's queue pair is ready.
    Ready,
    /// The caller is not let in; or, later, the connection is given up.
    Refusal(String),
    /// The end, in order.
    Bye,
}

/// Begins a greeting, in which this side proves that it holds the job's secret.
///
/// # Errors
/// The kernel has no random bytes.
pub fn greeting(role: Role, identity: &Identity, device: DeviceKey) -> Result<Greeting, Errno> {
    let (rank, ranks) = (identity.me.0.into(), identity.ranks.into());
    let claim = Claim { rank, ranks, device: device.0, ..Claim::default() };
    Greeting::new(role, PROTOCOL, &Key::of(&identity.secret), claim)
}

impl SetupMessage {
    /// Encodes the message, without its length.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(end) => PROTOCOL.message(HELLO, &[end.as_bytes()]),
            Self::Welcome(end) => PROTOCOL.message(WELCOME, &[end.as_bytes()]),
            Self::Crossed => PROTOCOL.message(CROSSED, &[]),
            Self::Ready => PROTOCOL.message(READY, &[]),
            Self::Refusal(why) => PROTOCOL.refusal(why),
            Self::Bye => PROTOCOL.bye(),
        }
    }

    /// Decodes a peer's message.
    ///
    /// # Errors
    /// A description of the mistake.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (kind, body) = PROTOCOL.read(bytes)?;
        let end = || {
            QueuePairEnd::read_from_bytes(body)
                .map_err(|_| format!("a message of kind {kind} with {} bytes", body.len()))
        };
        match kind {
            HELLO => end().map(Self::Hello),
            WELCOME => end().map(Self::Welcome),
            CROSSED if body.is_empty() => Ok(Self::Crossed),
            READY if body.is_empty() => Ok(Self::Ready),
            REFUSAL => Ok(Self::Refusal(words(body))),
            BYE if body.is_empty() => Ok(Self::Bye),
            kind => Err(format!("a message of unknown kind {kind}")),
        }
    }
}

impl QueuePairEnd {
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
            return Err(format!("its end of the connection has impossible values: {self:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn end() -> QueuePairEnd {
        let (word_addr, word_key, queue_pair, first_psn) =
            (0x7f00_0000_1000, 77, 0x12_3456, 0x65_4321);
        let (packet_size, window, lid, mtu, reads) = (8192, 32, 3, 5, 16);
        QueuePairEnd {
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
        for message in [
            SetupMessage::Hello(end()),
            SetupMessage::Welcome(end()),
            SetupMessage::Crossed,
            SetupMessage::Ready,
            SetupMessage::Refusal("not of this job".into()),
            SetupMessage::Bye,
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_MESSAGE);
            assert_eq!(SetupMessage::decode(&bytes), Ok(message));
        }
        assert!(SetupMessage::Refusal("x".repeat(1000)).encode().len() <= MAX_MESSAGE);
    }

    #[test]
    fn an_end_that_cannot_be_is_refused() {
        end().check(8192).unwrap();
        assert!(end().check(4096).unwrap_err().contains("CARRACK_PACKET_SIZE"));
        for broken in [
            QueuePairEnd { queue_pair: 1 << 24, ..end() },
            QueuePairEnd { window: 0, ..end() },
            QueuePairEnd { mtu: 6, ..end() },
            QueuePairEnd { word_addr: 4, ..end() },
        ] {
            assert!(broken.check(8192).is_err());
        }
    }

    proptest! {
        #[test]
        fn whatever_arrives_is_a_message_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            let _ = SetupMessage::decode(&bytes);
            let framed = PROTOCOL.message(HELLO, &[&bytes]);
            let decoded = SetupMessage::decode(&framed);
            if let Ok(SetupMessage::Hello(end) | SetupMessage::Welcome(end)) = decoded {
                let _ = end.check(8192);
            }
        }
    }
}
