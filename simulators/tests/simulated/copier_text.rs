//! The resident copier's own PTX, run by software: a test bed for machines without a GPU. It
//! checks the meaning of the text, lane by lane. It does not model a real device: neither its
//! timing nor its memory order.
//!
//! | module | one idea |
//! |---|---|
//! | `text` | PTX as instructions, of those that the kernel has |
//! | `block` | a block of threads that carries them out |

#![expect(unsafe_code, reason = "GPU memory is handed over by address")]

use carrack_simulators::ptx::{Block, Program, garbage};
use carrack_transports::gpu::copier::{
    Board, Command, CopyPiece, Launcher, NoKernel, PIECES, Resident, SHEETS, WORDS,
};
use carrack_transports::gpu::cuda::{COPIER_KERNEL as KERNEL, COPIER_THREADS as THREADS};
use carrack_transports::gpu::{CopierState, GpuError};
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts a thread for each kernel.
struct ProgramLauncher {
    program: Arc<Program>,
    board: Arc<Board>,
    lease: Duration,
    last: Mutex<Option<JoinHandle<()>>>,
}

impl Launcher for ProgramLauncher {
    type Board = Arc<Board>;

    fn address_of_board(&self) -> u64 {
        std::ptr::from_ref::<Board>(&self.board) as u64
    }

    fn launch(&self, generation: u64) -> Result<(), NoKernel> {
        let (program, board) = (Arc::clone(&self.program), Arc::clone(&self.board));
        let lease = u64::try_from(self.lease.as_nanos()).unwrap();
        let parameters = [self.address_of_board(), generation, lease, 4 * lease];
        let mut last = self.last.lock();
        let before = last.take();
        *last = Some(std::thread::spawn(move || {
            // In order, as on one stream.
            before.into_iter().for_each(|kernel| kernel.join().unwrap());
            let _board = board;
            // SAFETY: the board lives as long as this thread; what a command names, until it is
            // answered.
            unsafe { Block::new(&program, THREADS.into(), &parameters).run() };
        }));
        Ok(())
    }

    fn have_ended(&self) -> Result<bool, GpuError> {
        Ok(self.last.lock().as_ref().is_none_or(JoinHandle::is_finished))
    }

    fn pause(&self) {
        std::thread::yield_now();
    }
}

/// Returns a copier whose kernels leave after that time without work.
fn resident(lease: Duration) -> Arc<Resident<ProgramLauncher>> {
    let board = Arc::new(Board::new());
    let program = Arc::new(Program::of(KERNEL.trim_end_matches('\0')));
    let launch =
        ProgramLauncher { program, board: Arc::clone(&board), lease, last: Mutex::default() };
    let resident = Resident::new(board, launch);
    resident.renew();
    resident
}

/// Gives a command until a kernel takes it, and waits for its end.
fn done(resident: &Arc<Resident<ProgramLauncher>>, places: &[CopyPiece]) {
    loop {
        let given = match *places {
            [(dst, src, len)] => {
                let command =
                    Command { dst: dst as u64, src: src as u64, len: u32::try_from(len).unwrap() };
                resident.give(command)
            }
            _ => resident.give_many(places.iter().copied()),
        };
        if let Some(event) = given {
            return until("a copy is done", || event.query().unwrap());
        }
        if let CopierState::Refused(why) = resident.state() {
            panic!("{why}");
        }
        resident.renew();
        std::thread::yield_now();
    }
}

/// Waits for a condition, with a limit.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(120), "in vain until {what}");
        std::thread::yield_now();
    }
}

/// Returns bytes that differ from those of other seeds.
fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31).wrapping_add(seed * 97) >> 2) as u8).collect()
}

#[repr(align(16))]
struct Aligned<const LEN: usize>([u8; LEN]);

const LEASE: Duration = Duration::from_millis(50);

#[test]
fn the_kernels_text_copies_every_length_between_any_places_and_touches_nothing_else() {
    let resident = resident(LEASE);
    const ROOM: usize = 9 << 10;
    let places = [(0, 0), (16, 32), (15, 15), (1, 0), (0, 3), (4, 8), (9, 13)];
    let lengths = (1..=36).chain([63, 64, 65, 511, 512, 2047, 2048, 4096, 4111, 8191, 8192]);
    for (seed, (len, (to, from))) in
        lengths.flat_map(|len| places.map(|place| (len, place))).enumerate()
    {
        let (mut dst, mut src) = (Box::new(Aligned([0; ROOM])), Box::new(Aligned([0; ROOM])));
        dst.0.copy_from_slice(&bytes(ROOM, seed));
        src.0.copy_from_slice(&bytes(ROOM, seed + 1));
        let mut wanted = dst.0;
        wanted[64 + to..][..len].copy_from_slice(&src.0[64 + from..][..len]);
        let place =
            (dst.0.as_mut_ptr() as usize + 64 + to, src.0.as_ptr() as usize + 64 + from, len);
        done(&resident, &[place]);
        assert!(dst.0 == wanted, "{len} bytes to {to} from {from}");
    }
}

#[test]
fn the_kernels_text_copies_lists_of_any_number_of_pieces_and_nothing_next_to_them() {
    let resident = resident(LEASE);
    for (unit, most) in [(1, 64), (4, 256), (16, 64), (16, 1024)] {
        for count in [2, 3, 127, 128, 129, 400, 1000, PIECES] {
            let room = (count + 1) * 2 * most;
            let (mut dst, src) = (bytes(room, count), bytes(room, count + 1));
            let mut wanted = dst.clone();
            // A vector's memory has its allocator's alignment, so the first multiple of 16 in it
            // is used.
            let (to, from) = (dst.as_mut_ptr() as usize, src.as_ptr() as usize);
            let (to_first, from_first) =
                (to.next_multiple_of(16) - to, from.next_multiple_of(16) - from);
            let mut places = Vec::new();
            for at in 0..count {
                let (there, len) =
                    (to_first + at * 2 * most, unit * (1 + (at * 5 + at / 128) % (most / unit)));
                let here = from_first + at * 7 % count * 2 * most + unit;
                places.push((to + there, from + here, len));
                wanted[there..there + len].copy_from_slice(&src[here..here + len]);
            }
            done(&resident, &places);
            let wrong = dst.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
            assert_eq!(wrong, None, "{count} pieces at multiples of {unit}");
        }
    }
}

/// Each warp pauses while a list is done, which takes the block some rounds. A command on one
/// sheet only is found by no other warp then.
#[test]
fn each_of_those_who_watch_has_a_sheet_and_looks_on_when_it_has_paused() {
    let resident = resident(Duration::from_secs(3600));
    let ProgramLauncher { board, .. } = &resident.launcher;
    let page = &board.page;
    let (mut dst, src) = (vec![0_u64; 8 + SHEETS], (1..).take(8 + SHEETS).collect::<Vec<u64>>());
    let (to, from) = (dst.as_mut_ptr() as usize, src.as_ptr() as usize);
    let place = |at: usize| (to + 8 * at, from + 8 * at, 8);
    until("a kernel begins", || page.begun() == 1);
    for (sheet, number) in (0..2 * SHEETS).map(|turn| turn % SHEETS).zip((1..).step_by(2)) {
        page.write(
            number,
            board.write(resident.launcher.address_of_board(), number, (0..8).map(place)),
        );
        until("a list is done", || page.answered() == number);
        let (dst, src, _) = place(8 + sheet);
        let command = Command { dst: dst as u64, src: src as u64, len: 8 };
        (0..WORDS).for_each(|at| page.write_word((sheet, at), number + 1, command));
        until("what is on one sheet is done", || page.answered() == number + 1);
    }
    page.stop(1);
    until("the kernel ends", || page.gone() == 1);
    assert_eq!(dst, src);
}

/// Each command copies what the one before has written, across the number that is 0 in the words.
#[test]
#[ignore = "full: a quarter of a minute; every order of words"]
fn commands_are_done_once_and_in_order_in_whatever_order_their_words_come_to_the_sheets() {
    const COMMANDS: u64 = 100;
    for seed in 1..12_u64 {
        let mut state = seed;
        let mut random = |below: u64| {
            state = garbage(state);
            state % below
        };
        let (board, program) = (Arc::new(Board::new()), Program::of(KERNEL.trim_end_matches('\0')));
        let (page, address) = (&board.page, std::ptr::from_ref::<Board>(&board) as u64);
        let before = (1 << 32) - 1 - random(COMMANDS / 2);
        page.take_back(before);
        // From each cell to the next; lists have a second piece, which goes elsewhere.
        let mut cells = vec![0_u64; 2 * COMMANDS as usize + 1];
        cells[0] = garbage(seed);
        let at = cells.as_mut_ptr() as usize;
        let mut give = |step: u64| {
            let (number, here) = (before + 1 + step, at + 8 * step as usize);
            let command = if random(5) == 0 {
                let pieces = [(here + 8, here, 8), (here + 8 * (COMMANDS as usize + 1), at, 8)];
                board.write(address, number, pieces.into_iter())
            } else {
                Command { dst: here as u64 + 8, src: here as u64, len: 8 }
            };
            let mut words: Vec<_> =
                (0..SHEETS).flat_map(|sheet| (0..WORDS).map(move |at| (sheet, at))).collect();
            while !words.is_empty() {
                let word = words.swap_remove(random(words.len() as u64) as usize);
                page.write_word(word, number, command);
            }
        };
        // Four are present when it begins, so that one look finds them all.
        (0..4).for_each(&mut give);
        let parameters = [address, 1, 3_600_000_000_000, 3_600_000_000_000];
        let kernel = {
            let board = Arc::clone(&board);
            std::thread::spawn(move || {
                let _board = board;
                // SAFETY: the board lives as long as this thread; the cells, until it has ended.
                unsafe { Block::new(&program, THREADS.into(), &parameters).run() };
            })
        };
        for step in 4..COMMANDS {
            until("a line is free", || page.answered() + 4 >= before + 1 + step);
            give(step);
        }
        // It does the commands that are present when it is asked to leave.
        page.stop(1);
        until("the kernel ends", || page.gone() == 1);
        kernel.join().unwrap();
        assert_eq!(page.answered(), before + COMMANDS, "{seed}");
        let wrong = cells[..=COMMANDS as usize].iter().position(|cell| *cell != garbage(seed));
        assert_eq!(wrong, None, "{seed}");
    }
}

/// Single copies and lists in turn, while kernels leave and are launched again all the time.
#[test]
#[ignore = "full: half a minute; kernels come and go a thousand times"]
fn the_kernels_text_loses_nothing_when_it_leaves_and_begins_anew() {
    let resident = resident(Duration::from_micros(300));
    let mut dst = vec![0_u64; 600];
    for round in 1..400_u64 {
        let src: Vec<u64> = (0..600).map(|at| round << 32 | at).collect();
        let (to, from) = (dst.as_mut_ptr() as usize, src.as_ptr() as usize);
        let place = |at: usize| (to + 8 * at, from + 8 * at, 8);
        match round % 3 {
            0 => done(&resident, &(0..600).map(place).collect::<Vec<_>>()),
            _ => [0, 599].iter().for_each(|at| done(&resident, &[place(*at)])),
        }
        if round % 5 == 0 {
            std::thread::sleep(Duration::from_micros(400));
        }
        if round % 7 == 0 {
            resident.end_early();
        }
        let wanted = [src[0], src[599]];
        assert_eq!([dst[0], dst[599]], wanted, "round {round}");
        assert!(round % 3 != 0 || dst == src, "round {round}");
    }
}
