//! Many pieces in one put.
//!
//! Rank 0 does all of it. Rank 1 makes progress until it is told that it is over.

use super::check::payload;
use super::error::PerfError;
use super::figures::Measured;
use super::latency;
use super::memory::Memory;
use super::plan::Point;
use super::seat::Seat;
use super::window::Window;
use carrack::buffer::Region;
use carrack::{Piece, PostError};
use quanta::Clock;

/// Bytes on each side: a piece lies in the first half of a slot, so that no two of them are one.
fn room(point: Point) -> Result<usize, PerfError> {
    let bytes = point.size.checked_mul(2).and_then(|slot| slot.checked_mul(point.pieces));
    bytes.ok_or_else(|| PostError::NoMemory(usize::MAX).into())
}

/// Returns the local slot of the piece that goes to remote slot `at`. Neighbours are swapped, so
/// the pieces are not rows at equal distances.
fn slot(at: usize, pieces: usize) -> usize {
    if at ^ 1 < pieces { at ^ 1 } else { at }
}

fn pieces<'a>(point: Point, local: &'a Region, window: &'a Window) -> Vec<Piece<'a>> {
    let Point { size, pieces, .. } = point;
    let piece = |at| {
        let start = slot(at, pieces) * 2 * size;
        Piece {
            local,
            range: start..start + size,
            rmr: &window.theirs,
            offset: (at * 2 * size) as u64,
        }
    };
    (0..pieces).map(piece).collect()
}

/// As rank 0: the time until a batch is over, `count` times. As rank 1: lets the peer put.
pub(super) fn measure(
    seat: &Seat,
    memory: &Memory,
    point: Point,
    clock: &Clock,
    count: u64,
    leads: bool,
) -> Result<Measured, PerfError> {
    let room = room(point)?;
    let window = Window::open(seat, memory, &vec![0; room])?;
    if !leads {
        seat.take(1)?;
        return Ok(Measured::Nothing);
    }
    let local = memory.room(room)?;
    local.write(&payload(1, room))?;
    let pieces = pieces(point, local.region(), &window);
    let Seat { runtime, device, peer, over, .. } = seat;
    let times = latency::each(clock, count, || {
        let mut put = runtime.post_put_batch(*peer, &pieces).device(device).comp(over);
        seat.start(|| put.try_submit())?;
        seat.settle(0)
    })?;
    seat.signal(seat.arrivals_name)?;
    Ok(Measured::Spans(times))
}

/// Puts pieces of a random payload, and compares all of the memory that they went to, what lies
/// between them included.
pub(super) fn check(
    seat: &Seat,
    memory: &Memory,
    point: Point,
    seed: u64,
    leads: bool,
) -> Result<(), PerfError> {
    let (room, Point { size, .. }) = (room(point)?, point);
    let (content, before) = (payload(seed, room), payload(!seed, room));
    let window = Window::open(seat, memory, &before)?;
    if leads {
        let local = memory.room(room)?;
        local.write(&content)?;
        let pieces = pieces(point, local.region(), &window);
        let Seat { runtime, device, peer, over, checks_name, .. } = seat;
        let mut put = runtime
            .post_put_batch(*peer, &pieces)
            .device(device)
            .comp(over)
            .remote_comp(*checks_name);
        seat.start(|| put.try_submit())?;
        return seat.settle(0);
    }
    seat.next_of(&seat.checks)?;
    let found = window.mine.slice(0, room).map_or(Ok(Vec::new()), |all| all.to_vec())?;
    let mut wanted = before;
    for at in 0..point.pieces {
        let (to, from) = (at * 2 * size, slot(at, point.pieces) * 2 * size);
        wanted[to..to + size].copy_from_slice(&content[from..from + size]);
    }
    match found.iter().zip(&wanted).position(|(one, other)| one != other) {
        Some(at) => Err(PerfError::Corrupt { what: point.op.name(), size, at }),
        None if found.len() != wanted.len() => {
            Err(PerfError::Corrupt { what: point.op.name(), size, at: found.len() })
        }
        None => Ok(()),
    }
}
