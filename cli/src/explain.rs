//! `carrack explain`: the path to each peer, and why each other was refused (design.md §6.5).

use crate::launch::LaunchError;
use crate::own_ranks::{is_rank, run_ranks};
use crate::{USAGE, complain, print};
use carrack::explain::{KindPath, PathVerdict, PeerPaths, Verdict};
use carrack::settings::{Settings, SettingsError};
use carrack::{CollectiveError, Rank, Runtime, StartError};
use clap::Args;
use serde::Serialize;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

/// How long to wait for ranks that have not started.
const PATIENCE: Duration = Duration::from_secs(10);

/// The options of `carrack explain`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Without a launcher, explain starts two ranks of its own on this machine. Under `carrack run` it is a rank like
any other, and rank 0 prints.

With --json each pair of ranks is an object on a line of its own:
  rank, peer, device  whose view it is, of whom, from which device
  chosen              the transport that messages take, or null
  paths               [{transport, verdict: \"chosen\", \"passed\" or \"refused\", why}]
  kinds               [{memory, way, why}]: how messages from each kind of memory get onto the path
  trouble             why nothing is known, when nothing is")]
pub(crate) struct ExplainOptions {
    /// Print every rank's view, in order; rank 0's alone if not given.
    #[arg(long)]
    all: bool,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
enum ExplainError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Collective(Box<CollectiveError>),
}

impl From<CollectiveError> for ExplainError {
    fn from(error: CollectiveError) -> Self {
        Self::Collective(Box::new(error))
    }
}

/// Prints the paths of this job.
pub(crate) fn explain(options: &ExplainOptions) -> ExitCode {
    match run(options) {
        Ok(status) => status,
        Err(error) => {
            let settings =
                matches!(error, ExplainError::Settings(_) | ExplainError::Start(StartError::Settings(_)));
            complain(error);
            if settings { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
        }
    }
}

fn run(options: &ExplainOptions) -> Result<ExitCode, ExplainError> {
    let settings = Settings::from_env()?;
    if !is_rank() {
        return Ok(ExitCode::from(run_ranks(2, Vec::new())?));
    }
    let runtime = Runtime::builder().settings(settings).start()?;
    // Nobody leaves before all have looked.
    let text = if options.all || runtime.rank() == Rank(0) { view(&runtime, options) } else { String::new() };
    let printed = match (options.all, runtime.rank()) {
        (true, rank) => {
            let views = gather(&runtime, &text)?;
            if rank == Rank(0) { print(&views.concat()) } else { ExitCode::SUCCESS }
        }
        (false, Rank(0)) => print(&text),
        (false, _) => ExitCode::SUCCESS,
    };
    runtime.barrier()?;
    Ok(printed)
}

/// Everybody's text, in the order of ranks: an allgather of lengths, then one of texts of the same length.
fn gather(runtime: &Runtime, text: &str) -> Result<Vec<String>, ExplainError> {
    let lengths = runtime.allgather(&(text.len() as u64).to_le_bytes())?;
    let lengths: Vec<usize> = lengths
        .iter()
        .map(|bytes| bytes.as_slice().try_into().map_or(0, u64::from_le_bytes))
        .map(|length| usize::try_from(length).unwrap_or(0))
        .collect();
    let mut padded = text.as_bytes().to_vec();
    padded.resize(lengths.iter().copied().max().unwrap_or(0), b' ');
    let texts = runtime.allgather(&padded)?;
    let trimmed = texts.iter().zip(&lengths);
    Ok(trimmed
        .map(|(text, &length)| String::from_utf8_lossy(&text[..length.min(text.len())]).into_owned())
        .collect())
}

fn view(runtime: &Runtime, options: &ExplainOptions) -> String {
    let mut text = String::new();
    for paths in runtime.explain(PATIENCE) {
        if options.json {
            // Plain data under names that are strings: it has a form in JSON.
            text.push_str(&serde_json::to_string(&PeerView::of(runtime.rank(), &paths)).unwrap_or_default());
            text.push('\n');
        } else {
            write_peer(&mut text, runtime.rank(), &paths);
        }
    }
    text
}

fn write_peer(text: &mut String, me: Rank, paths: &PeerPaths) {
    let itself = if paths.rank == me { " (itself)" } else { "" };
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{me} to {}{itself}, device {}: {}",
        paths.rank,
        paths.device,
        paths.chosen().unwrap_or("no path")
    );
    if let Some(trouble) = &paths.trouble {
        let _ = writeln!(text, "  {trouble}");
    }
    for PathVerdict { transport, verdict } in &paths.paths {
        let _ = match verdict {
            Verdict::Chosen => writeln!(text, "  {transport:<10} chosen"),
            Verdict::Passed(why) => writeln!(text, "  {transport:<10} passed: {why}"),
            Verdict::Refused(why) => writeln!(text, "  {transport:<10} refused: {why}"),
        };
    }
    for KindPath { memory, way, why } in &paths.kinds {
        let why = why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
        let _ = writeln!(text, "  from {memory} memory: {way}{why}");
    }
}

/// A peer's paths, as JSON.
#[derive(Serialize)]
struct PeerView<'a> {
    rank: u32,
    peer: u32,
    device: u32,
    chosen: Option<&'static str>,
    paths: Vec<PathView<'a>>,
    kinds: Vec<KindView<'a>>,
    trouble: Option<&'a str>,
}

#[derive(Serialize)]
struct PathView<'a> {
    transport: &'static str,
    verdict: &'static str,
    why: Option<&'a str>,
}

#[derive(Serialize)]
struct KindView<'a> {
    memory: &'a str,
    way: &'a str,
    why: Option<&'a str>,
}

impl<'a> PeerView<'a> {
    fn of(me: Rank, paths: &'a PeerPaths) -> Self {
        let path = |path: &'a PathVerdict| {
            let (verdict, why) = match &path.verdict {
                Verdict::Chosen => ("chosen", None),
                Verdict::Passed(why) => ("passed", Some(why.as_str())),
                Verdict::Refused(why) => ("refused", Some(why.as_str())),
            };
            PathView { transport: path.transport, verdict, why }
        };
        let kind =
            |kind: &'a KindPath| KindView { memory: &kind.memory, way: &kind.way, why: kind.why.as_deref() };
        Self {
            rank: me.0,
            peer: paths.rank.0,
            device: paths.device,
            chosen: paths.chosen(),
            paths: paths.paths.iter().map(path).collect(),
            kinds: paths.kinds.iter().map(kind).collect(),
            trouble: paths.trouble.as_deref(),
        }
    }
}
