//! The simulated GPU: that its memory bites, that handles work between real processes, that it misbehaves
//! as ordered.
//!
//! The processes are this test binary again: a test starts it for the one test [`child`], with what to do
//! in an environment variable and one end of a socket pair as its standard input.

use carrack_transports::gpu::fake::{FailAt, FakeConfig, FakeDriver, FakeGpu, FakeStream, Which};
use carrack_transports::gpu::{
    Driver, Event, Flavour, Gpu, GpuError, Handle, HandleForm, HandleKey, Stream, Until,
};
use carrack_transports::mem::{AllocId, CopyError, GpuUuid, MemKind, Region};
use rand::{Rng, RngCore, SeedableRng, rngs::SmallRng};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const ROLE: &str = "CARRACK_FAKE_GPU_CHILD";

// ---- the other process ------------------------------------------------------------------------------

/// A process of this test binary that plays a role. Killed when dropped.
struct Other {
    process: Child,
    wire: UnixStream,
}

impl Other {
    fn start(role: &str) -> Self {
        let (wire, theirs) = UnixStream::pair().unwrap();
        wire.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { process, wire }
    }

    fn end(mut self) -> ExitStatus {
        drop(self.wire.shutdown(std::net::Shutdown::Write));
        self.process.wait().unwrap()
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn say(mut wire: &UnixStream, bytes: &[u8]) {
    wire.write_all(&u32::try_from(bytes.len()).unwrap().to_le_bytes()).unwrap();
    wire.write_all(bytes).unwrap();
}

fn hear(mut wire: &UnixStream) -> Vec<u8> {
    let mut len = [0; 4];
    wire.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    wire.read_exact(&mut bytes).unwrap();
    bytes
}

/// Waits for the other side; false when it has hung up.
fn told_to_go_on(mut wire: &UnixStream) -> bool {
    let mut len = [0; 4];
    let mut words = [0; 5];
    wire.read_exact(&mut len).is_ok() && wire.read_exact(&mut words).is_ok() && words == *b"go on"
}

fn say_handle(wire: &UnixStream, handle: &Handle) {
    say(wire, &handle.encode());
    let Some(fd) = handle.fd() else { return };
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(wire, &[IoSlice::new(b"f")], &mut control, SendFlags::empty()).unwrap();
}

fn hear_handle(wire: &UnixStream) -> Handle {
    let text = hear(wire).try_into().unwrap();
    if let Some(handle) = Handle::decode(&text, None) {
        return handle;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(wire, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    Handle::decode(&text, fds.next()).unwrap()
}

/// Not a test by itself: what a process started by another test does.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: standard input is the socket that `Other::start` gave, and nothing else uses it.
    let wire = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
    let role: Vec<&str> = role.split(' ').collect();
    match role[..] {
        ["load"] => {
            let region = driver(1).gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
            say(&wire, b"about to load");
            // SAFETY: it is not, which is the point: the load ends the process.
            let byte = unsafe { (region.addr() as *const u8).read_volatile() };
            say(&wire, &[byte]);
        }
        ["store"] => {
            let region = driver(1).gpu(0).unwrap().allocate(64, Flavour::Shareable).unwrap();
            say(&wire, b"about to store");
            // SAFETY: it is not, which is the point: the store ends the process.
            unsafe { (region.addr() as *mut u8).write_volatile(1) };
            say(&wire, b"stored");
        }
        ["freed"] => {
            let region = driver(1).gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
            let addr = region.addr();
            let keep = region.gpu().cloned();
            drop(region);
            say(&wire, b"about to load");
            // SAFETY: it is not, which is the point: the load ends the process.
            let byte = unsafe { (addr as *const u8).read_volatile() };
            say(&wire, &[byte]);
            drop(keep);
        }
        // Exports memory of the machine's device 1, with devices counted the other way round.
        ["export", form, len, seed] => {
            let form = match form {
                "bytes" => HandleForm::Bytes,
                "fd" => HandleForm::Fd,
                _ => HandleForm::Pool,
            };
            let (len, seed) = (len.parse().unwrap(), seed.parse().unwrap());
            let config = FakeConfig { visible: Some(vec![1, 0]), ..FakeConfig::devices(2) };
            let gpu = FakeDriver::new(config).unwrap().gpu(0).unwrap();
            let region = gpu.allocate(len, flavour(form)).unwrap();
            region.whole().write(&payload(len, seed)).unwrap();
            say_handle(&wire, &gpu.export(&region, form).unwrap());
            if told_to_go_on(&wire) {
                assert_eq!(region.whole().to_vec().unwrap(), payload(len, seed + 1));
                say(&wire, b"as expected");
            }
            if told_to_go_on(&wire) {
                drop(region);
                say(&wire, b"freed");
            }
            told_to_go_on(&wire);
        }
        // Opens what it is given, sees all of it, writes all of it.
        ["import", seed] => {
            let seed: u64 = seed.parse().unwrap();
            let config = FakeConfig { visible: Some(vec![1, 0]), ..FakeConfig::devices(2) };
            let driver = FakeDriver::new(config).unwrap();
            // By the device that does not own it.
            let region = driver.gpu(0).unwrap().open(&hear_handle(&wire)).unwrap();
            assert_eq!(region.kind(), MemKind::Device(driver.gpu(1).unwrap().info().uuid));
            assert_eq!(region.whole().to_vec().unwrap(), payload(region.len(), seed));
            region.whole().write(&payload(region.len(), seed + 1)).unwrap();
            say(&wire, b"as expected");
        }
        ["rounds"] => say(&wire, rounds().as_bytes()),
        _ => panic!("no such role: {role:?}"),
    }
}

// ---- helpers ----------------------------------------------------------------------------------------

fn driver(devices: usize) -> FakeDriver {
    FakeDriver::new(FakeConfig::devices(devices)).unwrap()
}

fn flavour(form: HandleForm) -> Flavour {
    match form {
        HandleForm::Bytes => Flavour::Plain,
        HandleForm::Fd => Flavour::Shareable,
        HandleForm::Pool => Flavour::Pooled,
        HandleForm::Fabric => panic!("simulated devices are in no fabric"),
    }
}

fn nonsense(byte: u8) -> Handle {
    let key = HandleKey::Bytes([byte; 64]);
    Handle { gpu: GpuUuid([byte; 16]), id: AllocId(0), len: 1000, offset: 0, key }
}

fn payload(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

fn start_copy(gpu: &FakeGpu, dst: &Region, src: &Region, len: usize) -> Result<Event, GpuError> {
    let (to, from) = (dst.addr() as *mut u8, src.addr() as *const u8);
    // SAFETY: the callers keep both regions until the event has fired, or free them on purpose, which the
    // simulated driver allows.
    unsafe { gpu.copy((to, dst.kind()), (from, src.kind()), len) }
}

/// The driver's code of a copy that failed.
fn code(outcome: Result<(), CopyError>) -> i32 {
    match outcome.unwrap_err() {
        CopyError::Engine { cause, .. } => cause.code,
        other => panic!("not the engine's: {other}"),
    }
}

// ---- its memory bites -------------------------------------------------------------------------------

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

// ---- copies -----------------------------------------------------------------------------------------

#[test]
fn random_payloads_arrive_whole_at_odd_offsets_and_leave_the_guards_alone() {
    let driver = driver(2);
    let mut random = SmallRng::seed_from_u64(1);
    let size = 3 * MIB;
    let one = driver.gpu(0).unwrap().allocate(size, Flavour::Plain).unwrap();
    let other = driver.gpu(1).unwrap().allocate(size, Flavour::Shareable).unwrap();
    for round in 0..60 {
        let len =
            if round % 10 == 0 { random.random_range(1..2 * MIB) } else { random.random_range(1..5000) };
        let (at, to) = (random.random_range(1..size - len - 1), random.random_range(1..size - len - 1));
        let bytes = payload(len, round);
        one.slice(at - 1, len + 2).unwrap().write(&vec![0xaa; len + 2]).unwrap();
        other.slice(to - 1, len + 2).unwrap().write(&vec![0xbb; len + 2]).unwrap();
        one.slice(at, len).unwrap().write(&bytes).unwrap();
        let (from, onto) = (one.slice(at, len).unwrap(), other.slice(to, len).unwrap());
        carrack_transports::mem::copy::copy_and_wait(onto.view_mut(), from.view()).unwrap();
        let seen = one.slice(at - 1, len + 2).unwrap().to_vec().unwrap();
        assert!(seen[0] == 0xaa && seen[1..=len] == bytes && seen[len + 1] == 0xaa, "round {round}");
        let seen = other.slice(to - 1, len + 2).unwrap().to_vec().unwrap();
        assert!(seen[0] == 0xbb && seen[1..=len] == bytes && seen[len + 1] == 0xbb, "round {round}");
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
        let outcome = unsafe { gpu.copy((host.as_mut_ptr(), MemKind::Host), (addr as *const u8, kind), len) };
        let error = outcome.unwrap_err();
        (error.code, error.hint)
    };
    let (code, hint) = refused(region.addr(), kind, 1001);
    assert!(code == 1 && hint.contains("beyond the allocation's end"), "{hint}");
    assert_eq!(refused(region.addr() + 999, kind, 2).0, 1);
    assert_eq!(refused(region.addr(), kind, neighbour.addr() - region.addr() + 1).0, 1, "into its neighbour");
    assert_eq!(refused(region.addr() + 1000, kind, 1).0, 1);
    assert_eq!(refused(0x1000, kind, 1).0, 1, "never allocated");
    assert!(refused(region.addr(), peer, 1).1.contains("belongs to"));
    assert!(refused(region.addr(), MemKind::Host, 1).1.contains("is device memory"), "a wrong promise");
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
fn memory_freed_under_a_copy_stays_until_the_copy_is_over() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let (src, dst) = (gpu.allocate(MIB, Flavour::Plain).unwrap(), gpu.allocate(MIB, Flavour::Plain).unwrap());
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
    assert_eq!(device.whole().to_vec().unwrap(), [2, 1, 1, 1, 1, 1, 1, 1], "a failed copy moves nothing");

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
    let driver = FakeDriver::new(FakeConfig { no_peer: vec![(0, 2)], ..FakeConfig::devices(3) }).unwrap();
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

// ---- streams and kernels ----------------------------------------------------------------------------

/// A kernel on `stream` that spins until `flag` is at least `until`.
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
    other.launch(move |kernel| kernel.with_bytes(&slice, |bytes| bytes[1] = bytes[0] * 10)).unwrap();
    let over = other.record().unwrap();
    assert_eq!((written.query(), over.query()), (Ok(false), Ok(false)));
    flag.store(1, Ordering::SeqCst);
    over.wait().unwrap();
    assert_eq!(written.query(), Ok(true));
    assert_eq!(region.whole().to_vec().unwrap(), [2, 20, 0, 0]);
}

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

// ---- addresses --------------------------------------------------------------------------------------

#[test]
fn an_address_is_classified_by_the_allocation_that_it_lies_in() {
    let driver = driver(2);
    let gpu = driver.gpu(1).unwrap();
    let region = gpu.allocate(2 * MIB, Flavour::Plain).unwrap();
    let neighbour = gpu.allocate(2 * MIB + 1, Flavour::Shareable).unwrap();
    assert_eq!(neighbour.addr(), region.addr() + 2 * MIB, "they touch, or this test is no test");
    let on_the_stack = std::ptr::from_ref(&driver) as usize;
    let what = |addr| driver.classify(addr).unwrap().map(|extent| (extent.base, extent.len, extent.id));
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
    assert_eq!(driver.classify(neighbour.addr()).unwrap().unwrap().context, None, "VMM memory has none");
    driver.faults().null_context(true);
    assert_eq!(driver.classify(base).unwrap().unwrap().context, None);
    drop(region);
    assert_eq!(what(base), None, "freed");
}

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

#[test]
fn memory_runs_out_by_blocks_of_2_mib_and_comes_back() {
    let config = FakeConfig { memory: 5 * MIB, ..FakeConfig::devices(1) };
    let gpu = FakeDriver::new(config).unwrap().gpu(0).unwrap();
    assert_eq!(gpu.allocate(0, Flavour::Plain).unwrap_err().code, 1);
    assert_eq!(gpu.allocate(usize::MAX, Flavour::Plain).unwrap_err().code, 2);
    let one = gpu.allocate(1, Flavour::Plain).unwrap();
    let _two = gpu.allocate(2 * MIB, Flavour::Shareable).unwrap();
    let full = gpu.allocate(1, Flavour::Plain).unwrap_err();
    assert!(full.code == 2 && full.name == "OUT_OF_MEMORY" && full.hint.contains("do not fit"), "{full}");
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

// ---- handles ----------------------------------------------------------------------------------------

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

#[test]
fn memory_of_another_process_is_read_and_written_under_a_permuted_order_of_devices() {
    for (form, word) in [(HandleForm::Bytes, "bytes"), (HandleForm::Fd, "fd"), (HandleForm::Pool, "pool")] {
        let len = 3 * MIB + 17;
        let here = driver(2);
        // Theirs here.
        let other = Other::start(&format!("export {word} {len} 40"));
        let handle = hear_handle(&other.wire);
        let region = here.gpu(0).unwrap().open(&handle).unwrap();
        assert_eq!(region.len(), len);
        let owner = region.gpu().unwrap().info();
        assert_eq!(
            (owner.ordinal, region.kind()),
            (1, MemKind::Device(owner.uuid)),
            "the same device as there"
        );
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
        // They free it: what is open stays, what is not cannot be opened any more, unless it is a descriptor.
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
            assert_eq!(gpu.open(&handle).unwrap_err().code, 400, "nobody is there to open it from");
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
    let Handle { gpu: uuid, id, len, offset, key: HandleKey::Bytes(good) } = hear_handle(&other.wire) else {
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
            (0..4 | 8..20 | 24..32 | 48..64, Ok(region)) => panic!("bit {bit} went unnoticed: {region:?}"),
            // The exporter's address and id are for people.
            (20..24 | 32..40, Err(why)) => panic!("bit {bit}: {why}"),
            // Another length may lie within the block, another pid may be another thread of the exporter.
            (_, Ok(region)) => {
                assert!(region.len() <= 2 * MIB, "bit {bit}");
                let len = region.len().min(1000);
                assert_eq!(region.slice(0, len).unwrap().to_vec().unwrap(), payload(1000, 3)[..len]);
            }
            (_, Err(_)) => {}
        }
    }
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
    assert_eq!(unsafe { gpu.register_host((mine.addr() + 4095) as *mut u8, 1) }.unwrap_err().code, 712);
    drop(lock);
    assert!(driver.classify(mine.addr()).unwrap().is_none());
}

#[test]
fn managed_memory_is_named_and_never_copied() {
    let driver = driver(1);
    let gpu = driver.gpu(0).unwrap();
    let managed = gpu.allocate(100, Flavour::Managed).unwrap();
    assert_eq!(driver.classify(managed.addr()).unwrap().unwrap().kind, MemKind::Managed(gpu.info().uuid));
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
}

#[test]
fn a_stream_writes_and_awaits_words_in_order() {
    let driver = driver(1);
    let stream = driver.gpu(0).unwrap().stream().unwrap();
    let words = Region::host(16);
    let (gate, flag) = (words.addr() as *mut u64, (words.addr() + 8) as *mut u64);
    // SAFETY: the words are aligned and outlive the stream's work, and are used as atomics only.
    unsafe {
        stream.wait_value64(gate, 5, Until::Reached).unwrap();
        stream.write_value64(flag, 9).unwrap();
        stream.wait_value64(flag, 9, Until::Equal).unwrap();
    }
    let over = stream.record().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!over.query().unwrap());
    assert_eq!(words.fetch_add(8, 0).unwrap(), 0);
    words.fetch_add(0, 6).unwrap();
    over.wait().unwrap();
    assert_eq!(words.fetch_add(8, 0).unwrap(), 9);
    // SAFETY: refused before anything is done.
    unsafe {
        assert_eq!(stream.write_value64((words.addr() + 1) as *mut u64, 1).unwrap_err().code, 1);
        assert_eq!(stream.write_value64(std::ptr::null_mut(), 1).unwrap_err().code, 1);
    }
}

// ---- nothing is left behind -------------------------------------------------------------------------

#[test]
fn after_a_thousand_rounds_descriptors_and_mappings_are_what_they_were() {
    // In a process of its own: other tests, on other threads of this one, open and map as they like.
    let other = Other::start("rounds");
    let say = String::from_utf8(hear(&other.wire)).unwrap();
    assert!(other.end().success(), "{say}");
    let (before, after) = say.split_once(" then ").unwrap();
    assert_eq!(before, after, "(descriptors, mappings)");
}

/// Allocates, exports, opens, copies and frees, again and again, and counts what the process has before
/// and after.
fn rounds() -> String {
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

#[test]
fn a_region_keeps_what_it_needs_of_a_driver_that_is_gone() {
    let driver = driver(2);
    let region = driver.gpu(1).unwrap().allocate(100, Flavour::Plain).unwrap();
    drop(driver);
    region.whole().write(&[4; 100]).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), [4; 100]);
}
