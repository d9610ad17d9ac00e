//! `cargo xtask bench-peers --guest`: Carrack over verbs compared with perftest and UCX, on the two
//! RDMA devices of a small virtual machine.
//!
//! Machine and devices are simulated, so a figure means nothing. The ratio of two says how much of
//! the same kernel's and provider's work each side needs. `programs` has the sides.

mod programs;

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use super::cores::Cores;
use super::machine::Machine;
use super::side::Side;
use super::{PeersOptions, row};
use crate::apt;
use crate::error::TaskError;
use crate::guest::{self, Host, Plan};
use crate::workspace::Workspace;
use programs::{Ours, Perftest, UcxPerftest};

/// The rows. The receivers of perftest's and UCX's writes look at their memory, so ours do.
const ROWS: &str = "send:latency:8 put_seen:latency:8 am:latency:8 send:bandwidth:1M \
    put:bandwidth:1M am:rate:8";

/// A processor for each side that polls. More would be no quicker, since they are emulated.
const PROCESSORS: u8 = 2;

/// Time limits of a row in a round and of the boot, on a busy machine.
const ROW: Duration = Duration::from_secs(90);
const BOOT: Duration = Duration::from_secs(60);

/// Both sides poll, and the kernel's threads that carry packets for Soft-RoCE have no processor of
/// their own. A program of the policy "idle" lets them in at once, and any other polls on until the
/// next tick, 4 ms later. It is the same for all sides.
const PREEMPT_POLLERS: [&str; 3] = ["chrt", "--idle", "0"];

/// Boots a guest, and measures there.
pub(super) fn run(options: &PeersOptions) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let host = Host::prepare(&workspace, &Default::default())?;
    apt::see_to("perftest ucx-utils")?;
    let carrack = workspace.release()?;
    let Machine { date, cpu, load_before, .. } = Machine::look_before_rounds()?;
    say!("{date}; on {cpu}, which emulates the guest; load {load_before:.2}");
    let own = env::current_exe()?;
    let mut command: Vec<OsString> = PREEMPT_POLLERS.map(OsString::from).into();
    command.extend([own.into(), "bench-peers".into(), "--in-guest".into()]);
    command.push(carrack.into());
    command.extend(["--rounds", &options.rounds.to_string()].map(OsString::from));
    command.extend(["--seconds", &options.seconds.to_string()].map(OsString::from));
    let mut plan = Plan::new(command, workspace.root.clone());
    plan.processors = PROCESSORS;
    plan.environment.extend(env::var_os("PATH").map(|path| ("PATH".into(), path)));
    let rows = ROW * u32::try_from(row::read(ROWS).len()).unwrap_or(u32::MAX);
    plan.limit = BOOT + rows.saturating_mul(options.rounds);
    let status = host.run(&plan, false, |said| guest::pass_on(said, plan.wiring))?;
    Ok(ExitCode::from(status))
}

/// Measures in the guest, with this command of Carrack's, and prints the report.
pub(super) fn measure(carrack: &Path, options: &PeersOptions) -> Result<ExitCode, TaskError> {
    let sides: [Box<dyn Side>; 3] = [
        Box::new(Ours { carrack: carrack.into(), seconds: options.seconds }),
        Box::new(Perftest),
        Box::new(UcxPerftest),
    ];
    say!("Devices and machine are simulated: only ratios mean anything.");
    super::report(options, &row::read(ROWS), &sides, Cores::choose()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_read_and_compared_with_a_peer() {
        let rows = row::read(ROWS);
        assert_eq!(rows.len(), ROWS.split_whitespace().count());
        assert!(rows.iter().all(|row| Perftest.test(row).or(UcxPerftest.test(row)).is_some()));
    }
}
