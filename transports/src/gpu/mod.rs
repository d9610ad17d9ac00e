//! GPUs behind one trait.
//!
//! | module | which |
//! |---|---|
//! | [`none`] | no GPU: every answer says so; what a machine without a driver gets |
//! | [`fake`] | simulated GPUs, whose memory really faults when the CPU touches it |
//!
//! A [`Driver`] lists [`Gpu`]s and tells what an address is; a [`Gpu`] allocates, copies, and exports
//! its memory; a [`Stream`] orders work; an [`Event`] says that work is over. The CUDA driver will be
//! one more module of this kind.

pub mod fake;
pub mod none;

use crate::mem::{AllocId, GpuUuid, MemKind, Region};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A driver: the devices that this process can see, and what an address is.
///
/// Any thread may call any method.
pub trait Driver: Send + Sync + fmt::Debug {
    /// A word for reports: `none`, `fake (simulated)`, `cuda`.
    fn name(&self) -> &'static str;

    /// The devices that this process can see, in this process's order.
    ///
    /// # Errors
    /// Why there are none, in words for a person.
    fn devices(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError>;

    /// What the memory at `addr` is. `None` for an address that this driver knows nothing of, which is
    /// host memory.
    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError>;
}

/// What a driver knows of an address.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Where the allocation starts.
    pub base: usize,
    /// Its length in bytes.
    pub len: usize,
    /// What it is.
    pub kind: MemKind,
    /// Which allocation it is; the same address allocated again has another.
    pub id: AllocId,
    /// The device that owns it.
    pub gpu: Arc<dyn Gpu>,
    /// The context it was allocated in; `None` for VMM and pool memory (gpu.md, VMM rule 1), which is
    /// no error.
    pub context: Option<u64>,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its own name, everywhere the same.
    pub uuid: GpuUuid,
    /// Its number in this process; another process may count otherwise.
    pub ordinal: u32,
    /// A product name.
    pub name: String,
    /// Where it sits: `domain:bus:device.function`.
    pub pci: String,
    /// Memory in bytes.
    pub memory: u64,
    /// Whether it is simulated. Said wherever the device is named.
    pub simulated: bool,
}

/// How memory is to be allocated, which decides how it can be exported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Flavour {
    /// As `cuMemAlloc` does: exported as plain bytes.
    Plain,
    /// As the VMM calls do: exported as a file descriptor; no context.
    Shareable,
}

/// One device. Any thread may call any method.
pub trait Gpu: Send + Sync + fmt::Debug {
    /// What it is.
    fn info(&self) -> &GpuInfo;

    /// Allocates `len` bytes of its memory.
    fn allocate(&self, len: usize, flavour: Flavour) -> Result<Region, GpuError>;

    /// Starts a copy on a stream of the library's own (never one of the user's, never the default
    /// stream: gpu.md, streams rule 1). The event fires when the bytes are there.
    ///
    /// # Safety
    /// `len` bytes are valid at both addresses, of the kinds given, until the event has fired.
    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<Event, GpuError>;

    /// A stream of the user's own.
    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError>;

    /// Whether this device's engine reaches the memory of `peer` directly.
    ///
    /// # Errors
    /// Why not.
    fn reaches(&self, peer: GpuUuid) -> Result<(), GpuError>;

    /// Makes a handle by which another process can open `region`.
    fn export(&self, region: &Region, form: HandleForm) -> Result<Handle, GpuError>;

    /// Opens a handle that another process has made. The region covers the whole allocation (legacy IPC
    /// rule 1) and is closed when its last clone is dropped.
    fn open(&self, handle: &Handle) -> Result<Region, GpuError>;
}

/// Work in order.
pub trait Stream: Send + Sync + fmt::Debug {
    /// An event that fires when all work given to the stream so far is over.
    fn record(&self) -> Result<Event, GpuError>;

    /// Lets later work on this stream begin only after `event` has fired.
    fn wait(&self, event: &Event) -> Result<(), GpuError>;

    /// Blocks until all work given so far is over.
    fn synchronize(&self) -> Result<(), GpuError>;
}

/// The two forms that a handle has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HandleForm {
    /// Plain bytes, as legacy CUDA IPC has them.
    Bytes,
    /// A file descriptor, as VMM has it; travels by `SCM_RIGHTS` (VMM rule 4).
    Fd,
}

/// How another process names an allocation.
#[derive(Debug)]
pub enum Handle {
    /// Plain bytes.
    Bytes([u8; 64]),
    /// A descriptor, with the length and identity that a descriptor alone does not tell.
    Fd {
        /// The memory.
        fd: OwnedFd,
        /// Its length in bytes.
        len: usize,
        /// Its identity at the exporter.
        id: AllocId,
        /// The device that owns it.
        gpu: GpuUuid,
    },
}

/// Something that will have happened: an engine's copy, or all work of a stream up to a point.
#[derive(Clone)]
pub struct Event(Arc<dyn EventState>);

/// What stands behind an [`Event`]. Any thread may ask.
pub trait EventState: Send + Sync {
    /// Whether it has fired. Never blocks.
    ///
    /// # Errors
    /// The work failed: it will never fire otherwise.
    fn query(&self) -> Result<bool, GpuError>;

    /// Blocks until it has fired.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    fn wait(&self) -> Result<(), GpuError>;
}

impl Event {
    /// An event over a driver's own.
    pub fn new(state: Arc<dyn EventState>) -> Self {
        Self(state)
    }

    /// Whether it has fired. Never blocks. An error means that the work failed.
    pub fn query(&self) -> Result<bool, GpuError> {
        self.0.query()
    }

    /// Blocks until it has fired.
    pub fn wait(&self) -> Result<(), GpuError> {
        self.0.wait()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.query())
    }
}

/// What a driver refused or failed at, with its own code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} said {code} ({name}){}{hint}", if hint.is_empty() { "" } else { ": " })]
pub struct GpuError {
    /// The driver's call.
    pub call: &'static str,
    /// The driver's code.
    pub code: i32,
    /// The code's name.
    pub name: &'static str,
    /// What it means here and what to do, or nothing.
    pub hint: String,
}
