//! Puts, gets, atomic operations and flushes, on memory that peers map and on memory that only its
//! owner accesses.

use crate::support::guard::Guarded;
use crate::support::keys::{with_len, without_keys};
use crate::support::sink::{Sink, Sort};
use crate::support::{Job, pattern, posted, settle, until};
use carrack::buffer::Region;
use carrack::settings::{AutoChoice, SettingsBuilder};
use carrack::{
    AwaitError, Buffer, CompQueue, Handler, Mr, OpError, Outcome, PostError, Rank, RemoteKey,
    Runtime, Status, Tag, UserContext,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

crate::support::over_each_transport!(
    what_is_put_is_there_and_what_is_there_is_got,
    a_notification_comes_when_the_bytes_are_there,
    atomic_operations_of_all_ranks_count,
    what_makes_no_sense_is_refused_and_writes_nothing,
    a_registration_that_has_ended_is_noticed,
    a_flush_ends_after_everything_before_it,
    puts_and_flushes_end_as_they_should_while_several_threads_make_progress,
    a_region_of_a_rank_that_has_gone_is_no_place_to_put_to,
    inside_a_handler_nothing_is_waited_for_and_nothing_begun_that_would_have_to_be,
);

const SIZES: [usize; 9] = [0, 1, 8, 40, 41, 8192, 8193, 100_000, (1 << 20) + 3];

/// Access to the memory of rank 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessMethod {
    /// Rank 0 maps it, or has it anyway.
    Mapped,
    /// The owner makes progress, and the kernel copies what is put.
    Asked(AutoChoice),
}

/// Returns the methods of access over a transport. RDMA maps no peer's memory, and the kernel
/// copies none there.
pub(crate) fn methods<J: Job>() -> Vec<AccessMethod> {
    let asked = [AutoChoice::Auto, AutoChoice::Off].map(AccessMethod::Asked);
    if J::IS_RDMA {
        return vec![asked[0]];
    }
    let mapped = J::MAPS.then_some(AccessMethod::Mapped);
    mapped.into_iter().chain(asked).collect()
}

/// Two ranks, and a region of rank 1's.
pub(crate) struct MemoryFixture {
    pub(crate) ranks: [Runtime; 2],
    pub(crate) region: Region,
    mr: Option<Mr>,
    pub(crate) rmr: RemoteKey,
}

impl MemoryFixture {
    fn new<J: Job>(method: AccessMethod, len: usize) -> Self {
        Self::with_settings::<J>(J::settings(), method, len)
    }

    pub(crate) fn with_settings<J: Job>(
        settings: SettingsBuilder,
        method: AccessMethod,
        len: usize,
    ) -> Self {
        let settings = match method {
            AccessMethod::Mapped => settings,
            AccessMethod::Asked(choice) => settings.setting("kernel_copy", choice),
        };
        let ranks = J::pair_with(settings);
        let region = match method {
            AccessMethod::Mapped => ranks[1].allocate(len).unwrap(),
            AccessMethod::Asked(_) => Region::host(len),
        };
        let mr = ranks[1].register_memory(&region).unwrap();
        let rmr = match method {
            AccessMethod::Mapped => mr.remote_key(),
            AccessMethod::Asked(_) => without_keys(&mr.remote_key()),
        };
        Self { ranks, region, mr: Some(mr), rmr }
    }

    /// Calls an operation, and waits for its end.
    fn ended(&self, sink: &Sink, call: impl FnMut() -> Result<Outcome, PostError>) -> Status {
        match posted(&self.ranks, call) {
            Outcome::Done(status) => status,
            _ => sink.one(&self.ranks),
        }
    }
}

fn what_is_put_is_there_and_what_is_there_is_got<J: Job>() {
    for method in methods::<J>() {
        let len = SIZES[8] + 1000;
        let fixture = MemoryFixture::new::<J>(method, Guarded::room(len));
        let zero = &fixture.ranks[0];
        let whole = fixture.rmr.slice(64, len as u64).unwrap();
        for (seed, size) in (1..).zip(SIZES) {
            for owned in [true, false] {
                let guarded = Guarded::within(fixture.region.clone(), len, seed);
                let (sink, bytes) = (Sink::keeping(), pattern(seed, size));
                let offset = [0, 999][usize::from(owned)];
                let part = whole.slice(offset / 3, whole.len() - offset / 3).unwrap();
                let at = offset - offset / 3;
                let status = if owned || size > fixture.ranks[0].max_eager() {
                    let mut put = zero.post_put(Rank(1), bytes.clone(), &part, at).comp(&sink);
                    put = put.user_context(UserContext(seed));
                    fixture.ended(&sink, || put.try_submit())
                } else {
                    let mut put = zero.post_put(Rank(1), &bytes[..], &part, at).comp(&sink);
                    put = put.user_context(UserContext(seed));
                    fixture.ended(&sink, || put.try_submit())
                };
                assert!(status.error.is_none(), "{method:?} {size}: {status:?}");
                assert_eq!(
                    (status.rank, status.size, status.user_context),
                    (Rank(1), size, UserContext(seed))
                );
                if owned {
                    assert_eq!(status.buffer.to_vec().unwrap(), bytes, "the buffer comes back");
                }
                // Shifted by what lies before it, so that the guard sees both ends.
                let found = guarded.slice().region().slice(64 + offset as usize, size).unwrap();
                assert_eq!(found.to_vec().unwrap(), bytes, "{method:?} {size}");
                let mut expected = guarded.slice().to_vec().unwrap();
                expected.splice(offset as usize..offset as usize + size, bytes.clone());
                guarded.assert_holds(&expected);

                let target = Guarded::new(size, seed);
                let mut get = zero.post_get(Rank(1), target.slice(), &part, at).comp(&sink);
                let status = fixture.ended(&sink, || get.try_submit());
                assert!(status.error.is_none(), "{method:?} {size}: {status:?}");
                assert_eq!((status.rank, status.size), (Rank(1), size));
                target.assert_holds(&bytes);
            }
        }
    }
}

fn a_notification_comes_when_the_bytes_are_there<J: Job>() {
    for method in methods::<J>() {
        let fixture = MemoryFixture::new::<J>(method, 200_000);
        let [zero, one] = &fixture.ranks;
        let told = Sink::new(Sort::Queue);
        let name = one.register_comp(&told).unwrap();
        for (number, size) in (1_u64..).zip(SIZES.into_iter().filter(|&size| size <= 200_000)) {
            let (sink, bytes) = (Sink::keeping(), pattern(number, size));
            let mut put = zero.post_put(Rank(1), bytes.clone(), &fixture.rmr, 0).comp(&sink);
            put = put.remote_comp(name).tag(Tag(u64::MAX - number));
            let _ = posted(&fixture.ranks, || put.try_submit());
            until(&fixture.ranks, || told.count() == 1);
            let found = fixture.region.slice(0, size).unwrap().to_vec().unwrap();
            assert_eq!(found, bytes, "{method:?} {size}: the notification was early");
            let status = told.take().remove(0);
            assert!(status.error.is_none(), "{status:?}");
            assert_eq!(
                (status.rank, status.tag, status.size),
                (Rank(0), Tag(u64::MAX - number), size)
            );
            let mut get = zero.post_get(Rank(1), vec![0; size], &fixture.rmr, 0).comp(&sink);
            get = get.remote_comp(name).tag(Tag(number));
            let _ = posted(&fixture.ranks, || get.try_submit());
            until(&fixture.ranks, || told.count() == 1);
            let status = told.take().remove(0);
            assert_eq!((status.rank, status.tag, status.size), (Rank(0), Tag(number), size));
            settle(&fixture.ranks);
        }
    }
}

fn atomic_operations_of_all_ranks_count<J: Job>() {
    const EACH: u64 = 500;
    for method in methods::<J>() {
        let fixture = MemoryFixture::new::<J>(method, 64);
        let done = AtomicBool::new(false);
        let mut last = vec![0; 2];
        std::thread::scope(|scope| {
            let adders: Vec<_> = fixture
                .ranks
                .iter()
                .map(|rank| {
                    let rmr = RemoteKey::from_bytes(&fixture.rmr.to_bytes()).unwrap();
                    scope.spawn(move || {
                        let mut seen = 0;
                        for _ in 0..EACH {
                            let add = rank.post_fetch_add(Rank(1), &rmr, 8, 3).wait().unwrap();
                            seen = add.value().unwrap();
                            // And a lock-free increment by hand.
                            let mut held = 0;
                            loop {
                                let swap = rank
                                    .post_compare_swap(Rank(1), &rmr, 16, held, held + 1)
                                    .wait();
                                match swap.unwrap().value().unwrap() {
                                    found if found == held => break,
                                    found => held = found,
                                }
                            }
                        }
                        seen
                    })
                })
                .collect();
            // The rank that is done first still has to answer the other.
            let helpers: Vec<_> = fixture
                .ranks
                .iter()
                .map(|rank| {
                    let done = &done;
                    scope.spawn(move || {
                        while !done.load(Ordering::Relaxed) {
                            rank.progress().unwrap();
                            std::thread::yield_now();
                        }
                    })
                })
                .collect();
            last = adders.into_iter().map(|adder| adder.join().unwrap()).collect();
            done.store(true, Ordering::Relaxed);
            helpers.into_iter().for_each(|helper| helper.join().unwrap());
        });
        assert_eq!(fixture.region.fetch_add(8, 0), Ok(2 * 3 * EACH), "{method:?}");
        assert_eq!(fixture.region.fetch_add(16, 0), Ok(2 * EACH), "{method:?}");
        assert_eq!(
            last.into_iter().max(),
            Some(2 * 3 * EACH - 3),
            "the last one saw all but its own"
        );
    }
}

fn what_makes_no_sense_is_refused_and_writes_nothing<J: Job>() {
    for method in methods::<J>() {
        let fixture = MemoryFixture::new::<J>(method, 1000);
        let zero = &fixture.ranks[0];
        let rmr = &fixture.rmr;
        for (offset, len) in [(0, 1001), (1000, 1), (u64::MAX, 8), (u64::MAX - 3, 8), (993, 8)] {
            let put = zero.post_put(Rank(1), vec![1; len], rmr, offset).try_submit();
            assert!(matches!(put, Err(PostError::Outside { room: 1000, .. })), "{put:?}");
            let get = zero.post_get(Rank(1), vec![1; len], rmr, offset).wait();
            let outside = PostError::Outside { offset, len: len as u64, room: 1000 };
            assert_eq!(get.unwrap_err().to_string(), outside.to_string());
        }
        assert!(zero.post_fetch_add(Rank(1), rmr, 993, 1).wait().is_err());
        let put = zero.post_put(Rank(0), &[1], rmr, 0).try_submit();
        assert!(matches!(put, Err(PostError::Owner { rank: Rank(0), owner: Rank(1) })), "{put:?}");
        let put = zero.post_put(Rank(7), &[1], rmr, 0).try_submit();
        assert!(matches!(put, Err(PostError::NoSuchRank { .. })), "{put:?}");
        let get = zero.post_get(Rank(1), Buffer::Bytes(vec![1].into()), rmr, 0).wait();
        assert!(matches!(get, Err(AwaitError::Post(PostError::ReadOnly(_)))), "{get:?}");
        // An unaligned word.
        let sink = Sink::keeping();
        match zero.post_fetch_add(Rank(1), rmr, 4, 1).comp(&sink).try_submit() {
            Err(PostError::Atomic(_)) => assert_eq!(method, AccessMethod::Mapped),
            Ok(Outcome::Posted) => {
                let error = sink.one(&fixture.ranks).ok().unwrap_err();
                assert!(matches!(error, OpError::Word(Rank(1))), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // A name that says more than there is: what is mapped is checked here, else by its owner.
        let forged = with_len(rmr, 5000);
        match zero.post_put(Rank(1), vec![9; 2000], &forged, 0).comp(&sink).try_submit() {
            Err(PostError::Outside { .. }) => assert_eq!(method, AccessMethod::Mapped),
            Ok(Outcome::Posted) => {
                let error = sink.one(&fixture.ranks).ok().unwrap_err();
                assert!(matches!(error, OpError::Outside(Rank(1))), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(fixture.region.whole().to_vec().unwrap(), [0; 1000]);
    }
}

fn a_registration_that_has_ended_is_noticed<J: Job>() {
    for method in methods::<J>() {
        let mut fixture = MemoryFixture::new::<J>(method, 1000);
        let used = fixture.rmr.clone();
        let sink = Sink::keeping();
        let mut put = fixture.ranks[0].post_put(Rank(1), &[1], &used, 0).comp(&sink);
        assert!(fixture.ended(&sink, || put.try_submit()).error.is_none());
        let fresh = RemoteKey::from_bytes(&used.to_bytes()).unwrap();
        fixture.ranks[1].deregister_memory(fixture.mr.take().unwrap());
        if J::IS_RDMA {
            // Its NIC may go on until the other rank hears of it, by a message of the owner's.
            let heard = Sink::keeping();
            let mut receive = fixture.ranks[0].post_recv(Rank(1), vec![0; 1], Tag(0)).comp(&heard);
            let _ = receive.try_submit().unwrap();
            let send = || fixture.ranks[1].post_send(Rank(0), b"x", Tag(0)).try_submit();
            assert!(posted(&fixture.ranks, send).is_done());
            until(&fixture.ranks[..1], || heard.count() == 1);
        }
        // Another region in its place must not be taken for it.
        let other = fixture.ranks[1].register_memory(&fixture.region).unwrap();
        for rmr in [&used, &fresh] {
            match fixture.ranks[0]
                .post_put(Rank(1), vec![9; 100], rmr, 500)
                .comp(&sink)
                .try_submit()
            {
                Err(PostError::Stale(Rank(1))) => {
                    assert!(J::IS_RDMA || method == AccessMethod::Mapped)
                }
                Ok(Outcome::Posted) => {
                    let error = sink.one(&fixture.ranks).ok().unwrap_err();
                    assert!(matches!(error, OpError::Stale(Rank(1))), "{error}");
                }
                other => panic!("{method:?}: {other:?}"),
            }
            match fixture.ranks[0]
                .post_get(Rank(1), vec![9; 100], rmr, 500)
                .comp(&sink)
                .try_submit()
            {
                Err(PostError::Stale(Rank(1))) => {}
                Ok(Outcome::Posted) => {
                    let status = sink.one(&fixture.ranks);
                    assert_eq!(
                        status.buffer.to_vec().unwrap(),
                        [9; 100],
                        "the buffer comes back as it was"
                    );
                    assert!(
                        matches!(status.error.as_deref(), Some(OpError::Stale(Rank(1)))),
                        "{status:?}"
                    );
                }
                other => panic!("{method:?}: {other:?}"),
            }
        }
        assert_eq!(fixture.region.slice(500, 100).unwrap().to_vec().unwrap(), [0; 100]);
        drop(other);
    }
}

fn a_flush_ends_after_everything_before_it<J: Job>() {
    for method in methods::<J>() {
        let fixture = MemoryFixture::new::<J>(method, 1 << 20);
        let zero = &fixture.ranks[0];
        let (flushed, done) = (Sink::keeping(), Sink::keeping());
        for number in 0..20_u64 {
            let bytes = pattern(number, 50_000);
            let mut put = zero.post_put(Rank(1), bytes, &fixture.rmr, number * 50_000).comp(&done);
            let _ = posted(&fixture.ranks, || put.try_submit());
        }
        let flush = zero.post_flush(Rank(1)).comp(&flushed).try_submit().unwrap();
        assert_eq!(flush.is_done(), method == AccessMethod::Mapped);
        until(&fixture.ranks, || flush.is_done() || flushed.count() == 1);
        let found = fixture.region.slice(0, 1_000_000).unwrap().to_vec().unwrap();
        for (number, part) in (0..).zip(found.chunks(50_000)) {
            assert_eq!(part, pattern(number, 50_000), "{method:?}: the flush was early");
        }
        assert!(zero.post_flush(Rank(1)).wait().unwrap().error.is_none());
    }
}

fn puts_and_flushes_end_as_they_should_while_several_threads_make_progress<J: Job>() {
    const ROUNDS: u64 = 300;
    const LEN: usize = 20_000;
    for method in methods::<J>() {
        let fixture = MemoryFixture::new::<J>(method, 4 * LEN);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads = [0, 1, 0, 1].map(|at| {
                let (rank, done) = (&fixture.ranks[at], &done);
                scope.spawn(move || {
                    let mut errors = Vec::new();
                    while !done.load(Ordering::Relaxed) {
                        errors.extend(rank.progress().err());
                        std::thread::yield_now();
                    }
                    errors
                })
            });
            let zero = &fixture.ranks[0];
            for round in 0..ROUNDS {
                let ended = CompQueue::new(16);
                let mut in_flight = 0;
                for part in 0..4 {
                    let bytes = pattern(4 * round + part, LEN);
                    let mut put =
                        zero.post_put(Rank(1), bytes, &fixture.rmr, part * LEN as u64).comp(&ended);
                    let mut outcome = put.try_submit().unwrap();
                    while outcome.is_retry() {
                        std::thread::yield_now();
                        outcome = put.try_submit().unwrap();
                    }
                    in_flight += usize::from(outcome.is_posted());
                }
                let flush = zero.post_flush(Rank(1)).wait().unwrap();
                assert!(flush.error.is_none(), "{flush:?}");
                let found = fixture.region.whole().to_vec().unwrap();
                for (part, bytes) in (0..).zip(found.chunks(LEN)) {
                    assert_eq!(
                        bytes,
                        pattern(4 * round + part, LEN),
                        "{method:?}: the flush was early"
                    );
                }
                while in_flight > 0 {
                    let Some(status) = ended.pop() else {
                        std::thread::yield_now();
                        continue;
                    };
                    assert!(status.error.is_none(), "{method:?}: {status:?}");
                    in_flight -= 1;
                }
            }
            done.store(true, Ordering::Relaxed);
            for thread in threads {
                assert!(thread.join().unwrap().is_empty(), "{method:?}: progress complains");
            }
        });
    }
}

fn a_region_of_a_rank_that_has_gone_is_no_place_to_put_to<J: Job>() {
    for method in methods::<J>() {
        let MemoryFixture { ranks: [zero, one], rmr, mr, .. } =
            MemoryFixture::new::<J>(method, 1000);
        let done = Sink::keeping();
        let _ = zero.post_put(Rank(1), vec![1; 1000], &rmr, 0).comp(&done).try_submit().unwrap();
        drop((mr, one));
        let ranks = [zero];
        until(&ranks, || ranks[0].peer_down(Rank(1)).is_some());
        if method != AccessMethod::Mapped {
            let error = done.one(&ranks).ok().unwrap_err();
            assert!(matches!(error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
        }
        let put = ranks[0].post_put(Rank(1), &[1], &rmr, 0).try_submit();
        assert!(matches!(put, Err(PostError::PeerDown { rank: Rank(1), .. })), "{put:?}");
    }
}

fn inside_a_handler_nothing_is_waited_for_and_nothing_begun_that_would_have_to_be<J: Job>() {
    for method in methods::<J>() {
        let fixture = MemoryFixture::new::<J>(method, 64);
        let (zero, rmr) = (fixture.ranks[0].clone(), fixture.rmr.clone());
        let seen = Arc::new(Mutex::new(None));
        let handler = {
            let (zero, seen) = (zero.clone(), seen.clone());
            Handler::new(move |_| {
                *seen.lock() = Some(zero.post_fetch_add(Rank(1), &rmr, 0, 5).wait());
            })
        };
        let name = zero.register_comp(&handler).unwrap();
        let _ = posted(&fixture.ranks, || zero.post_am(Rank(0), b"go", name).try_submit());
        until(&fixture.ranks, || seen.lock().is_some());
        settle(&fixture.ranks);
        let outcome = seen.lock().take().unwrap();
        let held = fixture.region.fetch_add(0, 0).unwrap();
        match method {
            AccessMethod::Mapped => {
                assert!(outcome.is_ok() && held == 5, "{outcome:?}")
            }
            AccessMethod::Asked(_) => {
                let refused = matches!(outcome, Err(AwaitError::Post(PostError::WouldBlock)));
                assert!(refused && held == 0, "{outcome:?}")
            }
        }
    }
}
