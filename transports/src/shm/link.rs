//! The sending side: inline into the ring, or through a chunk.

#![expect(unsafe_code, reason = "the ends of a ring in shared memory")]

use super::Shm;
use super::answer;
use super::chunks::SenderChunks;
use super::device::{ShmShared, is_dead};
use super::handshake::{HandshakeMessage, ShmAddress, greeting};
use super::kernel_copy::{KernelCopy, is_this_process};
use super::segment::{BellPage, Segment, SegmentSlots};
use super::source::{ChunkPlace, KIND_CHUNK, KIND_INLINE};
use crate::contract::{
    Busy, DownCause, Header, Link, Op, PeerId, PeerMemory, Short, Splits, Submit, SubmitError,
};
use crate::fork::Owner;
use crate::mem::{MapError, MemRef, copy::copy_now};
use crate::net::greeting::{Failure, Greeting, Progress};
use crate::net::is_shortage;
use crate::net::packets::{Channel, ConnectError, Received};
use crate::net::proof::{Role, Unproven};
use crate::net::watched::Watched;
use crate::sync::BiasedLock;
use crate::sync::ring::{FIRST, MAX_PAYLOAD, Producer, PushError};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::sync::{Arc, OnceLock};
use zerocopy::IntoBytes;

/// Repeated calls of a receiver that hangs up during the greeting: it may have made room for
/// others.
const CALLS_AGAIN: u8 = 20;

const CONNECTING: u8 = 0;
const UP: u8 = 1;
const DOWN: u8 = 2;

/// A link's sending end, shared by the link and its device.
#[derive(Debug)]
pub(super) struct SendingEnd {
    pub(super) peer: PeerId,
    /// `true` if the kernel may copy from and to the peer's memory.
    kernel_copy: bool,
    state: AtomicU8,
    down: OnceLock<DownCause>,
    /// Reason why it can never come up, until that is reported.
    doomed: OnceLock<DownCause>,
    sender: BiasedLock<Sender>,
}

#[derive(Debug)]
struct Sender {
    address: ShmAddress,
    /// A channel to a process of this user, in the epoll set.
    channel: Option<Watched<Channel>>,
    /// Greeting, until both sides are proved.
    greeting: Option<Box<Greeting>>,
    is_proven: bool,
    calls_again: u8,
    /// Descriptor that is readable when the receiver's process is dead.
    process: Option<Watched<Arc<OwnedFd>>>,
    segment: Arc<Segment>,
    /// The segment's descriptor, until the hello is sent.
    segment_fd: Option<OwnedFd>,
    /// The welcome's numbers and descriptors, while the page of bells cannot be mapped.
    welcome: Option<Box<Welcome>>,
    producer: Producer<SegmentSlots>,
    chunks: SenderChunks,
    receiver: Option<Receiver>,
}

/// Result of an attempt to send the hello.
#[derive(Debug)]
pub(super) enum Dialled {
    /// The hello was sent.
    Yes,
    /// A resource is short: try again.
    Short(Errno),
}

/// The reason why the hello was not sent.
enum Unsaid {
    /// Something is short: try again.
    Short(Errno),
    /// The peer cannot be reached.
    Down(DownCause),
}

impl Unsaid {
    /// Makes the reason of a failed system call: a shortage, or the end of the link.
    fn of(what: &str, error: ConnectError) -> Self {
        match error {
            ConnectError::System(error) if is_shortage(error) => Self::Short(error),
            error => Self::Down(DownCause::Gone(format!("{what}: {error}"))),
        }
    }
}

/// Content of the receiver's welcome.
#[derive(Debug)]
struct Welcome {
    bell: u32,
    fenced: bool,
    fds: [OwnedFd; 2],
}

/// The receiver, as opened from its welcome.
#[derive(Debug)]
struct Receiver {
    page: Arc<BellPage>,
    wake: OwnedFd,
    bell: u32,
    /// `true` if a real fence is needed before the check for the receiver's attention.
    fenced: bool,
}

impl SendingEnd {
    /// Makes a sending end that is not connected yet.
    pub(super) fn new(peer: PeerId, address: ShmAddress, transport: &Shm) -> Result<Self, Errno> {
        let (segment, fd) = Segment::create(transport.geometry)?;
        // SAFETY: the segment is fresh, and this is its only producer.
        let producer = unsafe { Producer::new(SegmentSlots::of(segment.clone())) };
        Ok(Self {
            peer,
            kernel_copy: transport.kernel_copy,
            state: AtomicU8::new(CONNECTING),
            down: OnceLock::new(),
            doomed: OnceLock::new(),
            sender: BiasedLock::new(Sender {
                address,
                channel: None,
                greeting: None,
                is_proven: false,
                calls_again: 0,
                process: None,
                segment,
                segment_fd: Some(fd),
                welcome: None,
                producer,
                chunks: SenderChunks::new(transport.geometry.chunks),
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

    /// Marks that it can never come up: the next dial reports it.
    pub(super) fn doom(&self, cause: DownCause) {
        let _ = self.doomed.set(cause);
    }

    /// Sends the hello to the receiver, unless that is done.
    pub(super) fn dial(&self, shared: &ShmShared, index: u32) -> Result<Dialled, DownCause> {
        if let Some(cause) = self.doomed.get() {
            return Err(cause.clone());
        }
        self.sender.lock().dial(self.peer, shared, index)
    }

    /// Handles a message of the receiver. `Some(Ok)`: it is up now. `Some(Err)`: it is down now.
    pub(super) fn listen(&self, shared: &ShmShared) -> Option<Result<(), DownCause>> {
        let mut sender = self.sender.lock();
        if self.is_down() {
            return None;
        }
        let sender = &mut *sender;
        let cause = match sender.hear(self.peer, shared) {
            Ok(true) => {
                self.state.store(UP, Ordering::Release);
                return Some(Ok(()));
            }
            Ok(false) => return None,
            Err(cause) => cause,
        };
        self.end(sender, &cause);
        Some(Err(cause))
    }

    /// Ends the link, with or without a message to the receiver.
    pub(super) fn close(&self, cause: &DownCause, say_bye: bool) {
        let mut sender = self.sender.lock();
        if say_bye && let Some(channel) = &sender.channel {
            // If the socket is full or gone, the hang-up tells it, too.
            let _ = channel.send(&HandshakeMessage::Bye.encode(), &[]);
        }
        self.end(&mut sender, cause);
    }

    fn end(&self, sender: &mut Sender, cause: &DownCause) {
        let _ = self.down.set(cause.clone());
        self.state.store(DOWN, Ordering::Release);
        (sender.channel, sender.process, sender.segment_fd, sender.welcome) =
            (None, None, None, None);
        sender.greeting = None;
    }

    /// Returns `true` if the receiver has answered: from then on it can revoke this rank's access.
    /// The state alone does not tell, since it is down once the link has ended.
    pub(super) fn has_answered(&self) -> bool {
        self.sender.lock().receiver.is_some()
    }

    fn peer_memory(self: &Arc<Self>) -> Result<Arc<dyn PeerMemory>, String> {
        if !self.kernel_copy {
            return Err("CARRACK_KERNEL_COPY=off".into());
        }
        let sender = self.sender.lock();
        // Before the hello was sent there may be no handle to the process yet.
        let is_said = sender.segment_fd.is_none();
        let channel =
            sender.channel.as_ref().filter(|_| is_said).ok_or("it is not connected yet")?;
        let peer = channel
            .peer()
            .map_err(|error| format!("the kernel does not say who it is: {error}"))?;
        if peer.pid == 0 {
            return Err("it is in a pid namespace that this rank does not see".into());
        }
        let (process, segment) = (sender.process.as_deref().cloned(), sender.segment.clone());
        Ok(Arc::new(KernelCopy::of(peer.pid, process, segment, Arc::downgrade(self))))
    }

    /// Sends a message that takes more than a slot. Apart, so that shorter ones do not pay for it.
    #[inline(never)]
    fn send_several(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        match self.send(Header(header.into()), MemRef::host(bytes)) {
            Ok(Submit::Done) => Short::Done,
            Ok(Submit::Busy(busy)) => Short::Busy(busy),
            _ => Short::Ask,
        }
    }

    #[cold]
    fn not_up(&self) -> Result<Submit, SubmitError> {
        match self.down.get() {
            Some(cause) if self.is_down() => {
                Err(SubmitError::Down { peer: self.peer, cause: cause.clone() })
            }
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
        let Some(pushed) = sender.push(header, bytes) else {
            return Ok(Submit::Busy(Busy::NoPacket));
        };
        match pushed {
            Ok(()) => {
                sender.after_push(self.peer);
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
    /// Goes through the steps as far as possible, and continues from there the next time. The
    /// error comes with the name of the failed step.
    fn dial(&mut self, peer: PeerId, shared: &ShmShared, index: u32) -> Result<Dialled, DownCause> {
        match self.connect(shared, index).and_then(|()| self.say_hello(peer, shared)) {
            Ok(()) => Ok(Dialled::Yes),
            Err(Unsaid::Short(error)) => Ok(Dialled::Short(error)),
            Err(Unsaid::Down(cause)) => Err(cause),
        }
    }

    /// Calls the receiver, unless that is done.
    fn connect(&mut self, shared: &ShmShared, index: u32) -> Result<(), Unsaid> {
        if self.channel.is_none() && self.segment_fd.is_some() {
            let channel = Channel::connect(&self.address.name);
            let channel =
                channel.map_err(|error| Unsaid::of("it does not listen at its address", error))?;
            let watched = shared.watch_outgoing(index, channel.as_fd());
            watched.map_err(|error| Unsaid::of("epoll refused its socket", error.into()))?;
            self.channel = Some(shared.watched(channel));
        }
        let Some(channel) = &self.channel else { return Ok(()) };
        if self.process.is_none() && self.segment_fd.is_some() {
            let watched = channel.peer_process().and_then(|process| {
                shared.watch_outgoing(index, process.as_fd())?;
                Ok(process)
            });
            match watched {
                Ok(process) => self.process = Some(shared.watched(Arc::new(process))),
                Err(error) if is_shortage(error) => return Err(Unsaid::Short(error)),
                // Another pid namespace, or an old kernel: the socket's hang-up must do.
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Goes on with the greeting, and says hello when both sides are proved.
    fn say_hello(&mut self, peer: PeerId, shared: &ShmShared) -> Result<(), Unsaid> {
        let (Some(segment_fd), Some(channel)) = (&self.segment_fd, &mut self.channel) else {
            return Ok(());
        };
        if !self.is_proven {
            let begun = match self.greeting.take() {
                Some(greeting) => greeting,
                None => Box::new(
                    greeting(Role::Dialer, &shared.identity)
                        .map_err(|error| Unsaid::of("no random bytes", error.into()))?,
                ),
            };
            let claim = match self.greeting.insert(begun).advance(&mut **channel) {
                Ok(Progress::Waiting) => return Ok(()),
                Ok(Progress::Short(error)) => return Err(Unsaid::Short(error)),
                Ok(Progress::Proven(claim)) => claim,
                Err(failure) => return self.not_proven(failure, shared),
            };
            if claim.rank.get() != peer.0 {
                let rank = claim.rank;
                let why = format!("it is rank {rank}, and not {peer}, as its address says");
                return Err(Unsaid::Down(DownCause::Protocol(why)));
            }
            (self.greeting, self.is_proven) = (None, true);
        }
        let hello = HandshakeMessage::Hello { geometry: self.segment.geometry() };
        let said = channel.send(&hello.encode(), &[segment_fd.as_fd()]);
        said.map_err(|error| Unsaid::of("saying hello failed", error.into()))?;
        self.segment_fd = None;
        Ok(())
    }

    /// Returns the cause of a failed greeting as an error. A receiver that has only hung up is
    /// called again instead.
    fn not_proven(&mut self, failure: Failure, shared: &ShmShared) -> Result<(), Unsaid> {
        let cause = match failure {
            Failure::Gone(_) if self.calls_again < CALLS_AGAIN && !self.is_receiver_dead() => {
                self.calls_again += 1;
                (self.channel, self.greeting, self.process) = (None, None, None);
                shared.try_again();
                return Ok(());
            }
            Failure::Gone(why) => DownCause::Gone(why),
            Failure::Unproven(Unproven::Refused(why)) => DownCause::Refused(why),
            Failure::Unproven(Unproven::Bye) => DownCause::Closed,
            Failure::Unproven(why) => DownCause::Protocol(why.to_string()),
        };
        Err(Unsaid::Down(cause))
    }

    fn is_receiver_dead(&self) -> bool {
        self.process.as_ref().is_some_and(|process| is_dead(process.as_fd()))
    }

    /// Handles a message of the receiver. Returns `true` if it is a welcome.
    fn hear(&mut self, peer: PeerId, shared: &ShmShared) -> Result<bool, DownCause> {
        if let Some(welcome) = self.welcome.take() {
            return self.enter(*welcome, shared);
        }
        if self.segment_fd.is_some() {
            match self.say_hello(peer, shared) {
                Ok(()) => {}
                Err(Unsaid::Down(cause)) => return Err(cause),
                Err(Unsaid::Short(error)) => {
                    shared.shortage.note(error);
                    shared.try_again();
                }
            }
            if self.segment_fd.is_some() {
                return match self.is_receiver_dead() {
                    true => Err(DownCause::Gone("its process has ended".into())),
                    false => Ok(false),
                };
            }
        }
        let Some(channel) = &self.channel else { return Ok(false) };
        let mut bytes = [0; super::handshake::MAX_MESSAGE];
        match channel.receive(&mut bytes) {
            Ok(Received::Nothing) => match &self.process {
                Some(process) if is_dead(process.as_fd()) => {
                    Err(DownCause::Gone("its process has ended".into()))
                }
                _ => Ok(false),
            },
            Ok(Received::Closed) => Err(DownCause::Gone("its socket hung up".into())),
            // The message stays, and the epoll set keeps reporting it.
            Err(error) if is_shortage(error) => {
                shared.shortage.note(error);
                Ok(false)
            }
            Err(error) => Err(DownCause::Protocol(format!("its socket failed: {error}"))),
            Ok(Received::Message(len, fds)) => match HandshakeMessage::decode(&bytes[..len]) {
                Ok(HandshakeMessage::Welcome { bell, fenced }) if self.receiver.is_none() => {
                    let fds = fds.try_into().map_err(|fds: Vec<_>| {
                        DownCause::Protocol(format!(
                            "its welcome came with {} descriptors",
                            fds.len()
                        ))
                    })?;
                    self.enter(Welcome { bell, fenced, fds }, shared)
                }
                Ok(HandshakeMessage::Refusal(why)) => Err(DownCause::Refused(why)),
                Ok(HandshakeMessage::Bye) => Err(DownCause::Closed),
                Ok(other) => Err(DownCause::Protocol(format!("it sent {other:?} out of turn"))),
                Err(why) => Err(DownCause::Protocol(why)),
            },
        }
    }

    fn enter(&mut self, welcome: Welcome, shared: &ShmShared) -> Result<bool, DownCause> {
        match BellPage::open(&welcome.fds[0]) {
            Ok(page) => {
                self.receiver =
                    Some(Receiver::new(page, welcome, shared).map_err(DownCause::Protocol)?);
                Ok(true)
            }
            Err(MapError::Lacking(error)) => {
                shared.shortage.note(error);
                shared.try_again();
                self.welcome = Some(Box::new(welcome));
                Ok(false)
            }
            Err(MapError::Refused(why)) => Err(DownCause::Protocol(why)),
        }
    }

    /// Tells the receiver of a pushed record, unless it looks by itself. Notes the next slot.
    #[inline(always)]
    fn after_push(&self, peer: PeerId) {
        answer::sent(peer, || self.producer.next_control());
        if let Some(receiver) = &self.receiver
            && self.segment.attention().is_needed(receiver.fenced)
        {
            receiver.tell();
        }
    }

    /// Sends a message in slots or through a chunk. `None`: no chunk is free.
    #[inline(always)]
    fn push(&mut self, header: Header, bytes: MemRef<'_>) -> Option<Result<(), PushError>> {
        if bytes.len() <= MAX_PAYLOAD {
            return Some(self.producer.push(KIND_INLINE, header.0, bytes));
        }
        self.push_chunk(header, bytes)
    }

    /// Sends a message through a chunk. `None`: no chunk is free.
    ///
    /// Inlined, so that its result stays in registers: a load of it from memory would wait until
    /// the copy's stores have reached the cache.
    #[inline(always)]
    fn push_chunk(&mut self, header: Header, bytes: MemRef<'_>) -> Option<Result<(), PushError>> {
        let chunk = self.chunks.next(&self.segment)?;
        let target = self.segment.chunk_mut(chunk)?;
        self.producer.will_push();
        if bytes.len() > target.len() || copy_now(target, bytes).is_err() {
            return Some(Err(PushError::Unfit));
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let place = ChunkPlace { chunk: chunk.into(), len: len.into() };
        let pushed = self.producer.push(KIND_CHUNK, header.0, MemRef::host(place.as_bytes()));
        if pushed.is_ok() {
            self.chunks.sent(chunk, bytes.len(), &self.segment);
        }
        Some(pushed)
    }
}

impl Receiver {
    fn new(page: BellPage, welcome: Welcome, shared: &ShmShared) -> Result<Self, String> {
        let Welcome { bell, fenced, fds: [_, wake] } = welcome;
        check_eventfd(wake.as_fd())?;
        Ok(Self { page: Arc::new(page), wake, bell, fenced: fenced || !shared.barrier.reachable })
    }

    #[cold]
    fn tell(&self) {
        self.page.bells().ring(self.bell);
        // Both sides have a full fence between their store and their load. So either the receiver,
        // going to sleep, finds the bell, or this side finds it asleep.
        fence(Ordering::SeqCst);
        let asleep = self.page.asleep();
        if asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0 {
            // A full eventfd is readable, too, which is all that is needed.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// Checks that a descriptor is an eventfd, and that a write to it does not block. A pipe or a
/// socket could be kept full by its other end.
fn check_eventfd(fd: BorrowedFd<'_>) -> Result<(), String> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let kind = rustix::fs::readlink(&path, Vec::new());
    let kind =
        kind.map_err(|error| format!("its wake-up descriptor cannot be examined: {error}"))?;
    // No file has such a name: those begin with a slash.
    if kind.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(format!(
            "its wake-up descriptor is no eventfd, but {}",
            kind.to_string_lossy()
        ));
    }
    let flags = rustix::fs::fcntl_getfl(fd);
    let flags = flags.map_err(|error| format!("its eventfd cannot be examined: {error}"))?;
    if flags.contains(OFlags::NONBLOCK) { Ok(()) } else { Err("its eventfd blocks".into()) }
}

/// The handle that the runtime holds.
#[derive(Debug)]
pub(super) struct ShmLink {
    pub(super) outgoing: Arc<SendingEnd>,
    /// A fork's copy of the link ends nothing.
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
            Op::Put { .. } | Op::Get { .. } | Op::Atomic { .. } => {
                Err(SubmitError::no_remote_memory())
            }
        }
    }

    #[inline]
    fn am_short(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        let outgoing = &*self.outgoing;
        if bytes.len() > FIRST {
            return outgoing.send_several(header, bytes);
        }
        if !outgoing.is_up() {
            return Short::Ask;
        }
        let Some(mut sender) = outgoing.sender.try_lock() else { return Short::Busy(Busy::Lock) };
        let sender = &mut *sender;
        match sender.producer.push(KIND_INLINE, header.into(), MemRef::host(bytes)) {
            Ok(()) => {
                sender.after_push(outgoing.peer);
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
        // A peer in this process would have to write to it: see `PeerMemory::write`.
        let peer = sender.channel.as_ref().and_then(|channel| channel.peer().ok());
        peer.is_none_or(|peer| !is_this_process(peer.pid))
            .then(|| sender.segment.clone() as Arc<dyn Splits>)
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
