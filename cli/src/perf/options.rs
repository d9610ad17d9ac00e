//! The command line of `perf`.

use super::benchmark::{BENCHMARKS, Benchmark};
use super::osu::OsuTest;
use super::seat::Pace;
use super::sides::Sides;
use crate::args;
use crate::launch::Bind;
use carrack::Runtime;
use carrack::bootstrap::MAX_RANKS;
use carrack::settings::{Settings, TransportChoice, parse_size};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// The most threads a rank may have: each takes a device of its own, and their rings take memory.
const MAX_THREADS: usize = 256;
/// The most pieces of a batch.
const MAX_PIECES: usize = 1 << 20;

/// The options of `carrack perf`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Without a launcher, perf starts two ranks of its own on this machine. Under `carrack run -n 2` it
uses those. The first line says whether threads poll, or sleep when idle. Before each point a random
payload goes wherever those go that are measured, and is compared to the last byte. The messages
that are measured are all sent from one buffer and received into one, as in ucx_perftest and the OSU
benchmarks, so that both are in the caches where they fit; only receives of up to 256 B have a
buffer each.

latency    ping-pong; one way is half of the round trip. Percentiles are of all round trips.
bandwidth  windows of messages (512 of up to 1 KiB, 64 of up to 64 KiB, 4 MiB of longer ones),
           each acknowledged, up to 4 in flight; timed until the last is acknowledged. Each but
           the last of a window says that more follows (`more`).
rate       the same, for small messages (8 B unless --size is given).

A put of a ping-pong notifies its receiver; in a stream the last one of each window does. A put_seen
does not: its receiver looks at the last byte until it is there, as ib_write_lat and
ucp_put_lat do; it has a latency only, and host memory. A put_batch is one put of --pieces pieces
of --size bytes each (64 if not given), from rank 0 to rank 1; it has a latency only: that of the
whole batch, until it is complete. A get, a put_done, a fetch_add (of 8 bytes, whatever --size
says), a barrier and a copy are no ping-pongs: their latency is the whole time to completion.
A put_done is a put without a notification that is waited for, as osu_put_latency does with a flush;
it has a latency only. Gets and additions go from rank 0 to memory of rank 1. A barrier is of all
ranks, of which there may be more than two then, with one thread each; rank 0 measures it. A copy
stays within rank 0, which sees both devices then: it goes from memory of rank 0's kind to memory
of rank 1's, by the target's GPU, else the source's, else the CPU.

With two kinds of memory a stream goes from the first to the second, gets fill the first from the
second, and a ping-pong goes both ways. What a GPU carries out is complete when its engine says
so; the clock of a stream of puts stops when all of them are. Active messages that fit into a
packet do not land in pinned memory, but in ordinary memory.

With --json each point is an object on a line of its own:
  op            \"am\", \"send\", \"put\", \"put_seen\", \"put_done\", \"put_batch\", \"get\",
                \"fetch_add\", \"barrier\" or \"copy\"
  test          \"latency\", \"bandwidth\" or \"rate\"
  size          bytes of a message, or of a piece
  pieces        pieces of a put_batch; 1 for all others
  ranks         how many there are
  threads       threads of each rank
  device        \"own\" if each thread has one, \"shared\" if all of a rank share one
  transport     the path of messages: \"shm\", \"tcp\", \"verbs\", \"loopback\" (two ranks on two
                threads of one process) or another by its name; \"none\" for a copy
  mem           memory of rank 0: \"host\", \"pinned\" or \"device:N\", and \" (simulated)\" where
                its GPU is
  peer_mem      the same of rank 1
  messages      messages, operations or barriers that were measured (round trips for the latency
                of a ping-pong)
  latency_us    {min, mean, p50, p90, p99, p999, p9999, max}, in microseconds, one way or as said
                above; null except for latency
  bandwidth_gbps  10^9 bytes a second; null for latency
  rate_mps      10^6 messages a second, of all threads; null for latency")]
pub(crate) struct PerfOptions {
    /// Tests to run.
    #[arg(value_enum, default_value_t = Wanted::All)]
    pub(super) test: Wanted,

    /// Operations, separated by commas.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "am,send",
        value_name = "OP,..."
    )]
    pub(super) op: Vec<Op>,

    /// Bytes of a message, such as 8,4K: 8,64,512,4K,8K,64K,1M if not given, and 8 for rate.
    #[arg(long, value_delimiter = ',', value_parser = size, value_name = "SIZE,...")]
    pub(super) size: Vec<usize>,

    /// Pieces of a put_batch.
    #[arg(long, value_parser = pieces, default_value = "1000", value_name = "N")]
    pub(super) pieces: usize,

    /// Ranks to start when there is no launcher: 2 if not given. More are for --op barrier alone.
    #[arg(long, value_parser = ranks, value_name = "N")]
    pub(super) ranks: Option<u32>,

    /// Threads of each rank.
    #[arg(long, value_delimiter = ',', value_parser = threads)]
    #[arg(default_value = "1", value_name = "N,...")]
    pub(super) threads: Vec<usize>,

    /// Let all threads of a rank use its default device, instead of one of their own each.
    #[arg(long)]
    pub(super) share_device: bool,

    /// Memory of the operations: host, pinned (locked for GPUs), device:N (the GPU of this
    /// number) or device (the first). Two kinds are rank 0's, which measures, and rank 1's.
    #[arg(long, value_parser = Sides::parse, default_value = "host", value_name = "KIND[,KIND]")]
    pub(super) mem: Sides,

    /// The transport; that of CARRACK_TRANSPORT, or shm, if not given. loopback measures two ranks
    /// on two threads of one process.
    #[arg(long, value_parser = transport, value_name = "NAME")]
    pub(super) transport: Option<TransportChoice>,

    /// Duration of each point.
    #[arg(
        long,
        value_parser = args::of_measurement,
        default_value = "0.5",
        value_name = "SECONDS",
        allow_negative_numbers = true
    )]
    pub(super) seconds: Duration,

    /// core pins each thread to a core of its own where there are enough, so that figures are
    /// stable; none leaves placement to the kernel.
    #[arg(long, value_enum, default_value_t = Bind::Core)]
    #[arg(value_name = "core|none", hide_possible_values = true)]
    pub(super) bind: Bind,

    /// Way in which threads wait: poll, or sleep when idle [default: poll where each can have a
    /// core]
    #[arg(long, value_enum, value_name = "poll|sleep", hide_possible_values = true)]
    pub(super) wait: Option<Pace>,

    /// Print a line of JSON for each point.
    #[arg(long)]
    pub(super) json: bool,

    /// Not of this command line: figures are printed as the OSU benchmarks print them.
    #[arg(skip)]
    pub(super) like_osu: Option<OsuTest>,

    /// Draw latency and bandwidth over message size into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,

    /// Draw the latencies' percentiles, to 99.99 % and the longest, into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot_percentiles: Option<PathBuf>,
}

/// A choice of tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(super) enum Wanted {
    /// Time of one message, one way.
    Latency,
    /// Bytes a second.
    Bandwidth,
    /// Messages a second.
    Rate,
    /// All of them.
    All,
}

/// An operation. The table of benchmarks has a row for each, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Op {
    /// Active messages
    Am,
    /// Messages that are matched by receives
    Send,
    /// Puts into memory that the peer has mapped
    Put,
    /// Puts without a notification, whose receiver looks at its memory until they are there
    PutSeen,
    /// Puts without a notification, of which each is waited for before the next
    PutDone,
    /// Puts of many pieces at once
    PutBatch,
    /// Gets from memory of the peer
    Get,
    /// Additions to a word of the peer's memory
    FetchAdd,
    /// Barriers of all ranks
    Barrier,
    /// Copies within rank 0, from its memory to memory of rank 1's kind: what puts are compared
    /// with
    Copy,
}

impl Op {
    /// Returns the row of the table.
    pub(super) fn benchmark(self) -> &'static Benchmark {
        &BENCHMARKS[self as usize]
    }

    /// Returns the name on the command line.
    pub(super) fn name(self) -> &'static str {
        self.benchmark().name
    }
}

pub(super) fn size(text: &str) -> Result<usize, String> {
    parse_size(text).map_err(|error| error.to_string())
}

fn pieces(text: &str) -> Result<usize, String> {
    let what = format!("a batch that is measured has 1 to {MAX_PIECES} pieces");
    args::number(text, 1..=MAX_PIECES, &what)
}

fn ranks(text: &str) -> Result<u32, String> {
    args::number(text, 2..=MAX_RANKS, &format!("a job that is measured has 2 to {MAX_RANKS} ranks"))
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    args::number(text, 1..=MAX_THREADS, &format!("a rank has 1 to {MAX_THREADS} threads"))
}

/// Parses a transport as its variable is parsed, so that a transport which is added to the settings
/// is known here, too.
pub(super) fn transport(text: &str) -> Result<TransportChoice, String> {
    let settings = Settings::from_vars([("CARRACK_TRANSPORT", text)]);
    match settings.as_ref().map(Settings::transports) {
        Ok([one]) => Ok(*one),
        Err(_) => {
            let all = Runtime::all_transports(&Settings::defaults());
            let names: Vec<_> = all.iter().map(|transport| transport.name()).collect();
            Err(format!("name one of {}", names.join(", ")))
        }
        Ok(_) => {
            Err("name one transport: a figure of several would be of whichever was chosen".into())
        }
    }
}
