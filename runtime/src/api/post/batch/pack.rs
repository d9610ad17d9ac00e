//! Small pieces of memory that only its owner reaches, many in one message: see
//! [`packed`](crate::datapath::packed).

use super::join::Join;
use super::{Batch, Piece};
use crate::api::post::options::{Outcome, Post, RetryReason};
use crate::comp::{Completion, Status};
use crate::datapath::packed::{BYTES, COUNT, GPU_PIECE, PIECE, PackedInFlight, copy_packed, list};
use crate::datapath::{Device, Landing, Port};
use crate::deadline::Deadline;
use crate::error::{OpError, PostError};
use crate::names::Rank;
use crate::op::OpContext;
use crate::progress::Core;
use crate::protocol::wire::{Control, Request};
use crate::region::Region;
use carrack_transports::mem::RegionSlice;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Returns `true` if a piece goes together with others.
pub(super) fn goes_with_others(piece: &Piece<'_>) -> bool {
    piece.len() <= if piece.local.kind().is_host() { PIECE } else { GPU_PIECE }
}

/// Packs that are searched for room: a program may fill this many in turns.
const OPEN: usize = 8;

/// Pieces of one region of the other rank's; here all of host memory, or all of one GPU's.
#[derive(Default)]
pub(super) struct Pack {
    /// The number of the other rank's region.
    region: u64,
    /// The local part and the remote beginning of each piece.
    pieces: Vec<(RegionSlice, u64)>,
    bytes: usize,
}

impl Pack {
    /// Packs pieces in any order into few packs. Each piece is known to be within its region.
    pub(super) fn all_of(pieces: &[Piece<'_>]) -> Vec<Self> {
        let mut packs = Vec::<Self>::new();
        for piece in pieces {
            let region = piece.rmr.number();
            let Some(local) = piece.local.slice(piece.range.start, piece.len()) else { continue };
            // The owner notices a forged key.
            let place = piece.rmr.offset().saturating_add(piece.offset);
            let begun = packs.iter_mut().rev().take(OPEN).find(|pack| pack.takes(&local, region));
            match begun {
                Some(pack) => pack.push(local, place),
                None => {
                    let mut pack = Self { region, ..Self::default() };
                    pack.push(local, place);
                    packs.push(pack);
                }
            }
        }
        packs
    }

    fn takes(&self, local: &RegionSlice, region: u64) -> bool {
        let is_alike = |(first, _): &(RegionSlice, u64)| {
            let (first, other) = (first.region(), local.region());
            let has_same_engine = || {
                first.gpu().zip(other.gpu()).is_some_and(|(one, another)| Arc::ptr_eq(one, another))
            };
            first.is(other)
                || (first.kind().is_host() && other.kind().is_host())
                || (first.kind() == other.kind() && has_same_engine())
        };
        self.region == region
            && self.pieces.len() < COUNT
            && self.bytes + local.len() <= BYTES
            && self.pieces.first().is_none_or(is_alike)
    }

    fn push(&mut self, local: RegionSlice, place: u64) {
        self.bytes += local.len();
        self.pieces.push((local, place));
    }

    /// Checks that its memory still exists: once for consecutive pieces of one region.
    fn recheck(&self) -> Result<(), PostError> {
        let runs = self.pieces.chunk_by(|(one, _), (next, _)| one.region().is(next.region()));
        let mut firsts = runs.filter_map(|run| run.first());
        firsts.try_for_each(|(local, _)| local.region().recheck()).map_err(PostError::Freed)
    }

    /// Returns its bytes, without the list.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }
}

/// Returns the local places of pieces.
fn places(pieces: &[(RegionSlice, u64)]) -> impl ExactSizeIterator<Item = (&Region, usize, usize)> {
    pieces.iter().map(|(local, _)| (local.region(), local.offset(), local.len()))
}

impl Post<'_, Batch<'_>> {
    /// Begins a pack: as an operation of its own, which `join` hears of.
    pub(super) fn begin_pack(
        &self,
        pack: &mut Pack,
        is_put: bool,
        join: &Arc<Join>,
    ) -> Result<Outcome, PostError> {
        self.check_deadline()?;
        self.check_transport(self.check_reach()?)?;
        let (device, runtime) = (self.device_inner(), &self.runtime.0);
        let in_flight = if device.transfers.is_full() {
            None
        } else {
            device.transfers.note_packed(self.desc.rank)
        };
        let Some(in_flight) = in_flight else { return Ok(Outcome::Retry(RetryReason::Unanswered)) };
        pack.recheck()?;
        let in_flight = Arc::new(in_flight);
        let lists = pack.pieces.iter().map(|(local, place)| (*place, local.len()));
        let (packed, behind) =
            list(lists, if is_put { pack.bytes } else { 0 }).map_err(PostError::Memory)?;
        in_flight.with(&packed);
        let request = Request {
            name: 0,
            region: pack.region,
            offset: pack.pieces.len() as u64,
            first: packed.len() as u64,
            second: 0,
        };
        let end: Arc<dyn Completion> =
            Arc::new(PackCompletion { join: join.clone(), in_flight: Mutex::new(Some(in_flight)) });
        let onward =
            Onward { runtime: Arc::downgrade(runtime), device: device.index, end: end.clone() };
        // The size of this pack; the join reports that of the batch.
        let operation = self.desc.context(packed.len(), Some(end.clone()));
        if is_put {
            let filled =
                copy_packed((&packed, behind), places(&pack.pieces), false, &runtime.staging);
            match filled.map_err(PostError::Memory)? {
                None => ask(device, runtime, (0, request), operation, &packed),
                Some(moving) => {
                    let comp =
                        Filled { onward, next: Mutex::new(Some((request, operation, packed))) };
                    let op = self.desc.context(pack.bytes, Some(Arc::new(comp)));
                    device.landings.add(Landing::of_message(moving, op));
                }
            }
        } else {
            let list = packed;
            let packed = Region::host(pack.bytes);
            let rank = self.desc.rank;
            let pieces = Mutex::new(std::mem::take(&mut pack.pieces));
            let answered = Answered { onward: onward.clone(), pieces, packed: packed.clone() };
            let bytes = pack.bytes;
            let op = self.desc.context(bytes, Some(Arc::new(answered)));
            let op = OpContext { rank, size: bytes, ..op };
            let landing = device.expect_answer(runtime, packed.whole().into(), op);
            // The deadline is that of the operations in it.
            let comp: Arc<dyn Completion> = Arc::new(PackOffer { onward, rank, landing });
            let operation = OpContext { comp: Some(comp), deadline: Deadline::NEVER, ..operation };
            ask(device, runtime, (landing, request), operation, &list);
        }
        Ok(Outcome::Posted)
    }
}

/// Offers a list and the bytes behind it; or, with a name `rx`, asks for bytes.
fn ask(
    device: &Port,
    runtime: &Core,
    (rx, request): (u64, Request),
    operation: OpContext,
    packed: &Region,
) {
    device.request(runtime, operation, packed.whole().into(), |name, addr| Control::Pieces {
        rx,
        request: Request { name, second: addr, ..request },
    });
}

/// The end of a pack.
struct PackCompletion {
    join: Arc<Join>,
    in_flight: Mutex<Option<Arc<PackedInFlight>>>,
}

impl Completion for PackCompletion {
    fn signal(&self, status: Status) -> Result<(), Status> {
        drop(taken(&self.in_flight));
        self.join.signal(status)
    }

    fn describe(&self) -> String {
        self.join.describe()
    }
}

fn taken<T>(place: &Mutex<Option<T>>) -> Option<T> {
    place.lock().take()
}

/// The context in which a pack in flight goes on and ends.
#[derive(Clone)]
struct Onward {
    runtime: Weak<Core>,
    /// The number of the device.
    device: u32,
    end: Arc<dyn Completion>,
}

impl Onward {
    /// Goes on, unless a part has failed. The result of `go_on` ends the pack.
    fn on(
        &self,
        mut status: Status,
        go_on: impl FnOnce(&Core, &Port) -> Option<Result<(), OpError>>,
    ) -> Result<(), Status> {
        if status.error.is_none() {
            let runtime = self.runtime.upgrade();
            let device = |runtime: &Arc<Core>| runtime.devices().get(self.device as usize).cloned();
            let there = runtime.as_ref().and_then(|runtime| Some((runtime, device(runtime)?)));
            let gone_on = match there.filter(|(_, device)| !device.0.is_closed()) {
                Some((runtime, device)) => go_on(runtime, &device.0),
                None => Some(Err(OpError::Closed)),
            };
            match gone_on {
                None => return Ok(()),
                Some(outcome) => status.error = outcome.err().map(Box::new),
            }
        }
        self.end.signal(status)
    }
}

/// An engine has gathered the bytes of a put.
struct Filled {
    onward: Onward,
    next: Mutex<Option<(Request, OpContext, Region)>>,
}

impl Completion for Filled {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.onward.on(status, |runtime, device| {
            let (request, operation, packed) = taken(&self.next)?;
            ask(device, runtime, (0, request), operation, &packed);
            None
        })
    }
}

/// The completion of a get's answer, whose bytes are contiguous.
struct Answered {
    onward: Onward,
    pieces: Mutex<Vec<(RegionSlice, u64)>>,
    packed: Region,
}

impl Completion for Answered {
    fn signal(&self, status: Status) -> Result<(), Status> {
        let Status { rank, tag, size, user_context, .. } = status;
        self.onward.on(status, |runtime, device| {
            let pieces = std::mem::take(&mut *self.pieces.lock());
            match copy_packed((&self.packed, 0), places(&pieces), true, &runtime.staging) {
                Ok(None) => Some(Ok(())),
                Ok(Some(moving)) => {
                    let op = OpContext::of_runtime(rank, tag, size, Some(self.onward.end.clone()));
                    let op = OpContext { user_context, ..op };
                    device.landings.add(Landing::of_message(moving, op));
                    None
                }
                Err(error) => Some(Err(OpError::Copy(error))),
            }
        })
    }
}

/// Completion object of an offer: the owner has the list, or has refused it. After a refusal, no
/// answer comes.
struct PackOffer {
    onward: Onward,
    rank: Rank,
    landing: u64,
}

impl Completion for PackOffer {
    fn signal(&self, status: Status) -> Result<(), Status> {
        let (Some(error), Some(runtime)) = (status.error, self.onward.runtime.upgrade()) else {
            return Ok(());
        };
        let device = runtime.devices().get(self.onward.device as usize).cloned();
        if let Some(Device(device)) = device {
            device.refuse_answer(&runtime, (self.rank, self.landing), *error);
        }
        Ok(())
    }
}
