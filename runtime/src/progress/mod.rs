//! Polls devices, and carries out the actions of their events.
//!
//! ```text
//! poll ──► matcher: messages meet receives ──► other threads may poll ──► copies, completions
//! ```
//!
//! Matching happens before another thread can poll the device, so messages meet receives in the
//! order in which they came. Everything else, handlers included, happens outside all locks.
//!
//! Deliveries that are not possible now (a full queue, no packet) wait for their completion
//! object, and all others pass (`undelivered`).

mod call;
mod complaints;
mod control;
mod core;
mod deliver;
mod found;
mod pending;
mod receive;
mod request;
mod retries;
mod signal;
mod thread;
mod undelivered;
mod upkeep;
mod wait;

pub(crate) use self::core::Core;
use found::Found;
pub use pending::Pending;
pub(crate) use signal::{in_handler, replies_to};
pub(crate) use thread::ProgressThread;
pub(crate) use wait::Sleep;

use crate::chores::{self, Chore};
use crate::comp::{Completion, Snapshot, Status};
use crate::datapath::{Gathering, Landing, Port};
use crate::error::ProgressError;
use crate::matching::{Content, MatchingEngine, Receive, Unexpected};
use crate::names::{Matching, Rank, Tag};
use crate::protocol::header::Message;
use crate::protocol::wire::Rts;
use carrack_transports::contract::{
    Batch, Event, Header, Matcher, Payload, PeerId, Polled, SmallArrival,
};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{HostViews, MemMut, MemRef, SmallBytes};
use carrack_transports::sync::Handles;
use std::cell::Cell;
use std::sync::Arc;

/// The buffers that a thread keeps between progress calls, to avoid allocations.
struct Scratch {
    batch: Batch,
    met: Met,
    runtime: u64,
    comps: Snapshot,
    /// Copies that have ended; empty between calls.
    ended: Vec<Landing>,
    /// Room for messages that the kernel copies together; empty between calls.
    gathering: Option<Box<Gathering>>,
    /// The number of calls, for occasional work.
    calls: u32,
}

/// Calls of progress between two checks of mapped memory: a fraction of a millisecond of calls
/// without work. A prime, so that a thread that serves several runtimes in turn comes to all of
/// them.
const NOW_AND_THEN: u32 = 16_381;

/// The matches of a batch's messages.
#[derive(Default)]
struct Met {
    /// Meetings that need further action. The events in the batch hold their indices.
    meetings: Vec<Option<Meeting>>,
    /// Completion objects that were signaled at once: handles of receives, possibly the last ones.
    /// They are dropped when this thread next makes progress, or ends. So no lock is held
    /// meanwhile, and no delivery waits: a drop takes a quarter of a message's time.
    told: Handles<dyn Completion>,
}

/// A message that has met its receive.
#[allow(clippy::large_enum_variant, reason = "boxing one would allocate in every receive")]
enum Meeting {
    /// The bytes are in place: the completion object has to be signaled.
    InPlace(Option<Arc<dyn Completion>>, Status),
    /// The bytes are still to be moved, or too many.
    Pair(Unexpected, Receive),
}

/// The notes of a batch's small messages.
struct Notes {
    /// Set while all messages before have ended: an immediate signal then overtakes none.
    at_once: bool,
    /// Messages at the front of the batch that need no further action.
    ended: usize,
}

impl Notes {
    /// Notes the match of the next message.
    #[inline(always)]
    fn note(&mut self, message: &mut SmallArrival, found: Found) {
        if self.at_once && found == Found::Kept {
            self.ended += 1;
            return;
        }
        self.mark(message, found);
    }

    #[cold]
    #[inline(never)]
    fn mark(&mut self, message: &mut SmallArrival, found: Found) {
        self.at_once = false;
        message.mark = found.mark();
    }

    /// Notes the same of all messages.
    #[cold]
    fn all(&mut self, messages: &mut [SmallArrival], found: Found) {
        messages.iter_mut().for_each(|message| self.note(message, found));
    }
}

/// Notes the match of a message.
#[inline]
fn found(met: &mut Met, meeting: Meeting) -> Found {
    met.meetings.push(Some(meeting));
    Found::Met(met.meetings.len() - 1)
}

impl Met {
    /// Takes the meeting of a message, once.
    #[inline]
    fn take(&mut self, at: usize) -> Option<Meeting> {
        self.meetings.get_mut(at)?.take()
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Takes the thread's scratch. A thread that ends has none any more: the destructors of its other
/// thread-locals may still make progress, or end a runtime.
#[inline(always)]
fn take_scratch() -> Option<Box<Scratch>> {
    SCRATCH.try_with(Cell::take).ok().flatten()
}

/// Keeps it for the thread's next call; drops it if the thread ends.
#[inline(always)]
fn keep_scratch(scratch: Box<Scratch>) {
    let _ = SCRATCH.try_with(|kept| kept.set(Some(scratch)));
}

/// Returns a handle of a completion object for a further operation. It is one that this thread
/// would drop in its next call of progress, or a new one. The former costs no atomic
/// operation, as the counter in the object stays as it is.
#[inline]
pub(crate) fn told_or_cloned(comp: &Arc<dyn Completion>) -> Arc<dyn Completion> {
    let reuse = |kept: &Cell<Option<Box<Scratch>>>| {
        let mut scratch = kept.take()?;
        let told = scratch.met.told.take(comp);
        kept.set(Some(scratch));
        told
    };
    SCRATCH.try_with(reuse).ok().flatten().unwrap_or_else(|| comp.clone())
}

/// Drops the objects that this thread would drop in its next call of progress, which may not come.
pub(crate) fn drop_told() {
    if let Some(mut scratch) = take_scratch() {
        scratch.met.told.clear();
        keep_scratch(scratch);
    }
}

/// Receiver of the messages of a device's poll.
struct InOrder<'a> {
    pass: &'a Pass<'a>,
    met: &'a mut Met,
}

impl Matcher for InOrder<'_> {
    /// Takes a message that ends its receive at once, as most do. Returns `false` if it does not.
    #[inline]
    fn match_in_place(&mut self, from: PeerId, header: Header, bytes: MemRef<'_>) -> bool {
        let Some((engine, policy, from, tag)) = self.target(from, header) else { return false };
        let met = &mut *self.met;
        engine.arrive_alone(policy, from, tag, |receive| receive.ends((from, tag, bytes), met))
    }

    #[inline]
    fn match_run(&mut self, from: PeerId, header: Header, run: HostViews<'_>) -> usize {
        let Some((engine, policy, from, tag)) = self.target(from, header) else { return 0 };
        let met = &mut *self.met;
        engine.arrive_run(policy, from, tag, |number, receive| {
            run.get(number).is_some_and(|bytes| receive.ends((from, tag, bytes), met))
        })
    }

    #[inline]
    fn match_all(&mut self, batch: &mut Batch) {
        self.pass.in_order(batch, self.met);
    }
}

impl<'a> InOrder<'a> {
    /// Returns the engine, policy, sender and tag of messages, if they may be taken from their
    /// places.
    #[inline(always)]
    fn target(
        &self,
        from: PeerId,
        header: Header,
    ) -> Option<(&'a MatchingEngine, Matching, Rank, Tag)> {
        let Pass { inner, device, .. } = self.pass;
        let Message::Send { engine, policy, tag } = Message::decode_send(header)? else {
            return None;
        };
        if inner.chores.there().has(Chore::Suspects) || !device.undelivered.is_empty() {
            return None;
        }
        Some((inner.engines.get(engine)?, policy, device.rank_of(from), tag))
    }
}

/// One progress call's findings.
pub(crate) struct Pass<'a> {
    pub(crate) inner: &'a Core,
    pub(crate) device: &'a Port,
    error: Option<ProgressError>,
    pub(crate) moved: bool,
    /// Open while a batch is delivered.
    gathering: Option<Box<Gathering>>,
}

impl<'a> Pass<'a> {
    #[inline(always)]
    fn new(inner: &'a Core, device: &'a Port) -> Self {
        Self { inner, device, error: None, moved: false, gathering: None }
    }
}

impl Pass<'_> {
    #[inline(always)]
    fn run(&mut self, scratch: &mut Scratch) {
        let seldom = self.inner.chores.there();
        if seldom.has(chores::SELDOM) {
            self.look_at_runtime(seldom);
        }
        let chores = self.device.chores.there();
        if chores.any() {
            self.upkeep(chores, scratch);
        }
        self.device.deaf.listens();
        for lane in &self.device.lanes {
            if lane.rests() {
                continue;
            }
            let Scratch { batch, met, .. } = &mut *scratch;
            let polled = lane.device.poll(batch, &mut InOrder { pass: self, met });
            if lane.caps.polls_kernel {
                lane.pace.polled(polled == Polled::Some);
            }
            if polled != Polled::Some {
                continue;
            }
            self.moved = true;
            self.inner.comps.refresh(&mut scratch.comps, &mut scratch.met.told);
            // The matcher may have taken all there was.
            if !scratch.batch.is_empty() {
                self.deliver_all(scratch, lane.transport);
                let chores = self.device.chores.there();
                if chores.has(Chore::Pulls) || chores.has(Chore::Helps) {
                    self.move_copies(chores);
                }
            }
        }
    }

    #[cold]
    fn look_at_runtime(&mut self, chores: chores::PendingChores) {
        if chores.has(Chore::Deadlines) {
            self.expire();
        }
        if chores.has(Chore::Words) {
            self.moved |= self.inner.move_words();
        }
    }

    /// Begins copies of large messages in the call that learns of them.
    #[cold]
    fn move_copies(&mut self, chores: chores::PendingChores) {
        if chores.has(Chore::Pulls) {
            let mut run = self.transfers();
            run.move_pulls();
            self.report(run);
        }
        if chores.has(Chore::Helps) {
            let mut run = self.transfers();
            run.move_helps();
            self.report(run);
        }
    }

    /// Does the chores, apart from polling the transports.
    #[cold]
    fn upkeep(&mut self, chores: chores::PendingChores, scratch: &mut Scratch) {
        if chores.has(Chore::Backlogs) {
            self.move_backlogs();
        }
        if chores.has(Chore::Landings) {
            self.move_landings(&mut scratch.ended);
        }
        if chores.has(Chore::Ordered) {
            self.move_ordered();
        }
        if chores.has(Chore::Transfers) {
            let mut run = self.transfers();
            run.move_transfers();
            self.report(run);
        }
        self.move_copies(chores);
        if chores.has(Chore::Holds) {
            self.move_holds();
        }
        // The messages in the reorder queue came before those that wait for a packet.
        if chores.has(Chore::Reorder) {
            self.move_reorder_queue();
        }
        if chores.has(Chore::Undelivered) {
            self.retry_undelivered();
        }
    }

    /// Runs before another thread can poll the device: messages meet receives. Unmatched messages
    /// stay in the batch. Each other one becomes a note of its match; a message at the front that
    /// needs no further action is removed.
    #[inline]
    fn in_order(&self, batch: &mut Batch, met: &mut Met) {
        if self.inner.chores.there().has(Chore::Suspects) {
            self.inner.suspects.heard(batch);
        }
        if batch.small_mut().iter().any(|message| Message::is_matched(message.header)) {
            self.small_in_order(batch, met);
        }
        for event in batch.events_mut() {
            if let Event::Arrived { from, header, payload, mark } = event
                && Message::is_matched(*header)
                && let Some(found) = self.meet(*from, *header, payload, met)
            {
                *mark = found.mark();
            }
        }
    }

    #[inline(never)]
    fn small_in_order(&self, batch: &mut Batch, met: &mut Met) {
        let mut notes = Notes { at_once: self.device.undelivered.is_empty(), ended: 0 };
        let mut messages = batch.small_mut();
        while let [first, ..] = messages {
            let SmallArrival { from, header, .. } = *first;
            let is_same = |other: &&SmallArrival| other.header == header && other.from == from;
            let run = 1 + messages[1..].iter().take_while(is_same).count();
            let (same, others) = messages.split_at_mut(run);
            messages = others;
            if Message::is_am(header) {
                notes.at_once = false;
            } else {
                self.meet_same(self.device.rank_of(from), header, same, met, &mut notes);
            }
        }
        if notes.ended > 0 {
            batch.forget_small(notes.ended);
        }
    }

    /// Matches messages of one sender and header.
    #[inline(always)]
    fn meet_same(
        &self,
        from: Rank,
        header: Header,
        same: &mut [SmallArrival],
        met: &mut Met,
        notes: &mut Notes,
    ) {
        match Message::decode(header) {
            Ok(Message::Send { engine, policy, tag }) => {
                let Some(engine) = self.inner.engines.get(engine) else {
                    return notes.all(same, Found::Nonsense);
                };
                // Those that meet a receive, under one lock and by one lookup; then the others.
                let met_before = engine.arrive_run(policy, from, tag, |at, receive| {
                    let Some(message) = same.get_mut(at) else { return false };
                    let found = receive.take_small((from, tag, &message.bytes), met, notes.at_once);
                    notes.note(message, found);
                    true
                });
                if let unmatched @ [_, ..] = &mut same[met_before..] {
                    self.wait_for_receives(engine, (policy, from, tag), unmatched, met, notes);
                }
            }
            Ok(Message::RtsSend { engine, policy, tag }) => {
                for message in same {
                    let offer = (engine, policy, tag);
                    let found = self.meet_offer(from, offer, &message.bytes, met);
                    notes.note(message, found);
                }
            }
            // Not matched.
            Ok(_) => notes.at_once = false,
            Err(_) => notes.all(same, Found::Nonsense),
        }
    }

    /// Has messages wait for their receives. One may have been posted meanwhile.
    #[cold]
    #[inline(never)]
    fn wait_for_receives(
        &self,
        engine: &MatchingEngine,
        (policy, from, tag): (Matching, Rank, Tag),
        messages: &mut [SmallArrival],
        met: &mut Met,
        notes: &mut Notes,
    ) {
        for message in messages {
            let keep = |()| self.keep(from, Payload::Small(message.bytes));
            let taken = |(), receive: &mut Receive| {
                receive.meets(from, tag, Payload::Small(message.bytes), met)
            };
            let found = engine.arrive(policy, from, tag, (), taken, keep);
            notes.note(message, found.unwrap_or(Found::Kept));
        }
    }

    /// Matches a message with its receive. `None`: it is of another kind.
    fn meet(
        &self,
        from: PeerId,
        header: Header,
        payload: &mut Payload,
        met: &mut Met,
    ) -> Option<Found> {
        let from = self.device.rank_of(from);
        Some(match Message::decode(header) {
            Ok(Message::Send { engine, policy, tag }) => {
                let Some(engine) = self.inner.engines.get(engine) else {
                    return Some(Found::Nonsense);
                };
                let payload = std::mem::replace(payload, Payload::Small(SmallBytes::empty()));
                let keep = |payload| self.keep(from, self.settle(payload));
                let taken = |payload, receive: &mut Receive| receive.meets(from, tag, payload, met);
                engine.arrive(policy, from, tag, payload, taken, keep).unwrap_or(Found::Kept)
            }
            Ok(Message::RtsSend { engine, policy, tag }) => match payload {
                Payload::Small(bytes) => self.meet_offer(from, (engine, policy, tag), bytes, met),
                _ => Found::Nonsense,
            },
            Ok(_) => return None,
            Err(_) => Found::Nonsense,
        })
    }

    /// Matches an offer in place of its message.
    #[cold]
    fn meet_offer(
        &self,
        from: Rank,
        (engine, policy, tag): (u16, Matching, Tag),
        bytes: &SmallBytes,
        met: &mut Met,
    ) -> Found {
        let (Some(engine), Some(rts)) =
            (self.inner.engines.get(engine), Rts::decode(bytes.as_slice()))
        else {
            return Found::Nonsense;
        };
        let taken = |(), receive: &mut Receive| {
            let message =
                Unexpected { from, tag, content: Content::Offered(rts, self.device.index) };
            found(met, Meeting::Pair(message, receive.take()))
        };
        engine
            .arrive(policy, from, tag, (), taken, |()| Content::Offered(rts, self.device.index))
            .unwrap_or(Found::Kept)
    }

    /// Prepares a message that waits for its receive. A loan goes back to its sender, which needs
    /// the place for other messages. Half of the packets stay free for further messages.
    fn settle(&self, payload: Payload) -> Payload {
        let pool = &self.device.host_pool;
        let may_keep = self.inner.unexpected.may_keep_packet(pool.limit());
        match payload {
            Payload::Packet(_) if may_keep => payload,
            Payload::Packet(_) | Payload::Loan(_) => {
                if may_keep && let Some(packet) = pool.take_copy(payload.view()) {
                    return Payload::Packet(packet);
                }
                let mut bytes = vec![0; payload.len()];
                match copy_now(MemMut::host(&mut bytes), payload.view()) {
                    Ok(()) => Payload::Aside(bytes),
                    // No CPU reaches the payload, so it stays in place.
                    Err(_) => payload,
                }
            }
            other => other,
        }
    }

    /// Keeps one more message without a receive. Beyond the budget its sender is told to keep
    /// further ones.
    #[inline]
    fn keep(&self, from: Rank, payload: Payload) -> Content {
        if self.inner.unexpected.add(&payload) {
            self.device.holds.add(from);
        }
        Content::Here(payload)
    }
}
