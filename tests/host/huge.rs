//! Messages of 4 GiB and a byte, once for each path: no length on it may be one of 32 bits. The
//! buffers of both sides are filled anew for each, and checked to the last byte.

use crate::support::ranks::{Ranks, Role};
use crate::support::words::{fill, wrong};
use crate::support::{Job, OverLoopback, OverShm, Watchdog};
use carrack::buffer::Region;
use carrack::settings::AutoChoice;
use carrack::{
    AsCompletion, Buffer, Completion, PostError, Rank, RemoteKey, Runtime, Status, Synchronizer,
    Tag,
};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = (4 << 30) + 1;
/// Memory that a test needs: both buffers, and some more.
const NEEDED: u64 = 2 * LEN as u64 + (1 << 30);
const PIECE: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(300);

/// Lets one test run at a time, and only where there is the memory. `None`: the test is skipped.
fn room(test: &str) -> Option<(Watchdog, MutexGuard<'static, ()>)> {
    static ONE: Mutex<()> = Mutex::new(());
    let turn = ONE.lock();
    let told = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = told.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let available = line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
    if available < NEEDED {
        println!("skipped: {test}: {available} bytes of memory are available, and {NEEDED} needed");
        return None;
    }
    Some((Watchdog::patient(test, PATIENCE), turn))
}

#[test]
#[cfg_attr(debug_assertions, ignore = "gigabytes take too long in a debug build")]
fn four_gibibytes_and_a_byte_arrive_by_the_kernels_copy_and_in_memory_that_is_mapped() {
    if let Some(_room) = room("by the kernel") {
        Ranks::start("huge::kernel", 2, &[]).succeed();
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "gigabytes take too long in a debug build")]
fn four_gibibytes_and_a_byte_arrive_part_by_part() {
    if let Some(_room) = room("part by part") {
        Ranks::start("huge::parts", 2, &[]).succeed();
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "gigabytes take too long in a debug build")]
fn four_gibibytes_and_a_byte_arrive_within_a_process() {
    let Some(_room) = room("loopback") else { return };
    let [zero, one] = OverLoopback::pair();
    let region = Region::host(LEN);
    let registered = one.register_memory(&region).unwrap();
    let rmr = registered.remote_key();
    std::thread::scope(|scope| {
        let sender =
            scope.spawn(|| Zero { runtime: &zero, buffer: Some(vec![0; LEN]) }.all(&rmr, None));
        One { runtime: &one, region: region.clone() }.all();
        sender.join().unwrap();
    });
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    let copy = if role.name == "parts" { AutoChoice::Off } else { AutoChoice::Auto };
    let runtime = role.runtime(OverShm::settings().setting("kernel_copy", copy));
    let mapped = role.name == "kernel";
    if role.rank == 0 {
        let of = |what: &str| RemoteKey::from_bytes(&role.told(what, 1)).unwrap();
        let own = of("own");
        Zero { runtime: &runtime, buffer: Some(vec![0; LEN]) }
            .all(&own, mapped.then_some(&mut || of("mapped")));
    } else {
        let region = Region::host(LEN);
        let registered = runtime.register_memory(&region).unwrap();
        role.tells("own", &registered.remote_key().to_bytes());
        One { runtime: &runtime, region: region.clone() }.all();
        drop((registered, region));
        if mapped {
            let region = runtime.allocate(LEN).unwrap();
            let registered = runtime.register_memory(&region).unwrap();
            role.tells("mapped", &registered.remote_key().to_bytes());
            One { runtime: &runtime, region: region.clone() }.memory(5);
        }
    }
    role.says("over");
    wait(&runtime, &|| role.has_said("over", 1 - role.rank));
}

fn wait(runtime: &Runtime, done: &dyn Fn() -> bool) {
    runtime.wait_for(PATIENCE, done).expect("it comes to an end");
}

/// Submits an operation, and waits for its end.
fn ended(runtime: &Runtime, submit: impl FnOnce(&Synchronizer) -> Result<(), PostError>) -> Status {
    let done = Synchronizer::new(1);
    submit(&done).expect("a post that is right");
    wait(runtime, &|| done.test());
    let status = done.take().unwrap().remove(0);
    let status = status.ok().expect("it succeeds");
    assert_eq!(status.size, LEN);
    status
}

/// Sends a small message, by which one side tells the other that it is its turn.
fn tell(runtime: &Runtime, to: Rank) {
    while !runtime.post_send(to, b"turn", Tag(99)).try_submit().unwrap().is_done() {
        runtime.progress().unwrap();
    }
}

fn hear(runtime: &Runtime, from: Rank) {
    runtime.post_recv(from, vec![0; 4], Tag(99)).wait().unwrap();
}

/// The side that sends, puts and gets.
struct Zero<'a> {
    runtime: &'a Runtime,
    buffer: Option<Vec<u8>>,
}

impl Zero<'_> {
    fn all(mut self, own: &RemoteKey, mapped: Option<&mut dyn FnMut() -> RemoteKey>) {
        let (runtime, one) = (self.runtime, Rank(1));
        for (salt, is_am) in [(1, false), (2, true)] {
            let buffer = self.filled(salt);
            hear(runtime, one);
            let comp = carrack::RemoteComp(u32::from_le_bytes(self.name()));
            let status = if is_am {
                let mut am = Some(runtime.post_am(one, buffer, comp));
                ended(runtime, |done| am.take().unwrap().comp(done).submit())
            } else {
                let mut send = Some(runtime.post_send(one, buffer, Tag(7)));
                ended(runtime, |done| send.take().unwrap().comp(done).submit())
            };
            self.back(status, salt);
        }
        self.memory(own, 3);
        if let Some(mapped) = mapped {
            let mapped = mapped();
            self.memory(&mapped, 5);
        }
    }

    fn memory(&mut self, rmr: &RemoteKey, salt: u64) {
        let runtime = self.runtime;
        hear(runtime, Rank(1));
        let mut put = Some(runtime.post_put(Rank(1), self.filled(salt), rmr, 0));
        let status = ended(runtime, |done| put.take().unwrap().comp(done).submit());
        self.back(status, salt);
        tell(runtime, Rank(1));
        hear(runtime, Rank(1));
        let mut get = Some(runtime.post_get(Rank(1), self.buffer.take().unwrap(), rmr, 0));
        let status = ended(runtime, |done| get.take().unwrap().comp(done).submit());
        self.back(status, salt + 1);
        tell(runtime, Rank(1));
    }

    fn name(&self) -> [u8; 4] {
        let mut receive = self.runtime.post_recv(Rank(1), vec![0; 4], Tag(98));
        let status = receive.wait().unwrap();
        *status.bytes().unwrap().first_chunk().unwrap()
    }

    fn filled(&mut self, salt: u64) -> Vec<u8> {
        let mut buffer = self.buffer.take().unwrap();
        fill(&mut buffer, salt, 0);
        buffer
    }

    /// Takes the buffer back, and checks that it holds what was sent, or what was there.
    fn back(&mut self, status: Status, salt: u64) {
        let Buffer::Vec(buffer) = status.buffer else { panic!("another buffer") };
        assert_eq!((buffer.len(), wrong(&buffer, salt, 0)), (LEN, None), "salt {salt}");
        self.buffer = Some(buffer);
    }
}

/// The side that receives, and whose memory is put to and got from.
struct One<'a> {
    runtime: &'a Runtime,
    region: Region,
}

/// Wants active messages in a region.
struct Placing {
    region: Region,
    arrived: Mutex<Option<Status>>,
}

impl Completion for Placing {
    fn signal(&self, status: Status) -> Result<(), Status> {
        *self.arrived.lock() = Some(status);
        Ok(())
    }

    fn place(&self, _: Rank, _: Tag, size: usize) -> Option<Buffer> {
        assert_eq!(size, LEN);
        Some(Buffer::Region(self.region.whole()))
    }
}

impl One<'_> {
    fn all(&self) {
        let (runtime, zero) = (self.runtime, Rank(0));
        let placing = Arc::new(Placing { region: self.region.clone(), arrived: Mutex::default() });
        let object: Arc<dyn Completion> = placing.clone();
        let name = runtime.register_comp(object.as_completion()).unwrap();
        let done = Synchronizer::new(1);
        let mut receive = runtime.post_recv(zero, self.region.whole(), Tag(7)).comp(&done);
        assert!(receive.try_submit().unwrap().is_posted());
        for is_am in [false, true] {
            tell(runtime, zero);
            while !runtime
                .post_send(zero, &name.0.to_le_bytes(), Tag(98))
                .try_submit()
                .unwrap()
                .is_done()
            {
                runtime.progress().unwrap();
            }
            let status = if is_am {
                wait(runtime, &|| placing.arrived.lock().is_some());
                placing.arrived.lock().take().unwrap()
            } else {
                wait(runtime, &|| done.test());
                done.take().unwrap().remove(0)
            };
            assert!(status.error.is_none() && status.size == LEN, "{:?}", status.error);
            self.holds(1 + u64::from(is_am));
        }
        self.memory(3);
    }

    /// Serves a put, and then a get.
    fn memory(&self, salt: u64) {
        tell(self.runtime, Rank(0));
        hear(self.runtime, Rank(0));
        self.holds(salt);
        let mut piece = vec![0; PIECE];
        for at in (0..LEN).step_by(PIECE) {
            let part = &mut piece[..PIECE.min(LEN - at)];
            fill(part, salt + 1, at as u64 / 8);
            self.region.slice(at, part.len()).unwrap().write(part).unwrap();
        }
        tell(self.runtime, Rank(0));
        hear(self.runtime, Rank(0));
    }

    fn holds(&self, salt: u64) {
        let mut piece = vec![0; PIECE];
        for at in (0..LEN).step_by(PIECE) {
            let part = &mut piece[..PIECE.min(LEN - at)];
            self.region.slice(at, part.len()).unwrap().read(part).unwrap();
            assert_eq!(wrong(part, salt, at as u64 / 8), None, "salt {salt}, in the piece at {at}");
        }
    }
}
