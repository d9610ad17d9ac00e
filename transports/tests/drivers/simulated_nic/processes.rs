//! Two processes of one machine. The other one is this very program, which runs one test and
//! carries out commands in it.

use crate::verbs::*;
use carrack_simulators::nic::{Config, FABRIC_VARIABLE, SimulatedNic};
use carrack_transports::verbs::sys::bindings as ibv;
use children::{Running, Stream};
use std::io::{PipeWriter, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable that gives the other process its task.
const VARIABLE: &str = "TEST_SIMULATED_NIC_PEER";
/// Bytes of the other process's buffer.
const LEN: usize = 300_000;

/// The other process.
struct Peer {
    process: Running,
    to: PipeWriter,
}

impl Peer {
    fn start(fabric: &str, kind: &str) -> Self {
        let (commands, to) = std::io::pipe().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "simulated_nic::processes::the_other_process", "--nocapture"])
            .env(VARIABLE, kind)
            .env(FABRIC_VARIABLE, fabric)
            .stdin(commands)
            .stdout(Stdio::piped());
        Self { process: Running::start(&mut command).unwrap(), to }
    }

    fn tell(&mut self, numbers: &[u64]) {
        writeln!(self.to, "{}", words(numbers)).unwrap();
    }

    fn hear(&mut self) -> Vec<u64> {
        loop {
            let line = self.process.next_line(Stream::Out, Duration::from_secs(300));
            let line = line.expect("the other process has ended, or hangs");
            // Output of libtest stands on the same lines.
            if let Some((_, numbers)) = line.split_once('@') {
                return numbers.split_whitespace().map(|word| word.parse().unwrap()).collect();
            }
        }
    }
}

fn words(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

/// Returns a network name of the test's own.
fn fabric(test: &str) -> String {
    format!("{test} of {}", std::process::id())
}

fn gid_words(gid: [u8; 16]) -> [u64; 2] {
    let (high, low) = gid.split_at(8);
    [high, low].map(|half| u64::from_be_bytes(half.try_into().unwrap()))
}

/// Returns the route to a GID that came as two words.
fn route(node: &Node, gid: &[u64]) -> ibv::ibv_ah_attr {
    let mut route = node.route_to(node);
    let raw = [gid[0].to_be_bytes(), gid[1].to_be_bytes()].concat();
    route.grh.dgid = ibv::ibv_gid { raw: raw.try_into().unwrap() };
    route
}

fn options() -> Options {
    Options { timeout: 10, retries: 3, ..Options::default() }
}

/// Does nothing in a normal test run; carries out commands in a process that another test started.
#[test]
fn the_other_process() {
    let Ok(kind) = std::env::var(VARIABLE) else { return };
    if kind == "engines" {
        return count_engines();
    }
    let nic = SimulatedNic::from_env().unwrap();
    let node = Node::open(&nic.verbs(), "sim0");
    let options = options();
    let (qp, buffer) = (node.queue_pair(&options, None), node.buffer(LEN));
    let (addr, key) = buffer.remote(0);
    let [high, low] = gid_words(node.gid.gid);
    println!("@ {}", words(&[high, low, u64::from(qp.number()), addr, u64::from(key)]));
    let mut lines = std::io::stdin().lines();
    let mut hear = || -> Option<Vec<u64>> {
        let line = lines.next()?.ok()?;
        Some(line.split_whitespace().map(|word| word.parse().unwrap()).collect())
    };
    let Some(peer) = hear() else { return };
    bring_up(&qp, &route(&node, &peer), peer[2] as u32, 5, &options);
    post_receive(&qp, 1, &[buffer.whole()]);
    post_receive(&qp, 2, &[buffer.whole()]);
    println!("@ 1");
    // From here on the program only answers questions on its memory; the NIC works by itself.
    while let Some(wanted) = hear() {
        if wanted == [0] {
            println!("@ {}", checksum(&buffer.read(0..LEN)));
        } else {
            let found = node.success();
            println!("@ {} {}", found.wr_id, found.byte_len);
        }
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(5381, |sum: u64, byte| sum.wrapping_mul(33).wrapping_add(u64::from(*byte)))
}

struct Connected {
    peer: Peer,
    qp: std::sync::Arc<carrack_transports::verbs::sys::QueuePair>,
    node: Node,
    /// Returns the other process's memory.
    remote: (u64, u32),
    nic: SimulatedNic,
}

fn connected(test: &str) -> Connected {
    let fabric = fabric(test);
    let nic =
        SimulatedNic::new(Config { fabric: Some(fabric.clone()), ..Config::default() }).unwrap();
    let node = Node::open(&nic.verbs(), "sim0");
    let mut peer = Peer::start(&fabric, "reliable");
    let told = peer.hear();
    let options = options();
    let qp = node.queue_pair(&options, None);
    let [high, low] = gid_words(node.gid.gid);
    assert_ne!([high, low], told[..2], "two processes have two addresses");
    peer.tell(&[high, low, u64::from(qp.number())]);
    bring_up(&qp, &route(&node, &told), told[2] as u32, 5, &options);
    assert_eq!(peer.hear(), [1]);
    let remote = (told[3], told[4] as u32);
    Connected { peer, qp, node, remote, nic }
}

#[test]
fn two_processes_exchange_everything_while_one_does_nothing() {
    let Connected { mut peer, qp, node, remote: (addr, key), nic, .. } = connected("exchange");
    let mine = node.buffer(LEN);
    let sent = mine.fill(7);
    Request::write(&[mine.whole()], (addr, key)).post(&qp);
    node.success();
    peer.tell(&[0]);
    assert_eq!(peer.hear(), [checksum(&sent)]);
    mine.write(0, &[0; 1000]);
    Request::read(&[mine.whole()], (addr, key)).post(&qp);
    node.success();
    assert!(mine.read(0..LEN) == sent);
    Request::fetch_add(mine.piece(0..8), (addr, key), 1).post(&qp);
    node.success();
    assert_eq!(mine.read(0..8), sent[..8]);
    Request::send(&[mine.piece(0..99_999)]).post(&qp);
    node.success();
    peer.tell(&[1]);
    assert_eq!(peer.hear(), [1, 99_999]);
    Request::write(&[mine.piece(0..5)], (addr, key)).immediate(3).post(&qp);
    node.success();
    peer.tell(&[1]);
    assert_eq!(peer.hear(), [2, 5]);
    Request::write(&[mine.piece(0..8)], (addr, key ^ 1)).post(&qp);
    assert_eq!(node.completion().status, ibv::IBV_WC_REM_ACCESS_ERR);
    drop((qp, mine, node, nic));
}

#[test]
fn a_process_that_is_killed_is_silence_until_the_retries_have_failed() {
    for posted_before in [true, false] {
        let Connected { mut peer, qp, node, remote, nic, .. } = connected("killed");
        let mine = node.buffer(LEN);
        Request::write(&[mine.whole()], remote).post(&qp);
        node.success();
        let write = |id| Request::write(&[mine.whole()], remote).id(id).post(&qp);
        if posted_before {
            (0..20).for_each(write);
        }
        peer.process.signal(rustix::process::Signal::KILL);
        peer.process.end();
        write(100);
        let failed = loop {
            let found = node.completion();
            if found.status != ibv::IBV_WC_SUCCESS {
                break found;
            }
        };
        if failed.wr_id != 100 {
            while node.completion().wr_id != 100 {}
        }
        assert_eq!(failed.status, ibv::IBV_WC_RETRY_EXC_ERR);
        assert_eq!(qp.state().unwrap(), ibv::IBV_QPS_ERR);
        drop((qp, mine, node, nic));
    }
}

#[test]
fn a_process_that_is_stopped_fails_no_request() {
    let Connected { peer, qp, node, remote, nic, .. } = connected("stopped");
    let mine = node.buffer(1000);
    let pid = rustix::process::Pid::from_raw(peer.process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // It has stopped when its parent is told.
    rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED).unwrap();
    Request::write(&[mine.whole()], remote).post(&qp);
    // Longer than all timeouts together: a real NIC would answer. This one cannot answer, but
    // loses nothing either.
    assert!(completion_within(&node.cq, Duration::from_millis(40)).is_none());
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    node.success();
    drop((qp, mine, node, nic));
}

#[test]
fn what_comes_over_a_socket_and_is_no_packet_ends_that_connection_only() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, send, socket};
    let Connected { qp, node, remote, nic, peer, .. } = connected("rubbish");
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let names =
        sockets.lines().filter_map(|line| line.split_once('@')).map(|(_, name)| name.to_owned());
    let names: Vec<String> =
        names.filter(|name| name.starts_with("carrack-simulated-nic-")).collect();
    assert!(!names.is_empty());
    for (name, rubbish) in
        names.iter().flat_map(|name| [(name, vec![7; 10]), (name, vec![0; 70_000]), (name, vec![])])
    {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        if rustix::net::connect(
            &socket,
            &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap(),
        )
        .is_ok()
        {
            let _ = send(&socket, &rubbish, rustix::net::SendFlags::NOSIGNAL);
            assert!(readable(socket.as_fd(), PATIENCE), "it hangs up");
        }
    }
    let mine = node.buffer(1000);
    Request::write(&[mine.whole()], remote).post(&qp);
    node.success();
    drop((qp, mine, node, nic, peer));
}

#[test]
fn two_nics_of_one_process_meet_on_a_network_that_both_name() {
    let config = || Config { fabric: Some(fabric("meeting")), ..Config::default() };
    let (one, other) = (SimulatedNic::new(config()).unwrap(), SimulatedNic::new(config()).unwrap());
    let (a, b) = (Node::open(&one.verbs(), "sim0"), Node::open(&other.verbs(), "sim0"));
    let options = Options::default();
    let (qa, qb) = (a.queue_pair(&options, None), b.queue_pair(&options, None));
    connect(&a, &qa, &b, &qb, &options);
    let (from, to) = (a.buffer(100), b.buffer(100));
    let sent = from.fill(1);
    Request::write(&[from.whole()], to.remote(0)).post(&qa);
    a.success();
    assert_eq!(to.read(0..100), sent);
}

/// Returns the number of engines of this process.
fn engines() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
    };
    tasks.filter(|task| name(task).starts_with("simulated-nic")).count()
}

fn count_engines() {
    let on = |fabric: Option<&str>, devices| {
        SimulatedNic::new(Config { fabric: fabric.map(str::to_owned), ..Config::devices(devices) })
            .unwrap()
    };
    let deadline = Instant::now() + PATIENCE;
    // Threads start, get their names, and end at times of their own.
    let becomes = |wanted| {
        let mut count = engines();
        while count != wanted && Instant::now() < deadline {
            std::thread::yield_now();
            count = engines();
        }
        count
    };
    let named = fabric("engines");
    let nics = [on(None, 300), on(Some(&named), 300), on(Some(&named), 1)];
    let node = Node::open(&nics[0].verbs(), "sim299");
    let all = becomes(2);
    drop(nics);
    // A context that is open keeps its device, and the device keeps the engine.
    let with_a_context = becomes(1);
    let _without_devices = on(None, 0);
    drop(node);
    println!("@ {all} {with_a_context} {}", becomes(0));
}

#[test]
fn a_network_has_one_engine_a_process_which_ends_with_the_last_device() {
    assert_eq!(Peer::start("", "engines").hear(), [2, 1, 0]);
}
