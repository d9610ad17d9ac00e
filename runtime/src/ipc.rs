//! GPU memory and events of one process in another, for programs that exchange the handles
//! themselves.
//!
//! Registered memory needs none of this. With [`register_memory`](crate::Runtime::register_memory)
//! and a [`RemoteKey`](crate::RemoteKey) the runtime maps memory where possible, keeps it, and
//! frees it when no process has it open. Here the program transports the names itself, and keeps
//! these rules:
//!
//! - **The owner frees last.** Memory must stay allocated until every process that has opened it
//!   has dropped the region. This module does not know these processes. Memory of cuMemAlloc and of
//!   the VMM calls survives its owner's *death* while it is open. Pool memory does not, and an
//!   access then costs the opener its context.
//! - **Whole blocks are exposed.** A process that opens a part can reach the whole allocation. For
//!   memory of cuMemAlloc it can reach the driver's whole block of 2 MiB, with its other content.
//!   Allocate shared memory in multiples of 2 MiB.
//! - **Not in the process that owns it.** Use the region itself there; the driver refuses its own
//!   byte handles.
//! - **Once for each device.** Opening takes milliseconds. The same name opened again is the same
//!   mapping, counted.
//! - **A name is of one allocation.** An address that is freed and allocated again is other memory,
//!   with another name.
//! - **Accesses are not ordered.** Events order them ([`ipc_export_event`]), or messages.
//!
//! An opened region is device memory like any other: it is sent from, received into, and copied.
//!
//! ```no_run
//! use carrack::ipc::{IpcMemory, ipc_export, ipc_open};
//! # use carrack::transports::gpu::{Flavour, Gpu};
//! # type Done = Result<(), Box<dyn std::error::Error>>;
//! # fn owner(gpu: &dyn Gpu, tell: impl Fn([u8; IpcMemory::BYTES])) -> Done {
//! let region = gpu.allocate(2 << 20, Flavour::Plain)?;
//! let name = ipc_export(&region)?;
//! assert!(name.fd().is_none(), "plain memory is named by bytes alone");
//! tell(name.to_bytes());
//! # Ok(()) }
//! # fn other(gpu: &dyn Gpu, told: &[u8]) -> Done {
//! // In another process:
//! let region = ipc_open(gpu, &IpcMemory::from_bytes(told, None)?)?;
//! let bytes = region.whole().to_vec()?;
//! # Ok(()) }
//! ```

use crate::error::other_error;
use carrack_transports::gpu::{Gpu, GpuError, Handle, HandleForm, SharedEvent};
use carrack_transports::mem::{MemKind, Region};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

/// Bytes of an event's name.
pub const EVENT_BYTES: usize = 64;

/// Memory or an event was not exported, or not opened.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum IpcError {
    /// The memory is not a GPU's.
    #[error(
        "only memory of a GPU is exported, and this is {0} memory: share host memory by \
        Runtime::allocate, or as a file"
    )]
    Kind(MemKind),
    /// The memory has a handle of no form.
    #[error(
        "this memory cannot be exported: {0}; allocate it as Flavour::Plain or Flavour::Shareable"
    )]
    NoForm(String),
    /// The memory is made of several allocations.
    #[error(
        "this region lies on {0} allocations, each of which has a handle of its own: name it part \
        by part (GrowableBuffer::pieces), or register it"
    )]
    Several(usize),
    /// The bytes are no name.
    #[error(
        "{found} bytes with {} name no {what}: {why}; hand over all that the exporter gave",
        if *with_fd { "a descriptor" } else { "no descriptor" }
    )]
    Bytes {
        /// The kind of object that they should name.
        what: &'static str,
        /// The number of bytes.
        found: usize,
        /// Set if a descriptor came with them.
        with_fd: bool,
        /// The error in them.
        why: &'static str,
    },
    /// The driver refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

other_error!(IpcError);

/// The name of GPU memory, by which another process opens it. It is bytes, and for some forms a
/// descriptor that has to travel with them (by `SCM_RIGHTS` over a Unix socket).
#[derive(Debug)]
pub struct IpcMemory {
    handle: Handle,
    /// Bytes of the exported part.
    len: usize,
}

/// A name on the wire.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Name {
    handle: [u8; Handle::WIRE],
    /// Bytes of the named part.
    len: U64,
}

impl IpcMemory {
    /// Bytes of a name.
    pub const BYTES: usize = size_of::<Name>();

    /// Returns the name as bytes, the same on every machine.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        transmute!(Name { handle: self.handle.encode(), len: (self.len as u64).into() })
    }

    /// Returns the descriptor that has to travel with the bytes, if the form has one.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.handle.fd()
    }

    /// Decodes a name from its bytes, and the descriptor that came with them. Any bytes may come:
    /// they are checked here, and against the memory itself when it is opened.
    ///
    /// # Errors
    /// [`IpcError::Bytes`].
    pub fn from_bytes(bytes: &[u8], fd: Option<OwnedFd>) -> Result<Self, IpcError> {
        let (found, with_fd) = (bytes.len(), fd.is_some());
        let wrong = |why| IpcError::Bytes { what: "memory", found, with_fd, why };
        let Name { handle, len } =
            Name::ref_from_bytes(bytes).map_err(|_| wrong("a name has 120"))?;
        let handle = Handle::decode(handle, fd).ok_or_else(|| {
            wrong("they are no handle, or the descriptor does not go with their form")
        })?;
        let len = usize::try_from(len.get())
            .ok()
            .filter(|len| len.checked_add(handle.offset).is_some_and(|end| end <= handle.len));
        let len = len.ok_or_else(|| wrong("the part is longer than its allocation"))?;
        Ok(Self { handle, len })
    }

    /// Returns the form of the driver's handle.
    pub fn form(&self) -> HandleForm {
        self.handle.form()
    }

    /// Returns the bytes of the named memory.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if no bytes are named.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the driver's handle of the whole allocation, with the beginning of the named part
    /// in it.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// Returns the name of a region of GPU memory, in the first form that its memory has: bytes, then
/// descriptors, then the fabric. A part of an allocation is named as that part
/// ([`Region::subregion`]).
///
/// # Errors
/// [`IpcError::Kind`], [`IpcError::Several`], or [`IpcError::NoForm`] with the driver's reason for
/// each form.
pub fn ipc_export(region: &Region) -> Result<IpcMemory, IpcError> {
    let mut reasons = Vec::new();
    for form in HandleForm::ALL {
        match ipc_export_as(region, form) {
            Err(IpcError::Gpu(why)) => reasons.push(format!("as {form:?}: {why}")),
            named => return named,
        }
    }
    Err(IpcError::NoForm(reasons.join("; ")))
}

/// Returns the name in one form only.
///
/// # Errors
/// [`IpcError::Kind`]; [`IpcError::Several`]; [`IpcError::Gpu`] when the memory has no handle of
/// that form, or the driver fails.
pub fn ipc_export_as(region: &Region, form: HandleForm) -> Result<IpcMemory, IpcError> {
    if region.is_joined() {
        return export_of_joined(region, form);
    }
    let gpu = match region.kind() {
        MemKind::Device(_) | MemKind::Managed(_) => region.gpu(),
        _ => None,
    };
    let gpu = gpu.ok_or(IpcError::Kind(region.kind()))?;
    Ok(IpcMemory { handle: gpu.export(region, form)?, len: region.len() })
}

/// Exports a range of a joined region as a part of the one region that contains it.
fn export_of_joined(region: &Region, form: HandleForm) -> Result<IpcMemory, IpcError> {
    let parts = region.joined_parts();
    let within =
        |part: &Region| part.subregion(region.addr().checked_sub(part.addr())?, region.len());
    if let [part] = &parts[..]
        && let Some(region) = within(part)
    {
        return ipc_export_as(&region, form);
    }
    Err(IpcError::Several(parts.len()))
}

/// Opens memory of another process for the engines of `gpu`, which may differ from the device that
/// it lies on. The region is the named part, and closes with its last clone.
///
/// # Errors
/// [`IpcError::Gpu`]: the driver's reason: the memory is gone, is this process's own, or cannot be
/// reached.
pub fn ipc_open(gpu: &dyn Gpu, memory: &IpcMemory) -> Result<Region, IpcError> {
    let whole = gpu.open(&memory.handle)?;
    let part = whole.subregion(memory.handle.offset, memory.len);
    part.ok_or(IpcError::Bytes {
        what: "memory",
        found: IpcMemory::BYTES,
        with_fd: memory.fd().is_some(),
        why: "the memory is shorter than they say",
    })
}

/// Returns the name of an event, by which other processes open it. The event is made by
/// [`Gpu::shared_event`]. Its owner records it, and the other processes wait for it. It must
/// outlive their use.
///
/// # Errors
/// The driver's.
pub fn ipc_export_event(event: &dyn SharedEvent) -> Result<[u8; EVENT_BYTES], IpcError> {
    Ok(event.handle()?)
}

/// Opens an event of another process, for the streams of `gpu`. It stands for the last record at
/// the time when [`SharedEvent::event`] is asked: have the owner tell that it has recorded.
///
/// # Errors
/// [`IpcError::Bytes`], or the driver's: the event is gone, or is this process's own.
pub fn ipc_open_event(gpu: &dyn Gpu, name: &[u8]) -> Result<Arc<dyn SharedEvent>, IpcError> {
    let (found, why) = (name.len(), "a name has 64");
    let wrong = |_| IpcError::Bytes { what: "event", found, with_fd: false, why };
    Ok(gpu.open_event(name.try_into().map_err(wrong)?)?)
}
