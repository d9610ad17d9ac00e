//! The sixteen bytes before each message.
//!
//! ```text
//! word 0 | kind 8 | policy 8 | engine 16 | completion 32 |   messages, and RTS of messages
//! word 1 | tag 64                                        |
//!
//! word 0 | kind 8 | offset 56                            |   fragments, and control messages:
//! word 1 | name 64                                       |   see `wire`
//! ```
//!
//! Tags and completions travel at full width on every path (LCI has 16 and 15 bits for them on its
//! fast one). Bytes of a peer are checked here, once.

use crate::names::{COLLECTIVE_ENGINE, Matching, RemoteComp, Tag};
use carrack_transports::contract::Header;

/// The kind of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// An active message for a completion object.
    Am { comp: RemoteComp, tag: Tag },
    /// A message to be matched with a receive.
    Send { engine: u16, policy: Matching, tag: Tag },
    /// The RTS of an active message.
    RtsAm { comp: RemoteComp, tag: Tag },
    /// The RTS of a message to be matched.
    RtsSend { engine: u16, policy: Matching, tag: Tag },
    /// A fragment of a message that its receiver has named `rx`.
    Fragment { rx: u64, offset: u64 },
    /// The key of a region in which messages will lie.
    Introduce { name: u64 },
    /// A note of a member of a group about its operation of that number.
    Note { group: u32, number: u64 },
    /// A control message: see [`Control`](super::wire::Control).
    Control,
}

const AM: u64 = 1;
const SEND: u64 = 2;
const RTS_AM: u64 = 3;
const RTS_SEND: u64 = 4;
const FRAGMENT: u64 = 5;
const INTRODUCE: u64 = 6;
const NOTE: u64 = 7;
/// The first kind of control messages.
pub(super) const CONTROL: u64 = 8;
/// The distance from the kind of a message to that of its RTS.
const RTS: u64 = RTS_AM - AM;
const _: () =
    assert!(RTS_SEND - SEND == RTS, "an RTS has the header of its message, except the kind");

impl Message {
    /// Returns the header. A control message encodes its own.
    #[inline(always)]
    pub(crate) fn encode(self) -> Header {
        match self {
            Self::Am { comp, tag } => to(AM, comp, tag),
            Self::Send { engine, policy, tag } => Self::matched(SEND, engine, policy, tag),
            Self::RtsAm { comp, tag } => to(RTS_AM, comp, tag),
            Self::RtsSend { engine, policy, tag } => Self::matched(RTS_SEND, engine, policy, tag),
            Self::Fragment { rx, offset } => Header([FRAGMENT | offset << 8, rx]),
            Self::Introduce { name } => Header([INTRODUCE, name]),
            Self::Note { group, number } => Header([NOTE | u64::from(group) << 32, number]),
            Self::Control => Header([CONTROL, 0]),
        }
    }

    #[inline(always)]
    fn matched(kind: u64, engine: u16, policy: Matching, tag: Tag) -> Header {
        Header([kind | u64::from(policy.code()) << 8 | u64::from(engine) << 16, tag.0])
    }

    /// Returns the header of a message's RTS, from the header of the message in one piece.
    pub(crate) fn rts(header: Header) -> Header {
        let [word, tag] = header.0;
        Header([word + RTS, tag])
    }

    /// Returns `true` if it is a well-formed active message. The fast path tests only this.
    #[inline(always)]
    pub(crate) fn is_am(header: Header) -> bool {
        header.0[0] & 0xffff_ffff == AM
    }

    /// Returns `true` if it may be matched: a whole message, or an RTS in its place.
    #[inline(always)]
    pub(crate) fn is_matched(header: Header) -> bool {
        let kind = header.0[0] & 0xff;
        kind == SEND || kind == RTS_SEND
    }

    /// The first byte of a whole message to be matched.
    pub(crate) const SEND_KIND: u8 = SEND as u8;

    /// Returns `true` if it is no message of the user's: it belongs to one in flight, or to memory.
    pub(crate) fn is_of_runtime(self) -> bool {
        !matches!(
            self,
            Self::Am { .. } | Self::Send { .. } | Self::RtsAm { .. } | Self::RtsSend { .. }
        )
    }

    /// Returns `true` if it is part of a collective, whole or as an RTS.
    pub(crate) fn is_collective(self) -> bool {
        matches!(
            self,
            Self::Send { engine: COLLECTIVE_ENGINE, .. }
                | Self::RtsSend { engine: COLLECTIVE_ENGINE, .. }
        )
    }

    /// Returns the group and the number of a note.
    #[inline(always)]
    pub(crate) fn note(header: Header) -> Option<(u32, u64)> {
        let [word, number] = header.0;
        (word & 0xffff_ffff == NOTE).then_some(((word >> 32) as u32, number))
    }

    /// Returns `true` if it is a whole message to be matched.
    #[inline(always)]
    pub(crate) fn is_send(header: Header) -> bool {
        header.0[0] & 0xff == SEND
    }

    /// Returns the completion object and the tag of a header that [`is_am`](Self::is_am).
    #[inline(always)]
    pub(crate) fn am(header: Header) -> (RemoteComp, Tag) {
        let [word, tag] = header.0;
        (RemoteComp((word >> 32) as u32), Tag(tag))
    }

    /// Decodes a whole message to be matched. It is the first test, since every such message takes
    /// this path.
    #[inline(always)]
    pub(crate) fn decode_send(header: Header) -> Option<Self> {
        let [word, tag] = header.0;
        if word & 0xffff_ffff_0000_00ff != SEND {
            return None;
        }
        let policy = Matching::from_code((word >> 8) as u8)?;
        Some(Self::Send { engine: (word >> 16) as u16, policy, tag: Tag(tag) })
    }

    /// Decodes the header of a peer's message.
    ///
    /// # Errors
    /// The error in it.
    #[inline(always)]
    pub(crate) fn decode(header: Header) -> Result<Self, String> {
        if let Some(send) = Self::decode_send(header) {
            return Ok(send);
        }
        let [word, tag] = header.0;
        let tag = Tag(tag);
        let (kind, policy, engine) = (word & 0xff, (word >> 8) & 0xff, (word >> 16) as u16);
        match kind {
            AM | RTS_AM | NOTE => {
                let Some(comp) = addressed(word) else { return Err(unknown(header)) };
                Ok(match kind {
                    AM => Self::Am { comp, tag },
                    RTS_AM => Self::RtsAm { comp, tag },
                    _ => Self::Note { group: comp.0, number: tag.0 },
                })
            }
            SEND | RTS_SEND if word >> 32 == 0 => match Matching::from_code(policy as u8) {
                Some(policy) if kind == SEND => Ok(Self::Send { engine, policy, tag }),
                Some(policy) => Ok(Self::RtsSend { engine, policy, tag }),
                None => Err(format!("a matching policy of {policy}")),
            },
            FRAGMENT => Ok(Self::Fragment { rx: tag.0, offset: word >> 8 }),
            INTRODUCE if word == INTRODUCE => Ok(Self::Introduce { name: tag.0 }),
            CONTROL.. => Ok(Self::Control),
            _ => Err(unknown(header)),
        }
    }
}

/// Returns the header of a message for a completion object, or a group.
#[inline(always)]
pub(super) fn to(kind: u64, comp: RemoteComp, tag: Tag) -> Header {
    Header([kind | u64::from(comp.0) << 32, tag.0])
}

/// Returns the completion object in the first word of such a header.
#[inline(always)]
pub(super) fn addressed(word: u64) -> Option<RemoteComp> {
    (word & 0xffff_ff00 == 0).then_some(RemoteComp((word >> 32) as u32))
}

/// Returns the error of a header of no message.
#[cold]
pub(super) fn unknown(header: Header) -> String {
    format!("a header of {:#018x}", header.0[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_header_is_a_message_that_encodes_to_it_or_an_error(
            word: u64, tag: u64, small in 0_u64..25,
        ) {
            let (of_kind, am) = (word & !0xff | small, word & !0xffff_ffff | 1);
            for word in [word, of_kind, word & 0xffff_03ff, am] {
                let decoded = Message::decode(Header([word, tag]));
                let is_am = matches!(decoded, Ok(Message::Am { .. }));
                prop_assert_eq!(Message::is_am(Header([word, tag])), is_am);
                match decoded {
                    Ok(Message::Control) => prop_assert!(word & 0xff >= CONTROL),
                    Ok(message) => prop_assert_eq!(message.encode(), Header([word, tag])),
                    Err(_) => {}
                }
            }
        }

        #[test]
        fn tags_completions_and_engines_travel_at_full_width(
            tag: u64, comp: u32, engine: u16, policy in 0_u8..4,
        ) {
            let am = Message::Am { comp: RemoteComp(comp), tag: Tag(tag) };
            prop_assert_eq!(Message::decode(am.encode()), Ok(am));
            let policy = Matching::from_code(policy).unwrap();
            let send = Message::Send { engine, policy, tag: Tag(tag) };
            prop_assert_eq!(Message::decode(send.encode()), Ok(send));
        }
    }
}
