//! Stub.
use crate::error::TaskError;
use std::process::ExitCode;
#[derive(clap::Args)]
pub(crate) struct Options {}
pub(crate) fn run(_: &Options) -> Result<ExitCode, TaskError> {
    Ok(ExitCode::SUCCESS)
}
