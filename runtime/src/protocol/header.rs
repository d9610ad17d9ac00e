//! The sixteen bytes before each message.
//!
//! ```text
//! word 0 | kind 8 | policy 8 | engine 16 | completion 32 |   messages, and offers of messages
//! word 1 | tag 64                                        |
//!
//! word 0 | kind 8 | offset 56                            |   other messages of large ones: see
//! `bulk` word 1 | name 64                                       |
//! ```
//!
//! Tags and completions travel at full width on every path (LCI has 16 and 15 bits for them on its
//! fast one). Whatever a peer sends is checked here, once.

use crate::names::{COLLECTIVE_ENGINE, Matching, RemoteComp, Tag};
use carrack_transports::contract::Header;

/// The kind of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// An active message for a completion object.
    Am { comp: RemoteComp, tag: Tag },
    /// A message to be matched with a receive.
    Send { engine: u16, policy: Matching, tag: Tag },
    /// The offer of a large active message.
    OfferAm { comp: RemoteComp, tag: Tag },
    /// The offer of a large message to be matched.
    OfferSend { engine: u16, policy: Matching, tag: Tag },
    /// Clears an offered message to come part by part.
    Clear { token: u64 },
    /// Grants more bytes of a requested message.
    Grant { landing: u64 },
    /// All or a part of a cleared message was written.
    Written { landing: u64 },
    /// The message, or its rest, cannot be written: it comes part by part, when there is room.
    Unwritten { landing: u64 },
    /// A part of a large message.
    Part { landing: u64, offset: u64 },
    /// Ends an offer or a request.
    Finish { token: u64 },
    /// Notifies of a put that was done: a completion object is signaled.
    Signal { comp: RemoteComp, tag: Tag },
    /// The offer of a put that its owner has to carry out. Then it tells the completion object, if
    /// there is one.
    OfferPut { comp: RemoteComp, tag: Tag },
    /// Asks for a part of a region. Then its owner tells the completion object, if there is one.
    Get { comp: RemoteComp, tag: Tag },
    /// Offers a list of pieces of a region, with bytes that are put there; or, with a name for
    /// where they go, asks for these.
    Pieces { landing: u64 },
    /// Asks for an atomic operation.
    Atomic { swap: bool },
    /// The room at its sender. A later turn overrules earlier ones.
    Hold { room: Room, turn: u64 },
    /// The kernel is copying an offered message: its sender may help.
    Help { token: u64 },
    /// Asks for the place of a region, for this rank's NIC.
    Where { region: u64 },
    /// The place of a region, or the refusal.
    Here { region: u64 },
    /// The registration of a region has ended.
    Withdraw { region: u64 },
    /// The sender does not use a region any more.
    LetGo { region: u64 },
    /// Tells of a region in which messages will lie.
    Introduce { name: u64 },
    /// A note of a member of a group about its operation of that number.
    Note { group: u32, number: u64 },
}

const AM: u64 = 1;
const SEND: u64 = 2;
const OFFER_AM: u64 = 3;
const OFFER_SEND: u64 = 4;
const CLEAR: u64 = 5;
const PART: u64 = 6;
const FINISH: u64 = 7;
const SIGNAL: u64 = 8;
const OFFER_PUT: u64 = 9;
const GET: u64 = 10;
const ATOMIC: u64 = 11;
const HOLD: u64 = 12;
const NOTE: u64 = 13;
const HELP: u64 = 14;
const INTRODUCE: u64 = 15;
const GRANT: u64 = 16;
const WRITTEN: u64 = 17;
const WHERE: u64 = 18;
const HERE: u64 = 19;
const WITHDRAW: u64 = 20;
const LET_GO: u64 = 21;
const UNWRITTEN: u64 = 22;
const PIECES: u64 = 23;
/// The distance from the kind of a message to that of its offer.
const OFFER: u64 = OFFER_AM - AM;
const _: () =
    assert!(OFFER_SEND - SEND == OFFER, "an offer's header is its message's but for the kind");

impl Message {
    #[inline(always)]
    pub(crate) fn encode(self) -> Header {
        match self {
            Self::Am { comp, tag } => Self::to(AM, comp, tag),
            Self::Send { engine, policy, tag } => Self::matched(SEND, engine, policy, tag),
            Self::OfferAm { comp, tag } => Self::to(OFFER_AM, comp, tag),
            Self::OfferSend { engine, policy, tag } => {
                Self::matched(OFFER_SEND, engine, policy, tag)
            }
            Self::Clear { token } => Header([CLEAR, token]),
            Self::Part { landing, offset } => Header([PART | offset << 8, landing]),
            Self::Grant { landing } => Header([GRANT, landing]),
            Self::Where { region } => Header([WHERE, region]),
            Self::Here { region } => Header([HERE, region]),
            Self::Withdraw { region } => Header([WITHDRAW, region]),
            Self::LetGo { region } => Header([LET_GO, region]),
            Self::Written { landing } => Header([WRITTEN, landing]),
            Self::Unwritten { landing } => Header([UNWRITTEN, landing]),
            Self::Finish { token } => Header([FINISH, token]),
            Self::Help { token } => Header([HELP, token]),
            Self::Introduce { name } => Header([INTRODUCE, name]),
            Self::Signal { comp, tag } => Self::to(SIGNAL, comp, tag),
            Self::OfferPut { comp, tag } => Self::to(OFFER_PUT, comp, tag),
            Self::Get { comp, tag } => Self::to(GET, comp, tag),
            Self::Pieces { landing } => Header([PIECES, landing]),
            Self::Atomic { swap } => Header([ATOMIC, u64::from(swap)]),
            Self::Note { group, number } => Header([NOTE | u64::from(group) << 32, number]),
            Self::Hold { room, turn } => Header([HOLD, turn << 2 | room as u64]),
        }
    }

    #[inline(always)]
    fn to(kind: u64, comp: RemoteComp, tag: Tag) -> Header {
        Header([kind | u64::from(comp.0) << 32, tag.0])
    }

    #[inline(always)]
    fn matched(kind: u64, engine: u16, policy: Matching, tag: Tag) -> Header {
        Header([kind | u64::from(policy.code()) << 8 | u64::from(engine) << 16, tag.0])
    }

    /// Returns `true` if the receiver has to act on a request in it.
    pub(crate) fn is_request(self) -> bool {
        matches!(
            self,
            Self::OfferPut { .. } | Self::Get { .. } | Self::Atomic { .. } | Self::Pieces { .. }
        )
    }

    /// Returns the header of a message's offer, from the header of the message in one piece.
    pub(crate) fn offering(header: Header) -> Header {
        let [word, tag] = header.0;
        Header([word + OFFER, tag])
    }

    /// Returns `true` if it is a well-formed active message. The fast path tests only this.
    #[inline(always)]
    pub(crate) fn is_am(header: Header) -> bool {
        header.0[0] & 0xffff_ffff == AM
    }

    /// Returns `true` if it concerns a message in flight, or memory: it is no message of the user.
    pub(crate) fn is_bulk(self) -> bool {
        !matches!(
            self,
            Self::Am { .. } | Self::Send { .. } | Self::OfferAm { .. } | Self::OfferSend { .. }
        )
    }

    /// Returns `true` if it is part of a collective, whole or offered.
    pub(crate) fn is_collective(self) -> bool {
        matches!(
            self,
            Self::Send { engine: COLLECTIVE_ENGINE, .. }
                | Self::OfferSend { engine: COLLECTIVE_ENGINE, .. }
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

    /// Decodes a whole message to be matched: first, since every such message takes this path.
    #[inline(always)]
    fn decode_send(header: Header) -> Option<Self> {
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
        let comp = RemoteComp((word >> 32) as u32);
        match kind {
            AM if policy == 0 && engine == 0 => Ok(Self::Am { comp, tag }),
            OFFER_AM if policy == 0 && engine == 0 => Ok(Self::OfferAm { comp, tag }),
            SEND | OFFER_SEND if word >> 32 == 0 => match Matching::from_code(policy as u8) {
                Some(policy) if kind == SEND => Ok(Self::Send { engine, policy, tag }),
                Some(policy) => Ok(Self::OfferSend { engine, policy, tag }),
                None => Err(format!("a matching policy of {policy}")),
            },
            CLEAR if word == CLEAR => Ok(Self::Clear { token: tag.0 }),
            GRANT if word == GRANT => Ok(Self::Grant { landing: tag.0 }),
            PART => Ok(Self::Part { landing: tag.0, offset: word >> 8 }),
            WHERE if word == WHERE => Ok(Self::Where { region: tag.0 }),
            HERE if word == HERE => Ok(Self::Here { region: tag.0 }),
            WITHDRAW if word == WITHDRAW => Ok(Self::Withdraw { region: tag.0 }),
            LET_GO if word == LET_GO => Ok(Self::LetGo { region: tag.0 }),
            WRITTEN if word == WRITTEN => Ok(Self::Written { landing: tag.0 }),
            UNWRITTEN if word == UNWRITTEN => Ok(Self::Unwritten { landing: tag.0 }),
            FINISH if word == FINISH => Ok(Self::Finish { token: tag.0 }),
            HELP if word == HELP => Ok(Self::Help { token: tag.0 }),
            INTRODUCE if word == INTRODUCE => Ok(Self::Introduce { name: tag.0 }),
            SIGNAL if policy == 0 && engine == 0 => Ok(Self::Signal { comp, tag }),
            OFFER_PUT if policy == 0 && engine == 0 => Ok(Self::OfferPut { comp, tag }),
            GET if policy == 0 && engine == 0 => Ok(Self::Get { comp, tag }),
            PIECES if word == PIECES => Ok(Self::Pieces { landing: tag.0 }),
            NOTE if policy == 0 && engine == 0 => Ok(Self::Note { group: comp.0, number: tag.0 }),
            HOLD if word == HOLD => {
                let room = Room::of(tag.0 & 0b11).ok_or("a hold of no kind")?;
                Ok(Self::Hold { room, turn: tag.0 >> 2 })
            }
            ATOMIC if word == ATOMIC && tag.0 <= 1 => Ok(Self::Atomic { swap: tag.0 == 1 }),
            _ => Err(format!("a header of {word:#018x}")),
        }
    }
}

/// The room at a receiver that keeps messages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Room {
    /// Any message.
    Any = 0,
    /// Offers of messages, and notifications.
    Offers = 1,
    /// Offers of messages, and no notifications of puts and gets.
    OffersOnly = 2,
}

impl Room {
    fn of(code: u64) -> Option<Self> {
        [Self::Any, Self::Offers, Self::OffersOnly].into_iter().find(|room| *room as u64 == code)
    }
}

/// The result of matching a message. Written over its header after a look, so that a header is
/// read once; never sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// It waits for its receive; or it has met one, and all is done.
    Kept,
    /// It has met one: the n-th pair of the batch.
    Met(usize),
    /// It makes no sense.
    Nonsense,
}

const KEPT: u64 = 0xf0;
const MET: u64 = 0xf1;
const NONSENSE: u64 = 0xf2;

impl Found {
    pub(crate) fn encode(self) -> Header {
        match self {
            Self::Kept => Header([KEPT, 0]),
            Self::Met(at) => Header([MET, at as u64]),
            Self::Nonsense => Header([NONSENSE, 0]),
        }
    }

    /// Returns `None` for a header that was not overwritten.
    pub(crate) fn decode(header: Header) -> Option<Self> {
        match header.0 {
            [KEPT, _] => Some(Self::Kept),
            [MET, at] => Some(Self::Met(at as usize)),
            [NONSENSE, _] => Some(Self::Nonsense),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_header_is_a_message_that_encodes_to_it_or_an_error(word: u64, tag: u64, small in 0_u64..25) {
            for word in [word, word & 0xffff_ffff_ffff_ff00 | small, word & 0xffff_03ff, word & !0xffff_ffff | 1] {
                prop_assert_eq!(Message::is_am(Header([word, tag])), matches!(Message::decode(Header([word, tag])), Ok(Message::Am { .. })));
                if let Ok(message) = Message::decode(Header([word, tag])) {
                    prop_assert_eq!(message.encode(), Header([word, tag]));
                }
            }
        }

        #[test]
        fn tags_completions_and_engines_travel_at_full_width(tag: u64, comp: u32, engine: u16, policy in 0_u8..4) {
            let am = Message::Am { comp: RemoteComp(comp), tag: Tag(tag) };
            prop_assert_eq!(Message::decode(am.encode()), Ok(am));
            let policy = Matching::from_code(policy).unwrap();
            let send = Message::Send { engine, policy, tag: Tag(tag) };
            prop_assert_eq!(Message::decode(send.encode()), Ok(send));
        }
    }
}
