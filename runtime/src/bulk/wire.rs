//! What offers, clearances and ends carry beside their headers.

use crate::error::OpError;
use carrack_transports::mem::SmallBytes;

/// What is offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Offer {
    /// Bytes of the message.
    pub(crate) size: u64,
    /// The sender's name for it.
    pub(crate) token: u64,
    /// Where it lies in the sender's memory, for the kernel's cross-memory copy; 0 when that is no help.
    pub(crate) addr: u64,
}

/// How a transfer ended, as the receiver tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// All bytes are where they should be, or nobody wants them.
    Done,
    /// The receive was too small.
    Truncated {
        /// Bytes of the message.
        message: u64,
        /// Bytes of the receive.
        buffer: u64,
    },
    /// The receiver could not take it in.
    Failed,
}

fn words<const N: usize>(words: [u64; N]) -> SmallBytes {
    let mut bytes = [0; SmallBytes::MAX];
    for (place, byte) in bytes.iter_mut().zip(words.iter().flat_map(|word| word.to_le_bytes())) {
        *place = byte;
    }
    SmallBytes::first(8 * N, bytes)
}

fn read<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let mut words = [0; N];
    let (chunks, []) = bytes.as_chunks::<8>() else { return None };
    if chunks.len() != N {
        return None;
    }
    for (word, chunk) in words.iter_mut().zip(chunks) {
        *word = u64::from_le_bytes(*chunk);
    }
    Some(words)
}

impl Offer {
    pub(crate) fn encode(self) -> SmallBytes {
        words([self.size, self.token, self.addr])
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        read(bytes).map(|[size, token, addr]| Self { size, token, addr })
    }
}

impl Verdict {
    pub(crate) fn encode(self) -> SmallBytes {
        match self {
            Self::Done => words([0, 0, 0]),
            Self::Truncated { message, buffer } => words([1, message, buffer]),
            Self::Failed => words([2, 0, 0]),
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        match read(bytes)? {
            [0, 0, 0] => Some(Self::Done),
            [1, message, buffer] => Some(Self::Truncated { message, buffer }),
            [2, 0, 0] => Some(Self::Failed),
            _ => None,
        }
    }

    /// What the sender's operation ends with.
    pub(crate) fn error(self) -> Option<OpError> {
        let fits = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        match self {
            Self::Done => None,
            Self::Truncated { message, buffer } => {
                Some(OpError::Truncated { message: fits(message), buffer: fits(buffer) })
            }
            Self::Failed => Some(OpError::Refused),
        }
    }
}

/// The name of a landing.
pub(crate) fn encode_landing(landing: u64) -> SmallBytes {
    words([landing])
}

pub(crate) fn decode_landing(bytes: &[u8]) -> Option<u64> {
    read(bytes).map(|[landing]| landing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_and_everything_else_is_refused(size: u64, token: u64, addr: u64, other: Vec<u8>) {
            let offer = Offer { size, token, addr };
            prop_assert_eq!(Offer::decode(offer.encode().as_slice()), Some(offer));
            for verdict in [Verdict::Done, Verdict::Failed, Verdict::Truncated { message: size, buffer: addr }] {
                prop_assert_eq!(Verdict::decode(verdict.encode().as_slice()), Some(verdict));
            }
            prop_assert_eq!(decode_landing(encode_landing(token).as_slice()), Some(token));
            prop_assert_eq!(Offer::decode(&other).is_some(), other.len() == 24);
            prop_assert_eq!(decode_landing(&other).is_some(), other.len() == 8);
            if let Some(verdict) = Verdict::decode(&other) {
                let again = verdict.encode();
                prop_assert_eq!(again.as_slice(), &other[..]);
            }
        }
    }
}
