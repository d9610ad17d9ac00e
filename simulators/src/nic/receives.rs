//! Receive queues, a queue pair's own and shared ones; and the lists of pieces of work requests.

use super::completion::Depth;
use super::device::{AsyncEvent, AsyncEvents, Source};
use super::events::Unacknowledged;
use super::memory::{Access, Domain, Regions, Unreachable};
use super::wire::Remote;
use carrack_transports::verbs::sys::bindings as ibv;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// A piece of registered memory, as in an `ibv_sge`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) at: Remote,
    pub(super) len: u32,
}

/// Returns the bytes of all pieces.
pub(super) fn length(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

/// Returns the parts of pieces from `offset` on, `len` bytes in all.
pub(super) fn parts(pieces: &[Piece], offset: u64, len: u64) -> impl Iterator<Item = Piece> {
    let mut skip = offset;
    let mut left = len;
    pieces.iter().filter_map(move |piece| {
        let ahead = skip.min(u64::from(piece.len));
        skip -= ahead;
        let take = left.min(u64::from(piece.len) - ahead);
        left -= take;
        let at = Remote { addr: piece.at.addr.wrapping_add(ahead), key: piece.at.key };
        (take > 0).then(|| Piece { at, len: u32::try_from(take).unwrap_or(u32::MAX) })
    })
}

/// Reads bytes out of pieces.
pub(super) fn gather(
    regions: &Regions,
    domain: Domain,
    pieces: &[Piece],
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, Unreachable> {
    let mut bytes = vec![0; len];
    let mut rest = bytes.as_mut_slice();
    for part in parts(pieces, offset, len as u64) {
        let (now, later) = rest.split_at_mut(part.len as usize);
        regions.read(domain, part.at, Access::NONE, now)?;
        rest = later;
    }
    Ok(bytes)
}

/// Writes bytes into pieces that have room for them.
pub(super) fn scatter(
    regions: &Regions,
    domain: Domain,
    pieces: &[Piece],
    offset: u64,
    bytes: &[u8],
) -> Result<(), Unreachable> {
    let mut rest = bytes;
    for part in parts(pieces, offset, bytes.len() as u64) {
        let (now, later) = rest.split_at(part.len as usize);
        regions.write(domain, part.at, Access::LOCAL_WRITE, now)?;
        rest = later;
    }
    Ok(())
}

/// A receive that was posted.
#[derive(Clone, Debug)]
pub(super) struct Receive {
    pub(super) id: u64,
    pub(super) pieces: Vec<Piece>,
}

#[derive(Debug, Default)]
struct PostedReceives {
    queue: VecDeque<Receive>,
    /// The program gets an event, once, when fewer receives than this are left.
    limit: u32,
}

/// A receive queue.
#[derive(Debug)]
pub(super) struct ReceiveQueue {
    inner: Mutex<PostedReceives>,
    pub(super) depth: Arc<Depth>,
    pub(super) domain: Domain,
    pub(super) max_work: u32,
    pub(super) max_pieces: u32,
    /// The program's name of a shared one: the address of its `ibv_srq`.
    pub(super) handle: AtomicUsize,
    pub(super) given: Unacknowledged,
    /// Queue pairs that receive from a shared one.
    pub(super) users: AtomicUsize,
    events: AsyncEvents,
}

impl ReceiveQueue {
    pub(super) fn new(
        domain: Domain,
        max_work: u32,
        max_pieces: u32,
        events: AsyncEvents,
    ) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            depth: Depth::new(max_work),
            domain,
            max_work,
            max_pieces,
            handle: AtomicUsize::new(0),
            given: Unacknowledged::default(),
            users: AtomicUsize::new(0),
            events,
        })
    }

    /// Adds a receive.
    ///
    /// # Errors
    /// EINVAL: too many pieces. ENOMEM: there is no place.
    pub(super) fn post(&self, receive: Receive) -> Result<(), Errno> {
        if receive.pieces.len() > self.max_pieces as usize {
            return Err(Errno::INVAL);
        }
        let mut inner = self.inner.lock();
        self.depth.take().ok_or(Errno::NOMEM)?;
        inner.queue.push_back(receive);
        Ok(())
    }

    /// Takes the next receive.
    pub(super) fn take(self: &Arc<Self>) -> Option<Receive> {
        let mut inner = self.inner.lock();
        let receive = inner.queue.pop_front()?;
        if inner.queue.len() < inner.limit as usize {
            inner.limit = 0;
            let source = Source::Receives(Arc::clone(self));
            self.events.push(AsyncEvent { kind: ibv::IBV_EVENT_SRQ_LIMIT_REACHED, source });
        }
        Some(receive)
    }

    /// Sets the limit for the event of few receives. 0: no event.
    pub(super) fn set_limit(&self, limit: u32) {
        self.inner.lock().limit = limit;
    }

    /// Removes all receives, without completions.
    pub(super) fn clear(&self) {
        self.inner.lock().queue.clear();
        self.depth.clear();
    }
}
