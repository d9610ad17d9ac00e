//! Operations that wait for an event before they begin, and copies on streams of the user's.
//!
//! The operations of one stream stand in one line, since a stream works in order: only the first
//! is polled. Each operation outside of streams is polled, from the newest on. Where one event
//! comes before another, and the later is found fired, the earlier is found fired after that. So
//! receives that wait for events of one stream are posted in their order.

use super::landing::Landing;
use super::port::Device;
use crate::chores::{Chore, Chores, Waiting};
use crate::comp::Status;
use crate::deadline::Deadlines;
use crate::error::OpError;
use crate::matching::ReceiveName;
use crate::names::Rank;
use crate::op::{Ended, Ending, Holder, Losses, OpContext, PendingOp};
use carrack_transports::gpu::{GpuError, Stream};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that the end of a runtime waits for copies on streams of the user, which may wait for
/// anything.
const PATIENCE: Duration = Duration::from_secs(1);

/// An operation that has not begun.
pub(crate) trait Deferred: Send {
    /// Returns its parameters.
    fn op(&self) -> &OpContext;

    /// Returns `true` if its event has fired.
    ///
    /// # Errors
    /// The event has failed.
    fn is_ready(&self) -> Result<bool, GpuError>;

    /// Begins it: its event has fired, or failed.
    fn begin(self: Box<Self>, device: &Device) -> Start;

    /// Ends it without beginning it.
    fn end(self: Box<Self>, error: OpError) -> Ended;

    /// Describes it, for diagnostics.
    fn pending(&self) -> PendingOp;
}

/// The result of beginning an operation.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(crate) enum Start {
    InFlight(Option<ReceiveName>),
    Done(Ended),
    /// The operation cannot begin now.
    Again(Box<dyn Deferred>),
}

/// An operation whose turn has come, by its number.
pub(crate) type Due = (u64, Box<dyn Deferred>);

/// The condition that an entry waits for.
pub(crate) enum Waits {
    /// An operation that waits for its event; `None` while it begins.
    Later(Option<Box<dyn Deferred>>),
    /// A copy of a stream.
    Copy(Box<Landing>),
}

pub(crate) struct OrderedEntry {
    /// Number that grows in the order of posting.
    pub(crate) number: u64,
    pub(crate) rank: Rank,
    pub(crate) sort: Sort,
    pub(crate) waits: Waits,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Memory,
    Flush,
    Receive,
}

/// The entries of one stream.
struct OnStream {
    stream: Arc<dyn Stream>,
    entries: VecDeque<OrderedEntry>,
}

/// Everything of a device that waits for events and streams of the user's.
pub(crate) struct Ordered {
    standing: Waiting<Standing>,
    losses: Arc<Losses>,
}

#[derive(Default)]
struct Standing {
    streams: Vec<OnStream>,
    others: VecDeque<OrderedEntry>,
    /// Ranks that have gone: their flushes do not wait for events any more.
    gone: Vec<Rank>,
}

impl Standing {
    fn len(&self) -> usize {
        self.others.len() + self.streams.iter().map(|one| one.entries.len()).sum::<usize>()
    }

    fn entries(&self) -> impl Iterator<Item = &OrderedEntry> {
        self.streams.iter().flat_map(|one| &one.entries).chain(&self.others)
    }

    fn entry(&mut self, number: u64) -> Option<&mut OrderedEntry> {
        let on_streams = self.streams.iter_mut().flat_map(|one| &mut one.entries);
        on_streams.chain(&mut self.others).find(|entry| entry.number == number)
    }

    fn push(&mut self, stream: Option<&Arc<dyn Stream>>, entry: OrderedEntry) {
        let Some(stream) = stream else { return self.others.push_back(entry) };
        match self.streams.iter_mut().find(|one| Arc::ptr_eq(&one.stream, stream)) {
            Some(one) => one.entries.push_back(entry),
            None => self
                .streams
                .push(OnStream { stream: stream.clone(), entries: VecDeque::from([entry]) }),
        }
    }

    /// Takes out the selected operations, in the order of posting.
    fn remove(&mut self, mut is_meant: impl FnMut(&OrderedEntry) -> bool) -> Vec<OrderedEntry> {
        let mut removed = Vec::new();
        let on_streams = self.streams.iter_mut().map(|one| &mut one.entries);
        for entries in on_streams.chain([&mut self.others]) {
            // The remaining operations keep their order.
            for _ in 0..entries.len() {
                match entries.pop_front() {
                    Some(entry) if is_meant(&entry) => removed.push(entry),
                    kept => entries.extend(kept),
                }
            }
        }
        self.streams.retain(|one| !one.entries.is_empty());
        removed.sort_by_key(|entry| entry.number);
        removed
    }

    /// Returns `true` if operations on a rank's memory wait that were posted before `before`.
    fn has_memory(&self, rank: Rank, before: u64) -> bool {
        let is_one = |entry: &OrderedEntry| {
            entry.sort == Sort::Memory && entry.rank == rank && entry.number < before
        };
        self.entries().any(is_one)
    }

    /// Takes out copies that are done, and the operations whose turn has come; both in the order of
    /// posting.
    #[allow(clippy::vec_box, reason = "handed on in the boxes in which they have waited")]
    fn ready(&mut self) -> (Vec<Box<Landing>>, Vec<Due>) {
        let (mut copied, mut fired) = (Vec::new(), Vec::new());
        for one in &mut self.streams {
            while let Some(OrderedEntry { waits: Waits::Copy(landing), .. }) =
                one.entries.front_mut()
                && landing.transfer.poll(false).is_some()
            {
                if let Some(OrderedEntry { waits: Waits::Copy(landing), .. }) =
                    one.entries.pop_front()
                {
                    copied.push(landing);
                }
            }
            let mut entries = one.entries.iter();
            let front = entries.next().filter(|entry| entry.has_fired(&self.gone));
            // A flush of a gone rank waits for its operations only, wherever it stands.
            let further = entries.filter(|entry| entry.is_of_gone(&self.gone));
            fired.extend(front.into_iter().chain(further).map(OrderedEntry::name));
        }
        self.streams.retain(|one| !one.entries.is_empty());
        let others = self.others.iter().rev();
        fired.extend(others.filter(|entry| entry.has_fired(&self.gone)).map(OrderedEntry::name));
        // A flush begins when every operation that it waits for has begun.
        fired.retain(|(number, rank, sort)| {
            *sort != Sort::Flush || !self.has_memory(*rank, *number)
        });
        fired.sort_unstable_by_key(|(number, ..)| *number);
        let begin =
            fired.into_iter().filter_map(|(number, ..)| match &mut self.entry(number)?.waits {
                Waits::Later(later) => later.take().map(|later| (number, later)),
                Waits::Copy(_) => None,
            });
        let begin = begin.collect();
        (copied, begin)
    }
}

impl OrderedEntry {
    /// Returns `true` for a flush of a gone rank, which waits for no event.
    fn is_of_gone(&self, gone: &[Rank]) -> bool {
        self.sort == Sort::Flush && gone.contains(&self.rank)
    }

    /// Returns `true` if it can begin; a failed event counts.
    fn has_fired(&self, gone: &[Rank]) -> bool {
        match &self.waits {
            Waits::Later(Some(later)) => self.is_of_gone(gone) || later.is_ready() != Ok(false),
            Waits::Later(None) | Waits::Copy(_) => false,
        }
    }

    fn name(&self) -> (u64, Rank, Sort) {
        (self.number, self.rank, self.sort)
    }
}

impl Ordered {
    pub(crate) fn new(chores: &Chores, losses: Arc<Losses>) -> Self {
        Self { standing: Waiting::for_progress(chores, Chore::Ordered), losses }
    }

    fn is_empty(&self) -> bool {
        self.standing.is_empty()
    }

    /// Returns the number of entries, of a moment ago.
    pub(crate) fn len(&self) -> usize {
        self.standing.count() as usize
    }

    pub(crate) fn push(&self, stream: Option<&Arc<dyn Stream>>, entry: OrderedEntry) {
        let mut standing = self.standing.lock();
        standing.push(stream, entry);
        self.standing.set_count(standing.len());
    }

    /// Adds a copy in flight on a stream of the user.
    pub(crate) fn push_copy(&self, number: u64, stream: &Arc<dyn Stream>, landing: Landing) {
        let rank = landing.op.rank;
        let waits = Waits::Copy(Box::new(landing));
        self.push(Some(stream), OrderedEntry { number, rank, sort: Sort::Memory, waits });
    }

    /// Returns `true` if operations on a rank's memory have still to begin, or are copies on
    /// streams.
    pub(crate) fn has_memory(&self, rank: Rank) -> bool {
        !self.is_empty() && self.standing.lock().has_memory(rank, u64::MAX)
    }

    /// Takes out copies that are done, and the operations whose turn has come; both in the order of
    /// posting. `None`: another thread does so now.
    #[allow(clippy::vec_box, reason = "handed on in the boxes in which they have waited")]
    pub(crate) fn take_ready(&self) -> Option<(Vec<Box<Landing>>, Vec<Due>)> {
        let mut standing = self.standing.try_lock()?;
        let ready = standing.ready();
        self.standing.set_count(standing.len());
        Some(ready)
    }

    /// Parks an operation again that could not begin. Its deadline may have passed meanwhile, and
    /// another thread may have searched for it in vain.
    pub(crate) fn put_back(&self, number: u64, later: Box<dyn Deferred>, deadlines: &Deadlines) {
        let deadline = later.op().deadline;
        if let Some(entry) = self.standing.lock().entry(number) {
            entry.waits = Waits::Later(Some(later));
        }
        deadlines.note(deadline);
    }

    /// Notes the status of an operation that ended as it began, before it is removed.
    pub(crate) fn note_loss(&self, number: u64, status: &Status) {
        if let Some(error @ OpError::PeerDown { .. }) = status.error.as_deref()
            && self.standing.lock().entry(number).is_some_and(|entry| entry.sort == Sort::Memory)
        {
            self.losses.note_error(error);
        }
    }

    /// Removes an operation that has begun.
    pub(crate) fn forget(&self, number: u64) {
        let mut standing = self.standing.lock();
        standing.remove(|entry| entry.number == number);
        self.standing.set_count(standing.len());
    }

    /// Takes out operations that have not begun.
    fn take_later(
        &self,
        mut is_meant: impl FnMut(&OrderedEntry, &dyn Deferred) -> bool,
    ) -> Vec<Box<dyn Deferred>> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut standing = self.standing.lock();
        let taken = standing.remove(|entry| match &entry.waits {
            Waits::Later(Some(later)) => is_meant(entry, &**later),
            Waits::Later(None) | Waits::Copy(_) => false,
        });
        self.standing.set_count(standing.len());
        let later = taken.into_iter().filter_map(|entry| match entry.waits {
            Waits::Later(later) => later,
            Waits::Copy(_) => None,
        });
        later.collect()
    }

    /// Takes a receive out that has not been posted.
    pub(crate) fn cancel(&self, number: u64) -> Option<Ended> {
        let later = self.take_later(|entry, _| entry.number == number).pop()?;
        Some(later.end(OpError::Cancelled))
    }
}

impl Holder for Ordered {
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        let gone = match *why {
            Ending::Down(rank, cause) | Ending::Gone(rank, cause) => Some((rank, cause)),
            _ => None,
        };
        if let Some((rank, _)) = gone {
            let mut standing = self.standing.lock();
            if !standing.gone.contains(&rank) {
                standing.gone.push(rank);
            }
        }
        let is_meant = |entry: &OrderedEntry, later: &dyn Deferred| {
            let is_meant = why.takes(later.op());
            match (gone, entry.sort) {
                (Some((rank, cause)), Sort::Memory) if is_meant => self.losses.note(rank, cause),
                // It tells of the losses, when the operations before it have ended.
                (Some(_), Sort::Flush) => return false,
                _ => {}
            }
            is_meant
        };
        let later = self.take_later(is_meant).into_iter();
        ended.extend(later.map(|later| {
            let error = why.error(later.op().rank);
            later.end(error)
        }));
        if matches!(why, Ending::Closed) {
            let mut standing = self.standing.lock();
            let copies = standing.remove(|_| true);
            self.standing.set_count(standing.len());
            drop(standing);
            let until = Instant::now() + PATIENCE;
            ended.extend(copies.into_iter().filter_map(|entry| match entry.waits {
                Waits::Copy(landing) => Some(landing.close_by(until)),
                Waits::Later(_) => None,
            }));
        }
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        for entry in self.standing.lock().entries() {
            match &entry.waits {
                Waits::Later(None) => {}
                Waits::Later(Some(later)) => list(later.pending()),
                Waits::Copy(landing) => list(PendingOp {
                    what: "copy on a stream",
                    waits_for: "the stream to come to its end".into(),
                    ..landing.pending()
                }),
            }
        }
    }

    fn count(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        self.standing.lock().entries().filter(|entry| entry.sort != Sort::Receive).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::Deadline;
    use crate::names::Tag;
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::contract::DownCause;
    use carrack_transports::gpu::Driver;
    use carrack_transports::mem::Buffer;

    /// An operation, and the state of its event.
    struct ParkedOp(OpContext, bool);

    impl Deferred for ParkedOp {
        fn op(&self) -> &OpContext {
            &self.0
        }

        fn is_ready(&self) -> Result<bool, GpuError> {
            Ok(self.1)
        }

        fn begin(self: Box<Self>, _: &Device) -> Start {
            Start::Again(self)
        }

        fn end(self: Box<Self>, error: OpError) -> Ended {
            self.0.end(Buffer::Empty, Some(error))
        }

        fn pending(&self) -> PendingOp {
            unreachable!("no caller asks")
        }
    }

    #[test]
    fn a_flush_of_a_gone_rank_begins_wherever_it_stands_on_its_stream() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let stream = driver.devices().unwrap().remove(0).stream().unwrap();
        let ordered = Ordered::new(&Chores::default(), Arc::default());
        for (number, rank, sort) in
            [(1, Rank(2), Sort::Receive), (2, Rank(1), Sort::Flush), (3, Rank(2), Sort::Flush)]
        {
            let op = OpContext::of_runtime(rank, Tag(1), 0, None);
            let waits = Waits::Later(Some(Box::new(ParkedOp(op, false))));
            ordered.push(Some(&stream), OrderedEntry { number, rank, sort, waits });
        }
        let begin = || {
            let (_, begin) = ordered.take_ready().unwrap();
            begin.iter().map(|(number, _)| *number).collect::<Vec<_>>()
        };
        assert_eq!(begin(), []);
        let mut ended = Vec::new();
        ordered.end(&Ending::Gone(Rank(1), &DownCause::Closed), &mut ended);
        assert_eq!((ended.len(), begin()), (0, vec![2]));
    }

    #[test]
    fn an_operation_whose_deadline_passes_while_it_begins_in_vain_ends_by_it() {
        let chores = Chores::default();
        let (ordered, deadlines) = (Ordered::new(&chores, Arc::default()), Deadlines::new(&chores));
        let mut op = OpContext::of_runtime(Rank(1), Tag(1), 0, None);
        op.deadline = Deadline::now();
        let waits = Waits::Later(Some(Box::new(ParkedOp(op, true))));
        let entry = OrderedEntry { number: 1, rank: Rank(1), sort: Sort::Memory, waits };
        ordered.push(None, entry);
        deadlines.note(Deadline::now());
        let (_, mut begin) = ordered.take_ready().unwrap();
        let (number, later) = begin.pop().unwrap();
        // Another thread looks meanwhile.
        let expire = |now| {
            let mut ended = Vec::new();
            ordered.end(&Ending::Late(now, &deadlines), &mut ended);
            ended
        };
        assert!(expire(deadlines.due().unwrap()).is_empty() && deadlines.due().is_none());
        ordered.put_back(number, later, &deadlines);
        let (_, status) = expire(deadlines.due().expect("the time is noted anew")).pop().unwrap();
        assert!(matches!(status.error.as_deref(), Some(OpError::TimedOut(Rank(1)))));
        assert_eq!(ordered.len(), 0);
    }
}
