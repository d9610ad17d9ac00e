//! Barriers of all ranks: of the runtime's own, on its default device.

use super::error::PerfError;
use super::figures::Measured;
use super::measure::{each, warm_up};
use carrack::Runtime;
use quanta::Clock;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// Delay of the late rank in the check that the other ranks wait for it.
const LATE: Duration = Duration::from_millis(2);

/// Runs one round of `count` barriers. Rank 0 measures them.
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
        (0..warm_up(count) + count).try_for_each(|_| barrier())?;
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
    let times = runtime.allgather([came, left].map(U64::new).as_bytes())?;
    match early(&times) {
        0 => Ok(()),
        early => Err(PerfError::Barrier { early }),
    }
}

/// Returns the nanoseconds by which a rank left before the last one came, by the times of each
/// rank. 0: the barrier was kept.
fn early(times: &[Vec<u8>]) -> u64 {
    let times = times.iter().filter_map(|bytes| <[U64; 2]>::read_from_bytes(bytes).ok());
    let (last, first) = times.fold((0, u64::MAX), |(last, first), [came, left]| {
        (last.max(came.get()), first.min(left.get()))
    });
    last.saturating_sub(first)
}

/// Returns nanoseconds of the machine's clock, which all its processes share.
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
        let early = |times: &[[u64; 2]]| {
            let sent = times.iter().map(|pair| pair.map(U64::new).as_bytes().to_vec());
            early(&sent.collect::<Vec<_>>())
        };
        assert_eq!(early(&[[1, 9], [8, 9], [2, 8]]), 0);
        assert_eq!(early(&[[1, 7], [8, 9], [2, 8]]), 1);
        assert_eq!(early(&[[1, 256], [255, 257]]), 0);
        assert_eq!(early(&[[1, 255], [258, 259]]), 3);
    }
}
