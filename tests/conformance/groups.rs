//! Groups of ranks, and their collectives.

#![allow(clippy::result_large_err, reason = "errors are what these tests are about")]

use crate::support::*;
use carrack::settings::SettingsBuilder;
use carrack::{
    CollectiveError, Group, GroupError, Handler, ProgressError, Rank, Runtime, Tag, WaitError,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

crate::support::over_each_transport!(
    groups_broadcast_gather_and_wait_apart_from_each_other,
    a_broadcast_brings_the_bytes_of_any_root_to_all,
    remote_keys_are_exchanged_also_if_they_differ_in_length,
    a_registration_of_another_runtime_is_not_exchanged_and_one_of_its_own_is_then,
    no_rank_leaves_a_barrier_before_the_last_has_come,
    collectives_can_be_awaited_several_at_a_time,
    a_group_that_makes_no_sense_is_refused,
    members_that_mean_different_lists_hear_of_it_by_name,
    members_that_call_different_operations_hear_of_it_by_name,
    a_member_in_a_barrier_and_one_that_awaits_a_broadcast_hear_of_each_other,
    members_that_wait_in_different_groups_hear_of_it_by_name,
    a_member_that_gives_up_does_not_leave_the_others_waiting,
    a_collective_that_is_refused_in_a_handler_has_not_begun,
    a_member_that_goes_fails_the_collective_on_all_others,
);

/// Runs something on each rank, each on a thread of its own. The ranks live until all are done.
fn on_each<J: Job, T: Send>(
    size: u32,
    settings: SettingsBuilder,
    work: impl Fn(&Runtime) -> T + Sync,
) -> Vec<T> {
    let ranks = J::ranks_with(size, settings);
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn on_all<J: Job, T: Send>(size: u32, work: impl Fn(&Runtime) -> T + Sync) -> Vec<T> {
    on_each::<J, T>(size, J::settings(), work)
}

fn ranks_of(numbers: &[u32]) -> Vec<Rank> {
    numbers.iter().map(|&rank| Rank(rank)).collect()
}

fn groups_broadcast_gather_and_wait_apart_from_each_other<J: Job>() {
    on_all::<J, _>(5, |rank| {
        let me = rank.rank().0;
        // Two halves that overlap in rank 2, in orders of their own, and all.
        let groups: Vec<Group> = [(1, &[2, 0, 1][..]), (2, &[3, 4, 2])]
            .into_iter()
            .filter(|(_, members)| members.contains(&me))
            .map(|(name, members)| rank.group(name, &ranks_of(members)).unwrap())
            .collect();
        for round in 0..20_u64 {
            for group in &groups {
                let members: Vec<Rank> = group.ranks().collect();
                assert_eq!(members[group.place() as usize], rank.rank());
                group.barrier().unwrap();
                let gathered =
                    group.allgather(&[me as u8, round as u8, group.name() as u8]).unwrap();
                let want: Vec<_> = members
                    .iter()
                    .map(|member| vec![member.0 as u8, round as u8, group.name() as u8])
                    .collect();
                assert_eq!(gathered, want);
                let root = members[round as usize % members.len()];
                let size = [0, 8, 5000, 100_000][round as usize % 4];
                let seed = u64::from(root.0) + 100 * round + 10_000 * u64::from(group.name());
                let mine = if root == rank.rank() { pattern(seed, size) } else { Vec::new() };
                assert_eq!(group.broadcast(root, &mine).unwrap(), pattern(seed, size));
            }
            rank.barrier().unwrap();
        }
    });
}

fn a_broadcast_brings_the_bytes_of_any_root_to_all<J: Job>() {
    for size in [1, 2, 3, 6, 8] {
        on_all::<J, _>(size, |rank| {
            let world = rank.world();
            for root in 0..size {
                for len in [0, 1, 40, 9000] {
                    let mine = if root == rank.rank().0 {
                        pattern(u64::from(root), len)
                    } else {
                        vec![9; 3]
                    };
                    assert_eq!(
                        world.broadcast(Rank(root), &mine).unwrap(),
                        pattern(u64::from(root), len)
                    );
                }
            }
        });
    }
}

fn remote_keys_are_exchanged_also_if_they_differ_in_length<J: Job>() {
    let held = on_all::<J, _>(3, |rank| {
        // Memory of the runtime's own can be mapped by others, and its key says so.
        let region = match rank.rank() {
            Rank(0) => carrack::buffer::Region::host(24),
            _ => rank.allocate(24).unwrap(),
        };
        let mr = rank.register_memory(&region).unwrap();
        let keys = rank.exchange_keys(&mr).unwrap();
        let me = rank.rank().0 as usize;
        assert_eq!(keys[me].to_bytes(), mr.remote_key().to_bytes());
        for (owner, key) in (0..).map(Rank).zip(&keys) {
            assert_eq!((key.owner(), key.len()), (owner, 24));
            rank.post_put(owner, &[me as u8 + 1; 8], key, 8 * me as u64).wait().unwrap();
        }
        rank.barrier().unwrap();
        (region.whole().to_vec().unwrap(), mr.remote_key().to_bytes().len())
    });
    assert!(held.iter().all(|(bytes, _)| *bytes == [[1; 8], [2; 8], [3; 8]].concat()));
    if J::NAME == "shm" {
        assert_ne!(held[0].1, held[1].1, "keys of one length show nothing");
    }
}

fn a_registration_of_another_runtime_is_not_exchanged_and_one_of_its_own_is_then<J: Job>() {
    let ranks = J::pair();
    let region = carrack::buffer::Region::host(8);
    let registered: Vec<_> =
        ranks.iter().map(|rank| rank.register_memory(&region).unwrap()).collect();
    std::thread::scope(|scope| {
        for (place, rank) in ranks.iter().enumerate() {
            let registered = &registered;
            scope.spawn(move || {
                // It is of the same job, and of another rank.
                let foreign = rank.exchange_keys(&registered[1 - place]);
                let Err(CollectiveError::Foreign) = &foreign else { panic!("{foreign:?}") };
                let keys = rank.exchange_keys(&registered[place]).unwrap();
                assert_eq!([keys[0].owner(), keys[1].owner()], [Rank(0), Rank(1)]);
            });
        }
    });
}

fn no_rank_leaves_a_barrier_before_the_last_has_come<J: Job>() {
    for size in [2, 3, 4, 7] {
        let inside = Mutex::new(vec![0; 30]);
        on_all::<J, _>(size, |rank| {
            for round in 0..30 {
                if round as u32 % size == rank.rank().0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                inside.lock()[round] += 1;
                rank.barrier().unwrap();
                assert_eq!(inside.lock()[round], size, "in round {round} of {size} ranks");
            }
        });
    }
}

fn collectives_can_be_awaited_several_at_a_time<J: Job>() {
    on_all::<J, _>(4, |rank| {
        let me = rank.rank();
        let (world, pair) = (rank.world(), ranks_of(if me.0 < 2 { &[0, 1] } else { &[2, 3] }));
        let pair = rank.group(5 + me.0 / 2, &pair).unwrap();
        for round in 0..10 {
            let parts = async {
                let mut one = std::pin::pin!(world.broadcast_async(Rank(1), pattern(round, 3000)));
                let mut two = std::pin::pin!(pair.allgather_async(&me.0.to_le_bytes()));
                let mut three = std::pin::pin!(world.barrier_async());
                let (mut first, mut second, mut third) = (None, None, None);
                use std::future::Future;
                use std::task::Poll;
                std::future::poll_fn(|context| {
                    if first.is_none()
                        && let Poll::Ready(ended) = one.as_mut().poll(context)
                    {
                        first = Some(ended.unwrap());
                    }
                    if second.is_none()
                        && let Poll::Ready(ended) = two.as_mut().poll(context)
                    {
                        second = Some(ended.unwrap());
                    }
                    if third.is_none()
                        && let Poll::Ready(ended) = three.as_mut().poll(context)
                    {
                        ended.unwrap();
                        third = Some(());
                    }
                    if first.is_some() && second.is_some() && third.is_some() {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
                (first.unwrap(), second.unwrap())
            };
            let (bytes, gathered) = rank.block_on(parts).unwrap();
            assert_eq!(bytes, pattern(round, 3000));
            let want: Vec<_> = pair.ranks().map(|rank| rank.0.to_le_bytes().to_vec()).collect();
            assert_eq!(gathered, want);
        }
    });
}

/// Executors move futures between threads.
#[allow(dead_code, reason = "it only has to compile")]
fn futures_can_be_sent(group: &Group, rank: &Runtime) {
    fn is_send(_: impl Send) {}
    is_send(group.barrier_async());
    is_send(group.broadcast_async(Rank(0), vec![1]));
    is_send(group.allgather_async(b"x"));
    is_send(rank.post_send(Rank(0), b"x", Tag(1)).into_future());
}

fn a_group_that_makes_no_sense_is_refused<J: Job>() {
    let ranks = J::pair();
    let make = |name, members: &[u32]| ranks[0].group(name, &ranks_of(members));
    for name in [0, 1 << 31, u32::MAX] {
        assert_eq!(
            make(name, &[0, 1]).unwrap_err(),
            GroupError::Name(name),
            "a name of the library's"
        );
    }
    assert_eq!(make(1, &[0, 1, 0]).unwrap_err(), GroupError::Twice(Rank(0)));
    assert_eq!(make(1, &[0, 2]).unwrap_err(), GroupError::NoSuchRank { rank: Rank(2), last: 1 });
    assert_eq!(make(1, &[1]).unwrap_err(), GroupError::NotMember(Rank(0)));
    let group = make(1, &[0, 1]).unwrap();
    assert_eq!(make(1, &[1, 0]).unwrap_err(), GroupError::Taken { name: 1, count: 2 });
    assert_eq!(make(1, &[0, 1]).unwrap().name(), group.name(), "the same again");
    let alone = make(2, &[0]).unwrap();
    alone.barrier().unwrap();
    assert_eq!(alone.allgather(b"me").unwrap(), [b"me"]);
    assert_eq!(alone.broadcast(Rank(0), b"me").unwrap(), b"me");
    assert!(matches!(
        alone.broadcast(Rank(1), b""),
        Err(CollectiveError::Root { rank: Rank(1), group: 2 })
    ));
}

/// Returns each rank's error.
fn errors<J: Job>(
    size: u32,
    settings: SettingsBuilder,
    work: impl Fn(&Runtime) -> Result<(), CollectiveError> + Sync,
) -> Vec<CollectiveError> {
    on_each::<J, _>(size, settings, |rank| work(rank).expect_err("they do not mean the same"))
}

fn members_that_mean_different_lists_hear_of_it_by_name<J: Job>() {
    let all = errors::<J>(3, J::settings(), |rank| {
        let members: &[u32] = if rank.rank().0 == 1 { &[0, 1] } else { &[0, 1, 2] };
        rank.group(7, &ranks_of(members)).unwrap().barrier()
    });
    let named = all.iter().filter(|error| matches!(error, CollectiveError::Mismatch { .. }));
    assert!(named.count() >= 1, "{all:?}");
    for error in &all {
        assert!(
            matches!(error, CollectiveError::Mismatch { .. } | CollectiveError::Failed { .. }),
            "{error}"
        );
    }
    let text = all.iter().map(ToString::to_string).find(|text| text.contains("members")).unwrap();
    assert!(
        text.contains("group 7") && text.contains("2 members") && text.contains("3 members"),
        "{text}"
    );
}

fn members_that_call_different_operations_hear_of_it_by_name<J: Job>() {
    let all = errors::<J>(2, J::settings(), |rank| match rank.rank().0 {
        0 => rank.barrier(),
        _ => rank.allgather(b"x").map(|_| ()),
    });
    for error in &all {
        assert!(
            matches!(error, CollectiveError::Mismatch { .. } | CollectiveError::Failed { .. }),
            "{error}"
        );
    }
    let text = all
        .iter()
        .find(|error| matches!(error, CollectiveError::Mismatch { .. }))
        .unwrap()
        .to_string();
    assert!(
        text.contains("a barrier over all ranks") && text.contains("an allgather over all ranks"),
        "{text}"
    );
}

fn a_member_in_a_barrier_and_one_that_awaits_a_broadcast_hear_of_each_other<J: Job>() {
    for size in [2, 3] {
        let all = errors::<J>(size, J::settings(), |rank| match rank.rank().0 {
            0 => rank.barrier(),
            _ => rank.world().broadcast(Rank(0), b"").map(|_| ()),
        });
        let text = all
            .iter()
            .find(|error| matches!(error, CollectiveError::Mismatch { .. }))
            .unwrap()
            .to_string();
        assert!(
            text.contains("barrier over all ranks") && text.contains("broadcast over all ranks"),
            "{text}"
        );
    }
}

fn members_that_wait_in_different_groups_hear_of_it_by_name<J: Job>() {
    let all = errors::<J>(2, J::settings().mismatch_seconds(1), |rank| {
        let groups = [1, 2].map(|name| rank.group(name, &ranks_of(&[0, 1])).unwrap());
        groups[rank.rank().0 as usize].barrier()
    });
    let text = all
        .iter()
        .find(|error| matches!(error, CollectiveError::Mismatch { .. }))
        .unwrap()
        .to_string();
    assert!(text.contains("group 1") && text.contains("group 2"), "{text}");
}

fn a_member_that_gives_up_does_not_leave_the_others_waiting<J: Job>() {
    let all = on_all::<J, _>(3, |rank| {
        if rank.rank().0 == 1 {
            drop(rank.world().barrier_async());
        } else {
            let error = rank.barrier().unwrap_err();
            // From rank 1, or from another that has heard of it before.
            assert!(matches!(error, CollectiveError::Failed { .. }), "{error}");
        }
        // The next one meets again.
        rank.barrier()
    });
    assert!(all.iter().all(Result::is_ok), "{all:?}");
}

/// The next operation of each member meets that of each other one, though others were refused
/// between.
fn a_collective_that_is_refused_in_a_handler_has_not_begun<J: Job>() {
    type Collective = fn(&Group) -> Result<(), CollectiveError>;
    const REFUSED: [Collective; 4] = [
        Group::barrier,
        |group| group.allgather(b"refused").map(drop),
        |group| group.broadcast(Rank(0), b"refused").map(drop),
        |group| group.broadcast(Rank(1), b"").map(drop),
    ];
    on_all::<J, _>(3, |rank| {
        let (world, me) = (rank.world(), rank.rank());
        for refused in REFUSED {
            world.barrier().unwrap();
            if me == Rank(0) {
                let (errors, in_handler) = (Arc::<Mutex<Vec<_>>>::default(), world.clone());
                let told = errors.clone();
                let handler = Handler::new(move |_| told.lock().extend(refused(&in_handler).err()));
                rank.post_recv(me, vec![0], Tag(7)).comp(&handler).submit().unwrap();
                assert!(rank.post_send(me, b"x", Tag(7)).submit().is_ok());
                rank.wait(|| !errors.lock().is_empty()).unwrap();
                let error = errors.lock().pop();
                assert!(
                    matches!(
                        error,
                        Some(CollectiveError::Wait {
                            cause: WaitError::Progress(ProgressError::InHandler),
                            ..
                        })
                    ),
                    "{error:?}"
                );
                let pending = rank.pending();
                assert!(pending.operations.is_empty(), "{pending}");
            }
            let all = world.allgather(&me.0.to_le_bytes()).unwrap();
            assert_eq!(all, [0_u32, 1, 2].map(|rank| rank.to_le_bytes()));
            // Zeros are bytes, and none is a number of bytes.
            let of = |rank: usize| vec![0; [3, 0, 100_000][rank]];
            let all = world.allgatherv(&of(me.0 as usize)).unwrap();
            assert_eq!(all, [0, 1, 2].map(of));
        }
    });
}

fn a_member_that_goes_fails_the_collective_on_all_others<J: Job>() {
    let mut ranks = J::ranks(4);
    connect(&ranks);
    let victim = ranks.remove(2);
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            ranks.iter().map(|rank| scope.spawn(move || rank.barrier())).collect();
        std::thread::sleep(Duration::from_millis(20));
        drop(victim);
        for thread in waiting {
            let error = thread.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("rank 2"), "{error}");
        }
    });
}
