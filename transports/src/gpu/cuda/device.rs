//! One device, in one context.

use super::context::CudaContext;
use super::driver::OpenedLibrary;
use super::error::{INVALID_DEVICE, because, error};
use super::event::IpcEvent;
use super::home::Home;
use super::lane::{Copies, CopyDirection};
use super::memory;
use super::stream::CudaStream;
use super::sys::{ContextHandle, CuDevice, Uuid};
use super::{attempt, copier, direct, ipc, peer, pieces, vmm};
use crate::gpu::{
    Access, CopierState, DmaBuf, Extent, Flavour, Gpu, GpuError, GpuEvent, GpuInfo, Grid, Handle,
    HandleForm, HostRegistration, PeerInfo, Pieces, RemoteWrites, Reservation, Rights, SharedEvent,
    Stream,
};
use crate::mem::{GpuUuid, MemKind, Region};
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

/// A device, in its primary context, or in a user's context in which memory was found.
pub struct CudaGpu {
    pub(super) shared: &'static OpenedLibrary,
    pub(super) info: GpuInfo,
    pub(super) device: CuDevice,
    /// Objects for work, created when first needed: a context takes time and hundreds of MiB.
    work: OnceLock<Work>,
    making: Mutex<()>,
    /// Result of the trial for fabric memory, once made: the refusal, or `None`.
    pub(super) fabric: OnceLock<Option<GpuError>>,
    /// The driver's refusal of copies in one batch, once it occurred.
    pub(super) no_batches: OnceLock<GpuError>,
    me: Weak<Self>,
}

/// Context of a device, and the copies in it.
pub(super) struct Work {
    pub(super) home: Arc<Home>,
    pub(super) copies: [Arc<Copies>; CopyDirection::ALL.len()],
}

impl Work {
    fn new(home: Home) -> Self {
        let home = Arc::new(home);
        Self { copies: CopyDirection::ALL.map(|direction| Copies::new(&home, direction)), home }
    }
}

impl CudaGpu {
    /// Opens the device of an ordinal. Creates no context.
    pub(super) fn primary(
        shared: &'static OpenedLibrary,
        ordinal: c_int,
    ) -> Result<Arc<Self>, GpuError> {
        let mut device: CuDevice = 0;
        // SAFETY: the place for the answer is ours.
        unsafe { shared.calls.device_get(&raw mut device, ordinal) }?;
        let info = info(shared, ordinal, device)?;
        Ok(Self::new(shared, info, device, OnceLock::new()))
    }

    /// Opens the device in a context of the user's.
    pub(super) fn adopted(
        shared: &'static OpenedLibrary,
        gpu: &Self,
        context: ContextHandle,
    ) -> Result<Arc<Self>, GpuError> {
        let context = CudaContext::adopted(shared.calls, context, gpu.device)?;
        let home = Home::new(context, shared.gpus()?.len(), shared.waits());
        Ok(Self::new(shared, gpu.info.clone(), gpu.device, OnceLock::from(Work::new(home))))
    }

    fn new(
        shared: &'static OpenedLibrary,
        info: GpuInfo,
        device: CuDevice,
        work: OnceLock<Work>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            shared,
            info,
            device,
            work,
            making: Mutex::default(),
            fabric: OnceLock::new(),
            no_batches: OnceLock::new(),
            me: Weak::clone(me),
        })
    }

    /// Returns the device as a counted reference, for a region to hold.
    pub(super) fn shared_self(&self) -> Result<Arc<dyn Gpu>, GpuError> {
        self.me().map(|gpu| gpu as Arc<dyn Gpu>)
    }

    fn me(&self) -> Result<Arc<Self>, GpuError> {
        let gone = || because("gpu", INVALID_DEVICE, "the device is being dropped");
        self.me.upgrade().ok_or_else(gone)
    }

    /// Returns the library's objects in the device's context, which is created if necessary.
    #[inline]
    pub(super) fn home(&self) -> Result<&Arc<Home>, GpuError> {
        self.work().map(|work| &work.home)
    }

    /// Forgets what the copier knows of a range: see
    /// [`Driver::forget`](crate::gpu::Driver::forget).
    pub(super) fn forget(&self, range: &Range<usize>) {
        if let Some(Ok(copier)) = self.known_home().and_then(|home| home.copier.get()) {
            copier.forget(range);
        }
    }

    /// Returns the library's objects in the device's context, if that was created.
    pub(super) fn known_home(&self) -> Option<&Arc<Home>> {
        self.work.get().map(|work| &work.home)
    }

    #[inline]
    pub(super) fn work(&self) -> Result<&Work, GpuError> {
        match self.work.get() {
            Some(work) => Ok(work),
            None => self.begin_work(),
        }
    }

    #[cold]
    fn begin_work(&self) -> Result<&Work, GpuError> {
        let _making = self.making.lock();
        if let Some(work) = self.work.get() {
            return Ok(work);
        }
        let context = CudaContext::primary(self.shared.calls, self.device)?;
        let work = Work::new(Home::new(context, self.shared.gpus()?.len(), self.shared.waits()));
        Ok(self.work.get_or_init(|| work))
    }

    /// Returns `true` if a context of this device is its primary one.
    pub(super) fn is_primary(&self, context: ContextHandle) -> Result<bool, GpuError> {
        // Without a primary context there is none to compare with. Once it exists, holding it
        // costs nothing.
        match self.known_home() {
            Some(home) => Ok(home.context.raw == context),
            None => Ok(self.is_active()? && self.home()?.context.raw == context),
        }
    }

    /// Returns `true` if the device has a primary context. Without one it has no ordinary memory
    /// in this process.
    fn is_active(&self) -> Result<bool, GpuError> {
        if self.work.get().is_some() {
            return Ok(true);
        }
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the places for the answers are ours.
        unsafe {
            self.shared.calls.device_primary_ctx_get_state(
                self.device,
                &raw mut flags,
                &raw mut active,
            )
        }?;
        Ok(active != 0)
    }
}

// SAFETY: each region is an allocation of the driver's, or a mapping of one. A copy is refused
// before a stream has it, or is waited for; events are recorded behind copies.
unsafe impl Gpu for CudaGpu {
    fn info(&self) -> &GpuInfo {
        &self.info
    }

    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError> {
        self.shared.classify(addr)
    }

    fn make_current(&self) -> Result<(), GpuError> {
        self.home()?.context.stay()
    }

    fn check(&self) -> Result<(), GpuError> {
        self.home()?.context.check()
    }

    fn allocate(&self, len: usize, flavour: Flavour) -> Result<Region, GpuError> {
        memory::allocate(self, len, flavour)
    }

    fn granularity(&self) -> Result<usize, GpuError> {
        vmm::unit(self)
    }

    fn reserve(&self, len: usize) -> Result<Reservation, GpuError> {
        vmm::reserve(self, len)
    }

    fn allocate_at(
        &self,
        reservation: &Reservation,
        offset: usize,
        len: usize,
        access: &[Access],
    ) -> Result<Region, GpuError> {
        vmm::allocate_at(self, reservation, (offset, len), access)
    }

    fn rights_at(&self, addr: usize) -> Result<Option<Rights>, GpuError> {
        vmm::rights_at(self, addr)
    }

    fn keeps_from_writing(&self, owner: GpuUuid) -> Result<(), GpuError> {
        attempt::keeps_from_writing(self, owner)
    }

    /// Starts a copy. Host memory that is neither pinned nor registered blocks the call while the
    /// driver stages the copy.
    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError> {
        // SAFETY: passed on from the caller.
        unsafe { self.copy_on(None, dst, src, len) }
    }

    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<GpuEvent, GpuError> {
        // SAFETY: passed on from the caller.
        unsafe { self.copy_pieces_on(None, pieces) }
    }

    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        // SAFETY: passed on from the caller.
        unsafe { self.copy_grid_on(None, dst, src, grid) }
    }

    fn how_pieces_go(&self) -> String {
        pieces::how(self)
    }

    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        Ok(Arc::new(CudaStream::new(self.me()?)?))
    }

    fn copier(&self) -> CopierState {
        let told = self.known_home().and_then(|home| home.copier_state());
        told.unwrap_or_else(|| match self.shared.wants_copiers() {
            true => copier::before_use(self.shared.calls, self.device),
            false => CopierState::Off,
        })
    }

    fn reaches(&self, peer: GpuUuid) -> Result<(), GpuError> {
        if peer == self.info.uuid {
            return Ok(());
        }
        let at = self.shared.position(peer).ok_or_else(|| unseen("reaches", peer))?;
        let other = self.shared.gpus()?.get(at).ok_or_else(|| error("reaches", INVALID_DEVICE))?;
        peer::can_access(self.shared.calls, self.device, other.device)?;
        if other.is_active()? { peer::enable(self.home()?, other.home()?) } else { Ok(()) }
    }

    fn peer(&self, peer: GpuUuid) -> Result<PeerInfo, GpuError> {
        let at = self.shared.position(peer).ok_or_else(|| unseen("peer", peer))?;
        let other = self.shared.gpus()?.get(at).ok_or_else(|| error("peer", INVALID_DEVICE))?;
        let told = peer::describe(self.shared.calls, self.device, other.device)?;
        let link = self.shared.links().and_then(|links| links.between(self.info.uuid, peer));
        Ok(PeerInfo { link: link.unwrap_or_default(), ..told })
    }

    fn export(&self, region: &Region, form: HandleForm) -> Result<Handle, GpuError> {
        ipc::export(self, region, form)
    }

    fn open(&self, handle: &Handle) -> Result<Region, GpuError> {
        ipc::open(self, handle)
    }

    fn open_at(
        &self,
        reservation: &Reservation,
        offset: usize,
        handle: &Handle,
    ) -> Result<Region, GpuError> {
        ipc::open_at(self, (reservation, offset), handle)
    }

    fn export_dmabuf(&self, addr: usize, len: usize) -> Result<DmaBuf, GpuError> {
        direct::export(self, addr, len)
    }

    fn remote_writes(&self) -> RemoteWrites {
        direct::remote_writes(self)
    }

    fn flush_remote_writes(&self) -> Result<(), GpuError> {
        direct::flush(self)
    }

    unsafe fn register_host(
        &self,
        addr: *mut u8,
        len: usize,
    ) -> Result<HostRegistration, GpuError> {
        // SAFETY: passed on from the caller.
        unsafe { memory::register_host(self.home()?, addr, len) }
    }

    fn when_no_stream_waits(&self, task: Box<dyn FnOnce() + Send>) {
        match self.known_home() {
            Some(home) => home.waits.when_none(task),
            None => task(),
        }
    }

    fn shared_event(&self) -> Result<Arc<dyn SharedEvent>, GpuError> {
        Ok(Arc::new(IpcEvent::make(self.home()?)?))
    }

    fn open_event(&self, handle: &[u8; 64]) -> Result<Arc<dyn SharedEvent>, GpuError> {
        Ok(Arc::new(IpcEvent::open(self.home()?, *handle)?))
    }
}

impl fmt::Debug for CudaGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGpu({} #{})", self.info.uuid, self.info.ordinal)
    }
}

pub(super) fn unseen(call: &'static str, uuid: GpuUuid) -> GpuError {
    let hint = format!(
        "{uuid} is not among the devices that this process can see; whether its memory can be \
        opened is known by trying"
    );
    because(call, INVALID_DEVICE, hint)
}

fn info(
    shared: &'static OpenedLibrary,
    ordinal: c_int,
    device: CuDevice,
) -> Result<GpuInfo, GpuError> {
    let calls = shared.calls;
    let (mut uuid, mut memory) = (Uuid::default(), 0_usize);
    let (mut name, mut pci) = ([0 as c_char; 128], [0 as c_char; 32]);
    // SAFETY: the places for the answers are ours, and as long as is said.
    unsafe {
        calls.device_get_uuid(&raw mut uuid, device)?;
        calls.device_total_mem(&raw mut memory, device)?;
        calls.device_get_name(name.as_mut_ptr(), 128, device)?;
        calls.device_get_pci_bus_id(pci.as_mut_ptr(), 32, device)?;
    }
    Ok(GpuInfo {
        uuid: GpuUuid(uuid.0),
        ordinal: u32::try_from(ordinal).unwrap_or(u32::MAX),
        name: text(&name),
        pci: text(&pci).to_ascii_lowercase(),
        memory: memory as u64,
        simulated: false,
    })
}

/// Returns the text before the first zero.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().flat_map(|char| char.to_ne_bytes()).chain([0]).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}
