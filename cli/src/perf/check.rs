//! A random payload, compared to the last byte, wherever bytes go that are measured: figures of
//! messages that do not arrive as they were sent are worth nothing.

use super::error::PerfError;
use super::fetch;
use super::memory::Memory;
use super::options::Op;
use super::plan::{Point, Test};
use super::round::Round;
use super::seat::Seat;
use super::window::Window;
use carrack::buffer::SendBuffer;
use carrack::{Buffer, CompQueue, Status};

/// The bytes that belong to a seed: splitmix64 (Steele, Lea and Flood, 2014).
pub(super) fn payload(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed;
    let mut words = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    });
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        bytes.extend(words.next().unwrap_or_default().to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// Returns the payloads of this rank and of its peer: each side knows both.
fn payloads(round: &Round<'_>, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let (mine, theirs) = if round.leads { (seed, !seed) } else { (!seed, seed) };
    (payload(mine, round.point.size), payload(theirs, round.point.size))
}

/// Sends a payload, and receives the peer's.
pub(super) fn messages(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let Round { memory, point, leads, .. } = *round;
    let (mine, theirs) = payloads(round, seed);
    let mine = memory.holding(&mine, memory.is_lent(point, &seat.runtime))?;
    // The rank that receives first settles, too: an engine may still have work for its last
    // message, and the next seat's check makes no progress on this seat's device.
    let give = || send(seat, point.op, &mine).and_then(|()| seat.settle(0));
    in_turn(leads, give, || receive(seat, memory, point, &theirs))
}

/// Puts a payload into the peer's memory, and for a latency the other way, too.
pub(super) fn puts(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let Round { memory, point, leads, .. } = *round;
    let (mine, theirs) = payloads(round, seed);
    let window = Window::open(seat, memory, &poison(&theirs))?;
    let mine = memory.holding(&mine, memory.is_lent(point, &seat.runtime))?;
    let Seat { runtime, device, peer, checks_name, checks, over, .. } = seat;
    let put = || {
        let put = runtime.post_put(*peer, lent(&mine), &window.theirs, 0);
        let mut put = put.device(device).comp(over).remote_comp(*checks_name);
        seat.start(|| put.try_submit())?;
        seat.settle(0)
    };
    let look = || compare(window.holds(seat.next_of(checks)?), &theirs, point);
    match point.test {
        Test::Latency => in_turn(leads, put, look),
        // A stream goes one way, and not every kind of memory accepts puts the other way.
        Test::Bandwidth | Test::Rate if leads => put(),
        Test::Bandwidth | Test::Rate => look(),
    }
}

/// Gets the peer's payload.
pub(super) fn gets(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let Round { memory, point, leads, .. } = *round;
    let (mine, theirs) = payloads(round, seed);
    let window = Window::open(seat, memory, &mine)?;
    by_leader(seat, leads, || {
        let room = memory.holding(&poison(&theirs), memory.is_lent(point, &seat.runtime))?;
        compare(fetch::get_once(seat, &window, room)?, &theirs, point)
    })
}

/// Adds to a word of the peer's memory, and compares its values.
pub(super) fn additions(round: &Round<'_>, seat: &Seat, seed: u64) -> Result<(), PerfError> {
    let window = Window::open(seat, round.memory, &[0; 8])?;
    by_leader(seat, round.leads, || {
        let mut added = 0_u64;
        for value in [seed, !seed ^ 0xff, 0] {
            let held = fetch::add_once(seat, &window, value)?;
            if held != added {
                return Err(PerfError::Sum { added, held });
            }
            added = added.wrapping_add(value);
        }
        Ok(())
    })
}

/// One side gives first, and the other one takes first.
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

/// The side that measures looks at the other one's memory, and says when it has.
fn by_leader(
    seat: &Seat,
    leads: bool,
    look: impl FnOnce() -> Result<(), PerfError>,
) -> Result<(), PerfError> {
    if leads {
        look()?;
        seat.signal(seat.checks_name)
    } else {
        seat.next_of(&seat.checks).map(drop)
    }
}

fn send(seat: &Seat, op: Op, payload: &Buffer) -> Result<(), PerfError> {
    let Seat { runtime, device, peer, tag, checks_name, over, .. } = seat;
    if op == Op::Am {
        let mut message =
            runtime.post_am(*peer, lent(payload), *checks_name).device(device).comp(over);
        seat.start(|| message.try_submit())
    } else {
        let mut message = runtime.post_send(*peer, lent(payload), *tag).device(device).comp(over);
        seat.start(|| message.try_submit())
    }
}

/// Returns what an operation takes of a buffer: a slice of its region, or its borrowed bytes.
pub(super) fn lent(payload: &Buffer) -> SendBuffer<'_> {
    match payload {
        Buffer::Region(slice) => SendBuffer::from(slice.clone()),
        host => SendBuffer::Borrowed(host.as_slice().unwrap_or_default()),
    }
}

/// Receives what is expected: a matched message into memory in which every byte is wrong before.
fn receive(seat: &Seat, memory: &Memory, point: Point, expected: &[u8]) -> Result<(), PerfError> {
    if point.op == Op::Am {
        return compare(seat.next_of(&seat.checks)?, expected, point);
    }
    let over = CompQueue::new(2);
    let room = memory.holding(&poison(expected), memory.is_lent(point, &seat.runtime))?;
    let receive = seat.runtime.post_recv(seat.peer, room, seat.tag);
    let mut receive = receive.device(&seat.device).comp(&over);
    receive.submit()?;
    compare(seat.next_of(&over)?, expected, point)
}

/// As many bytes, all of them wrong.
fn poison(expected: &[u8]) -> Vec<u8> {
    expected.iter().map(|byte| !byte).collect()
}

fn compare(status: Status, expected: &[u8], point: Point) -> Result<(), PerfError> {
    let (what, size) = (point.op.name(), point.size);
    if status.size != size {
        return Err(PerfError::Length { what, size, got: status.size });
    }
    let got = status.buffer.to_vec()?;
    let differs = expected.iter().zip(&got).position(|(one, other)| one != other);
    // A buffer that is shorter than the message differs where it ends.
    match differs.or((got.len() < size).then_some(got.len())) {
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
