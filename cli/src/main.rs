//! The carrack command.

mod launch;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "carrack", version, about = "Carrack's launcher and tools")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Start a program as several ranks.
    Run(launch::LaunchOptions),
    #[command(name = "__keeper", hide = true)]
    Keeper(launch::KeeperOptions),
}

fn main() -> ExitCode {
    match Cli::parse().verb {
        Verb::Run(options) => launch::launch(options),
        Verb::Keeper(options) => launch::keep(options),
    }
}
