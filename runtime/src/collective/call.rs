//! One collective operation in progress.

use super::group::{Group, OWN_NAMES};
use crate::api::Runtime;
use crate::boards::{Board, CollectiveKind, Meaning, Note};
use crate::comp::{Completion, Status};
use crate::deadline::Deadline;
use crate::error::{AwaitError, CollectiveError, OpError, PostError, ProgressError, WaitError};
use crate::names::{COLLECTIVE_ENGINE, Rank, Tag};
use crate::protocol::header::Message;
use carrack_transports::contract::DownCause;
use carrack_transports::mem::Buffer;
use parking_lot::{Mutex, MutexGuard};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// One collective operation in progress, at one member.
pub(super) struct CollectiveCall<'a> {
    runtime: &'a Runtime,
    board: &'a Board,
    number: u64,
    meaning: Meaning,
    has_ended: AtomicBool,
    /// Bytes that this member contributes, where all contribute the same number.
    contributes: AtomicU64,
    /// Notes that still wait for room here, if there ever were any.
    late: OnceLock<Arc<Late>>,
}

/// Code in the lowest byte of a failure's word: the culprit is gone, never came, or cannot be
/// reached.
const GONE: u64 = 1;
/// The culprit contributes another number of bytes: its number stands above this byte, the sender's
/// in place of the list's hash.
const UNEVEN: u64 = 2;

/// Notes that wait for room.
#[derive(Default)]
struct Late(Mutex<LateNotes>);

#[derive(Default)]
struct LateNotes {
    notes: usize,
    /// The waker to wake when none is left.
    waker: Option<Waker>,
    /// The reason why a note will never arrive.
    lost: Option<Box<OpError>>,
}

impl Late {
    fn lock(&self) -> MutexGuard<'_, LateNotes> {
        self.0.lock()
    }
}

impl Completion for Late {
    fn signal(&self, status: Status) -> Result<(), Status> {
        let waker = {
            let mut late = self.lock();
            late.notes = late.notes.saturating_sub(1);
            late.lost = late.lost.take().or(status.error);
            if late.notes == 0 { late.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "the notes of a collective".into()
    }
}

impl<'a> CollectiveCall<'a> {
    /// Takes the group's next number, for an operation that is awaited.
    ///
    /// # Errors
    /// Called in a forked process. A refused call takes no number and sends nothing.
    pub(super) fn begin(
        group: &'a Group,
        kind: CollectiveKind,
        root: Rank,
    ) -> Result<Self, CollectiveError> {
        if group.runtime.0.is_forked() {
            return Err(refused(kind, ProgressError::Forked.into()));
        }
        let board = &*group.board;
        let meaning = Meaning { hash: board.hash(), count: board.members().count(), kind, root };
        let (number, runtime) = (board.begin(kind), &group.runtime);
        Ok(Self {
            runtime,
            board,
            number,
            meaning,
            has_ended: AtomicBool::new(false),
            contributes: AtomicU64::new(0),
            late: OnceLock::new(),
        })
    }

    /// Begins as [`begin`](Self::begin), for an operation that blocks this thread.
    ///
    /// # Errors
    /// Called in a forked process, or from a completion handler.
    pub(super) fn begin_blocking(
        group: &'a Group,
        kind: CollectiveKind,
        root: Rank,
    ) -> Result<Self, CollectiveError> {
        group.runtime.may_block().map_err(|cause| refused(kind, cause))?;
        Self::begin(group, kind, root)
    }

    /// Notes the bytes that this member contributes.
    pub(super) fn contributes(&self, bytes: usize) {
        self.contributes.store(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn what(&self) -> &'static str {
        self.meaning.kind.name()
    }

    /// Returns the number of members.
    pub(super) fn count(&self) -> u32 {
        self.meaning.count
    }

    /// Returns this rank's place among the members.
    pub(super) fn place(&self) -> u32 {
        self.board.members().place(self.runtime.rank()).unwrap_or(0)
    }

    pub(super) fn rank(&self, place: u32) -> Rank {
        self.board.members().at(place)
    }

    /// Returns the place of a rank.
    pub(super) fn place_of(&self, rank: Rank) -> Option<u32> {
        self.board.members().place(rank)
    }

    /// Sends a member a note.
    #[inline]
    pub(super) fn tell(&self, to: u32, step: u32, word: u64) {
        self.note(self.rank(to), step, self.meaning, word);
    }

    fn note(&self, to: Rank, step: u32, meaning: Meaning, word: u64) {
        let inner = &self.runtime.0;
        if inner.is_forked() {
            // The operation belongs to the parent: a child that drops its copy sends nothing.
            return;
        }
        let note = Note { from: inner.rank, number: self.number, step, meaning, word };
        let message = Message::Note { group: self.board.name, number: self.number };
        let device = &inner.default_device().0;
        device.send_or_later(inner, to, message.encode(), note.encode(), || {
            let late = self.late.get_or_init(|| Arc::new(Late::default()));
            late.lock().notes += 1;
            Some(late.clone())
        });
    }

    /// Waits until the notes are on their way: a member that leaves, and makes no further
    /// progress, must not keep them. Returns the reason if a note will never arrive.
    async fn told(&self, limit: Duration) -> Option<Box<OpError>> {
        let late = self.late.get()?;
        let until = Deadline::after(limit);
        poll_fn(|context| {
            let mut late = late.lock();
            if late.notes == 0 || until.has_passed(Deadline::now()) {
                return Poll::Ready(late.lost.take());
            }
            late.waker = Some(context.waker().clone());
            drop(late);
            // Every deadline that passes wakes the boards' listeners, also another operation's.
            self.board.listen(context.waker());
            self.runtime.0.deadlines.note(until);
            Poll::Pending
        })
        .await
    }

    /// Waits for the note of a member.
    pub(super) async fn hear(&self, from: u32, step: u32) -> Result<u64, CollectiveError> {
        let from = self.rank(from);
        let heard = poll_fn(|context| {
            if self.has_ticked(step) {
                return Poll::Ready(Ok(0));
            }
            let is_meant = |note: &Note| note.from == from && note.step == step;
            let speaks_against = |note: &Note| note.meaning != self.meaning;
            if let Some(note) = self.barrier_instead() {
                return Poll::Ready(Err(self.contradiction(&note)));
            }
            match self.board.take(
                self.number,
                Some(from),
                is_meant,
                speaks_against,
                context.waker(),
            ) {
                Some(note) if note.meaning == self.meaning => Poll::Ready(Ok(note.word)),
                Some(note) => Poll::Ready(Err(self.contradiction(&note))),
                // A note of a barrier may have come before the waker was there.
                None if self.has_ticked(step) => Poll::Ready(Ok(0)),
                None => match (self.barrier_instead(), self.gone(from)) {
                    (Some(note), _) => Poll::Ready(Err(self.contradiction(&note))),
                    (None, Some(error)) => Poll::Ready(Err(error)),
                    (None, None) => {
                        if !self.is_linked(from) {
                            // No other event reports the end of a rank that has published no
                            // address.
                            let inner = &self.runtime.0;
                            inner.look_out_for(inner.default_device().0.index, from);
                        }
                        Poll::Pending
                    }
                },
            }
        });
        heard.await
    }

    /// Returns `true` if the note of a barrier's step has arrived.
    #[inline]
    fn has_ticked(&self, step: u32) -> bool {
        self.meaning.kind == CollectiveKind::Barrier && self.board.has_ticked(self.number, step)
    }

    /// Returns the note of a member that is in a barrier, where this operation is none.
    fn barrier_instead(&self) -> Option<Note> {
        if self.meaning.kind == CollectiveKind::Barrier {
            None
        } else {
            self.board.barrier_instead(self.number)
        }
    }

    /// Waits, before the first note to a member, until the NIC of no member reaches a region of
    /// this rank whose registration has ended. Otherwise a member could hear of this operation by
    /// another one, ahead of the withdrawal.
    pub(super) async fn revoked(&self) -> Result<(), CollectiveError> {
        let regions = &self.runtime.0.regions;
        if !regions.is_leaving() {
            return Ok(());
        }
        let is_member = |rank| self.place_of(rank).is_some();
        let released = poll_fn(|context| {
            self.board.listen(context.waker());
            match regions.is_leaving_to(is_member) {
                true => Poll::Pending,
                false => Poll::Ready(()),
            }
        });
        self.unless_trouble(released).await
    }

    /// Waits as [`revoked`](Self::revoked), on a thread that does nothing else.
    pub(super) fn revoke(&self) -> Result<(), CollectiveError> {
        match self.runtime.0.regions.is_leaving() {
            true => self.drive(self.revoked()),
            false => Ok(()),
        }
    }

    /// Waits for a barrier's note, on a thread that does nothing else: tests one word until
    /// another event.
    pub(super) fn hear_tick(&self, from: u32, step: u32) -> Result<(), CollectiveError> {
        let stirred = self.board.stirred();
        let done = || self.has_ticked(step) || self.board.stirred() != stirred;
        // A rank that is known to be gone causes no event: a short sleep, then everything is
        // checked.
        let heard = self.runtime.0.wait_keeping(&done, Some(Duration::from_millis(1)));
        if heard.is_ok() && self.has_ticked(step) {
            return Ok(());
        }
        self.drive(self.hear(from, step)).map(drop)
    }

    /// Sends bytes to a member that waits for them.
    pub(super) async fn send(
        &self,
        to: u32,
        step: u32,
        bytes: bytes::Bytes,
    ) -> Result<(), CollectiveError> {
        let engine = self.runtime.0.engine(COLLECTIVE_ENGINE);
        let send =
            self.runtime.post_send(self.rank(to), bytes, self.tag(step)).matching_engine(engine);
        let sent = self.unless_trouble(send.start()).await?;
        sent.map(|_| ()).map_err(|error| self.failed(error))
    }

    /// Runs `work`, unless a note says that another member has failed or is in another operation.
    async fn unless_trouble<T>(&self, work: impl Future<Output = T>) -> Result<T, CollectiveError> {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Ok(done));
            }
            let speaks_against = |note: &Note| note.meaning != self.meaning;
            let note =
                self.board.take(self.number, None, |_| false, speaks_against, context.waker());
            match note.or_else(|| self.barrier_instead()) {
                Some(note) => Poll::Ready(Err(self.contradiction(&note))),
                None => Poll::Pending,
            }
        })
        .await
    }

    /// Waits for bytes of a member.
    pub(super) async fn receive(
        &self,
        from: u32,
        step: u32,
        len: usize,
    ) -> Result<Vec<u8>, CollectiveError> {
        let engine = self.runtime.0.engine(COLLECTIVE_ENGINE);
        let mut room = Vec::new();
        if room.try_reserve_exact(len).is_err() {
            return Err(self.failed(OpError::Memory(len).into()));
        }
        room.resize(len, 0);
        let receive =
            self.runtime.post_recv(self.rank(from), room, self.tag(step)).matching_engine(engine);
        let receive = receive.start();
        let ticket = receive.ticket();
        let status = match self.unless_trouble(receive).await {
            Ok(received) => received.map_err(|error| self.failed(error))?,
            Err(trouble) => {
                // The message will never come.
                let _ = ticket.map(|ticket| self.runtime.cancel(&ticket));
                return Err(trouble);
            }
        };
        match status.buffer {
            Buffer::Vec(bytes) if status.size == len => Ok(bytes),
            _ => Err(CollectiveError::Uneven {
                rank: self.rank(from),
                theirs: status.size,
                ours: len,
            }),
        }
    }

    fn tag(&self, step: u32) -> Tag {
        Tag(u64::from(self.board.name) << 32
            | (self.number & 0xff_ffff) << 8
            | u64::from(step & 0xff))
    }

    /// Returns the reason why no message of a rank can come any more, if known: it is gone, or has
    /// no path. The end of an awaited rank must be noticed, even if it never published its address.
    fn gone(&self, rank: Rank) -> Option<CollectiveError> {
        let inner = &self.runtime.0;
        let device = &inner.default_device().0;
        if let Some(route) = device.route(rank)
            && route.linked().is_none()
        {
            match route.link(inner, device) {
                Err(PostError::PeerDown { cause, .. }) => return Some(self.down(rank, cause)),
                Err(cause @ (PostError::Bootstrap { .. } | PostError::Unreachable { .. })) => {
                    return Some(CollectiveError::Post { what: self.what(), cause });
                }
                Ok(_) | Err(_) => {}
            }
        }
        inner.down().get(&rank).cloned().map(|cause| self.down(rank, cause))
    }

    /// Returns `true` if the end of a rank would be noticed. This rank itself needs no link.
    fn is_linked(&self, rank: Rank) -> bool {
        let route = self.runtime.0.default_device().0.known_route(rank);
        rank == self.runtime.rank() || route.is_some_and(|route| route.linked().is_some())
    }

    fn down(&self, rank: Rank, cause: DownCause) -> CollectiveError {
        CollectiveError::Op { what: self.what(), cause: OpError::PeerDown { rank, cause } }
    }

    fn failed(&self, error: AwaitError) -> CollectiveError {
        match error {
            AwaitError::Post(cause) => CollectiveError::Post { what: self.what(), cause },
            AwaitError::Op(cause) => CollectiveError::Op { what: self.what(), cause },
        }
    }

    /// Returns the error for a note that contradicts this member's operation.
    #[cold]
    fn contradiction(&self, note: &Note) -> CollectiveError {
        let (what, rank) = (self.what(), note.from);
        match note.meaning {
            Meaning { kind: CollectiveKind::Failed, root, .. } if note.word == GONE => {
                let known = self.runtime.0.down().get(&root).cloned();
                let told = || DownCause::Gone(format!("says {rank}, where the {what} failed"));
                self.down(root, known.unwrap_or_else(told))
            }
            Meaning { kind: CollectiveKind::Failed, root, hash, .. }
                if note.word & 0xff == UNEVEN =>
            {
                let (ours, theirs) = (self.contributes.load(Ordering::Relaxed), note.word >> 8);
                // The one of the two that differs from this operation.
                let (rank, theirs) = if theirs == ours { (rank, hash) } else { (root, theirs) };
                let fits = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
                CollectiveError::Uneven { rank, theirs: fits(theirs), ours: fits(ours) }
            }
            Meaning { kind: CollectiveKind::Failed, .. } => CollectiveError::Failed { what, rank },
            theirs => CollectiveError::Mismatch {
                rank,
                theirs: describe(theirs, self.board.name),
                ours: describe(self.meaning, self.board.name),
            },
        }
    }

    /// Returns the culprit and the reason of a failure, as the other members are told.
    fn blame(&self, error: &CollectiveError) -> (Rank, u64) {
        match error {
            CollectiveError::Op { cause: OpError::PeerDown { rank, .. }, .. }
            | CollectiveError::Post {
                cause:
                    PostError::PeerDown { rank, .. }
                    | PostError::Bootstrap { rank, .. }
                    | PostError::Unreachable { rank, .. },
                ..
            } => (*rank, GONE),
            CollectiveError::Uneven { rank, theirs, .. } => (*rank, UNEVEN | (*theirs as u64) << 8),
            _ => (self.runtime.rank(), 0),
        }
    }

    /// Runs the operation to its end. If it fails here, all other members are told.
    pub(super) async fn run<T>(
        &self,
        work: impl Future<Output = Result<T, CollectiveError>>,
    ) -> Result<T, CollectiveError> {
        let mut result = match self.runtime.0.is_forked() {
            true => Err(refused(self.meaning.kind, ProgressError::Forked.into())),
            false => work.await,
        };
        self.has_ended.store(result.is_ok(), Ordering::Relaxed);
        if result.is_ok()
            && let Some(cause) = self.told(Duration::MAX).await
        {
            // A member that waits for that note would only learn that this one has left.
            result = Err(CollectiveError::Op { what: self.what(), cause: *cause });
        }
        if let Err(error) = &result {
            self.give_up(self.blame(error));
        }
        self.has_ended.store(true, Ordering::Relaxed);
        if result.is_err() {
            // Members that have not started learn of it in another way.
            self.told(Duration::from_secs(1)).await;
        }
        result
    }

    #[cold]
    fn give_up(&self, (root, word): (Rank, u64)) {
        let me = self.runtime.rank();
        let hash = if word & 0xff == UNEVEN {
            self.contributes.load(Ordering::Relaxed)
        } else {
            self.meaning.hash
        };
        let meaning = Meaning { kind: CollectiveKind::Failed, root, hash, ..self.meaning };
        for place in 0..self.count() {
            let to = self.rank(place);
            if to != me && !(word == GONE && to == root) {
                self.note(to, u32::MAX, meaning, word);
            }
        }
    }

    /// Ends the operation on a thread that does nothing else.
    pub(super) fn conclude<T>(
        &self,
        result: Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        if result.is_ok() && self.late.get().is_none() {
            self.has_ended.store(true, Ordering::Relaxed);
            return result;
        }
        self.block(async { result })
    }

    /// Blocks on the operation. A member that this rank waits for may itself wait in an operation
    /// of a group that this rank does not know. After a while that is reported as a mismatch.
    pub(super) fn block<T>(
        &self,
        work: impl Future<Output = Result<T, CollectiveError>>,
    ) -> Result<T, CollectiveError> {
        self.drive(self.run(work))
    }

    /// Blocks on a part of the operation.
    fn drive<T>(
        &self,
        work: impl Future<Output = Result<T, CollectiveError>>,
    ) -> Result<T, CollectiveError> {
        let patience = Duration::from_secs(self.runtime.settings().mismatch_seconds() as u64);
        let begun = Instant::now();
        let work = pin!(work);
        let strayed = || {
            if patience.is_zero() || begun.elapsed() < patience {
                return None;
            }
            let rank = self.board.awaits(self.number)?;
            let (name, note) = self.runtime.0.boards.unclaimed(rank, self.board.name)?;
            let (theirs, ours) =
                (describe(note.meaning, name), describe(self.meaning, self.board.name));
            Some(CollectiveError::Mismatch { rank, theirs, ours })
        };
        match self.runtime.block_on_unless(work, Duration::from_millis(100), strayed) {
            Ok(Ok(result)) => result,
            Ok(Err(strayed)) => {
                self.give_up((self.runtime.rank(), 0));
                self.has_ended.store(true, Ordering::Relaxed);
                let _ = self.runtime.block_on(self.told(Duration::from_secs(1)));
                Err(strayed)
            }
            Err(cause) => Err(refused(self.meaning.kind, cause)),
        }
    }
}

impl Group {
    /// Fails the next operation without taking part in it, for members that have to stop between
    /// operations that belong together. Members that begin it, or are in it, get the `cause`.
    pub(crate) fn abandon(&self, cause: &CollectiveError) {
        // A forked process sends nothing, because the group belongs to the parent.
        let Ok(call) = CollectiveCall::begin(self, CollectiveKind::Barrier, Rank(0)) else {
            return;
        };
        call.give_up(call.blame(cause));
        call.has_ended.store(true, Ordering::Relaxed);
        let _ = self.runtime.block_on(call.told(Duration::from_secs(1)));
    }

    /// Leaves the group for good, so that no member waits for this one any more. A broadcast may
    /// complete at others without this member, so the operation after it is abandoned, too. The
    /// group must not be left with two broadcasts in a row.
    pub(crate) fn leave(&self, cause: &CollectiveError) {
        self.abandon(cause);
        self.abandon(cause);
    }
}

/// The other members would wait for a future that is dropped before its end, so its drop tells
/// them.
impl Drop for CollectiveCall<'_> {
    fn drop(&mut self) {
        if !self.has_ended.load(Ordering::Relaxed) {
            self.give_up((self.runtime.rank(), 0));
        }
        self.board.forget(self.number);
    }
}

#[cold]
fn refused(kind: CollectiveKind, cause: WaitError) -> CollectiveError {
    CollectiveError::Wait { what: kind.name(), cause }
}

fn describe(meaning: Meaning, group: u32) -> String {
    let Meaning { count, kind, root, hash } = meaning;
    let from =
        if kind == CollectiveKind::Broadcast { format!(" from {root}") } else { String::new() };
    let of = match group {
        0 => "all ranks".into(),
        OWN_NAMES.. => format!("the library's group {group:#x}"),
        _ => format!("group {group}"),
    };
    let name = kind.name();
    let article = if kind == CollectiveKind::Allgather { "an" } else { "a" };
    format!("{article} {name} over {of}, {count} members (list {:08x}){from}", hash as u32)
}
