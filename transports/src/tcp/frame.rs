//! Frames: the heads that divide the bytes of one direction into messages, puts, and
//! acknowledgements of the other direction.

use crate::contract::Header;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a head.
pub const HEAD: usize = size_of::<FrameHead>();

const MESSAGE: u8 = 1;
const PUT: u8 = 2;
const BYE: u8 = 3;
const ACK: u8 = 4;

/// Bits of a length. The kind lies in the eight bits above.
const LENGTH_BITS: u32 = 56;

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct FrameHead {
    kind_and_length: U64,
    words: [U64; 2],
}

/// A frame. Its `len` bytes follow the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Frame {
    /// An active message.
    Message {
        /// The runtime's header.
        header: Header,
        /// Bytes of the payload.
        len: usize,
    },
    /// Bytes for a window of the receiver.
    Put {
        /// Number of the window.
        window: u64,
        /// Offset of the first byte in the window.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// The end of the link, in order.
    Bye,
    /// Acknowledges bytes of the other direction.
    Ack {
        /// Bytes that have come, since it began.
        received: u64,
    },
}

impl Frame {
    /// Encodes the head.
    pub fn encode(self) -> [u8; HEAD] {
        let (kind, len, words) = match self {
            Self::Message { header, len } => (MESSAGE, len as u64, header.0),
            Self::Put { window, at, len } => (PUT, len, [window, at]),
            Self::Bye => (BYE, 0, [0; 2]),
            Self::Ack { received } => (ACK, 0, [received, 0]),
        };
        let kind_and_length = u64::from(kind) << LENGTH_BITS | len;
        let head =
            FrameHead { kind_and_length: kind_and_length.into(), words: words.map(U64::from) };
        zerocopy::transmute!(head)
    }

    /// Decodes a head. `longest`: bytes of the longest message.
    ///
    /// # Errors
    /// The fault of the head, in words.
    pub fn decode(bytes: [u8; HEAD], longest: usize) -> Result<Self, String> {
        let head: FrameHead = zerocopy::transmute!(bytes);
        let kind_and_length = head.kind_and_length.get();
        let len = kind_and_length & ((1 << LENGTH_BITS) - 1);
        let [first, second] = head.words.map(U64::get);
        match kind_and_length.to_be_bytes()[0] {
            MESSAGE if len <= longest as u64 => {
                // At most `longest`, which is a `usize`.
                let len = usize::try_from(len).unwrap_or(longest);
                Ok(Self::Message { header: Header([first, second]), len })
            }
            MESSAGE => Err(format!("a message of {len} bytes, where {longest} are the most")),
            PUT if second.checked_add(len).is_some() => {
                Ok(Self::Put { window: first, at: second, len })
            }
            PUT => Err(format!("a put of {len} bytes at {second}")),
            BYE if len == 0 => Ok(Self::Bye),
            ACK if len == 0 => Ok(Self::Ack { received: first }),
            kind => Err(format!("a frame of unknown kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_frame_comes_back_and_one_too_long_does_not() {
        let header = Header([7, u64::MAX]);
        for frame in [
            Frame::Message { header, len: 0 },
            Frame::Message { header, len: 100 },
            Frame::Put { window: 3, at: 1 << 40, len: (1 << LENGTH_BITS) - 1 },
            Frame::Bye,
            Frame::Ack { received: u64::MAX },
        ] {
            assert_eq!(Frame::decode(frame.encode(), 100), Ok(frame));
        }
        let long = Frame::Message { header, len: 101 }.encode();
        assert!(Frame::decode(long, 100).unwrap_err().contains("101 bytes"));
        let beyond = Frame::Put { window: 0, at: u64::MAX, len: 1 }.encode();
        assert!(Frame::decode(beyond, 100).is_err());
    }

    proptest! {
        #[test]
        fn any_head_is_a_frame_or_an_error(bytes in any::<[u8; HEAD]>(), longest in 0..9000_usize) {
            if let Ok(frame) = Frame::decode(bytes, longest) {
                prop_assert_eq!(Frame::decode(frame.encode(), longest), Ok(frame));
            }
        }
    }
}
