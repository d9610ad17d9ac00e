//! Control messages: those of the runtime itself. Each has one layout: a header, and words behind
//! it.
//!
//! A transfer has two names, each given by the side that uses it: `tx` of the sender, and `rx` of
//! the receiver.

use super::flow::{Hold, Room};
use super::header::{CONTROL, addressed, to, unknown};
use crate::error::OpError;
use crate::names::{Rank, RemoteComp, Tag};
use carrack_transports::contract::{Header, RemotePlace};
use carrack_transports::mem::SmallBytes;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// A control message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Control {
    /// CTS: the message may come in fragments, `limit` bytes of it at first.
    Cts { tx: u64, rx: u64, limit: u64 },
    /// CTS: the sender's NIC may write all of the message to a place.
    CtsWrite { tx: u64, rx: u64, place: RemotePlace },
    /// CTS: the sender's NIC may write a part of the message.
    CtsChunk { tx: u64, rx: u64, window: Window },
    /// Grants fragments up to `limit` bytes of the message.
    Grant { tx: u64, limit: u64 },
    /// FIN of a write: the NIC has written the message, or the window that begins at byte `at`.
    FinWrite { rx: u64, at: u64 },
    /// The NIC writes no byte from `at` on: the rest comes in fragments, as granted.
    Unwritten { rx: u64, at: u64 },
    /// FIN: ends a transfer that the receiver of this message has named so.
    Fin { name: u64, verdict: TransferVerdict },
    /// The kernel copies a message here: its sender may write a part of it.
    Help { tx: u64, wanted: HelpWanted },
    /// Notification of a put or a get of `size` bytes that is done.
    Notify { comp: RemoteComp, tag: Tag, size: u64 },
    /// RTS of a put that its owner has to carry out, and then notifies the completion object, if
    /// one is named.
    RtsPut { comp: RemoteComp, tag: Tag, request: Request },
    /// Request for a part of a region. The owner then notifies the completion object, if one is
    /// named.
    Get { comp: RemoteComp, tag: Tag, request: Request },
    /// RTS of a list of pieces of a region, with bytes that are put there; or, with a name `rx`,
    /// asks for these bytes.
    Pieces { rx: u64, request: Request },
    /// Request for an atomic operation.
    Atomic { swap: bool, request: Request },
    /// The hold of the receiver of this message. A later turn overrules earlier ones.
    Hold { hold: Hold, turn: u64 },
    /// Request for the place of a region, for this rank's NIC.
    Where { region: u64 },
    /// The place of a region of `len` bytes.
    Here { region: u64, place: RemotePlace, len: u64 },
    /// No NIC reaches the region.
    Nowhere { region: u64 },
    /// The registration of a region has ended.
    Withdraw { region: u64 },
    /// The sender does not use a region any more.
    Release { region: u64 },
}

const CTS: u64 = CONTROL;
const CTS_WRITE: u64 = CONTROL + 1;
const CTS_CHUNK: u64 = CONTROL + 2;
const GRANT: u64 = CONTROL + 3;
const FIN_WRITE: u64 = CONTROL + 4;
const UNWRITTEN: u64 = CONTROL + 5;
const FIN: u64 = CONTROL + 6;
const HELP: u64 = CONTROL + 7;
const NOTIFY: u64 = CONTROL + 8;
const RTS_PUT: u64 = CONTROL + 9;
const GET: u64 = CONTROL + 10;
const PIECES: u64 = CONTROL + 11;
const ATOMIC: u64 = CONTROL + 12;
const HOLD: u64 = CONTROL + 13;
const WHERE: u64 = CONTROL + 14;
const HERE: u64 = CONTROL + 15;
const NOWHERE: u64 = CONTROL + 16;
const WITHDRAW: u64 = CONTROL + 17;
const RELEASE: u64 = CONTROL + 18;

impl Control {
    /// Returns the header and the bytes behind it.
    pub(crate) fn encode(self) -> (Header, SmallBytes) {
        match self {
            Self::Cts { tx, rx, limit } => (Header([CTS, tx]), words([rx, limit])),
            Self::CtsWrite { tx, rx, place: RemotePlace { addr, key } } => {
                (Header([CTS_WRITE, tx]), words([rx, addr, key]))
            }
            Self::CtsChunk { tx, rx, window } => {
                let Window { at, len, place: RemotePlace { addr, key } } = window;
                let payload = words([rx, at as u64, len as u64, addr, key]);
                (Header([CTS_CHUNK, tx]), payload)
            }
            Self::Grant { tx, limit } => (Header([GRANT, tx]), words([limit])),
            Self::FinWrite { rx, at } => (Header([FIN_WRITE, rx]), words([at])),
            Self::Unwritten { rx, at } => (Header([UNWRITTEN, rx]), words([at])),
            Self::Fin { name, verdict } => (Header([FIN, name]), words(verdict.words())),
            Self::Help { tx, wanted: HelpWanted { addr, split, turn } } => {
                let split = u64::from(split) << 32 | u64::from(turn);
                (Header([HELP, tx]), words([addr, split]))
            }
            Self::Notify { comp, tag, size } => (to(NOTIFY, comp, tag), words([size])),
            Self::RtsPut { comp, tag, request } => (to(RTS_PUT, comp, tag), request.encode()),
            Self::Get { comp, tag, request } => (to(GET, comp, tag), request.encode()),
            Self::Pieces { rx, request } => (Header([PIECES, rx]), request.encode()),
            Self::Atomic { swap, request } => (Header([ATOMIC, u64::from(swap)]), request.encode()),
            Self::Hold { hold: Hold { room, is_off }, turn } => {
                let code = u64::from(is_off) << 2 | room as u64;
                (Header([HOLD, turn << 3 | code]), words([]))
            }
            Self::Where { region } => (Header([WHERE, region]), words([])),
            Self::Here { region, place: RemotePlace { addr, key }, len } => {
                (Header([HERE, region]), words([addr, key, len]))
            }
            Self::Nowhere { region } => (Header([NOWHERE, region]), words([])),
            Self::Withdraw { region } => (Header([WITHDRAW, region]), words([])),
            Self::Release { region } => (Header([RELEASE, region]), words([])),
        }
    }

    /// Returns the completion object, the tag and the size of a notification: the only control
    /// message that is delivered together with users' messages.
    #[inline(always)]
    pub(crate) fn notification(header: Header, payload: &[u8]) -> Option<(RemoteComp, Tag, u64)> {
        let [word, tag] = header.0;
        if word & 0xffff_ffff != NOTIFY {
            return None;
        }
        let [size] = read(payload).ok()?;
        Some((RemoteComp((word >> 32) as u32), Tag(tag), size))
    }

    /// Decodes a peer's message.
    ///
    /// # Errors
    /// The error in it.
    pub(crate) fn decode(header: Header, payload: &[u8]) -> Result<Self, String> {
        let [word, name] = header.0;
        let kind = word & 0xff;
        let comp = match kind {
            NOTIFY | RTS_PUT | GET => addressed(word),
            _ => (word == kind).then_some(RemoteComp(0)),
        };
        let comp = comp.ok_or_else(|| unknown(header))?;
        let tag = Tag(name);
        Ok(match kind {
            CTS => {
                let [rx, limit] = read(payload)?;
                Self::Cts { tx: name, rx, limit }
            }
            CTS_WRITE => {
                let [rx, addr, key] = read(payload)?;
                Self::CtsWrite { tx: name, rx, place: RemotePlace { addr, key } }
            }
            CTS_CHUNK => {
                let [rx, at, len, addr, key] = read(payload)?;
                let fits = |bytes: u64| {
                    usize::try_from(bytes).map_err(|_| format!("a window of {bytes} bytes"))
                };
                let place = RemotePlace { addr, key };
                let window = Window { at: fits(at)?, len: fits(len)?, place };
                Self::CtsChunk { tx: name, rx, window }
            }
            GRANT => {
                let [limit] = read(payload)?;
                Self::Grant { tx: name, limit }
            }
            FIN_WRITE => {
                let [at] = read(payload)?;
                Self::FinWrite { rx: name, at }
            }
            UNWRITTEN => {
                let [at] = read(payload)?;
                Self::Unwritten { rx: name, at }
            }
            FIN => Self::Fin { name, verdict: TransferVerdict::of(read(payload)?)? },
            HELP => {
                let [addr, split] = read(payload)?;
                let (split, turn) = ((split >> 32) as u32, split as u32);
                Self::Help { tx: name, wanted: HelpWanted { addr, split, turn } }
            }
            NOTIFY => {
                let [size] = read(payload)?;
                Self::Notify { comp, tag, size }
            }
            RTS_PUT => Self::RtsPut { comp, tag, request: Request::decode(payload)? },
            GET => Self::Get { comp, tag, request: Request::decode(payload)? },
            PIECES => Self::Pieces { rx: name, request: Request::decode(payload)? },
            ATOMIC if name <= 1 => {
                Self::Atomic { swap: name == 1, request: Request::decode(payload)? }
            }
            HOLD => {
                let [] = read(payload)?;
                let room = Room::of(name & 0b11).ok_or("a hold of no kind")?;
                let hold = Hold { room, is_off: name & 0b100 != 0 };
                Self::Hold { hold, turn: name >> 3 }
            }
            HERE => {
                let [addr, key, len] = read(payload)?;
                Self::Here { region: name, place: RemotePlace { addr, key }, len }
            }
            WHERE | NOWHERE | WITHDRAW | RELEASE => {
                let [] = read(payload)?;
                match kind {
                    WHERE => Self::Where { region: name },
                    NOWHERE => Self::Nowhere { region: name },
                    WITHDRAW => Self::Withdraw { region: name },
                    _ => Self::Release { region: name },
                }
            }
            _ => return Err(unknown(header)),
        })
    }

    /// Returns `true` if the header is that of a hold.
    pub(crate) fn is_hold(header: Header) -> bool {
        header.0[0] == HOLD
    }
}

/// The payload of an RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rts {
    /// Bytes of the message.
    pub(crate) size: u64,
    /// The sender's name for it.
    pub(crate) tx: u64,
    /// The address in the sender's memory for the kernel's cross-memory copy; 0 if the kernel
    /// cannot copy it.
    pub(crate) addr: u64,
    /// The place in GPU memory that the receiver can map.
    pub(crate) mapped: Option<Mapped>,
}

/// A place in a region that was introduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapped {
    /// The sender's name for the region, from 1 on.
    pub(crate) name: u64,
    /// The offset in the region, in bytes.
    pub(crate) offset: u64,
}

impl Rts {
    pub(crate) fn encode(self) -> SmallBytes {
        let Mapped { name, offset } = self.mapped.unwrap_or(Mapped { name: 0, offset: 0 });
        words([self.size, self.tx, self.addr, name, offset])
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let [size, tx, addr, name, offset] = read(bytes).ok()?;
        Some(Self { size, tx, addr, mapped: (name != 0).then_some(Mapped { name, offset }) })
    }
}

/// The request for help with a message: its sender may write a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HelpWanted {
    /// The address of the message in the receiver's memory.
    pub(crate) addr: u64,
    /// The number of the split that divides the message.
    pub(crate) split: u32,
    /// The turn of that split.
    pub(crate) turn: u32,
}

/// A part of a message that its sender's NIC writes, and its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    /// The beginning in the message, in bytes.
    pub(crate) at: usize,
    /// The bytes of the part.
    pub(crate) len: usize,
    /// The place by which the receiver's NIC knows it.
    pub(crate) place: RemotePlace,
}

/// The outcome of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TransferVerdict {
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
    /// The bytes reach beyond the region.
    Outside,
    /// No atomic operation is done on that word.
    Word,
    /// The previous value of the word of an atomic operation.
    Held(u64),
    /// The sender cannot read the bytes behind these.
    Broken {
        /// Bytes that it has sent.
        sent: u64,
    },
}

impl TransferVerdict {
    fn words(self) -> [u64; 3] {
        match self {
            Self::Done => [0, 0, 0],
            Self::Truncated { message, buffer } => [1, message, buffer],
            Self::Failed => [2, 0, 0],
            Self::Stale => [3, 0, 0],
            Self::Outside => [4, 0, 0],
            Self::Word => [5, 0, 0],
            Self::Held(value) => [6, value, 0],
            Self::Broken { sent } => [7, sent, 0],
        }
    }

    fn of(words: [u64; 3]) -> Result<Self, String> {
        Ok(match words {
            [0, 0, 0] => Self::Done,
            [1, message, buffer] => Self::Truncated { message, buffer },
            [2, 0, 0] => Self::Failed,
            [3, 0, 0] => Self::Stale,
            [4, 0, 0] => Self::Outside,
            [5, 0, 0] => Self::Word,
            [6, value, 0] => Self::Held(value),
            [7, sent, 0] => Self::Broken { sent },
            [kind, ..] => return Err(format!("a verdict of kind {kind}")),
        })
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
            Self::Failed | Self::Broken { .. } => Some(OpError::Refused(peer)),
        }
    }
}

/// A request that refers to a region of another rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// The asker's name for it.
    pub(crate) name: u64,
    /// The region's number.
    pub(crate) region: u64,
    /// The offset in the region; or the number of pieces.
    pub(crate) offset: u64,
    /// Bytes, or the first operand. For pieces it includes the bytes of their list.
    pub(crate) first: u64,
    /// Address of a put or of pieces in the sender's memory, or 0. For a get: the limit of bytes at
    /// first. For an atomic operation: the second operand.
    pub(crate) second: u64,
}

impl Request {
    fn encode(self) -> SmallBytes {
        words([self.name, self.region, self.offset, self.first, self.second])
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let [name, region, offset, first, second] = read(bytes)?;
        Ok(Self { name, region, offset, first, second })
    }
}

fn words<const N: usize>(words: [u64; N]) -> SmallBytes {
    let mut bytes = [0; SmallBytes::MAX];
    let _ = words.map(U64::new).write_to_prefix(&mut bytes);
    SmallBytes::first(8 * N, bytes)
}

fn read<const N: usize>(bytes: &[u8]) -> Result<[u64; N], String> {
    let words = <[U64; N]>::ref_from_bytes(bytes);
    words
        .map(|words| words.map(U64::get))
        .map_err(|_| format!("a control message of {} bytes, and {} make one", bytes.len(), 8 * N))
}

/// Encodes a number, as a status returns it.
pub(crate) fn word(value: u64) -> SmallBytes {
    words([value])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_control_message_is_one_that_encodes_to_it_or_an_error(
            kind in 0_u64..40, high: u32, name: u64, small in 0_u64..9,
            payload in vec(any::<u64>(), 0..6), first in 0_u64..9, cut in 0_usize..8,
        ) {
            let bytes = |words: &[u64]| -> Vec<u8> {
                words.iter().flat_map(|word| word.to_le_bytes()).collect()
            };
            // A small first word, for verdicts.
            let mut verdict = payload.clone();
            verdict.iter_mut().take(1).for_each(|word| *word = first);
            for header in [Header([kind, name]), Header([kind | u64::from(high) << 32, small])] {
                for mut payload in [bytes(&payload), bytes(&verdict), bytes(&verdict)] {
                    payload.truncate(payload.len() - cut.min(payload.len()));
                    let decoded = Control::decode(header, &payload).ok();
                    if let Some(control) = decoded {
                        let (again, words) = control.encode();
                        prop_assert_eq!((again, words.as_slice()), (header, &payload[..]));
                    }
                    let notification = match decoded {
                        Some(Control::Notify { comp, tag, size }) => Some((comp, tag, size)),
                        _ => None,
                    };
                    prop_assert_eq!(Control::notification(header, &payload), notification);
                }
            }
        }

        #[test]
        fn each_control_message_is_read_as_it_was_written(
            a: u64, b: u64, c: u64, at: usize, len: usize, small: u32, swap: bool,
        ) {
            let (place, comp, tag) = (RemotePlace { addr: a, key: b }, RemoteComp(small), Tag(c));
            let request = Request { name: a, region: b, offset: c, first: !a, second: !b };
            let verdicts = [
                TransferVerdict::Done,
                TransferVerdict::Truncated { message: a, buffer: b },
                TransferVerdict::Failed,
                TransferVerdict::Stale,
                TransferVerdict::Outside,
                TransferVerdict::Word,
                TransferVerdict::Held(a),
                TransferVerdict::Broken { sent: b },
            ];
            let wanted = HelpWanted { addr: a, split: small, turn: b as u32 };
            let mut all = vec![
                Control::Cts { tx: a, rx: b, limit: c },
                Control::CtsWrite { tx: a, rx: c, place },
                Control::CtsChunk { tx: b, rx: c, window: Window { at, len, place } },
                Control::Grant { tx: a, limit: b },
                Control::FinWrite { rx: a, at: b },
                Control::Unwritten { rx: a, at: b },
                Control::Help { tx: c, wanted },
                Control::Notify { comp, tag, size: a },
                Control::RtsPut { comp, tag, request },
                Control::Get { comp, tag, request },
                Control::Pieces { rx: c, request },
                Control::Atomic { swap, request },
                Control::Hold { hold: Hold { room: Room::Offers, is_off: swap }, turn: a >> 3 },
                Control::Where { region: a },
                Control::Here { region: a, place, len: c },
                Control::Nowhere { region: a },
                Control::Withdraw { region: a },
                Control::Release { region: a },
            ];
            all.extend(verdicts.map(|verdict| Control::Fin { name: c, verdict }));
            for control in all {
                let (header, payload) = control.encode();
                prop_assert_eq!(Control::decode(header, payload.as_slice()), Ok(control));
            }
            let rts = Rts { size: a, tx: b, addr: c, mapped: None };
            let mapped = Rts { mapped: Some(Mapped { name: c | 1, offset: a }), ..rts };
            for rts in [rts, mapped] {
                prop_assert_eq!(Rts::decode(rts.encode().as_slice()), Some(rts));
            }
        }
    }
}
