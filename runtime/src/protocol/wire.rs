//! The payloads of offers, clearances and verdicts.

use crate::error::OpError;
use crate::names::Rank;
use carrack_transports::contract::RemotePlace;
use carrack_transports::mem::SmallBytes;

/// The payload of an offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Offer {
    /// Bytes of the message.
    pub(crate) size: u64,
    /// The sender's name for it.
    pub(crate) token: u64,
    /// The address in the sender's memory for the kernel's cross-memory copy; 0 if the kernel
    /// cannot copy it.
    pub(crate) addr: u64,
    /// The place in GPU memory that the receiver can map.
    pub(crate) mapped: Option<Mapped>,
}

/// A place in a region that was introduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapped {
    /// The sender's name for the region.
    pub(crate) name: u64,
    /// The offset in the region, in bytes.
    pub(crate) offset: u64,
}

/// The request for help with a message: its sender may write a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HelpWanted {
    /// The address of the message in the receiver's memory.
    pub(crate) addr: u64,
    /// The number of the split that divides the message.
    pub(crate) split: u32,
    /// Its turn.
    pub(crate) turn: u32,
}

impl HelpWanted {
    pub(crate) fn encode(self) -> SmallBytes {
        words([self.addr, u64::from(self.split) << 32 | u64::from(self.turn)])
    }

    #[allow(clippy::cast_possible_truncation, reason = "one half and the other")]
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        read(bytes).map(|[addr, split]| Self {
            addr,
            split: (split >> 32) as u32,
            turn: split as u32,
        })
    }
}

/// The outcome of a transfer, as the receiver reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// All bytes are in place, or no operation needs them.
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
    /// The region is not registered.
    Stale,
    /// It reaches beyond the region.
    Outside,
    /// No atomic operation is done on that word.
    Word,
    /// The previous value of the word of an atomic operation.
    Held(u64),
    /// From the sender: it cannot read the bytes behind these.
    Broken {
        /// Bytes that it has sent.
        sent: u64,
    },
}

/// A request that refers to a region of another rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// The asker's name for it.
    pub(crate) token: u64,
    /// The region's number.
    pub(crate) region: u64,
    /// The offset in the region; or the number of pieces.
    pub(crate) offset: u64,
    /// Bytes, or the first operand. For pieces it includes the bytes of their list.
    pub(crate) first: u64,
    /// For a put or pieces: their address in the sender's memory, or 0. For a get: the limit of
    /// bytes at first, or 0 for all. For an atomic operation: the second operand.
    pub(crate) second: u64,
}

impl Request {
    pub(crate) fn encode(self) -> SmallBytes {
        words([self.token, self.region, self.offset, self.first, self.second])
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        read(bytes).map(|[token, region, offset, first, second]| Self {
            token,
            region,
            offset,
            first,
            second,
        })
    }
}

fn words<const N: usize>(words: [u64; N]) -> SmallBytes {
    let mut bytes = [0; SmallBytes::MAX];
    let (places, _) = bytes.as_chunks_mut();
    for (place, word) in places.iter_mut().zip(words) {
        *place = word.to_le_bytes();
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
        match self.mapped {
            None => words([self.size, self.token, self.addr]),
            Some(Mapped { name, offset }) => words([self.size, self.token, name, offset]),
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        if let Some([size, token, name, offset]) = read(bytes) {
            return Some(Self { size, token, addr: 0, mapped: Some(Mapped { name, offset }) });
        }
        read(bytes).map(|[size, token, addr]| Self { size, token, addr, mapped: None })
    }
}

impl Verdict {
    pub(crate) fn encode(self) -> SmallBytes {
        match self {
            Self::Done => words([0, 0, 0]),
            Self::Truncated { message, buffer } => words([1, message, buffer]),
            Self::Failed => words([2, 0, 0]),
            Self::Stale => words([3, 0, 0]),
            Self::Outside => words([4, 0, 0]),
            Self::Word => words([5, 0, 0]),
            Self::Held(value) => words([6, value, 0]),
            Self::Broken { sent } => words([7, sent, 0]),
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        match read(bytes)? {
            [0, 0, 0] => Some(Self::Done),
            [1, message, buffer] => Some(Self::Truncated { message, buffer }),
            [2, 0, 0] => Some(Self::Failed),
            [3, 0, 0] => Some(Self::Stale),
            [4, 0, 0] => Some(Self::Outside),
            [5, 0, 0] => Some(Self::Word),
            [6, value, 0] => Some(Self::Held(value)),
            [7, sent, 0] => Some(Self::Broken { sent }),
            _ => None,
        }
    }

    /// Returns the error of the operation that was sent to `peer`, if it failed.
    pub(crate) fn error(self, peer: Rank) -> Option<OpError> {
        let fits = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        match self {
            Self::Done | Self::Held(_) => None,
            Self::Stale => Some(OpError::Stale(peer)),
            Self::Outside => Some(OpError::Outside(peer)),
            Self::Word => Some(OpError::Word(peer)),
            Self::Truncated { message, buffer } => {
                Some(OpError::Truncated { message: fits(message), buffer: fits(buffer) })
            }
            Self::Failed | Self::Broken { .. } => Some(OpError::Refused),
        }
    }
}

/// Encodes a number, as a status returns it.
pub(crate) fn word(value: u64) -> SmallBytes {
    words([value])
}

/// Encodes the name of a landing.
pub(crate) fn encode_landing(landing: u64) -> SmallBytes {
    words([landing])
}

pub(crate) fn decode_landing(bytes: &[u8]) -> Option<u64> {
    read(bytes).map(|[landing]| landing)
}

/// Encodes the name of a landing, and the limit of bytes at first; all without one.
pub(crate) fn encode_clear(landing: u64, limit: Option<u64>) -> SmallBytes {
    match limit {
        None => encode_landing(landing),
        Some(limit) => words([landing, limit]),
    }
}

/// Encodes the remote key of a region and its length.
pub(crate) fn encode_place(place: Option<(RemotePlace, u64)>) -> SmallBytes {
    place.map_or(SmallBytes::empty(), |(place, len)| words([place.addr, place.key, len]))
}

/// Decodes a place. `None`: the bytes are no place. `Some(None)`: the owner has refused it.
pub(crate) fn decode_place(bytes: &[u8]) -> Option<Option<(RemotePlace, u64)>> {
    if bytes.is_empty() {
        return Some(None);
    }
    read(bytes).map(|[addr, key, len]| Some((RemotePlace { addr, key }, len)))
}

/// Encodes a clearance to write all of a message to a place.
pub(crate) fn encode_writable(landing: u64, place: RemotePlace) -> SmallBytes {
    words([landing, place.addr, place.key])
}

pub(crate) fn decode_writable(bytes: &[u8]) -> Option<(u64, RemotePlace)> {
    read(bytes).map(|[landing, addr, key]| (landing, RemotePlace { addr, key }))
}

/// A part of a message that its sender's NIC writes, and its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    /// The beginning in the message, in bytes.
    pub(crate) at: usize,
    /// Its bytes.
    pub(crate) len: usize,
    /// The place by which the receiver's NIC knows it.
    pub(crate) place: RemotePlace,
}

/// Encodes a clearance to write a part of a message.
pub(crate) fn encode_window(landing: u64, window: Window) -> SmallBytes {
    let Window { at, len, place } = window;
    words([landing, at as u64, len as u64, place.addr, place.key])
}

pub(crate) fn decode_window(bytes: &[u8]) -> Option<(u64, Window)> {
    let [landing, at, len, addr, key] = read(bytes)?;
    let fits = |number: u64| usize::try_from(number).ok();
    Some((landing, Window { at: fits(at)?, len: fits(len)?, place: RemotePlace { addr, key } }))
}

pub(crate) fn decode_clear(bytes: &[u8]) -> Option<(u64, usize)> {
    let (landing, limit) = match read(bytes) {
        Some([landing, limit]) => (landing, limit),
        None => (decode_landing(bytes)?, u64::MAX),
    };
    Some((landing, usize::try_from(limit).unwrap_or(usize::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_and_everything_else_is_refused(size: u64, token: u64, addr: u64, other: Vec<u8>) {
            let offer = Offer { size, token, addr, mapped: None };
            let lies = Offer { addr: 0, mapped: Some(Mapped { name: addr, offset: !size }), ..offer };
            prop_assert_eq!(Offer::decode(lies.encode().as_slice()), Some(lies));
            prop_assert_eq!(Offer::decode(offer.encode().as_slice()), Some(offer));
            for verdict in [Verdict::Done, Verdict::Failed, Verdict::Stale, Verdict::Outside, Verdict::Word, Verdict::Broken { sent: size }, Verdict::Held(size), Verdict::Truncated { message: size, buffer: addr }] {
                prop_assert_eq!(Verdict::decode(verdict.encode().as_slice()), Some(verdict));
            }
            let request = Request { token, region: size, offset: addr, first: !size, second: !token };
            prop_assert_eq!(Request::decode(request.encode().as_slice()), Some(request));
            prop_assert_eq!(Request::decode(&other).is_some(), other.len() == 40);
            let wanted = HelpWanted { addr, split: size as u32, turn: (token >> 7) as u32 };
            prop_assert_eq!(HelpWanted::decode(wanted.encode().as_slice()), Some(wanted));
            prop_assert_eq!(HelpWanted::decode(&other).is_some(), other.len() == 16);
            prop_assert_eq!(decode_landing(encode_landing(token).as_slice()), Some(token));
            prop_assert_eq!(decode_clear(encode_clear(token, None).as_slice()), Some((token, usize::MAX)));
            prop_assert_eq!(decode_clear(encode_clear(token, Some(size)).as_slice()), Some((token, size as usize)));
            let window = Window { at: size as usize, len: addr as usize, place: RemotePlace { addr: token, key: !size } };
            prop_assert_eq!(decode_window(encode_window(token, window).as_slice()), Some((token, window)));
            prop_assert_eq!(decode_window(&other).is_some(), other.len() == 40);
            prop_assert_eq!(decode_clear(&other).is_some(), other.len() == 8 || other.len() == 16);
            prop_assert_eq!(Offer::decode(&other).is_some(), other.len() == 24 || other.len() == 32);
            prop_assert_eq!(decode_landing(&other).is_some(), other.len() == 8);
            if let Some(verdict) = Verdict::decode(&other) {
                let again = verdict.encode();
                prop_assert_eq!(again.as_slice(), &other[..]);
            }
        }
    }
}
