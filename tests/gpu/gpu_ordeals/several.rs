//! Memory made of several VMM allocations, one behind the other. It is one range for the program
//! and its engines, and no handle stands for all of it.

#![expect(unsafe_code, reason = "memory of a GPU is named by its address")]

use super::exchange::{LEN, lends, uses};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{
    Gpus, Kind, can_order, filled, heard, holds, receive, registered, send, told,
};
use crate::support::ranks::{Ranks, Role};
use crate::support::words::are_all;
use carrack::region::Region;
use carrack::transports::gpu::Flavour;
use carrack::transports::mem::MemKind;
use carrack::{Rank, Tag};

/// gpu.md, VMM rule 2. (Real devices have their own, in `transports/tests/cuda/kinds.rs`.)
#[test]
fn memory_of_several_handles_is_used_as_one_and_exported_as_none() {
    let _watchdog = Watchdog::over("several");
    // Simulated allocations lie one behind the other.
    if can_order("several handles") {
        Ranks::start("gpu_ordeals::several", 2, &[]).succeed();
    }
}

/// Returns a region, and the allocations that it is made of.
fn made_of_several(gpus: &Gpus, count: usize) -> (Region, Vec<Region>) {
    const GRANULE: usize = 2 << 20;
    let parts: Vec<_> =
        (0..count).map(|_| gpus.all[0].allocate(GRANULE, Flavour::Shareable).unwrap()).collect();
    assert!(parts.windows(2).all(|pair| pair[0].addr() + GRANULE == pair[1].addr()));
    let (addr, drivers) = (parts[0].addr() as *mut u8, [gpus.driver.clone()]);
    // SAFETY: the parts outlive the region's last use in this rank.
    let whole =
        unsafe { carrack::buffer::raw::region(addr, count * GRANULE, MemKind::Unknown, &drivers) };
    (whole.unwrap(), parts)
}

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let (memory, _parts) = made_of_several(&gpus, 3);
    assert!(memory.kind().gpu().is_some());
    let local = [Kind::Host, Kind::Plain(1)];
    if role.rank == 1 {
        let window = memory.subregion(1, LEN).unwrap();
        let mr = registered(role, &runtime, "several", &window);
        let (_, why) = mr.refused().iter().find(|(transport, _)| *transport == "cuda_ipc").unwrap();
        assert!(why.contains("made of several handles"), "{why}");
        lends(role, &runtime, ("several", &window), 0, &local);
    } else {
        let rmr = told(role, "several", 1);
        heard(role, &runtime, "several is clear", 1);
        for way in uses(role, &runtime, &gpus, ("several", &rmr), &local) {
            assert!(way.why().contains("its owner could not export it"), "{way:?}");
        }
    }
    // Messages from such memory, across both borders, into such memory.
    for (turn, (at, len)) in
        [(5, 100), ((2 << 20) - 3, 7), (77, (4 << 20) + 99)].into_iter().enumerate()
    {
        let (slice, salt) = (memory.slice(at, len).unwrap(), turn as u64 + 9);
        if role.rank == 0 {
            slice.write(&filled(len, salt)).unwrap();
            send(&runtime, Rank(1), slice, Tag(salt)).unwrap().ok().unwrap();
        } else {
            memory.whole().write(&vec![0xee; memory.len()]).unwrap();
            let status = receive(&runtime, Rank(0), slice, Tag(salt)).unwrap().ok().unwrap();
            holds(&status.buffer, len, salt);
            let bytes = memory.whole().to_vec().unwrap();
            assert!(are_all(&[&bytes[..at], &bytes[at + len..]], 0xee), "{at}+{len}");
        }
    }
    role.meet("over", &runtime, 0..2);
}
