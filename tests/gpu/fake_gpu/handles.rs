//! Handles of its memory, between processes, and that nothing is left behind.

use super::*;

/// gpu.md, legacy IPC rules 3 and 8.
#[test]
fn each_flavour_is_exported_in_its_own_form_only() {
    let driver = driver(2);
    let gpu = driver.gpu(0).unwrap();
    let plain = gpu.allocate(10, Flavour::Plain).unwrap();
    let shareable = gpu.allocate(10, Flavour::Shareable).unwrap();
    let refused = |region: &Region, form| gpu.export(region, form).unwrap_err().code;
    assert_eq!(refused(&plain, HandleForm::Fd), 801);
    assert_eq!(refused(&shareable, HandleForm::Bytes), 1);
    assert_eq!(refused(&Region::host(10), HandleForm::Bytes), 1);
    assert_eq!(driver.gpu(1).unwrap().export(&plain, HandleForm::Bytes).unwrap_err().code, 1);
    let handle = gpu.export(&plain, HandleForm::Bytes).unwrap();
    assert_eq!(gpu.open(&handle).unwrap_err().code, 201, "not in the exporting process");
    let handle = gpu.export(&shareable, HandleForm::Fd).unwrap();
    let again = gpu.open(&handle).expect("a descriptor opens anywhere");
    again.whole().write(b"0123456789").unwrap();
    assert_eq!(shareable.whole().to_vec().unwrap(), b"0123456789");
    assert!(again.id() != shareable.id() && again.addr() != shareable.addr());
    assert_eq!(gpu.export(&again, HandleForm::Fd).unwrap_err().code, 1, "only the owner exports");
    assert_eq!(gpu.open(&nonsense(0x5a)).unwrap_err().code, 400);
    for form in [HandleForm::Bytes, HandleForm::Fd, HandleForm::Pool] {
        let region = gpu.allocate(10, flavour(form)).unwrap();
        driver.faults().refuse_export(form, true);
        assert_eq!(refused(&region, form), 801);
        driver.faults().refuse_export(form, false);
        gpu.export(&region, form).unwrap();
    }
}

#[test]
fn a_descriptor_that_lies_about_its_length_is_refused() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let region = gpu.allocate(2 * MIB, Flavour::Shareable).unwrap();
    for lie in [0, 2 * MIB + 1, usize::MAX] {
        let handle = gpu.export(&region, HandleForm::Fd).unwrap();
        assert_eq!(gpu.open(&Handle { len: lie, ..handle }).unwrap_err().code, 400);
    }
}

/// gpu.md, legacy IPC rule 9.
#[test]
fn memory_of_another_process_is_read_and_written_under_a_permuted_order_of_devices() {
    for (form, word) in
        [(HandleForm::Bytes, "bytes"), (HandleForm::Fd, "fd"), (HandleForm::Pool, "pool")]
    {
        let len = 3 * MIB + 17;
        let here = driver(2);
        // Theirs here.
        let other = Other::start(&format!("export {word} {len} 40"));
        let handle = hear_handle(&other.wire);
        let region = here.gpu(0).unwrap().open(&handle).unwrap();
        assert_eq!(region.len(), len);
        let (owner, engine) = (here.gpu(1).unwrap(), region.gpu().unwrap().info());
        assert_eq!(region.kind(), MemKind::Device(owner.info().uuid), "the same device as there");
        assert_eq!(engine.ordinal, 0, "by the engines of the one that has opened it");
        assert_eq!(region.whole().to_vec().unwrap(), payload(len, 40));
        let extent = here.classify(region.addr() + len - 1).unwrap().unwrap();
        assert_eq!((extent.base, extent.len, extent.id), (region.addr(), len, region.id()));
        assert_eq!(extent.context.is_some(), form == HandleForm::Bytes);
        region.whole().write(&payload(len, 41)).unwrap();
        say(&other.wire, b"go on");
        assert_eq!(hear(&other.wire), b"as expected");
        // Ours there.
        let gpu = here.gpu(0).unwrap();
        let mine = gpu.allocate(len, flavour(form)).unwrap();
        mine.whole().write(&payload(len, 50)).unwrap();
        let importer = Other::start("import 50");
        say_handle(&importer.wire, &gpu.export(&mine, form).unwrap());
        assert_eq!(hear(&importer.wire), b"as expected");
        assert_eq!(mine.whole().to_vec().unwrap(), payload(len, 51));
        assert!(importer.end().success());
        // They free it: what is open stays, what is not cannot be opened any more, unless it is a
        // descriptor.
        say(&other.wire, b"go on");
        assert_eq!(hear(&other.wire), b"freed");
        assert_eq!(region.whole().to_vec().unwrap(), payload(len, 41));
        match form {
            HandleForm::Bytes => {
                let gone = here.gpu(0).unwrap().open(&handle).unwrap_err();
                assert!(gone.code == 400 && gone.hint.contains("freed"), "{gone}");
            }
            _ => drop(here.gpu(0).unwrap().open(&handle).unwrap()),
        }
    }
}

/// gpu.md, legacy IPC rule 4.
#[test]
fn a_handle_opened_twice_is_one_mapping_that_goes_with_the_last() {
    let other = Other::start("export bytes 1000 7");
    let handle = hear_handle(&other.wire);
    let here = driver(2);
    let gpu = here.gpu(1).unwrap();
    let (one, two) = (gpu.open(&handle).unwrap(), gpu.open(&handle).unwrap());
    assert_eq!((one.addr(), one.id()), (two.addr(), two.id()));
    assert_eq!((here.counters().opens, here.counters().maps), (2, 1));
    drop(one);
    assert_eq!(two.whole().to_vec().unwrap(), payload(1000, 7));
    assert_eq!((here.counters().closes, here.counters().unmaps), (1, 0));
    let (addr, id) = (two.addr(), two.id());
    drop(two);
    assert_eq!((here.counters().closes, here.counters().unmaps), (2, 1));
    assert!(here.classify(addr).unwrap().is_none());
    assert_ne!(gpu.open(&handle).unwrap().id(), id, "opened anew, it is another buffer");
}

/// gpu.md, life and death rule 1; legacy IPC rule 10: an exporter that is not found may be in
/// another pid namespace.
#[test]
fn an_importer_goes_on_when_the_exporter_is_killed() {
    for word in ["bytes", "fd"] {
        let mut other = Other::start(&format!("export {word} 100000 9"));
        let handle = hear_handle(&other.wire);
        let here = driver(2);
        let gpu = here.gpu(0).unwrap();
        let region = gpu.open(&handle).unwrap();
        let target = gpu.allocate(100_000, Flavour::Plain).unwrap();
        let held = here.faults().hold_copies();
        let copy = start_copy(&gpu, &target, &region, 100_000).unwrap();
        other.kill();
        drop(held);
        copy.wait().unwrap();
        assert_eq!(target.whole().to_vec().unwrap(), payload(100_000, 9));
        region.whole().write(&payload(100_000, 10)).unwrap();
        assert_eq!(region.whole().to_vec().unwrap(), payload(100_000, 10));
        if word == "bytes" {
            let gone = gpu.open(&handle).unwrap_err();
            assert_eq!(gone.code, 400, "its exporter is gone");
            assert!(gone.hint.contains("pid namespace"), "{gone}");
        }
    }
}

#[test]
fn opening_fails_for_a_device_out_of_sight_or_reach_and_as_ordered() {
    for word in ["bytes", "fd"] {
        let other = Other::start(&format!("export {word} 10 1"));
        let handle = hear_handle(&other.wire);
        let blind = FakeConfig { visible: Some(vec![0]), ..FakeConfig::devices(2) };
        let refused = FakeDriver::new(blind).unwrap().gpu(0).unwrap().open(&handle).unwrap_err();
        assert!(refused.code == 101 && refused.hint.contains("can see"), "{refused}");
        let apart = FakeConfig { no_peer: vec![(0, 1)], ..FakeConfig::devices(2) };
        let apart = FakeDriver::new(apart).unwrap();
        assert_eq!(apart.gpu(0).unwrap().open(&handle).unwrap_err().code, 217);
        apart.faults().fail_open(Some(205));
        let gpu = apart.gpu(1).unwrap();
        let ordered = gpu.open(&handle).unwrap_err();
        assert_eq!((ordered.code, ordered.name), (205, "MAP_FAILED"));
        apart.faults().fail_open(None);
        assert_eq!(gpu.open(&handle).unwrap().len(), 10);
        assert_eq!(apart.counters().opens, 1);
    }
}

#[test]
fn a_handle_with_any_bit_changed_is_an_error_or_names_the_same_memory_and_never_a_crash() {
    let other = Other::start("export bytes 1000 3");
    let Handle { gpu: uuid, id, len, offset, key: HandleKey::Bytes(good) } =
        hear_handle(&other.wire)
    else {
        panic!("bytes were asked for");
    };
    let here = driver(2);
    let gpu = here.gpu(0).unwrap();
    for bit in 0..512 {
        let mut bytes = good;
        bytes[bit / 8] ^= 1 << (bit % 8);
        let opened = gpu.open(&Handle { gpu: uuid, id, len, offset, key: HandleKey::Bytes(bytes) });
        match (bit / 8, opened) {
            // The magic, start time, descriptor, inode and device are checked.
            (0..4 | 8..20 | 24..32 | 48..64, Ok(region)) => {
                panic!("bit {bit} went unnoticed: {region:?}")
            }
            // The exporter's address and id are for people.
            (20..24 | 32..40, Err(why)) => panic!("bit {bit}: {why}"),
            // Another length may lie within the block, another pid may be another thread of the
            // exporter.
            (_, Ok(region)) => {
                assert!(region.len() <= 2 * MIB, "bit {bit}");
                let len = region.len().min(1000);
                assert_eq!(
                    region.slice(0, len).unwrap().to_vec().unwrap(),
                    payload(1000, 3)[..len]
                );
            }
            (_, Err(_)) => {}
        }
    }
}

#[test]
fn after_a_thousand_rounds_descriptors_and_mappings_are_what_they_were() {
    // In a process of its own: other tests, on other threads of this one, open and map as they
    // like.
    let other = Other::start("rounds");
    let say = String::from_utf8(hear(&other.wire)).unwrap();
    assert!(other.end().success(), "{say}");
    let (before, after) = say.split_once(" then ").unwrap();
    assert_eq!(before, after, "(descriptors, mappings)");
}

/// Allocates, exports, opens, copies and frees, again and again, and counts what the process has
/// before and after.
pub(crate) fn rounds() -> String {
    let other = Other::start("export bytes 1000 1");
    let handle = hear_handle(&other.wire);
    let driver = driver(2);
    let gpu = driver.gpu(0).unwrap();
    let round = |number: u64| {
        driver.faults().reuse_addresses(number.is_multiple_of(3));
        let region = gpu.allocate(5000, Flavour::Plain).unwrap();
        let shareable = driver.gpu(1).unwrap().allocate(5000, Flavour::Shareable).unwrap();
        let (theirs, again) = (gpu.open(&handle).unwrap(), gpu.open(&handle).unwrap());
        let exported = driver.gpu(1).unwrap().export(&shareable, HandleForm::Fd).unwrap();
        let same = gpu.open(&exported).unwrap();
        start_copy(&gpu, &region, &theirs, 1000).unwrap().wait().unwrap();
        start_copy(&gpu, &same, &region, 1000).unwrap().wait().unwrap();
        assert_eq!(shareable.slice(0, 1000).unwrap().to_vec().unwrap(), payload(1000, 1));
        drop((again, theirs));
        gpu.open(&nonsense(0)).unwrap_err();
    };
    let possessions = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let lines = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        (descriptors, lines)
    };
    let windows = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let large = |line: &&str| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [start, end] = [start, end].map(|addr| usize::from_str_radix(addr, 16).unwrap());
            end - start >= 1024 * MIB
        };
        maps.lines().filter(large).count()
    };
    // The engines' threads, with their stacks and heaps, come with the first copies.
    (0..20).for_each(round);
    let before = possessions();
    (0..1000).for_each(round);
    let after = possessions();
    let counters = driver.counters();
    assert_eq!((counters.allocs, counters.opens), (counters.frees, counters.closes));
    assert_eq!((counters.maps, counters.unmaps), (2040, 2040));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:carrack-fake-gpu"), "memory is still mapped: {maps}");
    assert_ne!(windows(), 0);
    drop((gpu, driver));
    assert_eq!(windows(), 0, "the windows go with the driver");
    format!("{before:?} then {after:?}")
}
