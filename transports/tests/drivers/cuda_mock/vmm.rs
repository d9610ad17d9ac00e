//! Memory at addresses reserved for it, by the VMM calls: their order, and the clean-up after a
//! refusal.

use crate::mock::{library as mock, open, word};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_transports::gpu::{Access, Driver, Gpu, GpuError, Handle, HandleKey, Reservation};
use carrack_transports::mem::{AllocId, GpuUuid, MemKind, Region};
use std::path::Path;

const UNIT: usize = 2 << 20;

/// Returns the numbers of live reservations, allocations, and mappings.
fn live(library: &Path) -> [i32; 3] {
    assert_eq!((word(library, "mock_rules_broken"), word(library, "mock_depth")), (0, 0));
    ["mock_reservations", "mock_memories", "mock_mappings"].map(|name| word(library, name))
}

#[test]
fn pieces_of_a_reservation_are_made_mapped_and_given_back_one_by_one_and_the_addresses_last() {
    let library = mock("reserved", "-DVMM");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    assert_eq!(gpu.granularity().unwrap(), UNIT);
    let reservation = gpu.reserve(5 * UNIT - 1).unwrap();
    assert_eq!((reservation.len(), reservation.addr() % UNIT), (5 * UNIT, 0));
    assert_eq!(live(&library), [1, 0, 0]);
    let me = [gpu.info().uuid];
    let all = me.map(Access::read_write);
    let at = |offset, len| gpu.allocate_at(&reservation, offset, len, &all).unwrap();
    let (one, two) = (at(UNIT, UNIT), at(2 * UNIT, 2 * UNIT));
    assert_eq!(
        (one.addr(), two.addr()),
        (reservation.addr() + UNIT, reservation.addr() + 2 * UNIT)
    );
    assert_eq!(
        (one.kind(), two.len(), live(&library)),
        (MemKind::Device(me[0]), 2 * UNIT, [1, 2, 2])
    );
    assert!(one.id() != two.id() && driver.buffer_id(two.addr() + 5).unwrap() == Some(two.id()));
    // A copy goes across the border.
    let bytes: Vec<u8> = (0..=255).cycle().take(UNIT + 1000).collect();
    let whole = Region::joined(vec![one.clone(), two.clone()]).unwrap();
    whole.slice(500, bytes.len()).unwrap().write(&bytes).unwrap();
    assert!(one.slice(500, UNIT - 500).unwrap().to_vec().unwrap() == bytes[..UNIT - 500]);
    assert!(two.slice(0, 1500).unwrap().to_vec().unwrap() == bytes[UNIT - 500..]);
    drop((whole, one));
    assert_eq!(live(&library), [1, 1, 1]);
    let again = at(0, 2 * UNIT);
    assert!(
        two.slice(0, 1500).unwrap().to_vec().unwrap() == bytes[UNIT - 500..],
        "the others stay as they are"
    );
    // Memory that is mapped there keeps the addresses alive.
    drop((reservation, again));
    assert_eq!(live(&library), [1, 1, 1]);
    drop(two);
    assert_eq!(live(&library), [0; 3]);
    // Memory with addresses of its own still works.
    let shareable = gpu.allocate(UNIT + 1, carrack_transports::gpu::Flavour::Shareable).unwrap();
    assert_eq!(live(&library), [1, 1, 1]);
    drop(shareable);
    assert_eq!(live(&library), [0; 3]);
}

/// Makes calls with invalid arguments. Returns the code that is expected of each, and the error.
fn refusals(gpu: &dyn Gpu, reservation: &Reservation, other: &Reservation) -> Vec<(i32, GpuError)> {
    let me = gpu.info().uuid;
    let at = |offset, len| {
        gpu.allocate_at(reservation, offset, len, &[Access::read_write(me)]).unwrap_err()
    };
    let wrong = [
        (0, 0),
        (1, UNIT),
        (0, UNIT + 1),
        (4 * UNIT, UNIT),
        (0, 5 * UNIT),
        (usize::MAX / UNIT * UNIT, UNIT),
    ];
    let mut all: Vec<_> = wrong.into_iter().map(|(offset, len)| (1, at(offset, len))).collect();
    let kept = gpu.allocate_at(reservation, UNIT, UNIT, &[]).unwrap();
    all.push((1, at(0, 2 * UNIT)));
    drop(kept);
    all.push((1, gpu.allocate_at(other, 0, UNIT, &[Access::read_write(me)]).unwrap_err()));
    all.push((
        101,
        gpu.allocate_at(reservation, 0, UNIT, &[Access::read(GpuUuid([9; 16]))]).unwrap_err(),
    ));
    all.push((1, gpu.reserve(0).unwrap_err()));
    all
}

#[test]
fn what_is_no_piece_of_a_reservation_is_refused_and_leaves_nothing_on_simulated_devices_too() {
    let library = mock("refused-pieces", "-DVMM");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let fake = FakeDriver::new(FakeConfig::devices(2)).unwrap();
    let simulated = fake.gpu(1).unwrap();
    let (real, pretended) = (gpu.reserve(4 * UNIT).unwrap(), simulated.reserve(4 * UNIT).unwrap());
    let all = refusals(&*gpu, &real, &pretended).into_iter().chain(refusals(
        &*simulated,
        &pretended,
        &real,
    ));
    for (code, why) in all {
        assert_eq!(why.code, code, "{why}");
        assert!(!why.hint.is_empty(), "{why}");
    }
    assert_eq!(live(&library), [1, 0, 0]);
    let counters = fake.counters();
    assert_eq!((counters.reservations, counters.allocs - counters.frees), (1, 0));
}

#[test]
fn a_driver_without_room_or_that_refuses_access_keeps_nothing_of_the_attempt() {
    let library = mock("no-room", "-DVMM");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let reservation = gpu.reserve(64 * UNIT).unwrap();
    let at = |offset, len| {
        gpu.allocate_at(&reservation, offset, len, &[Access::read_write(gpu.info().uuid)])
    };
    let most = at(0, 30 * UNIT).unwrap();
    let why = at(30 * UNIT, 3 * UNIT).unwrap_err();
    assert!(why.code == 2 && why.hint.contains("do not fit"), "{why}");
    let rest = at(30 * UNIT, 2 * UNIT).unwrap();
    drop(rest);
    word(&library, "mock_refuse_access");
    let why = at(30 * UNIT, UNIT).unwrap_err();
    assert_eq!((why.call, why.code), ("cuMemSetAccess", 800), "{why}");
    assert_eq!(live(&library), [1, 1, 1]);
    word(&library, "mock_allow_access");
    drop(at(30 * UNIT, UNIT).unwrap());
    drop((most, reservation));
    assert_eq!(live(&library), [0; 3]);
}

/// Makes a handle of another process's memory, in whose place a file stands.
fn foreign(gpu: &dyn Gpu, name: &str, bytes: &[u8], len: usize) -> Handle {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    Handle { gpu: gpu.info().uuid, id: AllocId(7), len, offset: 0, key: HandleKey::Fd(file.into()) }
}

#[test]
fn memory_of_other_processes_is_opened_one_behind_the_other_and_copied_across_the_border() {
    let library = mock("opened-at", "-DVMM");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let bytes: Vec<u8> = (0..=250).cycle().take(3 * UNIT).collect();
    let handles = [(0, UNIT), (UNIT, 2 * UNIT)]
        .map(|(at, len)| foreign(&*gpu, &format!("foreign-{at}"), &bytes[at..at + len], len));
    let reservation = gpu.reserve(4 * UNIT).unwrap();
    let parts: Vec<Region> = handles
        .iter()
        .zip([UNIT, 2 * UNIT])
        .map(|(handle, at)| gpu.open_at(&reservation, at, handle).unwrap())
        .collect();
    assert_eq!((parts[0].addr(), live(&library)), (reservation.addr() + UNIT, [1, 2, 2]));
    let whole = Region::joined(parts).unwrap();
    assert!(whole.whole().to_vec().unwrap() == bytes);
    // Invalid places, and a handle that is not such memory.
    let refused = |at, handle: &Handle| gpu.open_at(&reservation, at, handle).unwrap_err().code;
    assert_eq!(
        [
            refused(2 * UNIT, &handles[0]),
            refused(3 * UNIT, &handles[1]),
            refused(4 * UNIT, &handles[0])
        ],
        [1; 3]
    );
    assert_eq!(refused(0, &foreign(&*gpu, "foreign-short", &bytes[..UNIT], UNIT + 1)), 400);
    assert_eq!(refused(0, &foreign(&*gpu, "foreign-none", &[], UNIT)), 1);
    assert_eq!(refused(0, &foreign(&*gpu, "foreign-long", &bytes[..2 * UNIT], UNIT)), 1);
    assert_eq!(
        refused(
            0,
            &Handle {
                key: HandleKey::Bytes([0; 64]),
                ..foreign(&*gpu, "foreign-bytes", &bytes, UNIT)
            }
        ),
        801
    );
    assert_eq!(live(&library), [1, 2, 2]);
    drop((whole, reservation));
    assert_eq!(live(&library), [0; 3]);
}

#[test]
fn a_driver_that_lacks_the_calls_names_the_one_that_it_lacks() {
    let library = mock("no-vmm", "-DMOCK");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    for why in [gpu.granularity().unwrap_err(), gpu.reserve(UNIT).unwrap_err()] {
        assert_eq!(
            (why.call, why.name),
            ("cuMemGetAllocationGranularity", "MISSING_CALL"),
            "{why}"
        );
        assert!(why.hint.contains("a newer driver has it"), "{why}");
    }
}
