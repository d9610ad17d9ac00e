//! One device, in one context.

use super::context::Context;
use super::copier::{Copier, Offered};
use super::driver::Shared;
use super::error::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, because, error};
use super::event::{Fired, IpcEvent};
use super::home::{Home, lock};
use super::lane::{Copies, Way};
use super::memory;
use super::stream::CudaStream;
use super::sys::{ContextHandle, Device, StreamHandle, Uuid};
use super::{attempt, copier, direct, ipc, peer, pieces, vmm};
use crate::gpu::{
    Access, CopierState, DmaBuf, Event, Extent, Flavour, Gpu, GpuError, GpuInfo, Grid, Handle, HandleForm,
    HostRegistration, PeerInfo, Pieces, RemoteWrites, Reservation, Rights, SharedEvent, Stream,
};
use crate::mem::{GpuUuid, MemKind, Region};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// A device, working in its primary context, or in one of the user's own where memory was found there.
pub struct CudaGpu {
    pub(super) shared: &'static Shared,
    info: GpuInfo,
    pub(super) device: Device,
    /// Made when it is first needed: a context takes time and hundreds of MiB of the device.
    work: OnceLock<Work>,
    making: Mutex<()>,
    /// Why memory for a fabric was refused, once it was tried.
    pub(super) fabric: OnceLock<Option<GpuError>>,
    /// Why copies are not given together, once that was refused.
    pub(super) no_batches: OnceLock<GpuError>,
    me: Weak<Self>,
}

/// Where a device works, and the copies that it does there.
struct Work {
    home: Arc<Home>,
    copies: [Arc<Copies>; Way::ALL.len()],
}

impl Work {
    fn new(home: Home) -> Self {
        let home = Arc::new(home);
        Self { copies: Way::ALL.map(|way| Copies::new(&home, way)), home }
    }
}

impl CudaGpu {
    /// The device of an ordinal. Makes no context.
    pub(super) fn primary(shared: &'static Shared, ordinal: c_int) -> Result<Arc<Self>, GpuError> {
        let mut device: Device = 0;
        // SAFETY: the place for the answer is ours.
        unsafe { shared.calls.device_get(&raw mut device, ordinal) }?;
        let info = info(shared, ordinal, device)?;
        Ok(Self::new(shared, info, device, OnceLock::new()))
    }

    /// The device in a context of the user's.
    pub(super) fn adopted(
        shared: &'static Shared,
        gpu: &Self,
        context: ContextHandle,
    ) -> Result<Arc<Self>, GpuError> {
        let context = Context::adopted(shared.calls, context, gpu.device)?;
        let home = Home::new(context, shared.gpus()?.len(), shared.waits());
        Ok(Self::new(shared, gpu.info.clone(), gpu.device, OnceLock::from(Work::new(home))))
    }

    fn new(shared: &'static Shared, info: GpuInfo, device: Device, work: OnceLock<Work>) -> Arc<Self> {
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

    /// Itself, for a region to hold.
    pub(super) fn shared_self(&self) -> Result<Arc<dyn Gpu>, GpuError> {
        self.me().map(|gpu| gpu as Arc<dyn Gpu>)
    }

    fn me(&self) -> Result<Arc<Self>, GpuError> {
        let gone = || because("gpu", INVALID_DEVICE, "the device is being dropped");
        self.me.upgrade().ok_or_else(gone)
    }

    /// What the library has in its context, which is made if need be.
    #[inline]
    pub(super) fn home(&self) -> Result<&Arc<Home>, GpuError> {
        self.work().map(|work| &work.home)
    }

    /// See [`Driver::forget`](crate::gpu::Driver::forget).
    pub(super) fn forget(&self, range: &Range<usize>) {
        if let Some(Ok(copier)) = self.known_home().and_then(|home| home.copier.get()) {
            copier.forget(range);
        }
    }

    /// What the library has in its context, if that is made.
    fn known_home(&self) -> Option<&Arc<Home>> {
        self.work.get().map(|work| &work.home)
    }

    #[inline]
    fn work(&self) -> Result<&Work, GpuError> {
        match self.work.get() {
            Some(work) => Ok(work),
            None => self.begin_work(),
        }
    }

    #[cold]
    fn begin_work(&self) -> Result<&Work, GpuError> {
        let _making = lock(&self.making);
        if let Some(work) = self.work.get() {
            return Ok(work);
        }
        let context = Context::primary(self.shared.calls, self.device)?;
        let work = Work::new(Home::new(context, self.shared.gpus()?.len(), self.shared.waits()));
        Ok(self.work.get_or_init(|| work))
    }

    /// What takes small copies, if that was asked for and can be had. Found out at the first copy: a context alone uses no GPU.
    #[inline]
    fn copier_in<'a>(&self, home: &'a Arc<Home>) -> Option<&'a Copier> {
        match home.copier.get() {
            Some(copier) => copier.as_ref().ok(),
            None if self.shared.wants_copiers() => self.set_up_copier(home),
            None => None,
        }
    }

    /// Loading a kernel waits for the context, so it is done when no stream waits for a word.
    #[cold]
    fn set_up_copier<'a>(&self, home: &'a Arc<Home>) -> Option<&'a Copier> {
        if !home.is_copier_begun.swap(true, Ordering::SeqCst) {
            let (own, info) = (Arc::clone(home), self.info.clone());
            home.waits.when_none(move || {
                let copier = own.copier.get_or_init(|| Copier::set_up(&own, &info));
                if let Err(why) = copier {
                    tracing::warn!(gpu = %info.uuid, why, "no resident copier");
                }
            });
        }
        home.copier.get()?.as_ref().ok()
    }

    /// Whether a context of this device is its primary one.
    pub(super) fn is_primary(&self, context: ContextHandle) -> Result<bool, GpuError> {
        // There is no primary context to compare with before somebody has made it; then holding it costs nothing.
        match self.known_home() {
            Some(home) => Ok(home.context.raw == context),
            None => Ok(self.is_active()? && self.home()?.context.raw == context),
        }
    }

    /// Whether the device has a primary context: without one it has no ordinary memory in this process.
    fn is_active(&self) -> Result<bool, GpuError> {
        if self.work.get().is_some() {
            return Ok(true);
        }
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the places for the answers are ours.
        unsafe {
            self.shared.calls.device_primary_ctx_get_state(self.device, &raw mut flags, &raw mut active)
        }?;
        Ok(active != 0)
    }

    /// Gives this device's engines access to a peer's ordinary memory, if any has been met in this process: to allocate it
    /// here, or to classify it, is to have the peer's home. What was opened from another process, and VMM and pool memory,
    /// bring their access along, so they cost no context on the peer.
    #[inline]
    fn make_reachable(&self, home: &Home, owner: GpuUuid) -> Result<(), GpuError> {
        let Some(at) = self.shared.position(owner) else { return Ok(()) };
        if peer::is_enabled(home, at) {
            return Ok(());
        }
        match self.shared.gpus()?.get(at).and_then(|other| other.known_home()) {
            Some(other) => peer::enable(home, other),
            None => Ok(()),
        }
    }

    /// Which way a copy goes, if it may be done at all.
    fn way(&self, home: &Home, dst: MemKind, src: MemKind) -> Result<Way, GpuError> {
        if let (MemKind::Device(to), MemKind::Device(from)) = (dst, src) {
            let (to_own, from_own) = (to == self.info.uuid, from == self.info.uuid);
            if !to_own {
                self.reach(home, to);
            }
            if !from_own {
                self.reach(home, from);
            }
            return Ok(if to_own && from_own { Way::Within } else { Way::Peer });
        }
        let refuse = |code, hint: &str| Err(because("copy", code, format!("{hint}: from {src} to {dst}")));
        let way = match (dst, src) {
            (MemKind::Managed(_), _) | (_, MemKind::Managed(_)) => {
                return refuse(NOT_SUPPORTED, "managed memory moves while it is used, and is not copied");
            }
            (MemKind::Unknown, _) | (_, MemKind::Unknown) => {
                return refuse(INVALID_VALUE, "memory of unknown kind: classify it first");
            }
            (MemKind::Device(_), _) => Way::FromHost,
            (_, MemKind::Device(_)) => Way::ToHost,
            _ => return refuse(INVALID_VALUE, "the CPU copies between host and host"),
        };
        if let Some(owner) = dst.gpu().or(src.gpu()).filter(|owner| *owner != self.info.uuid) {
            self.reach(home, owner);
        }
        Ok(way)
    }

    /// As [`make_reachable`](Self::make_reachable), as far as it can be: a copy works without access, more slowly, since the driver
    /// takes it through host memory.
    #[inline]
    fn reach(&self, home: &Home, owner: GpuUuid) {
        if let Err(why) = self.make_reachable(home, owner) {
            tracing::debug!(%why, "no peer access");
        }
    }

    /// A copy between two contexts, told both: for VMM and pool memory that this device was given no access to, where
    /// the plain copy is refused (gpu.md: measured).
    fn copy_between_contexts(
        &self,
        home: &Home,
        (dst, src): (usize, usize),
        len: usize,
        stream: StreamHandle,
    ) -> Result<(), GpuError> {
        let end = |addr: usize| {
            let freed = || {
                let hint = format!("nothing is allocated at {addr:#x}: never was, or freed already");
                because("copy", INVALID_VALUE, hint)
            };
            let facts = self.shared.facts(addr)?.ok_or_else(freed)?;
            let owner = usize::try_from(facts.ordinal).ok().and_then(|at| self.shared.gpus().ok()?.get(at));
            let context = match owner {
                Some(gpu) if facts.context == ContextHandle::NULL => gpu.home()?.context.raw,
                _ => facts.context,
            };
            Ok::<_, GpuError>(context)
        };
        let (to, from) = (end(dst)?, end(src)?);
        // SAFETY: the promise that `Gpu::copy` was given.
        unsafe { home.calls().memcpy_peer_async(dst, to, src, from, len, stream) }
    }

    /// Gives a stream one copy. The context is current.
    ///
    /// # Safety
    /// As `Gpu::copy`.
    #[inline(always)]
    pub(super) unsafe fn copy_one(
        &self,
        (home, way, stream): (&Home, Way, StreamHandle),
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<(), GpuError> {
        let (to, from) = (dst.0 as usize, src.0 as usize);
        let calls = home.calls();
        // Each call says which side is the device's: the one that finds it out by itself takes a pointer to freed device
        // memory for one to host memory, and lets the CPU go there.
        // SAFETY: the caller's promise; the driver refuses device addresses that are not allocated.
        let mut started = unsafe {
            match way {
                Way::FromHost => calls.memcpy_htod_async(to, src.0.cast(), len, stream),
                Way::ToHost => calls.memcpy_dtoh_async(dst.0.cast(), from, len, stream),
                Way::Within | Way::Peer => calls.memcpy_dtod_async(to, from, len, stream),
            }
        };
        if let Err(refused) = &started
            && refused.code == INVALID_VALUE
            && matches!(way, Way::Peer | Way::Within)
        {
            started = self.copy_between_contexts(home, (to, from), len, stream);
        }
        started.map_err(|error| match error.code {
            INVALID_VALUE if error.hint.is_empty() => {
                let hint = format!(
                    "{len} bytes from {} at {from:#x} to {} at {to:#x}: not allocated, freed already, or longer than \
                     the allocation",
                    src.1, dst.1
                );
                GpuError { hint, ..error }
            }
            _ => error,
        })
    }

    /// What the resident copier is offered, and else a stream given, for copies of one way, and how their end is known: on a stream of
    /// the user's, or on the library's own for that way. A `give` that fails leaves nothing under way.
    #[inline(always)]
    pub(super) fn give_copies(
        &self,
        users: Option<StreamHandle>,
        (dst, src): (MemKind, MemKind),
        offer: impl FnOnce(&Copier, &Home) -> Offered,
        give: impl FnOnce((&Home, Way, StreamHandle)) -> Result<(), GpuError>,
    ) -> Result<Event, GpuError> {
        let Work { home, copies } = self.work()?;
        let way = self.way(home, dst, src)?;
        let mut without_kernel = None;
        if users.is_none()
            && let Some(copier) = self.copier_in(home)
        {
            if matches!(way, Way::Within | Way::Peer) {
                match offer(copier, home) {
                    Offered::Taken(event) => return Ok(event),
                    Offered::NoKernel => without_kernel = Some(copier),
                    Offered::Not => {}
                }
            }
            copier.resident.settle();
        }
        let _current = home.context.enter()?;
        let stream = users.map_or_else(|| home.lane(way), Ok)?;
        give((home, way, stream))?;
        if users.is_none() {
            let event = copies[way as usize].given();
            if let Some(copier) = without_kernel {
                copier.resident.renew();
            }
            return Ok(event);
        }
        home.record(stream).inspect_err(|_| {
            // Nobody could tell when it is over, so it has to be over now.
            // SAFETY: the stream is the user's, in this context.
            let _ = unsafe { home.calls().stream_synchronize(stream) };
        })
    }

    /// Starts a copy: on a stream of the user's, or on the library's own for that way.
    ///
    /// # Safety
    /// As `Gpu::copy`.
    pub(super) unsafe fn copy_on(
        &self,
        users: Option<StreamHandle>,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<Event, GpuError> {
        if len == 0 {
            self.way(&self.work()?.home, dst.1, src.1)?;
            return Ok(Event::new(Arc::new(Fired)));
        }
        let ends = (dst.0 as usize, src.0 as usize);
        let offer = |copier: &Copier, home: &Home| copier.offer(self, home, ends, len);
        // SAFETY: the caller's promise.
        self.give_copies(users, (dst.1, src.1), offer, |lane| unsafe { self.copy_one(lane, dst, src, len) })
    }
}

impl Gpu for CudaGpu {
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

    /// Host memory that is neither pinned nor registered makes the call itself wait for the driver's staging.
    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<Event, GpuError> {
        // SAFETY: passed on from the caller.
        unsafe { self.copy_on(None, dst, src, len) }
    }

    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<Event, GpuError> {
        // SAFETY: passed on from the caller.
        unsafe { self.copy_pieces_on(None, pieces) }
    }

    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<Event, GpuError> {
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

    fn open_at(&self, reservation: &Reservation, offset: usize, handle: &Handle) -> Result<Region, GpuError> {
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

    unsafe fn register_host(&self, addr: *mut u8, len: usize) -> Result<HostRegistration, GpuError> {
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
        "{uuid} is not among the devices that this process can see; whether its memory can be opened is known by trying"
    );
    because(call, INVALID_DEVICE, hint)
}

fn info(shared: &'static Shared, ordinal: c_int, device: Device) -> Result<GpuInfo, GpuError> {
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

/// What stands before the first zero.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&char| char.cast_unsigned()).chain([0]).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}
