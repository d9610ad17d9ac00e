//! Polls devices, and carries out the actions of their events.
//!
//! ```text
//! poll ──► ordered: messages meet receives ──► other threads may poll ──► copies, completions
//! ```
//!
//! Matching happens before another thread can poll the device, so messages meet receives in the
//! order in which they came. Everything else, handlers included, happens outside all locks.
//!
//! Deliveries that are not possible now (a full queue, no packet) wait for their completion
//! object, and all others pass (`undelivered`).

mod complaints;
mod deliver;
mod found;
mod land;
mod late;
mod line;
mod request;
mod signal;
mod thread;
mod undelivered;
mod upkeep;

pub(crate) use complaints::Complaints;
use deliver::arrival;
use found::Found;
pub(crate) use land::{Fetched, Landing, Owed};
pub(crate) use line::InLine;
pub(crate) use request::dump_on_signal;
pub(crate) use signal::{guarded, in_handler, panicked, signal};
pub(crate) use thread::ProgressThread;
pub(crate) use undelivered::Undelivered;

use crate::chores::{self, Chore};
use crate::comp::{Completion, Snapshot, Status};
use crate::device::{Device, DeviceInner};
use crate::error::ProgressError;
use crate::matching::{Content, Receive, Unexpected};
use crate::names::{Matching, Rank, Tag};
use crate::protocol::header::Message;
use crate::protocol::wire::Rts;
use crate::runtime::{Inner, Runtime};
use carrack_transports::contract::{Batch, Event, Header, Payload, PeerId, Polled, SmallArrival};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{KnownMemory, MemMut, SmallBytes};
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
    /// They must not be dropped under locks. Nor before the message is delivered: a drop takes a
    /// quarter as long as all the rest. So they are dropped when this thread next makes progress,
    /// or ends.
    told: Vec<Arc<dyn Completion>>,
}

/// A message that has met its receive.
#[allow(clippy::large_enum_variant, reason = "boxing one would allocate in every receive")]
enum Meeting {
    /// Its bytes are in place: the completion object has to be signaled.
    Over(Option<Arc<dyn Completion>>, Status),
    /// Its bytes are still to be moved, or too many.
    Pair(Unexpected, Receive),
}

/// The notes of a batch's small messages.
struct Notes {
    /// Set while all messages before have ended: an immediate signal then overtakes none.
    at_once: bool,
    /// Messages at the front of the batch that need no further action.
    over: usize,
}

impl Notes {
    /// Notes the match of the next message. `None`: it is not matched.
    #[inline(always)]
    fn note(&mut self, message: &mut SmallArrival, found: Option<Found>) {
        if self.at_once && found == Some(Found::Kept) {
            self.over += 1;
            return;
        }
        self.at_once = false;
        if let Some(found) = found {
            message.mark = found.mark();
        }
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

    #[inline(never)]
    fn drop_told(&mut self) {
        self.told.clear();
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

/// Returns a handle of a completion object for a further operation: one that this thread would drop
/// in its next call of progress, if that is the last one, or a new one. The counter in the object
/// then stays as it is, and costs no atomic operation.
#[inline]
pub(crate) fn told_or_cloned(comp: &Arc<dyn Completion>) -> Arc<dyn Completion> {
    let reuse = |kept: &Cell<Option<Box<Scratch>>>| {
        let mut scratch = kept.take()?;
        let told = scratch.met.told.pop_if(|told| Arc::ptr_eq(told, comp));
        kept.set(Some(scratch));
        told
    };
    SCRATCH.try_with(reuse).ok().flatten().unwrap_or_else(|| comp.clone())
}

/// Drops the objects that this thread would drop in its next call of progress, which may not come.
pub(crate) fn drop_told() {
    if let Some(mut scratch) = take_scratch() {
        scratch.met.drop_told();
        keep_scratch(scratch);
    }
}

impl Runtime {
    /// Makes progress on the default device: takes in messages, moves on waiting operations,
    /// signals completion objects. Never blocks. Any number of threads may call it at once, but
    /// not a completion handler.
    ///
    /// Returns whether anything moved.
    ///
    /// # Errors
    /// Something needs attention; all the rest was done, and the next call goes on.
    #[inline]
    pub fn progress(&self) -> Result<bool, ProgressError> {
        self.0.note_driven();
        self.0.progress(&self.0.default_device().0)
    }

    /// Makes progress on one device.
    #[inline]
    pub fn progress_device(&self, device: &Device) -> Result<bool, ProgressError> {
        self.0.note_driven();
        self.0.progress(&device.0)
    }

    /// Makes progress on all devices.
    pub fn progress_all(&self) -> Result<bool, ProgressError> {
        self.0.note_driven();
        self.0.progress_everything()
    }
}

/// One progress call's findings.
pub(crate) struct Pass<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) device: &'a DeviceInner,
    error: Option<ProgressError>,
    pub(crate) moved: bool,
}

impl Inner {
    /// Makes progress for a caller that returns its errors, and those that were kept before.
    #[inline]
    pub(crate) fn progress(&self, device: &DeviceInner) -> Result<bool, ProgressError> {
        self.pass::<true>(device)
    }

    /// Makes progress for a caller with another result: errors are kept for one that returns them.
    #[inline]
    pub(crate) fn progress_keeping(&self, device: &DeviceInner) -> Result<bool, ProgressError> {
        match self.pass::<false>(device) {
            Ok(moved) => Ok(moved),
            Err(error) => self.kept(error),
        }
    }

    /// Keeps an error, unless it is the call itself that is refused.
    #[cold]
    pub(crate) fn kept(&self, error: ProgressError) -> Result<bool, ProgressError> {
        if matches!(error, ProgressError::Forked | ProgressError::InHandler) {
            return Err(error);
        }
        self.complaints.keep(error);
        Ok(true)
    }

    /// Makes progress on all devices. Returns the first error; further ones are kept.
    #[inline]
    pub(crate) fn progress_everything(&self) -> Result<bool, ProgressError> {
        let first = self.progress(&self.default_device().0);
        if self.has_further_devices() { self.progress_others(first) } else { first }
    }

    /// Makes progress on all devices, as [`progress_keeping`](Self::progress_keeping).
    #[inline]
    pub(crate) fn progress_everything_keeping(&self) -> Result<bool, ProgressError> {
        let first = self.progress_keeping(&self.default_device().0);
        if self.has_further_devices() { self.progress_others(first) } else { first }
    }

    #[inline(never)]
    fn progress_others(
        &self,
        mut progress: Result<bool, ProgressError>,
    ) -> Result<bool, ProgressError> {
        if !matches!(progress, Err(ProgressError::Forked | ProgressError::InHandler)) {
            let others = self.devices()[1..].to_vec();
            for device in &others {
                let moved = self.progress_keeping(&device.0)?;
                progress = progress.map(|before| before | moved);
            }
        }
        progress
    }

    #[inline]
    fn pass<const TAKES_KEPT: bool>(&self, device: &DeviceInner) -> Result<bool, ProgressError> {
        if in_handler() {
            return Err(ProgressError::InHandler);
        }
        if self.is_forked() {
            return Err(ProgressError::Forked);
        }
        let mut scratch = take_scratch().unwrap_or_else(|| {
            let batch = Batch::new(self.settings.poll_batch());
            let (met, comps, ended) = (Met::default(), Snapshot::default(), Vec::new());
            Box::new(Scratch { batch, met, runtime: 0, comps, ended, calls: 0 })
        });
        if scratch.runtime != self.id {
            scratch.runtime = self.id;
            scratch.comps = Snapshot::default();
            // The batch is empty between calls.
            let limit = self.settings.poll_batch();
            if scratch.batch.room() != limit {
                scratch.batch = Batch::new(limit);
            }
        }
        if !scratch.met.told.is_empty() {
            scratch.met.drop_told();
        }
        scratch.calls = scratch.calls.wrapping_add(1);
        if scratch.calls.is_multiple_of(NOW_AND_THEN) {
            self.look_after_domains();
        }
        let mut pass = Pass { inner: self, device, error: None, moved: false };
        pass.run(&mut scratch);
        let Pass { mut error, moved, .. } = pass;
        keep_scratch(scratch);
        if moved {
            self.sleepers.wake();
        }
        let chores = self.chores.there();
        if chores.any() {
            if chores.has(Chore::Dump) {
                self.dump();
            }
            if chores.has(Chore::Retries) {
                self.retries.wake();
            }
            if chores.has(Chore::Complaints) && TAKES_KEPT && error.is_none() {
                let waits = |device: &Device| !device.0.undelivered.is_empty();
                error = self.complaints.take(!self.devices().iter().any(waits));
            }
        }
        match error {
            None => Ok(moved),
            Some(error) => Err(error),
        }
    }
}

impl Inner {
    #[cold]
    pub(crate) fn look_after_domains(&self) {
        self.look_for_absent();
        KnownMemory::of_the_process().look_after();
        self.exposures.let_go();
        for device in self.devices().iter() {
            device.0.transfers.introduced.let_go();
        }
        for (_, domain) in &self.domains {
            domain.look_after();
        }
        for driver in &self.drivers {
            driver.look_after();
        }
    }
}

impl Pass<'_> {
    #[inline]
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
            let Scratch { batch, met, .. } = &mut *scratch;
            let polled = lane.device.poll(batch, &mut |batch| self.in_order(batch, met));
            if polled == Polled::Some {
                self.moved = true;
                self.inner.comps.refresh(&mut scratch.comps, &mut scratch.met.told);
                self.deliver_all(scratch, lane.transport);
                let chores = self.device.chores.there();
                if chores.has(Chore::Pulls) || chores.has(Chore::Helps) {
                    self.move_copies(chores);
                }
            }
        }
    }

    #[cold]
    fn look_at_runtime(&mut self, chores: chores::Found) {
        if chores.has(Chore::Deadlines) {
            self.expire();
        }
        if chores.has(Chore::Words) {
            self.move_words();
        }
        if chores.has(Chore::Withdrawals) {
            self.withdraw_regions();
        }
    }

    /// Copies of large messages: begun as soon as they are known of.
    #[cold]
    fn move_copies(&mut self, chores: chores::Found) {
        if chores.has(Chore::Pulls) {
            self.move_pulls();
        }
        if chores.has(Chore::Helps) {
            self.move_helps();
        }
    }

    /// Does the chores, apart from polling the transports.
    #[cold]
    fn upkeep(&mut self, chores: chores::Found, scratch: &mut Scratch) {
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
            self.move_transfers();
        }
        self.move_copies(chores);
        if chores.has(Chore::Holds) {
            self.move_holds();
        }
        // The messages in the line came before those that wait for a packet.
        if chores.has(Chore::Line) {
            self.move_line();
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
        if batch.small_mut().iter().any(|message| !Message::is_am(message.header)) {
            self.small_in_order(batch, met);
        }
        for event in batch.events_mut() {
            match event {
                Event::Arrived { from, header, payload, mark } => {
                    if !Message::is_am(*header)
                        && let Some(found) = self.meet(*from, *header, payload, met)
                    {
                        *mark = found.mark();
                    }
                }
                _ => {}
            }
        }
    }

    #[inline(never)]
    fn small_in_order(&self, batch: &mut Batch, met: &mut Met) {
        let mut notes = Notes { at_once: self.device.undelivered.is_empty(), over: 0 };
        let mut messages = batch.small_mut();
        while let [first, ..] = messages {
            let SmallArrival { from, header, .. } = *first;
            let is_same = |other: &&SmallArrival| other.header == header && other.from == from;
            let run = 1 + messages[1..].iter().take_while(is_same).count();
            let (same, others) = messages.split_at_mut(run);
            messages = others;
            if Message::is_am(header) {
                notes.at_once = false;
                continue;
            }
            let met_before = self.meet_run(same, met, &mut notes);
            for message in &mut same[met_before..] {
                let found = self.meet_small(message, met, notes.at_once);
                notes.note(message, found);
            }
        }
        if notes.over > 0 {
            batch.forget_small(notes.over);
        }
    }

    /// Matches messages of one sender, header and engine with receives that wait: under one lock,
    /// by one lookup. Returns the number of those that met one.
    #[inline(always)]
    fn meet_run(&self, same: &mut [SmallArrival], met: &mut Met, notes: &mut Notes) -> usize {
        let [first, ..] = &*same else { return 0 };
        let from = self.device.rank_of(first.from);
        let Ok(Message::Send { engine, policy, tag }) = Message::decode(first.header) else {
            return 0;
        };
        let Some(engine) = self.inner.engines.get(engine) else { return 0 };
        engine.arrive_run(policy, from, tag, same.len(), |at, receive| {
            let message = &mut same[at];
            let found = receive.take_small((from, tag, &message.bytes), met, notes.at_once);
            notes.note(message, Some(found));
        })
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
                let taken = |payload, receive: &mut Receive| {
                    let message = Unexpected { from, tag, content: Content::Here(payload) };
                    found(met, Meeting::Pair(message, receive.take()))
                };
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

    /// Matches as `meet`, for a message that is copied more quickly than it is moved.
    #[inline]
    fn meet_small(&self, message: &SmallArrival, met: &mut Met, at_once: bool) -> Option<Found> {
        let SmallArrival { from, header, bytes, .. } = message;
        let from = self.device.rank_of(*from);
        Some(match Message::decode(*header) {
            Ok(Message::Send { engine, policy, tag }) => {
                let Some(engine) = self.inner.engines.get(engine) else {
                    return Some(Found::Nonsense);
                };
                let keep = |()| self.keep(from, Payload::Small(*bytes));
                let taken = |(), receive: &mut Receive| {
                    receive.take_small((from, tag, bytes), met, at_once)
                };
                engine.arrive(policy, from, tag, (), taken, keep).unwrap_or(Found::Kept)
            }
            Ok(Message::RtsSend { engine, policy, tag }) => {
                self.meet_offer(from, (engine, policy, tag), bytes, met)
            }
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
        if !self.takes_offer(from) {
            return Found::Kept;
        }
        let taken = |(), receive: &mut Receive| {
            let message =
                Unexpected { from, tag, content: Content::Offered(rts, self.device.index) };
            found(met, Meeting::Pair(message, receive.take()))
        };
        engine
            .arrive(policy, from, tag, (), taken, |()| self.keep_offer(from, rts))
            .unwrap_or(Found::Kept)
    }

    /// Prepares a message for waiting for its receive. A loan goes back to its sender, who needs
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
                    // It lies where no CPU may go: then it stays there.
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
