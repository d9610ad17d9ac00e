//! A driver that is missing, is a stub, is too old, lacks calls, answers with values that no
//! header has, or goes away. The libraries are mocks, made from `tests/support/src/mock` by the
//! machine's C compiler.

#![expect(unsafe_code, reason = "memory of the mock is used by address")]

mod capture;
mod copier;
mod forks;
mod pieces;
mod readers;
mod vmm;

use crate::mock::{library as mock, open, word};
use carrack_transports::gpu::{
    Driver, Flavour, Gpu, Handle, HandleForm, HandleKey, RemoteWrites, Stream,
};
use carrack_transports::mem::{
    AllocId, Freed, GpuUuid, KnownMemory, MR_DEVICE, MR_UNKNOWN, MemKind, RawError, Region,
};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Makes memory that claims to be a GPU's and that its driver does not know.
fn unknown_to_the_driver(gpu: &Arc<dyn Gpu>, len: usize) -> Region {
    let mut bytes = Box::new(vec![0_u8; len]);
    let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
    let kind = MemKind::Device(gpu.info().uuid);
    // SAFETY: the owner keeps the bytes, and they are not used through the owner.
    unsafe { Region::from_parts(base, len, kind, AllocId(1), Some(Arc::clone(gpu)), bytes) }
}

#[test]
fn without_a_library_every_address_is_host_memory_and_the_reason_is_told() {
    let driver = open(Path::new("/nowhere/libcuda.so.1"));
    assert!(driver.classify(0x1000).unwrap().is_none());
    assert!(driver.buffer_id(0x1000).unwrap().is_none());
    let why = driver.devices().unwrap_err();
    assert_eq!((why.code, why.name), (-1, "NO_LIBRARY"));
    assert!(
        why.hint.contains("/nowhere/libcuda.so.1") && why.hint.contains("NVIDIA driver"),
        "{why}"
    );
    assert_eq!(driver.version(), None);
}

#[test]
fn a_file_that_is_no_library_is_an_error() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-library.so");
    std::fs::write(&path, "not a library").unwrap();
    assert_eq!(open(&path).devices().unwrap_err().name, "NO_LIBRARY");
}

#[test]
fn a_library_of_something_else_lacks_the_first_call() {
    let why = open(Path::new("libc.so.6")).devices().unwrap_err();
    assert_eq!((why.call, why.name), ("cuDriverGetVersion", "MISSING_CALL"));
    assert!(why.hint.contains("libc.so.6"), "{why}");
}

#[test]
fn a_stub_is_recognised_named_and_what_to_do_is_said() {
    let library = mock("stub", "-DSTUB");
    let driver = open(&library);
    let why = driver.devices().unwrap_err();
    assert_eq!((why.code, why.name), (34, "STUB_LIBRARY"));
    assert!(why.hint.contains(&library.display().to_string()), "{why}");
    assert!(why.hint.contains("LD_LIBRARY_PATH"), "{why}");
    assert!(driver.classify(0x1000).unwrap().is_none());
}

#[test]
fn a_driver_that_is_too_old_is_told_so() {
    let why = open(&mock("ancient", "-DANCIENT")).devices().unwrap_err();
    assert_eq!(why.name, "TOO_OLD");
    assert!(why.hint.contains("10.2") && why.hint.contains("update"), "{why}");
}

/// gpu.md, streams rule 6.
#[test]
fn cuda_is_initialised_by_asking_for_devices_and_by_nothing_else() {
    let library = mock("inits", "-DMOCK");
    let driver = open(&library);
    assert!(format!("{driver:?}").contains("not opened"), "nothing is opened at the start");
    assert!(driver.classify(0x10000).unwrap().is_none(), "no device memory exists yet");
    assert!(driver.version().unwrap().contains("99.0"));
    assert_eq!(driver.devices_in_use().unwrap_err().name, "NOT_INITIALIZED");
    assert_eq!(word(&library, "mock_inits"), 0);
    let gpus = driver.devices().unwrap();
    assert_eq!(driver.devices_in_use().unwrap().len(), 1);
    assert_eq!(word(&library, "mock_inits"), 1);
    assert_eq!(word(&library, "mock_retained"), 0, "looking at devices makes no context");
    let info = gpus[0].info();
    assert_eq!((gpus.len(), &*info.name, info.uuid), (1, "Mock", GpuUuid([7; 16])));
    assert_eq!(info.pci.len(), 32, "text without an end ends with its place");
    // A later call finds it initialised.
    let region = gpus[0].allocate(100, Flavour::Plain).unwrap();
    let extent = driver.classify(region.addr() + 7).unwrap().unwrap();
    assert_eq!((extent.base, extent.len, extent.id), (region.addr(), 2 << 20, region.id()));
    assert_eq!((extent.kind, extent.context), (MemKind::Device(info.uuid), None));
    assert!(driver.classify(0x5000).unwrap().is_none());
    assert_eq!(driver.extents(region.addr(), 2 << 20).unwrap().len(), 1);
    assert_eq!(driver.extents(region.addr(), (2 << 20) + 1).unwrap_err().code, 1);
}

#[test]
fn copies_use_a_few_streams_and_events_again_and_again() {
    let library = mock("copies", "-DMOCK");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let (one, other) =
        (gpu.allocate(100, Flavour::Plain).unwrap(), gpu.allocate(100, Flavour::Plain).unwrap());
    let bytes: Vec<u8> = (0..100).collect();
    for _ in 0..1000 {
        one.whole().write(&bytes).unwrap();
        let (to, from) = (other.addr() as *mut u8, one.addr() as *const u8);
        // SAFETY: both regions outlive the copy.
        let event = unsafe { gpu.copy((to, other.kind()), (from, one.kind()), 100) }.unwrap();
        // This thread has no context, which this driver needs for the query.
        assert_eq!([(); 3].map(|()| event.query().unwrap()), [false, false, true]);
        event.wait().unwrap();
        assert_eq!(other.whole().to_vec().unwrap(), bytes);
    }
    assert_eq!((word(&library, "mock_streams"), word(&library, "mock_events")), (3, 1));
    // One event tells of many copies in flight.
    let (to, from) = (other.addr() as *mut u8, one.addr() as *const u8);
    // SAFETY: both regions outlive the copies.
    let copy = || unsafe { gpu.copy((to, other.kind()), (from, one.kind()), 100) }.unwrap();
    let copies: Vec<_> = (0..100).map(|_| copy()).collect();
    assert!(
        copies[1].is_behind(&copies[0]) && !copies[0].is_behind(&copies[1]),
        "in the order of their stream"
    );
    // The first is queried: an event is recorded behind all of them, and has not fired twice.
    assert_eq!([(); 4].map(|()| copies[0].query().unwrap()), [false, false, false, true]);
    assert!(copies.iter().all(|copy| copy.query().unwrap()));
    assert_eq!(word(&library, "mock_events"), 1);
    assert_eq!(word(&library, "mock_depth"), 0, "every way out restores the caller's context");
    let addr = other.addr();
    drop(other);
    assert_eq!(word(&library, "mock_allocations"), 1);
    assert!(driver.classify(addr).unwrap().is_none());
    let kind = one.kind();
    // SAFETY: the target is freed, which is the point; the driver refuses.
    let freed = unsafe { gpu.copy((addr as *mut u8, kind), (one.addr() as *const u8, kind), 100) };
    let why = freed.unwrap_err();
    assert!(why.code == 1 && why.hint.contains("freed already"), "{why}");
    // SAFETY: as above.
    let freed = unsafe { gpu.copy((addr as *mut u8, kind), (bytes.as_ptr(), MemKind::Host), 100) };
    assert!(freed.unwrap_err().hint.contains("freed already"));
}

/// gpu.md, legacy IPC rules 4 and 7.
#[test]
fn a_legacy_handle_is_opened_once_and_closed_once_however_often_it_is_asked_for() {
    let library = mock("opens", "-DMOCK");
    let gpu = open(&library).devices().unwrap().remove(0);
    let handle = |id| Handle {
        gpu: GpuUuid([9; 16]),
        id: AllocId(id),
        len: 2 << 20,
        offset: 0,
        key: HandleKey::Bytes([0; 64]),
    };
    let (one, other) = (gpu.open(&handle(1)).unwrap(), gpu.open(&handle(1)).unwrap());
    assert_eq!(one.addr(), other.addr());
    assert_eq!((word(&library, "mock_opens"), word(&library, "mock_open")), (1, 1));
    drop(one);
    assert_eq!(word(&library, "mock_open"), 1, "it is still open");
    drop(other);
    assert_eq!(word(&library, "mock_open"), 0);
    // The same bytes, which the exporter has given out again for another allocation.
    drop(gpu.open(&handle(2)).unwrap());
    assert_eq!((word(&library, "mock_opens"), word(&library, "mock_open")), (2, 0));
    assert_eq!(word(&library, "mock_depth"), 0, "the caller's context is restored");
}

/// gpu.md, legacy IPC rules 3, 9 and 10: the error names the causes that the driver's code may
/// have. The code alone does not tell.
#[test]
fn a_legacy_handle_that_is_refused_is_refused_with_all_that_may_be_behind_it() {
    let library = mock("refusals", "-DMOCK");
    let gpu = open(&library).devices().unwrap().remove(0);
    let refused = |code: u8| {
        let (mut bytes, id) = ([0; 64], AllocId(1));
        bytes[0] = code;
        let handle = Handle {
            gpu: GpuUuid([9; 16]),
            id,
            len: 2 << 20,
            offset: 0,
            key: HandleKey::Bytes(bytes),
        };
        gpu.open(&handle).map(drop).unwrap_err()
    };
    let why = refused(1);
    assert_eq!((why.code, why.name), (1, "INVALID_VALUE"));
    for cause in ["freed", "pid namespaces", "MIG instances"] {
        assert!(why.hint.contains(cause), "{cause}: {why}");
    }
    let own = refused(201);
    assert!(own.name == "INVALID_CONTEXT" && own.hint.contains("the pointer itself"), "{own}");
    let apart = refused(217);
    assert_eq!(
        (apart.name, &*apart.hint),
        ("PEER_ACCESS_UNSUPPORTED", "the two devices have no peer access")
    );
    assert_eq!(word(&library, "mock_depth"), 0, "the caller's context is restored");
}

/// gpu.md, life and death rule 2.
#[test]
fn what_is_dropped_after_the_driver_has_gone_is_dropped_quietly() {
    let library = mock("gone", "-DMOCK");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let region = gpu.allocate(100, Flavour::Plain).unwrap();
    region.whole().write(&[1; 100]).unwrap();
    let stream = gpu.stream().unwrap();
    let event = stream.record().unwrap();
    assert_eq!(word(&library, "mock_go"), 1);
    let why = region.whole().write(&[1; 100]).unwrap_err();
    assert!(why.to_string().contains("DEINITIALIZED"), "{why}");
    assert_eq!(event.query().unwrap_err().code, 4);
    assert_eq!(driver.classify(region.addr()).unwrap_err().code, 4);
    drop((region, stream, event, gpu));
    assert_eq!(word(&library, "mock_allocations"), 1, "nothing was freed any more");
}

#[test]
fn codes_and_types_that_no_header_has_are_errors() {
    let driver = open(&mock("unheard", "-DMOCK"));
    let gpus = driver.devices().unwrap();
    let why = gpus[0].allocate(1 << 40, Flavour::Plain).unwrap_err();
    assert_eq!((why.call, why.code, why.name), ("cuMemAlloc_v2", 4242, "UNKNOWN"));
    let why = driver.classify(0x90_0000).unwrap_err();
    assert!(why.name == "NOT_SUPPORTED" && why.hint.contains("77"), "{why}");
    let why = driver.classify(0xa0_0000).unwrap_err();
    assert!(why.name == "INVALID_DEVICE" && why.hint.contains("device 5"), "{why}");
    // As raw memory of the program, too.
    let (known, drivers): (_, [Arc<dyn Driver>; 1]) = (KnownMemory::of(4), [Arc::new(driver)]);
    for hint in [MR_UNKNOWN, MR_DEVICE] {
        // SAFETY: it is refused.
        let why = unsafe { known.region(0xa0_0000 as *mut u8, 10, hint, &drivers) }
            .unwrap_err()
            .to_string();
        assert!(why.contains("0xa00000") && why.contains("widen CUDA_VISIBLE_DEVICES"), "{why}");
    }
}

#[test]
fn what_is_allocated_where_something_was_freed_is_found_to_be_something_else() {
    let driver = open(&mock("known", "-DMOCK"));
    let gpu = driver.devices().unwrap().remove(0);
    let (known, drivers): (_, [Arc<dyn Driver>; 1]) = (KnownMemory::of(4), [Arc::new(driver)]);
    // SAFETY: the memory stays as long as the region is used.
    let raw = |addr: usize, hint| unsafe { known.region(addr as *mut u8, 10, hint, &drivers) };
    let owner = gpu.allocate(100, Flavour::Plain).unwrap();
    let (addr, first) = (owner.addr(), raw(owner.addr() + 3, MR_UNKNOWN).unwrap());
    assert_eq!((first.id(), first.root().len(), first.root().addr()), (owner.id(), 2 << 20, addr));
    assert!(raw(addr + 90, MR_DEVICE).unwrap().root().downgrade().is_of(first.root()), "one root");
    assert_eq!(first.recheck(), Ok(()));
    drop(owner);
    assert_eq!(first.recheck().unwrap_err().addr, addr + 3);
    let why = raw(addr, MR_UNKNOWN).unwrap_err();
    assert!(matches!(why, RawError::Freed(Freed { again: false, .. })), "{why}");
    // The mock's memory is host memory, and is reused sooner or later.
    let mut others = Vec::new();
    let again = loop {
        let other = gpu.allocate(100, Flavour::Plain).unwrap();
        if other.addr() == addr || others.len() == 30 {
            break other;
        }
        others.push(other);
    };
    if again.addr() == addr {
        assert_eq!(raw(addr, MR_UNKNOWN).unwrap().id(), again.id());
        assert!(first.recheck().unwrap_err().again);
    }
}

#[test]
fn a_call_that_the_driver_lacks_is_an_error_that_names_it() {
    let library = mock("lacks", "-DMOCK");
    let driver = open(&library);
    // It lacks cuDeviceGetUuid_v2, too: the call's older name will do.
    let gpu = driver.devices().unwrap().remove(0);
    for (flavour, call) in [
        (Flavour::Pinned, "cuMemHostAlloc"),
        (Flavour::Managed, "cuMemAllocManaged"),
        (Flavour::Pooled, "cuMemPoolCreate"),
    ] {
        let why = gpu.allocate(100, flavour).unwrap_err();
        assert_eq!((why.call, why.name), (call, "MISSING_CALL"), "{why}");
        assert!(why.hint.contains("libcuda.so"), "{why}");
    }
    assert_eq!(gpu.allocate(100, Flavour::Shareable).unwrap_err().name, "MISSING_CALL");
    assert_eq!(gpu.allocate(0, Flavour::Plain).unwrap_err().name, "INVALID_VALUE");
    assert_eq!(gpu.shared_event().unwrap_err().call, "cuIpcGetEventHandle");
    assert_eq!(gpu.open_event(&[0; 64]).unwrap_err().call, "cuIpcOpenEventHandle");
    assert_eq!(gpu.peer(gpu.info().uuid).unwrap_err().call, "cuDeviceGetP2PAttribute");
    let stream = gpu.stream().unwrap();
    assert_eq!(stream.wait(&stream.record().unwrap()).unwrap_err().call, "cuStreamWaitEvent");
    assert_eq!(stream.synchronize().unwrap_err().call, "cuStreamSynchronize");
    // The driver refuses to destroy it, which `Drop` survives.
    drop(stream);
    let host = Region::host(64);
    assert_eq!(gpu.export(&host, HandleForm::Bytes).unwrap_err().name, "INVALID_VALUE");
    assert_eq!(gpu.reaches(GpuUuid([8; 16])).unwrap_err().name, "INVALID_DEVICE");
    assert_eq!(word(&library, "mock_depth"), 0, "every way out restores the caller's context");
}

/// Deadlock rule b of docs/gpu.md: freeing memory blocks in the driver while a stream of the
/// context waits. The thread that frees may be the one that has to release the stream.
#[test]
fn memory_is_freed_only_when_no_stream_of_the_context_waits() {
    // With pinned memory the stream tells by a word that it is past its wait, without it by an
    // event.
    for define in ["-DMOCK", "-DPINNED"] {
        let library = mock(&format!("waits{define}"), define);
        let driver = open(&library);
        let gpu = driver.devices().unwrap().remove(0);
        let word = Box::leak(Box::new(AtomicU64::new(0)));
        let stream = gpu.stream().unwrap();
        let region = || gpu.allocate(100, Flavour::Plain).unwrap();
        let (first, second) = (region(), region());
        let is_there = |addr| driver.classify(addr).unwrap().is_some();
        let addresses = [&first, &second].map(Region::addr);
        drop(first);
        assert!(!is_there(addresses[0]), "no stream waits");
        // SAFETY: an aligned word that stays.
        unsafe { stream.wait_value64(word.as_ptr(), 1) }.unwrap();
        drop(second);
        driver.look_after();
        assert!(is_there(addresses[1]), "it is put off");
        word.store(1, Ordering::Release);
        self::word(&library, "mock_tell");
        // The mock's events fire when they are queried for the third time.
        (0..3).for_each(|_| driver.look_after());
        assert!(!is_there(addresses[1]), "{define}");
        assert_eq!(self::word(&library, "mock_blocked"), 0);
    }
}

/// A stream announces the end of a wait by a number that it writes behind the wait.
#[test]
fn a_stream_tells_of_each_of_its_waits_and_another_can_wait_for_that() {
    let library = mock("numbers", "-DPINNED");
    let gpu = open(&library).devices().unwrap().remove(0);
    let word = Box::leak(Box::new(AtomicU64::new(0)));
    let wait = |stream: &dyn Stream, value| {
        // SAFETY: an aligned word that stays.
        unsafe { stream.wait_value64(word.as_ptr(), value) }.unwrap()
    };
    let raise = |value| {
        word.store(value, Ordering::Release);
        self::word(&library, "mock_tell");
    };
    let (stream, other) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let [first, second] = [1, 2].map(|value| wait(&*stream, value));
    let apart = wait(&*other, 3);
    assert!(second.is_behind(&first) && !first.is_behind(&second));
    assert!(!apart.is_behind(&first), "it is another stream's");
    other.wait(&second).unwrap();
    let behind = other.record().unwrap();
    let fired = || [&first, &second, &apart].map(|event| event.query().unwrap());
    assert_eq!(fired(), [false; 3]);
    raise(1);
    assert_eq!(fired(), [true, false, false]);
    raise(3);
    assert_eq!(fired(), [true; 3]);
    second.wait().unwrap();
    self::word(&library, "mock_tell");
    assert_eq!([(); 3].map(|()| behind.query().unwrap()), [false, false, true]);
    // A stream that is dropped before its wait has ended keeps its word. Otherwise the next stream
    // gets the word, and goes on counting.
    wait(&*stream, 4);
    drop((stream, other, first, second, apart));
    let (third, fourth) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let late = [wait(&*third, 5), wait(&*fourth, 5)];
    assert!(late.iter().all(|event| !event.query().unwrap()));
    raise(4);
    assert!(
        late.iter().all(|event| !event.query().unwrap()),
        "the word of another's wait is not theirs"
    );
    raise(5);
    assert!(late.iter().all(|event| event.query().unwrap()));
}

/// Streams rule a.
#[test]
fn no_more_streams_wait_than_leave_connections_to_others() {
    let driver = open(&mock("most", "-DMOCK"));
    let gpu = driver.devices().unwrap().remove(0);
    let word = Box::leak(Box::new(AtomicU64::new(0)));
    // SAFETY: an aligned word that stays.
    let wait = |stream: &dyn Stream| unsafe { stream.wait_value64(word.as_ptr(), 1) };
    let streams: Vec<_> = (0..40).map(|_| gpu.stream().unwrap()).collect();
    let waiting = streams.iter().take_while(|stream| wait(&***stream).is_ok()).count();
    let connections =
        std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").map_or(8, |text| text.parse().unwrap());
    assert_eq!(waiting, connections - 2);
    let refused = wait(&*streams[waiting]).unwrap_err();
    assert!(refused.hint.contains("CUDA_DEVICE_MAX_CONNECTIONS"), "{refused}");
    wait(&*streams[0]).expect("a stream counts once, however often it waits");
}

/// Otherwise their memory would be reused while the engine still copies.
#[test]
fn copies_in_flight_have_not_failed_because_no_event_can_tell_of_them() {
    let library = mock("unmarked", "-DMOCK");
    let gpu = open(&library).devices().unwrap().remove(0);
    let [dst, src] = [(); 2].map(|()| gpu.allocate(100, Flavour::Plain).unwrap());
    let ends = ((dst.addr() as *mut u8, dst.kind()), (src.addr() as *const u8, src.kind()));
    word(&library, "mock_refuse_events");
    // SAFETY: both regions outlive the copies.
    let copies = [(); 3].map(|()| unsafe { gpu.copy(ends.0, ends.1, 100) }.unwrap());
    assert_eq!(copies[0].query(), Ok(false));
    copies[0].wait().unwrap();
    src.whole().write(&[7; 100]).unwrap();
    assert_eq!(src.whole().to_vec().unwrap(), [7; 100]);
    copies.iter().for_each(|copy| copy.wait().unwrap());
    assert_eq!((word(&library, "mock_copies"), word(&library, "mock_events")), (5, 0));
}

/// A stream that waits without the library's knowledge would have its word reused.
#[test]
fn a_stream_is_given_no_wait_and_no_copy_that_no_event_could_tell_of() {
    let library = mock("untold", "-DMOCK");
    let gpu = open(&library).devices().unwrap().remove(0);
    let stream = gpu.stream().unwrap();
    let gate = Box::leak(Box::new(AtomicU64::new(0)));
    // SAFETY: an aligned word that stays.
    let wait = || unsafe { stream.wait_value64(gate.as_ptr(), 1) };
    let [dst, src] = [(); 2].map(|()| gpu.allocate(100, Flavour::Plain).unwrap());
    let ends = ((dst.addr() as *mut u8, dst.kind()), (src.addr() as *const u8, src.kind()));
    // SAFETY: both regions outlive the copy.
    let copy = || unsafe { stream.copy(ends.0, ends.1, 100) };
    word(&library, "mock_refuse_events");
    let refused = [wait().unwrap_err(), copy().unwrap_err()];
    assert_eq!(refused.map(|why| (why.call, why.code)), [("cuEventCreate", 2); 2]);
    assert_eq!([word(&library, "mock_waits"), word(&library, "mock_copies")], [0, 0]);
    word(&library, "mock_allow_events");
    let (past, copied) = (wait().unwrap(), copy().unwrap());
    assert_eq!([word(&library, "mock_waits"), word(&library, "mock_copies")], [1, 1]);
    assert!([&past, &copied].iter().all(|event| event.query() == Ok(false)));
    gate.store(1, Ordering::Release);
    past.wait().unwrap();
    copied.wait().unwrap();
}

/// gpu.md: dma-buf rule 2; streams rule 3.
#[test]
fn memory_is_lent_to_nics_by_whole_pages_and_flushed_where_the_device_asks_for_that() {
    let library = mock("direct", "-DPINNED");
    let gpu = open(&library).devices().unwrap().remove(0);
    let region = gpu.allocate(100_000, Flavour::Plain).unwrap();
    let lent = gpu.export_dmabuf(region.addr() + 5000, 5000).unwrap();
    assert_eq!(
        (lent.offset, rustix::fs::fstat(&lent.fd).unwrap().st_size),
        (5000 - 4096, 2 * 4096)
    );
    assert!(rustix::io::fcntl_getfd(&lent.fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    assert_eq!(gpu.export_dmabuf(0x5000, 4096).unwrap_err().name, "INVALID_VALUE", "host memory");
    // It says 1 to every question: not in order, and flushed by the host.
    assert_eq!(gpu.remote_writes(), RemoteWrites::AfterFlush);
    gpu.flush_remote_writes().unwrap();
    assert_eq!(word(&library, "mock_flushes"), 1);
}

#[test]
fn a_driver_without_dma_bufs_says_which_call_it_lacks() {
    let gpu = open(&mock("no-direct", "-DMOCK")).devices().unwrap().remove(0);
    let region = gpu.allocate(100, Flavour::Plain).unwrap();
    let why = gpu.export_dmabuf(region.addr(), 100).unwrap_err();
    assert_eq!((why.call, why.name), ("cuMemGetHandleForAddressRange", "MISSING_CALL"));
    assert_eq!(gpu.flush_remote_writes().unwrap_err().name, "MISSING_CALL");
}
