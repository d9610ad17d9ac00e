//! `carrack explain`: the path to each peer, and why each other was refused.
//!
//! | module | one idea |
//! |---|---|
//! | [`copier`] | whether there can be a resident copier, found out by having one |
//! | [`meeting`] | a barrier that is given some time |

mod copier;
mod meeting;

use crate::gpus;
use crate::launch::LaunchError;
use crate::own_ranks::{gather, is_rank, is_usage, run_ranks};
use crate::{USAGE, print, template};
use carrack::explain::{KindPath, PathVerdict, PeerPaths, Verdict};
use carrack::settings::{Settings, SettingsError};
use carrack::transports::gpu::CopierState;
use carrack::{CollectiveError, Rank, Runtime, StartError, WaitError};
use carrack_transports::stderr::say;
use clap::Args;
use copier::Tried;
use meeting::Meeting;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;

/// Longest wait for ranks that have not started.
const PATIENCE: Duration = Duration::from_secs(10);

/// The options of `carrack explain`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Without a launcher, explain starts two ranks of its own on this machine. Under `carrack run` it is
a rank like any other, and rank 0 prints.

With --json each pair of ranks is an object on a line of its own:
  rank, peer, device  the rank that reports, the other rank, the device
  chosen              the transport that messages take, or null
  paths               [{transport, verdict: \"chosen\", \"passed\" or \"refused\", why}]
  kinds               [{memory, way, why, copier}]: how messages from each kind of memory get onto
                      the path; copier: null, or {state: \"on\", \"refused\" or \"wanted\", why}
                      where it was asked for
  trouble             why nothing is known, when nothing is

With CARRACK_GPU_COPIER=1 each rank first copies 64 bytes within its GPU, some times over: whether
there can be a resident copier shows only then. Its GPU is that of its turn: its number among the
ranks of its node, modulo the GPUs that it sees. Of other GPUs it says \"when the first one finds
...\" (wanted). A program that has a copier on the same GPU meanwhile loses it, as to any other
that wants one there.")]
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
    Wait(#[from] WaitError),
    #[error(transparent)]
    Text(#[from] minijinja::Error),
    #[error(transparent)]
    Collective(#[from] Box<CollectiveError>),
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
            let is_usage = match &error {
                ExplainError::Settings(_) => true,
                ExplainError::Start(error) => is_usage(error),
                _ => false,
            };
            say(error);
            if is_usage { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
        }
    }
}

fn run(options: &ExplainOptions) -> Result<ExitCode, ExplainError> {
    let settings = Settings::from_env()?;
    if !is_rank(&settings)? {
        return Ok(ExitCode::from(run_ranks(2, Vec::new())?));
    }
    let runtime = Runtime::builder().settings(settings).start()?;
    // Initialises their drivers: the way of their memory is told, too.
    gpus::of(&runtime);
    let world = runtime.world();
    let meeting = Meeting::of(&world);
    let tried = copier::try_out(&runtime, &meeting);
    let mut printed = ExitCode::SUCCESS;
    let views = options.all || runtime.rank() == Rank(0);
    let mut text = if views { view(&runtime, options, tried.as_ref())? } else { String::new() };
    // Printed first: the failure of another rank can end the calls below with an error.
    if !options.all {
        if runtime.rank() == Rank(0) && runtime.size() > 1 && !options.json {
            let size = runtime.size();
            text += &format!(
                "This is the view of rank 0 of {size}; --all prints that of every \
                rank.\n"
            );
        }
        printed = print(&text);
    }
    meeting.end(&runtime)?;
    if options.all {
        let texts = gather(&runtime, &text)?;
        if runtime.rank() == Rank(0) {
            printed = print(&texts.concat());
        }
    }
    // A rank that left earlier would be an unreachable peer in the others' views.
    runtime.barrier()?;
    Ok(printed)
}

fn view(
    runtime: &Runtime,
    options: &ExplainOptions,
    tried: Option<&Tried>,
) -> Result<String, ExplainError> {
    let mut text = String::new();
    for mut paths in runtime.explain(PATIENCE) {
        if let Some(tried) = tried {
            paths.kinds.iter_mut().for_each(|kind| tried.tell(kind));
        }
        let paths = to_json(runtime.rank(), &paths);
        text += &match options.json {
            true => format!("{paths}\n"),
            false => template::fill(
                include_str!("explain.txt.jinja"),
                minijinja::Value::from_serialize(paths),
            )?,
        };
    }
    Ok(text)
}

/// Converts the paths to a peer to JSON.
fn to_json(me: Rank, paths: &PeerPaths) -> Value {
    let path = |path: &PathVerdict| {
        let (verdict, why) = match &path.verdict {
            Verdict::Chosen => ("chosen", None),
            Verdict::Passed(why) => ("passed", Some(why)),
            Verdict::Refused(why) => ("refused", Some(why)),
        };
        json!({ "transport": path.transport, "verdict": verdict, "why": why })
    };
    let copier = |state: &CopierState| match state {
        CopierState::Off => Value::Null,
        CopierState::Wanted => json!({ "state": "wanted", "why": null }),
        CopierState::On { .. } => json!({ "state": "on", "why": null }),
        CopierState::Refused(why) => json!({ "state": "refused", "why": why }),
    };
    let kind = |kind: &KindPath| {
        let (memory, way, why) = (&kind.memory, &kind.way, &kind.why);
        let copier = kind.copier.as_ref().map(copier);
        json!({ "memory": memory, "way": way, "why": why, "copier": copier })
    };
    json!({
        "rank": me.0,
        "peer": paths.rank.0,
        "device": paths.device,
        "chosen": paths.chosen(),
        "paths": paths.paths.iter().map(path).collect::<Value>(),
        "kinds": paths.kinds.iter().map(kind).collect::<Value>(),
        "trouble": paths.trouble,
    })
}
