//! Memory at addresses that were reserved for it: VMM rules 2 and 5.

use super::support::{copy_and_check, make, need, payload, start};
use super::user;
use carrack_transports::gpu::{
    Access, Driver, Gpu, GpuError, GpuEvent, Grid, HandleForm, Pieces, Rights, Stream,
};
use carrack_transports::mem::{MemKind, Region};
use carrack_transports::trial;
use std::sync::Arc;

fn all_write(gpus: &[Arc<dyn Gpu>]) -> Vec<Access> {
    gpus.iter().map(|gpu| Access::read_write(gpu.info().uuid)).collect()
}

#[test]
fn pieces_of_a_reservation_come_and_go_and_their_neighbours_stay_as_they_are() {
    let Some((driver, gpus)) = need(1) else { return };
    let gpu = &gpus[0];
    let unit = gpu.granularity().unwrap();
    let reservation = gpu.reserve(8 * unit).unwrap();
    let base = reservation.addr();
    let has_memory = |at: usize| matches!(driver.classify(base + at * unit), Ok(Some(_)));
    assert!(!has_memory(0), "no memory yet");
    let at = |at: usize, units: usize| {
        gpu.allocate_at(&reservation, at * unit, units * unit, &all_write(&gpus)).unwrap()
    };
    let mut pieces: Vec<Region> =
        [(0, 1), (1, 2), (3, 1)].map(|(from, units)| at(from, units)).into();
    let bytes: Vec<Vec<u8>> =
        pieces.iter().zip(3..).map(|(piece, seed)| payload(piece.len(), seed)).collect();
    for (piece, bytes) in pieces.iter().zip(&bytes) {
        piece.whole().write(bytes).unwrap();
        let extent = driver.classify(piece.addr() + 5).unwrap().unwrap();
        assert_eq!((extent.base, extent.len, extent.id), (piece.addr(), piece.len(), piece.id()));
        let handle = gpu.export(piece, HandleForm::Fd).unwrap();
        assert_eq!((handle.len, handle.offset), (piece.len(), 0));
    }
    println!(
        "numbers of three pieces of one reservation: {:?}",
        pieces.iter().map(Region::id).collect::<Vec<_>>()
    );
    // An occupied place is refused.
    let why = gpu.allocate_at(&reservation, 2 * unit, unit, &[]).unwrap_err();
    assert!(why.hint.contains("other memory lies there"), "{why}");
    // The piece in the middle is replaced repeatedly.
    let mut last = pieces.remove(1).id();
    for round in 0..100 {
        assert!(!has_memory(1) && has_memory(0));
        let fresh = at(1, 1 + round % 2);
        if round == 0 {
            println!("what came to lie in the place of {last:?}: {:?}", fresh.id());
        }
        last = fresh.id();
        let near = make(gpu, "plain", unit);
        copy_and_check(&**gpu, (&fresh, 3), (&near, 5), unit / 2, round as u64);
        for (piece, bytes) in pieces.iter().zip([&bytes[0], &bytes[2]]) {
            assert!(piece.whole().to_vec().unwrap() == *bytes, "round {round}");
        }
    }
    println!("and after a hundred times: {last:?}");
    // Across the border of two.
    let (first, second) = (at(4, 1), at(5, 1));
    let joined = Region::joined(vec![first, second]).unwrap();
    let near = make(gpu, "plain", 2 * unit);
    copy_and_check(&**gpu, (&joined, 3), (&near, 5), unit + 77, 7);
    copy_and_check(&**gpu, (&near, 3), (&joined, 5), unit + 77, 8);
    // Each piece keeps the addresses reserved.
    drop(joined);
    drop(reservation);
    assert!(pieces[1].whole().to_vec().unwrap() == bytes[2]);
}

#[test]
fn pieces_of_two_devices_are_read_and_written_by_both() {
    let Some((driver, gpus)) = need(2) else { return };
    let unit = gpus[0].granularity().unwrap().max(gpus[1].granularity().unwrap());
    let reservation = gpus[0].reserve(4 * unit).unwrap();
    let all = all_write(&gpus);
    let pieces: Vec<Region> = (0..4)
        .map(|at| gpus[at % 2].allocate_at(&reservation, at * unit, unit, &all).unwrap())
        .collect();
    for (at, piece) in pieces.iter().enumerate() {
        assert_eq!(
            driver.classify(piece.addr()).unwrap().unwrap().kind,
            MemKind::Device(all[at % 2].gpu)
        );
        for gpu in &gpus[..2] {
            let near = make(gpu, "plain", unit);
            copy_and_check(&**gpu, (piece, 3), (&near, 5), unit / 2 + 77, at as u64);
            copy_and_check(&**gpu, (&near, 3), (piece, 5), unit / 2 + 77, at as u64 + 9);
        }
    }
}

/// Not a rule of gpu.md but an observation (driver 580). A copy may cross the border, by either
/// engine, alone, with others or as rows, and on a stream. `GrowableBuffer::region` tries it
/// before use.
#[test]
fn copies_of_every_sort_go_over_memory_of_two_devices() {
    let Some((_, gpus)) = need(2) else { return };
    let unit = gpus[0].granularity().unwrap().max(gpus[1].granularity().unwrap());
    let reservation = gpus[0].reserve(4 * unit).unwrap();
    let all = all_write(&gpus);
    let piece = |at: usize| gpus[at % 2].allocate_at(&reservation, at * unit, unit, &all).unwrap();
    let pieces: Vec<Region> = (0..4).map(piece).collect();
    let whole = Region::joined(pieces.clone()).unwrap();
    let bytes = payload(4 * unit, 5);
    whole.whole().write(&bytes).unwrap();
    for (piece, part) in pieces.iter().zip(bytes.chunks(unit)) {
        assert!(piece.whole().to_vec().unwrap() == part);
    }
    for gpu in &gpus[..2] {
        let near = make(gpu, "plain", 4 * unit);
        start(&**gpu, (&near, 0), (&whole, 0), 4 * unit).unwrap().wait().unwrap();
        assert!(near.whole().to_vec().unwrap() == bytes);
        for (to, from) in [(&near, &whole), (&whole, &near)] {
            for (as_rows, on_stream) in [(false, false), (false, true), (true, false), (true, true)]
            {
                let fresh = payload(4 * unit, 7 + u64::from(as_rows));
                from.whole().write(&fresh).unwrap();
                to.whole().write(&vec![0xee; 4 * unit]).unwrap();
                let stream = on_stream.then(|| gpu.stream().unwrap());
                over_borders(gpu, stream.as_deref(), (to, from), unit, as_rows)
                    .unwrap()
                    .wait()
                    .unwrap();
                let mut wanted = vec![0xee; 4 * unit];
                for at in (1..4).map(|border| border * unit - 500) {
                    wanted[at..at + 1000].copy_from_slice(&fresh[at..at + 1000]);
                }
                assert!(
                    to.whole().to_vec().unwrap() == wanted,
                    "as rows: {as_rows}, on a stream: {on_stream}"
                );
            }
        }
        whole.whole().write(&bytes).unwrap();
    }
}

/// Copies 1000 bytes around each border of four units, by one call: as pieces, or as rows.
fn over_borders(
    gpu: &Arc<dyn Gpu>,
    stream: Option<&dyn Stream>,
    (to, from): (&Region, &Region),
    unit: usize,
    as_rows: bool,
) -> Result<GpuEvent, GpuError> {
    let dst = |at: usize| ((to.addr() + at) as *mut u8, to.kind());
    let src = |at: usize| ((from.addr() + at) as *const u8, from.kind());
    if as_rows {
        let grid =
            Grid { count: [1000, 3, 1], dst_pitch: [unit, 3 * unit], src_pitch: [unit, 3 * unit] };
        let (dst, src) = (dst(unit - 500), src(unit - 500));
        // SAFETY: within regions that the caller keeps until the event has fired.
        return unsafe {
            stream
                .map_or_else(|| gpu.copy_grid(dst, src, &grid), |on| on.copy_grid(dst, src, &grid))
        };
    }
    let mut pieces = Pieces::new(to.kind(), from.kind(), 3);
    for at in (1..4).map(|border| border * unit - 500) {
        pieces.push(dst(at).0, src(at).0, 1000);
    }
    // SAFETY: as above.
    unsafe { stream.map_or_else(|| gpu.copy_pieces(&pieces), |on| on.copy_pieces(&pieces)) }
}

/// Not a test by itself: the role of a process that was started for a trial.
#[test]
fn answers_in_its_own_process() {
    if std::env::var_os("CARRACK_TRIAL").is_some() {
        trial::answer();
    }
}

/// gpu.md, "Measured": a driver that accepts the flags does not always enforce them.
#[test]
fn a_device_that_may_only_read_is_kept_from_writing_and_the_owner_writes_for_it() {
    let Some((_, gpus)) = need(2) else { return };
    let (owner, reader) = (&gpus[0], &gpus[1]);
    let program = std::env::current_exe().unwrap();
    trial::by(program, ["--exact", "reserved::answers_in_its_own_process", "--nocapture"]);
    let [to, from] = [owner, reader].map(|gpu| gpu.info().uuid);
    println!("{from} is kept from writing to memory of {to}: {:?}", reader.keeps_from_writing(to));
    assert_eq!(reader.keeps_from_writing(to), Ok(()));
    let unit = owner.granularity().unwrap();
    let reservation = owner.reserve(unit).unwrap();
    let memory = owner.allocate_at(&reservation, 0, unit, &[Access::read(from)]).unwrap();
    let near = make(reader, "plain", unit);
    memory.whole().write(&payload(unit, 1)).unwrap();
    for (gpu, rights) in [(owner, Rights::ReadWrite), (reader, Rights::Read)] {
        assert_eq!(gpu.rights_at(memory.addr()), Ok(Some(rights)));
        println!("of plain memory: {:?}", gpu.rights_at(near.addr()));
    }
    // As a program copies, in the reader's context.
    user::set_current(user::primary(1));
    assert!(!user::copy_is_refused(near.addr(), memory.addr(), unit));
    assert!(near.whole().to_vec().unwrap() == payload(unit, 1));
    near.whole().write(&payload(unit, 2)).unwrap();
    assert!(user::copy_is_refused(memory.addr(), near.addr(), unit));
    assert!(memory.whole().to_vec().unwrap() == payload(unit, 1), "it was written");
    // As the library copies: in the owner's context, by either engine.
    for (seed, gpu) in [(3, owner), (4, reader)] {
        near.whole().write(&payload(unit, seed)).unwrap();
        start(&**gpu, (&memory, 0), (&near, 0), unit).unwrap().wait().unwrap();
        assert!(memory.whole().to_vec().unwrap() == payload(unit, seed));
    }
}
