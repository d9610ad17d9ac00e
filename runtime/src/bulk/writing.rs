//! The sender's side of a message that its NIC writes chunk by chunk: while one chunk is on its
//! way, the next is registered with the NIC.
//!
//! Progress looks at such a message only after an event: the receiver has shown a further window,
//! or a chunk has completed. In between the message costs no time, and keeps no thread from
//! sleeping.

use super::Bulk;
use super::outgoing::{Matter, Offered, Stream};
use crate::chores::Waiting;
use crate::comp::{Completion, Status};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::{Rank, UserContext};
use crate::op::{Ended, OpContext};
use crate::peer::route::Linked;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::protocol::wire::{Window, encode_landing};
use carrack_transports::contract::{Chunk, OpToken, RemotePlace, Submit, SubmitError};
use carrack_transports::mem::{Buffer, SmallBytes};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Chunks of a message that are shown, or being written, at a time on each NIC: one that is
/// written, and one that is prepared. So only these are pinned on either side, however long the
/// message is.
pub(super) const AT_ONCE: usize = 2;

/// Windows that a receiver may show at a time. An honest one of any version shows fewer.
const WINDOWS: usize = 64;

/// A message that the NIC writes.
pub(crate) struct Writing {
    /// The message without its bytes, which the chunks in flight share.
    pub(super) offered: Offered,
    bytes: Arc<Buffer>,
    /// The receiver's name for it.
    landing: u64,
    /// Bytes that the NIC was told to write, from the first on.
    sent: usize,
    /// The windows that the receiver has shown, in the order of the message.
    windows: VecDeque<Window>,
    /// Windows whose end the receiver will be told later, as some of their chunks are in flight.
    apart: Vec<Apart>,
    /// Bytes of a chunk, at most.
    chunk: usize,
    /// Bytes that may go as parts, after the receiver's NIC has refused further windows.
    limit: usize,
    /// `true` if this rank's NIC does not reach the rest.
    is_refused: bool,
    /// The error that ends it as soon as no chunk is in flight.
    failed: Option<OpError>,
    under_way: Arc<UnderWay>,
}

/// The chunks that the NIC writes, as their completion object.
struct UnderWay {
    /// The name of the message.
    name: u64,
    count: AtomicUsize,
    failed: OnceLock<OpError>,
    /// The window beginnings of completed chunks.
    over: Mutex<Vec<u64>>,
    ready: Arc<Waiting<Vec<u64>>>,
}

impl UnderWay {
    fn over(&self) -> MutexGuard<'_, Vec<u64>> {
        self.over.lock()
    }

    fn none(&self) -> bool {
        // Acquire: the outcome of the last chunk is visible.
        self.count.load(Ordering::Acquire) == 0
    }
}

impl Completion for UnderWay {
    fn signal(&self, status: Status) -> Result<(), Status> {
        match status.error {
            Some(error) => _ = self.failed.set(*error),
            None => self.over().push(status.user_context.0),
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
        note(&self.ready, self.name);
        Ok(())
    }
}

/// A window whose end no message can follow on the same queue pair: its receiver is told when its
/// chunks have completed.
struct Apart {
    at: usize,
    chunks: usize,
    /// `true` if all of its chunks were submitted.
    is_given: bool,
}

/// Lets progress look at a message.
fn note(ready: &Waiting<Vec<u64>>, name: u64) {
    let mut names = ready.lock();
    names.push(name);
    ready.set_count(names.len());
}

/// The result of a look at a message.
enum Look {
    /// A later event continues it.
    Rests,
    /// The link is full at the moment.
    Again,
    /// The rest goes as parts.
    Parts,
    Over(Result<(), OpError>),
}

/// Messages for receivers.
type Told = Vec<(Rank, Message, SmallBytes)>;

impl Writing {
    fn of(
        mut offered: Offered,
        landing: u64,
        chunk: usize,
        (name, ready): (u64, &Arc<Waiting<Vec<u64>>>),
    ) -> Self {
        let bytes = std::mem::take(&mut offered.bytes);
        let (count, failed, over) = (AtomicUsize::new(0), OnceLock::new(), Mutex::default());
        Self {
            offered,
            bytes: Arc::new(bytes),
            landing,
            sent: 0,
            windows: VecDeque::new(),
            apart: Vec::new(),
            chunk,
            limit: 0,
            is_refused: false,
            failed: None,
            under_way: Arc::new(UnderWay { name, count, failed, over, ready: ready.clone() }),
        }
    }

    pub(super) fn rank(&self) -> Rank {
        self.offered.rank()
    }

    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a window. Windows may arrive in any order, since two threads may receive them.
    fn add(&mut self, window: Window) -> Result<(), String> {
        if self.is_refused {
            // It was shown before the receiver heard of that.
            return Ok(());
        }
        let end =
            window.at.checked_add(window.len).filter(|&end| window.len > 0 && end <= self.size());
        let end = end.ok_or("it wants bytes written that its message does not have")?;
        let place = self.windows.partition_point(|other| other.at < window.at);
        let before = place.checked_sub(1).and_then(|at| self.windows.get(at));
        let is_free = window.at >= self.sent
            && before.is_none_or(|other| other.at + other.len <= window.at)
            && self.windows.get(place).is_none_or(|other| end <= other.at);
        if !is_free || self.windows.len() >= WINDOWS {
            return Err("it wants bytes written more than once, or into too many places".into());
        }
        self.windows.insert(place, window);
        Ok(())
    }

    /// Submits as many chunks as are shown and may be in flight.
    fn step(&mut self, device: &DeviceInner, linked: &Linked, told: &mut Told) -> Look {
        while self.failed.is_none()
            && self.under_way.failed.get().is_none()
            && let Some(&Window { at, len, place }) = self.windows.front()
            && at <= self.sent
            && self.under_way.count.load(Ordering::Acquire) < AT_ONCE * linked.link.nics()
        {
            let within = self.sent - at;
            let chunk =
                Chunk { of: self.bytes.clone(), at: self.sent, len: self.chunk.min(len - within) };
            let to = RemotePlace { addr: place.addr.wrapping_add(within as u64), ..place };
            match self.write(device, linked, to, &chunk, at) {
                Ok(true) => {}
                Ok(false) => return Look::Again,
                Err(SubmitError::Unregistered(why)) => {
                    tracing::info!(rank = %self.rank(), why, sent = self.sent, "a message goes on \
                        part by part");
                    self.is_refused = true;
                    self.windows.clear();
                    if len == self.size() {
                        // Its receiver does not know of chunks. It gets the written bytes again,
                        // as parts.
                        self.sent = 0;
                    }
                    break;
                }
                Err(error) => {
                    self.failed = Some(OpError::of_submit(&error, self.rank()));
                    break;
                }
            }
            self.sent += chunk.len;
            let is_given = self.sent == at + len;
            if is_given {
                self.windows.pop_front();
            }
            if linked.link.puts_in_order(to) {
                if is_given {
                    told.push(self.written(at));
                }
                continue;
            }
            match self.apart.iter_mut().find(|apart| apart.at == at) {
                Some(apart) => (apart.chunks, apart.is_given) = (apart.chunks + 1, is_given),
                None => self.apart.push(Apart { at, chunks: 1, is_given }),
            }
        }
        self.look(told)
    }

    fn written(&self, at: usize) -> (Rank, Message, SmallBytes) {
        (self.rank(), Message::Written { landing: self.landing }, encode_landing(at as u64))
    }

    /// Reports completed windows, and finds the next state when no chunk can be submitted.
    fn look(&mut self, told: &mut Told) -> Look {
        // Read first: the outcome of the last chunk is checked below.
        let has_none = self.under_way.none();
        for at in std::mem::take(&mut *self.under_way.over()) {
            if let Some(apart) = self.apart.iter_mut().find(|apart| apart.at as u64 == at) {
                apart.chunks -= 1;
            }
        }
        let over: Vec<_> =
            self.apart.extract_if(.., |apart| apart.is_given && apart.chunks == 0).collect();
        told.extend(over.iter().map(|apart| self.written(apart.at)));
        if !has_none {
            return Look::Rests;
        }
        if let Some(error) = self.failed.take().or_else(|| self.under_way.failed.get().cloned()) {
            return Look::Over(Err(error));
        }
        if self.sent == self.size() {
            return Look::Over(Ok(()));
        }
        if self.is_refused {
            // After all chunks: only now are the written bytes in place, on every NIC.
            let message = Message::Unwritten { landing: self.landing };
            told.push((self.rank(), message, encode_landing(self.sent as u64)));
            return Look::Parts;
        }
        if self.limit > self.sent && self.windows.is_empty() { Look::Parts } else { Look::Rests }
    }

    /// Submits a chunk. `false`: not now.
    fn write(
        &self,
        device: &DeviceInner,
        linked: &Linked,
        to: RemotePlace,
        chunk: &Chunk,
        window: usize,
    ) -> Result<bool, SubmitError> {
        let (rank, tag, _) = self.offered.about();
        let comp: Arc<dyn Completion> = self.under_way.clone();
        let operation = OpContext {
            user_context: UserContext(window as u64),
            ..OpContext::of_runtime(rank, tag, chunk.len, Some(comp))
        };
        let Ok(token) = device.outstanding.insert(operation) else { return Ok(false) };
        // Before the call: another thread may see its completion first.
        self.under_way.count.fetch_add(1, Ordering::AcqRel);
        let submitted = linked.link.put_chunk(to, chunk, OpToken(token));
        if !matches!(submitted, Ok(Submit::Posted)) {
            self.under_way.count.fetch_sub(1, Ordering::AcqRel);
            device.outstanding.take(token);
        }
        submitted.map(|submit| submit == Submit::Posted)
    }

    /// Returns the offer with its bytes, or without them if a failed link still holds a part.
    fn into_offered(self) -> Offered {
        let Self { mut offered, bytes, .. } = self;
        offered.bytes = Arc::into_inner(bytes).unwrap_or_default();
        offered
    }

    fn end(self, outcome: Result<(), OpError>) -> Ended {
        let offered = self.into_offered();
        match outcome {
            Ok(()) => offered.end(None),
            Err(error) => offered.end(Some(&|_| error.clone())),
        }
    }
}

impl Bulk {
    /// Returns the length of a message that the receiver wants written as a whole, if it goes in
    /// chunks all the same.
    pub(crate) fn is_for_chunks(&self, by: Rank, token: u64, chunk: usize) -> Option<usize> {
        let offered = self.offered.lock();
        let one = offered
            .get(&token)
            .filter(|one| one.rank() == by && one.matter() == Matter::Message)?;
        let is_kept = matches!(one.bytes, Buffer::Region(_));
        Some(one.bytes.len()).filter(|&len| len > chunk && !is_kept)
    }

    /// Handles a window that the receiver has shown for a part of a message.
    ///
    /// There is no such message, or the window is not in it.
    pub(crate) fn clear_window(
        &self,
        by: Rank,
        (token, landing): (u64, u64),
        window: Window,
        chunk: usize,
    ) -> Result<(), String> {
        let mut writings = self.writings.lock();
        let added = match writings.get_mut(&token).filter(|one| one.rank() == by) {
            Some(writing) if writing.landing == landing => writing.add(window),
            Some(_) => Err("it calls a message by two names".into()),
            None => {
                let known = self
                    .offered
                    .lock()
                    .get(&token)
                    .filter(|one| one.rank() == by)
                    .map(Offered::matter);
                match known {
                    Some(Matter::Message) => {}
                    // Its message has ended here, or goes on as parts.
                    None if window.at > 0 => return Ok(()),
                    _ => return Err("it wants to have written what was not offered to it".into()),
                }
                let Some(offered) = self.take_offered(token, Some(by)) else { return Ok(()) };
                let mut writing = Writing::of(offered, landing, chunk, (token, &self.ready));
                let added = writing.add(window);
                writings.insert(token, writing);
                self.writings.set_count(writings.len());
                added
            }
        };
        note(&self.ready, token);
        added
    }

    /// Handles the news that the receiver's NIC takes no more, and the limit for parts. Returns
    /// `true` if the message is written chunk by chunk.
    pub(super) fn grant_writing(&self, by: Rank, landing: u64, limit: usize) -> bool {
        let mut writings = self.writings.lock();
        let found = writings.iter_mut().find(|(_, one)| one.landing == landing && one.rank() == by);
        let Some((&name, writing)) = found else { return false };
        writing.limit = writing.limit.max(limit);
        note(&self.ready, name);
        true
    }

    /// Ends messages to a rank, or to all ranks: at once without a chunk in flight, else after the
    /// last one.
    pub(super) fn fail_writings(
        &self,
        rank: Option<Rank>,
        error: &dyn Fn(Rank) -> OpError,
    ) -> Vec<Ended> {
        let mut writings = self.writings.lock();
        let gone = writings.extract_if(|_, one| {
            let is_meant = rank.is_none_or(|rank| rank == one.rank());
            if is_meant {
                one.failed = Some(error(one.rank()));
            }
            is_meant && (rank.is_none() || one.under_way.none())
        });
        let gone: Vec<_> = gone.collect();
        self.writings.set_count(writings.len());
        drop(writings);
        let end = |(_, one): (u64, Writing)| {
            let error = error(one.rank());
            one.end(Err(error))
        };
        gone.into_iter().map(end).collect()
    }
}

impl Pass<'_> {
    /// Lets NICs write the chunks that receivers have shown.
    #[cold]
    pub(crate) fn move_writings(&mut self) {
        let bulk = &self.device.bulk;
        let Some(mut writings) = bulk.writings.try_lock() else { return };
        let mut names = bulk.ready.lock();
        let ready = std::mem::take(&mut *names);
        bulk.ready.set_count(0);
        drop(names);
        let (mut told, mut over) = (Told::new(), Vec::new());
        for name in ready {
            let Some(writing) = writings.get_mut(&name) else { continue };
            let before = writing.sent;
            let look = match self.way_to(writing.rank()) {
                Ok(Some(linked)) => writing.step(self.device, linked, &mut told),
                Ok(None) if writing.failed.is_none() => Look::Again,
                Ok(None) => writing.look(&mut told),
                Err(error) => {
                    writing.failed = Some(error);
                    writing.look(&mut told)
                }
            };
            self.moved |= writing.sent > before;
            match look {
                Look::Rests => {}
                Look::Again => note(&bulk.ready, name),
                Look::Over(outcome) => {
                    over.extend(writings.remove(&name).map(|writing| (writing, outcome)))
                }
                Look::Parts => {
                    let Some(writing) = writings.remove(&name) else { continue };
                    let (landing, sent, limit) = (writing.landing, writing.sent, writing.limit);
                    // With both locks, so that another thread finds it in one place or the other.
                    let mut streams = bulk.streams.lock();
                    streams.push(Stream::from(writing.into_offered(), landing, (sent, limit)));
                    bulk.streams.set_count(streams.len());
                }
            }
        }
        bulk.writings.set_count(writings.len());
        drop(writings);
        self.moved |= !told.is_empty() || !over.is_empty();
        for (rank, message, payload) in told {
            // On the same link, so behind the bytes.
            self.device.control(self.inner, rank, message, payload);
        }
        for (writing, outcome) in over {
            let (comp, status) = writing.end(outcome);
            self.signal(comp.as_ref(), status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chores::Chores;
    use crate::names::Tag;
    use carrack_transports::mem::SmallBytes;

    fn place() -> RemotePlace {
        RemotePlace { addr: 0, key: 0 }
    }

    /// A message of 100 bytes to rank 1 that is offered under the name 7.
    fn offered() -> Bulk {
        let bulk = Bulk::new(10, &Chores::default());
        let operation = OpContext::of_runtime(Rank(1), Tag(0), 100, None);
        bulk.offered.lock().insert(7, Offered::message(operation, vec![0; 100].into()));
        bulk
    }

    #[test]
    fn windows_come_in_any_order_and_once_and_within_the_message() {
        let bulk = offered();
        let clear = |by, landing, (at, len)| {
            bulk.clear_window(Rank(by), (7, landing), Window { at, len, place: place() }, 10)
        };
        assert!(clear(2, 5, (0, 10)).is_err(), "it was not offered to that rank");
        assert_eq!(clear(2, 5, (10, 10)), Ok(()), "it may be late");
        assert_eq!((clear(1, 5, (20, 10)), clear(1, 5, (0, 10))), (Ok(()), Ok(())));
        assert!(clear(1, 6, (10, 10)).is_err(), "it has a name already");
        for wrong in [(20, 10), (15, 10), (25, 1), (0, 1), (95, 10), (usize::MAX, 2), (40, 0)] {
            assert!(clear(1, 5, wrong).is_err(), "{wrong:?}");
        }
        assert_eq!((clear(1, 5, (10, 10)), clear(1, 5, (90, 10))), (Ok(()), Ok(())));
        let order: Vec<_> =
            bulk.writings.lock()[&7].windows.iter().map(|window| window.at).collect();
        assert_eq!(order, [0, 10, 20, 90]);
        assert!(bulk.offered.lock().is_empty() && bulk.ready.count() > 0);
    }

    #[test]
    fn a_receiver_cannot_show_more_windows_than_there_is_room_for() {
        let bulk = offered();
        let clear =
            |at| bulk.clear_window(Rank(1), (7, 5), Window { at, len: 1, place: place() }, 10);
        assert!((0..WINDOWS).all(|at| clear(at).is_ok()));
        assert!(clear(WINDOWS).is_err());
    }

    #[test]
    fn what_goes_to_a_rank_that_has_gone_ends_when_no_chunk_is_under_way() {
        let bulk = offered();
        bulk.clear_window(Rank(1), (7, 5), Window { at: 0, len: 10, place: place() }, 10).unwrap();
        let under_way = bulk.writings.lock()[&7].under_way.clone();
        under_way.count.store(1, Ordering::Release);
        let gone = |rank| bulk.fail_writings(Some(Rank(rank)), &|_| OpError::Closed).len();
        assert_eq!([gone(2), gone(1)], [0, 0]);
        let (user_context, buffer) = (UserContext::default(), Buffer::Small(SmallBytes::empty()));
        let status =
            Status { rank: Rank(1), tag: Tag(0), size: 10, user_context, buffer, error: None };
        assert!(under_way.signal(status).is_ok());
        assert!(matches!(
            bulk.writings.lock().get_mut(&7).unwrap().look(&mut Told::new()),
            Look::Over(Err(OpError::Closed))
        ));
        assert_eq!([gone(1), gone(1)], [1, 0]);
    }
}
