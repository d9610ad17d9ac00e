//! Memory and events of one process in another.

use crate::roles::{Other, Wire};
use crate::support::{MIB, copy_and_check, flavour, make, need, payload, start};
use crate::user;
use carrack_transports::gpu::{Driver, Gpu, Handle, HandleForm, HandleKey};
use carrack_transports::mem::{AllocId, GpuUuid, MemKind, Region};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 5 * MIB + 3;

const KINDS: [(&str, HandleForm); 3] =
    [("plain", HandleForm::Bytes), ("shareable", HandleForm::Fd), ("pooled", HandleForm::Pool)];

/// Returns the device of the other process: another device, where there is one.
fn far(gpus: &[Arc<dyn Gpu>]) -> &Arc<dyn Gpu> {
    gpus.last().unwrap()
}

/// Opens each handle that it is sent, checks the memory, and changes it. Ends with the wire.
pub fn import(wire: &Wire) {
    let (driver, gpus) = need(1).unwrap();
    let (gpu, mut opened) = (far(&gpus), 0);
    while let Some(words) = wire.hear_or_end() {
        let seed = u64::from_le_bytes(words.try_into().unwrap());
        let handle = wire.hear_handle();
        assert_eq!(user::current(), 0, "a new process has no context");
        let region = match gpu.open(&handle) {
            Ok(region) => region,
            Err(why) => {
                wire.say(format!("refused: {why}").as_bytes());
                continue;
            }
        };
        assert_eq!(user::current(), 0, "legacy IPC rule 7");
        // The first few of each, since some tests have hundreds.
        if opened < 8 {
            let (form, on) = (handle.form(), gpu.info().ordinal);
            let taken_for = driver.classify(region.addr());
            println!(
                "{form:?} of {} opened by device {on}: {region:?}, taken for {taken_for:?}",
                handle.gpu
            );
        }
        opened += 1;
        assert_eq!((region.len(), region.kind()), (handle.len, MemKind::Device(handle.gpu)));
        if handle.form() == HandleForm::Bytes {
            // The driver names the device that has opened it.
            let extent = driver.classify(region.addr() + handle.offset).unwrap().unwrap();
            assert_eq!(extent.kind, region.kind(), "{extent:?}");
        }
        // Legacy IPC rule 4: opening the same handle again gives the same mapping, which stays
        // when one of the two is closed.
        let again = gpu.open(&handle).unwrap();
        if handle.form() == HandleForm::Bytes {
            assert_eq!(again.addr(), region.addr());
        }
        assert!(again.slice(handle.offset, LEN).unwrap().to_vec().unwrap() == payload(LEN, seed));
        drop(again);
        let part = region.slice(handle.offset, LEN).unwrap();
        assert!(part.to_vec().unwrap() == payload(LEN, seed), "after one of two was closed");
        // Into a device's own memory, and back out of it.
        let own = make(gpu, "plain", region.len());
        start(&**gpu, (&own, 0), (&region, handle.offset), LEN).unwrap().wait().unwrap();
        assert!(own.slice(0, LEN).unwrap().to_vec().unwrap() == payload(LEN, seed));
        own.slice(0, LEN).unwrap().write(&payload(LEN, seed + 1)).unwrap();
        start(&**gpu, (&region, handle.offset), (&own, 0), LEN).unwrap().wait().unwrap();
        drop((part, region));
        wire.say(b"closed");
    }
}

/// Exports memory of a kind and keeps it until it is told to free it.
pub fn export(wire: &Wire, kind: &str) {
    let (_, gpus) = need(1).unwrap();
    let gpu = far(&gpus);
    let region = make(gpu, kind, LEN);
    region.whole().write(&payload(LEN, 11)).unwrap();
    let form = KINDS.iter().find(|(name, _)| *name == kind).unwrap().1;
    wire.say_handle(&gpu.export(&region, form).unwrap());
    wire.expect("look");
    assert!(region.whole().to_vec().unwrap() == payload(LEN, 12));
    wire.say(b"as expected");
    let _ = wire.hear_or_end();
}

/// Legacy IPC rules 1, 4 and 7; VMM rules 1, 3 and 4.
#[test]
fn memory_of_every_flavour_is_read_and_written_by_another_process() {
    let Some((_, gpus)) = need(1) else { return };
    let other = Other::start("import", &[]);
    for (kind, form) in KINDS {
        for offset in [0, 4097] {
            let region = make(&gpus[0], kind, LEN + 4097);
            region.slice(offset, LEN).unwrap().write(&payload(LEN, 7)).unwrap();
            let whole = gpus[0].export(&region, form).unwrap();
            assert!(whole.len >= region.len() && whole.offset == 0);
            // A handle is of the whole allocation, wherever the exported part begins.
            other.wire.say(&7_u64.to_le_bytes());
            other.wire.say_handle(&Handle { offset, ..whole });
            other.wire.expect("closed");
            assert!(
                region.slice(offset, LEN).unwrap().to_vec().unwrap() == payload(LEN, 8),
                "{kind}"
            );
        }
    }
    other.expect_success();
}

/// Legacy IPC rule 9: devices are named by UUID; masks differ between ranks.
#[test]
fn masks_that_show_each_process_another_device_do_not_matter() {
    let Some((_, gpus)) = need(2) else { return };
    for (mine, mask) in [(0, "1"), (1, "0"), (0, "1,0"), (0, "0")] {
        let other = Other::start("import", &[("CUDA_VISIBLE_DEVICES", mask)]);
        for (kind, form) in KINDS {
            let region = make(&gpus[mine], kind, LEN);
            region.whole().write(&payload(LEN, 21)).unwrap();
            println!("device {mine} {kind}, opened under CUDA_VISIBLE_DEVICES={mask}");
            other.wire.say(&21_u64.to_le_bytes());
            other.wire.say_handle(&gpus[mine].export(&region, form).unwrap());
            // Legacy IPC works under masks (gpu.md, legacy IPC rule 9); the results of the
            // other forms are printed.
            let answer = String::from_utf8(other.wire.hear()).unwrap();
            if answer == "closed" {
                assert!(region.whole().to_vec().unwrap() == payload(LEN, 22), "{kind}");
            } else {
                println!("{kind}, opened under CUDA_VISIBLE_DEVICES={mask}: {answer}");
                assert_ne!(form, HandleForm::Bytes, "{answer}");
            }
        }
        other.expect_success();
    }
}

/// Legacy IPC rule 3.
#[test]
fn the_exporting_process_cannot_open_its_own_legacy_handle_and_is_told_what_to_do() {
    let Some((_, gpus)) = need(1) else { return };
    let region = make(&gpus[0], "plain", 100);
    let why = gpus[0].open(&gpus[0].export(&region, HandleForm::Bytes).unwrap()).unwrap_err();
    println!("{why}");
    assert!(why.hint.contains("the pointer itself"), "{why}");
    // The other forms have no such rule.
    for (kind, form) in &KINDS[1..] {
        let region = make(&gpus[0], kind, LEN);
        region.whole().write(&payload(LEN, 5)).unwrap();
        match gpus[0].open(&gpus[0].export(&region, *form).unwrap()) {
            Ok(same) => assert!(same.slice(0, LEN).unwrap().to_vec().unwrap() == payload(LEN, 5)),
            Err(why) => println!("{kind} in its own process: {why}"),
        }
    }
}

/// Legacy IPC rule 8: the driver is asked about exportability; an export is not tried instead.
#[test]
fn memory_is_exported_in_its_own_form_and_refused_in_others_with_a_reason() {
    let Some((_, gpus)) = need(1) else { return };
    for kind in ["plain", "shareable", "pooled", "pinned", "managed", "host"] {
        let region = make(&gpus[0], kind, 100);
        for form in HandleForm::ALL {
            match gpus[0].export(&region, form) {
                Ok(handle) => {
                    println!("{kind} as {form:?}: {} bytes", handle.len);
                    let own = KINDS.contains(&(kind, form));
                    assert!(own || form == HandleForm::Fabric, "{kind} as {form:?}");
                }
                Err(why) => {
                    println!("{kind} as {form:?}: {why}");
                    assert!(!why.hint.is_empty(), "{kind} as {form:?}");
                    assert!(!KINDS.contains(&(kind, form)), "{kind} as {form:?}: {why}");
                }
            }
        }
    }
}

#[test]
fn a_device_exports_its_own_memory_only() {
    let Some((_, gpus)) = need(2) else { return };
    let region = make(&gpus[1], "plain", 100);
    let why = gpus[0].export(&region, HandleForm::Bytes).unwrap_err();
    assert!(why.hint.contains("owns"), "{why}");
}

/// Handles from another process are checked.
#[test]
fn handles_that_lie_or_are_none_are_errors() {
    let Some((_, gpus)) = need(1) else { return };
    let gpu = &gpus[0];
    let handle = |len, key| Handle { gpu: GpuUuid([1; 16]), id: AllocId(1), len, offset: 0, key };
    let null = || std::fs::File::open("/dev/null").unwrap().into();
    for key in [
        HandleKey::Bytes([0; 64]),
        HandleKey::Bytes([0x5a; 64]),
        HandleKey::Fd(null()),
        HandleKey::Pool(null(), [0; 64]),
        HandleKey::Pool(null(), [0x5a; 64]),
        HandleKey::Fabric([0x5a; 64]),
    ] {
        let nonsense = handle(2 * MIB, key);
        let form = nonsense.form();
        println!("{form:?} that is none: {}", gpu.open(&nonsense).map(drop).unwrap_err());
    }
    let region = make(gpu, "shareable", 4 * MIB);
    for lie in [1, 2 * MIB + 1, 1 << 40] {
        let honest = gpu.export(&region, HandleForm::Fd).unwrap();
        println!(
            "a descriptor of {lie} bytes: {}",
            gpu.open(&Handle { len: lie, ..honest }).map(drop).unwrap_err()
        );
    }
    let region = make(gpu, "pooled", 4 * MIB);
    let honest = gpu.export(&region, HandleForm::Pool).unwrap();
    let lie = gpu.open(&Handle { len: 1 << 40, ..honest }).map(drop);
    println!("a pool's pointer of 1 TiB: {}", lie.unwrap_err());
    let other = Other::start("export: plain", &[]);
    let honest = other.wire.hear_handle();
    let why = gpu.open(&Handle { len: honest.len + 1, ..honest }).map(drop).unwrap_err();
    assert_eq!(why.name, "INVALID_HANDLE", "{why}");
}

/// gpu.md, "Measured": a survivor goes on, and its mappings stay until it closes them. Pool memory
/// goes with its owner instead, and an access to it costs the survivor its context (226). So a
/// rank must not go on with it (life and death rule 1).
#[test]
fn an_importer_survives_the_death_of_the_exporter() {
    let Some(_) = need(1) else { return };
    KINDS.iter().for_each(|(kind, _)| Other::alone(&format!("survivor: {kind}")));
}

/// Kills an exporter and goes on, in the process that the test above starts: alone in case its
/// context is lost.
pub fn survive(kind: &str) {
    let (_, gpus) = need(1).unwrap();
    let mut other = Other::start(&format!("export: {kind}"), &[]);
    let handle = other.wire.hear_handle();
    let theirs = gpus[0].open(&handle).unwrap();
    let part = theirs.slice(handle.offset, LEN).unwrap();
    assert!(part.to_vec().unwrap() == payload(LEN, 11));
    part.write(&payload(LEN, 12)).unwrap();
    other.wire.say(b"look");
    other.wire.expect("as expected");
    let own = make(&gpus[0], "plain", theirs.len());
    let copies: Vec<_> = (0..50)
        .map(|_| start(&*gpus[0], (&own, 0), (&theirs, handle.offset), LEN).unwrap())
        .collect();
    other.kill();
    let failed = copies.iter().filter(|copy| copy.wait().is_err()).count();
    println!("{kind}, killed in mid-copy: {failed} of 50 failed");
    println!("{kind}, after its death: {:?}", part.to_vec().map(|bytes| bytes == payload(LEN, 12)));
    drop((part, theirs));
    println!("{kind}, opened after its death: {:?}", gpus[0].open(&handle).map(drop));
    if kind == "pooled" {
        let next = gpus[0].allocate(LEN, carrack_transports::gpu::Flavour::Plain);
        println!("pooled, the survivor's next allocation: {:?}", next.map(drop));
        return;
    }
    let (src, dst) = (make(&gpus[0], "plain", LEN + 100), make(&gpus[0], "shareable", LEN + 100));
    copy_and_check(&*gpus[0], (&dst, 3), (&src, 5), LEN, 90);
}

/// Holds up a stream of this process by an event of another.
pub fn wait_for_events(wire: &Wire) {
    let (_, gpus) = need(1).unwrap();
    let gpu = far(&gpus);
    let handle: [u8; 64] = wire.hear().try_into().unwrap();
    let owner = GpuUuid(wire.hear().try_into().unwrap());
    let event = gpu.open_event(&handle).unwrap_or_else(|why| {
        println!("an event of {owner} on device {}: {why}", gpu.info().ordinal);
        let own = gpus.iter().find(|gpu| gpu.info().uuid == owner).unwrap();
        own.open_event(&handle).unwrap()
    });
    let stream = gpu.stream().unwrap();
    wire.say(b"opened");
    wire.expect("recorded");
    stream.wait(&event.event()).unwrap();
    let end = stream.record().unwrap();
    wire.say(if end.query().unwrap() { b"fired" } else { b"waits" });
    end.wait().unwrap();
    assert_eq!(event.event().query(), Ok(true));
    wire.say(b"fired");
}

#[test]
fn a_stream_waits_for_an_event_of_another_process() {
    let Some(_) = need(1) else { return };
    Other::alone("event of another");
}

/// Records an event that another process waits for, in the process that the test above starts.
pub fn event_of_another() {
    let (_, gpus) = need(1).unwrap();
    let other = Other::start("wait", &[]);
    let event = gpus[0].shared_event().unwrap();
    assert_eq!(event.event().query(), Ok(true), "as long as there is no record");
    other.wire.say(&event.handle().unwrap());
    other.wire.say(&gpus[0].info().uuid.0);
    other.wire.expect("opened");
    let gate = make(&gpus[0], "pinned", 8);
    gate.whole().write(&[0; 8]).unwrap();
    let stream = gpus[0].stream().unwrap();
    // SAFETY: an aligned word of pinned memory that outlives the wait.
    unsafe { stream.wait_value64(gate.addr() as *const u64, 1) }.unwrap();
    event.record(&*stream).unwrap();
    assert_eq!(event.event().query(), Ok(false));
    other.wire.say(b"recorded");
    other.wire.expect("waits");
    std::thread::sleep(Duration::from_millis(10));
    gate.fetch_add(0, 1).unwrap();
    other.wire.expect("fired");
    event.event().wait().unwrap();
    println!("nonsense as an event: {:?}", gpus[0].open_event(&[0x5a; 64]).map(|_| ()));
    other.expect_success();
}

/// Checks that many rounds leave no descriptors behind, and few mappings. In a process of its own,
/// because other tests allocate, too.
pub fn rounds(wire: &Wire) {
    let (_, gpus) = need(1).unwrap();
    let gpu = &gpus[0];
    let other = Other::start("import", &[]);
    let round = |number: u64| {
        let (kind, form) = KINDS[usize::try_from(number).unwrap() % 3];
        let region = gpu.allocate(LEN, flavour(kind).unwrap()).unwrap();
        region.whole().write(&payload(LEN, number)).unwrap();
        other.wire.say(&number.to_le_bytes());
        other.wire.say_handle(&gpu.export(&region, form).unwrap());
        other.wire.expect("closed");
        drop((gpu.stream().unwrap(), gpu.shared_event().unwrap()));
        let host = Region::host(3 * 4096);
        // SAFETY: the region outlives the registration.
        drop(
            unsafe { gpu.register_host(host.addr().next_multiple_of(4096) as *mut u8, 4096) }
                .unwrap(),
        );
    };
    let possessions = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let (mut free, mut total) = (0, 0);
        user::set_current(user::primary(0));
        // SAFETY: the places for the answers are local.
        unsafe { user::ok(cudarc::driver::sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)) };
        user::set_current(0);
        (descriptors, mappings, free)
    };
    (0..30).for_each(round);
    let before = possessions();
    (30..330).for_each(round);
    let after = possessions();
    println!("(descriptors, mappings, free bytes) before {before:?}, after 300 rounds {after:?}");
    assert_eq!(before.0, after.0, "descriptors");
    assert!(after.1 <= before.1 + 20, "mappings");
    other.expect_success();
    wire.say(b"flat");
}

#[test]
fn after_many_rounds_descriptors_and_mappings_are_what_they_were() {
    let Some(_) = need(1) else { return };
    let other = Other::start("rounds", &[]);
    other.wire.expect("flat");
    other.expect_success();
}
