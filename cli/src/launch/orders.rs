//! Orders of the launcher to the keeper, as the keeper's command line: `ps` shows what a keeper
//! keeps.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::binding::Bind;
use super::options::Job;

/// The options of `carrack __keeper`, which only the launcher starts.
#[derive(Args, Clone, Debug)]
pub(crate) struct KeeperOptions {
    /// The pipe from the launcher: a byte is a signal to end the job by, its end is the launcher's.
    #[arg(long)]
    pub(super) lifeline: i32,
    /// The process group that may read from the terminal, when stdin is one.
    #[arg(long)]
    pub(super) foreground: Option<i32>,
    /// The ranks write to the launcher's own stdout and stderr.
    #[arg(long)]
    pub(super) direct: bool,
    #[command(flatten)]
    pub(super) job: Job,
}

impl KeeperOptions {
    /// Returns the orders for a job whose program was found.
    pub(super) fn of(job: &Job, program: PathBuf, lifeline: i32, foreground: Option<i32>) -> Self {
        let mut job = job.clone();
        job.command[0] = program.into_os_string();
        Self { lifeline, foreground, direct: job.is_direct, job }
    }

    /// Returns these options as arguments of a command.
    pub(super) fn to_args(&self) -> Vec<OsString> {
        let Self { lifeline, foreground, direct, job } = self;
        let bind = if job.bind == Bind::Core { "core" } else { "none" };
        let mut args = vec![format!("--lifeline={lifeline}"), format!("--ranks={}", job.ranks)];
        args.push(format!("--bind={bind}"));
        args.extend(job.nodes.to_args());
        args.extend(foreground.map(|group| format!("--foreground={group}")));
        args.extend(job.timeout.map(|limit| format!("--timeout={}", limit.as_secs_f64())));
        args.extend(job.no_tag.then(|| "--no-tag".into()));
        args.extend(direct.then(|| "--direct".into()));
        args.push("--".into());
        args.into_iter().map(OsString::from).chain(job.command.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use std::time::Duration;

    use super::*;
    use crate::launch::nodes::Nodes;

    #[derive(Parser)]
    struct KeeperCommand {
        #[command(flatten)]
        options: KeeperOptions,
    }

    #[test]
    fn what_the_launcher_says_is_what_the_keeper_hears() {
        let job = Job {
            ranks: 12,
            nodes: Nodes::default(),
            bind: Bind::Core,
            timeout: Some(Duration::from_millis(1500)),
            no_tag: true,
            is_direct: false,
            env: Vec::new(),
            command: ["/bin/x", "--ranks", "3", "-n", "--", ""].map(OsString::from).into(),
        };
        let said = KeeperOptions { lifeline: 7, foreground: Some(42), direct: true, job };
        let heard =
            KeeperCommand::try_parse_from([OsString::from("x")].into_iter().chain(said.to_args()))
                .unwrap();
        assert_eq!(format!("{said:?}"), format!("{:?}", heard.options));
    }
}
