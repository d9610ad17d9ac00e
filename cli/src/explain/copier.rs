//! Whether there can be a resident copier on this rank's GPU, found out by having one: no driver
//! tells beforehand, and that other ranks want one on the same GPU, too, shows only when they do.
//!
//! Each rank makes a small copy within the GPU of its turn, at which a copier is set up or refused:
//! the rank claims the GPU, or tells who has that it is shared. When all ranks have come so far,
//! those that have a copier go on until it has had a copy, and a kernel was launched once more,
//! before which the claim is looked at.

use super::meeting::Meeting;
use crate::gpus;
use carrack::buffer::{Region, RegionSlice};
use carrack::explain::KindPath;
use carrack::transports::gpu::{CopierState, Flavour, Gpu};
use carrack::transports::mem::GpuUuid;
use carrack::{Mr, Outcome, Rmr, Runtime, Synchronizer};
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a copy.
const LEN: usize = 64;
/// How long to wait for the end of a copy, and for a kernel that takes one.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for ranks that make theirs. Several contexts on one GPU take seconds to set up.
const OTHERS: Duration = Duration::from_secs(30);

/// A GPU on which a copier was tried. What there is of it, its GPU says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tried {
    pub(super) gpu: GpuUuid,
    /// What went wrong with that.
    pub(super) trouble: Option<String>,
}

impl Tried {
    /// Adds what went wrong to what is known of memory of that GPU, where a copier is spoken of.
    pub(super) fn tell(&self, kind: &mut KindPath) {
        let Some(trouble) = &self.trouble else { return };
        if kind.gpu == Some(self.gpu) && kind.copier.is_some() {
            let before = kind.why.take().map(|why| why + "; ").unwrap_or_default();
            kind.why = Some(format!("{before}trying the copier: {trouble}"));
        }
    }
}

/// Tries the copier, if one was asked for and there is a GPU. The ranks may have been told
/// different things, so none waits for the others but one that has a copier.
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

/// The GPU of this rank's turn among the ranks of its node.
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
    /// What is copied, and behind it where it goes.
    region: Region,
    rmr: Rmr,
    /// Ends with the trial.
    _mr: Mr,
}

impl<'r> Trial<'r> {
    fn of(runtime: &'r Runtime, gpu: &'r Arc<dyn Gpu>, patience: Duration) -> Result<Self, String> {
        let region = gpu.allocate(2 * LEN, Flavour::Plain).map_err(failed("allocating memory"))?;
        let mr = runtime.register_memory(&region).map_err(failed("registering memory"))?;
        Ok(Self { runtime, gpu, patience, region, rmr: runtime.get_rmr(&mr), _mr: mr })
    }

    /// Copies until there is a copier, or can be none: once, as a rule.
    fn until_set_up(&self) -> Result<(), String> {
        self.until(|state| *state != CopierState::Wanted)
    }

    /// Copies until the copier has had one, and more kernels than these were launched for it, of
    /// which each ends after some milliseconds; or there is none any more.
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

    /// Puts some bytes to this rank itself, and looks whether they have come. Others than in the
    /// turn before.
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
        let failure = match put.comp(&done).allow_retry(false).call().map_err(failed("a put"))? {
            Outcome::Done(status) => status.error,
            Outcome::Posted => {
                self.runtime
                    .wait_for(self.patience, || done.test())
                    .map_err(failed("the end of a put"))?;
                done.take().into_iter().flatten().find_map(|status| status.error)
            }
            Outcome::Retry(why) => return Err(format!("a put was not taken: {why:?}")),
        };
        failure.map_or(Ok(()), |why| Err(format!("a put: {why}")))
    }

    /// What is copied, or where it goes.
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
