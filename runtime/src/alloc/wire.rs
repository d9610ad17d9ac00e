//! The messages between ranks about allocations. Every field is checked: no message of a peer
//! causes a panic.

use super::POOL_FREED;
use carrack_transports::net::parts::{self, Rest};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A text, or none, in the same number of bytes. A text beyond `N` bytes is cut.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct TextBytes<const N: usize> {
    is_some: u8,
    len: U64,
    text: [u8; N],
}

impl<const N: usize> TextBytes<N> {
    pub(super) fn of(text: Option<&str>) -> Self {
        let cut = parts::cut(text.unwrap_or(""), N).as_bytes();
        let mut bytes = cut.iter().copied();
        let text_bytes = std::array::from_fn(|_| bytes.next().unwrap_or(0));
        Self { is_some: text.is_some().into(), len: (cut.len() as u64).into(), text: text_bytes }
    }

    /// Returns the text. `None`: the bytes are none.
    pub(super) fn get(&self) -> Option<Option<String>> {
        let len = usize::try_from(self.len.get()).ok()?;
        let text = std::str::from_utf8(self.text.get(..len)?).ok()?;
        (self.is_some < 2).then(|| (self.is_some == 1).then(|| text.to_owned()))
    }
}

/// The request of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asks {
    /// Memory of its own, in bytes.
    Own(u64),
    /// A piece of `len` bytes, of a pool with blocks of `block` bytes.
    Piece { pool: u32, block: u64, len: u64 },
    /// The return of a pool's free blocks.
    Trim { pool: u32 },
}

/// A call, as each rank tells it to the others before anything is done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AllocCall {
    /// The number of this call at its allocator.
    pub(super) number: u64,
    pub(super) asks: Asks,
    /// Pieces of the pool that this rank has released.
    pub(super) freed: Vec<u64>,
    /// `true` if there are more of them.
    pub(super) more: bool,
}

/// The bytes of a call, as many for each.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct CallBytes {
    kind: u8,
    number: U64,
    pool: U64,
    block: U64,
    len: U64,
    more: u8,
    /// Number of freed pieces, at most `POOL_FREED`, which fits in a byte.
    count: u8,
    freed: [U64; POOL_FREED],
}

impl AllocCall {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, pool, block, len) = match self.asks {
            Asks::Own(len) => (1, 0, 0, len),
            Asks::Piece { pool, block, len } => (2, pool, block, len),
            Asks::Trim { pool } => (3, pool, 0, 0),
        };
        let (number, more, count) = (self.number.into(), self.more.into(), self.freed.len() as u8);
        let (pool, block, len) = (u64::from(pool).into(), block.into(), len.into());
        let mut numbers = self.freed.iter().map(|&number| number.into());
        let freed = std::array::from_fn(|_| numbers.next().unwrap_or_default());
        let call = CallBytes { kind, number, pool, block, len, more, count, freed };
        call.as_bytes().to_vec()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let call = CallBytes::ref_from_bytes(bytes).ok()?;
        let pool = u32::try_from(call.pool.get()).ok()?;
        let (block, len) = (call.block.get(), call.len.get());
        let asks = match call.kind {
            1 => Asks::Own(len),
            2 => Asks::Piece { pool, block, len },
            3 => Asks::Trim { pool },
            _ => return None,
        };
        let freed = call.freed.get(..usize::from(call.count))?.iter().map(|word| word.get());
        let (number, freed) = (call.number.get(), freed.collect());
        (call.more < 2).then_some(Self { number, asks, freed, more: call.more == 1 })
    }

    /// Describes the call for an error.
    pub(super) fn describe(&self) -> String {
        let what = match self.asks {
            Asks::Own(len) => format!("allocate({len})"),
            Asks::Piece { pool, block, len } => {
                format!("allocate({len}) of pool {pool}, which has blocks of {block} bytes")
            }
            Asks::Trim { pool } => format!("trim() of pool {pool}"),
        };
        format!("call {}, {what}", self.number)
    }
}

/// The leader's message after it has allocated, or failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Offer {
    /// The remote key by which the others map it, and the reason of a transport that refused to
    /// export it.
    Made { rmr: Vec<u8>, refused: String },
    /// The reason why there is none.
    Failed(String),
}

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (is_made, rmr, text) = match self {
            Self::Made { rmr, refused } => (1, &rmr[..], refused),
            Self::Failed(why) => (0, &[][..], why),
        };
        let mut bytes = vec![is_made];
        parts::push::<U32>(&mut bytes, rmr);
        bytes.extend(text.as_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Rest(bytes);
        let (is_made, rmr) = (rest.head::<u8>()?, rest.part::<U32>()?.to_vec());
        let text = String::from_utf8(rest.0.to_vec()).ok()?;
        match is_made {
            0 => Some(Self::Failed(text)),
            1 => Some(Self::Made { rmr, refused: text }),
            _ => None,
        }
    }
}

/// Bytes of a verdict's reason, at most.
const LONGEST: usize = 400;

/// Encodes a rank's outcome: it has the memory, or the reason why not.
pub(super) fn encode_verdict<T>(verdict: &Result<T, String>) -> Vec<u8> {
    let why = verdict.as_ref().err().map(String::as_str);
    TextBytes::<LONGEST>::of(why).as_bytes().to_vec()
}

/// Decodes a verdict. `None`: the bytes are no verdict.
pub(super) fn decode_verdict(bytes: &[u8]) -> Option<Result<(), String>> {
    let why = TextBytes::<LONGEST>::ref_from_bytes(bytes).ok()?.get()?;
    Some(why.map_or(Ok(()), Err))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_call_survives_the_wire_and_other_bytes_are_none(
            number: u64, kind in 0..3, pool: u32, block: u64, len: u64, more: bool,
            freed in vec(any::<u64>(), 0..=POOL_FREED), other: Vec<u8>, at: usize, to: u8,
        ) {
            let asks = match kind {
                0 => Asks::Own(len),
                1 => Asks::Piece { pool, block, len },
                _ => Asks::Trim { pool },
            };
            let call = AllocCall { number, asks, freed, more };
            let mut bytes = call.encode();
            prop_assert_eq!(AllocCall::decode(&bytes), Some(call));
            let empty = AllocCall { number, asks, freed: vec![], more };
            prop_assert_eq!(bytes.len(), empty.encode().len());
            prop_assert!(AllocCall::decode(&bytes[..bytes.len() - 1]).is_none());
            let _ = AllocCall::decode(&other);
            let at = at % bytes.len();
            bytes[at] = to;
            if let Some(call) = AllocCall::decode(&bytes) {
                prop_assert!(call.freed.len() <= POOL_FREED);
            }
        }

        #[test]
        fn an_offer_survives_the_wire_and_nothing_makes_reading_panic(
            rmr: Vec<u8>, text: String, is_made: bool, other: Vec<u8>,
        ) {
            let offer =
                if is_made { Offer::Made { rmr, refused: text } } else { Offer::Failed(text) };
            prop_assert_eq!(Offer::decode(&offer.encode()), Some(offer));
            let _ = Offer::decode(&other);
            let long: Vec<u8> = [&[1][..], &u64::MAX.to_le_bytes(), &other].concat();
            prop_assert!(Offer::decode(&long).is_none());
        }

        #[test]
        fn a_verdict_survives_the_wire_cut_off_between_letters(
            why: String, long in "[äß€a-z]{300,500}", other: Vec<u8>,
        ) {
            let verdict = |why: &str| {
                let encoded = encode_verdict::<()>(&Err(why.to_owned()));
                decode_verdict(&encoded).unwrap().unwrap_err()
            };
            prop_assert!(why.len() > LONGEST || verdict(&why) == why);
            let cut = verdict(&long);
            prop_assert!(long.starts_with(&cut));
            prop_assert!(cut.len() <= LONGEST && cut.len() + 4 > LONGEST.min(long.len()));
            let well = encode_verdict(&Ok(()));
            prop_assert_eq!(well.len(), encode_verdict::<()>(&Err(long)).len());
            prop_assert_eq!(decode_verdict(&well), Some(Ok(())));
            prop_assert!(decode_verdict(&well[1..]).is_none());
            let _ = decode_verdict(&other);
        }
    }
}
