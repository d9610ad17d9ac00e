//! Memory of this rank that peers reach without its help, and memory of peers that this rank
//! reaches in the same way.

use super::RemotePlace;
use crate::gpu::Gpu;
use crate::mem::{Buffer, Region, WeakRegion, shared::Share};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

/// Key by which peers find a region through one transport. Ranks may send it in any way; its
/// reader checks it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WireKey(pub Vec<u8>);

/// A region that peers can import. Dropping it ends the export: existing imports find it closed.
pub struct Exported {
    /// The key that peers need.
    pub key: WireKey,
    _guard: Box<dyn Any + Send + Sync>,
}

impl Exported {
    /// Joins a key and a guard, whose drop ends the export.
    pub fn new(key: WireKey, guard: impl Any + Send + Sync) -> Self {
        Self { key, _guard: Box::new(guard) }
    }
}

impl fmt::Debug for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exported({} B key)", self.key.0.len())
    }
}

/// A buffer that one peer's NIC may write to and read from, until it is taken back.
pub trait Exposed: Send + Sync {
    /// Returns the place by which the peer finds the buffer. A put of the peer completes when its
    /// bytes can be seen here, and this rank does nothing for it.
    fn place(&self) -> RemotePlace;

    /// Returns the place for a peer that sends a message when it has written; this rank then does
    /// what [`flush`](Self::flush) asks for.
    fn place_of_message(&self) -> RemotePlace {
        self.place()
    }

    /// Returns the GPU that has to be told ([`Gpu::flush_remote_writes`]) before bytes that the
    /// peer says it has written can be seen. `None`: no GPU has to be told.
    fn flush(&self) -> Option<&Arc<dyn Gpu>> {
        None
    }

    /// Ends the exposure and gives the buffer back. What the peer writes afterwards is discarded
    /// and breaks its connection.
    fn take_back(self: Box<Self>) -> Buffer;
}

/// A buffer that one peer's NIC may reach chunk by chunk, until it is taken back. The NIC learns
/// the later chunks of a long buffer while the first bytes travel.
pub trait ExposedChunks: Send + Sync {
    /// Lets the peer write to and read from `len` bytes, from the buffer's byte `at` on.
    ///
    /// # Errors
    /// The reason, in words; chunks that were shown before stay so.
    fn show(&mut self, at: usize, len: usize) -> Result<RemotePlace, String>;

    /// Returns the number of NICs that chunks are distributed over at the moment.
    fn nics(&self) -> usize {
        1
    }

    /// Ends the exposure of the chunk that begins at `at`. What the peer writes there afterwards
    /// breaks its connection.
    fn hide(&mut self, at: usize);

    /// Ends the exposure of all chunks, and gives the buffer back.
    fn take_back(self: Box<Self>) -> Buffer;
}

/// Part of a buffer that several operations read at once. Its maker has the buffer for itself
/// again when they have ended.
#[derive(Clone, Debug)]
pub struct BufferChunk {
    /// The whole buffer.
    pub of: Arc<Buffer>,
    /// Offset of the chunk in the buffer, in bytes.
    pub at: usize,
    /// Bytes of the chunk.
    pub len: usize,
}

/// A peer's region, mapped here: loads, stores and engines reach it like this rank's own.
#[derive(Clone, Debug)]
pub struct Imported {
    region: Region,
    validity: Validity,
    is_own: bool,
}

#[derive(Clone, Debug)]
enum Validity {
    /// The mapping stands as long as the registration of that epoch.
    Epoch(Arc<Share>, u64),
    /// The mapping stands as long as the exporter, in this process, keeps the guard's `Arc`.
    Guard(Weak<()>),
}

impl Imported {
    /// Makes an import of another process's memory, whose registration has an epoch. `None` if the
    /// region has no shared word that says whether the registration stands.
    pub fn mapped(region: Region, epoch: u64) -> Option<Self> {
        let share = region.share()?.clone();
        Some(Self { region, validity: Validity::Epoch(share, epoch), is_own: false })
    }

    /// Makes an import of memory whose registration has an epoch in a share of its own.
    pub fn watched(region: Region, share: Arc<Share>, epoch: u64) -> Self {
        Self { region, validity: Validity::Epoch(share, epoch), is_own: false }
    }

    /// Makes an import of this process's own memory.
    pub fn own(region: Region, guard: Weak<()>) -> Self {
        Self { region, validity: Validity::Guard(guard), is_own: true }
    }

    /// Marks the import as memory of this very process, which the import keeps alive.
    pub fn of_this_process(self) -> Self {
        Self { is_own: true, ..self }
    }

    /// Returns `true` if this is memory of this very process, which then stays alive while this
    /// exists.
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// Returns the same import, without a hold on the memory.
    pub fn downgrade(&self) -> WeakImported {
        let Self { region, validity, is_own } = self;
        WeakImported { region: region.downgrade(), validity: validity.clone(), is_own: *is_own }
    }

    /// Returns the memory, while the peer keeps it registered. The caller asks before each access.
    /// A registration that ends during an access does no harm, since the memory stays mapped.
    #[inline]
    pub fn region(&self) -> Option<&Region> {
        let stands = match &self.validity {
            Validity::Epoch(share, epoch) => *epoch != 0 && share.is_open(*epoch),
            Validity::Guard(guard) => guard.strong_count() > 0,
        };
        stands.then_some(&self.region)
    }
}

/// A peer's region that stays mapped here only while another [`Imported`] holds it.
#[derive(Clone, Debug)]
pub struct WeakImported {
    region: WeakRegion,
    validity: Validity,
    is_own: bool,
}

impl WeakImported {
    /// Returns the region, if an [`Imported`] still holds it.
    pub fn upgrade(&self) -> Option<Imported> {
        let Self { region, validity, is_own } = self;
        Some(Imported { region: region.upgrade()?, validity: validity.clone(), is_own: *is_own })
    }
}
