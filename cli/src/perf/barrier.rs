//! Barriers of all ranks: of the runtime's own, on its default device.

use super::error::PerfError;
use super::figures::Measured;
use super::measure::{WARM_UP, each};
use carrack::Runtime;
use quanta::Clock;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Delay of the late rank in the check that the other ranks wait for it.
const LATE: Duration = Duration::from_millis(2);

/// One round of `count` barriers. Rank 0 measures them.
pub(super) fn round(
    runtime: &Runtime,
    clock: &Clock,
    count: u64,
    leads: bool,
) -> Result<Vec<Measured>, PerfError> {
    let barrier = || Ok(runtime.barrier()?);
    let measured = if leads {
        Measured::Steps { times: each(clock, count, barrier)?, ways: 1.0 }
    } else {
        (0..WARM_UP + count).try_for_each(|_| barrier())?;
        Measured::Nothing
    };
    Ok(vec![measured])
}

/// Looks whether no rank leaves a barrier before all have come. The seed says which of them is
/// late.
pub(super) fn check(runtime: &Runtime, seed: u64) -> Result<(), PerfError> {
    if seed % u64::from(runtime.size()) == u64::from(runtime.rank().0) {
        std::thread::sleep(LATE);
    }
    let came = now();
    runtime.barrier()?;
    let left = now();
    let times = [came.to_le_bytes(), left.to_le_bytes()].concat();
    let all = runtime.allgather(&times)?;
    if is_kept(all.iter().map(|times| times.as_slice())) { Ok(()) } else { Err(PerfError::Barrier) }
}

/// Of the times at which each rank came and left, eight bytes each: whether none left before the
/// last one came.
fn is_kept<'a>(times: impl Iterator<Item = &'a [u8]>) -> bool {
    let times = times.map(|times| match times.as_chunks::<8>() {
        ([came, left], []) => (u64::from_le_bytes(*came), u64::from_le_bytes(*left)),
        _ => (u64::MAX, 0),
    });
    let (last, first) =
        times.fold((0, u64::MAX), |(last, first), (came, left)| (last.max(came), first.min(left)));
    last <= first
}

/// Nanoseconds of the machine's clock, which all its processes share.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is ever negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_is_broken_by_a_rank_that_left_before_the_last_one_came() {
        let kept = |times: &[[u64; 2]]| {
            let bytes: Vec<_> =
                times.iter().map(|pair| pair.map(u64::to_le_bytes).concat()).collect();
            is_kept(bytes.iter().map(Vec::as_slice))
        };
        assert!(kept(&[[1, 9], [8, 9], [2, 8]]));
        assert!(!kept(&[[1, 7], [8, 9], [2, 8]]));
        assert!(!is_kept([&[0_u8; 15][..]].into_iter()));
    }
}
