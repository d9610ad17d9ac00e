//! `carrack put_get_bench`: the figures of `carrack perf`, asked for and printed as the OSU
//! benchmarks are, so that they can be compared with theirs.
//!
//! The format is that of OSU Micro-Benchmarks 5 to 7. Two lines of comment name test and memory,
//! and one names the columns. Each size has a row: the size in ten columns, figures in eighteen
//! each, with two decimals. Latencies are means in microseconds, as theirs; a MB is 10^6 bytes.

use super::benchmark::Reach;
use super::options::{self, Op, PerfOptions, Wanted};
use super::record::Record;
use super::sides::{Kind, Sides};
use super::start;
use crate::launch::{Bind, tie};
use crate::own_ranks;
use crate::{USAGE, is_closed_pipe};
use crate::{args, gpus};
use carrack::Runtime;
use carrack::settings::{TransportChoice, parse_size};
use carrack_transports::stderr::say;
use children::Running;
use clap::Args;
use clap::builder::PossibleValuesParser;
use std::io::{self, Write as _};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Sizes when none are given, as in the OSU benchmarks: powers of two to 4 MiB.
const SIZES: Range = Range { min: 1, max: 4 << 20 };

/// The options of `carrack put_get_bench`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
latency      ping-pong with sends and receives; half of a round trip (osu_latency)
bw           sends in windows, one way (osu_bw)
mbw_mr       the same of --pairs pairs of threads, with messages a second (osu_mbw_mr)
put_latency  a put without a notification, until its bytes are visible there (osu_put_latency)
put_bw       puts in windows, one way (osu_put_bw)
get_latency  a get, until its bytes are here (osu_get_latency)
get_bw       gets in windows (osu_get_bw)
am_latency   ping-pong with active messages
all          each of them

Memory is H (host), P (host memory that is locked for GPUs), D or D0 (the first GPU), D1 (the
second), and so on; the first is that of rank 0, the second that of rank 1. D D takes a GPU for
each rank where there are two, as the OSU benchmarks do. `all` in their place measures every pair
of kinds: what cannot be measured here is said, the others go on, and the status is not 0.
Latencies are means; a MB is 10^6 bytes. What else is measured, and how, `carrack perf --help`
says.

Examples:
  carrack put_get_bench latency                two ranks on this machine, host memory
  carrack put_get_bench put_bw D D -m 8:64M    from GPU to GPU
  carrack run -n 2 --no-tag -- carrack put_get_bench get_latency H D")]
pub(crate) struct OsuOptions {
    /// Benchmark to run.
    #[arg(value_parser = words())]
    test: String,

    /// Memory of rank 0 and of rank 1; or `all`, for every pair of kinds.
    #[arg(num_args = 0..=2, value_parser = place, value_name = "MEMORY")]
    memory: Vec<Place>,

    /// Sizes from MIN bytes on, doubled up to MAX; 1:4M if not given.
    #[arg(short = 'm', long = "message-size", value_name = "[MIN:]MAX")]
    #[arg(value_parser = Range::parse)]
    sizes: Option<Range>,

    /// Pairs of threads of mbw_mr.
    #[arg(short = 'p', long, default_value = "1", value_name = "N")]
    #[arg(value_parser = options::threads)]
    pairs: usize,

    /// Duration of each size.
    #[arg(
        long,
        value_parser = args::of_measurement,
        default_value = "0.1",
        value_name = "SECONDS",
        allow_negative_numbers = true
    )]
    seconds: Duration,

    /// The transport; that of CARRACK_TRANSPORT, or shm, if not given.
    #[arg(long, value_parser = options::transport, value_name = "NAME")]
    transport: Option<TransportChoice>,
}

/// A test of the OSU benchmarks': its word on the command line, its name there, and what makes it
/// up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OsuTest {
    word: &'static str,
    title: &'static str,
    op: Op,
    test: Wanted,
    /// `true` if the table has a column of messages per second.
    has_rate: bool,
}

const fn of(word: &'static str, title: &'static str, op: Op, test: Wanted) -> OsuTest {
    OsuTest { word, title, op, test, has_rate: false }
}

static TESTS: [OsuTest; 8] = [
    of("latency", "Latency", Op::Send, Wanted::Latency),
    of("bw", "Bandwidth", Op::Send, Wanted::Bandwidth),
    OsuTest {
        has_rate: true,
        ..of("mbw_mr", "Multiple Bandwidth / Message Rate", Op::Send, Wanted::Bandwidth)
    },
    of("put_latency", "Put Latency", Op::PutDone, Wanted::Latency),
    of("put_bw", "Put Bandwidth", Op::Put, Wanted::Bandwidth),
    of("get_latency", "Get Latency", Op::Get, Wanted::Latency),
    of("get_bw", "Get Bandwidth", Op::Get, Wanted::Bandwidth),
    of("am_latency", "Active Message Latency", Op::Am, Wanted::Latency),
];

/// Returns a parser of the words for the tests, and of the one for all of them.
fn words() -> PossibleValuesParser {
    TESTS.iter().map(|test| test.word).chain(["all"]).into()
}

fn tests(word: &str) -> &'static [OsuTest] {
    TESTS.iter().position(|test| test.word == word).map_or(&TESTS, |at| &TESTS[at..=at])
}

/// Memory, as the OSU benchmarks name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Kind(Kind),
    /// A GPU, whichever.
    Device,
    /// Every pair of kinds.
    All,
}

fn place(text: &str) -> Result<Place, String> {
    let known = "memory is H, P, D, D0, D1, ..., or `all` for every pair of kinds";
    match (text, text.strip_prefix('D')) {
        ("H", _) => Ok(Place::Kind(Kind::Host)),
        ("P", _) => Ok(Place::Kind(Kind::Pinned)),
        ("D", _) => Ok(Place::Device),
        ("all", _) => Ok(Place::All),
        ("M" | "MD" | "MH", _) => {
            Err("managed memory is not sent, as the driver moves it: name H, P or D".into())
        }
        (_, Some(number)) => match number.parse() {
            Ok(number) => Ok(Place::Kind(Kind::Device(number))),
            Err(_) => Err(format!("{number:?} is no number of a device: {known}")),
        },
        _ => Err(known.into()),
    }
}

/// Sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    min: usize,
    max: usize,
}

impl Range {
    fn parse(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or(("1", text));
        let bytes = |text: &str| parse_size(text).map_err(|error| error.to_string());
        let range = Self { min: bytes(min)?, max: bytes(max)? };
        match range {
            Self { min: 0, .. } => Err("the smallest size is 1 byte or more".into()),
            Self { min, max } if min > max => {
                Err("the smallest size comes first, as in 8:1M".into())
            }
            range => Ok(range),
        }
    }

    /// Returns the sizes: doubled from the smallest on, as in the OSU benchmarks.
    fn sizes(self) -> Vec<usize> {
        let doubled = |size: &usize| size.checked_mul(2).filter(|next| *next <= self.max);
        std::iter::successors(Some(self.min), doubled).collect()
    }
}

/// Measures as the command line says.
pub(crate) fn put_get_bench(options: &OsuOptions) -> ExitCode {
    let sides = match pairs(&options.memory) {
        Ok(sides) => sides,
        Err(why) => {
            say(why);
            return ExitCode::from(USAGE);
        }
    };
    match (&sides[..], tests(&options.test)) {
        ([sides], [test]) => start::perf(&as_perf(options, *test, *sides)),
        _ if own_ranks::rank().is_some() => {
            say("`all` starts jobs of its own: leave the launcher out, or name one test and one \
                pair of memory");
            ExitCode::from(USAGE)
        }
        (pairs, tests) => each(options, pairs, tests),
    }
}

/// Returns the memory of both ranks: one pair, or every pair of kinds that this machine has.
fn pairs(memory: &[Place]) -> Result<Vec<Sides>, String> {
    let kind = |place: Place, device: fn() -> Kind| match place {
        Place::Kind(kind) => Ok(kind),
        Place::Device => Ok(device()),
        Place::All => Err("`all` stands alone, in the place of both kinds of memory".to_owned()),
    };
    match *memory {
        [] => Ok(vec![Sides { first: Kind::Host, others: Kind::Host }]),
        [Place::All] => Ok(every_pair(count_devices())),
        [first, others] => Ok(vec![Sides {
            first: kind(first, || Kind::Device(0))?,
            others: kind(others, || Kind::Device(far(count_devices())))?,
        }]),
        _ => {
            Err("give the memory of both ranks, such as D D or H D; or none, for host memory"
                .into())
        }
    }
}

fn every_pair(devices: usize) -> Vec<Sides> {
    let kinds = |device| match devices {
        0 => vec![Kind::Host],
        _ => vec![Kind::Host, Kind::Pinned, Kind::Device(device)],
    };
    let with_each =
        |first| kinds(far(devices)).into_iter().map(move |others| Sides { first, others });
    kinds(0).into_iter().flat_map(with_each).collect()
}

/// Returns the number of rank 1's GPU: the second, where there are two.
fn far(devices: usize) -> usize {
    usize::from(devices > 1)
}

/// Counts the GPUs that this process sees. Where there are none, or no runtime starts, perf says
/// why.
fn count_devices() -> usize {
    Runtime::in_process(1).iter().flatten().map(|alone| gpus::of(alone).len()).sum()
}

/// Runs each test for each pair, as a job of its own. A job says what cannot be measured on this
/// machine, and the others go on. The status is then that of the last job that failed.
fn each(options: &OsuOptions, pairs: &[Sides], tests: &[OsuTest]) -> ExitCode {
    let mut failed = None;
    for (sides, test) in pairs.iter().flat_map(|sides| tests.iter().map(move |test| (sides, test)))
    {
        let mut command = Command::new("/proc/self/exe");
        let (pairs, seconds) = (options.pairs, options.seconds.as_secs_f64());
        command.args(["put_get_bench", test.word]);
        command.args([sides.first, sides.others].map(letters));
        command.args([format!("--pairs={pairs}"), format!("--seconds={seconds}")]);
        command.args(options.sizes.map(|Range { min, max }| format!("-m={min}:{max}")));
        command.args(options.transport.map(|transport| format!("--transport={transport}")));
        tie(&mut command);
        match Running::start(&mut command).and_then(Running::status) {
            // An empty line between two tables. Its write fails once no program reads them.
            Ok(status) if status.success() => match io::stdout().write_all(b"\n") {
                Ok(()) => {}
                Err(error) if is_closed_pipe(&error) => break,
                Err(error) => {
                    say(format_args!(
                        "writing to stdout failed: {error}; check the file or pipe that it goes to"
                    ));
                    return ExitCode::FAILURE;
                }
            },
            Ok(status) => {
                failed = Some(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
            }
            Err(error) => {
                say(error);
                failed = Some(1);
            }
        }
    }
    failed.map_or(ExitCode::SUCCESS, ExitCode::from)
}

/// Returns the letters by which this command names a kind.
fn letters(kind: Kind) -> String {
    match kind {
        Kind::Host => "H".into(),
        Kind::Pinned => "P".into(),
        Kind::Device(number) => format!("D{number}"),
    }
}

/// Returns the options of `carrack perf` for one test.
fn as_perf(options: &OsuOptions, osu: OsuTest, sides: Sides) -> PerfOptions {
    PerfOptions {
        pieces: 1,
        test: osu.test,
        op: vec![osu.op],
        size: options.sizes.unwrap_or(SIZES).sizes(),
        ranks: None,
        threads: vec![if osu.has_rate { options.pairs } else { 1 }],
        share_device: false,
        mem: sides,
        transport: options.transport,
        seconds: options.seconds,
        bind: Bind::Core,
        wait: None,
        json: false,
        like_osu: Some(osu),
        plot: None,
        plot_percentiles: None,
    }
}

/// Returns the lines above the rows.
pub(super) fn heading(osu: OsuTest, sides: Sides) -> String {
    let OsuTest { title, .. } = osu;
    let place = |kind| match kind {
        Kind::Host => "HOST (H)".to_owned(),
        Kind::Pinned => "PINNED HOST (P)".to_owned(),
        Kind::Device(_) => "DEVICE (D)".to_owned(),
    };
    let (first, others) = (place(sides.first), place(sides.others));
    let columns = match osu.test {
        Wanted::Latency => format!("{:<10}{:>18}", "# Size", "Latency (us)"),
        _ if osu.has_rate => format!("{:<10}{:>18}{:>18}", "# Size", "MB/s", "Messages/s"),
        _ => format!("{:<10}{:>18}", "# Size", "Bandwidth (MB/s)"),
    };
    let version = env!("CARGO_PKG_VERSION");
    // As theirs have it: of one-sided tests it is not said which way the bytes go.
    let memory = match osu.op.benchmark().reach {
        Reach::Messages => format!("# Send Buffer on {first} and Receive Buffer on {others}"),
        _ => format!("# Rank 0 Memory on {first} and Rank 1 Memory on {others}"),
    };
    format!(
        "# Carrack {title} Test v{version}, in the format of the OSU \
        Micro-Benchmarks\n{memory}\n{columns}"
    )
}

/// Returns the row of a result.
pub(super) fn row(osu: OsuTest, record: &Record) -> String {
    let size = record.size;
    let latency = record.latency_us.map(|us| us.mean);
    let bandwidth = record.bandwidth_gbps.map(|gbps| gbps * 1e3);
    let figure = latency.or(bandwidth).unwrap_or(f64::NAN);
    match record.rate_mps.filter(|_| osu.has_rate) {
        Some(rate) => format!("{size:<10}{figure:>18.2}{:>18.2}", rate * 1e6),
        None => format!("{size:<10}{figure:>18.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_from_the_smallest_and_stop_at_the_largest() {
        let sizes = |text| Range::parse(text).map(Range::sizes);
        assert_eq!(sizes("8"), Ok(vec![1, 2, 4, 8]));
        assert_eq!(sizes("3:20"), Ok(vec![3, 6, 12]));
        assert_eq!(sizes("4K:4K"), Ok(vec![4096]));
        assert_eq!(SIZES.sizes().len(), 23);
        for wrong in ["", "0:8", "8:4", "1:x", ":", "-1:8", "1:2:3"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_is_named_by_letters_and_comes_in_pairs() {
        let all = |words: &[&str]| {
            words
                .iter()
                .map(|word| place(word))
                .collect::<Result<Vec<_>, _>>()
                .and_then(|all| pairs(&all))
        };
        let pair = |first, others| Ok(vec![Sides { first, others }]);
        assert_eq!(all(&[]), pair(Kind::Host, Kind::Host));
        assert_eq!(all(&["H", "D3"]), pair(Kind::Host, Kind::Device(3)));
        assert_eq!(all(&["P", "H"]), pair(Kind::Pinned, Kind::Host));
        assert_eq!([0, 1, 2].map(|devices| every_pair(devices).len()), [1, 9, 9]);
        assert_eq!(every_pair(2)[8], Sides { first: Kind::Device(0), others: Kind::Device(1) });
        for wrong in
            [&["H"][..], &["M", "M"], &["D-1", "H"], &["h", "H"], &["all", "H"], &["Dx", "D"]]
        {
            assert!(all(wrong).is_err(), "{wrong:?}");
        }
    }
}
