//! A place where messages and receives meet.

use super::table::{HashedKey, Table};
use super::{MatchKey, Matching};
use crate::error::{OpError, ResourceError};
use crate::names::{COLLECTIVE_ENGINE, DEFAULT_ENGINE, Rank, Tag};
use crate::op::{Ended, Ending, Holder, OpContext, PendingOp};
use crate::protocol::wire::Rts;
use carrack_transports::contract::Payload;
use carrack_transports::mem::Buffer;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// A place where messages and receives meet. Engines are independent: a message meets only
/// receives of the engine that its sender named. Engines are numbered, so they must be made in the
/// same order on all ranks.
#[derive(Clone)]
pub struct MatchingEngine(Arc<Inner>);

struct Inner {
    index: u16,
    table: Table<Unexpected, Receive>,
}

/// A message that came before its receive.
#[derive(Debug)]
pub(crate) struct Unexpected {
    pub(crate) from: Rank,
    pub(crate) tag: Tag,
    pub(crate) content: Content,
}

impl Unexpected {
    fn envelope(&self) -> Envelope {
        let size = match &self.content {
            Content::Here(payload) => payload.len() as u64,
            Content::Offered(rts, _) => rts.size,
        };
        Envelope { rank: self.from, tag: self.tag, size }
    }
}

/// The content of a message.
#[derive(Debug)]
pub(crate) enum Content {
    /// The bytes of the message.
    Here(Payload),
    /// The offer of a large message: its bytes are still with the sender, and come by way of the
    /// device that the offer came by.
    Offered(Rts, u32),
}

/// A receive that was posted.
pub(crate) struct Receive {
    pub(crate) buffer: Buffer,
    /// Context of the operation. The rank is the sender's, or [`Rank::ANY`]: the sender's end ends
    /// the receive. The size is 0 as long as no message has come.
    pub(crate) op: OpContext,
}

impl Default for Receive {
    /// Returns an empty receive, to be filled in.
    fn default() -> Self {
        let op = OpContext::of_runtime(Rank::ANY, Tag::ANY, 0, None);
        Self { buffer: Buffer::Empty, op }
    }
}

impl Receive {
    pub(crate) fn into_status(self, error: OpError) -> Ended {
        self.op.end(self.buffer, Some(error))
    }

    /// Takes the receive, and leaves a spent one.
    pub(crate) fn take(&mut self) -> Self {
        Self { buffer: std::mem::take(&mut self.buffer), op: self.op.take() }
    }
}

impl std::fmt::Debug for Receive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Receive({} B from {}, {:?})", self.buffer.len(), self.op.rank, self.op.tag)
    }
}

/// Name of a receive that waits, among those of its runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceiveName {
    pub(crate) engine: u16,
    key: MatchKey,
    stamp: u64,
}

impl ReceiveName {
    /// The mark of a receive that waits for an event: engines give out no such numbers.
    const PARKED: u64 = 1 << 63;

    /// Returns the name of a receive that waits for an event, with a number of its own until
    /// then.
    pub(crate) fn of_parked(
        engine: &MatchingEngine,
        policy: Matching,
        rank: Rank,
        tag: Tag,
        number: u64,
    ) -> Self {
        Self {
            engine: engine.index(),
            key: MatchKey::new(policy, rank, tag),
            stamp: number | Self::PARKED,
        }
    }

    /// Returns the number of such a name.
    pub(crate) fn parked(&self) -> Option<u64> {
        (self.stamp & Self::PARKED != 0).then_some(self.stamp & !Self::PARKED)
    }
}

/// A message that waits for its receive, as a probe sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// The sender.
    pub rank: Rank,
    /// The tag of the message.
    pub tag: Tag,
    /// The message's length in bytes: a receive of this length takes all of it.
    pub size: u64,
}

impl MatchingEngine {
    fn new(index: u16) -> Self {
        Self(Arc::new(Inner { index, table: Table::new() }))
    }

    pub(crate) fn index(&self) -> u16 {
        self.0.index
    }

    /// Handles a message that has arrived. If a receive waits for it, `taken` gets both, and its
    /// result is returned. Otherwise the message waits with the payload that `keep` returns.
    #[inline(always)]
    pub(crate) fn arrive<P, T>(
        &self,
        policy: Matching,
        from: Rank,
        tag: Tag,
        payload: P,
        taken: impl FnOnce(P, &mut Receive) -> T,
        keep: impl FnOnce(P) -> Content,
    ) -> Option<T> {
        let key = MatchKey::new(policy, from, tag);
        let keep_as = |payload| Unexpected { from, tag, content: keep(payload) };
        self.0.table.meet_b(key, payload, taken, keep_as).ok()
    }

    /// Posts a receive. Returns the message that it matches, or keeps the receive, which is made
    /// only then.
    ///
    /// # Errors
    /// It waits, and can be withdrawn.
    #[inline(always)]
    pub(crate) fn receive(
        &self,
        key: &HashedKey,
        fill: impl FnOnce(&mut Receive),
    ) -> Result<Unexpected, ReceiveName> {
        let Inner { index, table } = &*self.0;
        let name = |stamp| ReceiveName { engine: *index, key: key.key(), stamp };
        table.meet_a(*key, fill).map_err(name)
    }

    /// Gives the receive that a message meets to `ends`, and takes it if the result is `true`.
    /// Returns the result, `false` without a receive.
    #[inline(always)]
    pub(crate) fn arrive_alone(
        &self,
        policy: Matching,
        from: Rank,
        tag: Tag,
        ends: impl FnOnce(&mut Receive) -> bool,
    ) -> bool {
        self.0.table.take_first(MatchKey::new(policy, from, tag), ends)
    }

    /// Gives receives to messages of one sender, tag and policy, in order, as long as `ends` takes
    /// them. `ends` gets the number of the message. Returns the number of receives taken.
    #[inline(always)]
    pub(crate) fn arrive_run(
        &self,
        policy: Matching,
        from: Rank,
        tag: Tag,
        ends: impl FnMut(usize, &mut Receive) -> bool,
    ) -> usize {
        self.0.table.take_run(MatchKey::new(policy, from, tag), ends)
    }

    /// Takes a receive out that waits. `None`: it has met its message, or has ended.
    pub(crate) fn withdraw(&self, name: &ReceiveName) -> Option<Receive> {
        self.0.table.pluck_b(name.key, name.stamp)
    }

    /// Returns the message that the next receive of this key would meet.
    pub(crate) fn probe(&self, policy: Matching, rank: Rank, tag: Tag) -> Option<Envelope> {
        self.0.table.peek_a(MatchKey::new(policy, rank, tag), Unexpected::envelope)
    }

    /// Describes messages that have come before their receives, at most `most`.
    pub(crate) fn list_messages(&self, most: usize, list: &mut dyn FnMut(PendingOp)) {
        self.0.table.some_a(most, |key, message| {
            let Envelope { rank, tag, size } = message.envelope();
            let waits_for = self.partner("its receive", key);
            list(PendingOp { what: "message", rank, tag, size, waits_for });
        });
    }

    /// Describes the partner that a message or a receive waits for.
    fn partner(&self, partner: &str, key: MatchKey) -> String {
        let policy = key.policy();
        match self.0.index {
            DEFAULT_ENGINE => format!("{partner} (Matching::{policy:?})"),
            COLLECTIVE_ENGINE => format!("{partner} (in a collective)"),
            index => format!("{partner} (Matching::{policy:?}, engine {index})"),
        }
    }

    /// Returns the numbers of waiting messages and of waiting receives.
    pub fn waiting(&self) -> (usize, usize) {
        self.0.table.count()
    }
}

/// The receives that wait for their messages.
impl Holder for MatchingEngine {
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        let table = &self.0.table;
        let receives = match *why {
            // Those that only this rank could have answered.
            Ending::Gone(rank, _) => table.take_b(|key| key.is_of(rank)),
            Ending::Late(..) => table.pluck_b_if(|receive| why.takes(&receive.op)),
            Ending::Closing => table.take_b(|_| true),
            Ending::Down(..) | Ending::Closed => return,
        };
        ended.extend(receives.into_iter().map(|receive| {
            let error = why.error(receive.op.rank);
            receive.into_status(error)
        }));
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        self.0.table.each_b(|key, Receive { op, buffer }| {
            let size = buffer.len() as u64;
            list(PendingOp { size, ..op.pending("receive", self.partner("its message", key)) });
        });
    }

    fn count(&self) -> usize {
        0
    }
}

impl std::fmt::Debug for MatchingEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (messages, receives) = self.waiting();
        write!(f, "MatchingEngine(#{}, {messages} messages, {receives} receives)", self.0.index)
    }
}

/// All engines of a runtime, by number.
///
/// A message may name an engine that this rank is about to make: its place is made when it is first
/// named.
pub(crate) struct Engines {
    /// The first of them, at hand.
    default: MatchingEngine,
    engines: Box<[OnceLock<MatchingEngine>]>,
    made: AtomicUsize,
}

impl Engines {
    /// Engines that a runtime can have.
    const LIMIT: usize = 256;

    pub(crate) fn new() -> Self {
        let engines: Box<[_]> = (0..Self::LIMIT).map(|_| OnceLock::new()).collect();
        let default = MatchingEngine::new(DEFAULT_ENGINE);
        if let Some(place) = engines.get(usize::from(DEFAULT_ENGINE)) {
            let _ = place.set(default.clone());
        }
        Self { default, engines, made: 2.into() }
    }

    /// Returns the engine of operations that name none.
    #[inline(always)]
    pub(crate) fn default_engine(&self) -> &MatchingEngine {
        &self.default
    }

    /// Returns the engine of a number from the wire, or `None` for an impossible one.
    #[inline]
    pub(crate) fn get(&self, index: u16) -> Option<&MatchingEngine> {
        let place = self.engines.get(usize::from(index))?;
        Some(place.get().unwrap_or_else(|| Self::begin(place, index)))
    }

    /// Returns `true` if the engine is one of these.
    #[inline]
    pub(crate) fn has(&self, engine: &MatchingEngine) -> bool {
        let own = self.engines.get(usize::from(engine.index())).and_then(OnceLock::get);
        own.is_some_and(|own| Arc::ptr_eq(&own.0, &engine.0))
    }

    #[cold]
    fn begin(place: &OnceLock<MatchingEngine>, index: u16) -> &MatchingEngine {
        let engine = place.get_or_init(|| MatchingEngine::new(index));
        // A thread that notes a rank's end finds this engine, or a user of the engine finds the
        // note.
        fence(Ordering::SeqCst);
        engine
    }

    /// Makes the next engine.
    pub(crate) fn make(&self) -> Result<MatchingEngine, ResourceError> {
        let index = self.made.fetch_add(1, Ordering::Relaxed);
        let engine = u16::try_from(index).ok().and_then(|index| self.get(index));
        engine
            .cloned()
            .ok_or(ResourceError::TooMany { what: "matching engines", limit: Self::LIMIT })
    }

    pub(crate) fn each(&self) -> impl Iterator<Item = &MatchingEngine> {
        self.engines.iter().filter_map(OnceLock::get)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_looked_for_among_those_that_there_are() {
        let (engines, others) = (Engines::new(), Engines::new());
        let (before, other) = (engines.each().count(), others.make().unwrap());
        assert!(!engines.has(&other) && others.has(&other));
        assert_eq!(engines.each().count(), before);
    }
}
