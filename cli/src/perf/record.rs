//! A point's result.

use super::figures::{Figures, Latency};
use super::plan::Point;
use serde::Serialize;

/// A point's result: what `--json` prints on a line of its own. The help of `perf` says what the
/// fields mean.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Record {
    pub(super) op: &'static str,
    pub(super) test: &'static str,
    pub(super) size: usize,
    pub(super) pieces: usize,
    pub(super) threads: usize,
    #[serde(flatten)]
    pub(super) conditions: Conditions,
    pub(super) messages: u64,
    pub(super) latency_us: Option<Latency>,
    pub(super) bandwidth_gbps: Option<f64>,
    pub(super) rate_mps: Option<f64>,
}

/// Conditions of all points of a run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Conditions {
    pub(super) ranks: u32,
    /// `own` if threads have a device each, else `shared`.
    pub(super) device: &'static str,
    pub(super) transport: &'static str,
    pub(super) mem: String,
    pub(super) peer_mem: String,
}

impl Conditions {
    /// The memory of both sides, in words.
    pub(super) fn memory(&self) -> String {
        let Self { mem, peer_mem, .. } = self;
        if mem == peer_mem {
            format!("{mem} memory")
        } else {
            format!("{mem} to {peer_mem} memory")
        }
    }
}

impl Record {
    /// Puts it together.
    pub(super) fn new(
        point: Point,
        conditions: Conditions,
        messages: u64,
        figures: Figures,
    ) -> Self {
        let Point { op, test, size, threads, pieces } = point;
        let (latency_us, rate) = match figures {
            Figures::Latency(latency) => (Some(latency), None),
            Figures::Stream { rate } => (None, Some(rate)),
        };
        Self {
            op: op.name(),
            test: test.name(),
            size,
            pieces,
            threads,
            conditions,
            messages,
            latency_us,
            bandwidth_gbps: rate.map(|rate| rate * size as f64 / 1e9),
            rate_mps: rate.map(|rate| rate / 1e6),
        }
    }
}
