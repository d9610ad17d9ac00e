//! Its memory: that it bites the CPU, what an address is of, how much there is.

#![expect(unsafe_code, reason = "GPU memory and words of streams are used by address")]

use super::*;

#[test]
fn a_load_or_store_of_the_cpu_to_device_memory_ends_the_process() {
    for (role, last_words) in
        [("load", &b"about to load"[..]), ("store", b"about to store"), ("freed", b"about to load")]
    {
        let other = Other::start(role);
        assert_eq!(hear(&other.wire), last_words);
        let mut more = Vec::new();
        let _ = (&other.wire).read_to_end(&mut more);
        assert_eq!(more, b"", "{role}: the process lived on");
        assert_eq!(other.end().signal(), Some(libc::SIGSEGV), "{role}");
    }
}

/// gpu.md, VMM rule 1.
#[test]
fn an_address_is_classified_by_the_allocation_that_it_lies_in() {
    let driver = driver(2);
    let gpu = driver.gpu(1).unwrap();
    let region = gpu.allocate(2 * MIB, Flavour::Plain).unwrap();
    let neighbour = gpu.allocate(2 * MIB + 1, Flavour::Shareable).unwrap();
    assert_eq!(neighbour.addr(), region.addr() + 2 * MIB, "they touch, or this test is no test");
    let on_the_stack = std::ptr::from_ref(&driver) as usize;
    let what =
        |addr| driver.classify(addr).unwrap().map(|extent| (extent.base, extent.len, extent.id));
    let (base, own) = (region.addr(), Some((region.addr(), 2 * MIB, region.id())));
    let next = Some((neighbour.addr(), 2 * MIB + 1, neighbour.id()));
    assert_eq!([what(base), what(base + 4097), what(base + 2 * MIB - 1)], [own; 3]);
    assert_eq!([what(base + 2 * MIB), what(base + 4 * MIB)], [next; 2]);
    assert_eq!([what(base - 1), what(base + 4 * MIB + 1), what(base + 6 * MIB)], [None; 3]);
    assert_eq!([what(on_the_stack), what(0), what(usize::MAX)], [None; 3], "host memory");
    let extent = driver.classify(base).unwrap().unwrap();
    assert_eq!(extent.kind, MemKind::Device(gpu.info().uuid));
    assert_eq!(extent.gpu.unwrap().info(), gpu.info());
    assert!(extent.context.is_some());
    assert_eq!(
        driver.classify(neighbour.addr()).unwrap().unwrap().context,
        None,
        "VMM memory has none"
    );
    driver.faults().null_context(true);
    assert_eq!(driver.classify(base).unwrap().unwrap().context, None);
    drop(region);
    assert_eq!(what(base), None, "freed");
}

/// gpu.md, legacy IPC rule 6.
#[test]
fn an_address_that_is_used_again_has_another_buffer_id_and_other_contents() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let first = gpu.allocate(5000, Flavour::Plain).unwrap();
    let (addr, id) = (first.addr(), first.id());
    first.whole().write(&payload(5000, 1)).unwrap();
    drop(first);
    let second = gpu.allocate(5000, Flavour::Plain).unwrap();
    assert_ne!(second.addr(), addr, "not reused unless ordered");
    drop(second);
    driver.faults().reuse_addresses(true);
    let third = gpu.allocate(5000, Flavour::Shareable).unwrap();
    let (addr, second_id) = (third.addr(), third.id());
    drop(third);
    let fourth = gpu.allocate(4000, Flavour::Plain).unwrap();
    assert_eq!(fourth.addr(), addr);
    assert!(fourth.id() != second_id && fourth.id() != id);
    assert_eq!(driver.classify(addr).unwrap().unwrap().id, fourth.id());
    assert!(fourth.whole().to_vec().unwrap().iter().all(|&byte| byte == 0));
}

/// gpu.md, legacy IPC rule 2.
#[test]
fn memory_runs_out_by_blocks_of_2_mib_and_comes_back() {
    let config = FakeConfig { memory: 5 * MIB, ..FakeConfig::devices(1) };
    let gpu = FakeDriver::new(config).unwrap().gpu(0).unwrap();
    assert_eq!(gpu.allocate(0, Flavour::Plain).unwrap_err().code, 1);
    assert_eq!(gpu.allocate(usize::MAX, Flavour::Plain).unwrap_err().code, 2);
    let one = gpu.allocate(1, Flavour::Plain).unwrap();
    let _two = gpu.allocate(2 * MIB, Flavour::Shareable).unwrap();
    let full = gpu.allocate(1, Flavour::Plain).unwrap_err();
    assert!(
        full.code == 2 && full.name == "OUT_OF_MEMORY" && full.hint.contains("do not fit"),
        "{full}"
    );
    drop(one);
    gpu.allocate(1, Flavour::Plain).unwrap();
}

#[test]
fn processes_agree_on_uuids_and_count_as_they_are_told() {
    let plain = driver(3);
    let config = FakeConfig { visible: Some(vec![2, 0]), ..FakeConfig::devices(3) };
    let masked = FakeDriver::new(config).unwrap();
    let uuids = |driver: &FakeDriver| -> Vec<_> {
        driver.devices().unwrap().iter().map(|gpu| (gpu.info().ordinal, gpu.info().uuid)).collect()
    };
    let all = uuids(&plain);
    assert_eq!(uuids(&masked), [(0, all[2].1), (1, all[0].1)]);
    assert!(
        plain
            .devices()
            .unwrap()
            .iter()
            .all(|gpu| gpu.info().simulated && gpu.info().name.contains("simulated"))
    );
    assert_eq!(plain.name(), "fake (simulated)");
    assert_eq!(driver(0).devices().unwrap_err().code, 100);
}

#[test]
fn pinned_memory_is_told_apart_and_the_cpu_may_touch_it() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let pinned = gpu.allocate(100, Flavour::Pinned).unwrap();
    let extent = driver.classify(pinned.addr() + 99).unwrap().unwrap();
    assert_eq!((extent.kind, extent.base, extent.len), (MemKind::Pinned, pinned.addr(), 100));
    assert_eq!(driver.buffer_id(pinned.addr()).unwrap(), Some(pinned.id()));
    assert_eq!(extent.forms.first(), None, "it is not exported");
    pinned.whole().write(&[7; 100]).unwrap();
    let device = gpu.allocate(100, Flavour::Plain).unwrap();
    start_copy(&gpu, &device, &pinned, 100).unwrap().wait().unwrap();
    assert_eq!(device.whole().to_vec().unwrap(), [7; 100]);
    let addr = pinned.addr();
    drop(pinned);
    assert!(driver.classify(addr).unwrap().is_none(), "freed");
    // The caller's own memory, while it is registered.
    let mine = Region::host(4096);
    // SAFETY: the region outlives the registration.
    let lock = unsafe { gpu.register_host(mine.addr() as *mut u8, 4096) }.unwrap();
    assert_eq!(driver.classify(mine.addr()).unwrap().unwrap().kind, MemKind::Pinned);
    // SAFETY: as above.
    let again = unsafe { gpu.register_host((mine.addr() + 4095) as *mut u8, 1) };
    assert_eq!(again.unwrap_err().code, 712);
    drop(lock);
    assert!(driver.classify(mine.addr()).unwrap().is_none());
}

#[test]
fn managed_memory_is_named_and_never_copied() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let managed = gpu.allocate(100, Flavour::Managed).unwrap();
    assert_eq!(
        driver.classify(managed.addr()).unwrap().unwrap().kind,
        MemKind::Managed(gpu.info().uuid)
    );
    let refused = managed.whole().write(&[1; 100]).unwrap_err();
    assert!(
        matches!(refused, CopyError::Managed { .. }) && refused.to_string().contains("managed"),
        "{refused}"
    );
    let host = Region::host(100);
    assert_eq!(start_copy(&gpu, &managed, &host, 100).unwrap_err().code, 801);
    for form in HandleForm::ALL {
        assert!(gpu.export(&managed, form).is_err());
    }
}

/// gpu.md, VMM rule 2.
#[test]
fn a_range_is_walked_by_its_extents_and_may_not_leave_them() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    // The window is filled from its start: neighbours, without a gap.
    let one = gpu.allocate(2 * MIB, Flavour::Shareable).unwrap();
    let two = gpu.allocate(2 * MIB, Flavour::Shareable).unwrap();
    assert_eq!(two.addr(), one.addr() + 2 * MIB);
    let ids = |addr, len| {
        let extents = driver.extents(addr, len)?;
        Ok::<_, GpuError>(extents.iter().map(|extent| extent.id).collect::<Vec<_>>())
    };
    assert_eq!(ids(one.addr() + 5, 100).unwrap(), [one.id()]);
    assert_eq!(ids(one.addr() + 5, 4 * MIB - 5).unwrap(), [one.id(), two.id()]);
    assert_eq!(ids(one.addr() + 5, 4 * MIB).unwrap_err().code, 1, "beyond the second");
    assert_eq!(ids(one.addr() - 1, 2).unwrap_err().code, 1, "before the first");
    assert_eq!(ids(0x1000, 10).unwrap(), [], "host memory");
    // A handle would stand for the first only.
    let base = std::ptr::NonNull::new(one.addr() as *mut u8).unwrap();
    // SAFETY: both stay until the test ends.
    let both = unsafe {
        Region::from_parts(base, 4 * MIB, one.kind(), one.id(), one.gpu().cloned(), Box::new(()))
    };
    let why = gpu.export(&both, HandleForm::Fd).unwrap_err();
    assert!(why.hint.contains("several handles"), "{why}");
}

/// gpu.md, life and death rule 2.
#[test]
fn a_region_keeps_what_it_needs_of_a_driver_that_is_gone() {
    let driver = driver(2);
    let region = driver.gpu(1).unwrap().allocate(100, Flavour::Plain).unwrap();
    drop(driver);
    region.whole().write(&[4; 100]).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), [4; 100]);
}
