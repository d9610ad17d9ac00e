//! Pieces that go together to or from memory that only its owner reaches.
//!
//! ```text
//! asker                                  owner
//!   pieces (tx, region, count) ───────►  an RTS like any other.  Its bytes are a list of places,
//!                                        and for a put the data behind it
//!                                        for a put copies the data to the places;
//!                                        for a get copies them from the places into one buffer
//!   ◄──────────────────────── FIN (tx)
//!   ◄──────────── fragment (rx, offset)  for a get: the bytes, possibly before the FIN
//! ```
//!
//! The places of a list lie in one region. A place takes sixteen bytes: the offset in the region,
//! and the length. All places are checked before anything is copied.

use super::in_flight::Run;
use super::landing::{Landing, Owed};
use super::{Moving, Target, Transfers};
use crate::chores::Waiting;
use crate::names::{Rank, Tag};
use crate::op::OpContext;
use crate::protocol::wire::{Control, Request, Rts, TransferVerdict};
use crate::region::{Refusal, Region};
use crate::staging::Staging;
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Buffer, CopyError, Hosts, Keeper, MemKind, MemRef, Together};
use std::any::Any;
use std::sync::Arc;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the longest piece of host memory that goes together with others. A longer piece gets a
/// message of its own, whose bytes are copied once instead of three times: as fast from 4 KiB on
/// (docs/adr/0011-thresholds.md).
pub(crate) const PIECE: usize = 4 << 10;

/// The same for GPU memory, where each message costs a copy by the engine.
pub(crate) const GPU_PIECE: usize = 32 << 10;

/// Bytes of the pieces of one message, at most: both sides allocate as much for it.
pub(crate) const BYTES: usize = 64 << 10;

/// Pieces of one message, at most.
pub(crate) const COUNT: usize = 1024;

/// Messages of pieces in flight from a rank to another on one device, at most. Bounds the memory
/// that both sides allocate.
pub(crate) const AT_ONCE: usize = 32;

/// A place in a list.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct PlaceBytes {
    /// Offset in the region.
    offset: U64,
    len: U64,
}

/// Builds a list of places, each an offset in the region and a length, with `room` bytes behind
/// it. Returns the beginning of that room.
///
/// None: it is host memory.
pub(crate) fn list(
    places: impl ExactSizeIterator<Item = (u64, usize)>,
    room: usize,
) -> Result<(Region, usize), CopyError> {
    let places =
        places.map(|(offset, len)| PlaceBytes { offset: offset.into(), len: (len as u64).into() });
    let places: Vec<_> = places.collect();
    let (list, len) = (places.as_bytes(), size_of_val(&places[..]));
    let region = Region::host(len + room);
    region.slice(0, len).map_or(Ok(()), |to| to.write(list))?;
    Ok((region, len))
}

/// Reads a list of places in a region of `room` bytes. Also returns their total bytes.
fn read_list(bytes: &[u8], room: usize) -> Result<(Vec<(usize, usize)>, usize), TransferVerdict> {
    let mut size = 0_usize;
    let place = |place: &PlaceBytes| {
        let offset = usize::try_from(place.offset.get()).ok()?;
        let len = usize::try_from(place.len.get()).ok()?;
        size = size.saturating_add(len);
        offset.checked_add(len).is_some_and(|end| end <= room).then_some((offset, len))
    };
    let list = <[PlaceBytes]>::ref_from_bytes(bytes).map_err(|_| TransferVerdict::Outside)?;
    let places: Option<_> = list.iter().map(place).collect();
    places.map(|places| (places, size)).ok_or(TransferVerdict::Outside)
}

/// Copies between contiguous bytes in `packed`, from `at` on, and places in regions. The CPU
/// copies between host memory at once. Otherwise all regions lie on one GPU, whose engine gets all
/// copies together.
///
/// # Errors
/// Something lies outside of its memory, no engine reaches it, or the engine refuses. No copy is
/// in flight then.
pub(crate) fn copy_packed<'r>(
    (packed, mut at): (&Region, usize),
    places: impl ExactSizeIterator<Item = (&'r Region, usize, usize)>,
    spreads: bool,
    staging: &Arc<Staging>,
) -> Result<Option<Moving>, CopyError> {
    let (count, mut together) = (places.len(), None::<Together>);
    for (region, offset, len) in places {
        let (place, bytes) = ((region, offset), (packed, at));
        let ((dst, to), (src, from)) = if spreads { (place, bytes) } else { (bytes, place) };
        at += len;
        if region.kind().is_host() {
            Hosts::between(dst, src)?.copy(to, from, len)?;
            continue;
        }
        let unknown = || CopyError::Unknown { dst: dst.kind(), src: src.kind() };
        let together = match &mut together {
            Some(together) if together.takes(dst, src) => together,
            None => together.insert(Together::between(dst, src, count).ok_or_else(unknown)?),
            Some(_) => return Err(unknown()),
        };
        if !together.push((dst, to), (src, from), len) {
            return Err(CopyError::TooLong { len, room: dst.len().saturating_sub(to) });
        }
    }
    together.map(|together| Moving::start_together(together, staging)).transpose()
}

/// Lists of pieces of this rank in flight. Flushes wait for them, and their number is limited.
pub(crate) struct Packed(Arc<Waiting<Vec<PackedList>>>);

impl Default for Packed {
    fn default() -> Self {
        Self(Arc::new(Waiting::new()))
    }
}

struct PackedList {
    name: u64,
    peer: Rank,
    /// Address of its bytes, once there are some.
    at: Option<usize>,
}

/// A guard: the list counts as in flight until this is dropped.
pub(crate) struct PackedInFlight(Arc<Waiting<Vec<PackedList>>>, u64);

impl PackedInFlight {
    /// Keeps the list in flight as long as `region` exists. An operation that has timed out leaves
    /// its bytes to the peer, which may still use them.
    pub(crate) fn with(self: &Arc<Self>, region: &Region) {
        let at = Some(region.addr());
        for one in self.0.lock().iter_mut().filter(|one| one.at == at || one.name == self.1) {
            // The bytes of an ended operation may have lain there before.
            one.at = at.filter(|_| one.name == self.1);
        }
        region.keep_with(|| self.clone());
    }
}

impl Keeper for PackedInFlight {
    fn keep(&self, owner: Box<dyn Any + Send + Sync>) {
        drop(owner);
    }
}

impl Drop for PackedInFlight {
    fn drop(&mut self) {
        let mut all = self.0.lock();
        all.retain(|one| one.name != self.1);
        self.0.set_count(all.len());
    }
}

impl Packed {
    /// Adds a list, unless there are `most` with that peer.
    fn note(&self, one: PackedList, most: usize) -> Option<PackedInFlight> {
        let in_flight = PackedInFlight(self.0.clone(), one.name);
        let mut all = self.0.lock();
        if all.iter().filter(|other| other.peer == one.peer).count() >= most {
            // Its drop takes the lock.
            drop(all);
            return None;
        }
        all.push(one);
        self.0.set_count(all.len());
        drop(all);
        Some(in_flight)
    }

    /// Forgets the list of these bytes, which stay taken for ever: no flush waits for it.
    pub(super) fn forget(&self, peer: Rank, bytes: MemRef<'_>) {
        let at = Some(bytes.as_ptr().addr());
        let mut all = self.0.lock();
        all.retain(|one| (one.peer, one.at) != (peer, at));
        self.0.set_count(all.len());
    }

    pub(super) fn count(&self) -> usize {
        self.0.count() as usize
    }

    /// Returns `true` if a list of this rank to or from a peer's memory began before `name`.
    pub(super) fn has(&self, peer: Rank, before: u64) -> bool {
        let is_meant = |one: &PackedList| one.peer == peer && one.name < before;
        !self.0.is_empty() && self.0.lock().iter().any(is_meant)
    }
}

impl Transfers {
    /// Notes a list to or from a peer's memory. `None`: the limit is reached, and the caller has
    /// to wait.
    pub(crate) fn note_packed(&self, peer: Rank) -> Option<PackedInFlight> {
        // Lists that an engine copies are not offered yet.
        let most = AT_ONCE.min(self.limit);
        self.packed.note(PackedList { name: self.now(), peer, at: None }, most)
    }
}

/// A list of pieces that a peer puts or gets.
pub(crate) struct PiecesRequest {
    /// The peer's name for the list.
    tx: u64,
    /// This rank's region.
    region: u64,
    /// Number of pieces.
    count: usize,
    /// The peer's name for the answer, if it gets them.
    wanted: Option<u64>,
}

impl Run<'_> {
    /// Handles an offer of pieces. Not inlined: other messages do not pay for its stack.
    #[inline(never)]
    pub(crate) fn offered_pieces(&mut self, from: Rank, rx: u64, request: Request) {
        let Request { name: tx, region, offset: count, first: size, second: addr } = request;
        let wanted = (rx != 0).then_some(rx);
        let fits = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let (count, size) = (fits(count), fits(size));
        let list = count.saturating_mul(size_of::<PlaceBytes>());
        let bytes = size.checked_sub(list).filter(|&bytes| bytes <= BYTES);
        if !(1..=COUNT).contains(&count) || bytes.is_none_or(|bytes| wanted.is_some() && bytes > 0)
        {
            return self.send_fin(from, tx, TransferVerdict::Failed);
        }
        let buffer = Buffer::Region(Region::host(size).whole());
        let asked = PiecesRequest { tx, region, count, wanted };
        let target = Target::Pieces { buffer, asked: Box::new(asked) };
        let rts = Rts { size: size as u64, tx, addr, mapped: None };
        if let Some(ended) = self.device.accept(self.carrier, (from, rts), target, None) {
            self.end(ended);
        }
    }

    /// Handles a list that has arrived, with the bytes behind it.
    #[cold]
    #[inline(never)]
    pub(super) fn carry_out(&mut self, from: Rank, asked: PiecesRequest, buffer: &Buffer) {
        let tx = asked.tx;
        if let Err(verdict) = self.begin_pieces(from, asked, buffer) {
            self.send_fin(from, tx, verdict);
        }
    }

    fn begin_pieces(
        &mut self,
        from: Rank,
        asked: PiecesRequest,
        buffer: &Buffer,
    ) -> Result<(), TransferVerdict> {
        let Buffer::Region(come) = buffer else { return Err(TransferVerdict::Failed) };
        let (come, list) = (come.region(), asked.count * size_of::<PlaceBytes>());
        let places = come
            .slice(0, list)
            .and_then(|places| places.to_vec().ok())
            .ok_or(TransferVerdict::Failed)?;
        let meant =
            self.carrier.regions.find(asked.region, 0, 0).map_err(|refusal| match refusal {
                Refusal::Stale => TransferVerdict::Stale,
                Refusal::Outside => TransferVerdict::Outside,
            })?;
        let region = meant.region();
        check_kinds(MemKind::Host, region.kind()).map_err(|_| TransferVerdict::Failed)?;
        let (places, size) = read_list(&places, region.len())?;
        let is_sound = match asked.wanted {
            None => list.checked_add(size) == Some(come.len()),
            Some(_) => (1..=BYTES).contains(&size),
        };
        if !is_sound {
            return Err(TransferVerdict::Failed);
        }
        let packed =
            if asked.wanted.is_some() { (Region::host(size), 0) } else { (come.clone(), list) };
        let each = places.iter().map(|&(offset, len)| (region, offset, len));
        let begun =
            copy_packed((&packed.0, packed.1), each, asked.wanted.is_none(), &self.carrier.staging);
        let moving = begun.map_err(|why| {
            tracing::warn!(%from, %why, "pieces of memory of this rank's could not be copied");
            TransferVerdict::Failed
        })?;
        let Some(moving) = moving else {
            self.pieces_are_done(from, &asked, &packed.0);
            return Ok(());
        };
        let owed = Owed::Pieces(Box::new(Carried { asked, packed: packed.0 }));
        let op = OpContext::of_runtime(from, Tag::default(), size, None);
        let landing = Landing::of_message(moving, op);
        self.device.landings.add(Landing { owed: Some(Box::new(owed)), ..landing });
        Ok(())
    }
}

/// A peer's pieces that an engine copies.
pub(crate) struct Carried {
    asked: PiecesRequest,
    packed: Region,
}

impl Run<'_> {
    /// Ends the pieces that an engine has copied.
    #[cold]
    #[inline(never)]
    pub(crate) fn carried_out(&mut self, from: Rank, carried: Carried, error: Option<&CopyError>) {
        let Carried { asked, packed } = carried;
        match error {
            None => self.pieces_are_done(from, &asked, &packed),
            Some(why) => {
                tracing::warn!(%from, %why, "pieces of memory of this rank's could not be copied");
                self.send_fin(from, asked.tx, TransferVerdict::Failed);
            }
        }
    }

    /// Ends pieces that are copied. The peer gets the verdict, and the bytes of a get.
    fn pieces_are_done(&mut self, from: Rank, asked: &PiecesRequest, packed: &Region) {
        let fin = Control::Fin { name: asked.tx, verdict: TransferVerdict::Done };
        self.device.control(self.carrier, from, fin);
        if let Some(rx) = asked.wanted {
            let about = (Tag::default(), None);
            self.device.answer(self, from, (rx, usize::MAX), packed.whole().into(), about);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::gpu::Flavour;
    use carrack_transports::gpu::Gpu;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_list_is_read_as_it_was_written_and_no_place_lies_outside(
            places in vec((0_usize..200, 0_usize..50), 0..20), room in 0_usize..250,
        ) {
            let written = places.iter().map(|&(offset, len)| (offset as u64, len));
            let (region, behind) = list(written, 7).unwrap();
            prop_assert_eq!(behind, places.len() * size_of::<PlaceBytes>());
            prop_assert_eq!(region.len(), behind + 7);
            let bytes = region.slice(0, behind).unwrap().to_vec().unwrap();
            let is_outside = places.iter().any(|(offset, len)| offset + len > room);
            match read_list(&bytes, room) {
                Ok((found, size)) => {
                    prop_assert!(!is_outside);
                    prop_assert_eq!(size, places.iter().map(|(_, len)| len).sum::<usize>());
                    prop_assert_eq!(found, places);
                }
                Err(verdict) => prop_assert!(is_outside && verdict == TransferVerdict::Outside),
            }
        }

        #[test]
        fn whatever_a_peer_writes_is_a_list_of_places_within_the_region_or_refused(
            words: Vec<u64>, room: usize,
        ) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            if let Ok((places, _)) = read_list(&bytes, room) {
                let ends = places.iter().map(|(offset, len)| offset.checked_add(*len).unwrap());
                prop_assert!(ends.max().unwrap_or(0) <= room);
            }
        }
    }

    #[test]
    fn a_list_whose_bytes_are_gone_stays_though_those_of_a_gone_peer_lie_there_now() {
        let (packed, region) = (Packed::default(), Region::host(8));
        let at = Some(region.addr());
        let one = |name, peer| packed.note(PackedList { name, peer: Rank(peer), at }, 3);
        let _held = [one(1, 1), one(2, 2)];
        packed.forget(Rank(2), region.whole().view());
        assert!(packed.has(Rank(1), 3) && !packed.has(Rank(2), 3));
    }

    #[test]
    fn a_list_of_the_same_peer_whose_bytes_lay_there_before_stays() {
        let (packed, region) = (Packed::default(), Region::host(8));
        let held = [1, 2].map(|name| {
            let one = PackedList { name, peer: Rank(1), at: None };
            Arc::new(packed.note(one, 3).unwrap())
        });
        // In either order of their beginnings.
        held[1].with(&region);
        held[0].with(&region);
        packed.forget(Rank(1), region.whole().view());
        assert!(!packed.has(Rank(1), 2) && packed.has(Rank(1), 3));
    }

    #[test]
    fn lists_in_flight_to_a_peer_are_limited_and_each_counts_until_its_bytes_are_gone() {
        let packed = Packed::default();
        let one = |name, peer| PackedList { name, peer: Rank(peer), at: None };
        let mut held: Vec<_> =
            (0..3).map(|name| packed.note(one(name, 1), 3).map(Arc::new)).collect();
        assert!(held.iter().all(Option::is_some) && packed.note(one(3, 1), 3).is_none());
        assert!(packed.note(one(4, 2), 3).is_some());
        assert!(packed.has(Rank(1), 1) && !packed.has(Rank(1), 0) && !packed.has(Rank(2), 9));
        let bytes = Region::host(10);
        held[0].take().unwrap().with(&bytes);
        assert!(packed.has(Rank(1), 1));
        drop(bytes);
        assert!(!packed.has(Rank(1), 1) && packed.has(Rank(1), 2));
        drop(held);
        assert_eq!(packed.count(), 0);
    }

    #[test]
    fn bytes_go_to_their_places_and_come_back_whatever_memory_these_are_in() {
        let driver = FakeDriver::new(FakeConfig::devices(2)).unwrap();
        let gpus = [0, 1].map(|at| driver.gpu(at).unwrap());
        let staging = Arc::new(Staging::default());
        let memory = |flavour| gpus[0].allocate(100, flavour).unwrap();
        let other = gpus[1].allocate(100, Flavour::Plain).unwrap();
        let copy = |packed: &Region, places: &[(&Region, usize, usize)], spreads| match copy_packed(
            (packed, 5),
            places.iter().copied(),
            spreads,
            &staging,
        )? {
            None => Ok(()),
            Some(mut moving) => loop {
                if let Some(ended) = moving.poll(true) {
                    break ended;
                }
            },
        };
        for region in [Region::host(100), memory(Flavour::Pinned), memory(Flavour::Plain)] {
            region.whole().write(&[0; 100]).unwrap();
            let packed = Region::host(35);
            packed.whole().write(&(0..35).collect::<Vec<u8>>()).unwrap();
            let places = [(&region, 90, 10), (&region, 0, 0), (&region, 3, 15), (&region, 60, 5)];
            copy(&packed, &places, true).unwrap();
            let found = region.whole().to_vec().unwrap();
            let mut wanted = [0; 100];
            for (place, first, len) in [(90, 5, 10), (3, 15, 15), (60, 30, 5)] {
                (first..first + len)
                    .zip(&mut wanted[place..])
                    .for_each(|(byte, place)| *place = byte);
            }
            assert_eq!(found, wanted);
            let back = Region::host(35);
            back.whole().write(&[0; 35]).unwrap();
            copy(&back, &places, false).unwrap();
            assert_eq!(back.whole().to_vec().unwrap()[5..], packed.whole().to_vec().unwrap()[5..]);
            // Places outside of the memory, on either side.
            assert!(copy(&packed, &[(&region, 91, 10)], true).is_err());
            assert!(copy(&packed, &[(&region, 0, 31)], true).is_err());
            if !region.kind().is_host() {
                assert!(
                    copy(&packed, &[(&region, 0, 5), (&other, 0, 5)], true).is_err(),
                    "of two GPUs"
                );
            }
        }
    }
}
