//! The sending side: inline into the ring, or through a chunk.

use super::Geometry;
use super::device::{Shared, is_dead};
use super::handshake::{Address, Message};
use super::inbound::{ChunkPlace, KIND_CHUNK, KIND_INLINE};
use super::kernel_copy::{KernelCopy, is_this_process};
use super::segment::{BellPage, MAX_CHUNKS, Segment, SegmentSlots};
use crate::contract::{
    Busy, DownCause, Header, Link, Op, PeerId, PeerMemory, Short, Splits, Submit, SubmitError,
};
use crate::fd_channel::{Channel, Received};
use crate::fork::Owner;
use crate::mem::{MemRef, copy::copy_now};
use crate::sync::BiasedLock;
use crate::sync::ring::{FIRST, MAX_PAYLOAD, Producer, PushError};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::sync::{Arc, OnceLock};

const CONNECTING: u8 = 0;
const UP: u8 = 1;
const DOWN: u8 = 2;

/// A link's sending end, as both the link and the device that looks after it see it.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    state: AtomicU8,
    down: OnceLock<DownCause>,
    /// Why it can never come up, until that has been told.
    doomed: OnceLock<DownCause>,
    sender: BiasedLock<Sender>,
}

#[derive(Debug)]
struct Sender {
    address: Address,
    /// Connected, and the hello could not be sent so far.
    silent: Option<Channel>,
    channel: Option<Channel>,
    /// Readable when the receiver's process is dead.
    process: Option<OwnedFd>,
    segment: Arc<Segment>,
    /// The segment's descriptor, until the receiver has it.
    segment_fd: Option<OwnedFd>,
    producer: Producer<SegmentSlots>,
    /// Chunks that are free, as far as this side knows: one bit each.
    free: u64,
    /// How often each chunk was sent.
    lent: [u32; MAX_CHUNKS as usize],
    receiver: Option<Receiver>,
}

/// What the receiver's welcome brought.
#[derive(Debug)]
struct Receiver {
    page: Arc<BellPage>,
    wake: OwnedFd,
    bell: u32,
    /// Whether a real fence is needed before asking for the receiver's attention.
    fenced: bool,
}

impl Outgoing {
    /// A sending end that is not connected yet.
    pub(super) fn new(peer: PeerId, address: Address, geometry: Geometry) -> Result<Self, Errno> {
        let (segment, fd) = Segment::create(geometry)?;
        // SAFETY: the segment is fresh, and this is its only producer.
        let producer = unsafe { Producer::new(SegmentSlots::of(segment.clone())) };
        Ok(Self {
            peer,
            state: AtomicU8::new(CONNECTING),
            down: OnceLock::new(),
            doomed: OnceLock::new(),
            sender: BiasedLock::new(Sender {
                address,
                silent: None,
                channel: None,
                process: None,
                segment,
                segment_fd: Some(fd),
                producer,
                free: u64::MAX >> (64 - geometry.chunks),
                lent: [0; MAX_CHUNKS as usize],
                receiver: None,
            }),
        })
    }

    pub(super) fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == UP
    }

    pub(super) fn is_down(&self) -> bool {
        self.state.load(Ordering::Acquire) == DOWN
    }

    /// It can never come up: the next dial says so.
    pub(super) fn doom(&self, cause: DownCause) {
        let _ = self.doomed.set(cause);
    }

    /// Tries to reach the receiver's socket. `Ok(false)`: its queue is full, or descriptors cannot be sent now: try again.
    pub(super) fn dial(&self, shared: &Shared, index: u32) -> Result<bool, DownCause> {
        if let Some(cause) = self.doomed.get() {
            return Err(cause.clone());
        }
        let mut sender = self.sender.lock();
        if sender.channel.is_some() {
            return Ok(true);
        }
        let connected = match sender.silent.take() {
            Some(channel) => Ok(channel),
            None => Channel::connect(&sender.address.name),
        };
        let channel = match connected {
            Ok(channel) => channel,
            Err(Errno::AGAIN) => return Ok(false),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                return Err(DownCause::Lacking(error.to_string()));
            }
            Err(error) => return Err(DownCause::Gone(format!("nobody listens at its address: {error}"))),
        };
        let failed = |what: &str, error: Errno| DownCause::Gone(format!("{what}: {error}"));
        let Some(fd) = sender.segment_fd.take() else { return Ok(true) };
        let hello = Message::Hello {
            from: shared.identity.me,
            secret: shared.identity.secret,
            geometry: sender.segment.geometry(),
        };
        match channel.send(&hello.encode(), &[fd.as_fd()]) {
            Ok(()) => {}
            Err(error) if shared.passes(error) => {
                (sender.silent, sender.segment_fd) = (Some(channel), Some(fd));
                return Ok(false);
            }
            Err(error) => return Err(failed("saying hello failed", error)),
        }
        shared
            .watch_outgoing(index, channel.as_fd())
            .map_err(|error| failed("epoll refused its socket", error))?;
        // Without a pidfd (another pid namespace, an old kernel) the socket's hang-up must do.
        sender.process =
            channel.peer_process().ok().filter(|fd| shared.watch_outgoing(index, fd.as_fd()).is_ok());
        sender.channel = Some(channel);
        // Not before: where this was the last descriptor to be had, its place is for what is accepted, not for watching the process.
        drop(fd);
        Ok(true)
    }

    /// Takes in what the receiver says. `Some(Ok)`: it is up now. `Some(Err)`: it is down now.
    pub(super) fn listen(&self, shared: &Shared) -> Option<Result<(), DownCause>> {
        let mut sender = self.sender.lock();
        if self.is_down() {
            return None;
        }
        let sender = &mut *sender;
        let channel = sender.channel.as_ref()?;
        let mut bytes = [0; super::handshake::MAX_MESSAGE];
        let cause = match channel.receive(&mut bytes) {
            Ok(Received::Nothing) => {
                let process = sender.process.as_ref()?;
                if !is_dead(process.as_fd()) {
                    return None;
                }
                DownCause::Gone("its process has ended".into())
            }
            Ok(Received::Closed) => DownCause::Gone("its socket hung up".into()),
            Err(error @ Errno::MFILE) => DownCause::Lacking(error.to_string()),
            Err(error) => DownCause::Protocol(format!("its socket failed: {error}")),
            Ok(Received::Message(len, fds)) => match Message::decode(&bytes[..len]) {
                Ok(Message::Welcome { bell, fenced }) if sender.receiver.is_none() => {
                    match Receiver::new(bell, fenced, fds, shared) {
                        Ok(receiver) => {
                            sender.receiver = Some(receiver);
                            self.state.store(UP, Ordering::Release);
                            return Some(Ok(()));
                        }
                        Err(why) => DownCause::Protocol(why),
                    }
                }
                Ok(Message::Refusal(why)) => DownCause::Refused(why),
                Ok(Message::Bye) => DownCause::Closed,
                Ok(other) => DownCause::Protocol(format!("it sent {other:?} out of turn")),
                Err(why) => DownCause::Protocol(why),
            },
        };
        self.end(sender, &cause);
        Some(Err(cause))
    }

    /// Ends the link, with or without a word to the receiver.
    pub(super) fn close(&self, cause: &DownCause, say_bye: bool) {
        let mut sender = self.sender.lock();
        if say_bye && let Some(channel) = &sender.channel {
            // If the socket is full or gone the hang-up says it too.
            let _ = channel.send(&Message::Bye.encode(), &[]);
        }
        self.end(&mut sender, cause);
    }

    fn end(&self, sender: &mut Sender, cause: &DownCause) {
        let _ = self.down.set(cause.clone());
        self.state.store(DOWN, Ordering::Release);
        // Closing the descriptors takes them out of the epoll set.
        (sender.silent, sender.channel, sender.process, sender.segment_fd) = (None, None, None, None);
    }

    /// Whether the receiver has answered: from then on it can revoke what it lets this rank do. Not by the state alone, which
    /// is down once the link has ended.
    pub(super) fn has_answered(&self) -> bool {
        self.sender.lock().receiver.is_some()
    }

    fn peer_memory(self: &Arc<Self>) -> Result<Arc<dyn PeerMemory>, String> {
        let sender = self.sender.lock();
        let channel = sender.channel.as_ref().ok_or("it is not connected")?;
        let peer = channel.peer().map_err(|error| format!("the kernel does not say who it is: {error}"))?;
        if peer.pid == 0 {
            return Err("it is in a pid namespace that this rank does not see".into());
        }
        let (process, segment) = (channel.peer_process().ok(), sender.segment.clone());
        Ok(Arc::new(KernelCopy::of(peer.pid, process, segment, Arc::downgrade(self))))
    }

    #[cold]
    fn not_up(&self) -> Result<Submit, SubmitError> {
        match self.down.get() {
            Some(cause) if self.is_down() => Err(SubmitError::Down { peer: self.peer, cause: cause.clone() }),
            _ => Ok(Submit::Busy(Busy::Connecting)),
        }
    }

    #[inline]
    fn send(&self, header: Header, bytes: MemRef<'_>) -> Result<Submit, SubmitError> {
        if !self.is_up() {
            return self.not_up();
        }
        let Some(mut sender) = self.sender.try_lock() else { return Ok(Submit::Busy(Busy::Lock)) };
        let sender = &mut *sender;
        let pushed = if bytes.len() <= MAX_PAYLOAD {
            sender.producer.push(KIND_INLINE, header.0, bytes)
        } else {
            match sender.push_chunk(header, bytes) {
                Some(pushed) => pushed,
                None => return Ok(Submit::Busy(Busy::NoPacket)),
            }
        };
        match pushed {
            Ok(()) => {
                sender.tell_if_needed();
                Ok(Submit::Done)
            }
            Err(PushError::Full) => Ok(Submit::Busy(Busy::Full)),
            Err(PushError::Unfit) => {
                let max = sender.segment.geometry().chunk_size as usize;
                Err(SubmitError::TooLong { len: bytes.len(), max })
            }
            Err(PushError::Corrupt(why)) => {
                let cause = DownCause::Protocol(why.to_string());
                self.end(sender, &cause);
                Err(SubmitError::Down { peer: self.peer, cause })
            }
        }
    }
}

impl Sender {
    /// After a record was pushed: tells the receiver, unless it looks by itself.
    #[inline(always)]
    fn tell_if_needed(&self) {
        if let Some(receiver) = &self.receiver
            && self.segment.attention().is_needed(receiver.fenced)
        {
            receiver.tell();
        }
    }

    /// A message through a chunk. `None`: no chunk is free.
    fn push_chunk(&mut self, header: Header, bytes: MemRef<'_>) -> Option<Result<(), PushError>> {
        if self.free == 0 {
            self.free = self.segment.returned(&self.lent);
        }
        // The lowest free one: its lines are likelier to be in a cache than those of the one used longest ago.
        let chunk = (self.free != 0).then(|| self.free.trailing_zeros())?;
        let target = self.segment.chunk_mut(chunk)?;
        if bytes.len() > target.len() || copy_now(target, bytes).is_err() {
            return Some(Err(PushError::Unfit));
        }
        let place = ChunkPlace { chunk, len: u32::try_from(bytes.len()).unwrap_or(u32::MAX) }.encode();
        let pushed = self.producer.push(KIND_CHUNK, header.0, MemRef::host(&place));
        if pushed.is_ok() {
            self.free &= !(1 << chunk);
            if let Some(lent) = self.lent.get_mut(chunk as usize) {
                *lent = lent.wrapping_add(1);
            }
        }
        Some(pushed)
    }
}

impl Receiver {
    fn new(bell: u32, fenced: bool, fds: Vec<OwnedFd>, shared: &Shared) -> Result<Self, String> {
        let [page, wake]: [OwnedFd; 2] = fds
            .try_into()
            .map_err(|fds: Vec<_>| format!("its welcome came with {} descriptors", fds.len()))?;
        let fenced = fenced || !shared.barrier.reachable;
        Ok(Self { page: Arc::new(BellPage::open(&page)?), wake, bell, fenced })
    }

    #[cold]
    fn tell(&self) {
        self.page.bells().ring(self.bell);
        // Either the receiver, going to sleep, finds the bell, or we find it asleep: one of the two, as
        // both have a full fence between their store and their load.
        fence(Ordering::SeqCst);
        let asleep = self.page.asleep();
        if asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0 {
            // A full eventfd is readable, which is all that is wanted of it.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// The handle that the runtime holds.
#[derive(Debug)]
pub(super) struct ShmLink {
    pub(super) outgoing: Arc<Outgoing>,
    /// A fork's copy of it ends nothing.
    pub(super) owner: Owner,
}

impl Link for ShmLink {
    #[inline]
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError> {
        match op {
            Op::AmCopied { bytes, .. } if !bytes.place().is_host() => {
                Err(SubmitError::Kind(bytes.place().kind()))
            }
            Op::AmCopied { header, bytes } => self.outgoing.send(header, bytes),
            Op::AmOwned { header, buffer, .. } => {
                let bytes = buffer.view();
                if !bytes.place().is_host() {
                    return Err(SubmitError::Kind(bytes.place().kind()));
                }
                self.outgoing.send(header, bytes)
            }
            Op::Put { .. } | Op::Get { .. } | Op::Atomic { .. } => Err(SubmitError::no_remote_memory()),
        }
    }

    #[inline]
    fn am_short(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        let outgoing = &*self.outgoing;
        if bytes.len() > FIRST || !outgoing.is_up() {
            return Short::Ask;
        }
        let Some(mut sender) = outgoing.sender.try_lock() else { return Short::Busy(Busy::Lock) };
        let sender = &mut *sender;
        match sender.producer.push(KIND_INLINE, header.into(), MemRef::host(bytes)) {
            Ok(()) => {
                sender.tell_if_needed();
                Short::Done
            }
            Err(PushError::Full) => Short::Busy(Busy::Full),
            Err(_) => Short::Ask,
        }
    }

    fn peer_memory(&self) -> Result<Arc<dyn PeerMemory>, String> {
        self.outgoing.peer_memory()
    }

    fn splits(&self) -> Option<Arc<dyn Splits>> {
        let sender = self.outgoing.sender.lock();
        // A peer of this process would have to write to it: see `PeerMemory::write`.
        let peer = sender.channel.as_ref().and_then(|channel| channel.peer().ok());
        peer.is_none_or(|peer| !is_this_process(peer.pid)).then(|| sender.segment.clone() as Arc<dyn Splits>)
    }

    fn is_up(&self) -> bool {
        self.outgoing.is_up()
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        if self.owner.is_here() && !self.outgoing.is_down() {
            self.outgoing.close(&DownCause::Closed, true);
        }
    }
}
