//! Ranks that are processes: this very program again, in a role. They find each other through a
//! folder, so that no launcher decides what a killed rank means for the others. Ranks of two
//! machines, which share no folder, find each other as their launcher tells them.
//!
//! A program that uses this module has a test named [`ROLE_TEST`], which plays the role of
//! [`Role::of_this_process`].

use super::folder::Folder;
use super::{built, until};
use ::children::{Running, pause};
use carrack::bootstrap::{Bootstrap, BootstrapError, JobId, Source};
use carrack::settings::{Settings, SettingsBuilder};
use carrack::{Rank, Runtime, WaitError};
use rustix::process::{Signal, kill_process};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The test that is a rank.
pub const ROLE_TEST: &str = "a_rank_in_its_role";
/// In place of a rank: the process that started the ranks.
pub const PARENT: u32 = u32::MAX;
const ROLE: &str = "TEST_ROLE";
const FOLDER: &str = "TEST_FOLDER";
/// A rank's answer when it has taken its role.
const TAKEN: &str = "taken";
/// The status of a rank that hung.
const HUNG: i32 = 97;

/// Returns the names in a folder.
pub fn listing(folder: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// Returns the letter by which the kernel names a process's state: `T` of one that a signal has
/// stopped, `Z` of a dead one of which its parent has not taken note.
pub fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which is in parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Returns the folder for temporary files of tests: that of `carrack selftest`, else one below
/// target/.
pub fn scratch() -> PathBuf {
    let folder = std::env::var_os("TEST_SCRATCH").map_or_else(in_target, PathBuf::from);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Returns Cargo's folder for tests: the program is target/PROFILE/deps/PROGRAM.
fn in_target() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).expect("below target/").join("tmp")
}

// ---- the parent's side --------------------------------------------------------------------------

/// Processes of one job, as their parent sees them.
pub struct Ranks {
    processes: Vec<Running>,
    folder: PathBuf,
    shm: BTreeSet<String>,
}

impl Ranks {
    /// Starts `size` ranks in a role, each with the same `words`.
    pub fn start(role: &str, size: u32, words: &[u64]) -> Self {
        Self::start_under(&[], role, size, words)
    }

    /// Starts ranks like `start`, each under a command that executes its arguments.
    pub fn start_under(wrapper: &[&str], role: &str, size: u32, words: &[u64]) -> Self {
        Self::start_with(
            |_| wrapper.iter().map(|word| (*word).to_owned()).collect(),
            |_| None,
            role,
            size,
            words,
        )
    }

    /// Starts ranks like `start`, each under a command of its own.
    pub fn start_each_under(
        wrapper: impl Fn(u32) -> Vec<String>,
        role: &str,
        size: u32,
        words: &[u64],
    ) -> Self {
        Self::start_with(wrapper, |_| None, role, size, words)
    }

    /// Starts ranks like `start`, each with a variable of its own.
    pub fn start_each<'a>(
        variable: impl Fn(u32) -> (&'a str, &'a str),
        role: &str,
        size: u32,
        words: &[u64],
    ) -> Self {
        Self::start_with(|_| Vec::new(), |rank| Some(variable(rank)), role, size, words)
    }

    fn start_with<'a>(
        wrapper: impl Fn(u32) -> Vec<String>,
        variable: impl Fn(u32) -> Option<(&'a str, &'a str)>,
        role: &str,
        size: u32,
        words: &[u64],
    ) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = scratch().join(format!("carrack-ranks-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let shm = listing("/dev/shm");
        let program = std::env::current_exe().unwrap();
        let rank = |rank: u32| {
            let words_before = wrapper(rank);
            let mut all = words_before.iter().map(OsStr::new).chain([program.as_os_str()]);
            let mut command = Command::new(all.next().expect("the program at least"));
            command.args(all);
            in_role(&mut command, role, (rank, size), words)
                .env(FOLDER, &folder)
                .envs(variable(rank))
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            Running::start(&mut command).unwrap()
        };
        Self { processes: (0..size).map(rank).collect(), folder, shm }
    }

    /// Sends a signal to one of them.
    pub fn signal(&self, rank: Rank, signal: Signal) {
        self.processes[rank.0 as usize].signal(signal);
    }

    /// Returns `true` if a signal has stopped a rank.
    pub fn is_stopped(&self, rank: Rank) -> bool {
        state_of(self.processes[rank.0 as usize].id()) == Some('T')
    }

    /// Waits until a rank has said something. Returns `false` if the rank has ended first.
    pub fn hears(&mut self, what: &str, rank: u32) -> bool {
        let folder = Folder::new(self.folder.clone(), PARENT, 0);
        while folder.get(&said(what, rank)).unwrap().is_none() {
            if self.processes[rank as usize].ended().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Says something to all ranks, which hear it of [`PARENT`].
    pub fn says(&self, what: &str) {
        Folder::new(self.folder.clone(), PARENT, 0).put(&said(what, PARENT), b"").unwrap();
    }

    /// Returns `true` if a rank has said something so far.
    pub fn has_said(&self, what: &str, rank: u32) -> bool {
        Folder::new(self.folder.clone(), PARENT, 0).get(&said(what, rank)).unwrap().is_some()
    }

    fn wait(&mut self) -> Vec<ExitStatus> {
        // A rank ends itself when it hangs.
        let ended = |rank: &mut Running| rank.wait(Duration::MAX, pause).unwrap().unwrap();
        self.processes.iter_mut().map(ended).collect()
    }

    /// Waits for all of them, and looks that nothing is left.
    pub fn end(mut self) -> Vec<ExitStatus> {
        let statuses = self.wait();
        let left = self.processes.iter().flat_map(Running::processes).count();
        assert_eq!(left, 0, "processes are left");
        // Other programs create short-lived files there, so only a file that stays is a leak.
        let start = Instant::now();
        // The next start of NVIDIA's driver removes the files that a killed process left.
        let is_ours = |name: &&String| !name.starts_with("cuda.shm.");
        while let Some(name) = listing("/dev/shm").difference(&self.shm).find(is_ours) {
            assert!(start.elapsed() < Duration::from_secs(10), "{name} is left in /dev/shm");
            std::thread::sleep(Duration::from_millis(10));
        }
        statuses
    }

    /// Does as `end`, and fails if a rank has never taken its role. A program that finds no test of
    /// that name succeeds, too.
    #[track_caller]
    fn end_in_roles(mut self) -> Vec<ExitStatus> {
        self.wait();
        let taken = (0..self.processes.len()).all(|rank| self.has_said(TAKEN, rank as u32));
        assert!(taken, "a rank has not taken its role: is there a test of that path?");
        self.end()
    }

    /// Checks that all ranks succeed.
    #[track_caller]
    pub fn succeed(self) {
        for (rank, status) in self.end_in_roles().iter().enumerate() {
            succeeded(rank, *status);
        }
    }

    /// Checks that all ranks succeed except one, which is killed.
    #[track_caller]
    pub fn succeed_except(self, victim: Rank) {
        use std::os::unix::process::ExitStatusExt;
        for (rank, status) in self.end_in_roles().iter().enumerate() {
            if rank == victim.0 as usize {
                assert_eq!(
                    status.signal(),
                    Some(libc::SIGKILL),
                    "the victim was to be killed: {status}"
                );
            } else {
                succeeded(rank, *status);
            }
        }
    }
}

/// Returns the words of a command that is a rank of a launcher's job.
pub fn launched(role: &str, size: u32, words: &[u64]) -> Vec<String> {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(&program);
    in_role(&mut command, role, (0, size), words);
    let text = |word: &OsStr| word.to_string_lossy().into_owned();
    let variables = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let variables = variables.map(|(name, value)| format!("{}={}", text(name), text(value)));
    // Not every launcher hands on the variables of its own environment.
    let before = ["env".to_owned()].into_iter().chain(variables);
    before.chain([text(program.as_os_str())]).chain(command.get_args().map(text)).collect()
}

/// Returns one rank of several machines', which joins over TCP, by variables that the caller adds.
pub fn far_rank(role: &str, (rank, size): (u32, u32), words: &[u64]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    in_role(&mut command, role, (rank, size), words)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string());
    command
}

/// Returns a rank of a job of one, which the caller starts and watches.
pub fn lone_rank(role: &str, words: &[u64]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    in_role(&mut command, role, (0, 1), words).env(FOLDER, scratch());
    command
}

fn in_role<'a>(
    command: &'a mut Command,
    role: &str,
    (rank, size): (u32, u32),
    words: &[u64],
) -> &'a mut Command {
    let words = words.iter().map(|word| format!(" {word}")).collect::<String>();
    let (module, name) = role.rsplit_once("::").expect("a role of a module");
    let test = format!("{module}::{ROLE_TEST}");
    let role = format!("{name} {rank} {size}{words}");
    command.args(["--exact", &test, "--nocapture", "--test-threads=1"]).env(ROLE, role)
}

#[track_caller]
pub fn succeeded(rank: usize, status: ExitStatus) {
    assert_ne!(status.code(), Some(HUNG), "rank {rank} hangs");
    assert!(status.success(), "rank {rank}: {status}");
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.processes.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

// ---- the ranks' side ----------------------------------------------------------------------------

/// Role of a process.
pub struct Role {
    pub name: String,
    pub rank: u32,
    pub size: u32,
    pub words: Vec<u64>,
    meeting: Meeting,
}

/// Place where ranks find each other.
enum Meeting {
    Folder(PathBuf),
    Launcher(Arc<dyn Bootstrap>),
}

impl Role {
    /// Returns this process's role; `None` in the parent. A rank ends itself when it takes too
    /// long.
    pub fn of_this_process(patience: Duration) -> Option<Self> {
        let text = std::env::var(ROLE).ok()?;
        let mut parts = text.split(' ');
        let name = parts.next().unwrap().to_owned();
        let mut words: Vec<u64> = parts.map(|word| word.parse().unwrap()).collect();
        let rest = words.split_off(2);
        let (mut rank, mut size) = (words[0] as u32, words[1] as u32);
        std::thread::spawn(move || {
            std::thread::sleep(patience);
            eprintln!("it hangs: {text}");
            std::process::exit(HUNG);
        });
        let meeting = match std::env::var_os(FOLDER) {
            Some(folder) => Meeting::Folder(folder.into()),
            None => {
                let settings = Settings::from_env().unwrap();
                let source = Source::find(&settings).unwrap_or_else(|error| panic!("{error}"));
                println!("a job {source}");
                let joined = source.join(&settings).unwrap_or_else(|error| panic!("{error}"));
                (rank, size) = (joined.rank(), joined.size());
                Meeting::Launcher(joined.into())
            }
        };
        let role = Self { name, rank, size, words: rest, meeting };
        if !role.is_far() {
            role.says(TAKEN);
        }
        Some(role)
    }

    pub fn bootstrap(&self) -> Folder {
        match &self.meeting {
            Meeting::Folder(path) => Folder::new(path.clone(), self.rank, self.size),
            Meeting::Launcher(_) => panic!("ranks of several machines share no folder"),
        }
    }

    pub fn runtime(&self, settings: SettingsBuilder) -> Runtime {
        self.runtime_with(built(settings))
    }

    pub fn runtime_with(&self, settings: Settings) -> Runtime {
        let bootstrap: Box<dyn Bootstrap> = match &self.meeting {
            Meeting::Folder(_) => Box::new(self.bootstrap()),
            Meeting::Launcher(joined) => Box::new(Joined(joined.clone())),
        };
        Runtime::builder().settings(settings).bootstrap(bootstrap).start().unwrap()
    }

    /// Returns `true` if the others may be on other machines.
    pub fn is_far(&self) -> bool {
        matches!(self.meeting, Meeting::Launcher(_))
    }

    fn get(&self, key: &str) -> Option<Vec<u8>> {
        match &self.meeting {
            Meeting::Folder(_) => self.bootstrap().get(key).unwrap(),
            Meeting::Launcher(joined) => match joined.get(key) {
                // One that is lost may be meant to be.
                Err(BootstrapError::RankGone { .. }) => None,
                found => found.unwrap(),
            },
        }
    }

    pub fn says(&self, what: &str) {
        self.tells(what, b"");
    }

    /// Says something that has bytes to it.
    pub fn tells(&self, what: &str, bytes: &[u8]) {
        let key = said(what, self.rank);
        match &self.meeting {
            Meeting::Folder(_) => self.bootstrap().put(&key, bytes).unwrap(),
            Meeting::Launcher(joined) => joined.put(&key, bytes).unwrap(),
        }
    }

    /// Returns `true` if a rank has said something so far.
    pub fn has_said(&self, what: &str, by: u32) -> bool {
        self.get(&said(what, by)).is_some()
    }

    /// Returns the bytes that a rank has told, and waits for them.
    pub fn told(&self, what: &str, by: u32) -> Vec<u8> {
        loop {
            if let Some(bytes) = self.get(&said(what, by)) {
                return bytes;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the parent has said something. Progress goes on meanwhile, and takes no core.
    pub fn awaits(&self, what: &str, runtime: &Runtime) {
        while !self.has_said(what, PARENT) {
            match runtime.wait_for(Duration::from_millis(1), || false) {
                Err(WaitError::TimedOut(_)) => {}
                ended => ended.unwrap(),
            }
        }
    }

    /// Says that this rank is here, and waits until these ranks are. Progress goes on meanwhile.
    pub fn meet(&self, what: &str, runtime: &Runtime, ranks: impl Iterator<Item = u32>) {
        self.says(what);
        for rank in ranks {
            until(std::slice::from_ref(runtime), || self.has_said(what, rank));
        }
    }
}

/// A bootstrap that the role uses, too.
struct Joined(Arc<dyn Bootstrap>);

impl Bootstrap for Joined {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn place_on_node(&self) -> u32 {
        self.0.place_on_node()
    }

    fn job(&self) -> &JobId {
        self.0.job()
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        self.0.put(key, value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        self.0.get(key)
    }

    fn check(&self, rank: u32) -> Result<(), BootstrapError> {
        self.0.check(rank)
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        self.0.fence()
    }

    fn finish(&self) -> Result<(), BootstrapError> {
        self.0.finish()
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.wait_fd()
    }
}

fn said(what: &str, by: u32) -> String {
    format!("said/{what}/{by}")
}

/// Kills this process, as `kill -9` does.
pub fn die() -> ! {
    let _ = kill_process(rustix::process::getpid(), Signal::KILL);
    unreachable!("killed")
}
