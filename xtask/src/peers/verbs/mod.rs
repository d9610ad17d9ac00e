//! `cargo xtask bench-peers --guest`: Carrack over verbs compared with perftest and UCX, on the two
//! RDMA devices of a small virtual machine.
//!
//! Machine and devices are simulated, so a figure means nothing. The ratio of two that were
//! measured one after the other says how much of the same kernel's and provider's work each asks
//! for. In rounds, Carrack and its peer take turns at being the first; the median ratio is shown.
//!
//! | module | what it does |
//! |---|---|
//! | `programs` | runs a side, in the guest, and reads its figure |
//! | `comparison` | what is compared, by which measure, and what came out |

mod comparison;
mod programs;

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use super::machine::Machine;
use crate::apt;
use crate::error::TaskError;
use crate::guest::{self, Host, Plan};
use crate::workspace::Workspace;
use comparison::Outcome;
use programs::Sides;

/// A processor for each side that polls. More would be no quicker, since they are emulated.
const PROCESSORS: u8 = 2;

/// Time limits of a comparison in a round and of the boot, on a busy machine.
const COMPARISON: Duration = Duration::from_secs(60);
const BOOT: Duration = Duration::from_secs(60);

/// Both sides poll, and the kernel's threads that carry packets for Soft-RoCE have no processor of
/// their own. A program of the policy "idle" lets them in at once, and any other polls on until the
/// next tick, 4 ms later. It is the same for all sides.
const PREEMPT_POLLERS: [&str; 3] = ["chrt", "--idle", "0"];

/// Boots a guest, and measures there.
pub(super) fn run(rounds: u32, seconds: f64) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let host = Host::prepare(&workspace, &Default::default())?;
    apt::see_to("perftest ucx-utils")?;
    let carrack = workspace.release()?;
    let Machine { date, cpu, load_before, .. } = Machine::look_before_rounds()?;
    println!("{date}; on {cpu}, which emulates the guest; load {load_before:.2}");
    let own = env::current_exe()?;
    let mut command: Vec<OsString> = PREEMPT_POLLERS.map(OsString::from).into();
    command.extend([own.into(), "bench-peers".into(), "--in-guest".into()]);
    command.push(carrack.into());
    command.extend(["--rounds", &rounds.to_string()].map(OsString::from));
    command.extend(["--seconds", &seconds.to_string()].map(OsString::from));
    let mut plan = Plan::new(command, workspace.root.clone());
    plan.processors = PROCESSORS;
    plan.environment.extend(env::var_os("PATH").map(|path| ("PATH".into(), path)));
    let count = u32::try_from(comparison::all().len()).unwrap_or(u32::MAX);
    plan.limit = BOOT + COMPARISON * count.saturating_mul(rounds);
    let status = host.run(&plan, false, |said| guest::pass_on(said, plan.wiring))?;
    Ok(ExitCode::from(status))
}

/// In the guest: measures, and prints the table. The status is 1 where a program has failed; a
/// criterion that is missed is no failure.
pub(super) fn measure(carrack: &Path, rounds: u32, seconds: f64) -> Result<ExitCode, TaskError> {
    let sides = Sides { carrack: PathBuf::from(carrack), seconds };
    let mut outcomes = comparison::all();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for outcome in &mut outcomes {
            outcome.round(round, &sides);
        }
    }
    let Machine { kernel, cpus, .. } = Machine::look()?;
    let (carrack, peers) = (env!("CARGO_PKG_VERSION"), sides.peers());
    println!("In the guest: Linux {kernel}, {cpus} processors; Carrack {carrack}, {peers}");
    println!("Devices and machine are simulated: only ratios mean anything.");
    println!("Medians of {rounds} rounds of {seconds} s.\n\n{}", comparison::table(&outcomes));
    Ok(if outcomes.iter().any(Outcome::has_failed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
