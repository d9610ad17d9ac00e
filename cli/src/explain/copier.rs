//! Trial of the resident copier on this rank's GPU.
//!
//! No driver tells beforehand whether a copier can run. Other ranks that want a copier on the same
//! GPU are noticed only once theirs is set up.
//!
//! Each rank makes a small copy within the GPU of its turn. With that copy the rank claims the GPU
//! for its copier, or reports that another process shares it. When all ranks have come this far,
//! each rank with a copier goes on copying. It stops once the copier has made a copy and its
//! kernel was launched again, because each launch checks the claim.

use super::meeting::Meeting;
use crate::gpus;
use carrack::buffer::{Region, RegionSlice};
use carrack::explain::KindPath;
use carrack::transports::gpu::{CopierState, Flavour, Gpu};
use carrack::transports::mem::GpuUuid;
use carrack::{Mr, RemoteKey, Runtime, Synchronizer};
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a copy.
const LEN: usize = 64;
/// Longest wait for the end of a copy, and for a kernel that takes one.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for the trials of other ranks. Several contexts on one GPU take seconds to set up.
const OTHERS: Duration = Duration::from_secs(30);

/// GPU on which a copier was tried. The state of the copier is asked of the GPU itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tried {
    pub(super) gpu: GpuUuid,
    /// Failure of the trial.
    pub(super) trouble: Option<String>,
}

impl Tried {
    /// Adds the failure to the `why` of memory of that GPU, if `kind` reports a copier.
    pub(super) fn tell(&self, kind: &mut KindPath) {
        let Some(trouble) = &self.trouble else { return };
        if kind.gpu == Some(self.gpu) && kind.copier.is_some() {
            let before = kind.why.take().map(|why| why + "; ").unwrap_or_default();
            kind.why = Some(format!("{before}trying the copier: {trouble}"));
        }
    }
}

/// Tries the copier, if one was asked for and there is a GPU. Ranks may have different settings,
/// so only a rank that has a copier waits for the others.
pub(super) fn try_out(runtime: &Runtime, meeting: &Meeting<'_>) -> Option<Tried> {
    if !runtime.settings().gpu_copier() {
        return None;
    }
    let gpu = own_gpu(runtime)?;
    let trouble = Trial::of(runtime, &gpu, PATIENCE).and_then(|trial| {
        trial.until_set_up()?;
        let CopierState::On { launches, .. } = gpu.copier() else { return Ok(()) };
        let unknown = "the other ranks, which may want one on this GPU, too";
        meeting.wait(runtime, OTHERS).map_err(failed(unknown))?;
        trial.until_had_and_launched_anew(launches)
    });
    Some(Tried { gpu: gpu.info().uuid, trouble: trouble.err() })
}

/// Returns the GPU of this rank. The ranks of a node take its GPUs in turn.
fn own_gpu(runtime: &Runtime) -> Option<Arc<dyn Gpu>> {
    let mut gpus = gpus::of(runtime);
    let place = (runtime.place_on_node() as usize).checked_rem(gpus.len())?;
    Some(gpus.swap_remove(place))
}

/// Copies within one GPU.
struct Trial<'r> {
    runtime: &'r Runtime,
    gpu: &'r Arc<dyn Gpu>,
    patience: Duration,
    /// Source of the copy, followed by its destination.
    region: Region,
    rmr: RemoteKey,
    /// Guard that keeps the region registered until the trial ends.
    _mr: Mr,
}

impl<'r> Trial<'r> {
    fn of(runtime: &'r Runtime, gpu: &'r Arc<dyn Gpu>, patience: Duration) -> Result<Self, String> {
        let region = gpu.allocate(2 * LEN, Flavour::Plain).map_err(failed("allocating memory"))?;
        let mr = runtime.register_memory(&region).map_err(failed("registering memory"))?;
        Ok(Self { runtime, gpu, patience, region, rmr: mr.remote_key(), _mr: mr })
    }

    /// Copies until the copier is set up or refused. One copy suffices, as a rule.
    fn until_set_up(&self) -> Result<(), String> {
        self.until(|state| *state != CopierState::Wanted)
    }

    /// Copies until the copier has made a copy and its kernel was launched more than `before`
    /// times, or until the copier is refused. A kernel ends after some milliseconds.
    fn until_had_and_launched_anew(&self, before: u64) -> Result<(), String> {
        self.until(|state| match state {
            CopierState::On { launches, copies } => *launches > before && *copies > 0,
            _ => true,
        })
    }

    fn until(&self, is_so: impl Fn(&CopierState) -> bool) -> Result<(), String> {
        let begun = Instant::now();
        let mut turn = 0_u8;
        loop {
            self.copy(turn)?;
            if is_so(&self.gpu.copier()) {
                return Ok(());
            }
            if begun.elapsed() > self.patience {
                return Err(format!("no kernel has taken a copy for {:?}", self.patience));
            }
            turn = turn.wrapping_add(1);
        }
    }

    /// Puts bytes, which differ from turn to turn, to this rank itself and checks that they
    /// arrived.
    fn copy(&self, turn: u8) -> Result<(), String> {
        let bytes: Vec<u8> =
            (0..LEN as u8).map(|at| turn.wrapping_mul(LEN as u8 + 1).wrapping_add(at)).collect();
        self.part(0)?.write(&bytes).map_err(failed("writing to memory"))?;
        self.put()?;
        match self.part(LEN)?.to_vec().map_err(failed("reading memory"))? {
            there if there == bytes => Ok(()),
            there => Err(format!("a put left other bytes there: {there:?}, and not {bytes:?}")),
        }
    }

    fn put(&self) -> Result<(), String> {
        let done = Synchronizer::new(1);
        let put = self.runtime.post_put(self.runtime.rank(), self.part(0)?, &self.rmr, LEN as u64);
        put.comp(&done).submit().map_err(failed("a put"))?;
        self.runtime.wait_for(self.patience, || done.test()).map_err(failed("the end of a put"))?;
        let failure = done.take().into_iter().flatten().find_map(|status| status.error);
        failure.map_or(Ok(()), |why| Err(format!("a put: {why}")))
    }

    /// Returns the copy's source (`at` 0) or destination (`at` [`LEN`]).
    fn part(&self, at: usize) -> Result<RegionSlice, String> {
        self.region
            .slice(at, LEN)
            .ok_or_else(|| "the memory is shorter than it was asked for".to_owned())
    }
}

fn failed<E: Display>(what: &'static str) -> impl Fn(E) -> String {
    move |why| format!("{what}: {why}")
}

#[cfg(test)]
mod tests;
