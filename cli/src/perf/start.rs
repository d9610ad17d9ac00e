//! The start of the two ranks, and the output of their results.

use super::error::PerfError;
use super::measure::joined;
use super::memory::Memories;
use super::options::PerfOptions;
use super::plan::{Plan, Point};
use super::record::size_in_words;
use super::session::Session;
use super::{osu, plot, record};
use crate::own_ranks::{is_rank, run_ranks};
use crate::{USAGE, bar, is_closed_pipe, own_ranks};
use carrack::settings::{Origin, Settings, TransportChoice};
use carrack::{Rank, Runtime};
use carrack_transports::stderr::say;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::thread;

/// The variable by which ranks are told the transport.
const TRANSPORT: &str = "CARRACK_TRANSPORT";

/// Measures as the command line says.
pub(crate) fn perf(options: &PerfOptions) -> ExitCode {
    match run(options) {
        Ok(status) => status,
        Err(error) => tell(&error),
    }
}

/// Says what went wrong, and gives the exit status. Every rank speaks for itself: the launcher ends
/// the others as soon as one has failed, so that none could leave it to another.
fn tell(error: &PerfError) -> ExitCode {
    match (error, own_ranks::rank()) {
        (PerfError::Output(error), _) if is_closed_pipe(error) => return ExitCode::SUCCESS,
        (error, Some(rank)) => say(format_args!("rank {rank}: {error}")),
        (error, None) => say(error),
    }
    if error.is_usage() { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
}

fn run(options: &PerfOptions) -> Result<ExitCode, PerfError> {
    let settings = settings(options, Settings::from_env()?)?;
    let plan = Plan::new(options);
    plan.suits_memory()?;
    plan.has_room()?;
    let ranks = options.ranks.unwrap_or(2);
    let is_rank = is_rank(&settings)?;
    if !is_rank {
        plan.fits(ranks)?;
    }
    for path in [&options.plot, &options.plot_percentiles].into_iter().flatten() {
        plot::check(path)?;
    }
    match (settings.transports(), is_rank) {
        ([TransportChoice::Loopback], true) => return Err(PerfError::LoopbackBetweenProcesses),
        ([TransportChoice::Loopback], false) => in_this_process(options, &settings, plan, ranks)?,
        (_, true) => {
            let runtime = Runtime::builder().settings(settings).start()?;
            if let Some(asked) = options.ranks.filter(|&asked| asked != runtime.size()) {
                return Err(PerfError::RanksOfLauncher { asked, started: runtime.size() });
            }
            let memories = Memories::choose(&plan, runtime.rank(), &runtime)?;
            rank(runtime, plan, memories, options)?;
        }
        (transports, false) => {
            if !plan.sides.are_host() {
                // Looked for before two ranks say that there is none.
                for alone in Runtime::in_process_with(1, &settings)? {
                    Memories::choose(&plan, Rank(0), &alone)?;
                    Memories::choose(&plan, Rank(1), &alone)?;
                }
            }
            let words: Vec<_> = transports.iter().map(ToString::to_string).collect();
            let status = run_ranks(ranks, vec![(TRANSPORT.into(), words.join(",").into())])?;
            return Ok(ExitCode::from(status));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the settings, with the transport of the command line. When neither it nor the
/// environment names one, ranks of a launcher choose among all, and others take shared memory.
fn settings(options: &PerfOptions, settings: Settings) -> Result<Settings, PerfError> {
    let is_default = settings
        .describe()
        .iter()
        .any(|line| line.variable == TRANSPORT && line.origin == Origin::Default);
    let usual = (is_default && !is_rank(&settings)?).then_some(TransportChoice::Shm);
    Ok(match options.transport.or(usual) {
        Some(transport) => Settings::builder().transports([transport]).build()?,
        None => settings,
    })
}

/// Runs each rank on a thread of this process.
fn in_this_process(
    options: &PerfOptions,
    settings: &Settings,
    plan: Plan,
    ranks: u32,
) -> Result<(), PerfError> {
    let mut runtimes = Runtime::in_process_with(ranks, settings)?.into_iter();
    let zero = runtimes.next().ok_or(PerfError::Ranks(0))?;
    // Of one driver for all: each runtime has simulated GPUs of its own, which know nothing of the
    // others'.
    let own = Memories::choose(&plan, Rank(0), &zero)?;
    let others = Memories::choose(&plan, Rank(1), &zero)?;
    thread::scope(|scope| {
        let mut followers = Vec::new();
        for runtime in runtimes {
            let (plan, memories) = (plan.clone(), others.clone());
            let thread = thread::Builder::new().name(runtime.rank().to_string());
            let spawned = thread.spawn_scoped(scope, || rank(runtime, plan, memories, options));
            followers.push(spawned.map_err(PerfError::system("starting a thread"))?);
        }
        joined(rank(zero, plan, own, options), followers).map(drop)
    })
}

/// Runs one rank: rank 0 leads, and any other follows.
fn rank(
    runtime: Runtime,
    plan: Plan,
    memories: Memories,
    options: &PerfOptions,
) -> Result<(), PerfError> {
    let me = runtime.rank();
    let mut session = Session::open(runtime, plan, memories)?;
    if me == Rank(0) { lead(&mut session, options) } else { session.follow() }
}

fn lead(session: &mut Session, options: &PerfOptions) -> Result<(), PerfError> {
    let mut out = io::stdout();
    let bar = bar::new(session.plan().points.len(), "[{bar:24}] {pos}/{len} {msg}");
    let mut records = Vec::new();
    let (osu, sides, about) = (options.like_osu, session.plan().sides, session.describe());
    let mut heading = match osu {
        Some(test) => Some(format!("# {about}\n{}", osu::heading(test, sides))),
        None => (!options.json).then(|| format!("# {about}\n{}", record::heading())),
    };
    session.lead(
        |Point { op, test, size, threads, .. }| {
            let (op, test, size) = (op.name(), test.name(), size_in_words(size));
            bar.set_message(format!("{op} {test} {size}, {threads} thread(s)"));
            bar.tick();
        },
        |record| {
            records.push(record.clone());
            let line = match (osu, options.json) {
                (Some(test), _) => osu::row(test, record),
                (None, true) => serde_json::to_string(record).map_err(io::Error::from)?,
                (None, false) => record::row(record),
            };
            bar.suspend(|| {
                for line in heading.take().into_iter().chain([line]) {
                    writeln!(out, "{line}")?;
                }
                out.flush()
            })?;
            bar.inc(1);
            Ok(())
        },
    )?;
    bar.finish_and_clear();
    if let Some(path) = &options.plot {
        plot::draw(path, &records)?;
    }
    match &options.plot_percentiles {
        Some(path) => plot::percentiles::draw(path, &records),
        None => Ok(()),
    }
}
