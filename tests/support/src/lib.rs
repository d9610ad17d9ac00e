//! Tools that the suites share: ranks in one process, a watchdog, random bytes, buffers with
//! guards, and one interface to all kinds of completion objects.

#![allow(missing_docs, reason = "helpers of tests, which names describe")]

pub mod alone;
pub mod built;
pub mod children;
pub mod copiers;
pub mod counting;
pub mod explained;
pub mod folder;
pub mod gpu_ranks;
pub mod gpus;
pub mod growth;
pub mod guard;
pub mod guests;
pub mod hooked;
pub mod kernel;
pub mod keys;
pub mod liar;
pub mod mock;
pub mod nics;
pub mod nodes;
pub mod pairwise;
pub mod possessions;
pub mod ranks;
pub mod relay;
pub mod sink;
pub mod traffic;
pub mod words;

use carrack::bootstrap::InProcess;
use carrack::settings::{GpuChoice, Settings, SettingsBuilder, TransportChoice};
use carrack::{Outcome, PostError, ProgressError, Rank, Runtime, Status};
use carrack_simulators::nic::go_round;
use rand::{RngCore, SeedableRng, rngs::SmallRng};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Time limit of a test. Most take less than a second; on a small busy machine some have taken
/// minutes.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Returns the longest time of a wait that does not hang. `TEST_PATIENCE` multiplies it, for slow
/// machines.
pub fn patience(limit: Duration) -> Duration {
    let times = std::env::var("TEST_PATIENCE").ok().and_then(|text| text.parse().ok());
    limit * times.unwrap_or(1)
}

/// Ends the process, loudly, when a test hangs.
pub struct Watchdog(#[allow(dead_code, reason = "dropped to call the dog off")] Sender<()>);

impl Watchdog {
    /// Watches a test that takes no longer than others.
    pub fn over(what: &str) -> Self {
        Self::patient(what, patience(LIMIT))
    }

    /// Watches a test that takes longer than others.
    pub fn patient(what: &str, limit: Duration) -> Self {
        let (calm, alarm) = channel::<()>();
        let what = what.to_string();
        std::thread::spawn(move || {
            if alarm.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                // Not by a macro, whose words libtest would keep for a test that never ends.
                let _ = writeln!(std::io::stderr(), "the test {what} has hung for {limit:?}");
                std::process::abort();
            }
        });
        Self(calm)
    }
}

/// Environment of a suite: the differences between transports.
pub trait Job: 'static {
    const NAME: &'static str;
    const TRANSPORT: TransportChoice;
    const PATH: &'static str;
    /// `true` if a sender can get `Retry(Lock)`.
    const TRIES_LOCKS: bool;
    /// `true` if a NIC, real or simulated, carries the messages.
    const IS_RDMA: bool = false;
    /// `true` if ranks map each other's memory.
    const MAPS: bool = !Self::IS_RDMA;
    /// `true` if a message takes a while, so that its receiver may have to poll several times.
    const TAKES_TIME: bool = Self::IS_RDMA;
    /// `true` if devices have resident copiers.
    const HAS_COPIERS: bool = false;

    /// Returns settings with this transport alone, independent of the environment.
    fn settings() -> SettingsBuilder {
        Settings::builder().transports(vec![Self::TRANSPORT]).gpu(GpuChoice::None)
    }

    /// Starts a job of `size` ranks in this process.
    fn ranks(size: u32) -> Vec<Runtime> {
        Self::ranks_with(size, Self::settings())
    }

    fn ranks_with(size: u32, settings: SettingsBuilder) -> Vec<Runtime> {
        Runtime::in_process_with(size, &built(settings)).expect("a job in this process")
    }

    /// Starts two ranks whose links are up in both directions.
    fn pair() -> [Runtime; 2] {
        Self::pair_with(Self::settings())
    }

    fn pair_with(settings: SettingsBuilder) -> [Runtime; 2] {
        let ranks: [Runtime; 2] = Self::ranks_with(2, settings).try_into().unwrap();
        connect(&ranks);
        ranks
    }
}

pub struct OverLoopback;

impl Job for OverLoopback {
    const NAME: &'static str = "loopback";
    const TRANSPORT: TransportChoice = TransportChoice::Loopback;
    const PATH: &'static str = carrack_transports::loopback::NAME;
    const TRIES_LOCKS: bool = false;
}

pub struct OverShm;

impl Job for OverShm {
    const NAME: &'static str = "shm";
    const TRANSPORT: TransportChoice = TransportChoice::Shm;
    const PATH: &'static str = carrack_transports::shm::NAME;
    const TRIES_LOCKS: bool = true;
}

pub struct OverTcp;

impl Job for OverTcp {
    const NAME: &'static str = "tcp";
    const TRANSPORT: TransportChoice = TransportChoice::Tcp;
    const PATH: &'static str = carrack_transports::tcp::NAME;
    const TRIES_LOCKS: bool = true;
    const MAPS: bool = false;
    const TAKES_TIME: bool = true;
}

/// Over shared memory, with devices whose small copies go to a resident kernel.
pub struct WithCopiers;

impl Job for WithCopiers {
    const NAME: &'static str = "shm, with copiers";
    const TRANSPORT: TransportChoice = OverShm::TRANSPORT;
    const PATH: &'static str = OverShm::PATH;
    const TRIES_LOCKS: bool = OverShm::TRIES_LOCKS;
    const HAS_COPIERS: bool = true;

    fn settings() -> SettingsBuilder {
        OverShm::settings().gpu_copier(true)
    }
}

/// Over the RDMA devices of this machine: the ranks take them in turn.
pub struct OverVerbs;

impl Job for OverVerbs {
    const NAME: &'static str = "verbs";
    const TRANSPORT: TransportChoice = TransportChoice::Verbs;
    const PATH: &'static str = carrack_transports::verbs::NAME;
    const TRIES_LOCKS: bool = true;
    const IS_RDMA: bool = true;

    fn ranks_with(size: u32, settings: SettingsBuilder) -> Vec<Runtime> {
        let job = InProcess::job(size).expect("a job in this process");
        let start = |(at, bootstrap)| {
            start(bootstrap, settings.clone().setting("verbs_device", rdma_device(at)))
        };
        job.into_iter().enumerate().map(start).collect()
    }
}

/// Over the simulated NIC of this process.
pub struct OverSimulatedNic;

impl Job for OverSimulatedNic {
    const NAME: &'static str = "verbs-simulated";
    const TRANSPORT: TransportChoice = TransportChoice::VerbsSimulated;
    const PATH: &'static str = carrack_transports::verbs::SIMULATED;
    const TRIES_LOCKS: bool = true;
    const IS_RDMA: bool = true;
}

/// Returns the RDMA device of a rank, of those that `TEST_VERBS` names: the two of the guest
/// without.
pub fn rdma_device(rank: usize) -> String {
    let names = std::env::var("TEST_VERBS").unwrap_or_else(|_| "rxe0,rxe1".into());
    let names: Vec<_> = names.split(',').collect();
    names[rank % names.len()].to_owned()
}

/// Makes a test of each function, over each transport. A new transport is one more module here.
/// Attributes before the functions are for the simulated NIC, which takes longest.
#[macro_export]
macro_rules! over_each_transport {
    ($attributes:tt; $($test:ident),+ $(,)?) => {
        $crate::over_transport!(loopback, OverLoopback, [], $($test),+);
        $crate::over_transport!(shm, OverShm, [], $($test),+);
        $crate::over_transport!(tcp, OverTcp, [], $($test),+);
        $crate::over_transport!(simulated_nic, OverSimulatedNic, $attributes, $($test),+);
        $crate::over_transport!(
            verbs,
            OverVerbs,
            [#[ignore = "needs an RDMA device: cargo xtask rdma-guest runs it"]],
            $($test),+
        );
    };
    ($($test:ident),+ $(,)?) => {
        $crate::over_each_transport!([]; $($test),+);
    };
}

/// Runs tests over each transport, and once more over a job of another sort.
#[macro_export]
macro_rules! over_each_transport_and {
    ($module:ident, $job:ident; $($test:ident),+ $(,)?) => {
        $crate::over_each_transport!($($test),+);
        $crate::over_transport!($module, $job, [], $($test),+);
    };
}

/// Each test once more over the transport of a job.
#[macro_export]
macro_rules! over_transport {
    ($module:ident, $job:ident, $attributes:tt, $($test:ident),+) => {
        mod $module {
            $($crate::with_attributes! { $attributes
            #[test]
            fn $test() {
                let name = concat!(stringify!($test), " over ", stringify!($module));
                let _watchdog = $crate::Watchdog::over(name);
                super::$test::<$crate::$job>();
            } })+
        }
    };
}

/// An item with attributes that were given as one.
#[macro_export]
macro_rules! with_attributes {
    ([$(#[$attribute:meta])*] $item:item) => {
        $(#[$attribute])*
        $item
    };
}

pub fn built(settings: SettingsBuilder) -> Settings {
    settings.build_from_vars(std::iter::empty::<(String, String)>()).expect("settings in range")
}

/// Returns ranks of one job, not yet started: for tests of the start.
pub fn unstarted(size: u32) -> Vec<InProcess> {
    InProcess::job(size).unwrap()
}

pub fn start(bootstrap: InProcess, settings: SettingsBuilder) -> Runtime {
    Runtime::builder().settings(built(settings)).bootstrap(Box::new(bootstrap)).start().unwrap()
}

/// Returns the amount that the variable sets, else a default, which is lower in a debug build.
pub fn amount(variable: &str, debug: u64, release: u64) -> u64 {
    let given = std::env::var(variable).ok().map(|text| text.parse().expect("a number"));
    given.unwrap_or(if cfg!(debug_assertions) { debug } else { release })
}

/// Creates a generator whose seed is printed, and can be given: `TEST_SEED=123 cargo test …`.
pub fn rng() -> SmallRng {
    let given = std::env::var("TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| RandomState::new().hash_one(std::process::id()));
    println!("TEST_SEED={seed}");
    SmallRng::seed_from_u64(seed)
}

pub fn random(rng: &mut SmallRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill_bytes(&mut bytes);
    bytes
}

/// Returns bytes that each side makes from a number. The receiver checks what came, and the sender
/// keeps nothing.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    random(&mut SmallRng::seed_from_u64(seed), len)
}

/// Makes progress on all devices of all ranks, once. An error fails the test.
pub fn step(ranks: &[Runtime]) {
    for rank in ranks {
        rank.progress_all().expect("progress");
    }
}

/// Pauses of a wait in which nothing moves. It waits for a timer or for another thread, and the
/// tests next to it need the CPU.
#[derive(Default)]
struct Pauses {
    /// Passes in a row that moved nothing.
    idle: u32,
}

impl Pauses {
    /// Ends a pass.
    fn after(&mut self, moved: bool) {
        self.idle = if moved { 0 } else { self.idle.saturating_add(1) };
        match self.idle {
            0..200 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// Makes progress on all ranks until `done`.
#[track_caller]
pub fn until(ranks: &[Runtime], mut done: impl FnMut() -> bool) {
    let errors = until_with_errors(ranks, &mut done);
    assert!(errors.is_empty(), "progress complained: {errors:?}");
}

/// Waits like `until`, and returns the errors of progress, without repetitions.
#[track_caller]
pub fn until_with_errors(ranks: &[Runtime], mut done: impl FnMut() -> bool) -> Vec<ProgressError> {
    let mut errors: Vec<ProgressError> = Vec::new();
    let (start, mut pauses) = (Instant::now(), Pauses::default());
    while !done() {
        let mut moved = false;
        for rank in ranks {
            match rank.progress_all() {
                Ok(some) => moved |= some,
                Err(error) if !errors.iter().any(|seen| seen.to_string() == error.to_string()) => {
                    errors.push(error);
                }
                Err(_) => {}
            }
        }
        if start.elapsed() > patience(LIMIT / 2) {
            panic!("nothing came of it; progress complained of {errors:?}");
        }
        pauses.after(moved);
    }
    errors
}

/// Returns `true` if `done` becomes true within the time, while all ranks make progress. For
/// events that must not happen, and for those that a bug would prevent.
pub fn happens(ranks: &[Runtime], within: Duration, mut done: impl FnMut() -> bool) -> bool {
    let (start, mut pauses) = (Instant::now(), Pauses::default());
    while !done() {
        if start.elapsed() > within {
            return false;
        }
        let moved =
            ranks.iter().fold(false, |moved, rank| rank.progress_all().unwrap_or(false) | moved);
        pauses.after(moved);
    }
    true
}

/// Gives NICs time to work, since their work in flight is invisible. The thread of a simulated NIC
/// is waited for, since it may not get a CPU.
pub fn nics_go_on() {
    std::thread::sleep(Duration::from_micros(20));
    go_round();
}

/// Makes enough progress that all messages in flight arrive, and that a second arrival would show.
pub fn settle(ranks: &[Runtime]) {
    let start = Instant::now();
    let is_nics =
        |choice| matches!(choice, TransportChoice::Verbs | TransportChoice::VerbsSimulated);
    let has_nic =
        ranks.iter().any(|rank| rank.settings().transports().iter().copied().any(is_nics));
    // Each of a NIC's passes gives it time for all it has.
    let enough = if has_nic { 100 } else { 200 };
    let mut idle = 0;
    while idle < enough {
        let moved =
            ranks.iter().fold(false, |moved, rank| rank.progress_all().unwrap_or(true) | moved);
        idle = if moved { 0 } else { idle + 1 };
        if has_nic {
            nics_go_on();
        }
        assert!(start.elapsed() < patience(LIMIT / 2), "it never settles");
    }
}

/// Calls a post until it is no retry, making progress.
#[track_caller]
pub fn posted(ranks: &[Runtime], mut call: impl FnMut() -> Result<Outcome, PostError>) -> Outcome {
    let start = Instant::now();
    loop {
        match call().expect("a post that is right") {
            Outcome::Retry(reason) => {
                assert!(start.elapsed() < patience(LIMIT / 2), "retried for ever: {reason:?}");
                step(ranks);
            }
            outcome => return outcome,
        }
    }
}

/// Calls like `posted`, and ignores whether the operation is complete already.
#[track_caller]
pub fn sent(ranks: &[Runtime], call: impl FnMut() -> Result<Outcome, PostError>) {
    let _ = posted(ranks, call);
}

/// Returns the status of an outcome that must be `Done`.
#[track_caller]
pub fn done(outcome: Outcome) -> Status {
    match outcome {
        Outcome::Done(status) => status,
        other => panic!("{other:?} is not done"),
    }
}

/// Brings the links between all ranks up.
pub fn connect(ranks: &[Runtime]) {
    for from in ranks {
        for to in ranks {
            let tag = carrack::Tag(u64::MAX - 1);
            let outcome = posted(ranks, || from.post_send(to.rank(), b"up", tag).try_submit());
            assert!(outcome.is_done());
            let arrived = carrack::Synchronizer::new(1);
            let came = to
                .post_recv(from.rank(), vec![0; 2], tag)
                .comp(&arrived)
                .try_submit()
                .expect("a receive");
            if came.is_posted() {
                until(ranks, || arrived.test());
            }
        }
    }
}

/// Returns the number of the rank at this place of the list.
pub fn rank_of(ranks: &[Runtime], at: usize) -> Rank {
    ranks[at].rank()
}
