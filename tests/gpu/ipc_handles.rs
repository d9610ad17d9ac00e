//! `ipc_export` and `ipc_open`: a program that carries names of GPU memory and events between its
//! processes by itself. With simulated GPUs here, and with real ones where `TEST_GPU=cuda` says so.

#![expect(unsafe_code, reason = "GPU memory and words of streams are used by address")]

use crate::support::Watchdog;
use crate::support::gpus::{self, TestDriver};
use crate::support::ranks::{Ranks, Role};
use crate::support::words::{filled, wrong};
use carrack::ipc::{
    EVENT_BYTES, IpcError, IpcMemory, ipc_export, ipc_export_as, ipc_export_event, ipc_open,
    ipc_open_event,
};
use carrack::transports::gpu::{Flavour, HandleForm};
use carrack::transports::mem::copy::copy_and_wait;
use carrack::transports::mem::{MemKind, Region};
use carrack_transports::net::packets::{Channel, Listener, Received};
use std::os::fd::OwnedFd;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);
const FORMS: [(Flavour, HandleForm); 3] = [
    (Flavour::Plain, HandleForm::Bytes),
    (Flavour::Shareable, HandleForm::Fd),
    (Flavour::Pooled, HandleForm::Pool),
];
/// Offset and length of the exported part.
const PART: (usize, usize) = (4097, (2 << 20) + 5);
const WHOLE: usize = 3 << 20;

#[test]
fn a_part_of_an_allocation_is_read_and_written_by_another_process_in_each_form() {
    let _watchdog = Watchdog::over("memory");
    Ranks::start("ipc_handles::memory", 2, &[]).succeed();
}

#[test]
fn an_event_of_another_process_fires_when_its_stream_comes_to_it() {
    let _watchdog = Watchdog::over("event");
    Ranks::start("ipc_handles::event", 2, &[]).succeed();
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match (role.name.as_str(), role.rank) {
        ("memory", 0) => exports(&role),
        ("memory", _) => opens(&role),
        (_, 0) => records(&role),
        _ => waits(&role),
    }
}

#[test]
fn what_cannot_be_exported_is_refused_with_what_to_do() {
    let driver = TestDriver::new();
    let gpu = &driver.gpus[0];
    for (region, kind) in [
        (Region::host(100), MemKind::Host),
        (gpu.allocate(100, Flavour::Pinned).unwrap(), MemKind::Pinned),
    ] {
        let why = ipc_export(&region).unwrap_err();
        assert!(matches!(&why, IpcError::Kind(found) if *found == kind), "{why}");
        assert!(why.to_string().contains("Runtime::allocate"), "{why}");
    }
    let managed = gpu.allocate(100, Flavour::Managed).unwrap();
    let why = ipc_export(&managed).unwrap_err().to_string();
    assert!(why.contains("as Bytes") && why.contains("Flavour::Plain"), "{why}");
    let plain = gpu.allocate(100, Flavour::Plain).unwrap();
    let why = ipc_export_as(&plain, HandleForm::Fd).unwrap_err();
    assert!(matches!(why, IpcError::Gpu(_)), "{why}");
    // The process that owns it has the region.
    let own = ipc_open(&**gpu, &ipc_export(&plain).unwrap()).unwrap_err();
    assert!(own.to_string().contains("use the pointer itself"), "{own}");
}

#[test]
fn bytes_that_are_no_name_are_refused_and_nothing_is_opened() {
    let driver = TestDriver::new();
    let plain = driver.gpus[0].allocate(WHOLE, Flavour::Plain).unwrap();
    let part = plain.subregion(PART.0, PART.1).unwrap();
    let name = ipc_export(&part).unwrap();
    let good = name.to_bytes();
    let again = IpcMemory::from_bytes(&good, None).unwrap();
    assert_eq!((again.len(), again.form(), again.to_bytes()), (PART.1, HandleForm::Bytes, good));
    assert_eq!(again.handle().offset, name.handle().offset);
    let null = || Some(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
    let mut too_long = good;
    too_long[112..].fill(0xff);
    for (bytes, fd) in [
        (&good[..119], None),
        (&good[..0], None),
        (&[0; 120][..], None),
        (&[0xff; 120][..], None),
        (&good[..], null()),
        (&too_long[..], None),
    ] {
        let why = IpcMemory::from_bytes(bytes, fd).unwrap_err();
        assert!(matches!(why, IpcError::Bytes { what: "memory", .. }), "{why}");
    }
    let gpu = &*driver.gpus[0];
    assert!(matches!(ipc_open_event(gpu, &[1; 63]), Err(IpcError::Bytes { what: "event", .. })));
    // A real driver says nowhere what it does with bytes that it has not made.
    if !gpus::is_for_simulated_only("nonsense is not given to the driver") {
        assert!(matches!(ipc_open_event(gpu, &[1; EVENT_BYTES]), Err(IpcError::Gpu(_))));
    }
}

// ---- roles --------------------------------------------------------------------------------------

fn holds(region: &Region, from: usize, len: usize, salt: u64) -> bool {
    wrong(&region.slice(from, len).unwrap().to_vec().unwrap(), salt, 0).is_none()
}

/// Opens a way of the program's own to the other process, which carries descriptors.
fn channel(role: &Role) -> Channel {
    if role.rank == 1 {
        return Channel::connect(&role.told("address", 0)).unwrap();
    }
    let name = format!("carrack-test-ipc-handles-{}", std::process::id());
    let listener = Listener::bind(name.as_bytes()).unwrap();
    role.tells("address", name.as_bytes());
    loop {
        match listener.accept().unwrap() {
            Some(channel) => return channel,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn hear(channel: &Channel) -> (Vec<u8>, Option<OwnedFd>) {
    let mut bytes = vec![0; 200];
    loop {
        match channel.receive(&mut bytes).unwrap() {
            Received::Message(len, mut fds) => return (bytes[..len].to_vec(), fds.pop()),
            Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
            Received::Closed => panic!("the other process is gone"),
        }
    }
}

fn exports(role: &Role) {
    let driver = TestDriver::new();
    let gpu = &driver.gpus[0];
    let channel = channel(role);
    let (at, len) = PART;
    for (turn, (flavour, form)) in (0..).zip(FORMS) {
        let region = gpu.allocate(WHOLE, flavour).unwrap();
        region.whole().write(&filled(WHOLE, 100 + turn)).unwrap();
        let part = region.subregion(at, len).unwrap();
        part.whole().write(&filled(len, turn)).unwrap();
        let name = ipc_export(&part).unwrap();
        assert_eq!((name.form(), name.len()), (form, len));
        let fds: Vec<_> = name.fd().into_iter().collect();
        channel.send(&name.to_bytes(), &fds).unwrap();
        assert_eq!(role.told(&format!("closed {turn}"), 1), b"");
        assert!(holds(&part, 0, len, 50 + turn), "{flavour:?}: what the other process wrote");
        let before = region.slice(0, at).unwrap().to_vec().unwrap();
        assert_eq!(
            wrong(&before, 100 + turn, 0),
            None,
            "{flavour:?}: nothing before it was written"
        );
        let whole = filled(WHOLE, 100 + turn);
        let behind = region.slice(at + len, WHOLE - at - len).unwrap().to_vec().unwrap();
        assert!(behind == whole[at + len..], "{flavour:?}: nor behind it");
        drop((part, region));
        role.says(&format!("freed {turn}"));
    }
}

fn opens(role: &Role) {
    let driver = TestDriver::new();
    let gpu = driver.last();
    let channel = channel(role);
    for (turn, (flavour, _)) in (0..).zip(FORMS) {
        let (bytes, fd) = hear(&channel);
        let name = IpcMemory::from_bytes(&bytes, fd).unwrap();
        let region = ipc_open(&**gpu, &name).unwrap();
        assert_eq!(
            (region.len(), region.kind()),
            (PART.1, MemKind::Device(name.handle().gpu)),
            "{flavour:?}"
        );
        assert!(holds(&region, 0, PART.1, turn), "{flavour:?}: what was exported");
        // By the engine into this process's own memory, changed, and back.
        let own = gpu.allocate(PART.1, Flavour::Plain).unwrap();
        copy_and_wait(own.part_mut(0, PART.1).unwrap(), region.part(0, PART.1).unwrap()).unwrap();
        assert!(holds(&own, 0, PART.1, turn));
        own.whole().write(&filled(PART.1, 50 + turn)).unwrap();
        copy_and_wait(region.part_mut(0, PART.1).unwrap(), own.part(0, PART.1).unwrap()).unwrap();
        assert!(region.slice(0, PART.1 + 1).is_none(), "no more than was exported");
        drop(region);
        role.says(&format!("closed {turn}"));
        role.told(&format!("freed {turn}"), 0);
        // A descriptor is the memory itself; bytes lead to what is there no more. What a real
        // driver makes of bytes whose memory is gone is its own affair.
        if name.form() == HandleForm::Bytes && !gpus::are_real() {
            let gone = ipc_open(&**gpu, &name).unwrap_err().to_string();
            assert!(gone.contains("has freed"), "{gone}");
        }
    }
}

fn records(role: &Role) {
    let driver = TestDriver::new();
    let gpu = &driver.gpus[0];
    let (stream, event) = (gpu.stream().unwrap(), gpu.shared_event().unwrap());
    let word = gpu.allocate(8, Flavour::Pinned).unwrap();
    word.whole().write(&[0; 8]).unwrap();
    for turn in 1..=3 {
        // SAFETY: the word is aligned, pinned, kept until the stream is done with it, and used by
        // atomic operations only.
        unsafe { stream.wait_value64(word.addr() as *const u64, turn) }.unwrap();
        event.record(&*stream).unwrap();
        role.tells(&format!("recorded {turn}"), &ipc_export_event(&*event).unwrap());
        role.told(&format!("looked {turn}"), 1);
        assert_eq!(word.compare_swap(0, turn - 1, turn), Ok(turn - 1));
        role.told(&format!("waited {turn}"), 1);
    }
    stream.synchronize().unwrap();
    if !gpus::are_real() {
        let own = ipc_open_event(&**gpu, &ipc_export_event(&*event).unwrap());
        assert!(own.is_err(), "the process that made it has the event itself");
    }
    role.told("over", 1);
}

fn waits(role: &Role) {
    let driver = TestDriver::new();
    let gpu = driver.last();
    let mut kept = None;
    for turn in 1..=3 {
        let name = role.told(&format!("recorded {turn}"), 0);
        let event = kept.get_or_insert_with(|| ipc_open_event(&**gpu, &name).unwrap());
        let stream = gpu.stream().unwrap();
        let record = event.event();
        assert!(!record.query().unwrap(), "the stream of the other process has not come to it");
        stream.wait(&record).unwrap();
        let behind = stream.record().unwrap();
        assert!(!behind.query().unwrap(), "this one waits for it");
        role.says(&format!("looked {turn}"));
        record.wait().unwrap();
        behind.wait().unwrap();
        role.says(&format!("waited {turn}"));
    }
    role.says("over");
}
