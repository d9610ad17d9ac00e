//! The driver, as the process uses it.

use super::attempt::Verdicts;
use super::calls::Calls;
use super::context::CudaContext;
use super::device::CudaGpu;
use super::error::{
    DEINITIALIZED, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, STUB_LIBRARY, because,
};
use super::ipc::Openings;
use super::links::Links;
use super::sys::{ContextHandle, CuDevice};
use super::{library, pointer};
use crate::gpu::waits::{self, PutOff, Waits};
use crate::gpu::{Driver, Extent, Gpu, GpuError};
use crate::mem::{AllocId, GpuUuid};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// NVIDIA's driver. Clones share one instance, as do all drivers made without a path. Contexts,
/// streams and mapped memory belong to the process, and are kept to its end.
#[derive(Clone, Copy)]
pub struct CudaDriver(&'static LazyLibrary);

/// A library, opened when it is first needed.
struct LazyLibrary {
    /// Path of the library, if it is not the loader's choice.
    path: Option<PathBuf>,
    opened: OnceLock<Result<&'static OpenedLibrary, GpuError>>,
    /// Set if small copies go to resident kernels where possible.
    wants_copiers: AtomicBool,
}

static INSTALLED: LazyLibrary =
    LazyLibrary { path: None, opened: OnceLock::new(), wants_copiers: AtomicBool::new(false) };

impl CudaDriver {
    /// Returns the installed driver, as the program uses it. Opens nothing now, and initialises
    /// CUDA only if devices are asked for (gpu.md, streams rule 6). Until the program has
    /// initialised CUDA, every address is host memory.
    pub fn adopt() -> Self {
        Self(&INSTALLED)
    }

    /// Initialises the installed driver, and returns it.
    ///
    /// # Errors
    /// There is no driver, it is too old or a stub, or it has no device. The hint says what to do.
    pub fn initialise() -> Result<Self, GpuError> {
        let driver = Self::adopt();
        driver.shared()?.initialise()?;
        Ok(driver)
    }

    /// Returns a driver as [`adopt`](Self::adopt) does, with the library at a path. An opened
    /// library stays open to the end of the process.
    ///
    /// # Safety
    /// The file, if there is one, is no library, or one that can be opened. Its functions with
    /// names of the CUDA driver's calls have their signatures.
    ///
    /// ```compile_fail,E0133
    /// let driver = carrack_transports::gpu::cuda::CudaDriver::at("libcuda.so.1".as_ref());
    /// ```
    pub unsafe fn at(path: &Path) -> Self {
        let path = Some(path.to_owned());
        let library =
            LazyLibrary { path, opened: OnceLock::new(), wants_copiers: AtomicBool::new(false) };
        Self(Box::leak(Box::new(library)))
    }

    fn shared(&self) -> Result<&'static OpenedLibrary, GpuError> {
        self.opened().as_ref().map(|shared| *shared).map_err(GpuError::clone)
    }

    fn opened(&self) -> &'static Result<&'static OpenedLibrary, GpuError> {
        let open = || {
            let (calls, version) = library::open(self.0.path.as_deref())?;
            tracing::debug!(path = calls.path, version, missing = ?calls.missing(), "libcuda");
            let shared = OpenedLibrary {
                calls: Box::leak(Box::new(calls)),
                version,
                gpus: OnceLock::new(),
                listing: Mutex::default(),
                foreign: Mutex::default(),
                opened: Openings::default(),
                attributes: AtomicUsize::new(pointer::ALL),
                links: OnceLock::new(),
                connections: waits::connections(),
                put_off: Arc::default(),
                wants_copiers: &self.0.wants_copiers,
                verdicts: Verdicts::default(),
            };
            Ok(&*Box::leak(Box::new(shared)))
        };
        self.0.opened.get_or_init(open)
    }

    /// Returns the opened library if CUDA has been initialised, else `None`.
    #[inline]
    fn initialised(&self) -> Result<Option<&'static OpenedLibrary>, GpuError> {
        match self.0.opened.get() {
            Some(Ok(shared)) if shared.gpus.get().is_some() => Ok(Some(shared)),
            _ => self.initialised_by_now(),
        }
    }

    #[cold]
    fn initialised_by_now(&self) -> Result<Option<&'static OpenedLibrary>, GpuError> {
        // Without a usable library there is no device memory.
        let Ok(shared) = self.opened() else { return Ok(None) };
        Ok(shared.is_initialised()?.then_some(*shared))
    }

    /// Returns the library, after initialising CUDA if necessary.
    pub(super) fn usable(&self) -> Result<&'static OpenedLibrary, GpuError> {
        let shared = self.shared()?;
        shared.initialise()?;
        Ok(shared)
    }

    /// Returns the opened library if CUDA has been initialised, else an error of `call`.
    pub(super) fn ready(&self, call: &'static str) -> Result<&'static OpenedLibrary, GpuError> {
        let shared = self.shared()?;
        if shared.is_initialised()? {
            Ok(shared)
        } else {
            Err(super::error::error(call, NOT_INITIALIZED))
        }
    }
}

// SAFETY: the answers are those of the driver, which knows all memory of its devices.
unsafe impl Driver for CudaDriver {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn version(&self) -> Option<String> {
        let shared = self.shared().ok()?;
        let cuda = library::dotted(shared.version);
        let module = std::fs::read_to_string("/sys/module/nvidia/version");
        let module =
            module.map_or_else(|_| String::new(), |text| format!(", driver {}", text.trim()));
        Some(format!("CUDA {cuda}{module}, {}", shared.calls.path))
    }

    fn devices(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError> {
        self.usable()?.devices()
    }

    fn devices_in_use(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError> {
        self.ready("cuDeviceGetCount")?.devices()
    }

    fn look_after(&self) {
        let Some(Ok(shared)) = self.0.opened.get() else { return };
        shared.put_off.catch_up();
    }

    fn forget(&self, addr: usize, len: usize) {
        let Some(Ok(shared)) = self.0.opened.get() else { return };
        let range = addr..addr.saturating_add(len);
        shared.gpus.get().into_iter().flatten().for_each(|gpu| gpu.forget(&range));
    }

    fn use_copiers(&self) {
        self.0.wants_copiers.store(true, Ordering::SeqCst);
    }

    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError> {
        match self.initialised()? {
            Some(shared) => shared.classify(addr),
            None => Ok(None),
        }
    }

    fn buffer_id(&self, addr: usize) -> Result<Option<AllocId>, GpuError> {
        match self.initialised()? {
            Some(shared) => shared.buffer_id(addr),
            None => Ok(None),
        }
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.opened.get() {
            None => f.write_str("CudaDriver(not opened yet)"),
            Some(Err(why)) => write!(f, "CudaDriver({why})"),
            Some(Ok(shared)) => write!(f, "CudaDriver({})", shared.calls.path),
        }
    }
}

/// An opened library, and the process's objects in it.
pub(super) struct OpenedLibrary {
    pub(super) calls: &'static Calls,
    version: c_int,
    /// Devices, listed once CUDA is initialised; each works in its primary context.
    gpus: OnceLock<Vec<Arc<CudaGpu>>>,
    /// Lock that is held while the devices are listed.
    listing: Mutex<()>,
    /// Devices in contexts of the user's own. The context's number tells a reused handle from the
    /// old one.
    foreign: Mutex<HashMap<ContextHandle, (u64, Arc<CudaGpu>)>>,
    pub(super) opened: Openings,
    /// Number of pointer attributes that this driver knows.
    pub(super) attributes: AtomicUsize,
    /// Links between devices, opened for the first report that needs them.
    links: OnceLock<Option<Links>>,
    /// Connections from a context to its device, as the environment says.
    connections: usize,
    /// Calls that would block while a stream waits.
    put_off: Arc<PutOff>,
    wants_copiers: &'static AtomicBool,
    /// Results of the trials of read-only access.
    pub(super) verdicts: Verdicts,
}

impl OpenedLibrary {
    fn initialise(&'static self) -> Result<(), GpuError> {
        // SAFETY: no arguments to get wrong; initialising again does nothing.
        match unsafe { self.calls.init(0) } {
            Err(error) if error.code == STUB_LIBRARY => Err(library::stub(&self.calls.path)),
            other => other,
        }
    }

    /// Returns `true` if small copies go to resident kernels where possible.
    pub(super) fn wants_copiers(&self) -> bool {
        self.wants_copiers.load(Ordering::SeqCst)
    }

    /// Creates the record of waiting streams for one more context.
    pub(super) fn waits(&self) -> Arc<Waits> {
        Waits::over(self.connections, &self.put_off)
    }

    /// Returns `true` if `cuInit` has been called in this process. The query does not initialise
    /// the driver.
    fn is_initialised(&self) -> Result<bool, GpuError> {
        if self.gpus.get().is_some() {
            return Ok(true);
        }
        let mut count = 0;
        // SAFETY: the place for the answer is ours.
        match unsafe { self.calls.device_get_count(&raw mut count) } {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.code, NOT_INITIALIZED | DEINITIALIZED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the devices. CUDA has been initialised.
    pub(super) fn gpus(&'static self) -> Result<&'static [Arc<CudaGpu>], GpuError> {
        if let Some(gpus) = self.gpus.get() {
            return Ok(gpus);
        }
        let _listing = self.listing.lock();
        if let Some(gpus) = self.gpus.get() {
            return Ok(gpus);
        }
        let mut count = 0;
        // SAFETY: the place for the answer is ours.
        unsafe { self.calls.device_get_count(&raw mut count) }?;
        let gpus = (0..count)
            .map(|ordinal| CudaGpu::primary(self, ordinal))
            .collect::<Result<Vec<_>, _>>()?;
        if gpus.is_empty() {
            return Err(super::error::error("cuDeviceGetCount", NO_DEVICE));
        }
        Ok(self.gpus.get_or_init(|| gpus))
    }

    fn devices(&'static self) -> Result<Vec<Arc<dyn Gpu>>, GpuError> {
        Ok(self.gpus()?.iter().map(|gpu| Arc::clone(gpu) as Arc<dyn Gpu>).collect())
    }

    /// Returns the library that describes links between devices, if there is one.
    pub(super) fn links(&self) -> Option<&Links> {
        self.links.get_or_init(Links::open).as_ref()
    }

    /// Returns this process's number of a device, if the device is visible.
    pub(super) fn position(&'static self, uuid: GpuUuid) -> Option<usize> {
        self.gpus().ok()?.iter().position(|gpu| gpu.info().uuid == uuid)
    }

    /// Returns the engine for a device's memory that was found in a context. As a rule, and always
    /// for memory of no context, that is the owner in its primary context. Memory opened from
    /// another process lies in the opener's context, whatever device owns it.
    pub(super) fn engine(
        &'static self,
        owner: &Arc<CudaGpu>,
        context: ContextHandle,
    ) -> Result<Arc<CudaGpu>, GpuError> {
        if context == ContextHandle::NULL || owner.is_primary(context)? {
            return Ok(Arc::clone(owner));
        }
        self.gpu_in(context)
    }

    /// Returns the device of a context, working in that context.
    pub(super) fn gpu_in(&'static self, context: ContextHandle) -> Result<Arc<CudaGpu>, GpuError> {
        let number = CudaContext::number(self.calls, context);
        if let Some((known, gpu)) = self.foreign.lock().get(&context)
            && *known == number
        {
            return Ok(Arc::clone(gpu));
        }
        let mut device: CuDevice = 0;
        {
            // Made current only to query its device.
            let looked_at = CudaContext::unowned(self.calls, context);
            let _current = looked_at.enter()?;
            // SAFETY: the place for the answer is ours.
            unsafe { self.calls.ctx_get_device(&raw mut device) }?;
        }
        let at = usize::try_from(device).unwrap_or(usize::MAX);
        let gpu = self.gpus()?.get(at).ok_or_else(|| {
            because("cuCtxGetDevice", INVALID_DEVICE, format!("there is no device {device}"))
        })?;
        if gpu.is_primary(context)? {
            return Ok(Arc::clone(gpu));
        }
        let adopted = CudaGpu::adopted(self, gpu, context)?;
        // A previous entry belonged to a destroyed context, or another thread has just inserted
        // it.
        self.foreign.lock().insert(context, (number, Arc::clone(&adopted)));
        Ok(adopted)
    }
}

impl fmt::Debug for OpenedLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenedLibrary({:?})", self.calls)
    }
}
