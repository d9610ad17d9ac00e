//! GPU memory of other processes of this machine, mapped.
//!
//! ```text
//! exporter                                   importer
//!   ledger page, with the registration's       maps the ledger, writes itself into it
//!   epoch and who has the memory mapped         looks whether the registration stands
//!   handle of the allocation  ─── key ───►      opens the handle: once, for all its regions
//!   frees the memory when nobody is left        closes it, and takes itself out of the ledger
//! ```
//!
//! It carries no messages: what is mapped is an ordinary region, read and written by the copy
//! engines of the process that has it mapped. The same code serves real GPUs and simulated ones,
//! since both are [`Driver`]s.
//!
//! | module | one idea |
//! |---|---|
//! | `ledger` | who has an allocation mapped: a page that all of them see |
//! | `desk` | where descriptors are handed out, if nobody may fetch them |
//! | `key` | what an importer is told, and how it finds the descriptors that belong to it |
//! | `exports` | allocations of this process: exported once, freed when nobody has them mapped |
//! | `imports` | allocations of others: opened once, kept for the next region |
//!
//! Memory pools are not mapped: when the process that made the pool dies, a copy that touches its
//! memory ends the importer's context (error 226, docs/gpu.md, "Measured"), which plain and VMM
//! memory survive.

mod desk;
mod exports;
mod imports;
mod key;
mod ledger;

use crate::contract::{Caps, Device, Domain, Exported, Imported, Unavailable, WireKey};
use crate::gpu::{Driver, Gpu};
use crate::mem::{MapError, PacketSource, Region};
use exports::Exports;
use imports::Imports;
use std::sync::Arc;

/// This transport's name.
pub const NAME: &str = "cuda_ipc";

/// GPU memory of this process for others, and of others for this one.
pub struct CudaIpc {
    exports: Exports,
    imports: Imports,
    caps: Caps,
}

impl CudaIpc {
    /// For the devices of these drivers. Asks none of them for anything before there is memory of
    /// theirs.
    pub fn new(drivers: Vec<Arc<dyn Driver>>) -> Self {
        let caps = Caps {
            am_inline: 0,
            am_copied: 0,
            am_owned: 0,
            am_from_device: false,
            remote_memory: false,
        };
        Self { exports: Exports::default(), imports: Imports::of(drivers), caps }
    }
}

impl Domain for CudaIpc {
    fn caps(&self) -> &Caps {
        &self.caps
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

    fn somebody_has_gone(&self) {
        self.imports.close_dead();
        exports::free_left();
    }

    fn device(&self, _: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        Err(Unavailable::new(NAME, "it maps memory, and carries no messages"))
    }
}
