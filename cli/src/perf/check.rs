//! A random payload there and back, compared to the last byte: figures of messages that do not arrive as they
//! were sent are worth nothing.

use super::error::PerfError;
use super::memory::Memory;
use super::options::Op;
use super::plan::Point;
use super::put::Window;
use super::seat::Seat;
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

/// Sends a payload made of `seed`, and takes in the peer's. Each side knows what the other one sends.
pub(super) fn there_and_back(
    seat: &Seat,
    memory: &Memory,
    point: Point,
    seed: u64,
    leads: bool,
) -> Result<(), PerfError> {
    let (mine, theirs) = if leads { (seed, !seed) } else { (!seed, seed) };
    let mine = memory.holding(&payload(mine, point.size), false)?;
    let theirs = payload(theirs, point.size);
    let window = if point.op == Op::Put { Some(Window::open(seat, point.size)?) } else { None };
    if leads {
        send(seat, point.op, &mine, window.as_ref())?;
    }
    let status = match (point.op, &window) {
        (Op::Put, Some(window)) => window.holds(take(seat, &seat.checks)?),
        (Op::Am | Op::Put, _) => take(seat, &seat.checks)?,
        (Op::Send, _) => receive(seat, memory, &theirs)?,
    };
    compare(status, &theirs, point)?;
    if !leads {
        send(seat, point.op, &mine, window.as_ref())?;
    }
    Ok(())
}

fn send(seat: &Seat, op: Op, payload: &Buffer, window: Option<&Window>) -> Result<(), PerfError> {
    let Seat { runtime, device, peer, tag, checks_name, .. } = seat;
    if let Some(window) = window {
        let bytes = payload.as_slice().unwrap_or_default();
        let mut put =
            runtime.post_put(*peer, bytes, &window.theirs, 0).device(device).remote_comp(*checks_name);
        return seat.post(|| put.call());
    }
    match (op, payload) {
        (Op::Am | Op::Put, Buffer::Region(slice)) => {
            let mut message = runtime.post_am(*peer, slice.clone(), *checks_name).device(device);
            seat.post(|| message.call())
        }
        (Op::Am | Op::Put, host) => {
            let bytes = host.as_slice().unwrap_or_default();
            let mut message = runtime.post_am(*peer, bytes, *checks_name).device(device);
            seat.post(|| message.call())
        }
        (Op::Send, Buffer::Region(slice)) => {
            let mut message = runtime.post_send(*peer, slice.clone(), *tag).device(device);
            seat.post(|| message.call())
        }
        (Op::Send, host) => {
            let bytes = host.as_slice().unwrap_or_default();
            let mut message = runtime.post_send(*peer, bytes, *tag).device(device);
            seat.post(|| message.call())
        }
    }
}

/// Receives into a buffer in which every byte is wrong before.
fn receive(seat: &Seat, memory: &Memory, expected: &[u8]) -> Result<Status, PerfError> {
    let poison: Vec<u8> = expected.iter().map(|byte| !byte).collect();
    let over = CompQueue::new(2);
    let mut receive = seat
        .runtime
        .post_recv(seat.peer, memory.holding(&poison, false)?, seat.tag)
        .device(&seat.device)
        .comp(&over)
        .allow_done(false);
    seat.post(|| receive.call())?;
    take(seat, &over)
}

fn take(seat: &Seat, from: &CompQueue) -> Result<Status, PerfError> {
    loop {
        if let Some(status) = from.pop() {
            return Ok(status.ok()?);
        }
        seat.until(|| !from.is_empty())?;
    }
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
