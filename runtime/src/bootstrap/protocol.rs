//! The frames between the launcher and a rank.
//!
//! They travel on a `SOCK_SEQPACKET` pair, one frame a packet. A packet arrives whole or not at
//! all, so one bad frame spoils only itself. In a stream half a frame, or the frame of a forked
//! child in between, would garble all later ones. A frame must fit the socket's buffer, which the
//! launcher sets to [`SOCKET_BUFFER`].
//!
//! A frame is a kind (one byte), then its fields, integers little-endian, strings and values with
//! their length before them. Decoding checks every length against the frame and against its bound,
//! accepts no trailing bytes, and never panics.

#![forbid(unsafe_code)]

use carrack_transports::net::parts::{self, Layout, Length, Rest};
use std::sync::Arc;
use thiserror::Error;
use zerocopy::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{BootstrapError, Departure};
use super::job::JobId;

/// The version of this protocol. Launcher and rank must have the same.
pub const VERSION: u32 = 5;

/// The longest key, in bytes.
pub const MAX_KEY: usize = 256;

/// The longest value, in bytes: 64 KiB.
pub const MAX_VALUE: usize = 64 * 1024;

/// The longest reason in a [`Frame::Refused`], in bytes; a longer one is cut.
pub const MAX_REASON: usize = 1024;

/// The longest frame, in bytes: kind, two lengths, a key and a value.
pub const MAX_FRAME: usize = 1 + 2 + MAX_KEY + 4 + MAX_VALUE;

/// The buffer that both ends of the socket need, in bytes: two of the longest frames, rounded up.
pub const SOCKET_BUFFER: usize = 256 * 1024;

const _: () = assert!(2 * MAX_FRAME < SOCKET_BUFFER);

/// The variable with the number of the inherited socket.
pub const FD_VARIABLE: &str = carrack_transports::net::adopt::INHERITED;

/// The variable with the number of the rank.
pub const RANK_VARIABLE: &str = "CARRACK_RANK";

/// The variable with the number of ranks.
pub const SIZE_VARIABLE: &str = "CARRACK_SIZE";

/// One message between the launcher and a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Launcher to rank, the first frame: it lies in the socket before the program starts.
    Hello {
        /// The launcher's [`VERSION`]. It comes first in the frame in every version.
        version: u32,
        /// The rank at this end.
        rank: u32,
        /// The number of ranks.
        size: u32,
        /// The job's identity.
        job: JobId,
    },
    /// Rank to launcher: put a value.
    Put {
        /// The key.
        key: String,
        /// The value.
        value: Vec<u8>,
    },
    /// Rank to launcher: send the value of this key, now or once it is put.
    Get {
        /// The key.
        key: String,
    },
    /// Launcher to rank: the answer to a `Get`.
    Value {
        /// The key asked for.
        key: String,
        /// The value of that key.
        value: Vec<u8>,
    },
    /// Launcher to rank: there is no value yet, and a `Value` follows once it is put.
    Missing {
        /// The key asked for.
        key: String,
    },
    /// Rank to launcher: this rank has reached its fence of that number, counted from one.
    Fence {
        /// The number.
        number: u64,
    },
    /// Launcher to rank: all ranks have reached that fence.
    FenceDone {
        /// The number.
        number: u64,
    },
    /// Rank to launcher: this rank has ended its runtime in order.
    Finished,
    /// Launcher to rank: a rank has left the job.
    Gone {
        /// The rank that left.
        rank: u32,
        /// The way of leaving.
        how: Departure,
    },
    /// Launcher to rank: these ranks will not come, at most [`MAX_VALUE`]` / 4`.
    Lost {
        /// The ranks.
        ranks: Arc<[u32]>,
        /// The reason.
        how: Departure,
    },
    /// Launcher to rank: the last frame was wrong, and no further one is read.
    Refused {
        /// The reason, for a person to read.
        why: String,
    },
}

/// An error of a frame's bytes, in words.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct BadFrame(String);

const HELLO: u8 = 1;
const PUT: u8 = 2;
const GET: u8 = 3;
const VALUE: u8 = 4;
const FENCE: u8 = 5;
const FENCE_DONE: u8 = 6;
const FINISHED: u8 = 7;
const GONE: u8 = 8;
const REFUSED: u8 = 9;
const MISSING: u8 = 10;
const LOST: u8 = 11;

impl Frame {
    /// Encodes the frame.
    ///
    /// Keys and values must have passed [`check_key`] and [`check_value`]; a longer one is cut,
    /// because the receiver would refuse it.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello { version, rank, size, job } => {
                let (version, rank, size) = ((*version).into(), (*rank).into(), (*size).into());
                framed(HELLO, &HelloBytes { version, rank, size, job: *job.as_bytes() })
            }
            Self::Put { key, value } => of_value(PUT, key, value),
            Self::Get { key } => of_text(GET, key, MAX_KEY),
            Self::Value { key, value } => of_value(VALUE, key, value),
            Self::Missing { key } => of_text(MISSING, key, MAX_KEY),
            Self::Fence { number } => framed(FENCE, &U64::new(*number)),
            Self::FenceDone { number } => framed(FENCE_DONE, &U64::new(*number)),
            Self::Finished => vec![FINISHED],
            Self::Gone { rank, how } => {
                framed(GONE, &GoneBytes { rank: (*rank).into(), how: (*how).into() })
            }
            Self::Lost { ranks, how } => {
                let ranks: Vec<_> = ranks.iter().map(|rank| U32::new(*rank)).collect();
                let mut bytes = vec![LOST];
                parts::push::<U32>(&mut bytes, ranks.as_bytes());
                bytes.extend(DepartureBytes::from(*how).as_bytes());
                bytes
            }
            Self::Refused { why } => of_text(REFUSED, why, MAX_REASON),
        }
    }

    /// Decodes a frame.
    ///
    /// # Errors
    ///
    /// [`BadFrame`] for anything that [`encode`](Self::encode) does not make.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadFrame> {
        let mut rest = Rest(bytes);
        let from = &mut rest;
        let frame = match *head::<u8>(from, "kind")? {
            HELLO => {
                let HelloBytes { version, rank, size, job } = head(from, "hello")?;
                let job = JobId::from_bytes(*job);
                Self::Hello { version: version.get(), rank: rank.get(), size: size.get(), job }
            }
            PUT => Self::Put { key: text(from, "key", MAX_KEY)?, value: value(from)?.to_vec() },
            GET => Self::Get { key: text(from, "key", MAX_KEY)? },
            VALUE => Self::Value { key: text(from, "key", MAX_KEY)?, value: value(from)?.to_vec() },
            MISSING => Self::Missing { key: text(from, "key", MAX_KEY)? },
            FENCE => Self::Fence { number: head::<U64>(from, "fence number")?.get() },
            FENCE_DONE => Self::FenceDone { number: head::<U64>(from, "fence number")?.get() },
            FINISHED => Self::Finished,
            GONE => {
                let GoneBytes { rank, how } = head(from, "departure")?;
                Self::Gone { rank: rank.get(), how: how.try_into()? }
            }
            LOST => {
                let ranks = <[U32]>::ref_from_bytes(value(from)?)
                    .map_err(|_| BadFrame("its last rank has less than four bytes".into()))?;
                let how = head::<DepartureBytes>(from, "departure")?.try_into()?;
                Self::Lost { ranks: ranks.iter().map(|rank| rank.get()).collect(), how }
            }
            REFUSED => Self::Refused { why: text(from, "reason", MAX_REASON)? },
            kind => return Err(BadFrame(format!("its kind is {kind}, which no frame has"))),
        };
        match rest.0.len() {
            0 => Ok(frame),
            extra => Err(BadFrame(format!("{extra} bytes follow its last field"))),
        }
    }

    /// Returns the version in a `Hello` of any version, whose other fields may differ.
    pub fn hello_version(bytes: &[u8]) -> Option<u32> {
        let mut rest = Rest(bytes);
        (*rest.head::<u8>()? == HELLO).then(|| rest.head::<U32>())?.map(|version| version.get())
    }
}

/// Checks the length of a key.
///
/// # Errors
///
/// [`BootstrapError::TooLarge`] over [`MAX_KEY`] bytes.
pub fn check_key(key: &str) -> Result<(), BootstrapError> {
    check("a key", key.len(), MAX_KEY)
}

/// Checks the length of a value.
///
/// # Errors
///
/// [`BootstrapError::TooLarge`] over [`MAX_VALUE`] bytes.
pub fn check_value(value: &[u8]) -> Result<(), BootstrapError> {
    check("a value", value.len(), MAX_VALUE)
}

fn check(what: &'static str, len: usize, limit: usize) -> Result<(), BootstrapError> {
    if len > limit { Err(BootstrapError::TooLarge { what, len, limit }) } else { Ok(()) }
}

/// Codes of departures with a detail.
const EXITED: u8 = 1;
const KILLED: u8 = 2;

/// The other departures, by their codes.
const DEPARTURES: [(u8, Departure); 7] = [
    (0, Departure::Finished),
    (3, Departure::Disconnected),
    (4, Departure::Misbehaved),
    (5, Departure::NeverCame),
    (6, Departure::OtherSecret),
    (7, Departure::CameTwice),
    (8, Departure::OtherSize),
];

/// The fields of a `Hello`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HelloBytes {
    version: U32,
    rank: U32,
    size: U32,
    job: [u8; 16],
}

/// A departure.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DepartureBytes {
    code: u8,
    detail: I32,
}

/// The fields of a `Gone`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct GoneBytes {
    rank: U32,
    how: DepartureBytes,
}

impl From<Departure> for DepartureBytes {
    fn from(how: Departure) -> Self {
        let (code, detail) = match how {
            Departure::Exited(status) => (EXITED, status),
            Departure::Killed(signal) => (KILLED, signal),
            how => {
                let code = DEPARTURES.iter().find(|(_, known)| *known == how);
                (code.map_or(u8::MAX, |(code, _)| *code), 0)
            }
        };
        Self { code, detail: detail.into() }
    }
}

impl TryFrom<&DepartureBytes> for Departure {
    type Error = BadFrame;

    fn try_from(bytes: &DepartureBytes) -> Result<Self, BadFrame> {
        let (code, detail) = (bytes.code, bytes.detail.get());
        let plain = || DEPARTURES.iter().find(|(known, _)| (*known, 0) == (code, detail));
        match (code, plain()) {
            (EXITED, _) => Ok(Self::Exited(detail)),
            (KILLED, _) => Ok(Self::Killed(detail)),
            (_, Some((_, how))) => Ok(*how),
            (_, None) => {
                let why = format!("its departure has code {code} with {detail}, which none has");
                Err(BadFrame(why))
            }
        }
    }
}

/// Puts the kind in front of a struct.
fn framed(kind: u8, fields: &(impl Layout + ?Sized)) -> Vec<u8> {
    [&[kind], fields.as_bytes()].concat()
}

/// Puts the kind in front of a text, which is cut at `longest`.
fn of_text(kind: u8, text: &str, longest: usize) -> Vec<u8> {
    let mut bytes = vec![kind];
    parts::push::<U16>(&mut bytes, parts::cut(text, longest).as_bytes());
    bytes
}

/// Puts kind and key in front of a value.
fn of_value(kind: u8, key: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = of_text(kind, key, MAX_KEY);
    parts::push::<U32>(&mut bytes, &value[..value.len().min(MAX_VALUE)]);
    bytes
}

fn head<'a, T: Layout>(rest: &mut Rest<'a>, field: &str) -> Result<&'a T, BadFrame> {
    rest.head().ok_or_else(|| short(field))
}

/// Takes a part of at most `longest` bytes.
fn part<'a, L: Length>(
    rest: &mut Rest<'a>,
    field: &str,
    longest: usize,
) -> Result<&'a [u8], BadFrame> {
    let len = head::<L>(rest, field)?.bytes();
    if len > longest {
        let why = format!("its {field} of {len} bytes exceeds the limit of {longest}");
        return Err(BadFrame(why));
    }
    rest.bytes(len).ok_or_else(|| short(field))
}

fn value<'a>(rest: &mut Rest<'a>) -> Result<&'a [u8], BadFrame> {
    part::<U32>(rest, "value", MAX_VALUE)
}

fn text(rest: &mut Rest<'_>, field: &str, longest: usize) -> Result<String, BadFrame> {
    let text = std::str::from_utf8(part::<U16>(rest, field, longest)?);
    Ok(text.map_err(|_| BadFrame(format!("its {field} is not UTF-8")))?.to_owned())
}

fn short(field: &str) -> BadFrame {
    BadFrame(format!("it ends inside its {field}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> impl Strategy<Value = String> {
        "\\PC{0,80}".prop_filter("within the bound", |key| key.len() <= MAX_KEY)
    }

    fn value() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..300),
            any::<u8>().prop_map(|byte| vec![byte; MAX_VALUE]),
        ]
    }

    fn departure() -> impl Strategy<Value = Departure> {
        prop_oneof![
            Just(Departure::Finished),
            any::<i32>().prop_map(Departure::Exited),
            any::<i32>().prop_map(Departure::Killed),
            Just(Departure::Disconnected),
            Just(Departure::Misbehaved),
            Just(Departure::NeverCame),
            Just(Departure::OtherSecret),
            Just(Departure::CameTwice),
            Just(Departure::OtherSize),
        ]
    }

    fn frame() -> impl Strategy<Value = Frame> {
        prop_oneof![
            (any::<u32>(), any::<u32>(), any::<u32>(), any::<[u8; 16]>()).prop_map(
                |(version, rank, size, job)| Frame::Hello {
                    version,
                    rank,
                    size,
                    job: JobId::from_bytes(job)
                }
            ),
            (key(), value()).prop_map(|(key, value)| Frame::Put { key, value }),
            key().prop_map(|key| Frame::Get { key }),
            (key(), value()).prop_map(|(key, value)| Frame::Value { key, value }),
            key().prop_map(|key| Frame::Missing { key }),
            any::<u64>().prop_map(|number| Frame::Fence { number }),
            any::<u64>().prop_map(|number| Frame::FenceDone { number }),
            Just(Frame::Finished),
            (any::<u32>(), departure()).prop_map(|(rank, how)| Frame::Gone { rank, how }),
            (proptest::collection::vec(any::<u32>(), 0..100), departure())
                .prop_map(|(ranks, how)| Frame::Lost { ranks: ranks.into(), how }),
            "\\PC{0,200}".prop_map(|why| Frame::Refused { why }),
        ]
    }

    proptest! {
        #[test]
        fn a_frame_comes_back_as_it_was_sent(frame in frame()) {
            let bytes = frame.encode();
            prop_assert!(bytes.len() <= MAX_FRAME);
            prop_assert_eq!(Frame::decode(&bytes), Ok(frame));
        }

        #[test]
        fn garbage_is_an_error_or_a_frame_but_never_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            if let Ok(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode().len(), bytes.len());
            }
        }

        #[test]
        fn a_frame_with_one_byte_changed_is_never_a_panic(
            frame in frame(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut bytes = frame.encode();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = Frame::decode(&bytes);
        }

        #[test]
        fn every_proper_prefix_of_a_frame_is_refused(
            frame in frame(), cut in any::<prop::sample::Index>(),
        ) {
            let bytes = frame.encode();
            prop_assert!(Frame::decode(&bytes[..cut.index(bytes.len())]).is_err());
        }
    }

    #[test]
    fn a_length_beyond_the_bound_is_refused_before_anything_is_allocated() {
        let mut bytes = Frame::Put { key: "k".into(), value: vec![] }.encode();
        bytes.truncate(bytes.len() - 4);
        bytes.extend(u32::MAX.to_le_bytes());
        let why = Frame::decode(&bytes).unwrap_err().to_string();
        assert!(why.starts_with("its value of 4294967295 bytes exceeds"), "{why}");
    }

    #[test]
    fn bytes_after_a_frame_are_refused() {
        let mut bytes = Frame::Finished.encode();
        bytes.push(0);
        let why = Frame::decode(&bytes).unwrap_err().to_string();
        assert_eq!(why, "1 bytes follow its last field");
    }

    #[test]
    fn a_reason_that_is_too_long_is_cut_between_characters() {
        let bytes = Frame::Refused { why: "ä".repeat(MAX_REASON) }.encode();
        let Ok(Frame::Refused { why }) = Frame::decode(&bytes) else { panic!("must decode") };
        assert_eq!(why, "ä".repeat(MAX_REASON / 2));
    }

    #[test]
    fn the_version_is_readable_in_a_hello_of_another_layout() {
        assert_eq!(Frame::hello_version(&[HELLO, 9, 0, 0, 0, 42]), Some(9));
        assert_eq!(Frame::hello_version(&[PUT, 9, 0, 0, 0]), None);
        assert_eq!(Frame::hello_version(&[HELLO, 9]), None);
    }
}
