//! Which GPUs an example works on: NVIDIA's where there are any, else simulated ones, and it says which.

#![allow(dead_code, reason = "each example is a program of its own, and uses a part of this")]

use carrack::Runtime;
use carrack::bootstrap::{protocol, tcp::variables};
use carrack::settings::{GpuChoice, Settings};
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Gpu};
use std::error::Error;
use std::sync::Arc;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Settings with which there is a GPU: what CARRACK_GPU says, else NVIDIA's, else simulated ones.
pub(crate) fn settings() -> Result<Settings> {
    let given = Settings::from_env()?;
    if given.gpu() != GpuChoice::Auto {
        return Ok(given);
    }
    let found = CudaDriver::initialise().and_then(|driver| driver.devices());
    let choice = if found.is_ok_and(|gpus| !gpus.is_empty()) { GpuChoice::Cuda } else { GpuChoice::Fake };
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

/// Runs `body` on this rank; where no launcher has started several, on two ranks in this process, a thread each. The
/// GPU that it is given is that of its rank, in turn.
pub(crate) fn play(body: fn(&Runtime, &Arc<dyn Gpu>) -> Result<()>) -> Result<()> {
    play_from(2, body)
}

/// The same where `least` ranks that a launcher has started are enough.
pub(crate) fn play_from(least: u32, body: fn(&Runtime, &Arc<dyn Gpu>) -> Result<()>) -> Result<()> {
    let settings = settings()?;
    let runtime = Runtime::builder().settings(settings.clone()).start()?;
    // Those of one runtime for all ranks of a process: each simulated driver has devices of its own.
    let gpus = of(&runtime)?;
    let gpu = |rank: &Runtime| &gpus[rank.rank().0 as usize % gpus.len()];
    if runtime.rank().0 == 0 {
        say(&gpus);
    }
    let is_launched =
        [protocol::RANK_VARIABLE, variables::RANK].iter().any(|name| std::env::var_os(name).is_some());
    if runtime.size() > 1 || is_launched && runtime.size() >= least {
        // Told while the runtime is there: once it has closed another rank may fail of that first, and the launcher end this one.
        return body(&runtime, gpu(&runtime)).inspect_err(|why| eprintln!("{}: {why}", runtime.rank()));
    }
    let ranks = Runtime::in_process_with(2, &settings)?;
    let play = |rank: Runtime| {
        // It ends with its body: the other one must not wait for a rank that has failed.
        body(&rank, gpu(&rank)).inspect_err(|why| eprintln!("{}: {why}", rank.rank()))
    };
    std::thread::scope(|threads| {
        let players: Vec<_> = ranks.into_iter().map(|rank| threads.spawn(move || play(rank))).collect();
        let ends = players.into_iter().map(|player| player.join().map_err(|_| "a player panicked")?);
        ends.fold(Ok(()), Result::and)
    })
}
