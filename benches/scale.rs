//! The start of jobs by their size, as a table, and as a curve if a file is named:
//! `cargo xtask scale scale.svg`.
//!
//! *Simulated* ranks are connections to a real store, by the runtime's own client over TCP of this
//! machine. A process has a thousand of them, without a `Runtime`. Each publishes an address, and
//! gets its neighbour's. *Real* ranks are processes of `carrack run`, which send their neighbour a
//! message.

use carrack::bootstrap::tcp::{FromEnvironment, Invitation, JobKey};
use carrack::bootstrap::{Bootstrap, BootstrapError};
use carrack::settings::TransportChoice;
use carrack::{Rank, Runtime, Tag};
use carrack_test_support::built;
use carrack_test_support::counting::{Counting, live};
use carrack_test_support::growth::{SIZES, each, held};
use plotters::prelude::*;
use std::error::Error;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[global_allocator]
static GLOBAL: Counting = Counting;

const SIMULATED: [u32; 5] = [16, 64, 256, 1024, 4096];
const REAL: [u32; 3] = [16, 64, 256];
const CALCULATED: u32 = 100_000;

/// Simulated ranks of a process, which has six descriptors for each.
const IN_ONE: u32 = 1024;
/// Messages between a rank and the store until the rank has its neighbour's address. Two of each
/// side prove the rank; the others are the welcome, a put, a get and the answer.
const MESSAGES: u32 = 8;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Cost of a start.
struct Start {
    ranks: u32,
    /// Bytes: of the store for all, or of a rank.
    memory: f64,
    seconds: f64,
}

fn main() -> Result<()> {
    let words: Vec<_> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse().ok()).unwrap_or(0);
    match words.first().map(String::as_str) {
        Some("ranks-of") => return ranks_of(number(1), number(2), number(3)),
        Some("rank-since") => return rank_since(words[1].parse()?),
        _ => {}
    }
    // What is allocated once for the whole process is not counted.
    held(TransportChoice::Shm, SIZES[0]);
    let silent = each(&SIZES.map(|size| held(TransportChoice::Shm, size)));
    let simulated = SIMULATED.map(|ranks| simulate(ranks).expect("a job of simulated ranks"));
    let real = REAL.map(|ranks| launch(ranks).expect("a job of processes"));

    println!(
        "simulated ranks: connections of rank 0, memory of its store; the messages by the protocol"
    );
    println!("{:>8} {:>12} {:>10} {:>12} {:>12}", "ranks", "connections", "messages", "KiB", "ms");
    let row = |start: &Start| {
        let (ranks, messages) = (start.ranks, MESSAGES * start.ranks);
        let (memory, millis) = (start.memory / 1024.0, start.seconds * 1e3);
        println!("{ranks:>8} {ranks:>12} {messages:>10} {memory:>12.0} {millis:>12.1}");
    };
    simulated.iter().for_each(row);
    let [.., largest] = &simulated;
    let share = f64::from(CALCULATED) / f64::from(largest.ranks);
    let (memory, seconds) = (largest.memory * share, largest.seconds * share);
    row(&Start { ranks: CALCULATED, memory, seconds });
    println!("(the last row is calculated from the cost of a rank in the row before it)\n");

    println!("real ranks over shared memory: resident memory of one; until all have a message");
    println!("{:>8} {:>12} {:>12}", "ranks", "KiB", "ms");
    for Start { ranks, memory, seconds } in &real {
        println!("{ranks:>8} {:>12.0} {:>12.1}", memory / 1024.0, seconds * 1e3);
    }
    let peers = silent * f64::from(CALCULATED) / 1024.0;
    println!(
        "a silent peer costs {silent:.1} bytes; {CALCULATED} of them {peers:.0} KiB of a rank"
    );
    assert!(silent < 100.0, "a silent peer costs {silent} bytes");
    match words.first() {
        Some(path) => draw(path, &simulated, &real),
        None => Ok(()),
    }
}

/// Runs this program again.
fn again(words: &[String]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn invitation(rank: u32, size: u32, port: u16) -> Invitation {
    Invitation {
        rank,
        size,
        place_on_node: rank,
        hosts: vec!["127.0.0.1".into()],
        port,
        key: JobKey::of_secret(b"a secret of simulated ranks"),
        restart: 0,
        patience: Duration::from_secs(60),
    }
}

/// Starts a store for `size` ranks, and all except rank 0 in processes of their own.
fn simulate(size: u32) -> Result<Start> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let before = live();
    let zero = FromEnvironment::join(&invitation(0, size, port))?;
    let began = Instant::now();
    let start = |first: &u32| {
        let words = [*first, size, port.into()].map(|word| word.to_string());
        again(&[&["ranks-of".to_owned()], &words[..]].concat()).spawn()
    };
    let firsts: Vec<_> = (0..size.div_ceil(IN_ONE)).map(|part| part * IN_ONE).collect();
    let children = firsts.iter().map(start).collect::<std::io::Result<Vec<Child>>>()?;
    zero.put("address/0", &[0; 100])?;
    address(&zero, size - 1)?;
    // A process says so when all its ranks have their neighbours' addresses.
    let mut said = children;
    for child in &mut said {
        let mut line = [0; 1];
        std::io::Read::read_exact(child.stdout.as_mut().ok_or("no output")?, &mut line)?;
    }
    let (seconds, memory) = (began.elapsed().as_secs_f64(), (live() - before) as f64);
    for child in &mut said {
        drop(child.stdin.take());
    }
    zero.finish()?;
    for mut child in said {
        assert!(child.wait()?.success());
    }
    Ok(Start { ranks: size, memory, seconds })
}

fn address(of: &dyn Bootstrap, rank: u32) -> std::result::Result<(), BootstrapError> {
    while of.get(&format!("address/{rank}"))?.is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Joins a job as the ranks from `first` on, and stays until the standard input ends.
fn ranks_of(first: u32, size: u32, port: u32) -> Result<()> {
    let port = u16::try_from(port)?;
    let numbers = first.max(1)..size.min(first + IN_ONE);
    let join = |rank| FromEnvironment::join(&invitation(rank, size, port)).map(|it| (rank, it));
    let ranks = numbers.map(join).collect::<std::result::Result<Vec<_>, _>>()?;
    for (rank, joined) in &ranks {
        joined.put(&format!("address/{rank}"), &[0; 100])?;
        let _ = joined.get(&format!("address/{}", rank - 1))?;
    }
    for (rank, joined) in &ranks {
        address(joined, rank - 1)?;
    }
    println!();
    let _ = std::io::stdin().read_line(&mut String::new())?;
    for (_, joined) in &ranks {
        joined.finish()?;
    }
    Ok(())
}

/// Starts `size` processes, each of which sends and receives a message.
fn launch(size: u32) -> Result<Start> {
    // Cargo may have to build it first, which is no part of the start.
    let mut job = Command::new(built::carrack());
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
    job.args(["run", "--no-tag", "-n", &size.to_string(), "--"]).arg(std::env::current_exe()?);
    let output = job.args(["rank-since", &now.to_string()]).output()?;
    let said = String::from_utf8(output.stdout)?;
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let pairs: Vec<(f64, f64)> = said
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(time, memory)| Some((time.parse().ok()?, memory.parse().ok()?)))
        .collect();
    assert_eq!(pairs.len(), size as usize, "{said}");
    let seconds = pairs.iter().map(|pair| pair.0).fold(0.0, f64::max);
    let memory = pairs.iter().map(|pair| pair.1).sum::<f64>() / f64::from(size);
    Ok(Start { ranks: size, memory, seconds })
}

/// Starts a real rank of a job that began at that time. Prints the seconds until its first messages
/// have come and gone, and its resident bytes.
fn rank_since(micros: u64) -> Result<()> {
    let runtime = Runtime::start()?;
    let (rank, size) = (runtime.rank().0, runtime.size());
    let to = Rank((rank + 1) % size);
    runtime.post_send(to, vec![1; 8], Tag(1)).submit()?;
    let from = Rank((rank + size - 1) % size);
    let _ = runtime.post_recv(from, vec![0; 8], Tag(1)).wait()?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_micros(micros))?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse()?;
    println!("{} {}", since.as_secs_f64(), resident << 10);
    Ok(runtime.barrier()?)
}

/// Draws the time to the first message.
fn draw(path: &str, simulated: &[Start], real: &[Start]) -> Result<()> {
    let area = SVGBackend::new(path, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let (least, most) = (f64::from(SIMULATED[0]), f64::from(CALCULATED));
    let mut chart = ChartBuilder::on(&area)
        .caption("Start of a job", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d((least..most).log_scale(), (1.0..100_000.0).log_scale())?;
    chart.configure_mesh().x_desc("ranks").y_desc("ms to the first message").draw()?;
    for (colour, name, starts) in
        [(BLUE, "simulated: to the neighbour's address", simulated), (RED, "processes", real)]
    {
        let points = starts.iter().map(|start| (f64::from(start.ranks), start.seconds * 1e3));
        let series = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
        chart
            .draw_series(series)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour));
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
    Ok(area.present()?)
}
