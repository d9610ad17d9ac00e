//! Transfers that the NIC makes between this rank's memory and a peer's.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::bounces::{Bounce, Bounces};
use super::gpu_memory::{GpuMemory, Registered};
use super::memory::{Area, addresses};
use super::rails::MOST as MOST_RAILS;
use super::sys::{AccessFlags, MemoryRegion, ProtectionDomain, VerbsError};
use super::wishes::Wishes;
use crate::contract::{Event, Exposed, OpFailure, OpToken, RemotePlace};
use crate::gpu::{Gpu, GpuError};
use crate::mem::{Buffer, CopyError, GpuUuid, MemKind, Region, WeakRegion};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Bytes of one request, at most: every device takes them.
pub(super) const PIECE: usize = 1 << 30;

/// Number of regions whose registrations are kept.
const KEPT: usize = 256;

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    /// A transfer to the peer.
    Put,
    /// A transfer from the peer.
    Get,
}

/// A peer's name of memory of this rank: the NIC's remote key, and if writes there need a read
/// behind them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlaceKey {
    pub(super) rkey: u32,
    /// Set for memory where writes become visible out of order, because it is a GPU's or its owner
    /// wished so. A read behind the writes is answered only when they have reached the memory, so
    /// it completes the put.
    pub(super) read_behind: bool,
    /// Number of the owner's NIC that knows the key: 0 is the first.
    pub(super) rail: u8,
    /// Set if the memory holds words, with this NIC as their coherence owner.
    pub(super) words: bool,
}

impl PlaceKey {
    const READ_BEHIND: u64 = 1 << 32;
    const RAIL: u32 = 33;
    const RAILS: u64 = (MOST_RAILS as u64 - 1) << Self::RAIL;
    const WORDS: u64 = 1 << 37;

    pub(super) fn encode(self) -> u64 {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        let bits = bit(self.read_behind, Self::READ_BEHIND) | bit(self.words, Self::WORDS);
        u64::from(self.rkey) | bits | u64::from(self.rail) << Self::RAIL
    }

    /// Decodes a key. Returns `None` if no such key is given out.
    pub(super) fn decode(key: u64) -> Option<Self> {
        let rkey = u32::try_from(key & !(Self::READ_BEHIND | Self::RAILS | Self::WORDS)).ok()?;
        let rail = u8::try_from((key & Self::RAILS) >> Self::RAIL).ok()?;
        let (read_behind, words) = (key & Self::READ_BEHIND != 0, key & Self::WORDS != 0);
        Some(Self { rkey, read_behind, rail, words })
    }
}

/// An operation that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) token: OpToken,
    pub(super) buffer: Buffer,
    /// The GPU to flush before fetched bytes are visible in its memory.
    pub(super) flush: Option<Arc<dyn Gpu>>,
}

/// Reports operations that have ended. Bytes fetched into memory of a GPU are flushed first, once
/// for each GPU.
pub(super) fn told(ended: Vec<Finished>) -> impl Iterator<Item = Event> {
    let mut flushed: Vec<(GpuUuid, Result<(), GpuError>)> = Vec::new();
    let mut flush_once = move |gpu: &dyn Gpu| {
        let uuid = gpu.info().uuid;
        let known =
            flushed.iter().find(|(known, _)| *known == uuid).map(|(_, outcome)| outcome.clone());
        known.unwrap_or_else(|| {
            let outcome = gpu.flush_remote_writes();
            flushed.push((uuid, outcome.clone()));
            outcome
        })
    };
    ended.into_iter().map(move |Finished { token, buffer, flush }| {
        let flushed = flush.map_or(Ok(()), |gpu| flush_once(&*gpu));
        let failed = |cause| {
            OpFailure::Copy(CopyError::Engine { dst: buffer.kind(), src: MemKind::Host, cause })
        };
        let outcome = flushed.map_err(failed).map_err(Box::new);
        Event::Completion { token, buffer, outcome }
    })
}

/// An operation in flight, with all that it needs until it ends.
#[derive(Debug)]
pub(super) struct RdmaTransfer {
    token: OpToken,
    // Before the memory that it may refer to.
    via: Via,
    buffer: Buffer,
}

/// Access of the NIC to the bytes of a transfer.
#[derive(Debug)]
pub(super) enum Via {
    /// Bytes that went with the request.
    Inline,
    /// A bounce buffer. A get's bytes are copied back at its end.
    Bounce(Bounce, Direction),
    /// A word that was changed: the bounce buffer receives its old value.
    Word(Bounce),
    /// The NIC accesses the buffer itself.
    Registration(Arc<Registered>, Direction),
    /// The NIC accesses a part of a shared buffer. The registration is dropped before the memory
    /// that it is about.
    Shared(Arc<Registered>, Arc<Buffer>),
}

impl RdmaTransfer {
    pub(super) fn new(token: OpToken, via: Via, buffer: Buffer) -> Self {
        Self { token, via, buffer }
    }

    /// Ends the operation with success.
    pub(super) fn end(self, bounces: &Bounces) -> Finished {
        let Self { token, via, mut buffer } = self;
        let mut flush = None;
        match via {
            Via::Bounce(bounce, direction) => {
                if direction == Direction::Get {
                    bounces.copy_out(&bounce, &mut buffer);
                }
                bounces.give_back(bounce);
            }
            Via::Word(bounce) => {
                bounces.copy_out(&bounce, &mut buffer);
                if let Buffer::Small(bytes) = &mut buffer
                    && let Ok(word) = bytes.as_mut_slice().try_into()
                {
                    // The NIC has written it in the machine's byte order.
                    let word: &mut [u8; 8] = word;
                    *word = u64::from_ne_bytes(*word).to_le_bytes();
                }
                bounces.give_back(bounce);
            }
            Via::Registration(registered, Direction::Get) => flush = registered.flush.clone(),
            // In this order, and before the end is reported.
            Via::Shared(registered, share) => drop((registered, share)),
            Via::Registration(_, Direction::Put) | Via::Inline => {}
        }
        Finished { token, buffer, flush }
    }

    /// Ends the operation with failure.
    pub(super) fn fail(self, bounces: &Bounces) -> (OpToken, Buffer) {
        let Self { token, via, buffer } = self;
        if let Via::Bounce(bounce, _) | Via::Word(bounce) = via {
            bounces.give_back(bounce);
        }
        (token, buffer)
    }
}

/// Registrations of this rank's memory for its own requests. Those of regions are kept while the
/// region exists. Those of other buffers last for one operation, since the end of such memory is
/// not reported.
#[derive(Debug)]
pub(super) struct Registrations {
    domain: Arc<ProtectionDomain>,
    wishes: Wishes,
    pub(super) gpus: GpuMemory,
    kept: Mutex<HashMap<usize, (WeakRegion, Arc<Registered>)>>,
    /// Memory for bytes that are read and ignored, created when first needed. Peers have no rights
    /// in it.
    nowhere: OnceLock<Result<Area, VerbsError>>,
}

impl Registrations {
    pub(super) fn new(domain: Arc<ProtectionDomain>, wishes: Wishes) -> Self {
        Self {
            wishes,
            gpus: GpuMemory::new(domain.clone()),
            domain,
            kept: Mutex::default(),
            nowhere: OnceLock::new(),
        }
    }

    /// Registers users' host memory.
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register`].
    pub(super) unsafe fn register(
        &self,
        (at, len): (*mut u8, usize),
        kind: MemKind,
        access: AccessFlags,
    ) -> Result<MemoryRegion, String> {
        // SAFETY: passed on.
        let registered = unsafe { self.domain.register(at, len, self.wishes.access(access, kind)) };
        registered.map_err(|error| error.to_string())
    }

    /// Returns the address and key of a byte that is read into and ignored.
    ///
    /// # Errors
    /// The NIC registers no more memory.
    pub(super) fn nowhere(&self) -> Result<(u64, u32), String> {
        let area = self.nowhere.get_or_init(|| Area::new(&self.domain, 1));
        area.as_ref().map(|area| (area.addr(0), area.key())).map_err(VerbsError::to_string)
    }

    /// Returns the registration that contains a part of a buffer.
    ///
    /// # Errors
    /// The memory may move, the buffer has no such part, or the NIC refuses it.
    pub(super) fn of(
        &self,
        (buffer, part): (&Buffer, Range<usize>),
        direction: Direction,
    ) -> Result<Arc<Registered>, String> {
        let Some((base, whole)) = addresses(buffer) else {
            return Err(format!(
                "it is {}, and not memory that stays where it is",
                kind_of(buffer)
            ));
        };
        if part.is_empty() || part.end > whole {
            return Err(format!("it has {whole} bytes, and no part {part:?}"));
        }
        let Buffer::Region(slice) = buffer else {
            let (at, len) = (base.wrapping_add(part.start), part.len());
            // The source of a put may be read-only memory.
            let access = match direction {
                Direction::Put => AccessFlags::LOCAL_READ,
                Direction::Get => AccessFlags::LOCAL_WRITE,
            };
            // SAFETY: the caller keeps the buffer at least as long as the registration.
            return unsafe { self.register((at, len), buffer.kind(), access) }
                .map(|memory| Arc::new(memory.into()));
        };
        let root = slice.region().root();
        let mut kept = self.kept.lock();
        if let Some((region, registration)) = kept.get(&root.addr())
            && region.is_of(root)
        {
            return Ok(registration.clone());
        }
        // Also removes the previous region at this address.
        if kept.len() >= KEPT || kept.contains_key(&root.addr()) {
            kept.retain(|_, (region, _)| !region.is_gone());
        }
        // SAFETY: the operation keeps a part of the region, and with it the whole. A registration
        // that outlives the region is not used: the lookup is by the region itself, and peers have
        // no rights in it.
        let fresh = unsafe {
            match root.kind().is_host() {
                true => {
                    let at = root.addr() as *mut u8;
                    self.register((at, root.len()), root.kind(), AccessFlags::LOCAL_WRITE)
                        .map(Into::into)
                }
                false => {
                    self.gpus.register(root, (root.addr(), root.len()), AccessFlags::LOCAL_WRITE)
                }
            }
        };
        let fresh = Arc::new(fresh?);
        if kept.len() < KEPT {
            kept.insert(root.addr(), (root.downgrade(), fresh.clone()));
        }
        Ok(fresh)
    }

    /// Drops registrations whose regions are gone.
    pub(super) fn look_after(&self) {
        self.kept.lock().retain(|_, (region, _)| !region.is_gone());
    }
}

/// A buffer that a peer may write to and read from.
#[derive(Debug)]
struct ExposedBuffer {
    // Before the memory that it is about.
    registration: Registered,
    buffer: Buffer,
    /// Set if atomic operations are done there.
    words: bool,
    /// Set if writes may arrive in any order. A peer that does not notify then has to read behind
    /// its writes.
    relaxed: bool,
}

impl ExposedBuffer {
    fn at(&self, read_behind: bool) -> RemotePlace {
        let memory = &self.registration.memory;
        let key = PlaceKey { rkey: memory.rkey(), read_behind, rail: 0, words: self.words };
        RemotePlace { addr: memory.addr() as u64, key: key.encode() }
    }
}

impl Exposed for ExposedBuffer {
    fn place(&self) -> RemotePlace {
        self.at(self.registration.flush.is_some() || self.relaxed)
    }

    fn place_of_message(&self) -> RemotePlace {
        self.at(false)
    }

    fn flush(&self) -> Option<&Arc<dyn Gpu>> {
        self.registration.flush.as_ref()
    }

    fn take_back(self: Box<Self>) -> Buffer {
        let Self { registration, buffer, .. } = *self;
        drop(registration);
        buffer
    }
}

/// Exposes a buffer to peers.
///
/// # Errors
/// As for [`Registrations::of`], with the buffer.
pub(super) fn expose(
    registrations: &Registrations,
    mut buffer: Buffer,
) -> Result<Box<dyn Exposed>, (String, Buffer)> {
    let Some((at, len)) = addresses(&buffer).filter(|_| buffer.view_mut().is_some()) else {
        let why = format!(
            "it is {}, and not memory that can be written and stays where it is",
            kind_of(&buffer)
        );
        return Err((why, buffer));
    };
    // No more than the buffer, also of a GPU's memory: a peer with the key reaches all that is
    // registered under it.
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let relaxed = buffer.view().place().is_host() && registrations.wishes.relaxes(access);
    // SAFETY: the buffer is kept, and not accessed, until the registration has ended.
    let registered = unsafe {
        match &buffer {
            Buffer::Region(slice) if !slice.kind().is_host() => {
                registrations.gpus.register(slice.region(), (at.addr(), len), access)
            }
            _ => registrations.register((at, len), buffer.kind(), access).map(Into::into),
        }
    };
    match registered {
        Ok(registration) => {
            Ok(Box::new(ExposedBuffer { registration, buffer, words: false, relaxed }))
        }
        Err(why) => Err((why, buffer)),
    }
}

/// Exposes a region of host memory to peers and to this rank itself, for atomic operations on its
/// words and for other access.
///
/// # Errors
/// It is memory of a GPU, or the NIC refuses it.
pub(super) fn expose_words(
    registrations: &Registrations,
    region: &Region,
) -> Result<Box<dyn Exposed>, String> {
    let buffer = Buffer::Region(region.whole());
    let Some((at, len)) = addresses(&buffer).filter(|_| region.kind().is_host()) else {
        let kind = region.kind();
        return Err(format!(
            "{kind} memory: a NIC does atomic operations on words of host memory only, and there \
            has to be one"
        ));
    };
    let access = AccessFlags::LOCAL_WRITE
        | AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_ATOMIC;
    // SAFETY: the region is kept, through the buffer, until the registration has ended; it hands
    // out no references.
    let registration = unsafe { registrations.register((at, len), region.kind(), access) }?.into();
    Ok(Box::new(ExposedBuffer { registration, buffer, words: true, relaxed: false }))
}

pub(super) fn kind_of(buffer: &Buffer) -> String {
    match buffer {
        Buffer::Small(_) | Buffer::Empty => "a few bytes in place".into(),
        buffer => format!("{} memory", buffer.kind()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_a_place_says_what_may_and_has_to_be_done_there_and_everything_else_is_none() {
        for (rkey, read_behind, rail, words) in [
            (0, false, 0, false),
            (u32::MAX, true, 15, true),
            (7, true, 1, false),
            (7, false, 8, true),
        ] {
            let key = PlaceKey { rkey, read_behind, rail, words };
            assert_eq!(PlaceKey::decode(key.encode()), Some(key));
        }
        assert_eq!(PlaceKey::decode(1 << 38), None);
        assert_eq!(PlaceKey::decode(u64::MAX), None);
    }
}
