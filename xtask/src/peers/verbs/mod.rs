//! `cargo xtask bench-peers --guest`: Carrack over verbs compared with perftest and UCX, on the two
//! RDMA devices of a small virtual machine.
//!
//! Machine and devices are simulated, so a figure means nothing; the ratio of two that were
//! measured one after the other does: how much of the same kernel's and provider's work each of
//! them asks for. One boot, rounds in which Carrack and its peer take turns at being the first, and
//! of each comparison the median of the rounds' ratios.
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

/// A processor for each side that polls. A third and fourth would be no quicker: the machine has to
/// emulate them, too.
const PROCESSORS: u8 = 2;

/// Time limits of a comparison in a round and of the boot, on a busy machine.
const COMPARISON: Duration = Duration::from_secs(60);
const BOOT: Duration = Duration::from_secs(60);

/// Both sides poll, and the kernel's threads that carry packets for Soft-RoCE have no processor of
/// their own: what is of the policy "idle" lets them in at once. As any other program it would poll
/// on until the next tick, 4 ms during which nothing can come, and the medians would be of ticks.
/// It is the same for all sides.
const PREEMPT_POLLERS: [&str; 3] = ["chrt", "--idle", "0"];

/// Boots a guest, and measures there.
pub(super) fn run(rounds: u32, seconds: f64) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let host = Host::prepare(&workspace, &Default::default())?;
    apt::see_to("perftest ucx-utils")?;
    let carrack = workspace.release()?;
    let machine = Machine::look_before_rounds()?;
    println!(
        "{}; on {}, which emulates the guest; load {:.2}",
        machine.date, machine.cpu, machine.load_before
    );
    let own = env::current_exe()?;
    let mut command: Vec<OsString> = PREEMPT_POLLERS.map(OsString::from).into();
    command.extend([own.into(), "bench-peers".into(), "--in-guest".into()]);
    command.push(carrack.into());
    command.extend(["--rounds".into(), rounds.to_string().into()]);
    command.extend(["--seconds".into(), seconds.to_string().into()]);
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
    let machine = Machine::look()?;
    println!(
        "In the guest: Linux {}, {} processors; Carrack {}, {}",
        machine.kernel,
        machine.cpus,
        env!("CARGO_PKG_VERSION"),
        sides.peers()
    );
    println!(
        "Devices and machine are simulated: only ratios mean anything. Medians of {rounds} rounds \
        of {seconds} s.\n"
    );
    println!("{}", comparison::table(&outcomes));
    Ok(if outcomes.iter().any(Outcome::has_failed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
