//! Simulated GPUs, for machines without one.
//!
//! | module | one idea |
//! |---|---|
//! | `config` | configuration of the driver: [`FakeConfig`] |
//! | `device` | one device: [`FakeGpu`] |
//! | `stream` | users' streams, and closures that stand for kernels: [`FakeStream`], [`Kernel`] |
//! | `standstill` | behaviour of a device while streams wait for words |
//! | `copier` | small copies by a resident kernel, which is a thread |
//! | `direct`, `udmabuf` | its memory, for NICs |
//! | `engine` | the threads that move the bytes: the only file that touches memory |
//! | `event` | an outcome that is set once |
//! | `shared_event` | events between processes |
//! | `several` | copies across adjacent VMM allocations |
//! | `memory` | memory that the CPU cannot touch: one memfd, mapped twice |
//! | `table` | allocated addresses |
//! | `shared` | state that the devices of a driver share |
//! | `alloc` | allocation, mapping and freeing |
//! | `reserved` | allocation at reserved addresses |
//! | `pinned` | host memory that counts as locked |
//! | `ipc` | handles between processes |
//! | `faults` | faults on request, and counters: [`GpuFaults`], [`Counters`] |
//! | `error` | the CUDA driver's codes |
//!
//! A device's memory lies at addresses without any access: a load, a store or a `memcpy` of the
//! CPU ends the process with SIGSEGV. So a test that passes here has used an engine. The rules of
//! the real driver hold: the forms of export, the processes that can open a handle, and the
//! meaning of freed addresses (gpu.md). Timing is not simulated, except requested delays.
//!
//! As with the real driver, `classify` does not know an address that was freed. A stale device
//! pointer looks like host memory, and a CPU access to it faults.

#![expect(unsafe_code, reason = "memory is mapped, protected and copied as a driver does it")]

mod alloc;
mod config;
mod copier;
mod device;
mod direct;
mod engine;
mod error;
mod event;
pub(crate) mod faults;
mod ipc;
mod memory;
mod pinned;
mod reserved;
mod several;
mod shared;
mod shared_event;
mod standstill;
mod stream;
mod table;
mod udmabuf;

pub use config::FakeConfig;
pub use device::FakeGpu;
pub use faults::{Counters, FailAt, GpuFaults, HeldCopies, Which};
pub use stream::{FakeStream, Kernel};

use carrack_transports::gpu::{Driver, Extent, Gpu, GpuError};
use carrack_transports::mem::AllocId;
use faults::count;
use shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A simulated driver. Clones are the same driver. A process may have several, which do not know
/// each other's memory.
///
/// ```
/// use carrack_simulators::gpu::{FakeConfig, FakeDriver};
/// use carrack_transports::gpu::{Flavour, Gpu};
///
/// let driver = FakeDriver::new(FakeConfig::devices(2))?;
/// let region = driver.gpu(1)?.allocate(1000, Flavour::Plain)?;
/// region.whole().write(b"by the engine").unwrap();
/// assert_eq!(region.slice(3, 3).unwrap().to_vec().unwrap(), b"the");
/// # Ok::<(), carrack_transports::gpu::GpuError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FakeDriver {
    shared: Arc<Shared>,
    gpus: Vec<Arc<FakeGpu>>,
}

impl FakeDriver {
    /// Creates a driver as the configuration says.
    ///
    /// # Errors
    /// 101: the list of visible devices is wrong. 1: the memory is less than one block of 2 MiB.
    /// 205: no addresses to reserve.
    pub fn new(config: FakeConfig) -> Result<Self, GpuError> {
        let shared = Arc::new(Shared::new(&config)?);
        let gpus = (0..shared.devices.len())
            .map(|at| shared.gpu("fake driver", at))
            .collect::<Result<_, _>>()?;
        Ok(Self { shared, gpus })
    }

    /// Returns the devices that this process can see, in their own type.
    pub fn gpus(&self) -> &[Arc<FakeGpu>] {
        &self.gpus
    }

    /// Returns one device, by this process's number of it.
    ///
    /// # Errors
    /// 101: there is none.
    pub fn gpu(&self, ordinal: usize) -> Result<Arc<FakeGpu>, GpuError> {
        self.shared.gpu("gpu", ordinal)
    }

    /// Returns the switches for faults.
    pub fn faults(&self) -> &Arc<GpuFaults> {
        &self.shared.faults
    }

    /// Sets a function that a flush of any device's remote writes calls, after counting it. With
    /// it a simulated NIC releases the writes that it holds back.
    pub fn when_flushed(&self, flushed: impl Fn() + Send + Sync + 'static) {
        self.shared.flushes.add(Box::new(flushed));
    }

    /// Returns the counts of driver calls.
    pub fn counters(&self) -> Counters {
        self.shared.faults.counters()
    }
}

// SAFETY: all memory of its devices is in its table, which it answers from, with ids that are
// never reused.
unsafe impl Driver for FakeDriver {
    fn name(&self) -> &'static str {
        "fake (simulated)"
    }

    fn devices(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError> {
        if self.gpus.is_empty() {
            let hint = "the simulated driver was told to have no device, or to show none";
            return Err(error::error("devices", error::NO_DEVICE, hint));
        }
        Ok(self.gpus.iter().map(|gpu| Arc::clone(gpu) as Arc<dyn Gpu>).collect())
    }

    fn look_after(&self) {
        self.shared.put_off.catch_up();
    }

    fn use_copiers(&self) {
        self.shared.wants_copiers.store(true, Ordering::SeqCst);
    }

    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError> {
        self.shared.classify(addr)
    }

    fn buffer_id(&self, addr: usize) -> Result<Option<AllocId>, GpuError> {
        count(&self.shared.faults.counts.buffer_ids);
        match self.shared.find(addr) {
            Some(found) => Ok(Some(found.id)),
            None => Ok(self.shared.find_pinned(addr)?.map(|extent| extent.id)),
        }
    }
}

impl Shared {
    fn classify(self: &Arc<Self>, addr: usize) -> Result<Option<Extent>, GpuError> {
        let faults = &self.faults;
        count(&faults.counts.classifies);
        let Some(found) = self.find(addr) else {
            return self.find_pinned(addr);
        };
        if let Some(gpu) = found.kind.gpu().filter(|gpu| faults.hides(*gpu)) {
            let hint = format!(
                "{addr:#x} is memory of {gpu}, which this process cannot see: widen its mask"
            );
            return Err(error::error("classify", error::INVALID_DEVICE, hint));
        }
        Ok(Some(Extent {
            base: found.base,
            len: found.len,
            kind: found.kind,
            id: found.id,
            gpu: Some(self.gpu("classify", found.ordinal)?),
            context: found.context.filter(|_| !self.faults.nulls_context()),
            forms: found.forms,
        }))
    }
}
