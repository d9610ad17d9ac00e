//! Many puts or gets as one: pieces and strided data, of host, pinned and device memory, mapped or
//! not. The tests detect a byte written outside of a piece, and a notification before the bytes.

use crate::support::gpus::{self, is_for_simulated_only};
use crate::support::keys::without_keys;
use crate::support::sink::{Sink, Sort};
use crate::support::*;
use carrack::region::Region;
use carrack::settings::AutoChoice;
use carrack::transports::gpu::Flavour;
use carrack::{
    Outcome, Piece, PostError, Rank, RemoteComp, RemoteKey, Runtime, Status, Strided, Tag,
    UserContext,
};
use rand::seq::SliceRandom;
use rand::{Rng, rngs::SmallRng};
use std::ops::Range;
use std::sync::Arc;

crate::support::over_each_transport_and!(
    copiers,
    WithCopiers;
    pieces_arrive_to_the_last_byte_and_the_notification_behind_them,
    strided_blocks_of_one_to_three_dimensions_arrive_to_the_last_byte,
    pieces_of_several_regions_and_kinds_of_memory_go_in_one_batch,
    a_thousand_pieces_with_a_gpu_are_one_call_of_the_driver_and_so_is_a_strided_block,
    a_thousand_small_pieces_that_their_owner_reaches_are_a_few_messages_and_calls_of_the_driver,
);

/// Memory kind of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Host,
    Pinned,
    Gpu,
}

const ALL: [Memory; 3] = [Memory::Host, Memory::Pinned, Memory::Gpu];

pub(super) struct PieceFixture {
    pub(super) ranks: [Runtime; 2],
    pub(super) gpus: gpus::TestDriver,
    pub(super) told: Arc<Sink>,
    pub(super) name: RemoteComp,
}

/// Memory of rank 1's, and its name.
pub(super) struct Remote {
    pub(super) region: Region,
    pub(super) rmr: RemoteKey,
    pub(super) registered: carrack::Mr,
}

/// Returns `count` pieces of `len` bytes, contiguous in `local`, and in the other rank's memory at
/// the offset that `place` returns for each.
pub(super) fn side_by_side<'a>(
    local: &'a Region,
    rmr: &'a RemoteKey,
    (count, len): (usize, usize),
    place: impl Fn(usize) -> usize,
) -> Vec<Piece<'a>> {
    let piece =
        |at: usize| Piece { local, range: at * len..(at + 1) * len, rmr, offset: place(at) as u64 };
    (0..count).map(piece).collect()
}

impl PieceFixture {
    pub(super) fn new<J: Job>() -> Self {
        Self::over(J::pair())
    }

    pub(super) fn over(ranks: [Runtime; 2]) -> Self {
        let told = Arc::new(Sink::new(Sort::Queue));
        let name = ranks[1].register_comp(&*told).unwrap();
        let gpus = gpus::TestDriver::new();
        if ranks[0].settings().gpu_copier() {
            gpus.driver.use_copiers();
        }
        Self { ranks, gpus, told, name }
    }

    /// Allocates memory of this rank's.
    pub(super) fn local(&self, memory: Memory, len: usize) -> Region {
        match memory {
            Memory::Host => Region::host(len),
            Memory::Pinned => self.gpus.last().allocate(len, Flavour::Pinned).unwrap(),
            Memory::Gpu => self.gpus.gpus[0].allocate(len, Flavour::Plain).unwrap(),
        }
    }

    /// Allocates memory of rank 1's: with all that it takes to map it, or without.
    pub(super) fn remote(&self, memory: Memory, mapped: bool, len: usize) -> Remote {
        let region = match memory {
            Memory::Host if mapped => self.ranks[1].allocate(len).unwrap(),
            Memory::Gpu => self.gpus.last().allocate(len, Flavour::Plain).unwrap(),
            other => self.local(other, len),
        };
        let registered = self.ranks[1].register_memory(&region).unwrap();
        let rmr = registered.remote_key();
        let rmr = if mapped { rmr } else { without_keys(&rmr) };
        Remote { region, rmr, registered }
    }

    /// Returns the status of an operation that may be complete at once.
    pub(super) fn ended(
        &self,
        sink: &Sink,
        call: impl FnMut() -> Result<Outcome, PostError>,
    ) -> Status {
        match posted(&self.ranks, call) {
            Outcome::Done(status) => {
                assert_eq!(sink.count(), 0, "done, and told");
                status
            }
            _ => sink.one(&self.ranks),
        }
    }
}

/// Returns the memory kinds of both sides, mapped or not. Over RDMA, a key without mapping makes
/// no difference.
fn sorts<J: Job>() -> Vec<(Memory, Memory, bool)> {
    let pairs = ALL.into_iter().flat_map(|local| ALL.map(|remote| (local, remote)));
    let mapped = if !J::MAPS { vec![J::IS_RDMA] } else { vec![true, false] };
    pairs
        .flat_map(|(local, remote)| {
            mapped.clone().into_iter().map(move |mapped| (local, remote, mapped))
        })
        .collect()
}

/// Returns random parts of two regions that do not overlap, in random order; and how long the
/// regions have to be.
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

fn pieces_arrive_to_the_last_byte_and_the_notification_behind_them<J: Job>() {
    let (fixture, mut rng) = (PieceFixture::new::<J>(), rng());
    for (ours, theirs, mapped) in sorts::<J>() {
        for count in [1, 2, 65, amount("TEST_PIECES", 200, 1000) as usize] {
            for is_put in [true, false] {
                let what =
                    format!("{ours:?} {theirs:?} mapped: {mapped}, {count} pieces, put: {is_put}");
                let (parts, room) = parts(&mut rng, count, if count < 100 { 3000 } else { 60 });
                let (local, remote) =
                    (fixture.local(ours, room), fixture.remote(theirs, mapped, room));
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
                let (sink, zero) = (Sink::keeping(), &fixture.ranks[0]);
                let batch = if is_put {
                    zero.post_put_batch(Rank(1), &pieces)
                } else {
                    zero.post_get_batch(Rank(1), &pieces)
                };
                let batch = batch.comp(&sink).user_context(UserContext(7)).tag(Tag(count as u64));
                let mut batch = batch.remote_comp(fixture.name);
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
                let outcome = posted(&fixture.ranks, || batch.try_submit());
                until(&fixture.ranks, || fixture.told.count() == 1);
                let found = remote.region.whole().to_vec().unwrap();
                assert!(found == wanted_there, "{what}: notified early, or a byte is wrong");
                let told = fixture.told.take().remove(0);
                assert!(told.error.is_none(), "{what}: {told:?}");
                assert_eq!(
                    (told.rank, told.tag, told.size),
                    (Rank(0), Tag(count as u64), size),
                    "{what}"
                );
                let status = match outcome {
                    Outcome::Done(status) => status,
                    _ => sink.one(&fixture.ranks),
                };
                assert!(status.error.is_none(), "{what}: {status:?}");
                assert_eq!((status.rank, status.size), (Rank(1), size), "{what}");
                assert_eq!((status.user_context, status.tag), (UserContext(7), Tag(count as u64)));
                assert!(
                    local.whole().to_vec().unwrap() == wanted_here,
                    "{what}: this rank's memory"
                );
                settle(&fixture.ranks);
                assert_eq!((sink.count(), fixture.told.count()), (0, 0), "{what}: told twice");
            }
        }
    }
}

/// Returns a strided block of that shape, and the length of a region for it. That is at least a
/// byte, as no GPU gives memory of none.
fn block(rng: &mut SmallRng, count: [usize; 3]) -> (Strided, usize) {
    let offset = rng.random_range(0..100);
    let row = count[0] + rng.random_range(0..2) * rng.random_range(0..50);
    let plane = row * count[1] + rng.random_range(0..2) * rng.random_range(0..70);
    let block = Strided { offset, count, pitch: [row, plane] };
    let end = block.check(usize::MAX).unwrap();
    (block, (end + rng.random_range(0..50)).max(1))
}

fn strided_blocks_of_one_to_three_dimensions_arrive_to_the_last_byte<J: Job>() {
    let (fixture, mut rng) = (PieceFixture::new::<J>(), rng());
    let shapes =
        [[300, 1, 1], [24, 40, 1], [8, 12, 10], [8, 1, 30], [1, 20, 3], [0, 5, 5], [8, 0, 1]];
    for (ours, theirs, mapped) in sorts::<J>() {
        for count in shapes {
            for is_put in [true, false] {
                let what =
                    format!("{ours:?} {theirs:?} mapped: {mapped}, {count:?}, put: {is_put}");
                let ((block, len), (other, room)) =
                    (block(&mut rng, count), block(&mut rng, count));
                // Planes that are no whole number of rows apart are met by chance, too.
                let (local, remote) =
                    (fixture.local(ours, len), fixture.remote(theirs, mapped, room + 10));
                let (here, there) = (random(&mut rng, len), random(&mut rng, room + 10));
                local.whole().write(&here).unwrap();
                remote.region.whole().write(&there).unwrap();
                let named = remote.rmr.slice(10, room as u64).unwrap();
                let sink = Sink::keeping();
                let zero = &fixture.ranks[0];
                let batch = if is_put {
                    zero.post_put_strided(Rank(1), &local, &block, &named, &other)
                } else {
                    zero.post_get_strided(Rank(1), &local, &block, &named, &other)
                };
                let mut batch = batch.comp(&sink).remote_comp(fixture.name);
                let (mut wanted_here, mut wanted_there) = (here.clone(), there.clone());
                let rows = (0..count[2]).flat_map(|z| (0..count[1]).map(move |y| (z, y)));
                for (z, y) in rows.filter(|_| count[0] > 0) {
                    let at =
                        |block: &Strided| block.offset + y * block.pitch[0] + z * block.pitch[1];
                    let (ours, theirs) = (
                        at(&block)..at(&block) + count[0],
                        10 + at(&other)..10 + at(&other) + count[0],
                    );
                    if is_put {
                        wanted_there[theirs].copy_from_slice(&here[ours]);
                    } else {
                        wanted_here[ours].copy_from_slice(&there[theirs]);
                    }
                }
                let outcome = posted(&fixture.ranks, || batch.try_submit());
                until(&fixture.ranks, || fixture.told.count() == 1);
                let size = count.iter().product::<usize>();
                assert_eq!(fixture.told.take().remove(0).size, size, "{what}");
                assert!(remote.region.whole().to_vec().unwrap() == wanted_there, "{what}");
                let status = match outcome {
                    Outcome::Done(status) => status,
                    _ => sink.one(&fixture.ranks),
                };
                assert!(status.error.is_none() && status.size == size, "{what}: {status:?}");
                assert!(
                    local.whole().to_vec().unwrap() == wanted_here,
                    "{what}: this rank's memory"
                );
            }
        }
    }
}

fn pieces_of_several_regions_and_kinds_of_memory_go_in_one_batch<J: Job>() {
    const EACH: usize = 500;
    let (fixture, mut rng) = (PieceFixture::new::<J>(), rng());
    let locals = ALL.map(|memory| fixture.local(memory, EACH));
    let remotes: Vec<_> = sorts::<J>()
        .into_iter()
        .map(|(_, memory, mapped)| fixture.remote(memory, mapped, 3 * EACH))
        .collect();
    let bytes: Vec<_> = locals.iter().map(|_| random(&mut rng, EACH)).collect();
    locals.iter().zip(&bytes).for_each(|(local, bytes)| local.whole().write(bytes).unwrap());
    let mut pieces = Vec::new();
    for remote in &remotes {
        remote.region.whole().write(&[0xee; 3 * EACH]).unwrap();
        for (at, local) in locals.iter().enumerate() {
            // Some of each pair stand far apart.
            for range in [1..9, 9..100, 100..300, 300..EACH - 1] {
                let offset = (at * EACH + range.start - 1) as u64;
                pieces.push(Piece { local, range, rmr: &remote.rmr, offset });
            }
        }
    }
    pieces.shuffle(&mut rng);
    let sink = Sink::keeping();
    let mut put =
        fixture.ranks[0].post_put_batch(Rank(1), &pieces).comp(&sink).remote_comp(fixture.name);
    let status = fixture.ended(&sink, || put.try_submit());
    assert!(status.error.is_none(), "{status:?}");
    until(&fixture.ranks, || fixture.told.count() == 1);
    assert_eq!(fixture.told.take().remove(0).size, remotes.len() * locals.len() * (EACH - 2));
    let mut wanted = vec![0xee; 3 * EACH];
    for (at, bytes) in bytes.iter().enumerate() {
        wanted[at * EACH..(at + 1) * EACH - 2].copy_from_slice(&bytes[1..EACH - 1]);
    }
    for remote in &remotes {
        assert!(remote.region.whole().to_vec().unwrap() == wanted);
    }
}

fn a_thousand_pieces_with_a_gpu_are_one_call_of_the_driver_and_so_is_a_strided_block<J: Job>() {
    if is_for_simulated_only("the driver's calls are not counted") || !J::MAPS {
        return;
    }
    let fixture = PieceFixture::new::<J>();
    let (zero, fake) = (&fixture.ranks[0], fixture.gpus.fake.as_ref().unwrap());
    let block = Strided { offset: 0, count: [8, 10, 20], pitch: [64, 6400] };
    let pairs = ALL.into_iter().flat_map(|local| ALL.map(|remote| (local, remote)));
    // A NIC's or the owner's is what is pinned and not the caller's own.
    for (ours, theirs) in
        pairs.filter(|pair| [pair.0, pair.1].contains(&Memory::Gpu) && pair.1 != Memory::Pinned)
    {
        let (local, remote) = (fixture.local(ours, 128_000), fixture.remote(theirs, true, 128_000));
        let pieces = side_by_side(&local, &remote.rmr, (1000, 64), |at| (999 - at) * 128);
        for (is_put, is_strided) in [(true, false), (true, true), (false, false), (false, true)] {
            let (sink, before) = (Sink::keeping(), fake.counters());
            let mut post = match (is_put, is_strided) {
                (true, false) => zero.post_put_batch(Rank(1), &pieces),
                (true, true) => zero.post_put_strided(Rank(1), &local, &block, &remote.rmr, &block),
                (false, false) => zero.post_get_batch(Rank(1), &pieces),
                (false, true) => {
                    zero.post_get_strided(Rank(1), &local, &block, &remote.rmr, &block)
                }
            }
            .comp(&sink);
            assert!(fixture.ended(&sink, || post.try_submit()).error.is_none());
            let after = fake.counters();
            // One command of the resident copier, where there is one.
            let calls = after.batches - before.batches + after.copier_copies - before.copier_copies;
            let what = format!("{ours:?} {theirs:?}, put: {is_put}, strided: {is_strided}");
            assert_eq!((calls, after.copies - before.copies), (1, 0), "{what}");
        }
    }
}

fn a_thousand_small_pieces_that_their_owner_reaches_are_a_few_messages_and_calls_of_the_driver<
    J: Job,
>() {
    if is_for_simulated_only("the driver's calls are not counted") || J::IS_RDMA {
        return;
    }
    let fixture =
        PieceFixture::over(J::pair_with(J::settings().setting("kernel_copy", AutoChoice::Off)));
    let (zero, fake) = (&fixture.ranks[0], fixture.gpus.fake.as_ref().unwrap());
    connect(&fixture.ranks);
    let block = Strided { offset: 0, count: [64, 100, 10], pitch: [128, 12_800] };
    for (ours, theirs) in ALL.into_iter().flat_map(|local| ALL.map(|remote| (local, remote))) {
        let (local, remote) =
            (fixture.local(ours, 128_000), fixture.remote(theirs, false, 128_000));
        let pieces = side_by_side(&local, &remote.rmr, (1000, 64), |at| (999 - at) * 128);
        for (is_put, is_strided) in [(true, false), (true, true), (false, false), (false, true)] {
            let what = format!("{ours:?} {theirs:?}, put: {is_put}, strided: {is_strided}");
            let (sink, before) = (Sink::keeping(), fake.counters());
            let post = match (is_put, is_strided) {
                (true, false) => zero.post_put_batch(Rank(1), &pieces),
                (true, true) => zero.post_put_strided(Rank(1), &local, &block, &remote.rmr, &block),
                (false, false) => zero.post_get_batch(Rank(1), &pieces),
                (false, true) => {
                    zero.post_get_strided(Rank(1), &local, &block, &remote.rmr, &block)
                }
            };
            assert!(post.comp(&sink).try_submit().unwrap().is_posted(), "{what}");
            let waiting = zero.pending().operations;
            assert!((1..=2).contains(&waiting.len()), "{what}: {waiting:?}");
            assert!(sink.one(&fixture.ranks).error.is_none());
            let after = fake.counters();
            let calls = after.batches - before.batches + after.copies - before.copies;
            let sides =
                [ours, theirs].into_iter().filter(|side| *side == Memory::Gpu).count() as u64;
            assert_eq!(calls + after.copier_copies - before.copier_copies, sides, "{what}");
        }
    }
}

/// Returns two (count, length) pairs of pieces that take more than 16 operations on memory that
/// only its owner or a NIC accesses. The first are pieces that each travel alone, the second so
/// numerous that they take as many messages.
pub(super) fn more_than_16<J: Job>() -> [(usize, usize); 2] {
    [(300, 5000), (if J::IS_RDMA { 300 } else { 20_000 }, 100)]
}

/// Calls again while the outcome is a retry.
pub(super) fn posted_or_refused(
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

/// Makes a call that waits, while the other rank makes progress.
pub(super) fn on_both<R>(ranks: &[Runtime; 2], call: impl FnOnce() -> R) -> R {
    use std::sync::atomic::{AtomicBool, Ordering};
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                ranks[1].progress().unwrap();
                std::thread::yield_now();
            }
        });
        let result = call();
        ended.store(true, Ordering::Relaxed);
        result
    })
}
