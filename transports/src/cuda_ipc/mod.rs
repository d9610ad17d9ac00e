//! GPU memory of other processes of this machine, mapped.
//!
//! ```text
//! exporter                                      importer
//!   ledger page, with the registration's        maps the ledger, and enters itself
//!   epoch and the memory's importers            checks that the registration stands
//!   handle of the allocation  ─── key ───►      opens the handle: once, for all its regions
//!   frees it when no importer is left           closes it, and removes its entry
//! ```
//!
//! It carries no messages. Mapped memory is an ordinary region, which the copy engines of the
//! importer read and write. The same code serves real GPUs and simulated ones, since both are
//! [`Driver`]s.
//!
//! | module | one idea |
//! |---|---|
//! | `ledger` | importers of an allocation: a page that all of them see |
//! | `broker` | hands out descriptors, to processes that may not fetch them |
//! | `key` | keys, and the way from a key to its descriptors |
//! | `exports` | allocations of this process: exported once, freed when no process maps them |
//! | `imports` | allocations of other processes: opened once, kept for the next region |
//! | `settings` | the settings of this transport |
//!
//! Memory pools are not mapped. When the process that made the pool dies, a copy that touches its
//! memory ends the importer's context (error 226, docs/gpu.md, "Measured"). Plain and VMM memory
//! survive.

mod broker;
mod exports;
mod imports;
mod key;
mod ledger;
mod settings;

use crate::contract::{Caps, Device, Domain, Exported, Imported, Locality, Unavailable, WireKey};
use crate::gpu::{Driver, Gpu};
use crate::mem::{MapError, PacketSource, Region};
use exports::Exports;
use imports::Imports;
pub use settings::CudaIpcSettings;
use std::sync::Arc;

/// Name of this transport.
pub const NAME: &str = "cuda_ipc";

/// Exchange of GPU memory with other processes: this process's for them, and theirs for this one.
pub struct CudaIpc {
    exports: Exports,
    imports: Imports,
    caps: Caps,
}

impl CudaIpc {
    /// Makes the domain for the devices of these drivers. Calls no driver before there is memory
    /// of its devices.
    pub fn new(drivers: Vec<Arc<dyn Driver>>) -> Self {
        let caps = Caps {
            am_inline: 0,
            am_copied: 0,
            am_owned: 0,
            am_from_device: false,
            remote_memory: false,
            windows: false,
            polls_kernel: false,
            chunk: usize::MAX,
            locality: Locality::Node,
        };
        Self { exports: Exports::default(), imports: Imports::of(drivers), caps }
    }
}

impl Domain for CudaIpc {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn maps_gpu_memory(&self) -> bool {
        true
    }

    fn carries_messages(&self) -> bool {
        false
    }

    fn export(&self, region: &Region) -> Result<Exported, MapError> {
        self.exports.export(region)
    }

    fn import(&self, key: &WireKey, near: Option<&Arc<dyn Gpu>>) -> Result<Imported, MapError> {
        self.imports.import(key, near)
    }

    fn mapped_by(&self, addr: usize, len: usize) -> Vec<u32> {
        self.exports.mapped_by(addr, len)
    }

    fn look_after(&self) {
        self.imports.close_ended();
        exports::free_left();
    }

    fn a_peer_has_gone(&self) {
        self.imports.close_dead();
        exports::free_left();
    }

    fn device(&self, _: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        Err(Unavailable::new(NAME, "it maps memory, and carries no messages"))
    }
}
