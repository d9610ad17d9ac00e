//! Ranks that are processes: this very program again, in a role. They find each other through a folder, so
//! that no launcher has an opinion on what a killed rank means for the others.
//!
//! A program that uses this has a test by the name of [`ROLE_TEST`], which does what [`Role::of_this_process`] says.

use super::folder::Folder;
use super::{built, until};
use carrack::bootstrap::Bootstrap;
use carrack::settings::SettingsBuilder;
use carrack::{Rank, Runtime};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The test that is a rank.
pub const ROLE_TEST: &str = "a_rank_in_its_role";
const ROLE: &str = "TEST_ROLE";
const FOLDER: &str = "TEST_FOLDER";
/// The status of a rank that hung.
const HUNG: i32 = 97;

/// The names in a folder.
pub fn listing(folder: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// Where tests put what they need for a while: where `carrack selftest` says, else below target/.
fn scratch() -> PathBuf {
    std::env::var_os("TEST_SCRATCH").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from)
}

// ---- the parent's side -------------------------------------------------------------------------------

/// Processes of one job, as their parent sees them.
pub struct Ranks {
    children: Vec<Child>,
    folder: PathBuf,
    shm: BTreeSet<String>,
}

impl Ranks {
    /// So many ranks in a role, each told the same `words`.
    pub fn start(role: &str, size: u32, words: &[u64]) -> Self {
        Self::start_under(&[], role, size, words)
    }

    /// As `start`, each under a command that executes what follows it.
    pub fn start_under(wrapper: &[&str], role: &str, size: u32, words: &[u64]) -> Self {
        Self::start_with(wrapper, |_| None, role, size, words)
    }

    /// As `start`, each with a variable of its own.
    pub fn start_each<'a>(
        variable: impl Fn(u32) -> (&'a str, &'a str),
        role: &str,
        size: u32,
        words: &[u64],
    ) -> Self {
        Self::start_with(&[], |rank| Some(variable(rank)), role, size, words)
    }

    fn start_with<'a>(
        wrapper: &[&str],
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
        let words = words.iter().map(|word| format!(" {word}")).collect::<String>();
        let program = std::env::current_exe().unwrap();
        let rank = |rank: u32| {
            let mut command = match wrapper {
                [] => Command::new(&program),
                [first, rest @ ..] => {
                    let mut command = Command::new(first);
                    command.args(rest).arg(&program);
                    command
                }
            };
            command
                .args(["--exact", ROLE_TEST, "--nocapture", "--test-threads=1"])
                .env(ROLE, format!("{role} {rank} {size}{words}"))
                .env(FOLDER, &folder)
                .envs(variable(rank))
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        Self { children: (0..size).map(rank).collect(), folder, shm }
    }

    /// Sends a signal to one of them.
    pub fn signal(&self, rank: Rank, signal: Signal) {
        let pid = self.children[rank.0 as usize].id();
        kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
    }

    /// Whether a signal has stopped a rank.
    pub fn is_stopped(&self, rank: Rank) -> bool {
        let pid = self.children[rank.0 as usize].id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // Behind the name, which is in parentheses.
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    }

    /// Waits until a rank has said something. Whether it has: it may have ended first.
    pub fn hears(&mut self, what: &str, rank: u32) -> bool {
        let folder = Folder::new(self.folder.clone(), u32::MAX, 0);
        while folder.get(&said(what, rank)).unwrap().is_none() {
            if self.children[rank as usize].try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Whether a rank has said something so far.
    pub fn has_said(&self, what: &str, rank: u32) -> bool {
        Folder::new(self.folder.clone(), u32::MAX, 0).get(&said(what, rank)).unwrap().is_some()
    }

    /// Waits for all of them, and looks that nothing is left.
    pub fn end(mut self) -> Vec<ExitStatus> {
        let statuses = self.children.iter_mut().map(|rank| rank.wait().unwrap()).collect();
        // To its end: that of the tenth ranks begins as that of the first.
        let mark = format!("{}\0", self.folder.display());
        let left = listing("/proc").into_iter().filter(|pid| {
            std::fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|text| text.windows(mark.len()).any(|part| part == mark.as_bytes()))
        });
        assert_eq!(left.count(), 0, "processes are left");
        // Other programs of the machine come and go there, too: only what stays is a find.
        let start = Instant::now();
        // What NVIDIA's driver leaves there of a process that was killed, its next start takes away.
        let is_ours = |name: &&String| !name.starts_with("cuda.shm.");
        while let Some(name) = listing("/dev/shm").difference(&self.shm).find(is_ours) {
            assert!(start.elapsed() < Duration::from_secs(10), "{name} is left in /dev/shm");
            std::thread::sleep(Duration::from_millis(10));
        }
        statuses
    }

    /// All of them succeed.
    #[track_caller]
    pub fn succeed(self) {
        for (rank, status) in self.end().iter().enumerate() {
            succeeded(rank, *status);
        }
    }

    /// All of them succeed but one, which is killed.
    #[track_caller]
    pub fn succeed_but_for(self, victim: Rank) {
        use std::os::unix::process::ExitStatusExt;
        for (rank, status) in self.end().iter().enumerate() {
            if rank == victim.0 as usize {
                assert_eq!(status.signal(), Some(libc::SIGKILL), "the victim was to be killed: {status}");
            } else {
                succeeded(rank, *status);
            }
        }
    }
}

#[track_caller]
fn succeeded(rank: usize, status: ExitStatus) {
    assert_ne!(status.code(), Some(HUNG), "rank {rank} hangs");
    assert!(status.success(), "rank {rank}: {status}");
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.children {
            let _ = rank.kill();
            let _ = rank.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

// ---- the ranks' side ---------------------------------------------------------------------------------

/// What a process is to be.
pub struct Role {
    pub name: String,
    pub rank: u32,
    pub size: u32,
    pub words: Vec<u64>,
    folder: PathBuf,
}

impl Role {
    /// Nothing, if it is the parent. A rank ends itself when it takes too long.
    pub fn of_this_process(patience: Duration) -> Option<Self> {
        let text = std::env::var(ROLE).ok()?;
        let mut parts = text.split(' ');
        let name = parts.next().unwrap().to_owned();
        let mut words: Vec<u64> = parts.map(|word| word.parse().unwrap()).collect();
        let rest = words.split_off(2);
        let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
        let (rank, size) = (words[0] as u32, words[1] as u32);
        std::thread::spawn(move || {
            std::thread::sleep(patience);
            eprintln!("it hangs: {text}");
            std::process::exit(HUNG);
        });
        Some(Self { name, rank, size, words: rest, folder })
    }

    pub fn bootstrap(&self) -> Folder {
        Folder::new(self.folder.clone(), self.rank, self.size)
    }

    pub fn runtime(&self, settings: SettingsBuilder) -> Runtime {
        Runtime::builder().settings(built(settings)).bootstrap(Box::new(self.bootstrap())).start().unwrap()
    }

    pub fn says(&self, what: &str) {
        self.tells(what, b"");
    }

    /// Says something that has bytes to it.
    pub fn tells(&self, what: &str, bytes: &[u8]) {
        self.bootstrap().put(&said(what, self.rank), bytes).unwrap();
    }

    /// Whether some rank has said something so far.
    pub fn has_said(&self, what: &str, by: u32) -> bool {
        self.bootstrap().get(&said(what, by)).unwrap().is_some()
    }

    /// What some rank has told, once it has.
    pub fn told(&self, what: &str, by: u32) -> Vec<u8> {
        let folder = self.bootstrap();
        loop {
            if let Some(bytes) = folder.get(&said(what, by)).unwrap() {
                return bytes;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// These ranks are here; progress goes on meanwhile.
    pub fn meet(&self, what: &str, runtime: &Runtime, ranks: impl Iterator<Item = u32>) {
        self.says(what);
        let folder = self.bootstrap();
        for rank in ranks {
            until(std::slice::from_ref(runtime), || folder.get(&said(what, rank)).unwrap().is_some());
        }
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
