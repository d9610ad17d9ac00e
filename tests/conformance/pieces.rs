//! Many puts or gets as one: pieces and faces, of host, pinned and device memory, mapped or not. A byte beside a piece that is
//! written is found, and so is a signal that comes before the bytes.

use crate::support::gpus::{self, is_for_simulated_only};
use crate::support::sink::{Sink, Sort};
use crate::support::*;
use carrack::region::Region;
use carrack::settings::KernelCopyChoice;
use carrack::transports::gpu::fake::{FailAt, Which};
use carrack::transports::gpu::{Flavour, Stream};
use carrack::{
    CompQueue, Face, FaceError, OpError, Outcome, Piece, PostError, Rank, RemoteComp, Rmr, Runtime, Status,
    Tag, UserContext,
};
use rand::seq::SliceRandom;
use rand::{Rng, rngs::SmallRng};
use std::ops::Range;
use std::sync::Arc;

crate::over_each_transport!(
    pieces_arrive_to_the_last_byte_and_the_signal_behind_them,
    faces_of_one_to_three_dimensions_arrive_to_the_last_byte,
    pieces_of_several_regions_and_kinds_of_memory_go_in_one_batch,
    a_thousand_pieces_between_gpus_are_one_call_of_the_driver_and_so_is_a_face,
    a_batch_of_no_pieces_is_over_at_once_and_gives_its_signal,
    what_makes_no_sense_is_refused_by_name_and_moves_nothing,
    pieces_that_overlap_are_refused_and_both_are_named,
    a_batch_longer_than_what_may_wait_goes_on_by_itself_and_a_flush_waits_for_all_of_it,
    a_batch_ends_once_when_the_peer_goes_and_when_this_rank_does,
    a_batch_after_an_event_is_written_when_it_has_fired,
    a_batch_whose_copy_fails_ends_once_with_the_drivers_error_and_gives_no_signal,
    a_batch_waits_in_a_call_that_may_not_be_posted_and_can_be_awaited,
);

/// What memory a side has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Host,
    Pinned,
    Gpu,
}

const ALL: [Memory; 3] = [Memory::Host, Memory::Pinned, Memory::Gpu];

struct Ground {
    ranks: [Runtime; 2],
    gpus: gpus::Ground,
    told: Arc<Sink>,
    name: RemoteComp,
}

/// Memory of rank 1's, and its name.
struct Remote {
    region: Region,
    rmr: Rmr,
    _registered: carrack::Mr,
}

impl Ground {
    fn new<J: Job>() -> Self {
        Self::over(J::pair())
    }

    fn over(ranks: [Runtime; 2]) -> Self {
        let told = Arc::new(Sink::new(Sort::Queue));
        let name = ranks[1].register_comp(&*told).unwrap();
        Self { ranks, gpus: gpus::Ground::new(), told, name }
    }

    /// Memory of this rank's.
    fn local(&self, memory: Memory, len: usize) -> Region {
        match memory {
            Memory::Host => Region::host(len),
            Memory::Pinned => self.gpus.last().allocate(len, Flavour::Pinned).unwrap(),
            Memory::Gpu => self.gpus.gpus[0].allocate(len, Flavour::Plain).unwrap(),
        }
    }

    /// Memory of rank 1's: with all that it takes to map it, or without.
    fn remote(&self, memory: Memory, mapped: bool, len: usize) -> Remote {
        let region = match memory {
            Memory::Host if mapped => self.ranks[1].allocate(len).unwrap(),
            Memory::Gpu => self.gpus.last().allocate(len, Flavour::Plain).unwrap(),
            other => self.local(other, len),
        };
        let registered = self.ranks[1].register_memory(&region).unwrap();
        let mut bytes = self.ranks[1].get_rmr(&registered).to_bytes();
        if !mapped {
            bytes.truncate(28);
        }
        Remote { region, rmr: Rmr::from_bytes(&bytes).unwrap(), _registered: registered }
    }

    /// The status of an operation that may be over at once.
    fn ended(&self, sink: &Sink, call: impl FnMut() -> Result<Outcome, PostError>) -> Status {
        match posted(&self.ranks, call) {
            Outcome::Done(status) => {
                assert_eq!(sink.count(), 0, "done, and told");
                status
            }
            _ => sink.one(&self.ranks),
        }
    }
}

/// Which sorts of memory, mapped or not: over RDMA a name without keys is as good as one with.
fn sorts<J: Job>() -> Vec<(Memory, Memory, bool)> {
    let pairs = ALL.into_iter().flat_map(|local| ALL.map(|remote| (local, remote)));
    let mapped = if J::IS_RDMA { vec![true] } else { vec![true, false] };
    pairs
        .flat_map(|(local, remote)| mapped.clone().into_iter().map(move |mapped| (local, remote, mapped)))
        .collect()
}

/// Random parts of two regions that do not overlap, in random order; and how long the regions have to be.
fn parts(rng: &mut SmallRng, count: usize, longest: usize) -> (Vec<(Range<usize>, usize)>, usize) {
    let place = || {
        let mut at = 0;
        move |rng: &mut SmallRng, len: usize| {
            at += rng.random_range(0..3) * rng.random_range(0..20);
            let start = at;
            at += len;
            (start, at)
        }
    };
    let (mut here, mut there, mut room) = (place(), place(), 0);
    let mut parts: Vec<_> = (0..count)
        .map(|_| {
            let len = rng.random_range(0..=longest);
            let ((start, end), (to, last)) = (here(rng, len), there(rng, len));
            room = room.max(end).max(last);
            (start..end, to)
        })
        .collect();
    if rng.random() {
        parts.shuffle(rng);
    }
    (parts, room + 64)
}

fn pieces_arrive_to_the_last_byte_and_the_signal_behind_them<J: Job>() {
    let (ground, mut rng) = (Ground::new::<J>(), rng());
    for (ours, theirs, mapped) in sorts::<J>() {
        for count in [1, 2, 65, 1000] {
            for is_put in [true, false] {
                let what = format!("{ours:?} {theirs:?} mapped: {mapped}, {count} pieces, put: {is_put}");
                let (parts, room) = parts(&mut rng, count, if count < 1000 { 3000 } else { 60 });
                let (local, remote) = (ground.local(ours, room), ground.remote(theirs, mapped, room));
                let (here, there) = (random(&mut rng, room), random(&mut rng, room));
                local.whole().write(&here).unwrap();
                remote.region.whole().write(&there).unwrap();
                let piece = |(range, to): &(Range<usize>, usize)| Piece {
                    local: &local,
                    range: range.clone(),
                    rmr: &remote.rmr,
                    offset: *to as u64,
                };
                let pieces: Vec<_> = parts.iter().map(piece).collect();
                let (sink, zero) = (Sink::keeping(), &ground.ranks[0]);
                let batch = if is_put {
                    zero.post_put_batch(Rank(1), &pieces)
                } else {
                    zero.post_get_batch(Rank(1), &pieces)
                };
                let batch = batch.comp(&sink).user_context(UserContext(7)).tag(Tag(count as u64));
                let mut batch = batch.remote_comp(ground.name);
                let size = parts.iter().map(|(range, _)| range.len()).sum::<usize>();
                let (mut wanted_here, mut wanted_there) = (here.clone(), there.clone());
                for (range, to) in &parts {
                    let their = *to..*to + range.len();
                    if is_put {
                        wanted_there[their].copy_from_slice(&here[range.clone()]);
                    } else {
                        wanted_here[range.clone()].copy_from_slice(&there[their]);
                    }
                }
                let over = posted(&ground.ranks, || batch.call());
                until(&ground.ranks, || ground.told.count() == 1);
                let found = remote.region.whole().to_vec().unwrap();
                assert!(found == wanted_there, "{what}: the signal was early, or a byte is wrong");
                let told = ground.told.take().remove(0);
                assert!(told.error.is_none(), "{what}: {told:?}");
                assert_eq!((told.rank, told.tag, told.size), (Rank(0), Tag(count as u64), size), "{what}");
                let status = match over {
                    Outcome::Done(status) => status,
                    _ => sink.one(&ground.ranks),
                };
                assert!(status.error.is_none(), "{what}: {status:?}");
                assert_eq!((status.rank, status.size), (Rank(1), size), "{what}");
                assert_eq!((status.user_context, status.tag), (UserContext(7), Tag(count as u64)));
                assert!(local.whole().to_vec().unwrap() == wanted_here, "{what}: this rank's memory");
                settle(&ground.ranks);
                assert_eq!((sink.count(), ground.told.count()), (0, 0), "{what}: told twice");
            }
        }
    }
}

/// A face of that shape, and how long a region has to be for it.
fn face(rng: &mut SmallRng, count: [usize; 3]) -> (Face, usize) {
    let offset = rng.random_range(0..100);
    let row = count[0] + rng.random_range(0..2) * rng.random_range(0..50);
    let plane = row * count[1] + rng.random_range(0..2) * rng.random_range(0..70);
    let face = Face { offset, count, pitch: [row, plane] };
    let end = face.check(usize::MAX).unwrap();
    (face, end + rng.random_range(0..50))
}

fn faces_of_one_to_three_dimensions_arrive_to_the_last_byte<J: Job>() {
    let (ground, mut rng) = (Ground::new::<J>(), rng());
    let shapes = [[300, 1, 1], [24, 40, 1], [8, 12, 10], [8, 1, 30], [1, 20, 3], [0, 5, 5], [8, 0, 1]];
    for (ours, theirs, mapped) in sorts::<J>() {
        for count in shapes {
            for is_put in [true, false] {
                let what = format!("{ours:?} {theirs:?} mapped: {mapped}, {count:?}, put: {is_put}");
                let ((face, len), (other, room)) = (face(&mut rng, count), face(&mut rng, count));
                // Planes that are no whole number of rows apart are met by chance, too.
                let (local, remote) = (ground.local(ours, len), ground.remote(theirs, mapped, room + 10));
                let (here, there) = (random(&mut rng, len), random(&mut rng, room + 10));
                local.whole().write(&here).unwrap();
                remote.region.whole().write(&there).unwrap();
                let named = remote.rmr.slice(10, room as u64).unwrap();
                let sink = Sink::keeping();
                let zero = &ground.ranks[0];
                let batch = if is_put {
                    zero.post_put_face(Rank(1), &local, &face, &named, &other)
                } else {
                    zero.post_get_face(Rank(1), &local, &face, &named, &other)
                };
                let mut batch = batch.comp(&sink).remote_comp(ground.name);
                let (mut wanted_here, mut wanted_there) = (here.clone(), there.clone());
                let rows = (0..count[2]).flat_map(|z| (0..count[1]).map(move |y| (z, y)));
                for (z, y) in rows.filter(|_| count[0] > 0) {
                    let at = |face: &Face| face.offset + y * face.pitch[0] + z * face.pitch[1];
                    let (ours, theirs) =
                        (at(&face)..at(&face) + count[0], 10 + at(&other)..10 + at(&other) + count[0]);
                    if is_put {
                        wanted_there[theirs].copy_from_slice(&here[ours]);
                    } else {
                        wanted_here[ours].copy_from_slice(&there[theirs]);
                    }
                }
                let over = posted(&ground.ranks, || batch.call());
                until(&ground.ranks, || ground.told.count() == 1);
                let size = count.iter().product::<usize>();
                assert_eq!(ground.told.take().remove(0).size, size, "{what}");
                assert!(remote.region.whole().to_vec().unwrap() == wanted_there, "{what}");
                let status = match over {
                    Outcome::Done(status) => status,
                    _ => sink.one(&ground.ranks),
                };
                assert!(status.error.is_none() && status.size == size, "{what}: {status:?}");
                assert!(local.whole().to_vec().unwrap() == wanted_here, "{what}: this rank's memory");
            }
        }
    }
}

fn pieces_of_several_regions_and_kinds_of_memory_go_in_one_batch<J: Job>() {
    const EACH: usize = 500;
    let (ground, mut rng) = (Ground::new::<J>(), rng());
    let locals = ALL.map(|memory| ground.local(memory, EACH));
    let remotes: Vec<_> =
        sorts::<J>().into_iter().map(|(_, memory, mapped)| ground.remote(memory, mapped, 3 * EACH)).collect();
    let bytes: Vec<_> = locals.iter().map(|_| random(&mut rng, EACH)).collect();
    locals.iter().zip(&bytes).for_each(|(local, bytes)| local.whole().write(bytes).unwrap());
    let mut pieces = Vec::new();
    for remote in &remotes {
        remote.region.whole().write(&[0xee; 3 * EACH]).unwrap();
        for (at, local) in locals.iter().enumerate() {
            let (range, offset) = (1..EACH - 1, (at * EACH) as u64);
            pieces.push(Piece { local, range, rmr: &remote.rmr, offset });
        }
    }
    pieces.shuffle(&mut rng);
    let sink = Sink::keeping();
    let mut put = ground.ranks[0].post_put_batch(Rank(1), &pieces).comp(&sink).remote_comp(ground.name);
    let status = ground.ended(&sink, || put.call());
    assert!(status.error.is_none(), "{status:?}");
    until(&ground.ranks, || ground.told.count() == 1);
    assert_eq!(ground.told.take().remove(0).size, pieces.len() * (EACH - 2));
    let mut wanted = vec![0xee; 3 * EACH];
    for (at, bytes) in bytes.iter().enumerate() {
        wanted[at * EACH..(at + 1) * EACH - 2].copy_from_slice(&bytes[1..EACH - 1]);
    }
    for remote in &remotes {
        assert!(remote.region.whole().to_vec().unwrap() == wanted);
    }
}

fn a_thousand_pieces_between_gpus_are_one_call_of_the_driver_and_so_is_a_face<J: Job>() {
    if is_for_simulated_only("the driver's calls are not counted") || J::IS_RDMA {
        return;
    }
    let ground = Ground::new::<J>();
    let (zero, fake) = (&ground.ranks[0], ground.gpus.fake.as_ref().unwrap());
    let (local, remote) = (ground.local(Memory::Gpu, 128_000), ground.remote(Memory::Gpu, true, 128_000));
    let piece = |at: usize| Piece {
        local: &local,
        range: at * 64..(at + 1) * 64,
        rmr: &remote.rmr,
        offset: (999 - at as u64) * 128,
    };
    let pieces: Vec<_> = (0..1000).map(piece).collect();
    let face = Face { offset: 0, count: [8, 10, 20], pitch: [64, 6400] };
    for is_face in [false, true] {
        let (sink, before) = (Sink::keeping(), fake.counters());
        let mut put = if is_face {
            zero.post_put_face(Rank(1), &local, &face, &remote.rmr, &face).comp(&sink)
        } else {
            zero.post_put_batch(Rank(1), &pieces).comp(&sink)
        };
        assert!(ground.ended(&sink, || put.call()).error.is_none());
        let after = fake.counters();
        assert_eq!((after.batches - before.batches, after.copies - before.copies), (1, 0), "face: {is_face}");
    }
}

fn a_batch_of_no_pieces_is_over_at_once_and_gives_its_signal<J: Job>() {
    let ground = Ground::new::<J>();
    let zero = &ground.ranks[0];
    for is_put in [true, false] {
        let batch =
            if is_put { zero.post_put_batch(Rank(1), &[]) } else { zero.post_get_batch(Rank(1), &[]) };
        let status = done(batch.remote_comp(ground.name).tag(Tag(3)).call().unwrap());
        assert!(status.error.is_none() && status.size == 0, "{status:?}");
        until(&ground.ranks, || ground.told.count() == 1);
        let told = ground.told.take().remove(0);
        assert_eq!((told.rank, told.size, told.tag), (Rank(0), 0, Tag(3)));
        // Not done, if that is not allowed.
        let sink = Sink::keeping();
        let batch =
            if is_put { zero.post_put_batch(Rank(1), &[]) } else { zero.post_get_batch(Rank(1), &[]) };
        assert!(batch.comp(&sink).allow_done(false).call().unwrap().is_posted());
        assert_eq!(sink.one(&ground.ranks).size, 0);
    }
    let put = zero.post_put_batch(Rank(9), &[]).call();
    assert!(matches!(put, Err(PostError::NoSuchRank { .. })), "{put:?}");
}

fn what_makes_no_sense_is_refused_by_name_and_moves_nothing<J: Job>() {
    let ground = Ground::new::<J>();
    let zero = &ground.ranks[0];
    let ours = ground.ranks[0].allocate(1000).unwrap();
    let own = ground.ranks[0].register_memory(&ours).unwrap();
    let own = ground.ranks[0].get_rmr(&own);
    for (memory, mapped) in [(Memory::Host, true), (Memory::Host, false), (Memory::Gpu, true)] {
        let (local, remote) = (ground.local(memory, 1000), ground.remote(memory, mapped, 1000));
        local.whole().write(&[1; 1000]).unwrap();
        remote.region.whole().write(&[0; 1000]).unwrap();
        let rmr = &remote.rmr;
        let piece = |range, offset| Piece { local: &local, range, rmr, offset };
        let put = |wrong: Piece<'_>| {
            // Behind pieces that make sense.
            let pieces = [piece(0..100, 0), piece(0..100, 300), wrong, piece(0..10, 900)];
            let put = zero.post_put_batch(Rank(1), &pieces).call();
            match put {
                Err(PostError::Piece { at: 2, cause }) => *cause,
                other => panic!("{other:?}"),
            }
        };
        for (range, offset) in [(0..10, 991), (0..10, u64::MAX), (0..10, u64::MAX - 4), (5..5, 1001)] {
            let refused = put(piece(range, offset));
            assert!(matches!(refused, PostError::Outside { room: 1000, .. }), "{refused}");
        }
        #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
        for range in [991..1001, 1001..1001, 10..5, 5..usize::MAX, usize::MAX..usize::MAX] {
            let refused = put(piece(range.clone(), 0));
            assert!(matches!(&refused, PostError::OutsideLocal { room: 1000, .. }), "{range:?}: {refused}");
        }
        // Of this rank's own memory, and of rank 1's as if it were rank 0's.
        let refused = put(Piece { rmr: &own, ..piece(0..10, 200) });
        assert!(matches!(refused, PostError::Owner { rank: Rank(1), owner: Rank(0) }), "{refused}");
        let mixed = zero.post_put_batch(Rank(0), &[piece(0..1, 0)]).call();
        assert!(matches!(mixed, Err(PostError::Piece { at: 0, .. })), "{mixed:?}");

        let whole = Face { offset: 0, count: [10, 10, 1], pitch: [100, 0] };
        let put = |ours: &Face, theirs: &Face| {
            zero.post_put_face(Rank(1), &local, ours, rmr, theirs).call().unwrap_err()
        };
        for wrong in [
            Face { offset: 91, ..whole },
            Face { offset: usize::MAX, ..whole },
            Face { pitch: [usize::MAX / 2, 0], ..whole },
            Face { count: [1, 2, usize::MAX], pitch: [1, usize::MAX / 2], ..whole },
        ] {
            let same = Face { count: wrong.count, ..whole };
            for (ours, theirs, side) in [(&wrong, &same, "local"), (&same, &wrong, "remote")] {
                let refused = put(ours, theirs);
                let PostError::Face { which, cause } = &refused else { panic!("{refused}") };
                // Where the shape itself is impossible, both are wrong.
                let is_shape = wrong.count != whole.count;
                assert!(
                    is_shape || (*which == side && matches!(cause, FaceError::Outside { .. })),
                    "{refused}"
                );
            }
        }
        let narrow = Face { pitch: [9, 0], ..whole };
        assert!(matches!(
            put(&narrow, &whole),
            PostError::Face { which: "local", cause: FaceError::Pitch { .. } }
        ));
        assert!(matches!(
            put(&whole, &narrow),
            PostError::Face { which: "remote", cause: FaceError::Pitch { .. } }
        ));
        let other = Face { count: [10, 9, 1], ..whole };
        assert!(matches!(put(&whole, &other), PostError::Face { cause: FaceError::Shape { .. }, .. }));
        settle(&ground.ranks);
        assert_eq!(remote.region.whole().to_vec().unwrap(), [0; 1000], "{memory:?}: nothing was moved");

        // A name that says more than there is: what is mapped is checked here, else by its owner.
        let mut forged = rmr.to_bytes();
        forged[20..28].copy_from_slice(&5000_u64.to_le_bytes());
        let (forged, sink) = (Rmr::from_bytes(&forged).unwrap(), Sink::keeping());
        let pieces = [Piece { rmr: &forged, ..piece(0..10, 4000) }];
        match posted_or_refused(&ground.ranks, || zero.post_put_batch(Rank(1), &pieces).comp(&sink).call()) {
            Err(PostError::Piece { at: 0, cause }) => assert!(matches!(*cause, PostError::Outside { .. })),
            Ok(Outcome::Posted) => {
                let error = sink.one(&ground.ranks).ok().unwrap_err();
                assert!(matches!(error, OpError::Outside(Rank(1)) | OpError::Begin(_)), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // A registration that has ended.
        let Remote { region, rmr, _registered } = remote;
        ground.ranks[1].deregister_memory(_registered);
        settle(&ground.ranks);
        let pieces = [Piece { local: &local, range: 0..10, rmr: &rmr, offset: 0 }];
        match posted_or_refused(&ground.ranks, || zero.post_put_batch(Rank(1), &pieces).comp(&sink).call()) {
            Err(PostError::Piece { at: 0, cause }) => assert!(matches!(*cause, PostError::Stale(Rank(1)))),
            Ok(Outcome::Posted) => {
                let error = sink.one(&ground.ranks).ok().unwrap_err();
                assert!(matches!(error, OpError::Stale(Rank(1))), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(region.whole().to_vec().unwrap(), [0; 1000]);
    }
}

/// Calls again as long as it has to be.
fn posted_or_refused(
    ranks: &[Runtime],
    mut call: impl FnMut() -> Result<Outcome, PostError>,
) -> Result<Outcome, PostError> {
    loop {
        match call() {
            Ok(Outcome::Retry(_)) => step(ranks),
            other => return other,
        }
    }
}

fn pieces_that_overlap_are_refused_and_both_are_named<J: Job>() {
    let ground = Ground::new::<J>();
    let zero = &ground.ranks[0];
    let (local, remote) = (ground.local(Memory::Host, 1000), ground.remote(Memory::Host, true, 1000));
    let other = ground.remote(Memory::Host, true, 1000);
    local.whole().write(&[1; 1000]).unwrap();
    let piece = |range, offset| Piece { local: &local, range, rmr: &remote.rmr, offset };
    let shifted = remote.rmr.slice(100, 900).unwrap();
    for (pieces, is_put, wanted) in [
        (vec![piece(0..10, 50), piece(20..30, 70), piece(40..50, 59)], true, Some((0, 2))),
        (vec![piece(0..100, 0), piece(10..11, 50)], true, Some((0, 1))),
        // By another name of a part of the same memory.
        (vec![piece(0..10, 150), Piece { rmr: &shifted, ..piece(0..10, 55) }], true, Some((0, 1))),
        // What is read may be read twice; what is empty overlaps with nothing.
        (vec![piece(0..10, 50), piece(0..10, 60), piece(5..5, 55)], true, None),
        (vec![piece(0..10, 50), Piece { rmr: &other.rmr, ..piece(0..10, 50) }], true, None),
        (vec![piece(0..10, 50), piece(10..20, 50)], false, None),
        (vec![piece(0..10, 50), piece(30..40, 70), piece(9..19, 90)], false, Some((0, 2))),
    ] {
        let call = || match is_put {
            true => zero.post_put_batch(Rank(1), &pieces).allow_posted(false).call(),
            false => zero.post_get_batch(Rank(1), &pieces).call(),
        };
        match (std::thread::scope(|_| on_both(&ground.ranks, call)), wanted) {
            (Ok(Outcome::Done(status)), None) => assert!(status.error.is_none()),
            (Err(PostError::Overlap { first, second }), Some(wanted)) => {
                assert_eq!((first, second), wanted);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A call that waits, while the other rank makes progress.
fn on_both<R>(ranks: &[Runtime; 2], call: impl FnOnce() -> R) -> R {
    use std::sync::atomic::{AtomicBool, Ordering};
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                ranks[1].progress().unwrap();
                std::thread::yield_now();
            }
        });
        let result = call();
        over.store(true, Ordering::Relaxed);
        result
    })
}

fn a_batch_longer_than_what_may_wait_goes_on_by_itself_and_a_flush_waits_for_all_of_it<J: Job>() {
    const COUNT: usize = 300;
    let settings = J::settings().offers(16).kernel_copy(KernelCopyChoice::Off);
    let (ground, mut rng) = (Ground::over(J::pair_with(settings)), rng());
    let zero = &ground.ranks[0];
    for memory in [Memory::Host, Memory::Gpu] {
        let (local, remote) = (ground.local(memory, COUNT * 100), ground.remote(memory, false, COUNT * 100));
        let bytes = random(&mut rng, COUNT * 100);
        local.whole().write(&bytes).unwrap();
        let piece = |at: usize| Piece {
            local: &local,
            range: at * 100..(at + 1) * 100,
            rmr: &remote.rmr,
            offset: ((COUNT - 1 - at) * 100) as u64,
        };
        let pieces: Vec<_> = (0..COUNT).map(piece).collect();
        let (over, flushed) = (Sink::keeping(), Sink::keeping());
        let put = zero.post_put_batch(Rank(1), &pieces).comp(&over).remote_comp(ground.name);
        assert!(put.allow_retry(false).call().unwrap().is_posted());
        if !J::IS_RDMA {
            let waiting = zero.pending();
            assert!(waiting.operations.iter().any(|op| op.what == "put of a batch"), "{waiting:?}");
        }
        let flush = zero.post_flush(Rank(1)).comp(&flushed).allow_done(false).call().unwrap();
        assert!(flush.is_posted());
        until(&ground.ranks, || flushed.count() == 1);
        let found = remote.region.whole().to_vec().unwrap();
        assert!(found.chunks(100).eq(bytes.chunks(100).rev()), "{memory:?}: the flush was early");
        assert!(over.one(&ground.ranks).error.is_none());
        until(&ground.ranks, || ground.told.count() == 1);
        assert_eq!(ground.told.take().remove(0).size, COUNT * 100);
    }
}

fn a_batch_ends_once_when_the_peer_goes_and_when_this_rank_does<J: Job>() {
    for peer_goes in [true, false] {
        let settings = J::settings().offers(16).kernel_copy(KernelCopyChoice::Off);
        let ground = Ground::over(J::pair_with(settings));
        let (local, remote) =
            (ground.local(Memory::Host, 100_000), ground.remote(Memory::Host, false, 100_000));
        let piece = |at: usize| Piece {
            local: &local,
            range: at * 100..(at + 1) * 100,
            rmr: &remote.rmr,
            offset: (at * 100) as u64,
        };
        let pieces: Vec<_> = (0..1000).map(piece).collect();
        let over = Sink::keeping();
        connect(&ground.ranks);
        let put = ground.ranks[0].post_put_batch(Rank(1), &pieces).comp(&over);
        assert!(put.allow_retry(false).call().unwrap().is_posted());
        let Ground { ranks: [zero, one], .. } = ground;
        if peer_goes {
            drop((remote, one));
            let ranks = [zero];
            let error = over.one(&ranks).ok().unwrap_err();
            assert!(matches!(error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
            settle(&ranks);
            let put = ranks[0].post_put_batch(Rank(1), &[]).call();
            assert!(matches!(put, Err(PostError::PeerDown { rank: Rank(1), .. })), "{put:?}");
        } else {
            drop(zero);
            let statuses = over.take();
            assert_eq!(statuses.len(), 1, "{statuses:?}");
            assert!(matches!(statuses[0].error.as_deref(), Some(OpError::Closed)), "{statuses:?}");
        }
        assert_eq!(over.count(), 0);
    }
}

/// By an event of the program's, and by a stream: what is read is what was there when the event had fired.
fn a_batch_after_an_event_is_written_when_it_has_fired<J: Job>() {
    if is_for_simulated_only("there is no kernel that a test could hold up") {
        return;
    }
    let ground = Ground::new::<J>();
    let zero = &ground.ranks[0];
    let fake = ground.gpus.fake.as_ref().unwrap();
    for (mapped, on_stream, as_face) in [true, false].into_iter().flat_map(|mapped| {
        [(mapped, true, true), (mapped, true, false), (mapped, false, true), (mapped, false, false)]
    }) {
        let what = format!("mapped: {mapped}, on a stream: {on_stream}, a face: {as_face}");
        let (local, remote) = (ground.local(Memory::Gpu, 1000), ground.remote(Memory::Gpu, mapped, 2000));
        local.whole().write(&[0; 1000]).unwrap();
        remote.region.whole().write(&[9; 2000]).unwrap();
        let stream = fake.gpu(0).unwrap().fake_stream().unwrap();
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let slice = local.whole();
        let kernel = move |kernel: &mut carrack::transports::gpu::fake::Kernel| {
            gate.recv().unwrap();
            kernel.write(&slice, &[1; 1000])
        };
        stream.launch(kernel).unwrap();
        let as_stream: Arc<dyn Stream> = stream.clone();
        let piece = |at: usize| Piece {
            local: &local,
            range: at * 10..at * 10 + 10,
            rmr: &remote.rmr,
            offset: (at * 20) as u64,
        };
        let pieces: Vec<_> = (0..100).map(piece).collect();
        let ours = Face { offset: 0, count: [10, 100, 1], pitch: [10, 0] };
        let theirs = Face { pitch: [20, 0], ..ours };
        let over = Sink::keeping();
        let put = if as_face {
            zero.post_put_face(Rank(1), &local, &ours, &remote.rmr, &theirs)
        } else {
            zero.post_put_batch(Rank(1), &pieces)
        };
        let put = put.comp(&over).remote_comp(ground.name);
        let mut put =
            if on_stream { put.on_stream(&as_stream) } else { put.after(&stream.record().unwrap()) };
        assert!(posted(&ground.ranks, || put.call()).is_posted(), "{what}");
        if on_stream {
            // What the stream does later comes after the batch.
            let slice = local.whole();
            stream.launch(move |kernel| kernel.write(&slice, &[2; 1000])).unwrap();
        }
        for _ in 0..100 {
            step(&ground.ranks);
        }
        assert_eq!((over.count(), ground.told.count()), (0, 0), "{what}: it was not waited for");
        go.send(()).unwrap();
        until(&ground.ranks, || ground.told.count() == 1);
        let found = remote.region.whole().to_vec().unwrap();
        let wanted: Vec<u8> = (0..2000).map(|at| if at % 20 < 10 { 1 } else { 9 }).collect();
        assert!(found == wanted, "{what}");
        assert_eq!(ground.told.take().remove(0).size, 1000);
        assert!(over.one(&ground.ranks).error.is_none());
        stream.synchronize().unwrap();
    }
}

fn a_batch_whose_copy_fails_ends_once_with_the_drivers_error_and_gives_no_signal<J: Job>() {
    if is_for_simulated_only("no copy can be made to fail") {
        return;
    }
    let ground = Ground::new::<J>();
    let zero = &ground.ranks[0];
    let faults = ground.gpus.fake.as_ref().unwrap().faults();
    let local = ground.local(Memory::Gpu, 1000);
    for mapped in [true, false] {
        for at in [FailAt::Submit, FailAt::Event] {
            let remote = ground.remote(Memory::Gpu, mapped, 1000);
            let piece =
                |at: usize| Piece { local: &local, range: at..at + 1, rmr: &remote.rmr, offset: at as u64 };
            let pieces: Vec<_> = (0..100).map(piece).collect();
            let over = Sink::keeping();
            faults.fail_copies(at, Which::All, 700);
            match posted_or_refused(&ground.ranks, || {
                zero.post_put_batch(Rank(1), &pieces).comp(&over).remote_comp(ground.name).call()
            }) {
                Err(PostError::Memory(error)) => {
                    assert!(at == FailAt::Submit && error.to_string().contains("700"), "{error}");
                }
                Ok(Outcome::Posted) if J::IS_RDMA => {
                    // The NIC may need no engine.
                    until(&ground.ranks, || over.count() == 1);
                    let is_over = over.take().remove(0).error.is_none();
                    faults.heal_copies();
                    settle(&ground.ranks);
                    assert_eq!(ground.told.take().len(), usize::from(is_over));
                    continue;
                }
                Ok(Outcome::Posted) => {
                    let error = over.one(&ground.ranks).ok().unwrap_err();
                    assert!(!mapped || error.to_string().contains("700"), "{error}");
                }
                other => panic!("{other:?}"),
            }
            faults.heal_copies();
            settle(&ground.ranks);
            assert_eq!((over.count(), ground.told.count()), (0, 0));
        }
    }
}

fn a_batch_waits_in_a_call_that_may_not_be_posted_and_can_be_awaited<J: Job>() {
    let ground = Ground::new::<J>();
    for (memory, mapped) in [(Memory::Host, true), (Memory::Host, false), (Memory::Gpu, true)] {
        let (local, remote) = (ground.local(memory, 1000), ground.remote(memory, mapped, 1000));
        local.whole().write(&[5; 1000]).unwrap();
        remote.region.whole().write(&[0; 1000]).unwrap();
        let piece =
            |at: usize| Piece { local: &local, range: at..at + 9, rmr: &remote.rmr, offset: at as u64 };
        let pieces: Vec<_> = (0..50).map(|at| piece(at * 10)).collect();
        let zero = &ground.ranks[0];
        let put = || zero.post_put_batch(Rank(1), &pieces).allow_posted(false).call();
        let status = done(on_both(&ground.ranks, put).unwrap());
        assert!(status.error.is_none() && status.size == 450, "{status:?}");
        let wanted: Vec<u8> = (0..1000).map(|at| if at < 500 && at % 10 < 9 { 5 } else { 0 }).collect();
        assert!(remote.region.whole().to_vec().unwrap() == wanted);
        let back = ground.local(memory, 1000);
        back.whole().write(&[0; 1000]).unwrap();
        let pieces: Vec<_> = pieces.iter().map(|piece| Piece { local: &back, ..piece.clone() }).collect();
        let get = || zero.block_on(async { zero.post_get_batch(Rank(1), &pieces).await });
        let status = on_both(&ground.ranks, get).unwrap().unwrap();
        assert_eq!(status.size, 450);
        assert!(back.whole().to_vec().unwrap() == wanted);
        // A completion object that is full is told when it has room.
        let queue = CompQueue::new(1);
        let mut posted = 0;
        for _ in 0..20 {
            let mut put = zero.post_put_batch(Rank(1), &pieces).comp(&queue).allow_done(false);
            sent(&ground.ranks, || put.call());
            posted += 1;
        }
        let mut come = 0;
        until_with_errors(&ground.ranks, || {
            come += std::iter::from_fn(|| queue.pop()).count();
            come == posted
        });
    }
}
