//! The path of a small message, after warm-up: no allocation, and no system call.
//!
//! Allocations are counted by the global allocator of this program. System calls are forbidden to a
//! child by a filter. The kernel kills it for any except `exit_group` and `write`, so it ends with
//! its own status or by SIGSYS.

#![expect(unsafe_code, reason = "system calls are counted in a child")]

use crate::support::counting::{ALLOCATIONS, BYTES};
use crate::support::{Job, OverLoopback, OverShm, Watchdog};
use carrack::buffer::Region;
use carrack::settings::TransportChoice;
use carrack::{Counter, Rank, RemoteComp, Runtime, Strided, Synchronizer, Tag};
use std::cell::Cell;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const MESSAGES: u64 = 1000;

#[derive(Clone, Copy, Debug)]
enum Way {
    Am,
    /// The receive is there before the message.
    Expected,
    /// The message is there before the receive.
    Unexpected,
}

const WAYS: [Way; 3] = [Way::Am, Way::Expected, Way::Unexpected];

/// A rank that talks to itself.
struct Fixture {
    rank: Runtime,
    counter: Counter,
    name: RemoteComp,
    arrived: Synchronizer,
    buffer: Cell<Vec<u8>>,
}

impl Fixture {
    fn new<J: Job>() -> Self {
        let rank = J::ranks(1).remove(0);
        let counter = Counter::new();
        let name = rank.register_comp(&counter).unwrap();
        let fixture = Self {
            rank,
            counter,
            name,
            arrived: Synchronizer::new(1),
            buffer: Cell::new(vec![0; 8]),
        };
        for number in 0..300 {
            for way in WAYS {
                fixture.one(way, number);
            }
        }
        fixture
    }

    fn one(&self, way: Way, number: u64) {
        let bytes = number.to_le_bytes();
        match way {
            Way::Am => {
                let before = self.counter.get();
                while self.rank.post_am(Rank(0), &bytes, self.name).try_submit().unwrap().is_retry()
                {
                    self.rank.progress().unwrap();
                }
                while self.counter.get() == before {
                    self.rank.progress().unwrap();
                }
            }
            Way::Expected => {
                let counted = self.counter.get();
                let buffer = self.buffer.take();
                // The buffer goes round: it comes back in the status, which a counter would throw
                // away.
                let mut recv = self.rank.post_recv(Rank(0), buffer, Tag(1)).comp(&self.arrived);
                assert!(recv.try_submit().unwrap().is_posted());
                while self.rank.post_send(Rank(0), &bytes, Tag(1)).try_submit().unwrap().is_retry()
                {
                    self.rank.progress().unwrap();
                }
                while !self.arrived.test() {
                    self.rank.progress().unwrap();
                }
                // Taking makes room for the next, which is the test's own allocation and not the
                // path's.
                let before = ALLOCATIONS.get();
                let status = self.arrived.take().unwrap().pop().unwrap();
                ALLOCATIONS.set(before);
                assert_eq!(status.bytes(), Some(&bytes[..]));
                let carrack::Buffer::Vec(buffer) = status.buffer else { panic!("another buffer") };
                self.buffer.set(buffer);
                assert_eq!(self.counter.get(), counted);
            }
            Way::Unexpected => {
                while self.rank.post_send(Rank(0), &bytes, Tag(1)).try_submit().unwrap().is_retry()
                {
                    self.rank.progress().unwrap();
                }
                while self.rank.default_matching_engine().waiting().0 == 0 {
                    self.rank.progress().unwrap();
                }
                let mut recv =
                    self.rank.post_recv(Rank(0), self.buffer.take(), Tag(1)).comp(&self.arrived);
                let carrack::Outcome::Done(status) = recv.try_submit().unwrap() else {
                    panic!("it was there")
                };
                assert_eq!(status.bytes(), Some(&bytes[..]));
                let carrack::Buffer::Vec(buffer) = status.buffer else { panic!("another buffer") };
                self.buffer.set(buffer);
            }
        }
    }
}

fn allocations<J: Job>(way: Way) -> u64 {
    let fixture = Fixture::new::<J>();
    let before = ALLOCATIONS.get();
    for number in 0..MESSAGES {
        fixture.one(way, number);
    }
    ALLOCATIONS.get() - before
}

#[test]
fn a_small_message_allocates_nothing_after_warm_up() {
    let _watchdog = Watchdog::over("allocations");
    for way in WAYS {
        assert_eq!(allocations::<OverShm>(way), 0, "{way:?} over shm");
        assert_eq!(allocations::<OverLoopback>(way), 0, "{way:?} over loopback");
    }
}

#[test]
fn a_strided_block_of_host_memory_takes_no_memory_for_its_rows() {
    let _watchdog = Watchdog::over("a strided block");
    let rank = OverLoopback::ranks(1).remove(0);
    let (ours, theirs) = (Region::host(1 << 20), rank.allocate(1 << 20).unwrap());
    let registered = rank.register_memory(&theirs).unwrap();
    let rmr = registered.remote_key();
    let bytes = |rows: usize| {
        let (here, there) = (
            Strided { offset: 3, count: [8, rows, 1], pitch: [10, 0] },
            Strided { offset: 0, count: [8, rows, 1], pitch: [16, 0] },
        );
        let before = BYTES.get();
        for is_put in [true, false] {
            let mut post = match is_put {
                true => rank.post_put_strided(Rank(0), &ours, &here, &rmr, &there),
                false => rank.post_get_strided(Rank(0), &ours, &here, &rmr, &there),
            };
            post.wait().unwrap();
        }
        BYTES.get() - before
    };
    bytes(2);
    assert_eq!(bytes(2), bytes(60_000));
}

#[test]
fn allocations_are_counted() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![1_u8; 100]));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}

const ROLE: &str = "QUIET_PATH_ROLE";

/// Plays the role of a child under the filter: nothing, a way of communication, or a forbidden
/// call.
#[test]
fn a_child_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let way = WAYS.into_iter().find(|way| format!("{way:?}") == role);
    let fixtures = way.map(|way| (way, Fixture::new::<OverShm>()));
    if let Some((way, fixture)) = &fixtures {
        assert_eq!(fixture.rank.settings().transports(), [TransportChoice::Shm]);
        // Right before the filter: the ring is warm, and has not been idle.
        fixture.one(*way, 0);
    }
    forbid_system_calls();
    if let Some((way, fixture)) = &fixtures {
        for number in 0..MESSAGES {
            fixture.one(*way, number);
        }
    }
    if role == "forbidden" {
        // SAFETY: asks for a number.
        unsafe { libc::syscall(libc::SYS_getppid) };
    }
    // SAFETY: ends the process without running anything else.
    unsafe { libc::_exit(42) }
}

fn forbid_system_calls() {
    let allowed = [libc::SYS_exit_group, libc::SYS_write].map(|call| call as u32);
    let jump =
        |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // The system call's number is the first word of what the filter sees.
        jump(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, allowed[0], 2, 0),
        jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, allowed[1], 1, 0),
        jump(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        jump(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls read what they are given, which is there; the second takes rights away
    // from this thread only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
            0
        );
    }
}

fn child(role: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "quiet_path::a_child_in_its_role", "--test-threads=1", "--quiet"])
        .env(ROLE, role)
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap()
}

#[test]
fn the_filter_kills_for_a_system_call_and_for_nothing_else() {
    let _watchdog = Watchdog::over("the filter");
    assert_eq!(child("nothing").code(), Some(42));
    assert_eq!(child("forbidden").signal(), Some(libc::SIGSYS));
}

#[test]
fn a_small_message_makes_no_system_call_after_warm_up() {
    let _watchdog = Watchdog::over("system calls");
    for way in WAYS {
        let status = child(&format!("{way:?}"));
        assert_eq!(status.code(), Some(42), "{way:?} over shm: {status}");
    }
}
