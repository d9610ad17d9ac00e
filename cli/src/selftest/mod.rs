//! `carrack selftest`: conformance, examples and performance of this machine.
//!
//! A user runs it from the folder of `cargo xtask bundle` or from a built tree, under any launcher
//! or none. It writes report.md and report.json.
//!
//! Each part is a process of its own with a time limit, and its output goes to a file. So no part
//! can end or hang the selftest. The modules, in the order in which a run passes through them:
//!
//! | module | idea |
//! |---|---|
//! | [`options`] | the command line |
//! | [`node`] | the choice of the rank that does the work of a node |
//! | [`kit`] | the programs, next to this one or in target/ |
//! | [`unpacked`] | a bundle's programs: their unpacking, and its place |
//! | [`temporary`] | folders that are removed, also after a run that was killed |
//! | [`machine`] | the hardware, as `carrack info` reports it |
//! | [`suites`], [`examples`], [`halo`], [`perf`] | the parts |
//! | [`part`] | a part: its command line, its run and its outcome |
//! | [`child`] | runs one process to its end or its limit |
//! | [`libtest`] | counts tests in the output of a test program |
//! | [`report`], [`markdown`] | the report, as JSON and for people |

mod child;
mod examples;
mod halo;
mod kit;
mod libtest;
mod machine;
mod markdown;
mod node;
mod options;
mod part;
mod perf;
mod report;
mod suites;
mod temporary;
mod unpacked;

pub(crate) use options::SelftestOptions;

use crate::launch::LaunchError;
use crate::{USAGE, bar};
use carrack_transports::stderr::say;
use children::echo;
use kit::Kit;
use machine::Machine;
use node::Node;
use part::{Part, Ran};
use report::{Report, Totals};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime};
use tempfile::TempDir;
use unpacked::UnpackError;

/// Exit status of a program that Ctrl-C has ended, as shells report it.
const INTERRUPTED: u8 = 130;

/// Errors that leave no report, or an incomplete one.
#[derive(Debug, thiserror::Error)]
enum SelftestError {
    #[error("{}: {source}; name another folder with --report", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: another selftest writes there; name another folder with --report", .0.display())]
    Taken(PathBuf),
    #[error("{}: {source}; name a folder with TMPDIR that is there and writable", path.display())]
    Temporary { path: PathBuf, source: io::Error },
    #[error(
        "there are no test programs in {}: run this from the folder that `cargo xtask bundle` \
        made, or after `cargo build --workspace --examples` and `cargo test --no-run`", .0.display()
    )]
    NoKit(PathBuf),
    #[error("--gpu cuda: {0}; leave --gpu out, or correct that")]
    NoGpu(String),
    #[error("--filter {0}: no part has that in its name; --list shows them all")]
    NothingChosen(String),
    #[error("{doing} failed: {source}; check the limits of this user (`ulimit -a`)")]
    System { doing: &'static str, source: io::Error },
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("`carrack info` tells nothing of this machine: {0}; run it alone to see why")]
    Machine(String),
}

/// Runs the selftest.
pub(crate) fn selftest(options: &SelftestOptions) -> ExitCode {
    let node = Node::of_this_process();
    if let Some(why) = node.stands_by() {
        echo(&format!("carrack selftest: {why}"));
        return ExitCode::SUCCESS;
    }
    match run(options, &node) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            say(format_args!("selftest: {error}"));
            ExitCode::from(match error {
                SelftestError::NothingChosen(_) => USAGE,
                SelftestError::Unpack(UnpackError::Interrupted) => INTERRUPTED,
                _ => 1,
            })
        }
    }
}

fn run(options: &SelftestOptions, node: &Node) -> Result<u8, SelftestError> {
    child::watch()?;
    let kit = Kit::find(&options.report)?;
    let (date, start) = (now(), Instant::now());
    let scratch = scratch()?;
    let machine = Machine::look(options.gpu, &kit, scratch.path())?;
    let suffix = node.suffix();
    let parts = chosen(options, &kit, &machine, suffix.as_deref())?;
    if options.list {
        parts.iter().for_each(|part| {
            let why = part.skip.as_ref().map(|why| format!(" (skipped: {why})"));
            echo(&format!("{}{}", part.name, why.unwrap_or_default()));
        });
        return Ok(0);
    }
    let logs = options
        .report
        .join(suffix.as_ref().map_or_else(|| "logs".into(), |node| format!("logs-{node}")));
    let _taken = take(&options.report, &logs)?;
    let gpus = machine.gpus_in_words();
    echo(&format!("carrack selftest, {date}: {} parts; {gpus}", parts.len()));
    let ran = run_all(parts, &logs, scratch.path());
    let report = Report::of(date, start.elapsed(), &kit, node, machine, ran);
    let names = report.write(&options.report, suffix.as_deref())?;
    echo(&format!("{}: {names}", report.summary()));
    Ok(match report.totals {
        _ if children::interrupted() => INTERRUPTED,
        Totals { parts_failed: 0, parts_passed: 0, .. } => {
            say("selftest: nothing was tested: every part was skipped; the report says why");
            1
        }
        Totals { parts_failed: 0, .. } => 0,
        _ => 1,
    })
}

/// Returns the parts that the command line asks for.
fn chosen(
    options: &SelftestOptions,
    kit: &Kit,
    machine: &Machine,
    suffix: Option<&str>,
) -> Result<Vec<Part>, SelftestError> {
    let mut parts = suites::parts(kit, machine, options.quick);
    parts.extend(examples::parts(kit, machine));
    parts.extend(halo::parts(kit, machine, &options.report, suffix));
    // Last, when nothing else of this run is left that could disturb it.
    parts.extend(perf::parts(kit, machine, options.quick, options.seconds));
    let is_wanted =
        |part: &Part| options.filter.iter().any(|text| part.name.contains(text.as_str()));
    let is_in_none = |text: &&String| !parts.iter().any(|part| part.name.contains(text.as_str()));
    if let Some(text) = options.filter.iter().find(is_in_none) {
        return Err(SelftestError::NothingChosen(text.clone()));
    }
    parts.retain(|part| options.filter.is_empty() || is_wanted(part));
    if let Some(limit) = options.limit {
        parts.iter_mut().for_each(|part| part.limit = limit);
    }
    Ok(parts)
}

/// Runs one part after another. Prints a line for each ended part, and a progress bar on a
/// terminal.
fn run_all(parts: Vec<Part>, logs: &Path, scratch: &Path) -> Vec<Ran> {
    let bar = bar::new(parts.len(), "[{bar:24}] {pos}/{len} {elapsed} {msg}");
    let run = |part: Part| {
        bar.set_message(part.name.clone());
        bar.tick();
        let ran = part.run(logs, scratch, || bar.tick());
        let Ran { name, seconds, words, .. } = &ran;
        let word = ran.outcome.word();
        bar.suspend(|| echo(&format!("{word:<7} {seconds:>6.1} s  {name}: {words}")));
        bar.inc(1);
        ran
    };
    let ran = parts.into_iter().map(run).collect();
    bar.finish_and_clear();
    ran
}

/// Returns the time now, as `2026-11-21 13:49:35 UTC`.
fn now() -> String {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    now.replace('T', " ").replace('Z', " UTC")
}

/// Creates a folder for temporary files of the parts, which is removed in the end.
fn scratch() -> Result<TempDir, SelftestError> {
    let path = std::env::temp_dir();
    temporary::folder(&path, "selftest").map_err(|source| SelftestError::Temporary { path, source })
}

/// Makes the folders of the report, and takes them for this run until the result is dropped.
fn take(report: &Path, logs: &Path) -> Result<File, SelftestError> {
    fs::create_dir_all(logs).map_err(file(logs))?;
    // The folder may be there and be another user's.
    tempfile::tempfile_in(report).map_err(file(report))?;
    let taken = File::open(logs).map_err(file(logs))?;
    match flock(&taken, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(SelftestError::Taken(report.to_owned())),
        // A file system without locks.
        _ => Ok(taken),
    }
}

fn file(path: &Path) -> impl FnOnce(io::Error) -> SelftestError {
    let path = path.to_owned();
    move |source| SelftestError::File { path, source }
}
