//! Memory of GPUs that the NIC accesses directly (GPUDirect).
//!
//! There are two methods: the GPU's driver exports the range as a dma-buf, or a kernel module
//! (nvidia-peermem) finds it by its address. The NIC, the GPU and the path between them decide
//! which of them works, so both are tried, for each pair (gpu.md, dma-buf rule 1). A method
//! that was refused before it ever worked is not tried again, and its reason is kept.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::sys::{AccessFlags, MemoryRegion, ProtectionDomain, VerbsError};
use crate::gpu::{DmaBuf, Flavour, Gpu, GpuError, RemoteWrites};
use crate::mem::{GpuUuid, MemKind, Region};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Memory that is registered with the NIC.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) memory: MemoryRegion,
    /// The GPU to flush before a NIC's writes are visible there.
    pub(super) flush: Option<Arc<dyn Gpu>>,
}

impl From<MemoryRegion> for Registered {
    /// Wraps a registration of host memory.
    fn from(memory: MemoryRegion) -> Self {
        Self { memory, flush: None }
    }
}

/// Method to register memory of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RegistrationMethod {
    DmaBuf,
    Address,
}

impl RegistrationMethod {
    const ALL: [Self; 2] = [Self::DmaBuf, Self::Address];

    fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "by a dma-buf",
            Self::Address => "by its address, as with nvidia-peermem",
        }
    }
}

/// Experience with one method.
#[derive(Clone, Default, Debug)]
enum Verdict {
    #[default]
    Untried,
    Works,
    Refused(String),
}

/// Reason why one registration failed.
struct RegistrationRefusal {
    why: String,
    /// Set if it may work another time, or with other memory.
    is_passing: bool,
}

/// Registration of memory of GPUs with one NIC.
#[derive(Debug)]
pub(super) struct GpuMemory {
    domain: Arc<ProtectionDomain>,
    verdicts: Mutex<HashMap<GpuUuid, [Verdict; RegistrationMethod::ALL.len()]>>,
}

impl GpuMemory {
    pub(super) fn new(domain: Arc<ProtectionDomain>) -> Self {
        Self { domain, verdicts: Mutex::default() }
    }

    /// Registers `len` bytes at `addr`, which lie in `region`.
    ///
    /// # Errors
    /// The reasons why neither method works; or the memory was freed, or is of a kind that a NIC
    /// does not reach.
    ///
    /// # Safety
    /// The memory stays allocated as long as the registration lives; or the registration is not
    /// used after the memory is freed.
    pub(super) unsafe fn register(
        &self,
        region: &Region,
        (addr, len): (usize, usize),
        access: AccessFlags,
    ) -> Result<Registered, String> {
        let gpu = region.gpu().ok_or("no driver is known for it")?;
        check(&**gpu, region, (addr, len))?;
        let flush = if access.contains(AccessFlags::LOCAL_WRITE) { flush_of(gpu)? } else { None };
        let uuid = gpu.info().uuid;
        let mut refusals = Vec::new();
        for method in RegistrationMethod::ALL {
            if let Verdict::Refused(why) = self.verdict(uuid, method) {
                refusals.push(format!("{}: {why}", method.name()));
                continue;
            }
            // SAFETY: passed on.
            match unsafe { self.try_method(method, &**gpu, (addr, len), access) } {
                Ok(memory) => {
                    self.note(uuid, method, Verdict::Works);
                    return Ok(Registered { memory, flush });
                }
                Err(RegistrationRefusal { why, is_passing }) => {
                    refusals.push(format!("{}: {why}", method.name()));
                    if !is_passing {
                        self.note(uuid, method, Verdict::Refused(why));
                    }
                }
            }
        }
        Err(refusals.join("; "))
    }

    /// Describes the access to memory of a GPU, for reports. Registers a byte if it is unknown.
    ///
    /// # Errors
    /// The reason why there is no access.
    pub(super) fn explain(&self, gpu: &dyn Gpu) -> Result<String, String> {
        let region = gpu.allocate(1, Flavour::Plain).map_err(|error| error.to_string())?;
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        // SAFETY: the region exists until the registration is dropped below.
        let registered = unsafe { self.register(&region, (region.addr(), 1), access) }?;
        let flushed = if registered.flush.is_some() { "; what was written is flushed" } else { "" };
        drop(registered);
        let known =
            RegistrationMethod::ALL.map(|method| (method, self.verdict(gpu.info().uuid, method)));
        let used = known.iter().find(|(_, verdict)| matches!(verdict, Verdict::Works));
        let (used, _) = used.ok_or("what has just worked is not known")?;
        let refused = known.iter().filter_map(|(method, verdict)| match verdict {
            Verdict::Refused(why) => Some(format!(" (not {}: {why})", method.name())),
            _ => None,
        });
        Ok(format!("{}{flushed}{}", used.name(), refused.collect::<String>()))
    }

    /// Registers `len` bytes at `addr` of a GPU's memory by one method.
    ///
    /// # Safety
    /// As [`register`](Self::register).
    unsafe fn try_method(
        &self,
        method: RegistrationMethod,
        gpu: &dyn Gpu,
        (addr, len): (usize, usize),
        access: AccessFlags,
    ) -> Result<MemoryRegion, RegistrationRefusal> {
        match method {
            RegistrationMethod::DmaBuf => {
                // Closed at once: the NIC's driver holds the memory by itself (gpu.md, dma-buf
                // rule 2).
                let DmaBuf { fd, offset } = gpu.export_dmabuf(addr, len)?;
                // SAFETY: passed on. Peers name the bytes by the GPU's addresses.
                Ok(unsafe {
                    self.domain.register_dmabuf(fd.as_fd(), offset, len, addr as u64, access)
                }?)
            }
            RegistrationMethod::Address => {
                // SAFETY: passed on.
                Ok(unsafe { self.domain.register(addr as *mut u8, len, access) }?)
            }
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<GpuUuid, [Verdict; RegistrationMethod::ALL.len()]>> {
        self.verdicts.lock()
    }

    fn verdict(&self, gpu: GpuUuid, method: RegistrationMethod) -> Verdict {
        self.all().get(&gpu).map_or(Verdict::Untried, |verdicts| verdicts[method as usize].clone())
    }

    fn note(&self, gpu: GpuUuid, method: RegistrationMethod, verdict: Verdict) {
        let mut all = self.all();
        let known = &mut all.entry(gpu).or_default()[method as usize];
        if !matches!(known, Verdict::Works) {
            if let Verdict::Refused(why) = &verdict {
                tracing::info!(%gpu, method = method.name(), why, "the NIC cannot register \
                    this GPU's memory by this method");
            }
            *known = verdict;
        }
    }
}

/// Checks that the memory is still the allocation of the region, and of a kind that a NIC can use.
fn check(gpu: &dyn Gpu, region: &Region, (addr, len): (usize, usize)) -> Result<(), String> {
    if region.is_joined() {
        return Err("it is made of several allocations".into());
    }
    let extent = gpu.classify(addr).map_err(|error| error.to_string())?;
    let Some(extent) = extent.filter(|extent| extent.id == region.id()) else {
        return Err(format!("{region:?} has been freed"));
    };
    // Managed memory moves, and a NIC keeps the present address (gpu.md, dma-buf rule 5).
    if !matches!(extent.kind, MemKind::Device(_)) {
        return Err(format!("it is {} memory, which is registered with no NIC", extent.kind));
    }
    match addr.checked_add(len).is_some_and(|end| end <= extent.end()) {
        true => Ok(()),
        false => Err("it is made of several allocations".into()),
    }
}

/// Returns the GPU, if it has to be flushed before a NIC's writes are visible.
fn flush_of(gpu: &Arc<dyn Gpu>) -> Result<Option<Arc<dyn Gpu>>, String> {
    match gpu.remote_writes() {
        RemoteWrites::InOrder => Ok(None),
        RemoteWrites::AfterFlush => Ok(Some(gpu.clone())),
        RemoteWrites::Unordered(why) => {
            Err(format!("what a NIC writes there might not be seen: {why}"))
        }
    }
}

impl From<GpuError> for RegistrationRefusal {
    fn from(error: GpuError) -> Self {
        // Out of memory, or the system lacks descriptors.
        Self { is_passing: matches!(error.code, 2 | 304), why: error.to_string() }
    }
}

impl From<VerbsError> for RegistrationRefusal {
    fn from(error: VerbsError) -> Self {
        let passing = [libc::ENOMEM, libc::EMFILE, libc::ENFILE, libc::EAGAIN, libc::EINTR];
        Self { is_passing: passing.contains(&error.errno), why: error.to_string() }
    }
}
