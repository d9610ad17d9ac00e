//! The resident copier's own PTX, run by software: a test bed for a machine without a GPU. It shows that the text says what it is to
//! say, lane by lane, and nothing of a real device: neither its time nor its memory's order.
//!
//! | module | one idea |
//! |---|---|
//! | `text` | PTX as instructions, of those that the kernel has |
//! | `block` | a block of threads that carries them out |

mod block;
mod text;

use super::copier::{KERNEL, THREADS};
use crate::gpu::copier::{Board, Command, Launcher, PIECES, Place, Resident, SHEETS};
use crate::gpu::{CopierState, GpuError};
use block::Block;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use text::Program;

/// Starts a thread for each kernel.
struct Launch {
    program: Arc<Program>,
    board: Arc<Board>,
    lease: Duration,
    last: Mutex<Option<JoinHandle<()>>>,
}

impl Launcher for Launch {
    type Board = Arc<Board>;

    fn address_of_board(&self) -> u64 {
        std::ptr::from_ref::<Board>(&self.board) as u64
    }

    fn launch(&self, generation: u64) -> Result<(), GpuError> {
        let (program, board) = (Arc::clone(&self.program), Arc::clone(&self.board));
        let lease = u64::try_from(self.lease.as_nanos()).unwrap();
        let parameters = [self.address_of_board(), generation, lease, 4 * lease];
        let mut last = self.last.lock().unwrap();
        let before = last.take();
        *last = Some(std::thread::spawn(move || {
            // As on one stream.
            before.into_iter().for_each(|kernel| kernel.join().unwrap());
            let _board = board;
            Block::new(&program, THREADS.into(), &parameters).run();
        }));
        Ok(())
    }

    fn are_over(&self) -> Result<bool, GpuError> {
        Ok(self.last.lock().unwrap().as_ref().is_none_or(JoinHandle::is_finished))
    }

    fn pause(&self) {
        std::thread::yield_now();
    }
}

/// A copier whose kernels leave when there has been nothing to do for so long.
fn resident(lease: Duration) -> Arc<Resident<Launch>> {
    let board = Arc::new(Board::new());
    let program = Arc::new(Program::of(KERNEL.trim_end_matches('\0')));
    let launch = Launch { program, board: Arc::clone(&board), lease, last: Mutex::default() };
    let resident = Resident::new(board, launch);
    resident.renew();
    resident
}

/// Gives a command until a kernel takes it, and waits for its end.
fn done(resident: &Arc<Resident<Launch>>, places: &[Place]) {
    loop {
        let given = match *places {
            [(dst, src, len)] => {
                let command = Command { dst: dst as u64, src: src as u64, len: u32::try_from(len).unwrap() };
                resident.give(command)
            }
            _ => resident.give_many(places.iter().copied()),
        };
        if let Some(event) = given {
            return event.wait().unwrap();
        }
        if let CopierState::Refused(why) = resident.state() {
            panic!("{why}");
        }
        resident.renew();
        std::thread::yield_now();
    }
}

/// Bytes that no other ones look like.
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
    for (seed, (len, (to, from))) in lengths.flat_map(|len| places.map(|place| (len, place))).enumerate() {
        let (mut dst, mut src) = (Box::new(Aligned([0; ROOM])), Box::new(Aligned([0; ROOM])));
        dst.0.copy_from_slice(&bytes(ROOM, seed));
        src.0.copy_from_slice(&bytes(ROOM, seed + 1));
        let mut wanted = dst.0;
        wanted[64 + to..][..len].copy_from_slice(&src.0[64 + from..][..len]);
        let place = (dst.0.as_mut_ptr() as usize + 64 + to, src.0.as_ptr() as usize + 64 + from, len);
        done(&resident, &[place]);
        assert!(dst.0 == wanted, "{len} bytes to {to} from {from}");
    }
}

#[test]
fn the_kernels_text_copies_lists_of_any_number_of_pieces_and_nothing_beside_them() {
    let resident = resident(LEASE);
    for (unit, most) in [(1, 64), (4, 256), (16, 64), (16, 1024)] {
        for count in [2, 3, 127, 128, 129, 400, 1000, PIECES] {
            let room = (count + 1) * 2 * most;
            let (mut dst, src) = (bytes(room, count), bytes(room, count + 1));
            let mut wanted = dst.clone();
            // A vector's memory is aligned as its allocator pleases, so the first multiple of 16 in it is looked for.
            let (to, from) = (dst.as_mut_ptr() as usize, src.as_ptr() as usize);
            let (to_first, from_first) = (to.next_multiple_of(16) - to, from.next_multiple_of(16) - from);
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

#[test]
fn each_of_those_who_watch_has_a_sheet_and_finds_what_is_on_it() {
    let resident = resident(Duration::from_secs(3600));
    let page = &resident.launcher.board.page;
    let (mut dst, src) =
        ([0_u64; 2 * SHEETS], std::array::from_fn::<u64, { 2 * SHEETS }, _>(|at| !(at as u64)));
    let (to, from) = (dst.as_mut_ptr() as u64, src.as_ptr() as u64);
    for (at, number) in (0..2 * SHEETS).zip(1..) {
        let offset = 8 * at as u64;
        page.write_on(at % SHEETS, number, Command { dst: to + offset, src: from + offset, len: 8 });
        while page.answered() < number {
            std::thread::yield_now();
        }
        assert_eq!(dst[at], src[at], "{number}");
    }
    page.stop(1);
    while page.gone() < 1 {
        std::thread::yield_now();
    }
    assert_eq!(dst, src);
}

/// Singles and lists in turn, while kernels leave and come again all the time.
#[test]
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
