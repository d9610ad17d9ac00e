//! `SharedDeviceAllocator`: memory of a GPU that the processes of a node have together. With
//! simulated GPUs here, and with real ones where `TEST_GPU=cuda` says so.

mod ends;
mod memory;
mod places;
mod pools;
mod posts;
mod refused;
mod rounds;

use crate::support::gpu_ranks::{Gpus, PATIENCE};
use crate::support::ranks::Role;
use crate::support::words::{filled, wrong};
use carrack::Runtime;
use carrack::alloc::{Scope, SharedDeviceAllocator};
use carrack::region::Region;
use carrack::transports::gpu::Gpu;
use std::sync::Arc;

const MIB: usize = 1 << 20;
/// Granularity of memory that the driver shares with other processes.
const BLOCK: usize = 2 * MIB;

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(2 * PATIENCE) else { return };
    match role.name.as_str() {
        "memory" => memory::rank(&role),
        "killed" => ends::killed(&role),
        "anytime" => ends::anytime(&role),
        "exhausted" => refused::exhausted(&role),
        "unmapped" => refused::unmapped(&role),
        "off" => refused::off(&role),
        "handler" => refused::handler(&role),
        "differ" => refused::differ(&role),
        "peers" => places::peers(&role),
        "masks" => places::masks(&role),
        "sockets" => places::sockets(&role),
        "posts" => posts::rank(&role),
        "rounds" => rounds::rank(&role),
        "pieces" => pools::pieces(&role),
        "pool" => pools::pool(&role),
        other => panic!("no role {other}"),
    }
}

/// Returns the GPU of a rank: the ranks take those that there are in turn.
fn gpu_of<'a>(gpus: &'a Gpus, role: &Role) -> &'a Arc<dyn Gpu> {
    &gpus.all[role.rank as usize % gpus.all.len()]
}

/// Creates an allocator of all ranks, all with the first GPU.
fn on_one_gpu(gpus: &Gpus, runtime: &Runtime) -> SharedDeviceAllocator {
    SharedDeviceAllocator::new(&runtime.world(), &gpus.all[0], Scope::Node).unwrap()
}

fn fill(region: &Region, salt: u64) {
    region.whole().write(&filled(region.len(), salt)).unwrap();
}

#[track_caller]
fn check(region: &Region, salt: u64) {
    let found = wrong(&region.whole().to_vec().unwrap(), salt, 0);
    assert_eq!(found, None, "{} bytes of {salt}", region.len());
}
