//! Ranks that are processes: they find each other, and some of them are killed. See
//! [`support::ranks`].

#![expect(unsafe_code, reason = "rustix has no getrusage")]

use crate::support::folder::Folder;
use crate::support::ranks::{Ranks, Role, die, listing, state_of};
use crate::support::sink::Sink;
use crate::support::*;
use carrack::bootstrap::Bootstrap;
use carrack::buffer::Region;
use carrack::settings::{AutoChoice, SettingsBuilder};
use carrack::{
    Buffer, CollectiveError, CompQueue, Handler, OpError, Outcome, PeerState, PostError, Rank,
    RemoteKey, Runtime, Status, Synchronizer, Tag,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The rank that is killed.
const VICTIM: Rank = Rank(2);
/// Time limit of a rank.
const PATIENCE: Duration = Duration::from_secs(20);

macro_rules! job_tests {
    ($($test:ident: $role:literal on [$($size:literal),+], $check:ident;)+) => {
        job_tests!(in shm, SHM, $($test: $role on [$($size),+], $check;)+);
        job_tests!(in tcp, TCP, $($test: $role on [$($size),+], $check;)+);
    };
    (in $module:ident, $word:ident,
     $($test:ident: $role:literal on [$($size:literal),+], $check:ident;)+) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $test() {
                let _watchdog = Watchdog::over(stringify!($test));
                $($check(Ranks::start(concat!("processes::", $role), $size, &[$word]));)+
            })+
        }
    };
}

// Over TCP what fits into the sender's window is done, whether the peer takes it or not.
job_tests!(in shm_alone, SHM,
    a_rank_killed_while_it_leaves_its_ring_full_fails_what_waits_for_it: "full" on [3],
        all_but_the_victim_succeed;
);

/// The first word of a role: the transport.
const SHM: u64 = 0;
const TCP: u64 = 1;

fn settings_of(role: &Role) -> SettingsBuilder {
    match role.words[..] {
        [SHM] => OverShm::settings(),
        [TCP] => OverTcp::settings(),
        ref words => panic!("no transport in {words:?}"),
    }
}

fn all_succeed(ranks: Ranks) {
    ranks.succeed();
}

fn all_but_the_victim_succeed(ranks: Ranks) {
    ranks.succeed_except(VICTIM);
}

job_tests! {
    everybody_sends_to_everybody: "all_to_all" on [2, 4, 8], all_succeed;
    barriers_and_allgathers_work_between_processes: "collectives" on [1, 2, 3, 5, 8], all_succeed;
    an_allgather_of_unequal_lengths_fails_on_every_rank: "uneven" on [2, 4], all_succeed;
    all_ranks_meet_in_a_barrier_while_the_queue_of_one_is_full: "gather" on [17], all_succeed;
    a_rank_killed_while_its_messages_wait_for_a_full_queue_loses_none_that_it_had_sent:
        "gather-killed" on [3], all_but_the_victim_succeed;
    idle_ranks_neither_burn_their_cores_nor_take_much_memory: "idle" on [8], all_succeed;
    a_runtime_that_was_dropped_has_given_all_descriptors_back: "descriptors" on [3], all_succeed;
    a_buffer_that_a_dropped_runtime_gave_back_is_copied_by_no_peer:
        "drops" on [2, 2, 2, 2, 2, 2], all_succeed;
    a_rank_killed_before_its_first_message_is_reported: "silent" on [3], all_but_the_victim_succeed;
    a_rank_killed_after_connecting_is_reported: "connected" on [3], all_but_the_victim_succeed;
    a_rank_killed_in_the_middle_of_a_stream_loses_nothing_that_it_had_sent: "stream" on [3],
        all_but_the_victim_succeed;
    a_rank_killed_inside_a_handler_is_reported: "handler" on [3], all_but_the_victim_succeed;
    a_rank_killed_before_anybody_connected_to_it_fails_the_receives_that_wait_for_it:
        "absent" on [3], all_but_the_victim_succeed;
    a_rank_that_was_received_from_before_it_started_is_reported_when_it_is_killed:
        "unstarted" on [3], all_but_the_victim_succeed;
    a_rank_killed_without_a_second_device_fails_what_waits_on_the_second_of_others:
        "second-device" on [3], all_but_the_victim_succeed;
    a_rank_killed_before_it_had_a_link_fails_what_is_posted_on_two_devices:
        "second-device-unlinked" on [3], all_but_the_victim_succeed;
    a_rank_killed_before_the_first_use_of_a_second_device_fails_what_is_posted_on_both:
        "second-device-late" on [3], all_but_the_victim_succeed;
    a_rank_killed_while_others_wait_in_a_barrier_fails_it_on_all_of_them: "barrier" on [3, 5],
        all_but_the_victim_succeed;
    a_rank_killed_while_a_peer_sleeps_wakes_it: "asleep" on [3], all_but_the_victim_succeed;
    a_rank_killed_in_the_midst_of_large_messages_ends_them:
        "large-auto" on [3, 3, 3, 3], all_but_the_victim_succeed;
    a_rank_killed_while_parts_of_messages_are_in_flight_ends_them: "large-off" on [3, 3, 3, 3],
        all_but_the_victim_succeed;
}

// ---- the ranks' side ----------------------------------------------------------------------------

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    if role.name == "descriptors" {
        return descriptors(role);
    }
    if role.name == "unstarted" {
        return unstarted(role);
    }
    if role.name == "drops" {
        return drops(role);
    }
    let kernel_copy = if role.name == "large-off" { AutoChoice::Off } else { AutoChoice::Auto };
    let settings = settings_of(&role).setting("kernel_copy", kernel_copy);
    let me = RoleRank::start(role, settings);
    match &*me.role.name {
        "all_to_all" => all_to_all(&me),
        "collectives" => collectives(&me),
        "gather" => gather(&me),
        "gather-killed" => gather_killed(&me),
        "uneven" => uneven(&me),
        "idle" => idle(&me),
        "silent" => silent(&me),
        "absent" => absent(&me),
        "second-device" | "second-device-unlinked" | "second-device-late" => second_device(&me),
        "connected" => connected(&me),
        "stream" => stream(&me),
        "full" => full(&me),
        "handler" => handler(&me),
        "barrier" => barrier(&me),
        "asleep" => asleep(&me),
        "large-auto" | "large-off" => large(&me),
        other => panic!("no role {other}"),
    }
}

/// A rank in its role.
struct RoleRank {
    role: Role,
    folder: Folder,
    runtime: Runtime,
    ranks: [Runtime; 1],
}

impl RoleRank {
    fn start(role: Role, settings: SettingsBuilder) -> Self {
        let runtime = role.runtime(settings);
        Self { folder: role.bootstrap(), role, ranks: [runtime.clone()], runtime }
    }

    fn rank(&self) -> Rank {
        self.runtime.rank()
    }

    fn is_victim(&self) -> bool {
        self.rank() == VICTIM
    }

    fn says(&self, what: &str) {
        self.role.says(what);
    }

    /// Makes progress until some rank has said something.
    fn hears(&self, what: &str, from: u32) {
        until(&self.ranks, || self.role.has_said(what, from));
    }

    /// Waits until all ranks are here; progress goes on meanwhile.
    fn meet(&self, what: &str) {
        self.role.meet(what, &self.runtime, 0..self.runtime.size());
    }

    /// Waits until the survivors are here.
    fn survivors_meet(&self, what: &str) {
        let survivors = (0..self.runtime.size()).filter(|rank| *rank != VICTIM.0);
        self.role.meet(what, &self.runtime, survivors);
    }

    /// Messages between the survivors arrive, to the last byte.
    fn others_go_on(&self) {
        self.survivors_meet("going on");
        // In pairs; of an odd number the last talks to itself.
        let others: Vec<u32> = (0..self.runtime.size()).filter(|rank| *rank != VICTIM.0).collect();
        let at = others.iter().position(|rank| *rank == self.rank().0).unwrap();
        let other = Rank(*others.get(at ^ 1).unwrap_or(&self.rank().0));
        for number in 0..100 {
            let message = pattern(number, (number * 37 % 3000) as usize);
            let mut recv = self.runtime.post_recv(other, vec![0; 3000], Tag(1 << 40));
            sent(&self.ranks, || {
                self.runtime.post_send(other, &message[..], Tag(1 << 40)).try_submit()
            });
            assert_eq!(recv.wait().unwrap().bytes().unwrap(), message);
        }
        self.survivors_meet("gone on");
    }

    fn receive_from_victim(&self, sink: &Sink) {
        let recv = self.runtime.post_recv(VICTIM, vec![0; 100], Tag(9)).comp(sink).try_submit();
        assert!(recv.unwrap().is_posted());
    }

    fn ends_badly(&self, sink: &Sink) {
        is_down(sink.one(&self.ranks));
        assert!(self.runtime.peer_down(VICTIM).is_some());
        // And once it is known, at once.
        self.receive_from_victim(sink);
        is_down(sink.one(&self.ranks));
        let error = self.runtime.post_send(VICTIM, b"x", Tag(1)).try_submit().unwrap_err();
        assert!(matches!(error, PostError::PeerDown { rank: VICTIM, .. }), "{error}");
    }
}

#[track_caller]
fn is_down(status: Status) {
    let error = status.ok().expect_err("the victim is dead");
    assert!(matches!(error, OpError::PeerDown { rank: VICTIM, .. }), "{error}");
}

fn all_to_all(me: &RoleRank) {
    const EACH: u64 = 200;
    let (rank, size) = (u64::from(me.rank().0), me.runtime.size());
    let got = Arc::new(Mutex::new(vec![0_u64; size as usize]));
    let handler = {
        let got = got.clone();
        Handler::new(move |status| {
            let mut got = got.lock();
            let next = &mut got[status.rank.0 as usize];
            assert_eq!(status.tag, Tag(*next), "in order");
            let seed = u64::from(status.rank.0) << 32 | *next;
            assert_eq!(status.bytes().unwrap(), pattern(seed, (seed * 131 % 8193) as usize));
            *next += 1;
        })
    };
    let name = me.runtime.register_comp(&handler).unwrap();
    me.runtime.barrier().unwrap();
    let arrived = CompQueue::new(4096);
    for from in 0..size {
        for number in 0..EACH {
            let mut recv =
                me.runtime.post_recv(Rank(from), vec![0; 600], Tag(number)).comp(&arrived);
            recv.submit().unwrap();
        }
    }
    for number in 0..EACH {
        for to in 0..size {
            let seed = rank << 32 | number;
            let long = pattern(seed, (seed * 131 % 8193) as usize);
            sent(&me.ranks, || {
                me.runtime.post_am(Rank(to), &long[..], name).tag(Tag(number)).try_submit()
            });
            let short = pattern(!seed, (seed % 500) as usize);
            sent(&me.ranks, || {
                me.runtime.post_send(Rank(to), &short[..], Tag(number)).try_submit()
            });
        }
    }
    let mut met = 0;
    until(&me.ranks, || {
        while let Some(status) = arrived.pop() {
            let seed = u64::from(status.rank.0) << 32 | status.tag.0;
            assert_eq!(status.bytes().unwrap(), pattern(!seed, (seed % 500) as usize));
            met += 1;
        }
        met == EACH * u64::from(size) && got.lock().iter().all(|got| *got == EACH)
    });
    // No rank leaves before all are done.
    me.runtime.barrier().unwrap();
}

fn collectives(me: &RoleRank) {
    for round in 0..20_u64 {
        let key = format!("before/{round}/{}", me.rank().0);
        me.folder.put(&key, b"").unwrap();
        me.runtime.barrier().unwrap();
        for rank in 0..me.runtime.size() {
            let there = me.folder.get(&format!("before/{round}/{rank}")).unwrap();
            assert!(there.is_some(), "rank {rank} had not reached the barrier");
        }
        let len = [0, 1, 300, 20_000][round as usize % 4];
        let all = me.runtime.allgather(&pattern(round << 8 | u64::from(me.rank().0), len)).unwrap();
        assert_eq!(all.len(), me.runtime.size() as usize);
        for (rank, bytes) in all.iter().enumerate() {
            assert_eq!(*bytes, pattern(round << 8 | rank as u64, len));
        }
    }
    me.meet("over");
}

/// Runs the role: each rank sends one message to a queue of rank 0 that has room for one less. All
/// meet before any is taken.
fn gather(me: &RoleRank) {
    let inbox = CompQueue::new(16);
    let name = me.runtime.register_comp(&inbox).unwrap();
    me.runtime.barrier().unwrap();
    let mine = pattern(u64::from(me.rank().0), 100);
    let mut am = me.runtime.post_am(Rank(0), &mine[..], name);
    while am.try_submit().unwrap().is_retry() {
        let _ = me.runtime.progress();
    }
    me.runtime.barrier().unwrap();
    if me.rank() == Rank(0) {
        let mut from = Vec::new();
        until_with_errors(&me.ranks, || {
            from.extend(std::iter::from_fn(|| inbox.pop()).map(|status| {
                assert_eq!(status.bytes().unwrap(), pattern(u64::from(status.rank.0), 100));
                status.rank.0
            }));
            from.len() == me.runtime.size() as usize
        });
        from.sort_unstable();
        assert_eq!(from, (0..me.runtime.size()).collect::<Vec<_>>());
    }
    me.runtime.barrier().unwrap();
}

/// Runs the role: the victim fills a queue of rank 0, offers a large message to it, and dies before
/// any is taken.
fn gather_killed(me: &RoleRank) {
    const SENT: u64 = 50;
    let inbox = CompQueue::new(4);
    let name = me.runtime.register_comp(&inbox).unwrap();
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        for at in 0..SENT {
            let mut am = me.runtime.post_am(Rank(0), pattern(at, 100), name).tag(Tag(at));
            while am.try_submit().unwrap().is_retry() {
                let _ = me.runtime.progress();
            }
        }
        let offered =
            me.runtime.post_am(Rank(0), pattern(SENT, 1 << 20), name).tag(Tag(SENT)).try_submit();
        assert!(offered.unwrap().is_posted());
        me.hears("all are here", 0);
        die();
    }
    if me.rank() == Rank(0) {
        let waits = SENT as usize + 1 - inbox.capacity();
        until_with_errors(&me.ranks, || me.runtime.pending().deferred == waits);
        me.says("all are here");
        until_with_errors(&me.ranks, || {
            matches!(me.runtime.peer_state(VICTIM), PeerState::Down(_))
        });
        let mut next = 0;
        until_with_errors(&me.ranks, || {
            let is_gone = me.runtime.peer_down(VICTIM).is_some();
            for status in std::iter::from_fn(|| inbox.pop()) {
                assert_eq!(
                    (status.tag, status.bytes().unwrap()),
                    (Tag(next), &pattern(next, 100)[..])
                );
                next += 1;
            }
            is_gone
        });
        assert_eq!(
            (next, me.runtime.pending().deferred),
            (SENT, 0),
            "its end is told behind its messages"
        );
    }
    me.others_go_on();
}

fn uneven(me: &RoleRank) {
    let error = me.runtime.allgather(&vec![1; if me.rank().0 == 1 { 3 } else { 4 }]).unwrap_err();
    assert!(matches!(error, CollectiveError::Uneven { .. }), "{error}");
    me.meet("over");
}

fn idle(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    let used = || {
        // SAFETY: fills in what it is given.
        let usage = unsafe {
            let mut usage = std::mem::zeroed::<libc::rusage>();
            assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
            usage
        };
        let micros = |time: libc::timeval| time.tv_sec * 1_000_000 + time.tv_usec;
        micros(usage.ru_utime) + micros(usage.ru_stime)
    };
    let before = used();
    assert!(me.runtime.wait_for(Duration::from_secs(1), || false).is_err());
    let burnt = used() - before;
    assert!(burnt < 100_000, "{burnt} µs of a second");
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(resident < 32 << 10, "{resident} KiB resident");
    me.runtime.barrier().unwrap();
}

fn descriptors(role: Role) {
    let size = role.size;
    let count = || listing("/proc/self/fd").len();
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("carrack-").count();
    let before = (count(), mapped());
    let (settings, is_shm) = (settings_of(&role), role.words == [SHM]);
    let me = RoleRank::start(role, settings);
    me.runtime.barrier().unwrap();
    for to in 0..size {
        sent(&me.ranks, || me.runtime.post_send(Rank(to), &[1; 3000][..], Tag(1)).try_submit());
    }
    for from in 0..size {
        assert_eq!(
            me.runtime.post_recv(Rank(from), vec![0; 3000], Tag(1)).wait().unwrap().size,
            3000
        );
    }
    assert!(count() > before.0 && (mapped() > before.1) == is_shm);
    me.runtime.barrier().unwrap();
    me.meet("over");
    drop(me);
    assert_eq!((count(), mapped()), before);
}

/// Runs the role: rank 0 drops its runtime while rank 1's kernel copies what it puts, and has
/// another use for the buffer then.
fn drops(role: Role) {
    const LEN: usize = 32 << 20;
    const PUT: u8 = 0x11;
    const LATER: u8 = 0xee;
    let settings = settings_of(&role);
    let me = RoleRank::start(role, settings);
    let rank = me.rank();
    let region = Region::host(LEN);
    region.whole().write(&vec![0; LEN]).unwrap();
    let registered = me.runtime.register_memory(&region).unwrap();
    let rmrs = me.runtime.allgather(&registered.remote_key().to_bytes()).unwrap();
    let RoleRank { role, runtime, ranks, .. } = me;
    drop(ranks);
    if rank == Rank(1) {
        until(std::slice::from_ref(&runtime), || role.has_said("another use", 0));
        until(std::slice::from_ref(&runtime), || runtime.peer_down(Rank(0)).is_some());
        let held = region.whole().to_vec().unwrap();
        assert!(
            held.iter().all(|byte| [0, PUT].contains(byte)),
            "it holds what the buffer held later"
        );
        return role.says("looked");
    }
    let rmr = RemoteKey::from_bytes(&rmrs[1]).unwrap();
    let done = Sink::keeping();
    let mut put = runtime.post_put(Rank(1), vec![PUT; LEN], &rmr, 0).comp(&done);
    put.submit().unwrap();
    drop(put);
    // At another moment of the copy in each job.
    std::thread::sleep(Duration::from_micros(u64::from(std::process::id()) % 40 * 100));
    drop((registered, runtime));
    let mut statuses = done.take();
    assert_eq!(statuses.len(), 1, "the put ends once");
    if let Buffer::Vec(buffer) = &mut statuses[0].buffer {
        buffer.fill(LATER);
    }
    role.says("another use");
    let start = Instant::now();
    while !role.has_said("looked", 1) {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn silent(me: &RoleRank) {
    let sink = Sink::keeping();
    if me.is_victim() {
        me.says("here");
        // Both know that it is there, and one has spoken to it.
        me.folder.fence().unwrap();
        die();
    }
    me.hears("here", VICTIM.0);
    me.folder.fence().unwrap();
    let mut send = me.runtime.post_send(VICTIM, b"anybody?", Tag(1)).comp(&sink);
    match send.submit() {
        Ok(()) => is_down(sink.one(&me.ranks)),
        Err(error) => assert!(matches!(error, PostError::PeerDown { rank: VICTIM, .. }), "{error}"),
    }
    me.receive_from_victim(&sink);
    is_down(sink.one(&me.ranks));
    me.others_go_on();
}

fn absent(me: &RoleRank) {
    if me.is_victim() {
        me.says("here");
        me.hears("waiting", 0);
        me.hears("waiting", 1);
        die();
    }
    me.hears("here", VICTIM.0);
    let sink = Sink::keeping();
    me.receive_from_victim(&sink);
    me.says("waiting");
    is_down(sink.one(&me.ranks));
    me.others_go_on();
}

/// Runs the role: the survivors have a second device, the victim has none. Operations are posted
/// before it is killed, or behind that, with or without links to its default device.
fn second_device(me: &RoleRank) {
    let (is_linked, is_late) = match &*me.role.name {
        "second-device-unlinked" => (false, true),
        name => (true, name == "second-device-late"),
    };
    let survivors = [0, 1];
    let hello = |to| {
        let mut send = me.runtime.post_send(Rank(to), b"hello", Tag(1));
        sent(&me.ranks, || send.try_submit());
    };
    if me.is_victim() {
        if is_linked {
            survivors.into_iter().for_each(hello);
        }
        me.folder.put("victim", &std::process::id().to_le_bytes()).unwrap();
        survivors.into_iter().for_each(|from| me.hears("ready", from));
        die();
    }
    let second = me.runtime.device().build().unwrap();
    if is_linked {
        let mut recv = me.runtime.post_recv(VICTIM, vec![0; 5], Tag(1));
        assert_eq!(recv.wait().unwrap().bytes().unwrap(), b"hello");
        hello(VICTIM.0);
    }
    if is_late {
        me.says("ready");
        // Without progress, so nothing is known of the end.
        let pid = std::iter::repeat_with(|| me.folder.get("victim").unwrap()).flatten().next();
        let pid = u32::from_le_bytes(pid.unwrap().try_into().unwrap());
        while state_of(pid).is_some_and(|state| state != 'Z') {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let sink = Sink::keeping();
    let waits_on = |device| {
        let recv = me.runtime.post_recv(VICTIM, vec![0; 5], Tag(2));
        recv.device(device).comp(&sink).submit().unwrap();
        let send = me.runtime.post_send(VICTIM, vec![0; 5], Tag(2));
        send.device(device).comp(&sink).submit().unwrap();
    };
    me.receive_from_victim(&sink);
    waits_on(&second);
    if !is_late {
        me.says("ready");
    }
    until(&me.ranks, || sink.count() == 3);
    sink.take().into_iter().for_each(is_down);
    // A device that is made when the end is known.
    waits_on(&me.runtime.device().build().unwrap());
    until(&me.ranks, || sink.count() == 2);
    sink.take().into_iter().for_each(is_down);
    me.others_go_on();
}

fn unstarted(role: Role) {
    if role.rank == VICTIM.0 {
        (0..2).for_each(|other| drop(role.told("waiting", other)));
        let _runtime = role.runtime(settings_of(&role));
        // The others find it here, or find that it was here.
        std::thread::sleep(Duration::from_millis(20));
        die();
    }
    let settings = settings_of(&role);
    let me = RoleRank::start(role, settings);
    let sink = Sink::keeping();
    me.receive_from_victim(&sink);
    me.says("waiting");
    me.runtime.wait(|| sink.count() > 0).unwrap();
    is_down(sink.one(&me.ranks));
    me.others_go_on();
}

fn connected(me: &RoleRank) {
    let sink = Sink::keeping();
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        me.hears("waiting", 0);
        me.hears("waiting", 1);
        die();
    }
    let before = listing("/proc/self/fd").len();
    me.receive_from_victim(&sink);
    me.says("waiting");
    me.ends_badly(&sink);
    let after = listing("/proc/self/fd").len();
    assert!(
        after < before,
        "the descriptors of its link are still open: {before} and then {after}"
    );
    me.others_go_on();
}

fn stream(me: &RoleRank) {
    const COUNT: u64 = 500;
    let size = |number: u64| [8, 100, 5000][number as usize % 3];
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        for number in 0..COUNT {
            let message = pattern(number, size(number));
            for to in 0..2 {
                sent(&me.ranks, || {
                    me.runtime.post_send(Rank(to), &message[..], Tag(9)).try_submit()
                });
            }
        }
        die();
    }
    let sink = Sink::keeping();
    for number in 0..=COUNT {
        let mut recv = me.runtime.post_recv(VICTIM, vec![0; 5000], Tag(9)).comp(&sink);
        recv = recv.user_context(carrack::UserContext(number));
        match recv.try_submit().unwrap() {
            Outcome::Done(status) => {
                assert_eq!(status.bytes().unwrap(), pattern(number, size(number)))
            }
            Outcome::Posted => {
                let status = sink.one(&me.ranks);
                if me.role.words == [TCP] && status.error.is_some() {
                    // What the victim had gathered has died with it; what came before is here.
                    is_down(status);
                    break;
                }
                if number < COUNT {
                    assert!(status.error.is_none(), "message {number}: {status:?}");
                    assert_eq!(status.bytes().unwrap(), pattern(number, size(number)));
                } else {
                    is_down(status);
                }
            }
            Outcome::Retry(reason) => panic!("{reason:?}"),
        }
    }
    me.others_go_on();
}

fn full(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        // Not a message is taken in from here on.
        me.says("deaf");
        while !(me.role.has_said("full", 0) && me.role.has_said("full", 1)) {
            std::thread::yield_now();
        }
        die();
    }
    me.hears("deaf", VICTIM.0);
    let sink = Sink::keeping();
    while !me.runtime.post_send(VICTIM, &[3; 1000][..], Tag(1)).try_submit().unwrap().is_retry() {}
    while !me.runtime.post_send(VICTIM, &[3; 8][..], Tag(1)).try_submit().unwrap().is_retry() {}
    for number in 0..50 {
        let mut send = me.runtime.post_send(VICTIM, vec![4; 10 * number], Tag(1)).comp(&sink);
        send = send.user_context(carrack::UserContext(number as u64));
        send.submit().unwrap();
    }
    me.says("full");
    until(&me.ranks, || sink.count() == 50);
    for (number, status) in sink.take().into_iter().enumerate() {
        assert_eq!((status.user_context.0, status.buffer.len()), (number as u64, 10 * number));
        is_down(status);
    }
    me.receive_from_victim(&sink);
    me.ends_badly(&sink);
    me.others_go_on();
}

fn handler(me: &RoleRank) {
    let handler = Handler::new(|_| die());
    let name = me.runtime.register_comp(&handler).unwrap();
    me.runtime.barrier().unwrap();
    let sink = Sink::keeping();
    if me.is_victim() {
        until(&me.ranks, || false);
    }
    me.receive_from_victim(&sink);
    if me.rank() == Rank(0) {
        me.hears("waiting", 1);
        sent(&me.ranks, || me.runtime.post_am(VICTIM, b"die", name).try_submit());
    } else {
        me.says("waiting");
    }
    me.ends_badly(&sink);
    me.others_go_on();
}

fn barrier(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        let survivors = (0..me.runtime.size()).filter(|rank| *rank != VICTIM.0);
        survivors.for_each(|rank| me.hears("waiting", rank));
        die();
    }
    me.says("waiting");
    let error = me.runtime.barrier().unwrap_err();
    let named = matches!(
        &error,
        CollectiveError::Op { cause: OpError::PeerDown { rank: VICTIM, .. }, .. }
            | CollectiveError::Post { cause: PostError::PeerDown { rank: VICTIM, .. }, .. }
    );
    assert!(named, "{error}");
    me.others_go_on();
}

fn asleep(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    let died = AtomicU64::new(0);
    if me.is_victim() {
        me.hears("waiting", 0);
        me.hears("waiting", 1);
        die();
    }
    let arrived = Synchronizer::new(1);
    let recv = me.runtime.post_recv(VICTIM, vec![0; 8], Tag(9)).comp(&arrived).try_submit();
    assert!(recv.unwrap().is_posted());
    me.says("waiting");
    let start = Instant::now();
    let status = arrived.wait(&me.runtime).unwrap().remove(0);
    is_down(status);
    died.store(start.elapsed().as_millis() as u64, Ordering::Relaxed);
    me.others_go_on();
}

/// Runs the role: large messages both ways, puts and gets. The victim dies at some moment of its
/// own among them.
fn large(me: &RoleRank) {
    const LEN: usize = 3 << 20;
    // Not mapped: its owner has to carry out what others want of it.
    let region = Region::host(LEN);
    let registered = me.runtime.register_memory(&region).unwrap();
    let names = me.runtime.allgather(&registered.remote_key().to_bytes()).unwrap();
    let other = if me.is_victim() { Rank(0) } else { VICTIM };
    let rmr = RemoteKey::from_bytes(&names[other.0 as usize]).unwrap();
    let sink = Sink::keeping();
    let peers: &[Rank] = if me.is_victim() { &[Rank(0), Rank(1)] } else { &[VICTIM] };
    let mut count = 0;
    for &peer in peers {
        for number in 0..4 {
            let mut receive = me.runtime.post_recv(peer, vec![0; LEN], Tag(number)).comp(&sink);
            count += begun::<LEN>(me, || receive.try_submit());
            let mut send =
                me.runtime.post_send(peer, vec![number as u8; LEN], Tag(number)).comp(&sink);
            count += begun::<LEN>(me, || send.try_submit());
        }
    }
    let mut put = me.runtime.post_put(other, vec![7; LEN], &rmr, 0).comp(&sink);
    count += begun::<LEN>(me, || put.try_submit());
    let mut get = me.runtime.post_get(other, vec![0; LEN], &rmr, 0).comp(&sink);
    count += begun::<LEN>(me, || get.try_submit());
    if me.is_victim() {
        for _ in 0..std::process::id() % 60 {
            let _ = me.runtime.progress();
        }
        die();
    }
    until(&me.ranks, || sink.count() == count && me.runtime.peer_down(VICTIM).is_some());
    sink.take().into_iter().for_each(is_right::<LEN>);
    me.others_go_on();
}

/// Checks that a successful operation has whole bytes, and that a failed one names the victim.
/// Both give their buffers back.
fn is_right<const LEN: usize>(status: Status) {
    match status.error.as_deref() {
        None => {}
        Some(OpError::PeerDown { rank: VICTIM, .. }) => {}
        Some(error) => panic!("{error}"),
    }
    assert_eq!(status.buffer.len(), LEN);
}

/// Returns the number of operations (0 or 1) that the call has put in flight. It is 0 if the
/// operation is complete at once, or the victim is known to have ended.
fn begun<const LEN: usize>(
    me: &RoleRank,
    mut call: impl FnMut() -> Result<Outcome, PostError>,
) -> usize {
    let mut gone = false;
    let outcome = posted(&me.ranks, || match call() {
        Err(PostError::PeerDown { rank: VICTIM, .. }) => {
            gone = true;
            Ok(Outcome::Posted)
        }
        other => other,
    });
    match outcome {
        _ if gone => 0,
        Outcome::Done(status) => {
            is_right::<LEN>(status);
            0
        }
        _ => 1,
    }
}
