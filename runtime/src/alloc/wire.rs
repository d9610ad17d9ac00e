//! The messages between ranks about allocations. Every field is checked: no message of a peer
//! causes a panic.

use super::POOL_FREED;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Writes fields one after the other.
#[derive(Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    pub(super) fn word(&mut self, word: u64) {
        self.bytes(&word.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Writes a text, or none, with a constant number of bytes. A text beyond `longest` bytes is
    /// cut off.
    pub(super) fn text(&mut self, text: Option<&str>, longest: usize) {
        let whole = text.unwrap_or("");
        let end = (0..=longest.min(whole.len()))
            .rev()
            .find(|&end| whole.is_char_boundary(end))
            .unwrap_or(0);
        let cut = whole.get(..end).unwrap_or("");
        self.byte(u8::from(text.is_some()));
        self.word(cut.len() as u64);
        self.bytes(cut.as_bytes());
        self.0.resize(self.0.len() + longest - cut.len(), 0);
    }
}

/// Reads fields in the same order.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn flag(&mut self) -> Option<bool> {
        self.byte().filter(|&byte| byte < 2).map(|byte| byte == 1)
    }

    pub(super) fn word(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*array)
    }

    fn part(&mut self, len: usize) -> Option<&'a [u8]> {
        let (part, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(part)
    }

    pub(super) fn text(&mut self, longest: usize) -> Option<Option<String>> {
        let is_some = self.flag()?;
        let len = usize::try_from(self.word()?).ok().filter(|&len| len <= longest)?;
        let text = std::str::from_utf8(self.part(longest)?.get(..len)?).ok()?;
        Some(is_some.then(|| text.to_owned()))
    }

    /// Returns `Some` if no bytes are left.
    pub(super) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
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
pub(super) struct Call {
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
    /// At most `POOL_FREED`, which fits in a byte.
    count: u8,
    freed: [U64; POOL_FREED],
}

impl Call {
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
        let mut to = Writer::default();
        match self {
            Self::Made { rmr, refused } => {
                to.byte(1);
                to.word(rmr.len() as u64);
                to.bytes(rmr);
                to.bytes(refused.as_bytes());
            }
            Self::Failed(why) => {
                to.byte(0);
                to.bytes(why.as_bytes());
            }
        }
        to.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let is_made = from.flag()?;
        let rmr = match is_made {
            true => {
                let len = usize::try_from(from.word()?).ok()?;
                from.part(len)?.to_vec()
            }
            false => Vec::new(),
        };
        let text = String::from_utf8(from.0.to_vec()).ok()?;
        Some(if is_made { Self::Made { rmr, refused: text } } else { Self::Failed(text) })
    }
}

/// Bytes of a verdict's reason, at most.
const LONGEST: usize = 400;

/// Encodes a rank's outcome: it has the memory, or the reason why not.
pub(super) fn encode_verdict<T>(verdict: &Result<T, String>) -> Vec<u8> {
    let mut to = Writer::default();
    to.text(verdict.as_ref().err().map(String::as_str), LONGEST);
    to.0
}

/// Decodes a verdict. `None`: the bytes are no verdict.
pub(super) fn decode_verdict(bytes: &[u8]) -> Option<Result<(), String>> {
    let mut from = Reader(bytes);
    let why = from.text(LONGEST)?;
    from.end()?;
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
            let call = Call { number, asks, freed, more };
            let mut bytes = call.encode();
            prop_assert_eq!(Call::decode(&bytes), Some(call));
            prop_assert_eq!(bytes.len(), Call { number, asks, freed: vec![], more }.encode().len());
            prop_assert!(Call::decode(&bytes[..bytes.len() - 1]).is_none());
            let _ = Call::decode(&other);
            let at = at % bytes.len();
            bytes[at] = to;
            if let Some(call) = Call::decode(&bytes) {
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
