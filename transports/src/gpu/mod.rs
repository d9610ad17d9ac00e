//! GPUs behind one trait.
//!
//! | module | which |
//! |---|---|
//! | [`none`] | no GPU, for machines without a driver: every answer says so |
//! | [`cuda`] | NVIDIA's, through the driver's library, opened at run time |
//! | [`copier`] | small copies by a kernel that waits for them |
//!
//! Copies that are given to an engine together are in [`pieces`].
//!
//! A [`Driver`] lists [`Gpu`]s and classifies addresses. A [`Gpu`] allocates, copies, and exports
//! its memory as a [`Handle`]. A [`Stream`] orders work. A [`GpuEvent`] tells that work has ended.

mod access;
pub mod copier;
pub mod cuda;
mod direct;
mod driver;
mod error;
mod event;
mod handle;
pub mod none;
mod numa;
pub mod pieces;
mod registration;
mod reservation;
mod shared_event;
mod stream;
pub mod waits;
pub mod words;

pub use access::{Access, Rights};
pub use copier::CopierState;
pub use direct::{DmaBuf, RemoteWrites};
pub use driver::{Driver, Extent};
pub use error::GpuError;
pub use event::{EventState, GpuEvent, Sequence};
pub use handle::{Forms, Handle, HandleForm, HandleKey};
pub use pieces::{Grid, Pieces};
pub use registration::HostRegistration;
pub use reservation::Reservation;
pub use shared_event::SharedEvent;
pub use stream::Stream;

use crate::mem::{GpuUuid, MemKind, Region};
use std::fmt;
use std::sync::Arc;

/// Description of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Unique id, the same in every process.
    pub uuid: GpuUuid,
    /// Number in this process. Another process may count otherwise.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// PCI address: `domain:bus:device.function`.
    pub pci: String,
    /// Memory in bytes.
    pub memory: u64,
    /// Set if the device is simulated. Every report of the device says so.
    pub simulated: bool,
}

/// Abilities of one device with the memory of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Set if its engines and kernels access that memory directly.
    pub access: bool,
    /// The driver's rank of the link's speed among those of this machine; 0 is the fastest.
    pub performance_rank: i32,
    /// Set if the link supports atomic operations natively.
    pub native_atomics: bool,
    /// The link in words: `NVLink`, `PCIe, one switch`. Empty if unknown.
    pub link: String,
}

/// Way to allocate memory, which decides the forms of its export.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Flavour {
    /// Memory of `cuMemAlloc`: exported as plain bytes. Takes up whole blocks of 2 MiB, because a
    /// handle exposes the whole block (gpu.md, legacy IPC rule 2).
    Plain,
    /// Memory of the VMM calls: exported as a file descriptor; no context.
    Shareable,
    /// Memory of a pool: exported as the pool's file descriptor and a name in it; no context.
    Pooled,
    /// Host memory, locked for the engines of all devices. Not exported.
    Pinned,
    /// Memory that the driver moves between host and device. For programs that use it, and for
    /// tests: Carrack never copies it.
    Managed,
}

/// One device. Any thread may call any method.
///
/// # Safety
/// Memory that it gives out ([`allocate`](Self::allocate), [`open`](Self::open) and their like) is
/// of the region's kind. That of a new allocation belongs to its region alone.
///
/// A [`GpuEvent`] that a copy returns fires, or fails, only when neither end is read or written any
/// more. A copy that is refused is not in flight. Its answers about an address are true, as for
/// [`Driver`].
///
/// Its streams keep the promise of [`Stream`].
#[expect(unsafe_code, reason = "implementations vouch for memory")]
pub unsafe trait Gpu: Send + Sync + fmt::Debug {
    /// Returns the device's description.
    fn info(&self) -> &GpuInfo;

    /// Classifies an address with this device's driver: [`Driver::classify`].
    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError>;

    /// Makes the context of this device's work current in the calling thread, and leaves it so, as
    /// `cudaSetDevice` does.
    ///
    /// It is optional: without it each call of the driver makes the context current and restores
    /// the caller's. That is two more calls for each copy. A thread that calls no CUDA itself
    /// saves them by one call of this, for the device that its messages and puts are read from.
    ///
    /// # Errors
    /// The driver's.
    fn make_current(&self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Checks that the memory allocated through this device still exists.
    ///
    /// # Errors
    /// The program has destroyed the device's context. All that was allocated there is gone,
    /// pinned host memory included.
    fn check(&self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Allocates `len` bytes. The region is freed when its last clone is dropped.
    fn allocate(&self, len: usize, flavour: Flavour) -> Result<Region, GpuError>;

    /// Returns the unit in bytes for lengths and offsets of memory at chosen addresses
    /// ([`allocate_at`](Self::allocate_at)).
    ///
    /// # Errors
    /// The reason why the driver has no such memory.
    fn granularity(&self) -> Result<usize, GpuError> {
        Err(GpuError::unsupported(
            "granularity",
            "this driver does not allocate memory at chosen addresses",
        ))
    }

    /// Reserves at least `len` addresses, which take no memory, for memory of this device and of
    /// others of its driver. They begin at a multiple of this device's
    /// [`granularity`](Self::granularity).
    ///
    /// # Errors
    /// The driver's: there are fewer addresses, or it does not reserve any.
    fn reserve(&self, len: usize) -> Result<Reservation, GpuError> {
        Err(GpuError::unsupported("reserve", format!("this driver reserves no {len} addresses")))
    }

    /// Allocates `len` bytes as [`Flavour::Shareable`], at `offset` of a reservation. This device
    /// reads and writes them; the devices of `access` have the rights named there. The region
    /// keeps the reservation. Its last clone frees the memory, and the addresses may be used
    /// again.
    ///
    /// # Errors
    /// `INVALID_VALUE`: `offset` or `len` is no multiple of the granularity, the piece is not
    /// inside, memory lies there, or the addresses are another driver's. Also if `access` names
    /// this device for reading, or a device with different rights. `PEER_ACCESS_UNSUPPORTED`: a
    /// device of `access` does not reach this one. Else the driver's: it has no such memory, or no
    /// more of it.
    fn allocate_at(
        &self,
        reservation: &Reservation,
        offset: usize,
        len: usize,
        access: &[Access],
    ) -> Result<Region, GpuError> {
        let hint = format!(
            "{len} bytes at {offset} of {reservation:?}, for {access:?}: this driver allocates \
            nothing so"
        );
        Err(GpuError::unsupported("allocate_at", hint))
    }

    /// Returns this device's rights on shareable memory at an address, of this process's or
    /// opened. `None`: it has none. For other memory the answer is up to the driver.
    ///
    /// # Errors
    /// The driver's: it knows no such memory there.
    fn rights_at(&self, addr: usize) -> Result<Option<Rights>, GpuError> {
        Err(GpuError::unsupported(
            "rights_at",
            format!("this driver knows of no rights at {addr:#x}"),
        ))
    }

    /// Checks that this device cannot write to memory of `owner` that it may only
    /// [read](Rights::Read). Drivers do not promise it, so the first call makes an attempt, in a
    /// process of its own ([`trial`](crate::trial)), which takes seconds.
    ///
    /// # Errors
    /// The device can write, or does not reach that memory, or no attempt could be made; with the
    /// reason.
    fn keeps_from_writing(&self, owner: GpuUuid) -> Result<(), GpuError> {
        let hint =
            format!("this driver gives no device access to memory of {owner} for reading only");
        Err(GpuError::unsupported("keeps_from_writing", hint))
    }

    /// Starts a copy on a stream of the library's own (never one of the user's, never the default
    /// stream: gpu.md, streams rule 1). The event fires when the bytes have arrived.
    ///
    /// # Safety
    /// `len` bytes are valid at both addresses, of the kinds given, until the event has fired.
    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError>;

    /// Starts many copies, as [`copy`](Self::copy) does one, by one call if the driver has one for
    /// that ([`how_pieces_go`](Self::how_pieces_go)). The event fires when all bytes have arrived.
    /// A byte that two copies write may come from either.
    ///
    /// # Errors
    /// The driver's. No copy is in flight then, but some of them may have been made.
    ///
    /// # Safety
    /// As [`copy`](Self::copy), of each of them.
    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<GpuEvent, GpuError> {
        Err(pieces::none_of("copy_pieces", format_args!("{pieces:?}")))
    }

    /// Starts the copy of rows, and planes of rows, at regular distances, as
    /// [`copy_pieces`](Self::copy_pieces) would, by one call of the driver.
    ///
    /// # Errors
    /// As for [`copy_pieces`](Self::copy_pieces).
    ///
    /// # Safety
    /// As for [`copy_pieces`](Self::copy_pieces), for each row of the grid. The first row begins
    /// at the two addresses.
    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        Err(pieces::none_of("copy_grid", format_args!("{grid:?} from {} to {}", src.1, dst.1)))
    }

    /// Describes in words the call for grouped copies, with the reason if there is none.
    fn how_pieces_go(&self) -> String {
        "they are refused: this driver is given no copies together".into()
    }

    /// Returns the state of the kernel for small copies.
    fn copier(&self) -> CopierState {
        CopierState::Off
    }

    /// Creates a stream for the user.
    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError>;

    /// Checks that this device's engine reaches the memory of `peer` directly.
    ///
    /// # Errors
    /// The reason why it does not.
    fn reaches(&self, peer: GpuUuid) -> Result<(), GpuError>;

    /// Returns `true` if this device's engine reaches a region as it was allocated or opened in
    /// this process. Memory of another process is opened for one device.
    fn reaches_region(&self, region: &Region) -> bool {
        region.gpu().is_some_and(|gpu| gpu.info().uuid == self.info().uuid)
    }

    /// Describes this device's access to the memory of `peer`, for reports.
    fn peer(&self, peer: GpuUuid) -> Result<PeerInfo, GpuError> {
        Err(GpuError::unsupported("peer", format!("nothing is known of a link to {peer}")))
    }

    /// Returns the NUMA node of the device.
    ///
    /// # Errors
    /// The reason why it is not known, in words: the machine has no nodes, or does not tell.
    fn numa_node(&self) -> Result<u32, String> {
        numa::of(&self.info().pci)
    }

    /// Makes a handle by which another process can open `region`.
    fn export(&self, region: &Region, form: HandleForm) -> Result<Handle, GpuError>;

    /// Opens a handle that another process has made, for this device's engines. The region covers
    /// the whole allocation (legacy IPC rule 1), of which the exported part begins at
    /// [`Handle::offset`]. It is closed when its last clone is dropped.
    fn open(&self, handle: &Handle) -> Result<Region, GpuError>;

    /// Opens a descriptor ([`HandleForm::Fd`]) as [`open`](Self::open) does, but at chosen
    /// addresses, so that several openings lie there without a gap.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open), and of [`allocate_at`](Self::allocate_at) for the
    /// place.
    fn open_at(
        &self,
        reservation: &Reservation,
        offset: usize,
        handle: &Handle,
    ) -> Result<Region, GpuError> {
        let hint = format!(
            "{} bytes at {offset} of {reservation:?}: this driver opens nothing so",
            handle.len
        );
        Err(GpuError::unsupported("open_at", hint))
    }

    /// Lends `len` bytes of this device's memory at `addr` to a NIC's driver, as a dma-buf.
    ///
    /// # Errors
    /// The driver has no dma-bufs, or none of such memory.
    fn export_dmabuf(&self, addr: usize, len: usize) -> Result<DmaBuf, GpuError> {
        Err(GpuError::unsupported("export_dmabuf", format!("{addr:#x}+{len} is lent to no NIC")))
    }

    /// Returns the rule for the visibility of a NIC's writes to this device's memory.
    fn remote_writes(&self) -> RemoteWrites {
        RemoteWrites::Unordered("its driver does not say when a NIC's writes are seen".into())
    }

    /// Makes writes that NICs have completed to this device's memory visible to its work. May take
    /// some microseconds.
    ///
    /// # Errors
    /// The driver's: the writes may not be visible.
    fn flush_remote_writes(&self) -> Result<(), GpuError> {
        Err(GpuError::unsupported("flush_remote_writes", "this driver flushes nothing"))
    }

    /// Locks host memory for the engines of all devices, until the registration is dropped.
    ///
    /// # Safety
    /// `len` bytes at `addr` stay mapped as they are until the registration is dropped.
    unsafe fn register_host(
        &self,
        addr: *mut u8,
        len: usize,
    ) -> Result<HostRegistration, GpuError> {
        Err(GpuError::unsupported("register_host", format!("{addr:p}+{len} cannot be locked")))
    }

    /// Runs a task behind all that was put off while streams waited for words: see
    /// [`Driver::look_after`]. Runs it at once if no stream waits.
    fn when_no_stream_waits(&self, task: Box<dyn FnOnce() + Send>) {
        task();
    }

    /// Creates an event that other processes can wait for.
    fn shared_event(&self) -> Result<Arc<dyn SharedEvent>, GpuError> {
        Err(GpuError::unsupported("shared_event", "this driver shares no events"))
    }

    /// Opens an event that another process shares, by its [`SharedEvent::handle`].
    fn open_event(&self, handle: &[u8; 64]) -> Result<Arc<dyn SharedEvent>, GpuError> {
        let _ = handle;
        Err(GpuError::unsupported("open_event", "this driver shares no events"))
    }
}
