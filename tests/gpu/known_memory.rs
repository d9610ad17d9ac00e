//! Raw memory of GPUs, given by its address: classified once, noticed when it is freed, and told
//! to peers once. The tests run on simulated GPUs, and on real ones with `TEST_GPU=cuda`.
//!
//! Regions of a GPU stand for memory of the program. Their addresses are given as raw memory, and
//! dropping a region frees it.

#![expect(unsafe_code, reason = "memory of a GPU is named by its address")]

use crate::support::gpu_ranks::completed;
use crate::support::gpus::are_real as is_real;
use crate::support::ranks::{Ranks, Role};
use crate::support::words::filled;
use crate::support::words::wrong;
use crate::support::{Job, OverLoopback, OverShm, Watchdog, built};
use carrack::buffer::{Region, raw};
use carrack::settings::{AutoChoice, GpuChoice, SettingsBuilder};
use carrack::transports::gpu::{Driver, Flavour, Gpu};
use carrack::transports::mem::{KnownMemory, MemKind};
use carrack::{
    Buffer, MR_DEVICE, MR_HOST, MR_UNKNOWN, MemHint, Mr, OpError, PostError, Rank, RemoteKey,
    Runtime, Status, Synchronizer, Tag,
};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use raw::RawError;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(110);
const LEN: usize = 3 << 20;

#[test]
fn memory_that_is_allocated_anew_a_thousand_times_is_never_reached_through_a_stale_mapping() {
    let _watchdog = Watchdog::over("again");
    Ranks::start("known_memory::again", 2, &[1000, 0]).succeed();
}

/// gpu.md, VMM rule 6.
#[test]
fn an_allocator_that_tells_of_what_it_frees_may_free_it_when_it_is_told_so() {
    let _watchdog = Watchdog::over("told");
    Ranks::start("known_memory::again", 2, &[60, 1]).succeed();
}

#[test]
fn parts_at_odd_places_are_sent_and_filled_and_nothing_around_them_is_touched() {
    let _watchdog = Watchdog::over("parts");
    Ranks::start("known_memory::parts", 2, &[]).succeed();
}

#[test]
fn an_allocation_is_exported_and_opened_once_however_often_its_memory_is_given() {
    let _watchdog = Watchdog::over("once");
    Ranks::start("known_memory::once", 2, &[]).succeed();
}

#[test]
fn what_is_registered_over_memory_that_goes_is_withdrawn_and_who_has_it_mapped_is_named() {
    let _watchdog = Watchdog::over("withdrawn");
    Ranks::start("known_memory::withdrawn", 2, &[]).succeed();
}

#[test]
fn a_known_extent_is_asked_about_in_short_and_not_at_all_where_it_is_said_to_be_a_gpus() {
    let _watchdog = Watchdog::over("asked");
    Ranks::start("known_memory::asked", 1, &[]).succeed();
}

#[test]
fn an_owner_that_is_asked_for_memory_that_was_freed_says_that_it_is_not_there() {
    let _watchdog = Watchdog::over("by_owner");
    Ranks::start("known_memory::by_owner", 2, &[]).succeed();
}

/// gpu.md, VMM rule 5; legacy IPC rule 6.
#[test]
fn what_peers_have_mapped_of_memory_that_was_freed_without_a_word_is_closed() {
    let _watchdog = Watchdog::over("unsaid");
    Ranks::start("known_memory::unsaid", 2, &[]).succeed();
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "again" => again(&role),
        "parts" => parts(&role),
        "once" => once(&role),
        "asked" => asked(&role),
        "by_owner" => by_owner(&role),
        "unsaid" => unsaid(&role),
        _ => withdrawn(&role),
    }
}

// ---- a rank, its GPU and its messages -----------------------------------------------------------

/// A runtime, a device of its, and the simulated driver where it is one, which does what is ordered
/// and counts.
struct Rig {
    runtime: Runtime,
    gpu: Arc<dyn Gpu>,
    fake: Option<FakeDriver>,
}

impl Rig {
    fn of(
        settings: SettingsBuilder,
        start: impl FnOnce(carrack::RuntimeBuilder) -> carrack::RuntimeBuilder,
    ) -> Self {
        let fake = (!is_real()).then(|| FakeDriver::new(FakeConfig::devices(2)).unwrap());
        let settings =
            built(settings.gpu(if is_real() { GpuChoice::Cuda } else { GpuChoice::None }));
        let mut builder = start(Runtime::builder().settings(settings));
        if let Some(fake) = &fake {
            builder = builder.gpu_driver(Arc::new(fake.clone()));
        }
        let runtime = builder.start().unwrap();
        let devices = runtime.gpu_drivers().iter().find_map(|driver| driver.devices().ok());
        let gpu = devices.expect("a driver with devices").remove(0);
        Self { runtime, gpu, fake }
    }

    fn in_role(role: &Role) -> Self {
        Self::of(OverShm::settings(), |builder| builder.bootstrap(Box::new(role.bootstrap())))
    }

    fn alone() -> Self {
        Self::of(OverLoopback::settings(), |builder| builder)
    }

    fn allocate(&self, flavour: Flavour) -> Region {
        self.gpu.allocate(LEN, flavour).unwrap()
    }

    /// Returns a part of another owner's memory, as raw memory.
    fn raw(
        &self,
        owner: &Region,
        at: usize,
        len: usize,
        hint: MemHint,
    ) -> Result<Region, RawError> {
        assert!(at + len <= owner.len());
        self.at(owner.addr() + at, len, hint)
    }

    fn at(&self, addr: usize, len: usize, hint: impl Into<MemHint>) -> Result<Region, RawError> {
        // SAFETY: the tests keep what is there as long as they use the region, or are refused.
        unsafe { raw::region(addr as *mut u8, len, hint, self.runtime.gpu_drivers()) }
    }

    fn register(
        &self,
        addr: usize,
        len: usize,
        hint: MemHint,
    ) -> Result<Mr, carrack::RegisterError> {
        // SAFETY: as above.
        unsafe { raw::register_memory(&self.runtime, addr as *mut u8, len, hint) }
    }

    fn completed(
        &self,
        submit: impl FnOnce(&Synchronizer) -> Result<(), PostError>,
    ) -> Result<Status, PostError> {
        completed(&self.runtime, submit)
    }

    fn send(&self, to: u32, buffer: impl Into<Buffer>, tag: u64) -> Result<Status, PostError> {
        let mut buffer = Some(buffer.into());
        self.completed(|done| {
            let post = self.runtime.post_send(Rank(to), buffer.take().unwrap(), Tag(tag));
            post.comp(done).submit()
        })
    }

    fn recv(&self, from: u32, buffer: impl Into<Buffer>, tag: u64) -> Status {
        let mut buffer = Some(buffer.into());
        let got = self.completed(|done| {
            self.runtime.post_recv(Rank(from), buffer.take().unwrap(), Tag(tag)).comp(done).submit()
        });
        got.unwrap().ok().unwrap()
    }

    fn get(&self, rmr: &RemoteKey, at: usize, len: usize) -> Result<Vec<u8>, PostError> {
        let mut buffer = Some(Buffer::from(vec![0; len]));
        let status = self.completed(|done| {
            self.runtime
                .post_get(rmr.owner(), buffer.take().unwrap(), rmr, at as u64)
                .comp(done)
                .submit()
        })?;
        Ok(status.ok().unwrap().buffer.to_vec().unwrap())
    }

    fn put(&self, bytes: Vec<u8>, rmr: &RemoteKey, at: usize) -> Result<Status, PostError> {
        let mut buffer = Some(Buffer::from(bytes));
        self.completed(|done| {
            self.runtime
                .post_put(rmr.owner(), buffer.take().unwrap(), rmr, at as u64)
                .comp(done)
                .submit()
        })
    }

    /// Sends a word, and waits for one.
    fn agree(&self, with: u32) {
        self.send(with, vec![7_u8; 3], u64::MAX - 1).unwrap().ok().unwrap();
        assert_eq!(self.recv(with, vec![0; 3], u64::MAX - 1).size, 3);
    }
}

fn bytes_of(status: &Status) -> Vec<u8> {
    status.buffer.to_vec().unwrap()
}

// ---- roles --------------------------------------------------------------------------------------

/// Runs the role: rank 0 allocates, sends from raw memory, has it read and written as remote memory
/// now and then, and frees it. The next allocation has the same address: nearly always on simulated
/// GPUs. Real drivers do so unpredictably, and the test prints how often.
fn again(role: &Role) {
    let (rounds, tells) = (role.words[0], role.words[1] == 1);
    let rig = Rig::in_role(role);
    if let Some(fake) = &rig.fake {
        fake.faults().reuse_addresses(role.rank == 0);
    }
    let (other, part) = (1 - role.rank, 100_001);
    let (mut reused, mut last) = (0, 0);
    let place = rig.gpu.allocate(part + 20, Flavour::Plain).unwrap();
    for round in 0..rounds {
        let registers = round % 10 == 3;
        let at = 1 + round as usize % 4099;
        if role.rank == 0 {
            let owner =
                rig.allocate(if round % 3 == 2 { Flavour::Shareable } else { Flavour::Plain });
            reused += u64::from(owner.addr() == last);
            last = owner.addr();
            owner.slice(at, part).unwrap().write(&filled(part, round)).unwrap();
            let given = rig.raw(&owner, at, part, MR_UNKNOWN).unwrap();
            assert_eq!((given.kind(), given.id()), (owner.kind(), owner.id()), "round {round}");
            rig.send(other, given.whole(), round).unwrap().ok().unwrap();
            if registers {
                let mr = rig.register(owner.addr() + at, part, MR_DEVICE).unwrap();
                rig.send(other, mr.remote_key().to_bytes(), round).unwrap();
                rig.agree(other);
                let written = given.slice(50, 1000).unwrap().to_vec().unwrap();
                assert_eq!(wrong(&written, !round, 0), None, "round {round}");
                drop(mr);
            }
            drop(given);
            // The program that allocated it has to wait until no rank uses it.
            while tells && rig.runtime.invalidate_memory(owner.addr(), LEN).is_err() {
                let _ = rig.runtime.progress().unwrap();
                std::thread::yield_now();
            }
        } else {
            // Into host memory, and into a GPU's.
            let status = match round % 2 {
                0 => rig.recv(other, vec![0; part], round),
                _ => rig.recv(other, place.slice(3, part).unwrap(), round),
            };
            assert_eq!(wrong(&bytes_of(&status), round, 0), None, "round {round}");
            if registers {
                let status = rig.recv(other, vec![0; 4096], round);
                let rmr = RemoteKey::from_bytes(&bytes_of(&status)[..status.size]).unwrap();
                assert_eq!(
                    wrong(&rig.get(&rmr, 0, part).unwrap(), round, 0),
                    None,
                    "round {round}"
                );
                rig.put(filled(1000, !round), &rmr, 50).unwrap().ok().unwrap();
                rig.agree(other);
            }
        }
    }
    if role.rank == 0 {
        eprintln!("{reused} of {rounds} allocations had the address of the one before");
        // Every third is of another length in the window of addresses, and so may lie elsewhere.
        assert!(is_real() || reused * 10 > rounds * 9, "{reused} of {rounds}");
        assert!(
            is_real() || KnownMemory::of_the_process().len() < 20,
            "what was freed is not kept"
        );
    }
    role.meet("over", &rig.runtime, 0..2);
}

const ODD: [(usize, usize); 6] =
    [(1, 1), (3, 8), (4097, 40), (12_345, 100_001), (7, (2 << 20) + 1), (LEN - 9, 9)];

/// Runs the role: raw parts of one allocation are sent from, and received into.
fn parts(role: &Role) {
    let rig = Rig::in_role(role);
    let (other, poison) = (1 - role.rank, filled(LEN, 0xee));
    for flavour in [Flavour::Plain, Flavour::Shareable, Flavour::Pinned] {
        let owner = rig.allocate(flavour);
        for (turn, (at, len)) in ODD.into_iter().enumerate() {
            for hint in [MR_UNKNOWN, MR_DEVICE, MemHint::from(owner.kind())] {
                let hint =
                    if flavour == Flavour::Pinned && hint == MR_DEVICE { MR_HOST } else { hint };
                owner.whole().write(&poison).unwrap();
                let given = rig.raw(&owner, at, len, hint).unwrap();
                assert_eq!((given.addr(), given.len()), (owner.addr() + at, len));
                if role.rank == 0 {
                    given.whole().write(&filled(len, turn as u64)).unwrap();
                    rig.send(other, given.whole(), turn as u64).unwrap().ok().unwrap();
                } else {
                    assert_eq!(rig.recv(other, given.whole(), turn as u64).size, len);
                }
                let mut expected = poison.clone();
                expected[at..at + len].copy_from_slice(&filled(len, turn as u64));
                assert!(
                    owner.whole().to_vec().unwrap() == expected,
                    "{flavour:?}, {at}+{len}, {hint}"
                );
            }
        }
        // The whole of it, and nothing beyond.
        assert!(rig.raw(&owner, 0, LEN, MR_UNKNOWN).is_ok());
        let beyond = rig.at(owner.addr() + 1, usize::MAX / 2, MR_UNKNOWN);
        assert!(matches!(beyond, Err(RawError::Beyond { .. })), "{beyond:?}");
    }
    role.meet("over", &rig.runtime, 0..2);
}

/// Runs the role with many regions and registrations of parts of one allocation.
fn once(role: &Role) {
    let rig = Rig::in_role(role);
    let owner = rig.allocate(Flavour::Plain);
    let other = 1 - role.rank;
    let counters = || rig.fake.as_ref().map(FakeDriver::counters).unwrap_or_default();
    let mut before = None;
    for round in 0..50_u64 {
        let (at, len) = (round as usize * 1001, 5000 + round as usize);
        if role.rank == 0 {
            owner.slice(at, len).unwrap().write(&filled(len, round)).unwrap();
            let hint = if round % 2 == 0 { MR_UNKNOWN } else { MR_DEVICE };
            rig.send(other, rig.raw(&owner, at, len, hint).unwrap().whole(), round)
                .unwrap()
                .ok()
                .unwrap();
            let mr = rig.register(owner.addr() + at, len, MR_UNKNOWN).unwrap();
            rig.send(other, mr.remote_key().to_bytes(), round).unwrap();
            rig.agree(other);
        } else {
            let status = rig.recv(other, vec![0; len], round);
            assert_eq!(wrong(&bytes_of(&status), round, 0), None);
            let status = rig.recv(other, vec![0; 4096], round);
            let rmr = RemoteKey::from_bytes(&bytes_of(&status)[..status.size]).unwrap();
            assert_eq!(wrong(&rig.get(&rmr, 0, len).unwrap(), round, 0), None);
            rig.agree(other);
        }
        let counted = counters();
        let now = (counted.exports, counted.opens, counted.maps, counted.classifies);
        // From the second time on, no handle is made or opened, nothing mapped, and no driver asked
        // everything.
        assert_eq!(*before.get_or_insert(now), now, "round {round}");
    }
    if let Some(fake) = &rig.fake {
        let counted = fake.counters();
        let made = (counted.exports, counted.opens, counted.maps, counted.classifies);
        assert_eq!(made, if role.rank == 0 { (1, 0, 0, 1) } else { (0, 1, 1, 0) });
    }
    role.meet("over", &rig.runtime, 0..2);
}

/// Counts the questions to a driver, in a process without other questions and without any progress
/// meanwhile.
fn asked(role: &Role) {
    let rig = Rig::in_role(role);
    let Some(fake) = &rig.fake else { return };
    let asked = |what: &dyn Fn()| {
        let before = fake.counters();
        what();
        let after = fake.counters();
        (after.classifies - before.classifies, after.buffer_ids - before.buffer_ids)
    };
    let (owner, host) = (rig.allocate(Flavour::Plain), Region::host(100));
    let pinned = rig.gpu.allocate(100, Flavour::Pinned).unwrap();
    let give = |owner: &Region, hint: MemHint| drop(rig.raw(owner, 7, 10, hint).unwrap());
    assert_eq!(asked(&|| give(&host, MR_HOST)), (0, 0));
    assert_eq!(asked(&|| give(&host, MR_UNKNOWN)), (1, 0));
    assert_eq!(asked(&|| give(&host, MR_UNKNOWN)), (1, 0), "host memory is not remembered");
    for owner in [&owner, &pinned] {
        assert_eq!(asked(&|| give(owner, MR_UNKNOWN)), (1, 0), "the first time");
        assert_eq!(asked(&|| give(owner, MR_UNKNOWN)), (0, 1));
    }
    assert_eq!(asked(&|| give(&owner, MR_DEVICE)), (0, 0));
    assert_eq!(asked(&|| give(&pinned, MR_HOST)), (0, 1));
    assert_eq!(asked(&|| give(&host, MR_HOST)), (0, 0));
    // The first post of a fresh region asks the driver nothing, each further one a short question.
    // A region that is declared as a GPU's asks nothing.
    let post = |region: &Region| {
        let _ = rig
            .runtime
            .post_recv(Rank(0), region.whole(), Tag(1))
            .comp(&Synchronizer::new(1))
            .try_submit()
            .unwrap();
    };
    let (unknown, device) =
        (rig.raw(&owner, 0, 10, MR_UNKNOWN).unwrap(), rig.raw(&owner, 0, 10, MR_DEVICE).unwrap());
    assert_eq!(asked(&|| post(&unknown)), (0, 0));
    assert_eq!(asked(&|| post(&unknown)), (0, 1));
    assert_eq!(asked(&|| post(&unknown.subregion(1, 1).unwrap())), (0, 1));
    assert_eq!(asked(&|| post(&device)), (0, 0));
    assert_eq!(asked(&|| post(&owner)), (0, 0), "only its owner frees it");
}

/// Runs the role: rank 0 frees what it has sent from, and never gives memory there again.
fn unsaid(role: &Role) {
    let rig = Rig::in_role(role);
    let other = 1 - role.rank;
    if role.rank == 0 {
        // More than are looked at in one go.
        let owners: Vec<_> = (0..20).map(|_| rig.allocate(Flavour::Plain)).collect();
        for (tag, owner) in owners.iter().enumerate() {
            rig.send(other, rig.raw(owner, 9, 10, MR_UNKNOWN).unwrap().whole(), tag as u64)
                .unwrap();
        }
        assert_eq!(KnownMemory::of_the_process().len(), 20);
        rig.agree(other);
        drop(owners);
    } else {
        for tag in 0..20 {
            assert_eq!(rig.recv(other, vec![0; 10], tag).size, 10);
        }
        rig.agree(other);
        if let Some(fake) = &rig.fake {
            rig.runtime
                .wait_for(PATIENCE, || fake.counters().unmaps == 20)
                .expect("what was freed is not kept mapped");
        }
    }
    role.meet("over", &rig.runtime, 0..2);
}

/// Runs the role: rank 1 maps nothing, so rank 0 carries out what it asks for, and finds the
/// registered memory freed.
fn by_owner(role: &Role) {
    let ipc = if role.rank == 1 { AutoChoice::Off } else { AutoChoice::Auto };
    let rig = Rig::of(OverShm::settings().setting("gpu_ipc", ipc), |builder| {
        builder.bootstrap(Box::new(role.bootstrap()))
    });
    let other = 1 - role.rank;
    if role.rank == 0 {
        let owner = rig.gpu.allocate(64 << 20, Flavour::Plain).unwrap();
        let mr = rig.register(owner.addr() + 7, 100, MR_UNKNOWN).unwrap();
        drop(owner);
        rig.send(other, mr.remote_key().to_bytes(), 1).unwrap();
        rig.agree(other);
    } else {
        let status = rig.recv(other, vec![0; 4096], 1);
        let rmr = RemoteKey::from_bytes(&bytes_of(&status)[..status.size]).unwrap();
        let mut buffer = Some(Buffer::from(vec![0; 10]));
        let status = rig
            .completed(|done| {
                rig.runtime.post_get(Rank(0), buffer.take().unwrap(), &rmr, 0).comp(done).submit()
            })
            .unwrap();
        let error = status.ok().unwrap_err();
        assert!(matches!(error, OpError::Stale(Rank(0))), "{error}");
        rig.agree(other);
    }
    role.meet("over", &rig.runtime, 0..2);
}

fn withdrawn(role: &Role) {
    let rig = Rig::in_role(role);
    let other = 1 - role.rank;
    if role.rank == 1 {
        let told = |tag| {
            let status = rig.recv(other, vec![0; 4096], tag);
            RemoteKey::from_bytes(&bytes_of(&status)[..status.size]).unwrap()
        };
        let (first, host) = (told(1), told(2));
        assert_eq!(wrong(&rig.get(&first, 0, 1000).unwrap(), 5, 0), None);
        rig.get(&host, 0, 1000).unwrap();
        assert_eq!(wrong(&bytes_of(&rig.recv(other, vec![0; 1000], 3)), 5, 0), None);
        rig.agree(other);
        rig.agree(other);
        assert!(
            matches!(rig.get(&first, 0, 1000), Err(PostError::Stale(Rank(0)))),
            "it was withdrawn"
        );
        assert!(
            matches!(rig.get(&host, 0, 1000), Err(PostError::Stale(Rank(0)))),
            "host memory as well"
        );
        drop((first, host));
        let again = told(4);
        assert_eq!(
            wrong(&rig.get(&again, 0, 1000).unwrap(), 6, 0),
            None,
            "what is registered again"
        );
        rig.agree(other);
        role.meet("over", &rig.runtime, 0..2);
        return;
    }
    let (owner, memory) = (rig.allocate(Flavour::Plain), rig.runtime.allocate(10_000).unwrap());
    owner.slice(77, 1000).unwrap().write(&filled(1000, 5)).unwrap();
    let given = rig.raw(&owner, 77, 1000, MR_UNKNOWN).unwrap();
    let mr = rig.runtime.register_memory(&given).unwrap();
    let host = rig.runtime.register_memory(&memory).unwrap();
    rig.send(other, mr.remote_key().to_bytes(), 1).unwrap();
    rig.send(other, host.remote_key().to_bytes(), 2).unwrap();
    rig.send(other, given.whole(), 3).unwrap().ok().unwrap();
    rig.agree(other);
    // Some other runtime of the process is told: addresses are the process's.
    let elsewhere = Rig::alone();
    let invalidate = |addr, len| elsewhere.runtime.invalidate_memory(addr, len);
    assert_eq!(invalidate(owner.addr() + 5000, 0), Ok(()), "an empty range names no memory");
    let error = invalidate(owner.addr() + 5000, 1).unwrap_err();
    assert_eq!(
        (error.registrations, error.regions),
        (0, 1),
        "the allocation, though not the registered part: {error}"
    );
    let error = invalidate(owner.addr(), LEN).unwrap_err();
    assert_eq!((error.registrations, error.regions, error.processes.len()), (1, 1, 1), "{error}");
    assert!(error.to_string().contains("deregister first"), "{error}");
    assert_ne!(error.processes[0], std::process::id());
    let error = invalidate(memory.addr(), 1).unwrap_err();
    assert_eq!((error.registrations, error.regions), (1, 0), "{error}");
    assert_eq!(invalidate(memory.addr(), 1), Ok(()));
    rig.agree(other);
    drop((mr, host));
    let error = invalidate(owner.addr(), LEN).unwrap_err();
    assert_eq!((error.registrations, error.regions), (0, 1), "the region is there: {error}");
    // Withdrawn memory is gone for all peers, also for those that would fetch messages from it.
    rig.runtime
        .wait_for(PATIENCE, || invalidate(owner.addr(), LEN).unwrap_err().processes.is_empty())
        .expect("what was told of messages is withdrawn, though the region is there");
    drop(given);
    rig.runtime
        .wait_for(PATIENCE, || invalidate(owner.addr(), LEN).is_ok())
        .expect("the importer closes what was withdrawn");
    // It was not freed after all, and serves again.
    owner.slice(77, 1000).unwrap().write(&filled(1000, 6)).unwrap();
    let mr = rig.register(owner.addr() + 77, 1000, MR_UNKNOWN).unwrap();
    rig.send(other, mr.remote_key().to_bytes(), 4).unwrap();
    rig.agree(other);
    role.meet("over", &rig.runtime, 0..2);
}

// ---- bad input ----------------------------------------------------------------------------------

#[test]
fn memory_that_is_not_what_it_is_said_to_be_is_refused_by_name() {
    let rig = Rig::alone();
    let (owner, host) = (rig.allocate(Flavour::Plain), Region::host(1000));
    let refused = |result: Result<Region, RawError>| match result {
        Err(RawError::Kind { said, found, .. }) => (said, found),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(rig.at(host.addr(), 1000, MR_DEVICE)), (MR_DEVICE, MemKind::Host));
    let pinned = rig.gpu.allocate(1000, Flavour::Pinned).unwrap();
    assert_eq!(refused(rig.at(pinned.addr(), 1000, MR_DEVICE)), (MR_DEVICE, MemKind::Pinned));
    assert_eq!(
        rig.at(pinned.addr(), 1000, MR_HOST).unwrap().kind(),
        MemKind::Host,
        "no driver was asked"
    );
    assert_eq!(rig.at(pinned.addr(), 1000, MR_UNKNOWN).unwrap().kind(), MemKind::Pinned);
    assert_eq!(rig.at(host.addr(), 1000, MR_UNKNOWN).unwrap().kind(), MemKind::Host);
    // Registering asks in any case.
    let error = rig.register(owner.addr(), 10, MR_HOST).unwrap_err();
    assert!(error.to_string().contains("was said to be host, and is device"), "{error}");
    // Now it is known.
    assert_eq!(refused(rig.raw(&owner, 5, 10, MR_HOST)), (MR_HOST, owner.kind()));
    assert_eq!(refused(rig.at(owner.addr(), 10, MemKind::Pinned)).1, owner.kind());
    let other = MemKind::Device(carrack::transports::mem::GpuUuid([7; 16]));
    assert_eq!(refused(rig.at(owner.addr(), 10, other)), (MemHint::Is(other), owner.kind()));
    assert_eq!(rig.at(owner.addr(), 10, owner.kind()).unwrap().root().len(), rig.root_len(&owner));
    assert!(matches!(rig.at(0, 10, MR_UNKNOWN), Err(RawError::Null)));
    let wraps = rig.at(usize::MAX - 5, 10, MR_HOST);
    assert!(matches!(wraps, Err(RawError::Beyond { .. })), "{wraps:?}");
}

#[test]
fn managed_memory_is_refused_by_name_with_what_to_do() {
    let rig = Rig::alone();
    let managed = rig.allocate(Flavour::Managed);
    for hint in [MR_UNKNOWN, MR_DEVICE] {
        let error = rig.raw(&managed, 9, 10, hint).unwrap_err();
        assert!(
            matches!(error, RawError::Managed { .. }) && error.to_string().contains("cudaMalloc"),
            "{error}"
        );
    }
    assert!(rig.register(managed.addr(), 10, MR_HOST).is_err());
    assert!(rig.runtime.register_memory(&managed).is_err());
}

#[test]
fn memory_that_was_freed_is_noticed_by_its_address_and_by_what_was_made_of_it() {
    let rig = Rig::alone();
    // So large that a driver takes it back; and another test may be given the address.
    let owner = rig.gpu.allocate(64 << 20, Flavour::Plain).unwrap();
    let (addr, id) = (owner.addr(), owner.id());
    let given = rig.at(addr + 7, 100, MR_UNKNOWN).unwrap();
    let part = given.subregion(10, 10).unwrap();
    // The first post is the question that was asked when the region was made.
    for _ in 0..2 {
        rig.send(0, given.whole(), 1).unwrap();
        rig.recv(0, vec![0; 100], 1);
    }
    let mr = rig.runtime.register_memory(&given).unwrap();
    drop(owner);
    for stale in [&given, &part] {
        let error = rig.send(0, stale.whole(), 1).unwrap_err();
        assert!(matches!(error, PostError::Freed(freed) if freed.addr == stale.addr()), "{error}");
        let mut buffer = Some(stale.whole());
        let received = rig.completed(|done| {
            rig.runtime.post_recv(Rank(0), buffer.take().unwrap(), Tag(1)).comp(done).submit()
        });
        assert!(matches!(received, Err(PostError::Freed(_))), "{received:?}");
    }
    match rig.at(addr + 7, 100, MR_UNKNOWN) {
        Err(error @ RawError::Freed(_)) => {
            assert!(error.to_string().contains(&format!("{:#x}", addr + 7)))
        }
        Ok(region) => assert!(is_real() && region.id() != id, "{region:?}"),
        Err(other) => panic!("{other}"),
    }
    let device = rig.at(addr + 7, 100, MR_DEVICE);
    assert!(is_real() || matches!(device, Err(RawError::Freed(_))), "{device:?}");
    drop((mr, given, part));
    // Real addresses may be another test's by now.
    assert!(is_real() || rig.runtime.invalidate_memory(addr, 64 << 20).is_ok());
}

#[test]
fn memory_of_a_device_that_cannot_be_seen_is_the_drivers_error_with_what_to_do() {
    // Real drivers give such memory to a process only from another one:
    // transports/tests/drivers/cuda_mock/mod.rs has their answer.
    let rig = Rig::alone();
    let Some(fake) = &rig.fake else { return };
    let owner = rig.allocate(Flavour::Plain);
    fake.faults().hide(rig.gpu.info().uuid, true);
    for hint in [MR_UNKNOWN, MR_DEVICE] {
        let error = rig.raw(&owner, 0, 10, hint).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("cannot see") && text.contains(&format!("{:#x}", owner.addr())),
            "{text}"
        );
    }
    assert!(rig.register(owner.addr(), 10, MR_HOST).is_err());
}

#[test]
fn a_registration_of_raw_memory_reaches_what_it_was_made_of() {
    let rig = Rig::alone();
    let memory = Region::host(100);
    for hint in [MR_HOST, MR_UNKNOWN] {
        let mr = rig.register(memory.addr() + 10, 50, hint).unwrap();
        assert_eq!((mr.region().kind(), mr.region().len()), (MemKind::Host, 50));
        let rmr = mr.remote_key();
        rig.put(vec![9; 50], &rmr, 0).unwrap().ok().unwrap();
        assert_eq!(memory.slice(10, 50).unwrap().to_vec().unwrap(), [9; 50]);
    }
    assert_eq!(memory.slice(60, 40).unwrap().to_vec().unwrap(), [0; 40]);
}

impl Rig {
    /// Returns the length of an allocation, as the driver reports it.
    fn root_len(&self, owner: &Region) -> usize {
        let asked = |driver: &Arc<dyn Driver>| driver.classify(owner.addr()).unwrap();
        self.runtime.gpu_drivers().iter().find_map(asked).unwrap().len
    }
}
