//! The contract of every transport.
//!
//! Four traits, and plain data between them:
//!
//! - a [`Transport`] lists the devices it can open, or says why there are none;
//! - a [`Domain`] is an opened device: it states its operations, and makes [`Device`]s;
//! - a [`Device`] is one completion queue, ring set or socket set: it has an address, connects,
//!   and is polled;
//! - a [`Link`] leads to one peer's device, and takes operations.
//!
//! # Rules
//!
//! **Threads.** Any thread may call any method. A method that needs a lock tries it. A lost lock
//! is [`Busy::Lock`] or [`Polled::Busy`], never a wait for the holder; the loser may spin for some
//! 0.05 ms.
//!
//! **Outcomes.** A caller's mistake is an `Err` from the call. A later failure (a peer dies, an
//! engine fails) is an [`Event`]. Each operation that was `Posted` ends in exactly one
//! [`Event::Completion`], also when its peer dies and when the device is closed.
//!
//! **Buffers.** An operation either borrows its bytes and needs them no longer when `submit`
//! returns, or it takes an owned [`Buffer`], which its completion returns. So the caller has no
//! lifetimes to promise.
//!
//! **Order.** Messages that were `Done` or `Posted` on one link arrive in that order.
//! [`Device::poll`] yields arrivals in order, and calls its [`Matcher`] before another thread can
//! poll. Work that depends on the order of arrival happens there, all other work after.
//!
//! **Packets.** A device receives into packets of its [`PacketSource`], or in place
//! ([`Payload::Small`]), or lends the sender's own memory ([`Payload::Loan`]). The runtime copies
//! a loan out and drops it soon, because the sender's memory for loans is limited.
//!
//! **Connecting.** [`Device::connect`] never blocks and gives a link at once. Until the peer has
//! answered, operations are [`Busy::Connecting`]; polling advances the handshake. Links are
//! one-way: each side makes its own on first use, so crossing connects need no resolution.
//!
//! **Ordering on events.** A link never waits for a GPU: the runtime parks an operation until its
//! event has fired.
//!
//! **Hostile peers.** Everything that a peer wrote is checked before use. An impossible value ends
//! the link with [`Event::PeerDown`] and [`DownCause::Protocol`]; other links go on.
//!
//! **Sleep.** [`Device::arm`] makes the device's descriptor readable as soon as a poll would find
//! something. It looks once more before it says so. [`Device::disarm`] follows each
//! [`Armed::Wait`].

mod address;
mod caps;
mod closing;
mod event;
mod memory;
mod op;
mod peer_memory;

pub use crate::mem::{Lender, Loan};
pub use crate::sync::Split;
pub use address::{AddressBlob, Cost, DeviceInfo, Identity, PeerId, Reach, Unavailable};
pub use caps::{Caps, Locality};
pub use closing::{Closing, close_all};
pub use event::{
    Armed, Batch, DownCause, Event, Mark, Matcher, OpFailure, Payload, Polled, SmallArrival,
};
pub use memory::{BufferChunk, Exported, Exposed, ExposedChunks, Imported, WeakImported, WireKey};
pub use op::{Busy, Header, Op, OpToken, RemotePlace, Short, Submit, SubmitError, WordChange};
pub use peer_memory::{PeerMemory, PeerMemoryError, Splits};

use crate::gpu::Gpu;
use crate::mem::{Buffer, MapError, PacketSource, Region};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// A kind of transport.
pub trait Transport: Send + Sync {
    /// Returns its name: `loopback`, `shm`. `CARRACK_TRANSPORT` takes the same word.
    fn name(&self) -> &'static str;

    /// Returns `true` if it needs a device that most machines lack, so that its absence is no
    /// reason for a warning.
    fn needs_a_device(&self) -> bool {
        false
    }

    /// Lists the devices that can be opened on this machine, in this rank's order of preference.
    ///
    /// # Errors
    /// The reason why there are none.
    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable>;

    /// Opens one of them, for a rank.
    fn open(&self, device: &DeviceInfo, identity: Identity)
    -> Result<Arc<dyn Domain>, Unavailable>;
}

/// A transport that was opened.
pub trait Domain: Send + Sync {
    /// Returns the operations it can do, with their kinds of memory and sizes.
    fn caps(&self) -> &Caps;

    /// Lets peers reach a region without this rank's help.
    ///
    /// # Errors
    /// The reason, in words for the user, or the resource that this process lacks at the moment.
    /// The runtime then carries out the peers' operations itself.
    fn export(&self, region: &Region) -> Result<Exported, MapError> {
        let _ = region;
        Err("this transport maps no memory".into())
    }

    /// Maps a region that a peer has exported. The key came from outside, so it is checked. GPU
    /// memory is mapped for the engines of the device `near`, if possible.
    ///
    /// # Errors
    /// The reason, or the resource that this process lacks at the moment.
    fn import(&self, key: &WireKey, near: Option<&Arc<dyn Gpu>>) -> Result<Imported, MapError> {
        let _ = (key, near);
        Err("this transport maps no memory".into())
    }

    /// Lets ranks, this one included, do atomic operations ([`Op::Atomic`]) on the words of a
    /// region by this domain's NIC, which becomes the words' coherence owner. Its operations are
    /// atomic among each other, but not with those of CPUs or GPUs. Ranks may write and read the
    /// region, too.
    ///
    /// # Errors
    /// The reason, in words for the user.
    fn expose_words(&self, region: &Region) -> Result<Box<dyn Exposed>, String> {
        let _ = region;
        Err("it has no NIC".into())
    }

    /// Returns the other processes that still map exported memory of this range of addresses.
    fn mapped_by(&self, addr: usize, len: usize) -> Vec<u32> {
        let _ = (addr, len);
        Vec::new()
    }

    /// Describes the way in which this transport's NICs reach GPU memory by themselves. Tries it
    /// if the answer is not known. `None`: it has no NIC.
    ///
    /// # Errors
    /// The reason why they do not, in words.
    fn reaches_gpu(&self, gpu: &dyn Gpu) -> Option<Result<String, String>> {
        let _ = gpu;
        None
    }

    /// Returns `true` if it maps GPU memory of the node's other processes for the engines of this
    /// one.
    fn maps_gpu_memory(&self) -> bool {
        false
    }

    /// Returns `true` if it has devices. A domain without devices only maps memory.
    fn carries_messages(&self) -> bool {
        true
    }

    /// Releases resources that are no longer used. Called now and then.
    fn look_after(&self) {}

    /// Releases the resources of peers that are gone.
    fn a_peer_has_gone(&self) {}

    /// Makes a device, which receives into `packets`.
    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable>;
}

/// One completion queue, ring set or socket set.
pub trait Device: Send + Sync {
    /// Returns the address by which peers find it.
    fn address(&self) -> AddressBlob;

    /// Tells whether it can reach a peer, from the address alone: cheap, and without side effects.
    fn reach(&self, to: &AddressBlob) -> Reach;

    /// Begins a link to a peer's device. Events name the peer `peer`.
    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError>;

    /// Advances communication and fills `batch` up to its limit. If anything is in it, the matcher
    /// gets it, before another thread can poll. A transport may first give messages to the matcher
    /// in place, and no more of a peer than the batch has room for: after [`Polled::Some`] the
    /// batch can be empty. The matcher must not call the device.
    ///
    /// The cost does not grow with the number of peers that are silent.
    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled;

    /// Returns a word that is zero while a poll would find nothing, for a device that this process
    /// alone feeds. It is then not polled.
    fn news(&self) -> Option<Arc<AtomicU32>> {
        None
    }

    /// Returns the words that the peer sees as [`Link::splits`], for messages that go to it.
    /// `None` while no link of the peer leads here.
    fn splits_of(&self, peer: PeerId) -> Option<Arc<dyn Splits>> {
        let _ = peer;
        None
    }

    /// Describes what this process lacks, and connections wait for: a descriptor, or memory.
    fn shortage(&self) -> Option<String> {
        None
    }

    /// Prepares for sleep: see [`Armed`].
    fn arm(&self) -> Armed<'_>;

    /// Ends the preparation: the thread that was told to wait is awake again. `is_told`: the
    /// descriptor has become readable; otherwise it was something else.
    fn disarm(&self, is_told: bool);

    /// Ends a peer's right to copy from and to this process's memory by [`PeerMemory`], for good,
    /// since only a link that has ended needs this. Returns `true` if the peer no longer copies:
    /// buffers that it was told of can then be given back. On `false`, ask again soon.
    fn revoke(&self, peer: PeerId) -> bool {
        let _ = peer;
        true
    }

    /// Begins to close the device, and then advances that: it tells its peers, and sends what it
    /// has taken. The caller submits nothing from then on, and asks again while it is not
    /// [`Closing::Over`].
    fn advance_close(&self) -> Closing {
        self.close();
        Closing::Over
    }

    /// Closes the device, once [`advance_close`](Self::advance_close) is over. Every operation that
    /// was posted then has its completion in the batches of the polls that follow, and peers see
    /// the device gone. Messages that were sent already still arrive. A further call does nothing.
    fn close(&self);
}

/// A way to one peer's device. Dropping it tells the peer.
pub trait Link: Send + Sync {
    /// Takes an operation, or says why it cannot at the moment.
    ///
    /// # Errors
    /// The caller's mistakes, and [`SubmitError::Down`] for a peer that is gone.
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError>;

    /// Submits an [`Op::AmCopied`] of host memory, for the path on which each nanosecond counts.
    /// Arguments and answer, the header's two words included, travel in registers. [`Short::Ask`]
    /// means that nothing was done and that `submit` gives the reason.
    #[inline]
    fn am_short(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        let header = Header(header.into());
        match self.submit(Op::AmCopied { header, bytes: crate::mem::MemRef::host(bytes) }) {
            Ok(Submit::Done) => Short::Done,
            Ok(Submit::Busy(busy)) => Short::Busy(busy),
            _ => Short::Ask,
        }
    }

    /// Does the same where the caller says that more messages follow at once. This message may wait
    /// for them. It leaves when another call submits a message, when the aggregate has no more
    /// room, or when the device is next polled.
    #[inline]
    fn am_more(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        self.am_short(header, bytes)
    }

    /// Returns the peer's memory, if the kernel can copy from and to it: large messages then need
    /// no help of the peer.
    ///
    /// # Errors
    /// The reason, in words for the user.
    fn peer_memory(&self) -> Result<Arc<dyn PeerMemory>, String> {
        Err("this transport moves all bytes itself".into())
    }

    /// Returns the words by which this rank and the peer share the copying of messages from the
    /// peer. `None`: this transport has none.
    fn splits(&self) -> Option<Arc<dyn Splits>> {
        None
    }

    /// Lets the peer write to and read from a buffer of this rank. Dropping the result ends the
    /// exposure and drops the buffer.
    ///
    /// # Errors
    /// The reason, with the buffer.
    fn expose(&self, buffer: Buffer) -> Result<Box<dyn Exposed>, (String, Buffer)> {
        Err(("this transport reaches no memory by itself".into(), buffer))
    }

    /// Lets the peer write to and read from a buffer of this rank, chunk by chunk, with no chunk
    /// shown at first.
    ///
    /// # Errors
    /// The reason, with the buffer.
    fn expose_chunks(&self, buffer: Buffer) -> Result<Box<dyn ExposedChunks>, (String, Buffer)> {
        Err(("this transport reaches no memory by itself".into(), buffer))
    }

    /// Submits an [`Op::Put`] of a part of a buffer: `Posted` or `Busy`. The completion brings no
    /// buffer; before it is given, the link has released its share.
    ///
    /// # Errors
    /// The errors of [`submit`](Self::submit).
    fn put_chunk(
        &self,
        to: RemotePlace,
        chunk: &BufferChunk,
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        let _ = (to, chunk, token);
        Err(SubmitError::no_remote_memory())
    }

    /// Returns `true` if a message that is submitted after a chunk to that place arrives behind
    /// it. If `false`, the bytes are there when the chunk's completion is given.
    fn puts_in_order(&self, to: RemotePlace) -> bool {
        let _ = to;
        true
    }

    /// Returns the largest number of NICs that chunks are distributed over.
    fn nics(&self) -> usize {
        1
    }

    /// Returns `true` if the peer has answered, so that operations are no longer
    /// [`Busy::Connecting`].
    fn is_up(&self) -> bool;
}
