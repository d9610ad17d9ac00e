//! Kinds of memory, looked up by address.

use crate::support::{MIB, copy_and_check, flavour, make, need, payload};
use crate::user;
use carrack_transports::gpu::{Driver, Flavour, HandleForm};
use carrack_transports::mem::{KnownMemory, MR_UNKNOWN, MemKind, RawError, Region};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// gpu.md, VMM rule 1 and legacy IPC rule 8.
#[test]
fn every_kind_of_memory_is_told_apart_with_owner_context_and_forms() {
    let Some((driver, gpus)) = need(1) else { return };
    for gpu in &gpus {
        let uuid = gpu.info().uuid;
        for kind in ["plain", "shareable", "pooled", "pinned", "managed"] {
            let region = make(gpu, kind, 3 * MIB + 5);
            let extent = driver.classify(region.addr()).unwrap().unwrap();
            println!("device {} {kind}: {extent:?}", gpu.info().ordinal);
            let expected = match flavour(kind).unwrap() {
                Flavour::Pinned => MemKind::Pinned,
                Flavour::Managed => MemKind::Managed(uuid),
                _ => MemKind::Device(uuid),
            };
            assert_eq!((extent.kind, region.kind()), (expected, expected), "{kind}");
            assert_eq!((extent.base, extent.id), (region.addr(), region.id()), "{kind}");
            assert!(extent.len >= region.len(), "{kind}");
            match kind {
                "plain" => assert!(extent.context.is_some()),
                "shareable" | "pooled" => assert_eq!(extent.context, None, "{kind}: VMM rule 1"),
                _ => {}
            }
            let form = match kind {
                "plain" => Some(HandleForm::Bytes),
                "shareable" => Some(HandleForm::Fd),
                "pooled" => Some(HandleForm::Pool),
                _ => None,
            };
            assert_eq!(extent.forms.first(), form, "{kind}");
        }
    }
    let host = Region::host(100);
    assert!(driver.classify(host.addr()).unwrap().is_none());
    assert!(driver.buffer_id(host.addr()).unwrap().is_none());
    assert!(driver.extents(host.addr(), 100).unwrap().is_empty());
    let on_the_stack = 0_u8;
    assert!(driver.classify(&raw const on_the_stack as usize).unwrap().is_none());
    assert!(driver.classify(0).unwrap().is_none());
    assert!(driver.classify(usize::MAX).unwrap().is_none());
}

/// Legacy IPC rule 1: whatever the offset, the allocation's base and length.
#[test]
fn odd_offsets_belong_to_their_allocation_up_to_its_last_byte() {
    let Some((driver, gpus)) = need(1) else { return };
    for kind in ["plain", "shareable", "pooled", "managed"] {
        let region = make(&gpus[0], kind, 2 * MIB);
        for offset in [1, 7, 4097, MIB + 3, 2 * MIB - 1] {
            let extent = driver.classify(region.addr() + offset).unwrap().unwrap();
            assert_eq!(
                (extent.base, extent.id),
                (region.addr(), region.id()),
                "{kind} at {offset}"
            );
            assert_eq!(
                driver.buffer_id(region.addr() + offset).unwrap(),
                Some(region.id()),
                "{kind}"
            );
        }
    }
}

/// Legacy IPC rule 2: whole blocks of 2 MiB, so that a handle shows no neighbour.
#[test]
fn plain_memory_has_blocks_of_its_own() {
    let Some((driver, gpus)) = need(1) else { return };
    let regions: Vec<Region> = (0..20).map(|_| make(&gpus[0], "plain", 100)).collect();
    for region in &regions {
        let extent = driver.classify(region.addr()).unwrap().unwrap();
        assert_eq!((extent.base % (2 * MIB), extent.len % (2 * MIB)), (0, 0), "{extent:?}");
    }
}

#[test]
fn a_freed_address_is_no_longer_device_memory() {
    let Some((driver, gpus)) = need(1) else { return };
    for kind in ["plain", "shareable", "pinned"] {
        let region = make(&gpus[0], kind, 64 * MIB);
        let (addr, id) = (region.addr(), region.id());
        drop(region);
        // Another test may have been given the address meanwhile: then it is another allocation.
        let now = driver.classify(addr).unwrap();
        assert!(now.is_none_or(|extent| extent.id != id), "{kind}");
    }
}

/// Legacy IPC rule 6: a reused address is a different allocation.
#[test]
fn an_address_that_is_used_again_has_another_buffer_id_a_thousand_times() {
    let Some((driver, gpus)) = need(1) else { return };
    for kind in ["plain", "shareable", "pooled"] {
        let mut seen: HashMap<usize, Vec<u64>> = HashMap::new();
        for round in 0..1000 {
            let region = make(&gpus[0], kind, 4 * MIB);
            let (addr, id) = (region.addr(), region.id());
            assert_eq!(driver.buffer_id(addr).unwrap(), Some(id));
            assert_eq!(driver.classify(addr + 5).unwrap().unwrap().id, id);
            let ids = seen.entry(addr).or_default();
            assert!(!ids.contains(&id.0), "{kind}, round {round}: {addr:#x} again under {id:?}");
            ids.push(id.0);
        }
        let reused: usize = seen.values().map(|ids| ids.len() - 1).sum();
        println!("{kind}: 1000 allocations at {} addresses, {reused} times an old one", seen.len());
    }
}

/// VMM rule 2: the address range of a mapping is only its first handle's.
#[test]
fn a_mapping_made_of_several_handles_is_walked() {
    let Some((driver, gpus)) = need(1) else { return };
    user::set_current(user::primary(0));
    let granule = user::Mapping::granule(0);
    let mapping = user::Mapping::new(0, 3, &[0]);
    let extents = driver.extents(mapping.ptr + 1, mapping.len - 1).unwrap();
    println!("three handles: {extents:?}");
    assert_eq!(extents.len(), 3);
    assert!(extents.windows(2).all(|pair| pair[0].end() == pair[1].base));
    assert_eq!(driver.extents(mapping.ptr, granule).unwrap().len(), 1);
    assert_eq!(driver.extents(mapping.ptr + granule - 1, 2).unwrap().len(), 2);
    assert!(driver.extents(mapping.ptr, mapping.len + 1).is_err(), "beyond the last handle");
    assert!(extents.iter().all(|extent| extent.context.is_none()), "VMM rule 1");
    // A handle would stand for the first only.
    let base = NonNull::new(mapping.ptr as *mut u8).unwrap();
    let (kind, id, gpu) = (extents[0].kind, extents[0].id, extents[0].gpu.clone());
    // SAFETY: the mapping outlives the region.
    let whole = unsafe { Region::from_parts(base, mapping.len, kind, id, gpu, Box::new(())) };
    for form in HandleForm::ALL {
        let why = gpus[0].export(&whole, form).unwrap_err();
        assert!(why.hint.contains("made of several handles"), "{form:?}: {why}");
    }
    // The engine copies across their borders.
    let near = make(&gpus[0], "plain", mapping.len);
    copy_and_check(&*gpus[0], (&whole, 3), (&near, 5), 2 * granule + 77, 60);
    copy_and_check(&*gpus[0], (&near, 3), (&whole, 5), 2 * granule + 77, 62);
    // As raw memory: a part of one handle has that handle's root. A range over several handles has
    // a root of its own.
    let (known, drivers): (_, [Arc<dyn Driver>; 1]) = (KnownMemory::of(8), [Arc::new(driver)]);
    // SAFETY: the mapping outlives the regions.
    let raw =
        |at, len| unsafe { known.region((mapping.ptr + at) as *mut u8, len, MR_UNKNOWN, &drivers) };
    let part = raw(granule + 5, 100).unwrap();
    assert_eq!((part.root().addr(), part.root().len()), (mapping.ptr + granule, granule));
    let over = raw(5, mapping.len - 5).unwrap();
    assert_eq!((over.root().len(), over.kind()), (mapping.len - 5, part.kind()));
    let bytes = payload(mapping.len - 5, 3);
    over.whole().write(&bytes).unwrap();
    assert!(part.whole().to_vec().unwrap() == bytes[granule..granule + 100]);
    assert!(matches!(raw(5, mapping.len), Err(RawError::Beyond { .. })));
    assert_eq!(known.forget(mapping.ptr, mapping.len), 2, "the part's and the range's");
    drop((part, over));
    assert_eq!(known.forget(mapping.ptr, mapping.len), 0);
    // A segment that is mapped anew under an address that stays reserved (VMM rule 5): is it
    // another allocation?
    let before = driver.classify(mapping.ptr + granule).unwrap().unwrap();
    mapping.remap(0, 1);
    let after = driver.classify(mapping.ptr + granule).unwrap().unwrap();
    println!("the second handle replaced: {:?} before, {:?} after", before.id, after.id);
}

#[test]
fn registered_host_memory_is_pinned_while_it_is_registered() {
    let Some((driver, gpus)) = need(1) else { return };
    let host = Region::host(MIB);
    let start = host.addr().next_multiple_of(4096);
    // SAFETY: the region outlives the registration.
    let registered = unsafe { gpus[0].register_host(start as *mut u8, 512 * 1024) }.unwrap();
    let extent = driver.classify(start + 77).unwrap().unwrap();
    println!("registered: {extent:?}");
    assert_eq!((extent.kind, extent.forms.first()), (MemKind::Pinned, None));
    // SAFETY: refused.
    let again = unsafe { gpus[0].register_host(start as *mut u8, 4096) }.unwrap_err();
    assert_eq!(again.name, "HOST_MEMORY_ALREADY_REGISTERED", "{again}");
    drop(registered);
    assert!(driver.classify(start + 77).unwrap().is_none());
}

/// Streams rule 6: the context of the pointer is adopted, and a look-up needs none.
#[test]
fn asking_needs_no_context_and_leaves_the_thread_without_one() {
    let Some((driver, gpus)) = need(1) else { return };
    let region = make(&gpus[0], "plain", 100);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(user::current(), 0, "a new thread has none");
            assert_eq!(driver.classify(region.addr()).unwrap().unwrap().id, region.id());
            assert_eq!(driver.buffer_id(region.addr()).unwrap(), Some(region.id()));
            assert_eq!(user::current(), 0);
        });
    });
}

#[test]
fn too_little_memory_and_none_at_all_are_clear_errors() {
    let Some((_, gpus)) = need(1) else { return };
    for kind in ["plain", "shareable", "pooled"] {
        let flavour = flavour(kind).unwrap();
        let why = gpus[0].allocate(1 << 46, flavour).unwrap_err();
        println!("{kind}: {why}");
        assert_eq!(why.name, "OUT_OF_MEMORY", "{kind}");
        assert!(why.hint.contains(" are free"), "{why}");
        assert_eq!(gpus[0].allocate(0, flavour).unwrap_err().name, "INVALID_VALUE", "{kind}");
        assert_eq!(
            gpus[0].allocate(usize::MAX, flavour).unwrap_err().name,
            "OUT_OF_MEMORY",
            "{kind}"
        );
    }
    let region = make(&gpus[0], "plain", 100);
    region.whole().write(&payload(100, 1)).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), payload(100, 1), "the device goes on");
}

#[test]
fn devices_have_names_of_their_own_and_say_what_lies_between() {
    let Some((driver, gpus)) = need(1) else { return };
    println!("{}", driver.version().unwrap());
    for gpu in &gpus {
        println!("{:?}", gpu.info());
        assert!(!gpu.info().simulated && gpu.info().memory > 0 && gpu.info().pci.contains(':'));
        for other in &gpus {
            if other.info().uuid == gpu.info().uuid {
                assert!(gpu.reaches(other.info().uuid).is_ok());
            } else {
                println!("  to {}: {:?}", other.info().ordinal, gpu.peer(other.info().uuid));
                println!("    reaches: {:?}", gpu.reaches(other.info().uuid));
                assert_eq!(
                    gpu.peer(other.info().uuid).unwrap().access,
                    gpu.reaches(other.info().uuid).is_ok()
                );
            }
        }
    }
    let unknown = carrack_transports::mem::GpuUuid([0xee; 16]);
    assert_eq!(gpus[0].reaches(unknown).unwrap_err().name, "INVALID_DEVICE");
}

/// The names that this crate gives to codes are the driver's.
#[test]
fn codes_have_the_names_that_the_driver_gives_them() {
    let Some((_, gpus)) = need(1) else { return };
    let why = gpus[0].allocate(1 << 46, Flavour::Plain).unwrap_err();
    assert_eq!(format!("CUDA_ERROR_{}", why.name), user::name_of(why.code));
}
