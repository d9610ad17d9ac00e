//! Which GPUs an example works on: NVIDIA's where there are any, else simulated ones, and it says
//! which.

#![allow(dead_code, reason = "each example is a program of its own, and uses a part of this")]

use carrack::Runtime;
use carrack::bootstrap::{protocol, tcp::variables};
use carrack::settings::{GpuChoice, Settings};
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Gpu};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Settings with which there is a GPU: what CARRACK_GPU says, else NVIDIA's, else simulated ones.
pub(crate) fn settings() -> Result<Settings> {
    let given = Settings::from_env()?;
    if given.gpu() != GpuChoice::Auto {
        return Ok(given);
    }
    let found = CudaDriver::initialise().and_then(|driver| driver.devices());
    let choice =
        if found.is_ok_and(|gpus| !gpus.is_empty()) { GpuChoice::Cuda } else { GpuChoice::Fake };
    Ok(Settings::builder().gpu(choice).build()?)
}

/// The GPUs that a runtime sees.
pub(crate) fn of(runtime: &Runtime) -> Result<Vec<Arc<dyn Gpu>>> {
    let mut reasons = Vec::new();
    for driver in runtime.gpu_drivers() {
        match driver.devices() {
            Ok(gpus) if !gpus.is_empty() => return Ok(gpus),
            Ok(_) => reasons.push(format!("{} has no device", driver.name())),
            Err(why) => reasons.push(why.to_string()),
        }
    }
    Err(format!("no GPU: {}; CARRACK_GPU=fake simulates some", reasons.join("; ")).into())
}

/// The first line of an example: what it works on.
pub(crate) fn say(gpus: &[Arc<dyn Gpu>]) {
    let simulated = gpus.iter().any(|gpu| gpu.info().simulated);
    let names: Vec<_> = gpus.iter().map(|gpu| gpu.info().name.as_str()).collect();
    let what = if simulated { "simulated GPU(s), no real one" } else { "GPU(s)" };
    println!("on {} {what}: {}", gpus.len(), names.join(", "));
}

/// Runs `body` on this rank; where no launcher has started several, on two ranks in this process, a
/// thread each. The GPU that it is given is that of its rank, in turn. What went wrong is said.
pub(crate) fn play(body: Body) -> ExitCode {
    play_from(2, body)
}

pub(crate) type Body = fn(&Runtime, &Arc<dyn Gpu>) -> Result<()>;

/// The same where `least` ranks that a launcher has started are enough.
pub(crate) fn play_from(least: u32, body: Body) -> ExitCode {
    match all_play(least, body) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all went well, and is said where it did not.
fn all_play(least: u32, body: Body) -> Result<bool> {
    let settings = settings()?;
    let runtime = Runtime::builder().settings(settings.clone()).start()?;
    // Those of one runtime for all ranks of a process: each simulated driver has devices of its
    // own.
    let gpus = of(&runtime)?;
    let gpu = |rank: &Runtime| &gpus[rank.rank().0 as usize % gpus.len()];
    if runtime.rank().0 == 0 {
        say(&gpus);
    }
    // Said while the runtime is there: once it has closed another rank may fail of that first, and
    // the launcher end this one.
    let played = |rank: &Runtime| {
        body(rank, gpu(rank)).inspect_err(|why| eprintln!("{}: {why}", rank.rank())).is_ok()
    };
    let is_launched = [protocol::RANK_VARIABLE, variables::RANK]
        .iter()
        .any(|name| std::env::var_os(name).is_some());
    if runtime.size() > 1 || is_launched && runtime.size() >= least {
        return Ok(played(&runtime));
    }
    let ranks = Runtime::in_process_with(2, &settings)?;
    std::thread::scope(|threads| {
        // A rank ends with its body: the other one must not wait for one that has failed.
        let players: Vec<_> =
            ranks.into_iter().map(|rank| threads.spawn(move || played(&rank))).collect();
        // What a panic had to say, it has said.
        let ends = players.into_iter().map(|player| player.join().unwrap_or(false));
        Ok(ends.fold(true, |all, end| all & end))
    })
}
