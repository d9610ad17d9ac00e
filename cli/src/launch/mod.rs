//! `carrack run`: starts the ranks of a job on this machine, and leaves nothing behind.
//!
//! Two processes watch over a job. The *launcher* is what the user sees: it takes the signals and
//! gives the exit status. The *keeper* is the same binary started again (`carrack __keeper`); it
//! is the parent of all ranks, tags their output, and serves their bootstrap. Either cleans up when
//! the other is killed, even by SIGKILL. The keeper finds its lifeline, a pipe from the launcher,
//! hung up. The launcher finds its child dead and inherits what the keeper's ranks had started, for
//! both are subreapers. Only killing both at the same instant can leave a rank's own children
//! behind; the ranks themselves die with the keeper in any case.
//!
//! | module | idea |
//! |---|---|
//! | [`options`] | the command line of `run`, and the [`Job`] that it describes |
//! | [`nodes`] | jobs over several nodes |
//! | [`look_up`] | finds the program |
//! | [`launcher`] | starts the keeper, passes signals on, gives the exit status |
//! | [`orders`] | what the launcher tells the keeper |
//! | [`keeper`] | the event loop: output, bootstrap, deaths, signals, deadlines |
//! | [`ending`] | when and how a job ends: who failed first, when grace ends |
//! | [`rank`] | starts one rank |
//! | [`binding`] | which CPU a rank runs on |
//! | [`lines`] | cuts output into tagged lines |
//! | [`output`] | the threads that write what the ranks' pipes hold to stdout and stderr |
//! | [`post`] | moves bootstrap frames between sockets and the server |
//! | [`signals`] | signals as a descriptor, and their names |
//! | [`error`] | what can go wrong before the job runs, with its exit status |

mod binding;
mod ending;
mod error;
mod keeper;
mod launcher;
mod lines;
mod look_up;
mod nodes;
mod options;
mod orders;
mod output;
mod post;
mod rank;
pub(crate) mod signals;

use std::process::ExitCode;

use carrack::bootstrap::protocol::RANK_VARIABLE;
use carrack::bootstrap::tcp::variables::RUN_ID;
use carrack_transports::stderr::say;

pub(crate) use binding::Bind;
pub(crate) use error::LaunchError;
pub(crate) use keeper::keep;
pub(crate) use launcher::run_job;
pub(crate) use look_up::is_executable;
pub(crate) use options::Job;
pub(crate) use orders::KeeperOptions;
pub(crate) use rank::tie;

/// Returns `true` if `carrack run` started this process as a rank.
pub(crate) fn is_started() -> bool {
    let is_of_nodes = || std::env::var(RUN_ID).is_ok_and(|id| id == nodes::RUN);
    std::env::var_os(RANK_VARIABLE).is_some() || is_of_nodes()
}

/// Runs the job that the command line describes, and gives the launcher's exit status.
pub(crate) fn launch(job: &Job) -> ExitCode {
    match run_job(job) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            say(format_args!("run: {error}"));
            ExitCode::from(error.exit_status())
        }
    }
}
