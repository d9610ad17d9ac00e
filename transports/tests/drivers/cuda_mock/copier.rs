//! Small copies by a resident kernel, on a mocked driver: the calls to the driver, and the results
//! of its refusals.

use super::unknown_to_the_driver;
use crate::mock::{library, open, word};
use carrack_transports::gpu::cuda::CudaDriver;
use carrack_transports::gpu::{CopierState, Driver, Flavour, Gpu};
use carrack_transports::mem::{CopyError, Region, Together, Transfer};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

struct CopierFixture {
    library: PathBuf,
    driver: CudaDriver,
    gpu: Arc<dyn Gpu>,
    dst: Region,
    src: Region,
}

impl CopierFixture {
    fn new(name: &str, order: Option<&str>) -> Self {
        Self::of(name, "-DCOPIER", order)
    }

    fn of(name: &str, define: &str, order: Option<&str>) -> Self {
        let library = library(name, define);
        let driver = open(&library);
        driver.use_copiers();
        let gpu = driver.devices().unwrap().remove(0);
        // Now that the library stays open.
        if let Some(order) = order {
            word(&library, order);
        }
        let [dst, src] = [0, 1].map(|_| gpu.allocate(100_000, Flavour::Plain).unwrap());
        Self { library, driver, gpu, dst, src }
    }

    fn count(&self, what: &str) -> i32 {
        word(&self.library, what)
    }

    fn begin(&self, at: usize, len: usize) -> Transfer {
        Transfer::between(self.dst.slice(at, len).unwrap(), self.src.slice(at, len).unwrap())
            .unwrap()
    }

    fn copy(&self, at: usize, len: usize) -> Result<(), CopyError> {
        ended(self.begin(at, len))
    }

    fn copies(&self) -> u64 {
        match self.gpu.copier() {
            CopierState::On { copies, .. } => copies,
            other => panic!("{other:?}"),
        }
    }

    fn until_by_copier(&self) {
        self.copy(0, 8).unwrap();
        let before = self.copies();
        while self.copies() == before {
            self.copy(0, 8).unwrap();
        }
    }

    /// Gives a stream a copy small enough for a copier.
    fn copy_on_stream(&self) {
        let stream = self.gpu.stream().unwrap();
        let part = |region: &Region| region.slice(0, 8).unwrap().into();
        ended(Transfer::start_on(&*stream, part(&self.dst), part(&self.src)).unwrap()).unwrap();
    }

    /// Makes another driver over the library, without a copier.
    fn without_copier(&self) -> (Arc<dyn Gpu>, Region, Region) {
        let gpu = open(&self.library).devices().unwrap().remove(0);
        let [dst, src] = [0, 1].map(|_| gpu.allocate(100, Flavour::Plain).unwrap());
        (gpu, dst, src)
    }

    fn refused(&self) -> String {
        match self.gpu.copier() {
            CopierState::Refused(why) => why,
            other => panic!("{other:?}"),
        }
    }
}

fn ended(mut transfer: Transfer) -> Result<(), CopyError> {
    loop {
        match transfer.poll() {
            Some(outcome) => return outcome,
            None => std::thread::yield_now(),
        }
    }
}

#[test]
fn small_copies_ask_nothing_of_the_driver_and_come_whole() {
    let fixture = CopierFixture::new("copier", None);
    assert_eq!(fixture.gpu.copier(), CopierState::Wanted);
    let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
    fixture.src.whole().write(&bytes).unwrap();
    fixture.until_by_copier();
    let asked =
        || ["mock_copies", "mock_records", "mock_questions"].map(|what| fixture.count(what));
    let before = (asked(), fixture.copies());
    let places = (0..500).map(|turn| (10_000 + 160 * turn, 1 + turn % 160));
    for (at, len) in places.clone() {
        fixture.copy(at, len).unwrap();
    }
    assert_eq!((asked(), fixture.copies()), (before.0, before.1 + 500));
    let got = fixture.dst.whole().to_vec().unwrap();
    assert!(places.clone().all(|(at, len)| got[at..][..len] == bytes[at..][..len]));
}

/// The mocked kernel checks that each list lies where the page's layout has it.
#[test]
fn a_batch_of_small_pieces_is_one_command_and_asks_nothing_of_the_driver() {
    let fixture = CopierFixture::new("copier-batch", None);
    let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at % 249) as u8).collect();
    fixture.src.whole().write(&bytes).unwrap();
    fixture.until_by_copier();
    let (before, copies) = (fixture.count("mock_copies"), fixture.copies());
    for turn in 0..50 {
        let mut together = Together::between(&fixture.dst, &fixture.src, 500).unwrap();
        for piece in 0..500 {
            let (to, from) = (32 * piece + 1024 * turn, 32 * (499 - piece) + 64 * turn);
            assert!(together.push((&fixture.dst, to), (&fixture.src, from), 20));
        }
        ended(together.start().unwrap()).unwrap();
        let got = fixture.dst.whole().to_vec().unwrap();
        for piece in 0..500 {
            let (to, from) = (32 * piece + 1024 * turn, 32 * (499 - piece) + 64 * turn);
            assert!(got[to..to + 20] == bytes[from..from + 20], "turn {turn}, piece {piece}");
        }
    }
    assert_eq!((fixture.copies(), fixture.count("mock_lists")), (copies + 50, 50));
    // Only the copies that read the result back.
    assert_eq!(fixture.count("mock_copies"), before + 50);
}

/// The summary of all pieces tells neither their addresses nor that they fit: each piece is
/// checked.
#[test]
fn a_batch_over_several_allocations_and_of_unequal_pieces_is_one_command_as_well() {
    let fixture = CopierFixture::new("copier-mixed", None);
    let [dst, src] = [0, 1].map(|_| fixture.gpu.allocate(50_000, Flavour::Plain).unwrap());
    let bytes: Vec<u8> = (0..50_000_u32).map(|at| (at % 247) as u8).collect();
    src.whole().write(&bytes).unwrap();
    fixture
        .src
        .slice(0, 50_000)
        .unwrap()
        .write(&bytes.iter().map(|byte| !byte).collect::<Vec<_>>())
        .unwrap();
    fixture.until_by_copier();
    // In units of 16, 4 and 1 bytes, each as long as may be.
    let good = [(1024, 4096, 1024), (4100, 8, 256), (8001, 7003, 64)];
    let begin = |places: &[(usize, usize, usize)]| {
        let mut together = Together::between(&dst, &src, 0).unwrap();
        for (dst, src) in [(&dst, &src), (&fixture.dst, &fixture.src)] {
            let all = (0..dst.len(), 0..src.len());
            let mut between = together.between_parts((dst, all.0), (src, all.1)).unwrap();
            assert!(between.extend(places, |&place| place));
        }
        ended(together.start().unwrap()).unwrap();
        let got = [dst.whole().to_vec().unwrap(), fixture.dst.whole().to_vec().unwrap()];
        for &(to, from, len) in places {
            assert!(
                got[0][to..to + len] == bytes[from..from + len],
                "{len} bytes from {from} to {to}"
            );
            let other = bytes[from..from + len].iter().map(|byte| !byte);
            assert!(
                got[1][to..to + len].iter().copied().eq(other),
                "{len} bytes, the other allocation"
            );
        }
    };
    let before = fixture.count("mock_lists");
    begin(&good);
    assert_eq!(fixture.count("mock_lists"), before + 1);
    // An engine reads the result back, and the kernel may have left meanwhile.
    for longer in [(1024, 4096, 1040), (4100, 8, 260), (8001, 7003, 65)] {
        fixture.until_by_copier();
        let before = fixture.count("mock_lists");
        begin(&[good[0], longer, good[2]]);
        assert_eq!(
            fixture.count("mock_lists"),
            before,
            "{longer:?} is an engine's, and all with it"
        );
    }
}

/// More allocations than the copier remembers.
#[test]
fn a_batch_of_twenty_allocations_in_turns_is_one_command_as_well() {
    let fixture = CopierFixture::new("copier-turns", None);
    let sides = |_| [0, 1].map(|_| fixture.gpu.allocate(1000, Flavour::Plain).unwrap());
    let pairs: Vec<_> = (0..20).map(sides).collect();
    let bytes = |pair: usize| (0..1000).map(|at| (at * 7 + pair * 13) as u8).collect::<Vec<_>>();
    for (at, [dst, src]) in pairs.iter().enumerate() {
        dst.whole().write(&[0; 1000]).unwrap();
        src.whole().write(&bytes(at)).unwrap();
    }
    fixture.until_by_copier();
    let before = fixture.count("mock_lists");
    let mut together = Together::between(&pairs[0][0], &pairs[0][1], 400).unwrap();
    for at in 0..400 {
        let ([dst, src], row) = (&pairs[at * 7 % 20], at / 20);
        assert!(together.push((dst, 40 * row), (src, 40 * row), 24));
    }
    ended(together.start().unwrap()).unwrap();
    assert_eq!(fixture.count("mock_lists"), before + 1);
    for (at, [dst, _]) in pairs.iter().enumerate() {
        let is_copied = |place: usize| place < 800 && place % 40 < 24;
        let sent = bytes(at).into_iter().enumerate();
        let wanted: Vec<_> =
            sent.map(|(place, byte)| if is_copied(place) { byte } else { 0 }).collect();
        assert!(dst.whole().to_vec().unwrap() == wanted, "allocation {at}");
    }
}

/// Such a copy would cost the process its context.
#[test]
fn one_piece_where_the_kernel_does_not_reach_keeps_the_batch_from_it() {
    let fixture = CopierFixture::new("copier-beyond", None);
    let beyond = unknown_to_the_driver(&fixture.gpu, 4096);
    let known = (&fixture.dst, &fixture.src);
    let lists_of = |pairs: [(&Region, &Region); 2]| {
        fixture.until_by_copier();
        let before = fixture.count("mock_lists");
        let mut together = Together::between(known.0, known.1, 2).unwrap();
        for (at, (dst, src)) in pairs.into_iter().enumerate() {
            assert!(together.push((dst, 64 * at), (src, 64 * at), 64));
        }
        // An engine may refuse it.
        drop(together.start().map(ended));
        fixture.count("mock_lists") - before
    };
    assert_eq!(lists_of([known, known]), 1);
    for unknown in [(&beyond, known.1), (known.0, &beyond)] {
        assert_eq!((lists_of([known, unknown]), lists_of([unknown, known])), (0, 0));
    }
    assert_eq!(lists_of([known, known]), 1);
}

#[test]
fn a_kernel_that_has_gone_is_launched_anew_and_no_copy_waits_for_it() {
    let fixture = CopierFixture::new("copier-lease", None);
    for turn in 1..50 {
        fixture.until_by_copier();
        assert_eq!(fixture.count("mock_launches"), turn);
        fixture.count("mock_times_out");
        // It leaves while copies come: either it or an engine does each.
        while fixture.count("mock_launches") == turn {
            fixture.copy(0, 8).unwrap();
        }
    }
}

#[test]
fn an_engines_copy_in_flight_keeps_small_ones_from_the_kernel() {
    let fixture = CopierFixture::new("copier-order", None);
    fixture.until_by_copier();
    let before = fixture.copies();
    fixture.count("mock_hold");
    let big = fixture.begin(0, 50_000);
    let small = fixture.begin(8, 8);
    assert_eq!(fixture.copies(), before, "it is the engine's, behind the big one");
    fixture.count("mock_release");
    ended(small).unwrap();
    ended(big).unwrap();
    fixture.until_by_copier();
}

#[test]
fn freeing_memory_has_the_kernel_leave_first() {
    let fixture = CopierFixture::new("copier-free", None);
    fixture.until_by_copier();
    drop(fixture.gpu.allocate(100, Flavour::Plain).unwrap());
    // It was asked to leave, so another one is needed.
    fixture.until_by_copier();
    assert_eq!(fixture.count("mock_launches"), 2);
}

#[test]
fn without_a_compiler_the_drivers_reason_is_told_and_engines_copy() {
    let fixture = CopierFixture::new("copier-no-jit", Some("mock_no_jit"));
    fixture.copy(0, 8).unwrap();
    let why = fixture.refused();
    assert!(why.contains("cuModuleLoadData") && why.contains("UNSUPPORTED_PTX_VERSION"), "{why}");
    assert_eq!((fixture.count("mock_launches"), fixture.count("mock_unregistered")), (0, 1));
    fixture.copy(0, 8).unwrap();
}

#[test]
fn on_a_gpu_in_an_exclusive_mode_there_is_none_and_what_to_do_is_said() {
    let fixture = CopierFixture::new("copier-exclusive", Some("mock_exclusive"));
    assert!(fixture.refused().contains("nvidia-smi -c DEFAULT"), "known before it is used");
    fixture.copy(0, 8).unwrap();
    assert!(fixture.refused().contains("nvidia-smi -c DEFAULT"));
    assert_eq!(fixture.count("mock_launches"), 0);
}

#[test]
fn a_launch_that_is_refused_later_ends_the_copier_and_fails_no_copy() {
    let fixture = CopierFixture::new("copier-no-launch", Some("mock_no_launch"));
    fixture.until_by_copier();
    fixture.count("mock_times_out");
    while matches!(fixture.gpu.copier(), CopierState::On { .. }) {
        fixture.copy(0, 8).unwrap();
    }
    assert!(fixture.refused().contains("cuLaunchKernel"), "{}", fixture.refused());
    fixture.copy(0, 8).unwrap();
}

#[test]
fn a_kernel_that_dies_fails_what_it_was_given() {
    let fixture = CopierFixture::new("copier-dies", None);
    fixture.until_by_copier();
    fixture.count("mock_dies");
    let lost = loop {
        if let Err(why) = fixture.copy(0, 8) {
            break why;
        }
    };
    assert!(lost.to_string().contains("719"), "{lost}");
    assert!(fixture.refused().contains("without having answered"));
    fixture.copy(0, 8).expect("the engine is still there");
}

/// Two libraries with one GPU, as two processes would have it. Each is told that the other is this
/// process.
struct Both {
    first: CopierFixture,
    second: CopierFixture,
}

impl Both {
    /// Opens both on a GPU of this number, which no other test has. The first has a copier.
    fn on(gpu: u32) -> Self {
        let define = format!("-DCOPIER=-{gpu}");
        let [first, second] = ["first", "second"]
            .map(|name| CopierFixture::of(&format!("copier-{name}-{gpu}"), &define, None));
        first.until_by_copier();
        Self { first, second }
    }

    /// Checks that neither has a copier, and that each reports the other's request; no driver call
    /// is named.
    fn have_none(&self) {
        let own = format!("process {} wants a copier on this GPU, too", std::process::id());
        assert!(self.second.refused().starts_with(&own), "{}", self.second.refused());
        self.first.count("mock_times_out");
        while matches!(self.first.gpu.copier(), CopierState::On { .. }) {
            self.first.copy(0, 8).unwrap();
        }
        assert!(self.first.refused().starts_with(&own), "{}", self.first.refused());
        for fixture in [&self.first, &self.second] {
            fixture.copy(0, 8).unwrap();
        }
        assert_eq!(self.second.count("mock_launches"), 0);
    }
}

#[test]
fn two_that_want_a_copier_on_one_gpu_have_none() {
    let both = Both::on(1);
    both.second.copy(0, 8).unwrap();
    both.have_none();
}

/// Its copies are not the copier's, but they wait for the other's kernel all the same.
#[test]
fn who_makes_large_copies_alone_shares_the_gpu_as_well() {
    let both = Both::on(2);
    both.second.copy(0, 50_000).unwrap();
    both.have_none();
}

#[test]
fn who_gives_copies_to_a_stream_alone_shares_the_gpu_as_well() {
    let both = Both::on(3);
    both.second.copy_on_stream();
    both.have_none();
}

#[test]
fn who_has_a_stream_wait_alone_shares_the_gpu_as_well() {
    let both = Both::on(4);
    let (stream, word) = (both.second.gpu.stream().unwrap(), 0);
    // SAFETY: an aligned word that stays until the stream is past the wait.
    unsafe { stream.wait_value64(&raw const word, 0) }.unwrap().wait().unwrap();
    both.have_none();
}

/// Such as a report that allocates on every visible GPU, or a process that maps a peer's memory.
#[test]
fn who_only_has_memory_and_streams_on_a_gpu_leaves_it_to_who_has_a_copier() {
    let both = Both::on(5);
    let more = both.second.gpu.allocate(1, Flavour::Plain).unwrap();
    drop((more, both.second.gpu.stream().unwrap()));
    both.second.driver.classify(both.second.dst.addr()).unwrap().unwrap();
    for _ in 0..3 {
        both.first.count("mock_times_out");
        both.first.until_by_copier();
    }
    assert_eq!(both.second.gpu.copier(), CopierState::Wanted);
}

#[test]
fn who_was_heard_of_before_the_first_small_copy_is_found_by_that() {
    let define = "-DCOPIER=-6";
    let [first, second] =
        ["copier-claims", "copier-knocks"].map(|name| CopierFixture::of(name, define, None));
    first.copy_on_stream();
    second.copy_on_stream();
    assert_eq!(first.gpu.copier(), CopierState::Wanted);
    first.copy(0, 8).unwrap();
    for fixture in [&first, &second] {
        assert!(fixture.refused().starts_with("process "), "{}", fixture.refused());
        assert_eq!(fixture.count("mock_launches"), 0);
    }
}

#[test]
fn without_having_been_asked_for_a_copier_a_stream_shares_nothing() {
    let both = Both::on(7);
    let (gpu, dst, src) = both.second.without_copier();
    let stream = gpu.stream().unwrap();
    ended(Transfer::start_on(&*stream, dst.whole().into(), src.whole().into()).unwrap()).unwrap();
    assert_eq!(gpu.copier(), CopierState::Off);
    both.first.count("mock_times_out");
    both.first.until_by_copier();
}

/// It would be the second on its GPU, and would end the first one.
#[test]
fn in_a_context_of_the_programs_own_there_is_none_and_the_one_in_the_primary_context_stays() {
    let fixture = CopierFixture::new("copier-contexts", None);
    fixture.until_by_copier();
    fixture.count("mock_other_context");
    let own = fixture.gpu.classify(fixture.dst.addr()).unwrap().unwrap().gpu.unwrap();
    assert!(!Arc::ptr_eq(&own, &fixture.gpu), "a device that works in that context");
    let region = own.allocate(100, Flavour::Plain).unwrap();
    let part = |at| region.slice(at, 8).unwrap();
    ended(Transfer::between(part(0), part(50)).unwrap()).unwrap();
    assert!(matches!(own.copier(), CopierState::Refused(why) if why.contains("primary one only")));
    for _ in 0..3 {
        fixture.count("mock_times_out");
        fixture.until_by_copier();
    }
}

#[test]
fn memory_of_the_programs_that_is_no_longer_reached_is_an_engines_once_that_was_told() {
    let fixture = foreign(CopierFixture::new("copier-revoked", None));
    let (driver, addr) = (fixture.driver, fixture.dst.addr());
    fixture.until_by_copier();
    let by_kernel = |at| {
        let before = fixture.copies();
        // Its lease may be ending just now.
        (0..1000).any(|_| fixture.copy(at, 8).is_ok() && fixture.copies() > before)
    };
    assert!(by_kernel(8));
    driver.forget(addr + 99_999, 1);
    assert!(by_kernel(16), "looked at anew, it is reached");
    // First told, and then done: no copy begins there in between.
    driver.forget(addr, 1);
    fixture.count("mock_revoke");
    assert!(!by_kernel(24));
    fixture.copy(32, 8).unwrap();
}

#[test]
fn what_is_told_of_other_memory_is_not_heard_of_for_this() {
    let fixture = foreign(CopierFixture::new("copier-others", None));
    fixture.until_by_copier();
    let asked = fixture.count("mock_rights_asked");
    assert!(asked > 0);
    fixture.driver.forget(fixture.dst.addr() + (2 << 20), 1);
    fixture.until_by_copier();
    assert_eq!(fixture.count("mock_rights_asked"), asked);
    fixture.driver.forget(fixture.dst.addr() + 99_999, 1);
    fixture.until_by_copier();
    assert!(fixture.count("mock_rights_asked") > asked);
    fixture.copy(0, 8).unwrap();
}

/// Makes the target the program's own memory: another driver of the same library has allocated it.
fn foreign(fixture: CopierFixture) -> CopierFixture {
    let others = open(&fixture.library).devices().unwrap().remove(0);
    let theirs = others.allocate(100_000, Flavour::Plain).unwrap();
    let base = NonNull::new(theirs.addr() as *mut u8).unwrap();
    let (kind, id, gpu) = (theirs.kind(), theirs.id(), Some(Arc::clone(&fixture.gpu)));
    // SAFETY: the region has the allocation.
    let dst = unsafe { Region::from_parts(base, 100_000, kind, id, gpu, Box::new(theirs)) };
    CopierFixture { dst, ..fixture }
}
