//! Its engines and streams: copies, kernels, words, their order, and how they fail.

#![expect(unsafe_code, reason = "GPU memory and words of streams are used by address")]

use super::*;

#[test]
fn random_payloads_arrive_whole_at_odd_offsets_and_leave_the_guards_alone() {
    let driver = driver(2);
    let mut random = SmallRng::seed_from_u64(1);
    let size = 3 * MIB;
    let one = driver.gpu(0).unwrap().allocate(size, Flavour::Plain).unwrap();
    let other = driver.gpu(1).unwrap().allocate(size, Flavour::Shareable).unwrap();
    for round in 0..60 {
        let len = if round % 10 == 0 {
            random.random_range(1..2 * MIB)
        } else {
            random.random_range(1..5000)
        };
        let (at, to) =
            (random.random_range(1..size - len - 1), random.random_range(1..size - len - 1));
        let bytes = payload(len, round);
        one.slice(at - 1, len + 2).unwrap().write(&vec![0xaa; len + 2]).unwrap();
        other.slice(to - 1, len + 2).unwrap().write(&vec![0xbb; len + 2]).unwrap();
        one.slice(at, len).unwrap().write(&bytes).unwrap();
        let (from, onto) = (one.slice(at, len).unwrap(), other.slice(to, len).unwrap());
        carrack_transports::mem::copy::copy_and_wait(onto.view_mut(), from.view()).unwrap();
        let seen = one.slice(at - 1, len + 2).unwrap().to_vec().unwrap();
        assert!(
            seen[0] == 0xaa && seen[1..=len] == bytes && seen[len + 1] == 0xaa,
            "round {round}"
        );
        let seen = other.slice(to - 1, len + 2).unwrap().to_vec().unwrap();
        assert!(
            seen[0] == 0xbb && seen[1..=len] == bytes && seen[len + 1] == 0xbb,
            "round {round}"
        );
    }
}

#[test]
fn a_copy_beyond_an_allocation_or_of_freed_or_unknown_memory_is_refused_at_once() {
    let driver = driver(2);
    let gpu = driver.gpu(0).unwrap();
    let region = gpu.allocate(1000, Flavour::Plain).unwrap();
    let neighbour = gpu.allocate(1000, Flavour::Plain).unwrap();
    let kind = region.kind();
    let peer = MemKind::Device(driver.gpu(1).unwrap().info().uuid);
    let mut host = vec![7_u8; 3 * MIB];
    let mut refused = |addr: usize, kind: MemKind, len: usize| {
        // SAFETY: the engine is to refuse; were it not to, the host side has room.
        let outcome =
            unsafe { gpu.copy((host.as_mut_ptr(), MemKind::Host), (addr as *const u8, kind), len) };
        let error = outcome.unwrap_err();
        (error.code, error.hint)
    };
    let (code, hint) = refused(region.addr(), kind, 1001);
    assert!(code == 1 && hint.contains("beyond the allocation's end"), "{hint}");
    assert_eq!(refused(region.addr() + 999, kind, 2).0, 1);
    assert_eq!(
        refused(region.addr(), kind, neighbour.addr() - region.addr() + 1).0,
        1,
        "into its neighbour"
    );
    assert_eq!(refused(region.addr() + 1000, kind, 1).0, 1);
    assert_eq!(refused(0x1000, kind, 1).0, 1, "never allocated");
    assert!(refused(region.addr(), peer, 1).1.contains("belongs to"));
    assert!(
        refused(region.addr(), MemKind::Host, 1).1.contains("is device memory"),
        "a wrong promise"
    );
    assert_eq!(refused(region.addr(), MemKind::Unknown, 1).0, 1);
    assert_eq!(refused(region.addr(), MemKind::Managed(gpu.info().uuid), 1).0, 801);
    let addr = region.addr();
    drop(region);
    let (code, hint) = refused(addr, kind, 1);
    assert!(code == 1 && hint.contains("freed"), "{hint}");
    assert_eq!(driver.counters().copies, 0);
    assert!(host.iter().all(|&byte| byte == 7));
}

#[test]
fn memory_freed_under_a_copy_stays_until_the_copy_has_ended() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let (src, dst) =
        (gpu.allocate(MIB, Flavour::Plain).unwrap(), gpu.allocate(MIB, Flavour::Plain).unwrap());
    src.whole().write(&payload(MIB, 5)).unwrap();
    driver.faults().reuse_addresses(true);
    let held = driver.faults().hold_copies();
    let event = start_copy(&gpu, &dst, &src, MIB).unwrap();
    let addr = src.addr();
    drop(src);
    let new = gpu.allocate(MIB, Flavour::Plain).unwrap();
    assert_eq!(new.addr(), addr, "the address is in use again while the copy runs");
    assert_eq!(event.query(), Ok(false));
    drop(held);
    event.wait().unwrap();
    assert_eq!(dst.whole().to_vec().unwrap(), payload(MIB, 5));
    assert!(new.whole().to_vec().unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn a_slow_copy_is_pending_first_and_then_done() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let (host, device) = (Region::host(100), gpu.allocate(100, Flavour::Plain).unwrap());
    host.whole().write(&[3; 100]).unwrap();
    driver.faults().copy_delay(Duration::from_millis(150));
    let started = Instant::now();
    let event = start_copy(&gpu, &device, &host, 100).unwrap();
    assert_eq!(event.query(), Ok(false));
    event.wait().unwrap();
    assert!(started.elapsed() >= Duration::from_millis(150));
    assert_eq!(event.query(), Ok(true));
    driver.faults().copy_delay(Duration::ZERO);
    assert_eq!(device.whole().to_vec().unwrap(), [3; 100]);
}

#[test]
fn copies_fail_as_ordered_at_submit_or_through_the_event_and_only_those() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let (host, device) = (Region::host(8), gpu.allocate(8, Flavour::Plain).unwrap());
    device.whole().write(&[1; 8]).unwrap();
    host.whole().write(&[2; 8]).unwrap();

    driver.faults().fail_copies(FailAt::Event, Which::Nth(2), 719);
    start_copy(&gpu, &device, &host, 1).unwrap().wait().unwrap();
    let failed = start_copy(&gpu, &device, &host, 8).unwrap();
    assert_eq!(failed.wait().unwrap_err().code, 719);
    assert_eq!(failed.query().unwrap_err().name, "LAUNCH_FAILED");
    assert_eq!(
        device.whole().to_vec().unwrap(),
        [2, 1, 1, 1, 1, 1, 1, 1],
        "a failed copy moves nothing"
    );

    driver.faults().fail_copies(FailAt::Submit, Which::Nth(1), 700);
    assert_eq!(start_copy(&gpu, &device, &host, 8).unwrap_err().code, 700);
    driver.faults().fail_copies(FailAt::Event, Which::All, 700);
    assert_eq!((0..3).map(|_| code(device.whole().write(&[9; 8]))).collect::<Vec<_>>(), [700; 3]);
    driver.faults().heal_copies();
    start_copy(&gpu, &device, &host, 8).unwrap().wait().unwrap();
    assert_eq!(device.whole().to_vec().unwrap(), [2; 8]);
}

#[test]
fn without_peer_access_an_engine_refuses_and_says_what_to_do() {
    let driver =
        FakeDriver::new(FakeConfig { no_peer: vec![(0, 2)], ..FakeConfig::devices(3) }).unwrap();
    let gpus = driver.gpus();
    let [a, b, c] = [0, 1, 2].map(|at: usize| gpus[at].allocate(64, Flavour::Plain).unwrap());
    let uuid = |at: usize| gpus[at].info().uuid;
    assert!(gpus[0].reaches(uuid(0)).is_ok() && gpus[0].reaches(uuid(1)).is_ok());
    assert_eq!(gpus[0].reaches(uuid(2)).unwrap_err().code, 217);
    assert_eq!(gpus[2].reaches(uuid(0)).unwrap_err().code, 217);
    assert_eq!(gpus[0].reaches(GpuUuid([9; 16])).unwrap_err().code, 101);
    let refused = start_copy(&gpus[0], &a, &c, 64).unwrap_err();
    assert!(refused.code == 217 && refused.hint.contains("host memory"), "{refused}");
    start_copy(&gpus[1], &c, &a, 64).expect("a third device reaches both").wait().unwrap();
    start_copy(&gpus[0], &a, &b, 64).unwrap().wait().unwrap();
    driver.faults().refuse_peer(uuid(0), uuid(1), true);
    assert_eq!(start_copy(&gpus[0], &a, &b, 64).unwrap_err().code, 217);
    driver.faults().refuse_peer(uuid(0), uuid(1), false);
    start_copy(&gpus[0], &a, &b, 64).unwrap().wait().unwrap();
}

/// Launches a kernel on `stream` that spins until `flag` is at least `until`.
fn spin(stream: &FakeStream, flag: &Arc<AtomicUsize>, until: usize) {
    let flag = Arc::clone(flag);
    stream
        .launch(move |_| {
            while flag.load(Ordering::SeqCst) < until {
                std::thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_stream_works_in_order_streams_run_side_by_side_and_wait_for_each_other_across_devices() {
    let driver = driver(2);
    let one = driver.gpu(0).unwrap().fake_stream().unwrap();
    let other = driver.gpu(1).unwrap().fake_stream().unwrap();
    let region = driver.gpu(0).unwrap().allocate(4, Flavour::Plain).unwrap();
    let flag = Arc::new(AtomicUsize::new(0));
    spin(&one, &flag, 1);
    for (stream, byte) in [(&one, 1), (&one, 2)] {
        let slice = region.slice(0, 1).unwrap();
        stream.launch(move |kernel| kernel.write(&slice, &[byte])).unwrap();
    }
    let written = one.record().unwrap();
    other.synchronize().expect("the other stream is not held up");
    other.wait(&written).unwrap();
    let slice = region.slice(0, 2).unwrap();
    other
        .launch(move |kernel| kernel.with_bytes(&slice, |bytes| bytes[1] = bytes[0] * 10))
        .unwrap();
    let end = other.record().unwrap();
    assert_eq!((written.query(), end.query()), (Ok(false), Ok(false)));
    flag.store(1, Ordering::SeqCst);
    end.wait().unwrap();
    assert_eq!(written.query(), Ok(true));
    assert_eq!(region.whole().to_vec().unwrap(), [2, 20, 0, 0]);
}

/// gpu.md, streams rule 1.
#[test]
fn the_library_copies_go_on_while_a_stream_of_the_user_is_busy() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let stream = gpu.fake_stream().unwrap();
    let flag = Arc::new(AtomicUsize::new(0));
    spin(&stream, &flag, 1);
    let region = gpu.allocate(100, Flavour::Plain).unwrap();
    region.whole().write(&[5; 100]).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), [5; 100]);
    assert_eq!(stream.record().unwrap().query(), Ok(false));
    flag.store(1, Ordering::SeqCst);
    stream.synchronize().unwrap();
}

/// gpu.md, life and death rule 3: an error of the user's own work is reported, and only there.
#[test]
fn a_kernel_that_panics_or_touches_foreign_memory_fails_all_later_events_of_its_stream_only() {
    let driver = driver(2);
    let gpu = driver.gpu(0).unwrap();
    let (bad, good) = (gpu.fake_stream().unwrap(), gpu.fake_stream().unwrap());
    let before = bad.record().unwrap();
    bad.launch(|_| panic!("a kernel's panic, as ordered by the test")).unwrap();
    let ran = Arc::new(AtomicUsize::new(0));
    let runs = Arc::clone(&ran);
    bad.launch(move |_| {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    })
    .unwrap();
    assert_eq!(bad.synchronize().unwrap_err().code, 719);
    assert_eq!(bad.record().unwrap().wait().unwrap_err().code, 719);
    assert_eq!((before.wait(), ran.load(Ordering::SeqCst)), (Ok(()), 0));
    good.synchronize().unwrap();

    let far = driver.gpu(1).unwrap().allocate(8, Flavour::Plain).unwrap();
    driver.faults().refuse_peer(gpu.info().uuid, driver.gpu(1).unwrap().info().uuid, true);
    // The kernel ignores the error; the stream does not.
    good.launch(move |kernel| {
        let _ = kernel.read(&far.whole());
        Ok(())
    })
    .unwrap();
    assert_eq!(good.synchronize().unwrap_err().code, 700);

    let third = gpu.fake_stream().unwrap();
    let small = gpu.allocate(8, Flavour::Plain).unwrap();
    third.launch(move |kernel| kernel.write(&small.slice(0, 2).unwrap(), &[1; 3])).unwrap();
    let failed = third.record().unwrap();
    let fourth = gpu.fake_stream().unwrap();
    fourth.wait(&failed).unwrap();
    assert_eq!(fourth.synchronize().unwrap_err().code, 700, "what waits for a failed event fails");
}

#[test]
fn work_given_to_a_stream_is_done_although_its_handle_is_dropped() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let region = gpu.allocate(1, Flavour::Plain).unwrap();
    driver.faults().launch_delay(Duration::from_millis(50));
    let stream = gpu.fake_stream().unwrap();
    let slice = region.whole();
    stream.launch(move |kernel| kernel.write(&slice, &[1])).unwrap();
    let event = stream.record().unwrap();
    drop(stream);
    assert_eq!(event.query(), Ok(false));
    event.wait().unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), [1]);
}

#[test]
fn a_stream_writes_and_awaits_words_in_order() {
    let driver = driver(1);
    let stream = driver.gpu(0).unwrap().stream().unwrap();
    let words = Region::host(16);
    let (gate, flag) = (words.addr() as *mut u64, (words.addr() + 8) as *mut u64);
    // SAFETY: the words are aligned and outlive the stream's work, and are used as atomics only.
    unsafe {
        stream.wait_value64(gate, 5).unwrap();
        stream.write_value64(flag, 9).unwrap();
        stream.wait_value64(flag, 9).unwrap();
    }
    let end = stream.record().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!end.query().unwrap());
    assert_eq!(words.fetch_add(8, 0).unwrap(), 0);
    words.fetch_add(0, 6).unwrap();
    end.wait().unwrap();
    assert_eq!(words.fetch_add(8, 0).unwrap(), 9);
    // SAFETY: refused before anything is done.
    unsafe {
        assert_eq!(stream.write_value64((words.addr() + 1) as *mut u64, 1).unwrap_err().code, 1);
        assert_eq!(stream.write_value64(std::ptr::null_mut(), 1).unwrap_err().code, 1);
    }
}
