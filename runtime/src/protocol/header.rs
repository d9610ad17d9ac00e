//! The sixteen bytes before each message.
//!
//! ```text
//! word 0 | kind 8 | policy 8 | engine 16 | completion 32 |
//! word 1 | tag 64                                        |
//! ```
//!
//! Tags and completions travel at full width on every path (LCI has 16 and 15 bits for them on its fast
//! one). Whatever a peer sends is checked here, once.

use crate::matching::Matching;
use crate::names::{RemoteComp, Tag};
use carrack_transports::contract::Header;

/// What a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// An active message for a completion object.
    Am { comp: RemoteComp, tag: Tag },
    /// A message to be matched with a receive.
    Send { engine: u16, policy: Matching, tag: Tag },
}

const AM: u64 = 1;
const SEND: u64 = 2;

impl Message {
    #[inline(always)]
    pub(crate) fn encode(self) -> Header {
        match self {
            Self::Am { comp, tag } => Header([AM | u64::from(comp.0) << 32, tag.0]),
            Self::Send { engine, policy, tag } => {
                Header([SEND | u64::from(policy.code()) << 8 | u64::from(engine) << 16, tag.0])
            }
        }
    }

    /// Whether it is an active message, and well-formed: all that is asked in its path.
    #[inline(always)]
    pub(crate) fn is_am(header: Header) -> bool {
        header.0[0] & 0xffff_ffff == AM
    }

    /// The completion object and the tag of a header that [`is_am`](Self::is_am).
    #[inline(always)]
    pub(crate) fn am(header: Header) -> (RemoteComp, Tag) {
        let [word, tag] = header.0;
        (RemoteComp((word >> 32) as u32), Tag(tag))
    }

    /// Reads what a peer sent.
    ///
    /// # Errors
    /// What is wrong with it.
    #[inline(always)]
    pub(crate) fn decode(header: Header) -> Result<Self, String> {
        let [word, tag] = header.0;
        let tag = Tag(tag);
        let (kind, policy, engine) = (word & 0xff, (word >> 8) & 0xff, (word >> 16) as u16);
        match kind {
            AM if policy == 0 && engine == 0 => Ok(Self::Am { comp: RemoteComp((word >> 32) as u32), tag }),
            SEND if word >> 32 == 0 => match Matching::from_code(policy as u8) {
                Some(policy) => Ok(Self::Send { engine, policy, tag }),
                None => Err(format!("a matching policy of {policy}")),
            },
            _ => Err(format!("a header of {word:#018x}")),
        }
    }
}

/// What became of a message that was not an active one. Written over its header once it has been looked at,
/// so that a header is read once; never sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// It waits for its receive.
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

    /// `None` for an active message, which nothing was written over.
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
        fn every_header_is_a_message_that_encodes_to_it_or_an_error(word: u64, tag: u64, small in 0_u64..4) {
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
