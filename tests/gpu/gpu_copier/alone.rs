//! One process and its devices.

use crate::support::copiers::{copies, counts, until_by_copier};
use crate::support::gpus::{TestDriver, are_real, is_for_simulated_only};
use crate::support::{Watchdog, random, rng};
use carrack::buffer::Region;
use carrack::transports::gpu::copier::MOST;
use carrack::transports::gpu::{CopierState, Flavour, Gpu};
use carrack::transports::mem::{CopyError, Strided, Together, Transfer, start_strided};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes on both sides of a copy that stay as they are.
const GUARD: usize = 64;

fn driver() -> TestDriver {
    let driver = TestDriver::new();
    driver.driver.use_copiers();
    driver
}

fn plain(gpu: &Arc<dyn Gpu>, len: usize) -> Region {
    gpu.allocate(len, Flavour::Plain).unwrap()
}

fn begun((dst, to): (&Region, usize), (src, from): (&Region, usize), len: usize) -> Transfer {
    Transfer::between(dst.slice(to, len).unwrap(), src.slice(from, len).unwrap()).unwrap()
}

fn ended(mut transfer: Transfer) -> Result<(), CopyError> {
    loop {
        match transfer.poll() {
            Some(outcome) => return outcome,
            None => std::thread::yield_now(),
        }
    }
}

/// Alignment of both ends, relative to the kernel's unit and to each other.
const PLACES: [(usize, usize); 8] =
    [(0, 0), (16, 32), (15, 15), (1, 0), (0, 3), (4, 8), (24, 0), (9, 13)];

#[test]
fn copies_of_every_length_between_any_places_are_whole_and_touch_nothing_else() {
    let _watchdog = Watchdog::over("every length");
    let driver = driver();
    let (own, other) = (&driver.gpus[0], driver.last());
    let mut rng = rng();
    let around = [511, 512, 513, 2047, 2048, 2049, 4095, 4096, 4097, 8191, MOST];
    let lengths: Vec<_> = (1..=70).chain(around).collect();
    // Within the device, and between two; the target's engine copies.
    for (dst_on, src_on) in [(own, own), (own, other)] {
        let room = MOST + 2 * GUARD;
        let (dst, src) = (plain(dst_on, room), plain(src_on, room));
        for (to, from) in PLACES {
            for &len in &lengths {
                let limit = match (to ^ from) % 16 {
                    0 => MOST,
                    apart if apart % 4 == 0 => 2048,
                    _ => 512,
                };
                let (poison, sent) = (random(&mut rng, room), random(&mut rng, room));
                // Apart by as much as before: the guard is a multiple of 16.
                let to = GUARD + to;
                dst.whole().write(&poison).unwrap();
                src.whole().write(&sent).unwrap();
                let copy = || ended(begun((&dst, to), (&src, from), len)).unwrap();
                if len <= limit {
                    until_by_copier(&driver.gpus, copy)
                } else {
                    copy()
                }
                let got = dst.whole().to_vec().unwrap();
                assert!(got[..to] == poison[..to], "before: {len} B to {to} from {from}");
                assert!(got[to..][..len] == sent[from..][..len], "{len} B to {to} from {from}");
                assert!(
                    got[to + len..] == poison[to + len..],
                    "behind: {len} B to {to} from {from}"
                );
            }
        }
    }
}

/// Pieces of one batch: where they go, where they come from, how long they are.
type Pieces = Vec<(usize, usize, usize)>;

/// Returns `count` pieces with lengths up to `most`. Their ends are multiples of `unit`, in a
/// different order on either side.
fn pieces(count: usize, unit: usize, most: usize) -> Pieces {
    let slot = |at: usize| GUARD + at * 2 * most;
    let piece = |at: usize| {
        (slot(at), slot(at * 7 % count) + unit, unit * (1 + (at + at / 128) % (most / unit)))
    };
    (0..count).map(piece).collect()
}

fn batch(dst: &Region, src: &Region, pieces: &Pieces) -> Transfer {
    let mut together = Together::between(dst, src, pieces.len()).unwrap();
    // Some by themselves, the others at once.
    let (some, others) = pieces.split_at(pieces.len() / 4);
    for &(to, from, len) in some {
        assert!(together.push((dst, to), (src, from), len));
    }
    let mut between = together.between_parts((dst, 0..dst.len()), (src, 0..src.len())).unwrap();
    assert!(between.extend(others, |&place| place));
    together.start().unwrap()
}

#[test]
#[ignore = "full: ten seconds; every count"]
fn batches_of_every_count_and_of_pieces_anywhere_are_whole_and_touch_nothing_else() {
    let _watchdog = Watchdog::over("batches");
    let driver = driver();
    let (own, other) = (&driver.gpus[0], driver.last());
    let mut rng = rng();
    for (dst_on, src_on) in [(own, own), (own, other)] {
        for (unit, most) in [(1, 64), (4, 256), (16, 64), (16, 1024)] {
            let room = 2 * GUARD + 1025 * 2 * most;
            let (dst, src) = (plain(dst_on, room), plain(src_on, room));
            for count in [1, 2, 31, 127, 128, 129, 999, 1023, 1024, 1025] {
                let (mut wanted, sent) = (random(&mut rng, room), random(&mut rng, room));
                dst.whole().write(&wanted).unwrap();
                src.whole().write(&sent).unwrap();
                let pieces = pieces(count, unit, most);
                let copy = || ended(batch(&dst, &src, &pieces)).unwrap();
                if count <= 1024 {
                    until_by_copier(&driver.gpus, copy);
                } else {
                    let before = copies(&driver.gpus);
                    copy();
                    assert_eq!(copies(&driver.gpus), before, "a longer one is an engine's");
                }
                for (to, from, len) in pieces {
                    wanted[to..to + len].copy_from_slice(&sent[from..from + len]);
                }
                let got = dst.whole().to_vec().unwrap();
                let wrong = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
                assert_eq!(wrong, None, "{count} pieces at multiples of {unit}");
            }
        }
    }
}

/// One batch after the other over the same bytes, with small and big copies in between: the last
/// one stays.
#[test]
fn batches_and_copies_over_the_same_bytes_keep_their_order() {
    let _watchdog = Watchdog::over("order of batches");
    let driver = driver();
    let gpu = &driver.gpus[0];
    const ROOM: usize = 1 << 20;
    let mut rng = rng();
    let (dst, sources) = (plain(gpu, ROOM), [0; 6].map(|_| plain(gpu, ROOM)));
    let contents = [0; 6].map(|_| random(&mut rng, ROOM));
    for (source, content) in sources.iter().zip(&contents) {
        source.whole().write(content).unwrap();
    }
    let few: Pieces = (0..300).map(|at| (at * 512, at * 512, 256)).collect();
    let long: Pieces = (0..2).map(|at| (at * 65_536, at * 65_536, 65_536)).collect();
    until_by_copier(&driver.gpus, || ended(batch(&dst, &sources[0], &few)).unwrap());
    let mut ordered = 0;
    for turn in 0.. {
        if turn >= 200 && ordered >= 20 {
            break;
        }
        // Which of them comes when changes from turn to turn.
        let mut wanted = contents[0].clone();
        ended(begun((&dst, 0), (&sources[0], 0), ROOM)).unwrap();
        let before = copies(&driver.gpus);
        let mut transfers = Vec::new();
        for at in 0..5 {
            let source = 1 + (turn + at) % 5;
            let (pieces, content) = match (turn + at) % 5 {
                0 | 2 => (&few, &contents[source]),
                1 | 3 => (&vec![(512, 512, 64)], &contents[source]),
                _ => (&long, &contents[source]),
            };
            transfers.push(match pieces[..] {
                [(to, from, len)] => begun((&dst, to), (&sources[source], from), len),
                _ => batch(&dst, &sources[source], pieces),
            });
            for &(to, from, len) in pieces {
                wanted[to..to + len].copy_from_slice(&content[from..from + len]);
            }
        }
        // Simulated engines have no order among themselves, so no more than one is to have had a
        // part.
        let is_ordered = copies(&driver.gpus) >= before + 4 || are_real();
        ordered += u32::from(is_ordered);
        for transfer in transfers.into_iter().rev() {
            ended(transfer).unwrap();
        }
        assert!(!is_ordered || dst.whole().to_vec().unwrap() == wanted, "turn {turn}");
    }
}

#[test]
fn what_is_longer_or_in_host_memory_is_an_engines() {
    let _watchdog = Watchdog::over("an engine's");
    let driver = driver();
    let gpu = &driver.gpus[0];
    let (dst, src) = (plain(gpu, 3 * MOST), plain(gpu, 3 * MOST));
    until_by_copier(&driver.gpus, || ended(begun((&dst, 0), (&src, 0), 8)).unwrap());
    let before = counts(&**gpu).1;
    for _ in 0..100 {
        for (to, from, len) in [(0, 0, MOST + 1), (4, 0, 2049), (1, 0, 513)] {
            ended(begun((&dst, to), (&src, from), len)).unwrap();
        }
        dst.slice(0, 8).unwrap().write(b"pageable").unwrap();
    }
    assert_eq!(counts(&**gpu).1, before);
}

/// A later copy to the same bytes wins, by kernel or engine.
#[test]
fn a_small_copy_behind_a_big_one_comes_last_and_the_other_way_round() {
    let _watchdog = Watchdog::over("order");
    let driver = driver();
    let gpu = &driver.gpus[0];
    const BIG: usize = 4 << 20;
    let mut rng = rng();
    let (dst, big, small) = (plain(gpu, BIG), plain(gpu, BIG), plain(gpu, 64));
    let bytes = random(&mut rng, BIG);
    big.whole().write(&bytes).unwrap();
    until_by_copier(&driver.gpus, || ended(begun((&dst, 0), (&small, 0), 8)).unwrap());
    let before = counts(&**gpu).1;
    for turn in 0_usize..100 {
        let word = random(&mut rng, 8);
        small.slice(0, 8).unwrap().write(&word).unwrap();
        let at = BIG - 8 - 16 * turn;
        let put = || begun((&dst, at), (&small, 0), 8);
        let cover = || begun((&dst, 0), (&big, 0), BIG);
        let taken = counts(&**gpu).1;
        let (first, second, expected) = match turn % 2 {
            0 => (cover(), put(), &word[..]),
            _ => (put(), cover(), &bytes[at..][..8]),
        };
        let by_copier = counts(&**gpu).1 > taken;
        ended(second).unwrap();
        ended(first).unwrap();
        // A simulated device's engines have no order among themselves.
        if !by_copier && !are_real() {
            continue;
        }
        assert!(dst.slice(at, 8).unwrap().to_vec().unwrap() == *expected, "turn {turn}");
    }
    until_by_copier(&driver.gpus, || ended(begun((&dst, 0), (&small, 0), 8)).unwrap());
    assert!(counts(&**gpu).1 > before);
}

/// Each copy reads the bytes that the one before has written. One look of the kernel finds all of
/// them, and its threads divide the bytes differently.
#[test]
fn copies_that_are_in_flight_at_a_time_are_done_one_after_the_other() {
    let _watchdog = Watchdog::over("chains");
    let driver = driver();
    let gpu = &driver.gpus[0];
    const LEN: usize = 400;
    let [a, b, c] = [0, 1, 2].map(|_| plain(gpu, 1024));
    let mut rng = rng();
    until_by_copier(&driver.gpus, || ended(begun((&b, 0), (&a, 0), 8)).unwrap());
    let mut chains = 0;
    while chains < 300 {
        let mut expected = random(&mut rng, 1024);
        a.whole().write(&expected).unwrap();
        let before = copies(&driver.gpus);
        // By 16 bytes at a time, byte by byte, by 4 bytes, and onto what the first has written.
        let links =
            [((&b, 0), (&a, 0)), ((&c, 1), (&b, 0)), ((&b, 5), (&c, 1)), ((&c, 16), (&b, 0))];
        let in_flight = links.map(|(to, from)| begun(to, from, LEN));
        let all_by_copier = copies(&driver.gpus) == before + links.len() as u64;
        in_flight.into_iter().rev().for_each(|copy| ended(copy).unwrap());
        chains += u32::from(all_by_copier);
        // A simulated device's engines have no order among themselves.
        if all_by_copier || are_real() {
            // b is the first 400 bytes, and then those again from the sixth on.
            expected.copy_within(0..LEN, 5);
            assert!(c.slice(16, LEN).unwrap().to_vec().unwrap() == expected[..LEN]);
        }
    }
}

/// Engines copy pieces and strided data. These follow the kernel's copies, and the kernel gets no
/// copies while they are in flight.
#[test]
fn a_batch_or_a_strided_block_between_small_copies_of_the_same_bytes_keeps_its_place() {
    let _watchdog = Watchdog::over("order of batches");
    let driver = driver();
    let gpu = &driver.gpus[0];
    const PIECES: usize = 64;
    // A piece of 32 bytes in each row of 64.
    let block = Strided { offset: 0, count: [32, PIECES, 1], pitch: [64, 0] };
    let mut rng = rng();
    let (dst, many, small) = (plain(gpu, 64 * PIECES), plain(gpu, 64 * PIECES), plain(gpu, MOST));
    let together = || {
        let mut pieces = Together::between(&dst, &many, PIECES).unwrap();
        // The last first: so they are no rows of a grid.
        (0..PIECES)
            .rev()
            .for_each(|at| assert!(pieces.push((&dst, 64 * at), (&many, 64 * at), 32)));
        pieces.start().unwrap()
    };
    let grid = || start_strided((&dst, &block), (&many, &block), None).unwrap().unwrap();
    let by_copier = |begin: &dyn Fn() -> Transfer| {
        let before = copies(&driver.gpus);
        let begun = begin();
        (begun, copies(&driver.gpus) > before)
    };
    let all = 64 * PIECES;
    let cover = || begun((&dst, 0), (&small, 0), all);
    until_by_copier(&driver.gpus, || ended(cover()).unwrap());
    // How often the kernel came first, and how often last.
    let mut seen = [0_u32; 2];
    for turn in 0_usize.. {
        let (over, under) = (random(&mut rng, all), random(&mut rng, all));
        many.whole().write(&over).unwrap();
        small.slice(0, all).unwrap().write(&under).unwrap();
        // Those writes have ended, so all engines are idle, and the kernel may take the copy.
        let batch: &dyn Fn() -> Transfer = if turn % 4 < 2 { &together } else { &grid };
        let is_last = turn % 2 == 1;
        let (first, second, is_known) = if is_last {
            let first = batch();
            let (second, taken) = by_copier(&cover);
            (first, second, taken)
        } else {
            let (first, taken) = by_copier(&cover);
            (first, batch(), taken)
        };
        ended(second).unwrap();
        ended(first).unwrap();
        // A simulated device's engines have no order among themselves.
        if is_known || are_real() {
            let got = dst.whole().to_vec().unwrap();
            for (at, row) in got.chunks(64).enumerate() {
                let (over, under) = (&over[64 * at..][..64], &under[64 * at..][..64]);
                let expected = if is_last { under } else { over };
                assert!(row[..32] == expected[..32], "turn {turn}, row {at}");
                assert!(row[32..] == under[32..], "turn {turn}, row {at}: between the pieces");
            }
        }
        seen[usize::from(is_last)] += u32::from(is_known);
        // Behind a batch the kernel takes a copy only if the batch has ended at once, so the loop
        // does not wait for that.
        if seen[0] >= 100 {
            break;
        }
    }
}

/// More copies in flight at a time, from several threads, than the page has lines.
#[test]
fn threads_that_copy_at_the_same_time_get_what_they_copied() {
    let _watchdog = Watchdog::over("threads");
    let driver = driver();
    let gpu = &driver.gpus[0];
    std::thread::scope(|scope| {
        for thread in 0..3_u8 {
            scope.spawn(move || {
                let (dst, src) = (plain(gpu, 4096), plain(gpu, 4096));
                for turn in 0..200_u8 {
                    src.whole().write(&[turn ^ (thread << 6); 4096]).unwrap();
                    let copies: Vec<_> =
                        (0..16).map(|at| begun((&dst, at * 256), (&src, at * 256), 256)).collect();
                    copies.into_iter().for_each(|copy| ended(copy).unwrap());
                    let got = dst.whole().to_vec().unwrap();
                    assert!(
                        got.iter().all(|&byte| byte == turn ^ (thread << 6)),
                        "{thread}, {turn}"
                    );
                }
            });
        }
    });
    let region = plain(gpu, 64);
    until_by_copier(&driver.gpus, || ended(begun((&region, 0), (&region, 32), 8)).unwrap());
}

#[test]
fn the_kernel_ends_when_there_is_nothing_to_do_and_is_launched_anew() {
    let _watchdog = Watchdog::over("lease");
    let driver = driver();
    let gpu = &driver.gpus[0];
    let region = plain(gpu, 64);
    let copy = || ended(begun((&region, 0), (&region, 32), 8)).unwrap();
    until_by_copier(&driver.gpus, copy);
    for _ in 0..3 {
        let (launches, _) = counts(&**gpu);
        // Waits for everything on the device, as the program may: for the kernel, too.
        if let Some(fake) = &driver.fake {
            fake.gpu(0).unwrap().synchronize().unwrap();
        }
        while counts(&**gpu).0 == launches {
            std::thread::sleep(std::time::Duration::from_millis(2));
            copy();
        }
        until_by_copier(&driver.gpus, copy);
    }
}

/// A kernel that stayed as long as copies come would block a thread that waits for the device for
/// ever.
#[test]
fn memory_is_freed_and_the_device_waited_for_while_copies_never_cease() {
    let _watchdog = Watchdog::over("freed under traffic");
    let driver = driver();
    let gpu = &driver.gpus[0];
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (dst, src) = (plain(gpu, 8), plain(gpu, 8));
            while !has_ended.load(Ordering::Relaxed) {
                ended(begun((&dst, 0), (&src, 0), 8)).unwrap();
            }
        });
        for _ in 0..50 {
            drop(plain(gpu, 100));
            drop(gpu.allocate(100, Flavour::Pinned).unwrap());
            if let Some(fake) = &driver.fake {
                fake.gpu(0).unwrap().synchronize().unwrap();
            }
        }
        has_ended.store(true, Ordering::Relaxed);
    });
}

#[test]
fn without_having_been_asked_for_there_is_no_copier() {
    if is_for_simulated_only("other tests have asked for it in this process") {
        return;
    }
    let driver = TestDriver::new();
    let gpu = &driver.gpus[0];
    let region = plain(gpu, 64);
    ended(begun((&region, 0), (&region, 32), 8)).unwrap();
    assert_eq!(gpu.copier(), CopierState::Off);
    driver.driver.use_copiers();
    assert_eq!(gpu.copier(), CopierState::Wanted);
    let fake = driver.fake.as_ref().unwrap();
    fake.faults().refuse_copiers(true);
    ended(begun((&region, 0), (&region, 32), 8)).unwrap();
    assert!(matches!(gpu.copier(), CopierState::Refused(why) if why.contains("ordered by a test")));
    assert_eq!(fake.counters().copier_launches, 0);
}

/// Other processes' real claims are for `gpu_copier_ranks` and `explain_copier`.
#[test]
fn where_another_process_wants_a_copier_too_there_is_none_whenever_it_comes() {
    if is_for_simulated_only("it takes another process") {
        return;
    }
    let _watchdog = Watchdog::over("shared");
    let mut rng = rng();
    for launched in [false, true] {
        let driver = driver();
        let (gpu, fake) = (&driver.gpus[0], driver.fake.as_ref().unwrap());
        let (dst, src) = (plain(gpu, 64), plain(gpu, 64));
        let mut copy = || {
            let bytes = random(&mut rng, 64);
            src.whole().write(&bytes).unwrap();
            ended(begun((&dst, 0), (&src, 0), 64)).unwrap();
            assert_eq!(dst.whole().to_vec().unwrap(), bytes);
        };
        if launched {
            until_by_copier(&driver.gpus, &mut copy);
        }
        fake.faults().share_copiers(Some(4711));
        // The running kernel takes copies until its lease ends.
        while !matches!(gpu.copier(), CopierState::Refused(_)) {
            copy();
        }
        let before = fake.counters();
        fake.faults().share_copiers(None);
        (0..20).for_each(|_| copy());
        let after = fake.counters();
        let told = "process 4711 wants a copier on this GPU, too: a GPU that ranks share has none";
        assert!(matches!(gpu.copier(), CopierState::Refused(why) if why.starts_with(told)));
        assert_eq!(
            (after.copier_launches, after.copier_copies),
            (before.copier_launches, before.copier_copies)
        );
        assert_eq!(after.copier_launches > 0, launched);
    }
}

/// The copier's kernel does not begin, as behind a kernel of the program that fills the device.
#[test]
fn a_kernel_that_does_not_begin_holds_no_copy_up() {
    if is_for_simulated_only("kernels cannot be told to wait") {
        return;
    }
    let _watchdog = Watchdog::over("stalled");
    let driver = driver();
    let (gpu, fake) = (&driver.gpus[0], driver.fake.as_ref().unwrap());
    let region = plain(gpu, 64);
    let copy = || ended(begun((&region, 0), (&region, 32), 8)).unwrap();
    fake.faults().stall_copiers(true);
    for _ in 0..100 {
        copy();
    }
    assert_eq!(counts(&**gpu), (1, 0), "launched once, and not waited for");
    fake.faults().stall_copiers(false);
    until_by_copier(&driver.gpus, copy);
}

#[test]
fn a_kernel_that_is_lost_fails_what_it_was_given_and_nothing_else() {
    if is_for_simulated_only("kernels cannot be lost") {
        return;
    }
    let _watchdog = Watchdog::over("lost");
    let driver = driver();
    let (gpu, fake) = (&driver.gpus[0], driver.fake.as_ref().unwrap());
    let (dst, src) = (plain(gpu, 64), plain(gpu, 64));
    dst.whole().write(&[0; 64]).unwrap();
    src.whole().write(&[7; 64]).unwrap();
    until_by_copier(&driver.gpus, || ended(begun((&dst, 0), (&src, 0), 8)).unwrap());
    fake.faults().lose_copiers(true);
    let lost = loop {
        match ended(begun((&dst, 0), (&src, 0), 8)) {
            Ok(()) => {}
            Err(why) => break why,
        }
    };
    let CopyError::Engine { cause, .. } = lost else { panic!("{lost}") };
    assert_eq!((cause.code, cause.name), (719, "LAUNCH_FAILED"));
    assert!(cause.hint.contains("CARRACK_GPU_COPIER"), "{cause}");
    assert!(matches!(gpu.copier(), CopierState::Refused(why) if why.contains("719")));
    for _ in 0..10 {
        ended(begun((&dst, 32), (&src, 0), 32)).expect("the engine is still there");
    }
    assert_eq!(dst.slice(32, 32).unwrap().to_vec().unwrap(), [7; 32]);
}
