//! GPUs behind one trait.
//!
//! | module | which |
//! |---|---|
//! | [`none`] | no GPU: every answer says so; what a machine without a driver gets |
//! | [`cuda`] | NVIDIA's, through the driver's library, opened at run time |
//! | [`copier`] | small copies by a kernel that waits for them |
//!
//! Copies that are given to an engine together are in [`pieces`].
//!
//! A [`Driver`] lists [`Gpu`]s and tells what an address is; a [`Gpu`] allocates, copies, and
//! exports its memory as a [`Handle`]; a [`Stream`] orders work; an [`Event`] says that work is
//! over.

mod access;
pub mod copier;
pub mod cuda;
mod direct;
mod event;
mod handle;
pub mod none;
mod numa;
pub mod pieces;
mod reservation;
pub mod waits;
pub mod words;

pub use access::{Access, Rights};
pub use copier::CopierState;
pub use direct::{DmaBuf, RemoteWrites};
pub use event::{Event, EventState, Sequence};
pub use handle::{Forms, Handle, HandleForm, HandleKey};
pub use pieces::{Grid, Pieces};
pub use reservation::Reservation;

use crate::mem::{AllocId, GpuUuid, MemKind, Region};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A driver: the devices that this process can see, and what an address is.
///
/// Any thread may call any method.
///
/// # Safety
/// What it says of an address is true: the kind of memory there, its extent and its owner. What it
/// calls host memory, or nothing of its own, the CPU can touch. The kind, the extent and the number
/// of an allocation are the same as long as there is that allocation.
///
/// Its devices keep the promise of [`Gpu`].
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// A word for reports: `none`, `fake (simulated)`, `cuda`.
    fn name(&self) -> &'static str;

    /// The driver's version, where it has one.
    fn version(&self) -> Option<String> {
        None
    }

    /// The devices that this process can see, in this process's order. Asking for them is asking
    /// for GPUs: a driver that the program has not initialised yet is initialised by it.
    ///
    /// # Errors
    /// Why there are none, in words for a person.
    fn devices(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError>;

    /// Does what had to be put off, because it would have blocked while a stream waited for a word
    /// (see [`Stream::wait_value64`]): to be called now and then.
    fn look_after(&self) {}

    /// Forgets what was found out about memory of the program's at these addresses, which is about
    /// to be freed, unmapped, or to be reached by others than before. In the last case nothing is
    /// begun there until that is done, or this is called again then.
    fn forget(&self, _addr: usize, _len: usize) {}

    /// Has small copies between memory of this driver's devices go to resident kernels, where there
    /// can be some, to the end of the process: see [`copier`]. What each device says of it:
    /// [`Gpu::copier`].
    fn use_copiers(&self) {}

    /// What the memory at `addr` is. `None` for an address that this driver knows nothing of, which
    /// is host memory. Never initialises the driver (gpu.md, streams rule 6): before somebody has,
    /// there is nothing that it could know.
    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError>;

    /// Which allocation `addr` lies in: the cheap question, by which an older answer of
    /// [`classify`](Self::classify) is found to be still true, or stale (gpu.md, legacy IPC rule
    /// 6).
    fn buffer_id(&self, addr: usize) -> Result<Option<AllocId>, GpuError> {
        Ok(self.classify(addr)?.map(|extent| extent.id))
    }

    /// All that `len` bytes at `addr` are made of, in order: one extent as a rule, several where a
    /// VMM mapping was made of several handles (gpu.md, VMM rule 2), none for host memory.
    ///
    /// # Errors
    /// The driver's own; and `INVALID_VALUE` where the range begins or ends in memory of the
    /// driver's, and does not lie in it altogether.
    fn extents(&self, addr: usize, len: usize) -> Result<Vec<Extent>, GpuError> {
        let outside = |at: usize| GpuError {
            call: "extents",
            code: 1,
            name: "INVALID_VALUE",
            hint: format!("{addr:#x}+{len} leaves the driver's memory at {at:#x}"),
        };
        let end = addr.checked_add(len).ok_or_else(|| outside(usize::MAX))?;
        let Some(first) = self.classify(addr)? else {
            return match len > 0 && self.classify(end - 1)?.is_some() {
                true => Err(outside(addr)),
                false => Ok(Vec::new()),
            };
        };
        let mut at = first.end();
        let mut extents = vec![first];
        while at < end {
            let next =
                self.classify(at)?.filter(|next| next.end() > at).ok_or_else(|| outside(at))?;
            at = next.end();
            extents.push(next);
        }
        Ok(extents)
    }
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
    /// The device that owns it, or whose engine is at home in it. `None` for pinned memory of no
    /// one device.
    pub gpu: Option<Arc<dyn Gpu>>,
    /// The context it was allocated in; `None` for VMM and pool memory (gpu.md, VMM rule 1), which
    /// is no error.
    pub context: Option<u64>,
    /// In which forms it can be exported.
    pub forms: Forms,
}

impl Extent {
    /// The first address behind it.
    pub fn end(&self) -> usize {
        self.base.saturating_add(self.len)
    }
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

/// What one device can do with the memory of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Whether its engines and kernels reach that memory directly.
    pub access: bool,
    /// How fast the way is among those of this machine, as the driver ranks it; 0 is the fastest.
    pub performance_rank: i32,
    /// Whether atomic operations over the link are done as such.
    pub native_atomics: bool,
    /// What lies between them, in words: `NVLink`, `PCIe, one switch`; empty when nothing tells.
    pub link: String,
}

/// How memory is to be allocated, which decides how it can be exported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Flavour {
    /// As `cuMemAlloc` does: exported as plain bytes. Takes up whole blocks of 2 MiB, because a
    /// handle exposes the whole block (gpu.md, legacy IPC rule 2).
    Plain,
    /// As the VMM calls do: exported as a file descriptor; no context.
    Shareable,
    /// From a memory pool: exported as the pool's file descriptor and a name in it; no context.
    Pooled,
    /// Host memory, locked for the engines of all devices. Not exported.
    Pinned,
    /// Memory that the driver moves between host and device. For programs that have it anyway, and
    /// for tests: nothing in Carrack copies it.
    Managed,
}

/// One device. Any thread may call any method.
///
/// # Safety
/// Memory that it gives out ([`allocate`](Self::allocate), [`open`](Self::open) and their like) is
/// of the kind that the region says, and that of a new allocation belongs to its region alone.
///
/// An [`Event`] that a copy returns fires, or fails, only when nothing reads or writes either end
/// any more. A copy that is refused is not in flight. What it says of an address is true, as of
/// [`Driver`].
///
/// Its streams keep the promise of [`Stream`].
pub unsafe trait Gpu: Send + Sync + fmt::Debug {
    /// What it is.
    fn info(&self) -> &GpuInfo;

    /// What this device's driver knows of an address: [`Driver::classify`].
    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError>;

    /// Makes the context in which this device's work is begun the calling thread's, and leaves it
    /// so, as `cudaSetDevice` does.
    ///
    /// No thread has to have one: without it the context is the thread's during each call of the
    /// driver, and the caller's again afterwards. That takes two calls more for each copy, so a
    /// thread that calls no CUDA itself does well to say this once, for the device that its
    /// messages and puts are read from.
    ///
    /// # Errors
    /// The driver's.
    fn make_current(&self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Whether what was allocated through this handle is still there.
    ///
    /// # Errors
    /// The program has destroyed the context that it worked in, and all that was allocated there
    /// has gone with it, pinned host memory included.
    fn check(&self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Allocates `len` bytes. The region is freed when its last clone is dropped.
    fn allocate(&self, len: usize, flavour: Flavour) -> Result<Region, GpuError>;

    /// In bytes, what lengths and places of memory are multiples of that is allocated at chosen
    /// addresses ([`allocate_at`](Self::allocate_at)).
    ///
    /// # Errors
    /// The driver has no such memory, and why.
    fn granularity(&self) -> Result<usize, GpuError> {
        Err(GpuError::unsupported(
            "granularity",
            "this driver lets nobody choose where memory lies",
        ))
    }

    /// Reserves at least `len` addresses, which take no memory, for memory of this device and of
    /// others of its driver. They begin at a multiple of this device's
    /// [`granularity`](Self::granularity).
    ///
    /// # Errors
    /// The driver's: there are not so many, or it has no such thing.
    fn reserve(&self, len: usize) -> Result<Reservation, GpuError> {
        Err(GpuError::unsupported("reserve", format!("this driver reserves no {len} addresses")))
    }

    /// Allocates `len` bytes as [`Flavour::Shareable`], `offset` bytes behind the beginning of a
    /// reservation; this device reads and writes them, and those of `access` do what they may. The
    /// region keeps the reservation; the memory goes with its last clone, and others may come to
    /// lie there.
    ///
    /// # Errors
    /// `INVALID_VALUE`: `offset` or `len` is no multiple of the granularity, the piece is not
    /// inside, something lies there, or the addresses are another driver's; `access` names this
    /// device for reading, or one with different rights. `PEER_ACCESS_UNSUPPORTED`: a device of
    /// `access` does not reach this one. Else the driver's: it has no such memory, or no more of
    /// it.
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

    /// What this device may do with shareable memory at an address, of this process's or opened;
    /// `None`: nothing. Of other memory drivers may say what they like.
    ///
    /// # Errors
    /// The driver's: it knows of no such memory there.
    fn rights_at(&self, addr: usize) -> Result<Option<Rights>, GpuError> {
        Err(GpuError::unsupported(
            "rights_at",
            format!("this driver knows of no rights at {addr:#x}"),
        ))
    }

    /// Whether this device is kept from writing to memory of `owner` that it was given for
    /// [reading](Rights::Read) only. Drivers promise it nowhere, so it is found out by an attempt,
    /// in a process of its own ([`trial`](crate::trial)), the first time that it is asked; that
    /// takes seconds.
    ///
    /// # Errors
    /// It is not kept from it, does not reach that memory, or no attempt could be made; and why.
    fn keeps_from_writing(&self, owner: GpuUuid) -> Result<(), GpuError> {
        let hint =
            format!("this driver gives no device access to memory of {owner} for reading only");
        Err(GpuError::unsupported("keeps_from_writing", hint))
    }

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

    /// Starts many copies, as [`copy`](Self::copy) does one: by one call of the driver where it has
    /// one for that ([`how_pieces_go`](Self::how_pieces_go)). The event fires when the bytes of all
    /// of them are there. A byte that two of them write is either's.
    ///
    /// # Errors
    /// The driver's. Nothing is under way then, but some of the copies may have been made.
    ///
    /// # Safety
    /// As [`copy`](Self::copy), of each of them.
    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<Event, GpuError> {
        Err(pieces::none_of("copy_pieces", format_args!("{pieces:?}")))
    }

    /// Starts the copy of rows, and planes of rows, at regular distances, as
    /// [`copy_pieces`](Self::copy_pieces) would; by one call of the driver.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, of each row of the grid: the first begins at the two addresses.
    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<Event, GpuError> {
        Err(pieces::none_of("copy_grid", format_args!("{grid:?} from {} to {}", src.1, dst.1)))
    }

    /// How copies that are given together are done, in words: by which call; and why not by one, if
    /// not.
    fn how_pieces_go(&self) -> String {
        "they are refused: this driver is given no copies together".into()
    }

    /// What there is of the kernel that small copies go to.
    fn copier(&self) -> CopierState {
        CopierState::Off
    }

    /// A stream of the user's own.
    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError>;

    /// Whether this device's engine reaches the memory of `peer` directly.
    ///
    /// # Errors
    /// Why not.
    fn reaches(&self, peer: GpuUuid) -> Result<(), GpuError>;

    /// Whether this device's engine reaches a region as it was allocated or opened in this process:
    /// memory of another process is opened for one device.
    fn reaches_region(&self, region: &Region) -> bool {
        region.gpu().is_some_and(|gpu| gpu.info().uuid == self.info().uuid)
    }

    /// What this device can do with the memory of `peer`, for reports.
    fn peer(&self, peer: GpuUuid) -> Result<PeerInfo, GpuError> {
        Err(GpuError::unsupported("peer", format!("nothing is known of a link to {peer}")))
    }

    /// The NUMA node that it sits at.
    ///
    /// # Errors
    /// Why that is not known, in words: the machine has no nodes, or does not tell.
    fn numa_node(&self) -> Result<u32, String> {
        numa::of(&self.info().pci)
    }

    /// Makes a handle by which another process can open `region`.
    fn export(&self, region: &Region, form: HandleForm) -> Result<Handle, GpuError>;

    /// Opens a handle that another process has made, for this device's engines. The region covers
    /// the whole allocation (legacy IPC rule 1), of which the exported part begins at
    /// [`Handle::offset`], and is closed when its last clone is dropped.
    fn open(&self, handle: &Handle) -> Result<Region, GpuError>;

    /// As [`open`](Self::open) of a descriptor ([`HandleForm::Fd`]), at chosen addresses: what
    /// others have opened before and behind it lies there without a gap.
    ///
    /// # Errors
    /// As of [`open`](Self::open), and of [`allocate_at`](Self::allocate_at) for the place.
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
    /// The driver has none, or none of such memory.
    fn export_dmabuf(&self, addr: usize, len: usize) -> Result<DmaBuf, GpuError> {
        Err(GpuError::unsupported("export_dmabuf", format!("{addr:#x}+{len} is lent to no NIC")))
    }

    /// When this device's work sees what a NIC has written to its memory.
    fn remote_writes(&self) -> RemoteWrites {
        RemoteWrites::Unordered("its driver does not say when a NIC's writes are seen".into())
    }

    /// Lets this device's work see what NICs have told to have written to its memory. May take some
    /// microseconds.
    ///
    /// # Errors
    /// The driver's: what was written may not be seen.
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

    /// Does something behind all that was put off while streams waited for words: see
    /// [`Driver::look_after`]. At once, if none waits.
    fn when_no_stream_waits(&self, task: Box<dyn FnOnce() + Send>) {
        task();
    }

    /// An event that other processes can wait for.
    fn shared_event(&self) -> Result<Arc<dyn SharedEvent>, GpuError> {
        Err(GpuError::unsupported("shared_event", "this driver shares no events"))
    }

    /// Opens an event that another process shares, by its [`SharedEvent::handle`].
    fn open_event(&self, handle: &[u8; 64]) -> Result<Arc<dyn SharedEvent>, GpuError> {
        let _ = handle;
        Err(GpuError::unsupported("open_event", "this driver shares no events"))
    }
}

/// Host memory that is locked for a driver's engines; unlocked when this is dropped.
pub struct HostRegistration {
    _owner: Box<dyn Any + Send + Sync>,
}

impl HostRegistration {
    /// A registration that ends when `owner` is dropped.
    pub fn new(owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { _owner: owner }
    }
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostRegistration")
    }
}

/// Work in order.
///
/// # Safety
/// Events of copies keep the promise that [`Gpu`] makes of them. The event of
/// [`wait_value64`](Self::wait_value64) fires, or fails, only when the stream will not read the
/// word for that wait any more; a wait or a write that is refused was not given to the stream.
///
/// ```compile_fail,E0200
/// # use carrack_transports::gpu::{Event, Gpu, GpuError, Stream};
/// # use std::sync::Arc;
/// #[derive(Debug)]
/// struct Early;
/// impl Stream for Early {
///     fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError> {
///         unimplemented!()
///     }
///     fn record(&self) -> Result<Event, GpuError> {
///         unimplemented!()
///     }
///     fn wait(&self, _: &Event) -> Result<(), GpuError> {
///         Ok(())
///     }
///     fn synchronize(&self) -> Result<(), GpuError> {
///         Ok(())
///     }
/// }
/// ```
pub unsafe trait Stream: Any + Send + Sync + fmt::Debug {
    /// The device that works on it.
    ///
    /// # Errors
    /// It is being dropped.
    fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError>;

    /// As [`Gpu::copy`], on this stream: begins when all work given to the stream before is over,
    /// and later work begins when it is over. Host memory has to be pinned or registered: else the
    /// call itself may wait for the stream.
    ///
    /// # Safety
    /// As [`Gpu::copy`].
    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<Event, GpuError> {
        let hint = format!("no copy of {len} bytes from {} to {} by a stream", src.1, dst.1);
        Err(GpuError::unsupported("copy", hint))
    }

    /// As [`Gpu::copy_pieces`], on this stream.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<Event, GpuError> {
        Err(pieces::none_of("copy_pieces", format_args!("{pieces:?}, by a stream")))
    }

    /// As [`Gpu::copy_grid`], on this stream.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<Event, GpuError> {
        Err(pieces::none_of(
            "copy_grid",
            format_args!("{grid:?} from {} to {}, by a stream", src.1, dst.1),
        ))
    }

    /// An event that fires when all work given to the stream so far is over.
    fn record(&self) -> Result<Event, GpuError>;

    /// Lets later work on this stream begin only after `event` has fired.
    fn wait(&self, event: &Event) -> Result<(), GpuError>;

    /// Blocks until all work given so far is over.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// Writes `value` to a word, when all work given so far is over and to be seen.
    ///
    /// # Safety
    /// `word` is 8 bytes, aligned, of registered or pinned host memory, or of the stream's device,
    /// and stays so until the stream has come to it. The host uses it by atomic loads and stores
    /// only.
    unsafe fn write_value64(&self, word: *mut u64, value: u64) -> Result<(), GpuError> {
        Err(GpuError::unsupported(
            "write_value64",
            format!("no write of {value} to {word:p} by a stream"),
        ))
    }

    /// Lets later work on this stream begin only when a word holds what it is to hold; the event
    /// fires when the stream is past it. Whoever is to write the word may die: the library must
    /// then release the stream, with a value that says so (gpu.md, streams rule 7).
    ///
    /// While a stream waits, calls of the driver that wait for the whole context block. The library
    /// puts its own off ([`Driver::look_after`]); whoever is to release the stream must make none
    /// (`cudaFree`, `cudaDeviceSynchronize`, loading a module).
    ///
    /// # Errors
    /// The driver's; and `TOO_MANY_WAITING`, when so many streams of the context wait that nothing
    /// would move any more.
    ///
    /// # Safety
    /// As [`write_value64`](Self::write_value64).
    unsafe fn wait_value64(
        &self,
        word: *const u64,
        value: u64,
        until: Until,
    ) -> Result<Event, GpuError> {
        let hint = format!("no wait for {value} ({until:?}) at {word:p} by a stream");
        Err(GpuError::unsupported("wait_value64", hint))
    }
}

/// An event that several processes have: one records it, the others wait for the record.
pub trait SharedEvent: Send + Sync + fmt::Debug {
    /// The name by which another process opens it.
    fn handle(&self) -> Result<[u8; 64], GpuError>;

    /// Records it: it fires when all work given to `stream` so far is over.
    fn record(&self, stream: &dyn Stream) -> Result<(), GpuError>;

    /// Its last record, as an event for [`Stream::wait`] and for polling. It has fired as long as
    /// there is none.
    fn event(&self) -> Event;
}

/// When a stream that waits for a word goes on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Until {
    /// The word holds the value.
    Equal,
    /// The word has reached the value: the difference, taken as a signed number, is not negative,
    /// so that a counter may run over.
    Reached,
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

impl GpuError {
    /// The driver has no such thing.
    pub(crate) fn unsupported(call: &'static str, hint: impl Into<String>) -> Self {
        Self { call, code: 801, name: "NOT_SUPPORTED", hint: hint.into() }
    }
}
