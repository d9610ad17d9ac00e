//! Puts, gets, atomic operations and flushes, on memory that the other rank may map, and on memory
//! that only its owner accesses.

use super::PairedRank;
use crate::support::guard::Guarded;
use crate::support::keys::with_len;
use crate::support::sink::{Sink, Sort};
use crate::support::{pattern, posted, until};
use carrack::buffer::Region;
use carrack::{Mr, OpError, Outcome, PostError, RemoteKey, Tag};

const SIZES: [usize; 9] = [0, 1, 8, 40, 41, 8192, 8193, 100_000, (1 << 20) + 3];

/// A region of this rank's, and what names the other one's.
struct Shared {
    mine: Region,
    registered: Mr,
    theirs: RemoteKey,
}

/// Shares memory of each sort.
fn shared(me: &PairedRank, len: usize) -> [Shared; 2] {
    [me.runtime.allocate(len).unwrap(), Region::host(len)].map(|mine| {
        let registered = me.runtime.register_memory(&mine).unwrap();
        let told = me.runtime.allgather(&registered.remote_key().to_bytes()).unwrap();
        let theirs = RemoteKey::from_bytes(&told[me.peer.0 as usize]).unwrap();
        Shared { mine, registered, theirs }
    })
}

/// Has one rank act on the other's memory while the other one watches, and then the other way
/// round.
fn in_turn(me: &PairedRank, act: impl Fn(), watch: impl Fn()) {
    for is_active in [me.is_first(), !me.is_first()] {
        if is_active {
            act()
        } else {
            watch()
        }
        me.meet();
    }
}

pub(crate) fn put_and_got(me: &PairedRank) {
    let len = SIZES[8] + 1000;
    let told = Sink::new(Sort::Queue);
    let name = me.runtime.register_comp(&told).unwrap();
    for Shared { mine, theirs, .. } in &shared(me, Guarded::room(len)) {
        let whole = theirs.slice(64, len as u64).unwrap();
        for (seed, size) in (1..).zip(SIZES) {
            let (bytes, offset) = (pattern(me.seed ^ seed, size), 333 * (seed % 4));
            let guarded = Guarded::within(mine.clone(), len, seed);
            me.meet();
            let act = || {
                let sink = Sink::keeping();
                let mut put =
                    me.runtime.post_put(me.peer, bytes.clone(), &whole, offset).comp(&sink);
                put = put.remote_comp(name).tag(Tag(seed));
                let status = me.ended(&sink, || put.try_submit());
                assert!(status.error.is_none(), "{size}: {status:?}");
                assert_eq!((status.rank, status.size), (me.peer, size));
                assert!(status.buffer.to_vec().unwrap() == bytes, "{size}: the buffer comes back");
                let target = Guarded::new(size, seed);
                let mut get =
                    me.runtime.post_get(me.peer, target.slice(), &whole, offset).comp(&sink);
                get = get.remote_comp(name).tag(Tag(seed | 1 << 32));
                let status = me.ended(&sink, || get.try_submit());
                assert!(status.error.is_none(), "{size}: {status:?}");
                target.assert_holds(&bytes);
            };
            let watch = || {
                until(me.all(), || told.count() > 0);
                // Of the put: what is told first. The get's may be here, too.
                let mut expected = guarded.slice().to_vec().unwrap();
                let place = offset as usize..offset as usize + size;
                assert!(expected[place.clone()] == bytes, "{size}: the notification was early");
                until(me.all(), || told.count() > 1);
                let notices: Vec<_> = told.take().iter().map(|s| (s.rank, s.tag, s.size)).collect();
                let notice = |tag| (me.peer, Tag(tag), size);
                assert_eq!(notices, [notice(seed), notice(seed | 1 << 32)]);
                expected.splice(place, bytes.clone());
                guarded.assert_holds(&expected);
            };
            in_turn(me, act, watch);
        }
    }
}

pub(crate) fn counted(me: &PairedRank) {
    const EACH: u64 = 100;
    for shared in &shared(me, 64) {
        for _ in 0..EACH {
            let add = me.runtime.post_fetch_add(me.peer, &shared.theirs, 8, 3).wait().unwrap();
            assert!(add.value().is_some_and(|found| found % 3 == 0));
            // The owner's own addition, between those of the other rank.
            let own = shared.registered.remote_key();
            me.runtime.post_fetch_add(me.runtime.rank(), &own, 8, 3).wait().unwrap();
            // And a lock-free increment by hand.
            let mut held = 0;
            loop {
                let swap = me
                    .runtime
                    .post_compare_swap(me.peer, &shared.theirs, 16, held, held + 1)
                    .wait();
                match swap.unwrap().value().unwrap() {
                    found if found == held => break,
                    found => held = found,
                }
            }
        }
        me.meet();
        assert_eq!(shared.mine.fetch_add(8, 0), Ok(2 * 3 * EACH));
        assert_eq!(shared.mine.fetch_add(16, 0), Ok(EACH));
    }
}

pub(crate) fn flushed(me: &PairedRank) {
    const PUTS: u64 = 20;
    const SIZE: usize = 30_000;
    for Shared { mine, theirs, .. } in &shared(me, PUTS as usize * SIZE) {
        let act = || {
            let (flushed, done) = (Sink::keeping(), Sink::keeping());
            for number in 0..PUTS {
                let bytes = pattern(me.seed ^ number, SIZE);
                let mut put =
                    me.runtime.post_put(me.peer, bytes, theirs, number * SIZE as u64).comp(&done);
                let _ = posted(me.all(), || put.try_submit());
            }
            let mut flush = me.runtime.post_flush(me.peer).comp(&flushed);
            assert!(me.ended(&flushed, || flush.try_submit()).error.is_none());
            me.says_go();
        };
        let watch = || {
            me.hears_go();
            let found = mine.slice(0, PUTS as usize * SIZE).unwrap().to_vec().unwrap();
            for (number, part) in (0..).zip(found.chunks(SIZE)) {
                assert!(part == pattern(me.seed ^ number, SIZE), "{number}: the flush was early");
            }
        };
        in_turn(me, act, watch);
    }
}

pub(crate) fn refused(me: &PairedRank) {
    const LEN: usize = 1000;
    for Shared { mine, registered, theirs } in shared(me, LEN) {
        for (offset, len) in [(0, LEN + 1), (LEN as u64, 1), (u64::MAX - 3, 8), (993, 8)] {
            let put = me.runtime.post_put(me.peer, vec![1; len], &theirs, offset).try_submit();
            assert!(matches!(put, Err(PostError::Outside { room: 1000, .. })), "{put:?}");
        }
        // A name that says more than there is: what is mapped is checked here, else by its owner.
        let forged = with_len(&theirs, 5000);
        let sink = Sink::keeping();
        match me.runtime.post_put(me.peer, vec![9; 2 * LEN], &forged, 0).comp(&sink).try_submit() {
            Err(PostError::Outside { .. }) => {}
            Ok(Outcome::Posted) => {
                let error = sink.one(me.all()).ok().unwrap_err();
                assert!(matches!(error, OpError::Outside(rank) if rank == me.peer), "{error}");
            }
            other => panic!("{other:?}"),
        }
        me.meet();
        assert_eq!(mine.whole().to_vec().unwrap(), [0; LEN]);
        me.meet();
        // The other rank soon learns of a deregistration.
        me.runtime.deregister_memory(registered);
        let is_stale = || match me
            .runtime
            .post_put(me.peer, vec![7; 100], &theirs, 0)
            .comp(&sink)
            .try_submit()
        {
            Ok(Outcome::Retry(_)) => false,
            Ok(Outcome::Done(status)) => is_refusal(me, status.error.as_deref()),
            Ok(Outcome::Posted) => is_refusal(me, sink.one(me.all()).error.as_deref()),
            Err(error) => {
                assert!(matches!(error, PostError::Stale(rank) if rank == me.peer), "{error}");
                true
            }
        };
        until(me.all(), is_stale);
        me.meet();
        let before = mine.whole().to_vec().unwrap();
        me.meet();
        assert!(is_stale(), "it is registered again");
        me.meet();
        assert_eq!(mine.whole().to_vec().unwrap(), before, "withdrawn memory was written");
        me.meet();
    }
}

/// Returns `true` if a put came too late and was refused, and `false` if it was in time.
fn is_refusal(me: &PairedRank, error: Option<&OpError>) -> bool {
    assert!(
        error.is_none_or(|error| matches!(error, OpError::Stale(rank) if *rank == me.peer)),
        "{error:?}"
    );
    error.is_some()
}
