//! Flow control: the holds of senders, and the posts that remain allowed.
//!
//! ```text
//! sender (tx)                            receiver (rx)
//!   messages without a receive ────►     beyond half of CARRACK_UNEXPECTED:
//!   ◄───────── hold (offers, turn)
//!   RTS in the place of messages ──►
//!   ◄──────────── hold (any, turn)       once a quarter is left
//!
//!   requests ──────────────────────►     handlers post replies, beyond CARRACK_BACKLOG:
//!   ◄─────────── hold (XOFF, turn)
//!   replies, and earlier posts ────►     posts only replies beyond half of that
//!   ◄──────────── hold (XON, turn)       once half of that is left
//! ```
//!
//! A hold delays nothing that was posted. RTS take the place of messages, and XOFF refuses posts
//! only: backlogs drain, and replies go both ways. So no hold waits for another hold.

use crate::names::Rank;

/// The room at a receiver that keeps messages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) enum Room {
    /// Any message.
    #[default]
    Any = 0,
    /// Offers of messages, and notifications.
    Offers = 1,
    /// Offers of messages, and no notifications of puts and gets.
    OffersOnly = 2,
}

impl Room {
    pub(super) fn of(code: u64) -> Option<Self> {
        [Self::Any, Self::Offers, Self::OffersOnly].into_iter().find(|room| *room as u64 == code)
    }
}

/// The hold of a sender. The default is none.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Hold {
    pub(crate) room: Room,
    /// XOFF: the sender posts only replies.
    pub(crate) is_off: bool,
}

/// The budget for messages that wait at a receiver, in bytes.
///
/// The upper half is for messages that are sent before their sender hears of the hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget(pub(crate) usize);

/// Bytes that a sender may send without having listened, at least and at most.
const LEAST: usize = 16 << 10;
const MOST: usize = 1 << 20;

impl Budget {
    /// Returns `true` if the sender of a message has to hold, with `kept` bytes waiting.
    #[inline(always)]
    pub(crate) fn is_short(self, kept: usize) -> bool {
        kept > self.0 / 2
    }

    /// Returns the room for a sender that was told `before`. A closed window opens when three
    /// quarters of the budget are free. `undelivered`: the bytes that wait for completion objects.
    pub(crate) fn room(self, (kept, undelivered): (usize, usize), before: Room) -> Room {
        let most = if before == Room::OffersOnly { self.0 / 4 } else { self.0 / 2 };
        match kept {
            kept if kept <= self.0 / 4 => Room::Any,
            _ if undelivered > most => Room::OffersOnly,
            _ => Room::Offers,
        }
    }

    /// Returns the bytes that each rank of a job may send without having listened: its share of
    /// half of the budget. It is [`LEAST`] at least, so a budget that is too small for all ranks is
    /// exceeded by that, too.
    pub(crate) fn share(self, ranks: u32) -> u32 {
        let share = self.0 / 2 / ranks.saturating_sub(1).max(1) as usize;
        share.clamp(LEAST, MOST) as u32
    }
}

/// The bound of a backlog, in operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound(pub(crate) usize);

impl Bound {
    /// Returns the operations that may wait when one more is posted. A reply always may: its
    /// request has kept a place for it. A rank that `holds_off` its peer lets it go on once half of
    /// the bound is left. So other posts of the rank have only that half.
    pub(crate) fn limit(self, is_reply: bool, is_off: bool, holds_off: bool) -> usize {
        match (is_reply, is_off) {
            (true, _) => usize::MAX,
            (false, true) => 0,
            (false, false) if holds_off => self.0 / 2,
            (false, false) => self.0,
        }
    }

    /// Returns `true` if a peer has to be off, while `waiting` operations wait for it.
    pub(crate) fn is_off(self, waiting: usize, before: bool) -> bool {
        waiting > if before { self.0 / 2 } else { self.0 }
    }
}

/// The receiver's side: the ranks that were told to hold, or may have to be.
#[derive(Default, Debug)]
pub(crate) struct FlowReceiver {
    senders: Vec<SenderHold>,
    /// Counts the messages about holds, since two threads may send them in any order.
    turn: u64,
}

#[derive(Debug)]
struct SenderHold {
    rank: Rank,
    hold: Hold,
    /// Replies exceed the bound of its backlog, or have done so.
    has_replies: bool,
}

impl FlowReceiver {
    /// Notes a rank that may have to hold: for its messages, or for the replies to them.
    pub(crate) fn note(&mut self, rank: Rank, has_replies: bool) {
        match self.senders.iter_mut().find(|sender| sender.rank == rank) {
            Some(sender) => sender.has_replies |= has_replies,
            None => self.senders.push(SenderHold { rank, hold: Hold::default(), has_replies }),
        }
    }

    /// Forgets a rank that is gone.
    pub(crate) fn forget(&mut self, rank: Rank) {
        self.senders.retain(|sender| sender.rank != rank);
    }

    /// Returns the ranks to tell, each with its hold from now on, and the turn of these
    /// messages. `now` returns the hold that a rank needs, after the one that it was told.
    pub(crate) fn news(&mut self, now: impl Fn(Rank, Hold) -> Hold) -> (Vec<(Rank, Hold)>, u64) {
        self.turn += 1;
        let mut news = Vec::new();
        self.senders.retain_mut(|sender| {
            let mut hold = now(sender.rank, sender.hold);
            // A long backlog of other messages is no reason: it may wait for a post of this peer.
            hold.is_off &= sender.has_replies;
            if hold != sender.hold {
                news.push((sender.rank, hold));
            }
            (sender.hold, sender.has_replies) = (hold, hold.is_off);
            hold != Hold::default()
        });
        (news, self.turn)
    }

    /// Returns `true` if a rank was told XOFF.
    pub(crate) fn holds_off(&self, rank: Rank) -> bool {
        self.senders.iter().any(|sender| sender.rank == rank && sender.hold.is_off)
    }

    /// Returns the number of ranks that hold, or may have to.
    pub(crate) fn len(&self) -> usize {
        self.senders.len()
    }
}

/// The sender's side: the hold that one receiver has told it.
#[derive(Default, Debug)]
pub(crate) struct FlowSender {
    hold: Hold,
    turn: u64,
}

impl FlowSender {
    /// Notes a hold of the receiver's, and returns `true` if it counts: the latest turn does, in
    /// any order of arrival.
    pub(crate) fn told(&mut self, hold: Hold, turn: u64) -> bool {
        let is_news = turn > self.turn;
        if is_news {
            (self.hold, self.turn) = (hold, turn);
        }
        is_news
    }

    /// Returns the hold.
    pub(crate) fn hold(&self) -> Hold {
        self.hold
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// The ranks of the two sides; each knows the other by its number.
    const RANKS: usize = 2;
    const BUDGET: Budget = Budget(400);
    const BOUND: Bound = Bound(6);
    /// Messages that a link holds.
    const RING: usize = 5;
    const SIZE: usize = 10;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum FlowMessage {
        Request,
        Reply,
        /// An RTS: the bytes wait with the sender.
        Rts,
        Hold(Hold, u64),
    }

    #[derive(Default)]
    struct Side {
        tx: FlowSender,
        rx: FlowReceiver,
        /// Operations that wait for room on the link.
        backlog: VecDeque<FlowMessage>,
        /// The link to the other side.
        ring: VecDeque<FlowMessage>,
        /// Requests that wait for their receives, each with its bytes.
        kept: VecDeque<usize>,
        replies: usize,
    }

    struct Pair {
        sides: [Side; RANKS],
        /// A hold that its sender's thread is about to send: others may overtake it.
        late: Vec<(usize, FlowMessage)>,
        posted: [usize; RANKS],
    }

    impl Pair {
        fn new() -> Self {
            Self { sides: Default::default(), late: Vec::new(), posted: [0; RANKS] }
        }

        fn post(&mut self, at: usize, message: FlowMessage) -> bool {
            let side = &mut self.sides[at];
            let holds_off = side.rx.holds_off(Rank(1 - at as u32));
            let is_reply = message == FlowMessage::Reply;
            let limit = BOUND.limit(is_reply, side.tx.hold().is_off, holds_off);
            // What goes at once is refused like what waits.
            if limit == 0 || side.backlog.len() >= limit {
                return false;
            }
            side.backlog.push_back(message);
            if message == FlowMessage::Reply && side.backlog.len() > BOUND.0 {
                side.rx.note(Rank(1 - at as u32), true);
            }
            self.send(at);
            true
        }

        fn send(&mut self, at: usize) {
            let side = &mut self.sides[at];
            while side.ring.len() < RING
                && let Some(message) = side.backlog.pop_front()
            {
                let is_held = side.tx.hold().room != Room::Any;
                side.ring.push_back(match message {
                    FlowMessage::Request if is_held => FlowMessage::Rts,
                    other => other,
                });
            }
        }

        /// Takes the next message of the other side in. `is_expected`: a receive waits for it.
        fn take(&mut self, at: usize, is_expected: bool) {
            let Some(message) = self.sides[1 - at].ring.pop_front() else { return };
            self.send(1 - at);
            let side = &mut self.sides[at];
            match message {
                FlowMessage::Request | FlowMessage::Rts if is_expected => {
                    assert!(self.post(at, FlowMessage::Reply), "a reply is always accepted");
                }
                FlowMessage::Request | FlowMessage::Rts => {
                    side.kept.push_back(if message == FlowMessage::Rts { 0 } else { SIZE });
                    if BUDGET.is_short(side.bytes()) {
                        side.rx.note(Rank(1 - at as u32), false);
                    }
                }
                FlowMessage::Reply => side.replies += 1,
                FlowMessage::Hold(hold, turn) => _ = side.tx.told(hold, turn),
            }
        }

        /// Looks whether the other side has to be told something; `is_late`: another thread is to
        /// send it.
        fn look(&mut self, at: usize, is_late: bool) {
            let side = &mut self.sides[at];
            let (bytes, waiting) = (side.bytes(), side.backlog.len());
            let (news, turn) = side.rx.news(|_, told| Hold {
                room: BUDGET.room((bytes, 0), told.room),
                is_off: BOUND.is_off(waiting, told.is_off),
            });
            for (_, hold) in news {
                self.late.push((at, FlowMessage::Hold(hold, turn)));
            }
            while !is_late && let Some((at, hold)) = self.late.pop() {
                self.sides[at].backlog.push_front(hold);
                self.send(at);
            }
        }

        /// Posts a receive, which takes the oldest message that was kept.
        fn receive(&mut self, at: usize) {
            if self.sides[at].kept.pop_front().is_some() {
                assert!(self.post(at, FlowMessage::Reply));
            }
        }
    }

    impl Side {
        fn bytes(&self) -> usize {
            self.kept.iter().sum()
        }
    }

    proptest! {
        #[test]
        fn floods_of_both_sides_end_and_each_keeps_little(
            steps in vec((0_usize..RANKS, 0_u8..10), 0..3000),
        ) {
            let mut pair = Pair::new();
            // Messages that each has sent since it last took everything in.
            for (at, step) in steps {
                match step {
                    0..4 => pair.posted[at] += usize::from(pair.post(at, FlowMessage::Request)),
                    4 | 5 => pair.take(at, true),
                    6 => pair.take(at, false),
                    7 => pair.look(at, true),
                    8 => pair.look(at, false),
                    _ => pair.receive(at),
                }
                // As in progress: a side that sends much takes much in, and looks.
                if step == 3 {
                    (0..RING).for_each(|_| pair.take(at, false));
                    pair.look(at, false);
                }
                for side in &pair.sides {
                    // The messages in its ring and its backlog when it hears of the hold, and those
                    // sent before each word that the ring held.
                    let late = (RING + BOUND.0) * (RING + 1);
                    prop_assert!(side.bytes() <= BUDGET.0 / 2 + late * SIZE, "{}", side.bytes());
                    prop_assert!(side.backlog.len() <= BOUND.0 + late, "{}", side.backlog.len());
                }
            }
            // Nothing is posted any more, except replies: everything ends.
            for _ in 0..100_000 {
                for at in 0..RANKS {
                    pair.take(at, true);
                    pair.receive(at);
                    pair.look(at, false);
                }
                let is_idle = |side: &Side| {
                    side.ring.is_empty() && side.backlog.is_empty() && side.kept.is_empty()
                };
                if pair.sides.iter().all(is_idle) && pair.late.is_empty() {
                    break;
                }
            }
            for at in 0..RANKS {
                let side = &pair.sides[at];
                prop_assert_eq!(side.replies, pair.posted[at]);
                prop_assert_eq!(side.tx.hold(), Hold::default(), "a word to go on is lost");
                prop_assert_eq!(side.rx.len(), 0);
            }
        }
    }

    #[test]
    fn the_room_is_told_with_a_gap_between_closing_and_opening() {
        let budget = Budget(400);
        assert!(!budget.is_short(200) && budget.is_short(201));
        assert_eq!(budget.room((201, 0), Room::Any), Room::Offers);
        assert_eq!(budget.room((101, 0), Room::Offers), Room::Offers);
        assert_eq!(budget.room((100, 0), Room::Offers), Room::Any);
        assert_eq!(budget.room((300, 201), Room::Offers), Room::OffersOnly);
        assert_eq!(budget.room((300, 101), Room::OffersOnly), Room::OffersOnly);
        assert_eq!(budget.room((300, 100), Room::OffersOnly), Room::Offers);
        assert_eq!((Budget(0).share(1), Budget(usize::MAX).share(2)), (LEAST as u32, MOST as u32));
        let bound = Bound(6);
        assert!(!bound.is_off(6, false) && bound.is_off(7, false));
        assert!(bound.is_off(4, true) && !bound.is_off(3, true));
    }

    #[test]
    fn a_rank_is_off_only_for_replies_and_forgotten_once_it_is_gone() {
        let mut rx = FlowReceiver::default();
        let long = |_, _| Hold { room: Room::Any, is_off: true };
        rx.note(Rank(1), false);
        assert_eq!(rx.news(long).0, []);
        assert_eq!(rx.len(), 0);
        rx.note(Rank(1), true);
        rx.note(Rank(2), true);
        rx.note(Rank(1), false);
        let off = Hold { room: Room::Any, is_off: true };
        assert_eq!(rx.news(long), (vec![(Rank(1), off), (Rank(2), off)], 2));
        rx.forget(Rank(2));
        assert_eq!(rx.news(|_, _| Hold::default()), (vec![(Rank(1), Hold::default())], 3));
        assert_eq!(rx.len(), 0);
        let mut tx = FlowSender::default();
        assert!(tx.told(Hold::default(), 3) && !tx.told(off, 2) && tx.hold() == Hold::default());
    }
}
