//! Sets of ranks that share memory, and the GPUs that it lies on.

use super::{check, fill, gpu_of};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, are_real, can_order, enough_for};
use crate::support::ranks::{Ranks, Role};
use carrack::Rank;
use carrack::alloc::{Scope, SharedAllocError, SharedDeviceAllocator};
use carrack_simulators::gpu::FakeConfig;

const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

#[test]
fn ranks_with_different_gpus_have_memory_of_the_leaders_or_are_told_which_two_lack_access() {
    let _watchdog = Watchdog::over("peers");
    if enough_for("peers", 2) {
        Ranks::start("shared_allocator::peers", 3, &[0]).succeed();
        if can_order("devices without peer access") {
            Ranks::start("shared_allocator::peers", 3, &[1]).succeed();
        }
    }
}

pub(crate) fn peers(role: &Role) {
    let apart = role.words[0] == 1;
    let no_peer = if apart { vec![(0, 1)] } else { Vec::new() };
    let gpus = Gpus::of(FakeConfig { no_peer, ..FakeConfig::devices(2) });
    let runtime = gpus.runtime(role);
    let gpu = gpu_of(&gpus, role);
    let made = SharedDeviceAllocator::new(&runtime.world(), gpu, Scope::Node);
    if apart {
        let why = made.unwrap_err();
        let SharedAllocError::NotMapped {
            rank: Rank(1),
            leader: Rank(0),
            gpu: leaders,
            why: reason,
        } = &why
        else {
            panic!("{why}")
        };
        assert_eq!(*leaders, gpus.all[0].info().uuid.to_string());
        assert!(
            reason.contains("no peer access")
                && reason.contains(&gpus.all[1].info().uuid.to_string()),
            "{why}"
        );
        // Those of one device have it without the other.
        if role.rank != 1 {
            let group = runtime.group(7, &[Rank(0), Rank(2)]).unwrap();
            let shared = SharedDeviceAllocator::new(&group, gpu, Scope::Node)
                .unwrap()
                .allocate(100)
                .unwrap();
            fill_in_turn(&group, role.rank == 2, &shared);
        }
        role.meet("over", &runtime, 0..3);
        return;
    }
    let allocator = made.unwrap();
    assert_eq!(allocator.stats().made, 0, "the trial is not counted");
    let shared = allocator.allocate(123_457).unwrap();
    assert_eq!(shared.kind().gpu(), Some(gpus.all[0].info().uuid), "the leader's device");
    for writer in 0..3 {
        if writer == role.rank {
            fill(&shared, u64::from(writer));
        }
        runtime.barrier().unwrap();
        check(&shared, u64::from(writer));
        runtime.barrier().unwrap();
    }
    role.meet("over", &runtime, 0..3);
}

fn fill_in_turn(group: &carrack::Group, fills: bool, region: &carrack::region::Region) {
    if fills {
        fill(region, 5);
    }
    group.barrier().unwrap();
    check(region, 5);
    group.barrier().unwrap();
}

/// gpu.md, legacy IPC rule 9.
#[test]
fn ranks_that_see_different_gpus_have_memory_together_or_are_told_why_not() {
    let _watchdog = Watchdog::over("masks");
    if enough_for("masks", 2) {
        for masks in [["0", "1"], ["0,1", "1,0"]] {
            let mask = |rank: u32| (VARIABLE, masks[rank as usize]);
            Ranks::start_each(mask, "shared_allocator::masks", 2, &[u64::from(masks[0] == "0")])
                .succeed();
        }
    }
}

pub(crate) fn masks(role: &Role) {
    let gpus = Gpus::under(&std::env::var(VARIABLE).unwrap());
    let runtime = gpus.runtime(role);
    // Each the first that it sees, which is another one.
    match SharedDeviceAllocator::new(&runtime.world(), &gpus.all[0], Scope::Node) {
        Ok(allocator) => {
            let shared = allocator.allocate(70_000).unwrap();
            fill_in_turn(&runtime.world(), role.rank == 1, &shared);
        }
        Err(why) => {
            eprintln!("{why}");
            assert!(role.words[0] == 1, "both see both: {why}");
            // Measured: real drivers open what is out of sight.
            assert!(!are_real(), "{why}");
            assert!(matches!(why, SharedAllocError::NotMapped { rank: Rank(1), .. }), "{why}");
            assert!(
                why.to_string().contains("not among the devices that this process can see"),
                "{why}"
            );
        }
    }
    role.meet("over", &runtime, 0..2);
}

#[test]
fn the_ranks_of_a_socket_have_memory_together_by_the_numa_nodes_of_their_gpus() {
    let _watchdog = Watchdog::over("sockets");
    Ranks::start("shared_allocator::sockets", 4, &[1]).succeed();
    if can_order("devices at no NUMA node") {
        Ranks::start("shared_allocator::sockets", 4, &[0]).succeed();
    }
}

pub(crate) fn sockets(role: &Role) {
    let numa = if role.words[0] == 1 { vec![4, 9] } else { Vec::new() };
    let gpus = Gpus::of(FakeConfig { numa, ..FakeConfig::devices(2) });
    let runtime = gpus.runtime(role);
    let socket_of = |rank: u32| gpus.all[rank as usize % gpus.all.len()].numa_node().ok();
    let mine = socket_of(role.rank);
    // In any order of the group's ranks.
    let group = runtime.group(3, &[3, 1, 0, 2].map(Rank)).unwrap();
    let allocator = SharedDeviceAllocator::new(&group, gpu_of(&gpus, role), Scope::Socket).unwrap();
    let expected: Vec<_> = (0..4).filter(|rank| socket_of(*rank) == mine).map(Rank).collect();
    assert_eq!(allocator.ranks().collect::<Vec<_>>(), expected);
    assert_eq!((allocator.leader(), allocator.scope()), (expected[0], Scope::Socket));
    let said = allocator.describe();
    eprintln!("{said}");
    match mine {
        Some(node) => assert!(said.contains(&format!("at NUMA node {node} ")), "{said}"),
        None => assert!(said.contains("at no known NUMA node, taken for one socket"), "{said}"),
    }
    if !are_real() {
        assert_eq!(expected.len(), if role.words[0] == 1 { 2 } else { 4 });
    }
    // Each socket writes something of its own.
    let salt = u64::from(expected[0].0);
    let shared = allocator.allocate(60_000).unwrap();
    if Some(&Rank(role.rank)) == expected.last() {
        fill(&shared, salt);
    }
    runtime.barrier().unwrap();
    check(&shared, salt);
    role.meet("over", &runtime, 0..4);
}
