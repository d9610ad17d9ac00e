//! GPUs that an example works on: NVIDIA's if there are any, else simulated ones. The example
//! prints which.

#![allow(dead_code, reason = "each example is a program of its own, and uses a part of this")]

use carrack::Runtime;
use carrack::bootstrap::{protocol, tcp::variables};
use carrack::settings::{GpuChoice, Settings};
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Gpu};
use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Returns settings with a GPU driver: that of CARRACK_GPU, else NVIDIA's, else the simulated one.
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

/// Returns the GPUs that a runtime sees.
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

static ALL: OnceLock<Vec<Arc<dyn Gpu>>> = OnceLock::new();

/// Returns the GPUs of this process, which all ranks in it use: each simulated driver has its own
/// devices. There are none before [`play`].
pub(crate) fn all() -> &'static [Arc<dyn Gpu>] {
    ALL.get().map_or(&[], |gpus| gpus)
}

/// Prints the GPUs that an example works on.
pub(crate) fn say(gpus: &[Arc<dyn Gpu>]) {
    let simulated = gpus.iter().any(|gpu| gpu.info().simulated);
    let names: Vec<_> = gpus.iter().map(|gpu| gpu.info().name.as_str()).collect();
    let what = if simulated { "simulated GPU(s), no real one" } else { "GPU(s)" };
    println!("on {} {what}: {}", gpus.len(), names.join(", "));
}

/// Runs `body` on this rank, or on two ranks in this process, a thread each, if no launcher has
/// started several. Each rank gets a GPU in turn, and its error is printed.
pub(crate) fn play(body: Body) -> ExitCode {
    play_from(2, body)
}

pub(crate) type Body = fn(&Runtime, &Arc<dyn Gpu>) -> Result<()>;

/// Runs `body` like [`play`], but on this rank alone if a launcher has started at least `least`
/// ranks.
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

/// Returns `true` if all ranks of this process succeeded. Their errors are printed.
fn all_play(least: u32, body: Body) -> Result<bool> {
    let settings = settings()?;
    let runtime = Runtime::builder().settings(settings.clone()).start()?;
    let gpus = of(&runtime)?;
    let gpus = ALL.get_or_init(|| gpus);
    let gpu = |rank: &Runtime| &gpus[rank.rank().0 as usize % gpus.len()];
    if runtime.rank().0 == 0 {
        say(gpus);
    }
    // Printed before the runtime closes: its end can fail another rank first, and then the
    // launcher ends this one.
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
        // A panic has printed its message.
        let ends = players.into_iter().map(|player| player.join().unwrap_or(false));
        Ok(ends.fold(true, |all, end| all & end))
    })
}
