//! Orders of the launcher to the keeper, as the keeper's command line: `ps` shows what a keeper
//! keeps.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::binding::Bind;
use super::options::{Job, Output, parse_ranks};

/// The options of `carrack __keeper`, which only the launcher starts.
#[derive(Args, Clone, Debug)]
pub(crate) struct KeeperOptions {
    /// The pipe from the launcher: a byte is a signal to end the job by, its end is the launcher's.
    #[arg(long)]
    pub(super) lifeline: i32,
    #[arg(long, value_parser = parse_ranks)]
    pub(super) ranks: u32,
    #[arg(long, value_enum)]
    pub(super) bind: Bind,
    #[arg(long, value_enum)]
    pub(super) output: Output,
    #[arg(long)]
    pub(super) timeout_ms: Option<u64>,
    /// The process group that may read from the terminal, when stdin is one.
    #[arg(long)]
    pub(super) foreground: Option<i32>,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(super) command: Vec<OsString>,
}

impl KeeperOptions {
    /// Returns the orders for a job whose program was found.
    pub(super) fn of(job: &Job, program: PathBuf, lifeline: i32, foreground: Option<i32>) -> Self {
        Self {
            lifeline,
            ranks: job.ranks,
            bind: job.bind,
            output: job.output,
            timeout_ms: job
                .timeout
                .map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
            foreground,
            command: [program.into_os_string()]
                .into_iter()
                .chain(job.args.iter().cloned())
                .collect(),
        }
    }

    /// The options as arguments.
    pub(super) fn to_args(&self) -> Vec<OsString> {
        fn name(value: &impl ValueEnum) -> String {
            value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
        }
        let mut args = vec![
            format!("--lifeline={}", self.lifeline),
            format!("--ranks={}", self.ranks),
            format!("--bind={}", name(&self.bind)),
            format!("--output={}", name(&self.output)),
        ];
        args.extend(self.timeout_ms.map(|timeout| format!("--timeout-ms={timeout}")));
        args.extend(self.foreground.map(|group| format!("--foreground={group}")));
        args.push("--".into());
        args.into_iter().map(OsString::from).chain(self.command.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: KeeperOptions,
    }

    #[test]
    fn what_the_launcher_says_is_what_the_keeper_hears() {
        let said = KeeperOptions {
            lifeline: 7,
            ranks: 12,
            bind: Bind::Core,
            output: Output::Plain,
            timeout_ms: Some(1500),
            foreground: Some(42),
            command: ["/bin/x", "--ranks", "3", "-n", "--", ""].map(OsString::from).into(),
        };
        let heard =
            Command::try_parse_from([OsString::from("x")].into_iter().chain(said.to_args()))
                .unwrap();
        assert_eq!(format!("{said:?}"), format!("{:?}", heard.options));
    }
}
