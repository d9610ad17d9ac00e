//! A random payload on each measured path, compared to the last byte. Figures of messages that do
//! not arrive as they were sent are worth nothing.

use super::error::PerfError;
use super::line::{Line, lent};
use super::measure::Round;
use super::plan::{Point, Test};
use super::seat::Seat;
use super::window::{Slots, Window};
use carrack::{Buffer, Status};

/// Returns the bytes that belong to a seed.
pub(super) fn payload(seed: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Returns the payloads of this rank and of its peer: each side knows both.
fn payloads(round: &Round<'_>, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let (mine, theirs) = if round.leads { (seed, !seed) } else { (!seed, seed) };
    (payload(mine, round.point.size), payload(theirs, round.point.size))
}

/// Checks active messages in both directions.
pub(super) fn messages(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let Seat { runtime, peer, checks, checks_name, .. } = seat;
    let give = |mine: &Buffer| seat.wait(runtime.post_am(*peer, lent(mine), *checks_name));
    exchange(round, seat, seed, give, |_| seat.next_of(checks))
}

/// Sends both ways.
pub(super) fn sends(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let Seat { runtime, peer, tag, .. } = seat;
    let give = |mine: &Buffer| seat.wait(runtime.post_send(*peer, lent(mine), *tag));
    exchange(round, seat, seed, give, |room| seat.wait(runtime.post_recv(*peer, room, *tag)))
}

/// Sends a payload, and receives the peer's: into the memory that `take` gets, in which every byte
/// is wrong before. The rank that receives first waits for the end of its message, too. An engine
/// may still have work for it, and the next seat's check makes no progress on this seat's device.
fn exchange(
    round: &Round<'_>,
    seat: &Seat,
    seed: u64,
    give: impl FnOnce(&Buffer) -> Result<Status, PerfError>,
    take: impl FnOnce(Buffer) -> Result<Status, PerfError>,
) -> Result<(), PerfError> {
    let (mine, theirs) = payloads(round, seed);
    let mine = round.holding(seat, &mine)?;
    let take = || compare(round.point, take(round.holding(seat, &poison(&theirs))?)?, &theirs);
    in_turn(round.leads, || give(&mine).map(drop), take)
}

/// Puts a payload into the peer's memory, and for a latency the other way, too.
pub(super) fn puts(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let (mine, theirs) = payloads(round, seed);
    let window = Window::open(seat, round.memory, &poison(&theirs))?;
    let mine = round.holding(seat, &mine)?;
    let put = || {
        let put = seat.runtime.post_put(seat.peer, lent(&mine), &window.theirs, 0);
        seat.wait(put.remote_comp(seat.checks_name)).map(drop)
    };
    let look = || {
        let told = seat.next_of(&seat.checks)?.size;
        compare_bytes(round.point, &window.content(told)?, &theirs)
    };
    match round.point.test {
        Test::Latency => in_turn(round.leads, put, look),
        // A stream goes one way, and not every kind of memory accepts puts the other way.
        Test::Bandwidth | Test::Rate if round.leads => put(),
        Test::Bandwidth | Test::Rate => look(),
    }
}

/// Puts pieces of a random payload, and compares all of the memory that they went to, what lies
/// between them included.
pub(super) fn batches(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let (slots, size) = (Slots::of(round.point)?, round.point.size);
    let (content, mut wanted) = (payload(seed, slots.room), payload(!seed, slots.room));
    let window = Window::open(seat, round.memory, &wanted)?;
    if round.leads {
        let local = round.memory.room(slots.room)?;
        local.write(&content)?;
        let pieces = slots.pieces(local.region(), &window);
        let put = seat.runtime.post_put_batch(seat.peer, &pieces);
        return seat.wait(put.remote_comp(seat.checks_name)).map(drop);
    }
    seat.next_of(&seat.checks)?;
    for (to, from) in slots.places() {
        wanted[to..to + size].copy_from_slice(&content[from..from + size]);
    }
    compare_bytes(round.point, &window.content(slots.room)?, &wanted)
}

/// Gets the peer's payload.
pub(super) fn gets(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let (mine, theirs) = payloads(round, seed);
    let window = Window::open(seat, round.memory, &mine)?;
    by_leader(round, seat, || {
        let room = round.holding(seat, &poison(&theirs))?;
        let got = seat.wait(seat.runtime.post_get(seat.peer, room, &window.theirs, 0))?;
        compare(round.point, got, &theirs)
    })
}

/// Adds to a word of the peer's memory, and compares its values.
pub(super) fn additions(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let window = Window::open(seat, round.memory, &[0; 8])?;
    by_leader(round, seat, || {
        let mut added = 0_u64;
        for value in [seed, !seed ^ 0xff, 0] {
            add(seat, &window, value, added)?;
            added = added.wrapping_add(value);
        }
        Ok(())
    })
}

/// Adds to the first word of the peer's window, which held `added`.
pub(super) fn add(seat: &Seat, window: &Window, value: u64, added: u64) -> Result<(), PerfError> {
    let add = seat.runtime.post_fetch_add(seat.peer, &window.theirs, 0, value);
    // A status without a value holds no word: nothing that was added could be told from it.
    let held = seat.wait(add)?.value().unwrap_or(u64::MAX);
    if held == added { Ok(()) } else { Err(PerfError::Sum { added, held }) }
}

/// Copies a payload within this rank.
pub(super) fn copies(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let content = payload(seed, round.point.size);
    let Some(mut copies) = round.copies(seat, &content)? else { return Ok(()) };
    copies.to.write(&poison(&content))?;
    copies.begin(false)?;
    copies.settle(0)?;
    compare_bytes(round.point, &copies.to.to_vec()?, &content)
}

/// Gives and takes. The side that leads gives first, and the other one takes first.
fn in_turn(
    leads: bool,
    give: impl FnOnce() -> Result<(), PerfError>,
    take: impl FnOnce() -> Result<(), PerfError>,
) -> Result<(), PerfError> {
    if leads {
        give()?;
        take()
    } else {
        take()?;
        give()
    }
}

/// Lets the side that measures look at the other one's memory, and tell it when it has.
fn by_leader(
    round: &Round<'_>,
    seat: &Seat,
    look: impl FnOnce() -> Result<(), PerfError>,
) -> Result<(), PerfError> {
    if round.leads {
        look()?;
        seat.signal(seat.checks_name)
    } else {
        seat.next_of(&seat.checks).map(drop)
    }
}

/// Returns as many bytes, all of them wrong.
fn poison(expected: &[u8]) -> Vec<u8> {
    expected.iter().map(|byte| !byte).collect()
}

fn compare(point: Point, status: Status, expected: &[u8]) -> Result<(), PerfError> {
    let mut got = status.buffer.to_vec()?;
    // A receive's buffer may be longer than its message.
    got.truncate(status.size);
    compare_bytes(point, &got, expected)
}

fn compare_bytes(point: Point, got: &[u8], expected: &[u8]) -> Result<(), PerfError> {
    let (what, size) = (point.op.name(), point.size);
    if got.len() != expected.len() {
        return Err(PerfError::Length { what, size, got: got.len() });
    }
    match expected.iter().zip(got).position(|(one, other)| one != other) {
        Some(at) => Err(PerfError::Corrupt { what, size, at }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_as_long_as_asked_for_and_another_for_another_seed() {
        for size in [0, 1, 7, 8, 9, 4096] {
            assert_eq!(payload(7, size).len(), size);
            assert_eq!(payload(7, size), payload(7, size));
        }
        assert_ne!(payload(7, 64), payload(8, 64));
    }
}
