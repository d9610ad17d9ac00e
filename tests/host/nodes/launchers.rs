//! Jobs that launchers of clusters start on two nodes: with each one, the same programs.
//!
//! `TEST_MPI` lists folders that have an MPI library with its launcher each, with colons between.

use super::{NONE, RANKS};
use crate::apart;
use crate::support::built;
use crate::support::children::unset;
use crate::support::nodes::Nodes;
use crate::support::ranks::{launched, scratch};
use crate::support::{random, rng};
use children::ADDRESSES;
use children::Running;
use rand::Rng;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A launcher: returns the commands, words each, that start this number of ranks of a program on
/// each node.
type Launcher<'a> = &'a dyn Fn(u32, &[String]) -> Vec<Vec<String>>;

/// Runs what a launcher has to manage.
fn manages(name: &str, launcher: Launcher<'_>) {
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
    let example = |name: &str| built::examples().join(name).to_str().unwrap().to_owned();
    let carrack = built::carrack().to_str().unwrap();
    let perf = ["perf", "latency", "--size", "8", "--seconds", "0.1", "--transport", "tcp"];
    let perf = words(&[&[carrack], &perf[..], &["--bind", "none"]].concat());
    let traffic = launched("nodes::traffic", RANKS, &[rng().random(), 100, NONE]);
    let halo = words(&[&example("halo_2d"), "24", "12"]);
    for (each, program, shown, times) in [
        (2, traffic, "1 passed", 4),
        (1, apart::launched_cases(), "1 passed", 2),
        (1, perf, "tcp", 1),
        (2, words(&[&example("distributed_array")]), "400000 words, all right", 4),
        (2, halo, "60 steps as one CPU computes them", 4),
    ] {
        says(name, launcher, (each, &program), (shown, times), true);
    }
}

/// Runs traffic of ranks of which the last one is killed. The others are told, and go on.
fn outlives(name: &str, launcher: Launcher<'_>) {
    let words = [rng().random(), 1000, u64::from(RANKS - 1)];
    let traffic = launched("nodes::traffic", RANKS, &words);
    says(name, launcher, (2, &traffic), ("1 passed", RANKS as usize - 1), false);
}

/// Runs `each` ranks of a program on each node, which say `shown` at least `times` times.
fn says(
    name: &str,
    launcher: Launcher<'_>,
    (each, program): (u32, &[String]),
    (shown, times): (&str, usize),
    succeeds: bool,
) {
    // Ranks that share a core and yield to each other get little of it on some kernels.
    let program = [&["env", "CARRACK_SPIN_US=0"].map(str::to_owned)[..], program].concat();
    let said = run(&launcher(each, &program), succeeds);
    // Ranks write into each other's lines.
    let count = said.matches(shown).count();
    assert!(count >= times, "{name}: {program:?}: {count} times {shown:?} in\n{said}");
    println!("{name}: {each} ranks on each node: {}", program.join(" "));
}

/// Runs commands at once, and returns what they say, once all have ended. `succeeds`: all have to
/// succeed.
fn run(commands: &[Vec<String>], succeeds: bool) -> String {
    let hear = |words: &Vec<String>| {
        let mut command = Command::new(&words[0]);
        unset(command.args(&words[1..]), &[]);
        command.env("CARRACK_JOB_SECRET", "a secret of two nodes");
        // A job that hangs fails.
        let heard = children::hear(&mut command, Duration::from_secs(100));
        let heard = heard.unwrap_or_else(|error| panic!("{error}"));
        let said = heard.stdout + &heard.stderr;
        let is_right = heard.status.success() || !succeeds;
        assert!(is_right, "{words:?}: {}\n{said}", heard.status);
        said
    };
    std::thread::scope(|scope| {
        let running: Vec<_> =
            commands.iter().map(|words| scope.spawn(move || hear(words))).collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Returns words as a command on a node.
fn on(nodes: &Nodes, node: u32, words: &[&str], program: &[String]) -> Vec<String> {
    let words = words.iter().map(|word| (*word).to_owned());
    nodes.wrapper(node).into_iter().chain(words).chain(program.iter().cloned()).collect()
}

#[test]
#[ignore = "full: needs network namespaces"]
fn carrack_run_on_each_node_starts_a_job() {
    let Some(nodes) = Nodes::make("carrack run on two nodes") else { return };
    let (at, carrack) = (format!("{}:29700", ADDRESSES[0]), built::carrack().to_str().unwrap());
    manages("carrack run", &|each, program| {
        let node = |node: u32| {
            let (each, node_word) = (each.to_string(), node.to_string());
            let words = [carrack, "run", "-n", &each, "--nodes", "2", "--node", &node_word];
            on(&nodes, node, &[&words[..], &["--at", &at, "--"]].concat(), program)
        };
        vec![node(0), node(1)]
    });
}

#[test]
#[ignore = "full: needs network namespaces"]
fn torchruns_variables_make_a_job_on_two_nodes() {
    let Some(nodes) = Nodes::make("torchrun on two nodes") else { return };
    // As torchrun's own store does.
    let store = nodes.listener(0, 29500);
    let port = store.local_addr().unwrap().port();
    manages("torchrun", &|each, program| {
        let rank = |rank: u32| {
            let numbers = [
                ("RANK", rank),
                ("WORLD_SIZE", 2 * each),
                ("LOCAL_RANK", rank % each),
                ("LOCAL_WORLD_SIZE", each),
                ("GROUP_RANK", rank / each),
                ("GROUP_WORLD_SIZE", 2),
                ("ROLE_RANK", rank),
                ("ROLE_WORLD_SIZE", 2 * each),
                ("MASTER_PORT", u32::from(port)),
                ("TORCHELASTIC_RESTART_COUNT", 0),
                ("TORCHELASTIC_MAX_RESTARTS", 0),
                ("OMP_NUM_THREADS", 1),
            ];
            let variables = numbers.map(|(name, number)| format!("{name}={number}"));
            let address = format!("MASTER_ADDR={}", ADDRESSES[0]);
            let rest = ["TORCHELASTIC_RUN_ID=none", "TORCHELASTIC_USE_AGENT_STORE=True"];
            let variables = variables.iter().map(String::as_str);
            let words: Vec<_> =
                ["env", &address].into_iter().chain(rest).chain(variables).collect();
            on(&nodes, rank / each, &words, program)
        };
        (0..2 * each).map(rank).collect()
    });
}

#[test]
#[ignore = "full: needs network namespaces"]
fn a_second_rank_0_on_another_node_is_an_error_of_all_ranks_at_once() {
    let Some(nodes) = Nodes::make("a second rank 0 on another node") else { return };
    let (address, port) = (ADDRESSES[0], 29800);
    let first =
        format!("until (: </dev/tcp/{address}/{port}) 2>&-; do sleep 0.1; done; exec \"$@\"");
    // Without rank 2 no rank gets past the start.
    let program = [built::carrack().to_str().unwrap(), "perf", "latency", "--op", "barrier"];
    let rank = |node, rank: u32, before: &[&str]| {
        let variables = [
            format!("RANK={rank}"),
            format!("MASTER_ADDR={address}"),
            format!("CARRACK_PORT={port}"),
        ];
        let variables: Vec<_> = variables.iter().map(String::as_str).collect();
        let rest = ["WORLD_SIZE=3", "MASTER_PORT=29500", "CARRACK_LOG=warn"];
        let words = [before, &["env"], &variables, &rest].concat();
        on(&nodes, node, &words, &program.map(str::to_owned))
    };
    let ranks = [rank(0, 0, &[]), rank(1, 1, &[]), rank(1, 0, &["bash", "-c", &first, "first"])];
    let said = run(&ranks, false);
    let shown = ["rank 0 was started twice", "rank 0 is there already", "rank 1: allgather: "];
    assert!(shown.iter().all(|shown| said.contains(shown)), "{said}");
}

#[test]
#[ignore = "full: needs network namespaces"]
fn launchers_of_mpi_libraries_start_jobs_on_two_nodes() {
    let homes = std::env::var("TEST_MPI").unwrap_or_default();
    let Some(nodes) = Nodes::make("launchers of MPI libraries") else { return };
    let agent = nodes.agent(&scratch());
    for home in homes.split(':').filter(|home| !home.is_empty()) {
        let mpiexec = format!("{home}/bin/mpiexec");
        let agent = agent.to_str().unwrap();
        let is_open_mpi = Path::new(home).join("lib/libmpi.so.40").exists();
        let launcher = |each: u32, program: &[String]| {
            let (all, each) = ((2 * each).to_string(), each.to_string());
            let hosts = match is_open_mpi {
                true => ADDRESSES.map(|address| format!("{address}:{each}")).join(","),
                false => ADDRESSES.join(","),
            };
            let words = match is_open_mpi {
                true => {
                    // The job goes on without a rank that is killed.
                    let root = ["--allow-run-as-root", "--continuous", "--bind-to", "none"];
                    [&root[..], &["--prtemca", "plm_ssh_agent", agent, "--host"]].concat()
                }
                false => {
                    let launcher = ["-launcher", "ssh", "-launcher-exec", agent, "-iface", "eth0"];
                    [&launcher[..], &["-ppn", &each, "-hosts"]].concat()
                }
            };
            let words = [&[&*mpiexec], &words[..], &[&hosts, "-n", &all]].concat();
            vec![on(&nodes, 0, &words, program)]
        };
        manages(home, &launcher);
        // Hydra ends all ranks.
        if is_open_mpi {
            outlives(home, &launcher);
        }
    }
    std::fs::remove_file(agent).unwrap();
}

/// A cluster of Slurm, which ends with it.
struct Slurm {
    folder: PathBuf,
    daemons: Vec<Running>,
}

impl Slurm {
    /// Starts Slurm's daemons on the nodes.
    fn start(nodes: &Nodes) -> Self {
        let folder = scratch().join(format!("slurm-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut slurm = Self { folder, daemons: Vec::new() };
        let [zero, one] = ADDRESSES;
        let (at, agent) = (slurm.folder.display().to_string(), nodes.agent(&slurm.folder));
        let conf = format!(
            "ClusterName=here\nSlurmctldHost=node0({zero})\nSlurmUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={at}/munge.sock\nCredType=cred/munge\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\n\
             JobAcctGatherType=jobacct_gather/none\nPropagateResourceLimits=NONE\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n\
             SlurmdParameters=config_overrides\nReturnToService=2\nStateSaveLocation={at}/state\n\
             SlurmdSpoolDir={at}/spool-%n\nTmpFS={at}/tmp-%n\n\
             SlurmctldPidFile={at}/slurmctld.pid\nSlurmdPidFile={at}/slurmd-%n.pid\n\
             NodeName=node0 NodeAddr={zero} CPUs=4 RealMemory=1000 State=UNKNOWN\n\
             NodeName=node1 NodeAddr={one} CPUs=4 RealMemory=1000 State=UNKNOWN\n\
             PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        );
        let write = |name: &str, bytes: &[u8]| {
            let path = slurm.folder.join(name);
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        };
        write("slurm.conf", conf.as_bytes());
        // No group is used; a slurmd that looks for one ends where none is mounted.
        write("cgroup.conf", b"CgroupPlugin=cgroup/v1\n");
        write("munge.key", &random(&mut rng(), 1024));
        for folder in ["state", "spool-node0", "spool-node1", "tmp-node0", "tmp-node1"] {
            std::fs::create_dir_all(slurm.folder.join(folder)).unwrap();
        }
        let munged = format!(
            "exec munged --foreground --force --socket={at}/munge.sock --key-file={at}/munge.key \
             --pid-file={at}/munged.pid --log-file={at}/munged.log --seed-file={at}/munge.seed"
        );
        let agent = agent.display();
        for (name, script) in [
            ("munged", munged),
            ("slurmctld", format!("exec {agent} {zero} exec slurmctld -D -f {at}/slurm.conf")),
            ("node0", format!("exec {agent} {zero} exec slurmd -D -N node0 -f {at}/slurm.conf")),
            ("node1", format!("exec {agent} {one} exec slurmd -D -N node1 -f {at}/slurm.conf")),
        ] {
            let log = File::create(slurm.folder.join(format!("{name}.out"))).unwrap();
            let mut daemon = Command::new("sh");
            daemon
                .args(["-c", &script])
                .stdin(Stdio::null())
                .stdout(log.try_clone().unwrap())
                .stderr(log);
            slurm.daemons.push(Running::start(&mut daemon).unwrap());
            std::thread::sleep(Duration::from_millis(300));
        }
        let is_idle = || {
            let words = slurm.words(nodes, &["sinfo", "-h", "-o", "%T"], &[]);
            let output = Command::new(&words[0]).args(&words[1..]).output().unwrap();
            output.stdout == b"idle\n"
        };
        let began = Instant::now();
        while !is_idle() {
            assert!(began.elapsed() < Duration::from_secs(60), "the nodes are not idle: see {at}");
            std::thread::sleep(Duration::from_millis(200));
        }
        slurm
    }

    /// Returns words as a command of a client of Slurm.
    fn words(&self, nodes: &Nodes, words: &[&str], program: &[String]) -> Vec<String> {
        let conf = format!("SLURM_CONF={}/slurm.conf", self.folder.display());
        on(nodes, 0, &[&["env", &conf], words].concat(), program)
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for mut daemon in self.daemons.drain(..).rev() {
            daemon.ask(Duration::from_secs(10));
        }
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

#[test]
#[ignore = "long: needs network namespaces and Slurm"]
fn srun_starts_jobs_with_each_of_its_plugins_and_with_none() {
    if Command::new("slurmctld").arg("-V").output().is_err() {
        return println!("skipped: srun: there is no slurmctld");
    }
    let Some(nodes) = Nodes::make("srun") else { return };
    let slurm = Slurm::start(&nodes);
    for plugin in ["--mpi=pmi2", "--mpi=pmix", "--mpi=none"] {
        let launcher = |each: u32, program: &[String]| {
            let (all, each) = ((2 * each).to_string(), format!("--ntasks-per-node={each}"));
            let words = ["srun", "-N2", "-n", &all, &each, plugin, "--kill-on-bad-exit=0"];
            vec![slurm.words(&nodes, &words, program)]
        };
        manages(plugin, &launcher);
        // The plugin for PMIx ends all ranks.
        if plugin != "--mpi=pmix" {
            outlives(plugin, &launcher);
        }
    }
}
