//! What every transport promises.
//!
//! Four traits, and plain data between them:
//!
//! - a [`Transport`] lists what it can open, or says why nothing;
//! - a [`Domain`] is one opened: it knows which operations it can do, and makes devices;
//! - a [`Device`] is one completion queue, ring set or socket set: it has an address, connects, and
//!   is polled;
//! - a [`Link`] leads to one peer's device, and takes operations.
//!
//! # Rules
//!
//! **Threads.** Any thread may call any method. What needs a lock tries it; a lost lock is
//! [`Busy::Lock`] or [`Polled::Busy`], never a wait.
//!
//! **Outcomes.** A caller's mistake is an `Err` from the call. Whatever happens later (a peer dies,
//! an engine fails) is an [`Event`]. Each operation that was `Posted` ends in exactly one
//! [`Event::Completion`], also when its peer dies and when the device is closed.
//!
//! **Buffers.** An operation either borrows its bytes and is over with them when `submit` returns,
//! or it hands over an owned [`Buffer`], which comes back with its completion. So no promise about
//! lifetimes is left to the caller.
//!
//! **Order.** Messages that were `Done` or `Posted` on one link arrive in that order.
//! [`Device::poll`] yields arrivals in order, and runs its `ordered` argument before another thread
//! can poll: what must happen in the order of arrival (matching) happens there, everything else
//! after.
//!
//! **Packets.** A device receives into packets of the [`PacketSource`] it was made with, or in
//! place ([`Payload::Small`]), or lends the sender's own memory ([`Payload::Loan`]), which the
//! runtime copies out and drops soon: the sender has only so much of it.
//!
//! **Connecting.** [`Device::connect`] never blocks and gives a link at once. Until the peer has
//! answered, operations are [`Busy::Connecting`]; polling moves it on. Links are one-way: each side
//! makes its own on first use, so there is no crossing of connects to be resolved.
//!
//! **Ordering on events.** A link never waits for a GPU: the runtime parks an operation until its
//! event has fired.
//!
//! **Hostile peers.** Whatever a peer wrote is checked before it is used. What cannot be right ends
//! the link with [`Event::PeerDown`] and [`DownCause::Protocol`]; other links go on.
//!
//! **Sleep.** [`Device::arm`] makes the device's descriptor readable as soon as a poll would find
//! something, and looks once more before it says so; [`Device::disarm`] follows each
//! [`Armed::Wait`].

mod address;
mod caps;
mod event;
mod memory;
mod op;
mod peer_memory;

pub use crate::mem::{Lender, Loan};
pub use address::{AddressBlob, Cost, DeviceInfo, Identity, PeerId, Reach, Unavailable};
pub use caps::Caps;
pub use event::{Armed, Batch, DownCause, Event, OpFailure, Payload, Polled, SmallArrival};
pub use memory::{Chunk, Exported, Exposed, ExposedChunks, Imported, WeakImported, WireKey};
pub use op::{Busy, Header, Op, OpToken, RemotePlace, Short, Submit, SubmitError, WordChange};
pub use peer_memory::{PeerMemory, PeerMemoryError, Splits};

use crate::gpu::Gpu;
use crate::mem::{Buffer, MapError, PacketSource, Region};
use std::sync::Arc;

/// A kind of transport.
pub trait Transport: Send + Sync {
    /// A word: `loopback`, `shm`. Also what `CARRACK_TRANSPORT` takes.
    fn name(&self) -> &'static str;

    /// What can be opened on this machine, in the order in which this rank would take it.
    ///
    /// # Errors
    /// Why nothing can.
    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable>;

    /// Opens one of them, for a rank.
    fn open(&self, device: &DeviceInfo, identity: Identity)
    -> Result<Arc<dyn Domain>, Unavailable>;
}

/// A transport that was opened.
pub trait Domain: Send + Sync {
    /// Which operations it can do, on which memory, up to which size.
    fn caps(&self) -> &Caps;

    /// Lets peers reach a region without this rank's help.
    ///
    /// # Errors
    /// Why they cannot, in words for the user, or what this process lacks for it now. The runtime
    /// then carries out their operations itself.
    fn export(&self, region: &Region) -> Result<Exported, MapError> {
        let _ = region;
        Err("this transport maps no memory".into())
    }

    /// Maps a region that a peer has exported. The key came from outside: it is checked. Memory of
    /// a GPU is mapped for the engines of the device that is `near`, if that can be.
    ///
    /// # Errors
    /// Why it cannot be mapped, or what this process lacks for it now.
    fn import(&self, key: &WireKey, near: Option<&Arc<dyn Gpu>>) -> Result<Imported, MapError> {
        let _ = (key, near);
        Err("this transport maps no memory".into())
    }

    /// Lets ranks, this one included, do atomic operations on the words of a region
    /// ([`Op::Atomic`]), by the NIC of this domain, which is then the words' one agent: its
    /// operations are atomic among each other, and with nobody else's. They may write and read the
    /// region, too.
    ///
    /// # Errors
    /// Why they cannot, in words for the user.
    fn expose_words(&self, region: &Region) -> Result<Box<dyn Exposed>, String> {
        let _ = region;
        Err("it has no NIC".into())
    }

    /// The other processes that still have memory of this range of addresses mapped, of what was
    /// exported here.
    fn mapped_by(&self, addr: usize, len: usize) -> Vec<u32> {
        let _ = (addr, len);
        Vec::new()
    }

    /// How NICs of this transport's reach memory of a GPU by themselves, in words: tried, where it
    /// is not known. `None`: it has no NIC.
    ///
    /// # Errors
    /// Why they do not, in words.
    fn reaches_gpu(&self, gpu: &dyn Gpu) -> Option<Result<String, String>> {
        let _ = gpu;
        None
    }

    /// Whether it has devices. One that has none only maps memory.
    fn carries_messages(&self) -> bool {
        true
    }

    /// Lets go of what nobody needs any more. Called now and then.
    fn look_after(&self) {}

    /// A peer is gone: lets go of what was its.
    fn somebody_has_gone(&self) {}

    /// A device of its own, which receives into `packets`.
    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable>;
}

/// One completion queue, ring set or socket set.
pub trait Device: Send + Sync {
    /// How peers find it.
    fn address(&self) -> AddressBlob;

    /// Whether it can reach a peer, from the peer's address alone: cheap, and without side effects.
    fn reach(&self, to: &AddressBlob) -> Reach;

    /// Begins a link to a peer's device. `peer` is what events will call it.
    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError>;

    /// Moves things on and fills `batch` up to its limit. If anything was found, `ordered` is
    /// called once, before another thread can poll; it must not call the device.
    ///
    /// The cost does not grow with the number of peers that are silent.
    fn poll(&self, batch: &mut Batch, ordered: &mut dyn FnMut(&mut Batch)) -> Polled;

    /// A peer's words for messages that go to it: what it has from [`Link::splits`]. `None` while
    /// no link of its leads here.
    fn splits_of(&self, peer: PeerId) -> Option<Arc<dyn Splits>> {
        let _ = peer;
        None
    }

    /// Prepares for sleep: see [`Armed`].
    fn arm(&self) -> Armed<'_>;

    /// The thread that was told to wait has woken, for whatever reason.
    fn disarm(&self);

    /// Ends a peer's right to copy from and to this process's memory by [`PeerMemory`]; for good,
    /// since it is of no more use to a link that has ended. Returns `true` if the peer is not
    /// copying any more: then buffers that it was told of can be given back. Else ask again, soon.
    fn revoke(&self, peer: PeerId) -> bool {
        let _ = peer;
        true
    }

    /// Ends it. Afterwards every operation that was posted has its completion in the batches of the
    /// polls that follow, and peers see it gone. What was sent already still arrives.
    fn close(&self);
}

/// A way to one peer's device. Dropping it lets the peer know.
pub trait Link: Send + Sync {
    /// Takes an operation, or says why not now.
    ///
    /// # Errors
    /// The caller's mistakes, and [`SubmitError::Down`] for a peer that is gone.
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError>;

    /// [`Op::AmCopied`] of a few bytes, for the path where each nanosecond counts: arguments and
    /// answer travel in registers, the header's two words among them. [`Short::Ask`] says nothing
    /// was done and `submit` will tell more.
    #[inline]
    fn am_short(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        let header = Header(header.into());
        match self.submit(Op::AmCopied { header, bytes: crate::mem::MemRef::host(bytes) }) {
            Ok(Submit::Done) => Short::Done,
            Ok(Submit::Busy(busy)) => Short::Busy(busy),
            _ => Short::Ask,
        }
    }

    /// The same, where the caller says that more messages follow at once. This one may wait for
    /// them: until a message is submitted by another call, until so many wait that no more go
    /// together, or until the device is next polled.
    #[inline]
    fn am_more(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        self.am_short(header, bytes)
    }

    /// The peer's memory, if the kernel can copy from and to it: large messages then need no help
    /// of the peer's.
    ///
    /// # Errors
    /// Why not, in words for the user.
    fn peer_memory(&self) -> Result<Arc<dyn PeerMemory>, String> {
        Err("this transport moves all bytes itself".into())
    }

    /// Words by which this rank and the peer can share the copying of messages that come from it.
    /// `None`: this transport has none.
    fn splits(&self) -> Option<Arc<dyn Splits>> {
        None
    }

    /// Lets the peer write to and read from a buffer of this rank. Whoever drops what it gets ends
    /// that, buffer and all.
    ///
    /// # Errors
    /// Why not, with the buffer.
    fn expose(&self, buffer: Buffer) -> Result<Box<dyn Exposed>, (String, Buffer)> {
        Err(("this transport reaches no memory by itself".into(), buffer))
    }

    /// Lets the peer write to and read from a buffer of this rank, chunk by chunk: none to begin
    /// with.
    ///
    /// # Errors
    /// Why not, with the buffer.
    fn expose_chunks(&self, buffer: Buffer) -> Result<Box<dyn ExposedChunks>, (String, Buffer)> {
        Err(("this transport reaches no memory by itself".into(), buffer))
    }

    /// [`Op::Put`] of a part of a buffer: `Posted` or `Busy`. The completion brings no buffer;
    /// before it is given, the link has let go of its share.
    ///
    /// # Errors
    /// As of [`submit`](Self::submit).
    fn put_chunk(
        &self,
        to: RemotePlace,
        chunk: &Chunk,
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        let _ = (to, chunk, token);
        Err(SubmitError::no_remote_memory())
    }

    /// Whether a message that is submitted after a chunk to that place arrives behind it. Where
    /// not, the bytes are there when the chunk's completion is given.
    fn puts_in_order(&self, to: RemotePlace) -> bool {
        let _ = to;
        true
    }

    /// NICs that chunks are dealt out over, at most.
    fn nics(&self) -> usize {
        1
    }

    /// Whether the peer has answered, so that operations are no longer [`Busy::Connecting`].
    fn is_up(&self) -> bool;
}
