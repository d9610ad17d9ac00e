//! Roles in which all ranks live.

#![expect(unsafe_code, reason = "rustix has no getrusage")]

use super::{PATIENCE, RoleRank, SHM, settings_of};
use crate::support::ranks::{Role, listing};
use crate::support::sink::Sink;
use crate::support::*;
use carrack::bootstrap::Bootstrap;
use carrack::buffer::Region;
use carrack::{Buffer, CollectiveError, CompQueue, Handler, Rank, RemoteKey, Tag};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) fn all_to_all(me: &RoleRank) {
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

pub(super) fn collectives(me: &RoleRank) {
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
pub(super) fn gather(me: &RoleRank) {
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

pub(super) fn uneven(me: &RoleRank) {
    let error = me.runtime.allgather(&vec![1; if me.rank().0 == 1 { 3 } else { 4 }]).unwrap_err();
    assert!(matches!(error, CollectiveError::Uneven { .. }), "{error}");
    me.meet("over");
}

pub(super) fn idle(me: &RoleRank) {
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

pub(super) fn descriptors(role: Role) {
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
pub(super) fn drops(role: Role) {
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
