//! Ranks whose small copies a resident kernel makes: they put to each other, and die. They run on
//! simulated GPUs, and on real ones with `TEST_GPU=cuda`.

use crate::support::copiers::{copies, until_by_copier};
use crate::support::gpu_ranks::{Gpus, completed, filled, heard, registered, told};
use crate::support::gpus::{self, are_real};
use crate::support::ranks::{Ranks, Role, die};
use crate::support::words::wrong;
use crate::support::{Job, OverShm, Watchdog};
use carrack::transports::gpu::copier::MOST;
use carrack::transports::gpu::{CopierState, Flavour, Gpu};
use carrack::transports::mem::Transfer;
use carrack::{
    CompQueue, Outcome, Piece, PostError, Rank, RemoteKey, Runtime, Strided, Synchronizer, Tag,
};
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "puts" => puts(&role),
        "notifications" => notifications(&role),
        "batches" => batches(&role),
        "kills" => kills(&role),
        "told" => told_of(&role),
        "shared" => shared(&role),
        "host" => from_the_host(&role),
        other => panic!("no role {other}"),
    }
}

/// Returns `true` if every rank has a device to itself, as copiers need.
fn are_enough() -> bool {
    if are_real() && gpus::TestDriver::new().gpus.len() < 2 {
        println!("skipped: each of two ranks needs a GPU of its own");
        return false;
    }
    true
}

fn run(name: &str, words: &[u64]) -> Option<Ranks> {
    are_enough().then(|| Ranks::start(&format!("gpu_copier_ranks::{name}"), 2, words))
}

#[test]
fn puts_and_messages_of_every_length_come_whole_at_odd_places_of_another_processs_memory() {
    let _watchdog = Watchdog::over("puts");
    if let Some(ranks) = run("puts", &[]) {
        ranks.succeed();
    }
}

#[test]
fn the_last_byte_is_there_when_the_notification_of_a_kernel_or_an_engine_comes() {
    let _watchdog = Watchdog::over("notifications");
    if let Some(ranks) = run("notifications", &[]) {
        ranks.succeed();
    }
}

#[test]
fn a_batch_behind_a_small_put_of_the_same_bytes_comes_last() {
    let _watchdog = Watchdog::over("batches");
    if let Some(ranks) = run("batches", &[]) {
        ranks.succeed();
    }
}

#[test]
fn a_rank_that_is_killed_under_a_stream_of_small_puts_costs_the_other_nothing_of_its_own() {
    let _watchdog = Watchdog::over("kills");
    for victim in 0..2 {
        if let Some(ranks) = run("kills", &[victim]) {
            ranks.succeed_except(Rank(victim as u32));
        }
    }
}

#[test]
fn explain_tells_of_the_copier() {
    let _watchdog = Watchdog::over("told");
    if let Some(ranks) = run("told", &[]) {
        ranks.succeed();
    }
}

/// On real GPUs the ranks detect each other. Simulated ones have no claims, so the test injects
/// them.
#[test]
fn ranks_that_share_a_gpu_lose_no_copy_over_it_and_tell_why_they_have_no_copier() {
    let _watchdog = Watchdog::over("shared");
    Ranks::start("gpu_copier_ranks::shared", 2, &[]).succeed();
}

/// A rank accesses the other's memory from its host memory by the GPU that it works with.
#[test]
fn a_put_from_host_memory_to_the_others_gpu_takes_that_ones_copier_from_it_neither_there_nor_here()
{
    let _watchdog = Watchdog::over("from the host");
    if let Some(ranks) = run("host", &[]) {
        ranks.succeed();
    }
}

// ---- roles --------------------------------------------------------------------------------------

fn runtime(role: &Role) -> Runtime {
    role.runtime(OverShm::settings().gpu(gpus::choice()).gpu_copier(true))
}

/// Returns the device that is this rank's alone.
fn own_gpu(role: &Role, runtime: &Runtime) -> Arc<dyn Gpu> {
    gpus::of(runtime).swap_remove(role.rank as usize % 2)
}

fn put(runtime: &Runtime, source: carrack::Buffer, rmr: &RemoteKey, at: u64) {
    let mut source = Some(source);
    let status = completed(runtime, |done| {
        runtime.post_put(rmr.owner(), source.take().unwrap(), rmr, at).comp(done).submit()
    });
    status.unwrap().ok().unwrap();
}

const ROOM: usize = MOST + 256;

fn puts(role: &Role) {
    let runtime = runtime(role);
    let gpu = own_gpu(role, &runtime);
    let region = gpu.allocate(ROOM, Flavour::Plain).unwrap();
    let lengths: Vec<usize> =
        (0..=33).chain([63, 511, 512, 513, 2048, 4097, 8191, MOST, MOST + 1]).collect();
    if role.rank == 1 {
        let _mr = registered(role, &runtime, "memory", &region);
        heard(role, &runtime, "put", 0);
        // What is fetched, is by the receiver's engine, or by its copier.
        for (turn, &len) in lengths.iter().enumerate() {
            let into = region.slice(16, len).unwrap();
            let mut into = Some(into);
            let got = completed(&runtime, |done| {
                runtime
                    .post_recv(Rank(0), into.take().unwrap(), Tag(turn as u64))
                    .comp(done)
                    .submit()
            });
            let status = got.unwrap().ok().unwrap();
            assert_eq!(
                wrong(&status.buffer.to_vec().unwrap()[..len], turn as u64, 0),
                None,
                "{len} B"
            );
        }
        role.meet("over", &runtime, 0..2);
        return;
    }
    let rmr = told(role, "memory", 1);
    for (turn, &len) in lengths.iter().enumerate() {
        for (at, from) in [(16, 0), (33, 17), (64, 4), (7, 2)] {
            // A whole word's pattern, read from the source's place.
            let bytes = filled(ROOM, turn as u64);
            region.whole().write(&bytes).unwrap();
            put(&runtime, vec![0xee; ROOM].into(), &rmr, 0);
            let go = || put(&runtime, region.slice(from, len).unwrap().into(), &rmr, at as u64);
            let limit = match (at ^ from) % 16 {
                0 => MOST,
                apart if apart % 4 == 0 => 2048,
                _ => 512,
            };
            if (1..=limit).contains(&len) {
                until_by_copier(&gpus::of(&runtime), go)
            } else {
                go()
            }
            let mut there = Some(vec![0; ROOM]);
            let got = completed(&runtime, |done| {
                runtime.post_get(Rank(1), there.take().unwrap(), &rmr, 0).comp(done).submit()
            });
            let got = got.unwrap().ok().unwrap().buffer.to_vec().unwrap();
            assert!(got[at..][..len] == bytes[from..][..len], "{len} B to {at}");
            let around = got[..at].iter().chain(&got[at + len..]);
            assert!(around.clone().all(|&byte| byte == 0xee), "around {len} B at {at}");
        }
    }
    role.says("put");
    for (turn, &len) in lengths.iter().enumerate() {
        let source = gpu.allocate(ROOM, Flavour::Plain).unwrap().slice(0, len).unwrap();
        source.write(&filled(len, turn as u64)).unwrap();
        let mut source = Some(source);
        let sent = completed(&runtime, |done| {
            let post = runtime.post_send(Rank(1), source.take().unwrap(), Tag(turn as u64));
            post.comp(done).submit()
        });
        sent.unwrap().ok().unwrap();
    }
    role.meet("over", &runtime, 0..2);
}

fn from_the_host(role: &Role) {
    let runtime = runtime(role);
    let gpu = own_gpu(role, &runtime);
    let [target, source] = [0, 1].map(|_| gpu.allocate(ROOM, Flavour::Plain).unwrap());
    let within = || {
        let [to, from] = [&target, &source].map(|region| region.slice(0, 64).unwrap());
        let mut transfer = Transfer::between(to, from).unwrap();
        while transfer.poll().is_none() {
            std::thread::yield_now();
        }
    };
    let own = [Arc::clone(&gpu)];
    until_by_copier(&own, within);
    let _mr = registered(role, &runtime, "memory", &target);
    let rmr = told(role, "memory", 1 - role.rank);
    for turn in 0..10 {
        put(&runtime, filled(ROOM, turn).into(), &rmr, 0);
        role.says(&format!("put {turn}"));
        heard(role, &runtime, &format!("put {turn}"), 1 - role.rank);
        assert_eq!(wrong(&target.whole().to_vec().unwrap(), turn, 0), None);
        role.says(&format!("seen {turn}"));
        heard(role, &runtime, &format!("seen {turn}"), 1 - role.rank);
    }
    for other in gpus::of(&runtime).iter().filter(|other| other.info().uuid != gpu.info().uuid) {
        assert_eq!(other.copier(), CopierState::Wanted, "the other's GPU is not worked with");
    }
    until_by_copier(&own, within);
    role.meet("over", &runtime, 0..2);
}

const TURNS: u64 = 400;

/// Runs the role: small and big puts in turn, each over the whole of what came before, each with a
/// notification.
fn notifications(role: &Role) {
    let runtime = runtime(role);
    let gpu = own_gpu(role, &runtime);
    const BIG: usize = 1 << 20;
    let region = gpu.allocate(BIG, Flavour::Plain).unwrap();
    let notifications = CompQueue::new(64);
    // Both ranks make their objects in the same order.
    let name = runtime.register_comp(&notifications).unwrap();
    let len_of = |turn: u64| if turn.is_multiple_of(3) { BIG } else { 8 << (turn % 10) };
    if role.rank == 1 {
        let mr = registered(role, &runtime, "memory", &region);
        for turn in 0..TURNS {
            runtime.wait_for(PATIENCE, || !notifications.is_empty()).unwrap();
            let status = notifications.pop().unwrap().ok().unwrap();
            assert_eq!((status.tag, status.size), (Tag(turn), len_of(turn)));
            let came = region.slice(0, status.size).unwrap().to_vec().unwrap();
            assert_eq!(wrong(&came, turn, 0), None, "turn {turn}");
            role.says(&format!("checked {turn}"));
        }
        heard(role, &runtime, "put by the copier", 0);
        drop(mr);
    } else {
        let rmr = told(role, "memory", 1);
        for turn in 0..TURNS {
            let len = len_of(turn);
            region.slice(0, len).unwrap().write(&filled(len, turn)).unwrap();
            let mut source = region.slice(0, len);
            let status = completed(&runtime, |done| {
                let post = runtime.post_put(Rank(1), source.take().unwrap(), &rmr, 0).comp(done);
                post.tag(Tag(turn)).remote_comp(name).submit()
            });
            status.unwrap().ok().unwrap();
            heard(role, &runtime, &format!("checked {turn}"), 1);
        }
        until_by_copier(&gpus::of(&runtime), || {
            put(&runtime, region.slice(0, 8).unwrap().into(), &rmr, 0)
        });
        role.says("put by the copier");
    }
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: a put that the kernel has, and right behind it pieces over every other part. The
/// pieces are a batch, or a strided block.
fn batches(role: &Role) {
    const PIECES: usize = 64;
    const ALL: usize = 64 * PIECES;
    let runtime = runtime(role);
    let gpu = own_gpu(role, &runtime);
    let [under, over] = [0, 1].map(|_| gpu.allocate(ALL, Flavour::Plain).unwrap());
    if role.rank == 1 {
        let _mr = registered(role, &runtime, "memory", &under);
        role.meet("over", &runtime, 0..2);
        return;
    }
    let rmr = told(role, "memory", 1);
    let gpus = gpus::of(&runtime);
    until_by_copier(&gpus, || put(&runtime, under.slice(0, ALL).unwrap().into(), &rmr, 0));
    // The last first: so they are no rows of a grid.
    let piece = |at: usize| Piece {
        local: &over,
        range: 64 * at..64 * at + 32,
        rmr: &rmr,
        offset: 64 * at as u64,
    };
    let pieces: Vec<_> = (0..PIECES).rev().map(piece).collect();
    let block = Strided { offset: 0, count: [32, PIECES, 1], pitch: [64, 0] };
    let mut kernels = 0;
    for turn in 0_u64.. {
        let (low, high) = (filled(ALL, 2 * turn), filled(ALL, 2 * turn + 1));
        under.whole().write(&low).unwrap();
        over.whole().write(&high).unwrap();
        let both = Synchronizer::new(2);
        let before = copies(&gpus);
        let mut first =
            runtime.post_put(Rank(1), under.slice(0, ALL).unwrap(), &rmr, 0).comp(&both);
        first.submit().unwrap();
        let by_kernel = copies(&gpus) > before;
        let second = match turn % 2 {
            0 => runtime.post_put_batch(Rank(1), &pieces),
            _ => runtime.post_put_strided(Rank(1), &over, &block, &rmr, &block),
        };
        second.comp(&both).submit().unwrap();
        let ended = both.wait(&runtime).unwrap();
        assert!(ended.len() == 2 && ended.iter().all(|status| status.error.is_none()), "{ended:?}");
        // A simulated device's engines have no order among themselves.
        if by_kernel || are_real() {
            let got = runtime.post_get(Rank(1), vec![0; ALL], &rmr, 0).wait().unwrap();
            let got = got.buffer.to_vec().unwrap();
            for at in 0..PIECES {
                let (row, low, high) =
                    (&got[64 * at..][..64], &low[64 * at..][..64], &high[64 * at..][..64]);
                assert!(
                    row[..32] == high[..32] && row[32..] == low[32..],
                    "turn {turn}, piece {at}"
                );
            }
        }
        kernels += u32::from(by_kernel);
        if kernels >= 100 {
            break;
        }
    }
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: both ranks put to each other without a pause, until one is killed.
fn kills(role: &Role) {
    let victim = role.words[0] as u32;
    let runtime = runtime(role);
    let gpu = own_gpu(role, &runtime);
    let (target, source) =
        (gpu.allocate(MOST, Flavour::Plain).unwrap(), gpu.allocate(MOST, Flavour::Plain));
    let source = source.unwrap();
    let _mr = registered(role, &runtime, "memory", &target);
    let other = Rank(1 - role.rank);
    let rmr = told(role, "memory", other.0);
    until_by_copier(&gpus::of(&runtime), || {
        put(&runtime, source.slice(0, 64).unwrap().into(), &rmr, 0)
    });
    role.says("began");
    heard(role, &runtime, "began", other.0);
    for turn in 0_usize.. {
        let done = Synchronizer::new(1);
        let len = 1 + turn * 97 % MOST;
        match runtime
            .post_put(other, source.slice(0, len).unwrap(), &rmr, 0)
            .comp(&done)
            .try_submit()
        {
            Ok(Outcome::Posted) => {
                runtime.wait_for(PATIENCE, || done.test()).expect("every put ends");
                drop(done.take());
            }
            Ok(Outcome::Done(_)) => {}
            Ok(Outcome::Retry(_)) => drop(runtime.progress()),
            Err(PostError::PeerDown { rank, .. }) if rank == other && victim == other.0 => break,
            Err(error) => panic!("{error}"),
        }
        if victim == role.rank && turn == 500 {
            die();
        }
    }
    // What is its own goes on, by the copier, too.
    let copy = || {
        let part = |at| source.slice(at, 8).unwrap();
        part(0).write(b"its own.").unwrap();
        let mut transfer = Transfer::between(part(64), part(0)).unwrap();
        while transfer.poll().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(part(64).to_vec().unwrap(), b"its own.");
    };
    until_by_copier(&gpus::of(&runtime), copy);
    drop(rmr);
}

/// Returns the paths of GPU memory to the other rank.
fn ways(runtime: &Runtime) -> Vec<String> {
    let peers = runtime.explain(Duration::from_secs(60));
    let kinds = peers.into_iter().flat_map(|peer| peer.kinds);
    kinds.filter(|kind| kind.memory.starts_with("device")).map(|kind| kind.way).collect()
}

/// Runs the role with both ranks on the first GPU. The first rank's copier is given up while it has
/// copies, and the second rank never has one.
fn shared(role: &Role) {
    const AT_ONCE: usize = 16;
    const CELL: usize = 64;
    let gpus = Gpus::here();
    let runtime = gpus.rank(OverShm::settings().gpu_copier(true), Box::new(role.bootstrap()));
    let gpu = &gpus.all[0];
    let [target, source] = [0, 1].map(|_| gpu.allocate(AT_ONCE * CELL, Flavour::Plain).unwrap());
    let _mr = registered(role, &runtime, "memory", &target);
    let other = Rank(1 - role.rank);
    let rmr = told(role, "memory", other.0);
    // Puts to all cells, in flight together, and checks the arrival of each.
    let mut turns = 0;
    let mut puts = || {
        turns += 1;
        let bytes = filled(AT_ONCE * CELL, turns);
        source.whole().write(&bytes).unwrap();
        let all = Synchronizer::new(AT_ONCE);
        for at in (0..AT_ONCE).map(|cell| cell * CELL) {
            let mut post = runtime
                .post_put(other, source.slice(at, CELL).unwrap(), &rmr, at as u64)
                .comp(&all);
            post.submit().unwrap();
        }
        let ended = all.wait(&runtime).unwrap();
        assert!(
            ended.len() == AT_ONCE && ended.iter().all(|status| status.error.is_none()),
            "{ended:?}"
        );
        let mut there = Some(vec![0; AT_ONCE * CELL]);
        let got = completed(&runtime, |done| {
            runtime.post_get(other, there.take().unwrap(), &rmr, 0).comp(done).submit()
        });
        assert!(got.unwrap().ok().unwrap().buffer.to_vec().unwrap() == bytes, "turn {turns}");
    };
    if role.rank == 0 {
        while !matches!(gpu.copier(), CopierState::On { copies: 100.., .. }) {
            puts();
        }
        role.says("has a copier");
    } else {
        heard(role, &runtime, "has a copier", 0);
    }
    if let Some(fake) = &gpus.fake {
        fake.faults().share_copiers(Some(4711));
    }
    let refused = loop {
        puts();
        if let CopierState::Refused(why) = gpu.copier() {
            break why;
        }
    };
    (0..20).for_each(|_| puts());
    assert!(
        refused.starts_with("process ") && refused.contains("wants a copier on this GPU, too"),
        "{refused}"
    );
    assert!(refused.contains("CUDA_VISIBLE_DEVICES"), "{refused}");
    assert_eq!(gpu.copier(), CopierState::Refused(refused.clone()), "for good");
    if let Some(fake) = &gpus.fake {
        let launches = fake.counters().copier_launches;
        assert_eq!(
            (role.rank == 0, refused.contains("4711")),
            (launches > 0, true),
            "{launches} launches"
        );
    }
    let (ways, reason) = (ways(&runtime), format!("; no resident copier: {refused}"));
    assert!(ways.iter().any(|way| way.contains(&reason)), "{ways:?}");
    role.meet("over", &runtime, 0..2);
}

fn told_of(role: &Role) {
    let runtime = runtime(role);
    let gpu = own_gpu(role, &runtime);
    let told = || ways(&runtime);
    let before = told();
    assert!(before.iter().any(|way| way.contains("resident copier, when")), "{before:?}");
    let region = gpu.allocate(64, Flavour::Plain).unwrap();
    until_by_copier(&gpus::of(&runtime), || {
        let part = |at| region.slice(at, 8).unwrap();
        let mut transfer = Transfer::between(part(32), part(0)).unwrap();
        while transfer.poll().is_none() {
            std::thread::yield_now();
        }
    });
    assert!(matches!(gpu.copier(), CopierState::On { copies: 1.., .. }));
    let after = told();
    assert!(after.iter().any(|way| way.contains("by a resident copier")), "{after:?}");
    role.meet("over", &runtime, 0..2);
}
