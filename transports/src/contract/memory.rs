//! Memory of this rank that peers reach without its help, and memory of peers that this rank
//! reaches so.

use super::RemotePlace;
use crate::gpu::Gpu;
use crate::mem::{Buffer, Region, WeakRegion, shared::Share};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

/// How peers find a region through one transport. Travels by whatever way the ranks choose; whoever
/// reads it checks it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WireKey(pub Vec<u8>);

/// A region that peers can import. Dropping it ends that: imports that were made find it closed.
pub struct Exported {
    /// What peers need.
    pub key: WireKey,
    _guard: Box<dyn Any + Send + Sync>,
}

impl Exported {
    /// A key, and what ends the export when it is dropped.
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
    /// Where the peer finds it. What it puts there is over for it when it can be seen here, and
    /// this rank does nothing for that.
    fn place(&self) -> RemotePlace;

    /// The same, for a peer that says when it has written, upon which this rank does what
    /// [`flush`](Self::flush) asks for.
    fn place_of_message(&self) -> RemotePlace {
        self.place()
    }

    /// The GPU that has to be told ([`Gpu::flush_remote_writes`]) before what the peer says to have
    /// written can be seen. `None`: nobody has.
    fn flush(&self) -> Option<&Arc<dyn Gpu>> {
        None
    }

    /// Ends that, and gives the buffer back. What the peer writes afterwards comes to nothing, and
    /// breaks its connection.
    fn take_back(self: Box<Self>) -> Buffer;
}

/// A buffer of which one peer's NIC may reach one chunk after the other, until it is taken back: so
/// that a long one is made known to the NIC while its first bytes are on their way.
pub trait ExposedChunks: Send + Sync {
    /// Lets the peer write to and read from `len` bytes, from the buffer's byte `at` on.
    ///
    /// # Errors
    /// Why not, in words; what was shown before stays so.
    fn show(&mut self, at: usize, len: usize) -> Result<RemotePlace, String>;

    /// NICs that chunks are dealt out over at the moment.
    fn nics(&self) -> usize {
        1
    }

    /// Ends that of the chunk that begins at `at`. What the peer writes there afterwards breaks its
    /// connection.
    fn hide(&mut self, at: usize);

    /// Ends it for all that is shown, and gives the buffer back.
    fn take_back(self: Box<Self>) -> Buffer;
}

/// Part of a buffer that is read by several operations at once: whoever made it has it for itself
/// again when they are over.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// All of it.
    pub of: Arc<Buffer>,
    /// Where in it the chunk begins, in bytes.
    pub at: usize,
    /// Bytes of the chunk.
    pub len: usize,
}

/// A peer's region, mapped here: loads, stores and engines reach it as they reach this rank's own.
#[derive(Clone, Debug)]
pub struct Imported {
    region: Region,
    standing: Standing,
    is_own: bool,
}

#[derive(Clone, Debug)]
enum Standing {
    /// As long as the registration of that epoch stands.
    Epoch(Arc<Share>, u64),
    /// As long as the exporter, in this process, keeps its end.
    Guard(Weak<()>),
}

impl Imported {
    /// Memory of another process, whose registration has an epoch. `None` if it cannot be told
    /// whether it stands.
    pub fn mapped(region: Region, epoch: u64) -> Option<Self> {
        let share = region.share()?.clone();
        Some(Self { region, standing: Standing::Epoch(share, epoch), is_own: false })
    }

    /// Memory whose registration has an epoch that stands elsewhere.
    pub fn watched(region: Region, share: Arc<Share>, epoch: u64) -> Self {
        Self { region, standing: Standing::Epoch(share, epoch), is_own: false }
    }

    /// Memory of this very process.
    pub fn own(region: Region, guard: Weak<()>) -> Self {
        Self { region, standing: Standing::Guard(guard), is_own: true }
    }

    /// Notes that it is memory of this very process, which this keeps.
    pub fn of_this_process(self) -> Self {
        Self { is_own: true, ..self }
    }

    /// Whether it is memory of this very process: then this keeps it, whoever else lets go of it.
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// The same, that keeps no memory.
    pub fn downgrade(&self) -> WeakImported {
        let Self { region, standing, is_own } = self;
        WeakImported { region: region.downgrade(), standing: standing.clone(), is_own: *is_own }
    }

    /// The memory, while the peer keeps it registered. Asked before each access: a registration
    /// that ends in the midst of one harms nobody, since the memory stays mapped.
    #[inline]
    pub fn region(&self) -> Option<&Region> {
        let stands = match &self.standing {
            Standing::Epoch(share, epoch) => *epoch != 0 && share.is_open(*epoch),
            Standing::Guard(guard) => guard.strong_count() > 0,
        };
        stands.then_some(&self.region)
    }
}

/// A peer's region that is mapped here as long as somebody else has it.
#[derive(Clone, Debug)]
pub struct WeakImported {
    region: WeakRegion,
    standing: Standing,
    is_own: bool,
}

impl WeakImported {
    /// The region, if anybody still has it.
    pub fn upgrade(&self) -> Option<Imported> {
        let Self { region, standing, is_own } = self;
        Some(Imported { region: region.upgrade()?, standing: standing.clone(), is_own: *is_own })
    }
}
