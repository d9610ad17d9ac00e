//! Figures of a round.

use hdrhistogram::Histogram;
use quanta::Clock;
use std::time::Duration;

/// Times in ticks of the raw clock.
pub(super) type Times = Histogram<u64>;

/// Creates an empty histogram, up to minutes, to three digits.
pub(super) fn new_times() -> Times {
    // The bounds are constants that the crate accepts: a test makes one.
    match Histogram::new_with_bounds(1, 1 << 40, 3) {
        Ok(times) => times,
        Err(error) => unreachable!("1 to 2^40 with three digits: {error}"),
    }
}

/// The measurement of one seat in one round.
pub(super) enum Measured {
    /// Steps, one by one: round trips, which go two ways, or operations that go one.
    Steps { times: Times, ways: f64 },
    /// Ticks of the whole stream.
    Stream(u64),
    /// The other side measures.
    Nothing,
}

/// The measurement of all seats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) latency: Option<Latency>,
    /// Messages a second of a stream, all seats together.
    pub(super) rate: Option<f64>,
    /// Time of the slowest seat.
    pub(super) took: Duration,
}

/// Time of a message one way, or of another operation until it ends, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(super) struct Latency {
    pub(super) min: f64,
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) p999: f64,
    pub(super) p9999: f64,
    pub(super) max: f64,
}

/// Puts what seats measured together: `count` messages each. None if that is nothing.
pub(super) fn together(clock: &Clock, count: u64, measured: Vec<Measured>) -> Option<Figures> {
    let tick = seconds_of_a_tick(clock);
    let mut steps: Option<(Times, f64)> = None;
    let (mut rate, mut longest) = (0.0, 0.0_f64);
    for one in measured {
        let ticks = match &one {
            Measured::Steps { times, .. } => times.mean() * times.len() as f64,
            Measured::Stream(ticks) => *ticks as f64,
            Measured::Nothing => continue,
        };
        longest = longest.max(ticks * tick);
        match (one, &mut steps) {
            // The same bounds, so that everything fits.
            (Measured::Steps { times, .. }, Some((all, _))) => {
                all.add(&times).unwrap_or_else(|_| unreachable!("all histograms are alike"))
            }
            (Measured::Steps { times, ways }, None) => steps = Some((times, ways)),
            _ => rate += count as f64 / (ticks * tick),
        }
    }
    let latency = steps.map(|(times, ways)| Latency::of(&times, tick / ways));
    let (rate, took) = ((rate > 0.0).then_some(rate), Duration::from_secs_f64(longest));
    (latency.is_some() || rate.is_some()).then_some(Figures { latency, rate, took })
}

impl Latency {
    /// Summarises times in ticks; `tick` is the length of one in seconds.
    fn of(times: &Times, tick: f64) -> Self {
        let us = |ticks: f64| ticks * tick * 1e6;
        let at = |quantile| us(times.value_at_quantile(quantile) as f64);
        Self {
            min: us(times.min() as f64),
            mean: us(times.mean()),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: us(times.max() as f64),
        }
    }
}

fn seconds_of_a_tick(clock: &Clock) -> f64 {
    // Long enough that the rounding to nanoseconds is nothing.
    const TICKS: u64 = 1 << 40;
    clock.delta_as_nanos(0, TICKS) as f64 * 1e-9 / TICKS as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_way_is_half_a_round_trip_or_all_of_a_span_and_percentiles_are_in_order() {
        let clock = Clock::new();
        let per_us = 1e-6 / seconds_of_a_tick(&clock);
        let mut times = new_times();
        for us in 1..=1000 {
            times.record((f64::from(us) * per_us) as u64).unwrap();
        }
        for ways in [2.0, 1.0] {
            let measured = Measured::Steps { times: times.clone(), ways };
            let figures = together(&clock, 1, vec![measured]).unwrap();
            let latency = figures.latency.unwrap();
            let Latency { min, mean, p50, p90, p99, p999, p9999, max } = latency;
            assert!([min, p50, p90, p99, p999, p9999, max].is_sorted());
            let wanted = [1.0, 500.5, 500.0, 900.0, 990.0, 999.0, 1000.0, 1000.0];
            for (got, wanted) in
                [min, mean, p50, p90, p99, p999, p9999, max].into_iter().zip(wanted)
            {
                assert!(
                    (got * ways / wanted - 1.0).abs() < 0.003,
                    "{got} for {wanted} over {ways}"
                );
            }
        }
    }

    #[test]
    fn the_rate_is_the_sum_of_all_seats() {
        let clock = Clock::new();
        let ticks = (1.0 / seconds_of_a_tick(&clock)) as u64;
        let both = vec![Measured::Stream(ticks), Measured::Stream(2 * ticks)];
        let Figures { rate, took, .. } = together(&clock, 1000, both).unwrap();
        let rate = rate.unwrap();
        assert!((rate - 1500.0).abs() < 1.0, "{rate}");
        assert!((took.as_secs_f64() - 2.0).abs() < 0.01, "{took:?}");
    }
}
