//! Jobs of MPI communicators: against a mock of each ABI, and under real launchers. `TEST_MPI`
//! lists folders with an MPI library each, with colons between them.

#![expect(unsafe_code, reason = "the program opens an MPI library, and calls it by C's rules")]

use crate::support::children::{Watched as _, started, succeeded, unset};
use crate::tcp_bootstrap::without_launchers;
use carrack::bootstrap::{Bootstrap as _, MpiComm};
use carrack::settings::Settings;
use carrack::{Rank, Runtime, Tag};
use children::{Heard, Running};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

const ROLE: &str = "TEST_MPI_ROLE";
const LIBRARY: &str = "TEST_MPI_LIBRARY";
const HOMES: &str = "TEST_MPI";
const WATCHDOG: Duration = Duration::from_secs(60);
/// The status of a rank that hung.
const HUNG: i32 = 97;

/// The ABIs, by the names of the mock.
const ABIS: [&str; 3] = ["MPICH", "STANDARD", "OPEN_MPI"];

/// Compiles the mocks once.
fn mocks() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mpi-mocks");
        std::fs::create_dir_all(&folder).unwrap();
        let source = folder.join("mpi_mock.c");
        std::fs::write(&source, include_str!("mpi_mock.c")).unwrap();
        for abi in ABIS {
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-fPIC", "-w", &format!("-D{abi}"), "-o"]);
            compiler.arg(folder.join(format!("lib{abi}.so"))).arg(&source);
            assert!(compiler.status().unwrap().success(), "{compiler:?}");
        }
        folder
    })
}

/// Returns this program in its role, with a library and without variables of launchers.
fn program(before: &[&str], role: &str, library: &Path) -> Command {
    let this = std::env::current_exe().unwrap();
    let words = before.iter().map(AsRef::as_ref).chain([this.as_os_str()]).collect::<Vec<_>>();
    let mut command = Command::new(words[0]);
    unset(&mut command, &["TORCHELASTIC_RUN_ID"]);
    without_launchers(&mut command);
    command.args(&words[1..]).args(["--exact", "mpi_programs::a_rank_in_its_role"]);
    // With one thread the test runs in the main thread, as MPI may demand.
    command.args(["--nocapture", "--test-threads=1"]).env(ROLE, role).env(LIBRARY, library);
    command
}

/// Runs ranks with a mock. Those from `first` on have these variables.
fn run(abi: &str, size: usize, role: &str, first: usize, variables: &[(&str, &str)]) -> Vec<Heard> {
    let library = mocks().join(format!("lib{abi}.so"));
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let shared = mocks().join(format!("shared-{}-{number}", std::process::id()));
    std::fs::File::create(&shared).unwrap().set_len(2 << 20).unwrap();
    let ranks = (0..size).map(|rank| {
        let mut command = program(&[], role, &library);
        command.env("MOCK_FILE", &shared).env("MOCK_RANK", rank.to_string());
        command.env("MOCK_SIZE", size.to_string());
        if rank >= first {
            command.envs(variables.iter().copied());
        }
        started(command)
    });
    let outputs = ranks.collect::<Vec<_>>().into_iter().map(Running::ends).collect();
    std::fs::remove_file(&shared).unwrap();
    outputs
}

/// Returns the error of the only rank.
fn error_of(abi: &str, role: &str, variables: &[(&str, &str)]) -> String {
    error(&run(abi, 1, role, 0, variables)[0])
}

fn error(output: &Heard) -> String {
    let said = succeeded(output);
    said.lines().find_map(|line| line.split_once("error: ")).expect(&said).1.to_owned()
}

#[test]
fn the_world_and_its_halves_are_jobs_at_once_with_each_abi() {
    for abi in ABIS {
        for (rank, output) in run(abi, 4, "jobs", 0, &[]).iter().enumerate() {
            let expected = format!("rank {rank} of 4, place {rank}; rank {} of 2", rank / 2);
            let said = succeeded(output);
            assert!(said.contains(&expected), "{abi}: {expected}: {said}");
        }
    }
}

#[test]
fn the_world_and_its_halves_are_jobs_at_once_under_real_launchers() {
    let homes = std::env::var(HOMES).unwrap_or_default();
    if homes.is_empty() {
        return println!("skipped: {HOMES} names no folders with MPI libraries and launchers");
    }
    for home in homes.split(':').map(Path::new) {
        let launcher = home.join("bin/mpiexec");
        let is_open_mpi = home.join("lib/libmpi.so.40").exists();
        let root: &[_] =
            if is_open_mpi { &["--allow-run-as-root", "--oversubscribe"] } else { &[] };
        let words = [&[launcher.to_str().unwrap(), "-n", "4"], root].concat();
        let names = ["libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1", "libmpi_abi.so.0"];
        let libraries = names.map(|name| home.join("lib").join(name));
        let libraries: Vec<_> = libraries.iter().filter(|library| library.exists()).collect();
        assert!(!libraries.is_empty(), "{}: none of {names:?}", home.display());
        for library in libraries {
            let said = succeeded(&started(program(&words, "jobs", library)).ends());
            for rank in 0..4 {
                let expected = format!("rank {rank} of 4, place {rank}; rank {} of 2", rank / 2);
                assert!(said.contains(&expected), "{}: {expected}: {said}", library.display());
            }
            println!("{}: 4 ranks", library.display());
        }
    }
}

#[test]
fn what_keeps_mpi_from_being_called_is_said() {
    for abi in ABIS {
        for (role, words) in [
            ("early", "MPI is not initialised: call MPI_Init_thread"),
            ("late", "MPI is finalised: start the runtime before MPI_Finalize"),
            ("null", "MPI_COMM_NULL"),
        ] {
            let error = error_of(abi, role, &[]);
            assert!(error.contains(words), "{abi}: {error}");
        }
        let error = error_of(abi, "world", &[("MOCK_BETWEEN", "1")]);
        assert!(error.contains("MPI_Intercomm_merge"), "{abi}: {error}");
        let error = error_of(abi, "world", &[("MOCK_COUNTS", "20000")]);
        assert!(error.contains("20000 ranks") && error.contains("smaller"), "{abi}: {error}");
        for call in ["MPI_Comm_rank", "MPI_Comm_size", "MPI_Allgather", "MPI_Bcast"] {
            let error = error_of(abi, "world", &[("MOCK_FAILS", call)]);
            let words = format!("{call} failed: the mock was told to fail (15)");
            assert!(error.contains(&words), "{abi}: {error}");
        }
    }
}

#[test]
fn ranks_that_count_differently_are_told_on_all_ranks() {
    let outputs = run("MPICH", 2, "world", 1, &[("MOCK_COUNTS", "3")]);
    let [zero, one] = [0, 1].map(|rank| error(&outputs[rank]));
    assert!(zero.contains("rank 0 counts 2 ranks, and in place 1 is rank 1 of 3"), "{zero}");
    assert!(one.contains("rank 1 counts 3 ranks, and in place 0 is rank 0 of 2"), "{one}");
}

#[test]
fn what_keeps_rank_0_from_listening_is_the_error_of_all_ranks() {
    let taken = std::net::TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (rank, output) in run("MPICH", 2, "world", 0, &[("CARRACK_PORT", &port)]).iter().enumerate()
    {
        let error = error(output);
        assert!(error.contains("rank 0 cannot listen"), "{error}");
        assert!(error.contains("set CARRACK_PORT") && error.contains("unset it"), "{error}");
        assert_eq!(error.contains("MPI communicator: rank 0 has failed"), rank == 1, "{error}");
    }
}

#[test]
fn several_processes_that_mpi_takes_for_one_each_are_refused() {
    for (variables, words) in [
        (&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1")][..], "Hydra"),
        (&[("CARRACK_SIZE", "2")], "carrack run may have started"),
        (&[("WORLD_SIZE", "2")], "torchrun may have started"),
    ] {
        let error = error_of("OPEN_MPI", "world", variables);
        assert!(error.contains(words) && error.contains("=2"), "{error}");
        let wanted = [variables, &[("CARRACK_BOOTSTRAP", "alone")]].concat();
        let said = succeeded(&run("OPEN_MPI", 1, "world", 0, &wanted)[0]);
        assert!(said.contains("rank 0 of 1"), "{said}");
    }
}

#[test]
fn ranks_that_were_started_one_by_one_and_merged_are_a_job() {
    let alone_in_its_world = [("MOCK_COUNTS", "1"), ("WORLD_SIZE", "2")];
    let outputs = run("MPICH", 2, "merged", 0, &alone_in_its_world);
    for (rank, output) in outputs.iter().enumerate() {
        let said = succeeded(output);
        assert!(said.contains(&format!("rank {rank} of 2")), "{said}");
    }
}

#[test]
fn a_rank_whose_settings_are_wrong_keeps_no_other_waiting() {
    let outputs = run("MPICH", 2, "world", 1, &[("CARRACK_PORT", "none")]);
    let [zero, one] = [0, 1].map(|rank| error(&outputs[rank]));
    assert!(zero.contains("rank 1 has failed"), "{zero}");
    assert!(one.contains("CARRACK_PORT"), "{one}");
}

#[test]
fn a_thread_that_may_not_call_mpi_is_told() {
    for (abi, funneled, serialized) in
        [("MPICH", "1", "2"), ("STANDARD", "1024", "2048"), ("OPEN_MPI", "1", "2")]
    {
        for level in ["0", funneled] {
            let error = error_of(abi, "thread", &[("MOCK_LEVEL", level)]);
            assert!(error.contains("MPI_THREAD_SERIALIZED"), "{abi}: {error}");
        }
        let may = run(abi, 1, "thread", 0, &[("MOCK_LEVEL", serialized)]);
        let said = succeeded(&may[0]);
        assert!(said.contains("rank 0 of 1"), "{abi}: {said}");
    }
}

#[test]
fn a_handle_that_is_no_int_is_not_cut_to_one() {
    let error = error_of("MPICH", "wide", &[]);
    assert!(error.contains("0x10044000000"), "{error}");
}

/// An MPI library that the process has loaded, with handles as words. Of a handle that is an `int`,
/// callees look at the lower half only.
struct Mpi {
    library: Library,
    world: usize,
    null: usize,
}

impl Mpi {
    fn open(path: &str) -> Self {
        // SAFETY: an MPI library may be loaded into any program.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.unwrap();
        let address = |name: &str| {
            // SAFETY: only the address is used.
            let symbol = unsafe { library.get::<*mut c_void>(name) };
            symbol.ok().map(|symbol| symbol.as_raw_ptr() as usize)
        };
        let is_standard = path.contains("abi") || path.contains("STANDARD");
        let [world, null] = match [address("ompi_mpi_comm_world"), address("ompi_mpi_comm_null")] {
            _ if is_standard => [0x101, 0x100],
            [Some(world), Some(null)] => [world, null],
            _ => [0x4400_0000, 0x0400_0000],
        };
        Self { library, world, null }
    }

    fn init(&self) {
        type Init = unsafe extern "C" fn(*mut c_int, *mut c_void) -> c_int;
        // SAFETY: MPI_Init takes null pointers.
        let code = unsafe {
            let init = self.library.get::<Init>("MPI_Init").unwrap();
            init(std::ptr::null_mut(), std::ptr::null_mut())
        };
        assert_eq!(code, 0);
    }

    fn finalize(&self) {
        type Finalize = unsafe extern "C" fn() -> c_int;
        // SAFETY: called once, by the thread that called MPI_Init.
        let code = unsafe { self.library.get::<Finalize>("MPI_Finalize").unwrap()() };
        assert_eq!(code, 0);
    }

    /// Returns the part of the world with this colour.
    fn split(&self, colour: c_int, key: c_int) -> usize {
        type Split = unsafe extern "C" fn(usize, c_int, c_int, *mut usize) -> c_int;
        let mut part = 0;
        // SAFETY: there is room for a handle of either width.
        let code = unsafe {
            let split = self.library.get::<Split>("MPI_Comm_split").unwrap();
            split(self.world, colour, key, &raw mut part)
        };
        assert_eq!(code, 0);
        part
    }
}

/// Starts a runtime with this communicator.
fn start(comm: usize) -> Result<Runtime, carrack::StartError> {
    // SAFETY: the handle is one of the library that is open, or no call is made with it.
    Runtime::from_mpi(unsafe { MpiComm::from_raw(comm) })
}

/// Sends to the next rank, and receives from the previous one.
fn pass_on(runtime: &Runtime, len: usize, seed: usize) {
    let (rank, size) = (runtime.rank().0, runtime.size());
    let bytes = |rank: u32| -> Vec<u8> {
        (0..len).map(|at| (at * 31 + seed * 7 + rank as usize * 13) as u8).collect()
    };
    let next = Rank((rank + 1) % size);
    let previous = (rank + size - 1) % size;
    let sent = carrack::Counter::new();
    runtime.post_send(next, bytes(rank), Tag(seed as u64)).comp(&sent).submit().unwrap();
    let room = vec![0xee; len];
    let status = runtime.post_recv(Rank(previous), room, Tag(seed as u64)).wait().unwrap();
    assert_eq!(status.bytes().unwrap(), bytes(previous));
    while sent.get() == 0 {
        runtime.progress().unwrap();
    }
}

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    thread::spawn(|| {
        thread::sleep(WATCHDOG);
        std::process::exit(HUNG);
    });
    let mpi = Mpi::open(&std::env::var(LIBRARY).unwrap());
    if role != "early" {
        mpi.init();
    }
    if role == "late" {
        mpi.finalize();
    }
    let comm = match &*role {
        "null" => mpi.null,
        "merged" => mpi.split(0, 0),
        "wide" => mpi.world | 1 << 40,
        _ => mpi.world,
    };
    if role != "jobs" {
        let elsewhere = || thread::spawn(move || start(comm)).join().unwrap();
        match if role == "thread" { elsewhere() } else { start(comm) } {
            Ok(runtime) => println!("rank {} of {}", runtime.rank().0, runtime.size()),
            Err(error) => println!("error: {error}"),
        }
        return;
    }
    let world = start(comm).unwrap_or_else(|error| panic!("{error}"));
    let me = world.rank().0 as c_int;
    let half = mpi.split(me % 2, me);
    // A bootstrap may be handed over, too.
    // SAFETY: the handle is that of a communicator of this rank.
    let bootstrap = unsafe { MpiComm::from_raw(half) }.join(&Settings::from_env().unwrap());
    let bootstrap = bootstrap.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(bootstrap.size(), 2);
    let half = Runtime::builder().bootstrap(Box::new(bootstrap)).start().unwrap();
    // A second job of the same ranks.
    let again = start(comm).unwrap();
    for (seed, len) in [8, 5000, 300_000].into_iter().enumerate() {
        pass_on(&half, len, seed);
        pass_on(&world, len, seed + 10);
        pass_on(&again, len, seed + 20);
    }
    println!(
        "rank {} of {}, place {}; rank {} of {}",
        world.rank().0,
        world.size(),
        world.place_on_node(),
        half.rank().0,
        half.size()
    );
    // A runtime may outlive MPI.
    drop((half, again));
    mpi.finalize();
    pass_on(&world, 100, 30);
}
