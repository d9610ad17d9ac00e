//! Two nodes of this machine. Each is a set of namespaces (network, mounts, host name) that a
//! process holds until its input ends. So the nodes end with their maker, even if that is killed.

use std::env;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;

use crate::{ChildError, Running, Stream, read};

/// Addresses of the nodes.
pub const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// Time in which a node is made, or a network card is set up.
const SOON: Duration = Duration::from_secs(20);

/// Script that makes a node of its number, says so, and holds it. The host table is mounted from
/// memory, so that it leaves no file behind; the view of /sys shows this network's cards.
const HOLD: &str = "\
mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /mnt &&
printf '127.0.0.1 localhost\\n10.77.0.1 node0\\n10.77.0.2 node1\\n' > /mnt/hosts &&
mount --bind /mnt/hosts /etc/hosts && umount /mnt &&
hostname node$0 && ip link set lo up && echo ready && exec cat";

/// Runs a command on the node of this process, in the folder of its caller.
const ENTER: &str = "\
exec nsenter --target \"$0\" --net --mount --uts sh -c 'cd \"$0\" && exec \"$@\"' \"$PWD\" \"$@\"";

/// Program in place of ssh: `FILE [OPTIONS] ADDRESS COMMAND...` runs the command by a shell on the
/// node of that address.
const AGENT: &str = "\
while case $1 in -[polFi]) shift 2 ;; -*) shift ;; *) false ;; esac; do :; done
case $1 in *.1) node=$zero ;; *) node=$one ;; esac; shift
exec nsenter --target $node --net --mount --uts sh -c 'cd \"$0\" && eval \"$1\"' \"$PWD\" \"$*\"
";

/// Two nodes without network cards. What runs on one keeps it alive, also without this.
#[derive(Debug)]
pub struct Nodes {
    holders: [u32; 2],
    /// Shared only so that they end with the nodes.
    _running: Mutex<[Running; 2]>,
}

impl Nodes {
    /// Makes the nodes. It takes root, and the programs of util-linux and iproute2.
    ///
    /// # Errors
    /// When this machine permits none.
    pub fn make() -> Result<Self, ChildError> {
        let running = [hold("0")?, hold("1")?];
        let holders = running.each_ref().map(Running::id);
        Ok(Self { holders, _running: Mutex::new(running) })
    }

    /// Returns the process that holds a node.
    pub fn holder(&self, node: usize) -> u32 {
        self.holders[node]
    }

    /// Returns the words before a program that runs on a node.
    pub fn wrapper(&self, node: usize) -> Vec<String> {
        ["sh", "-c", ENTER, &self.holder(node).to_string()].map(str::to_owned).into()
    }

    /// Runs `ip` with these words on a node, and returns its output.
    ///
    /// # Errors
    /// The errors of [`read`].
    pub fn ip(&self, node: usize, words: &str) -> Result<String, ChildError> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.holder(node).to_string(), "--net", "ip"]);
        read(command.args(words.split(' ')), SOON)
    }

    /// Gives the card `eth0` of a node its address, and sets it up.
    ///
    /// # Errors
    /// When there is no such card.
    pub fn set_up(&self, node: usize) -> Result<(), ChildError> {
        self.ip(node, &format!("address add {}/24 dev eth0", ADDRESSES[node]))?;
        self.ip(node, "link set eth0 up").map(drop)
    }

    /// Writes a program into a folder that takes the place of ssh: `FILE ADDRESS COMMAND...`.
    ///
    /// # Errors
    /// The file system's.
    pub fn agent(&self, folder: &Path) -> io::Result<PathBuf> {
        let [zero, one] = self.holders;
        let path = env::current_dir()?.join(folder).join(format!("agent-{zero}"));
        fs::write(&path, format!("#!/bin/sh\nzero={zero} one={one}\n{AGENT}"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        Ok(path)
    }
}

fn hold(node: &str) -> Result<Running, ChildError> {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--uts", "sh", "-c", HOLD, node]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut holder = Running::start(&mut command)?;
    if holder.next_line(Stream::Out, SOON).is_some() {
        return Ok(holder);
    }
    let heard = holder.heard(SOON)?;
    let status = heard.status.to_string();
    let (command, said) = ("unshare --net --mount --uts".into(), heard.stderr);
    Err(ChildError::Failed { command, status, said })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(test: &str) -> Option<Nodes> {
        Nodes::make().inspect_err(|error| println!("skipped: {test}: {error}")).ok()
    }

    fn on(nodes: &Nodes, node: usize, program: &[&str]) -> Command {
        let words = nodes.wrapper(node);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(program);
        command
    }

    #[test]
    fn a_node_has_its_name_its_hosts_its_network_and_the_folder_of_the_caller() {
        let Some(nodes) = nodes("names of nodes") else { return };
        let script = "hostname; getent hosts node0; ls /sys/class/net; pwd; echo \"$0\"";
        let said = read(on(&nodes, 1, &["sh", "-c", script, "a b"]).current_dir("/usr"), SOON);
        assert_eq!(said.unwrap(), "node1\n10.77.0.1       node0\nlo\n/usr\na b\n");
    }

    #[test]
    fn the_agent_runs_a_command_by_a_shell_on_the_node_of_an_address() {
        let Some(nodes) = nodes("an agent in place of ssh") else { return };
        let agent = nodes.agent(&env::temp_dir()).unwrap();
        let mut command = Command::new(&agent);
        command.args(["-x", "-p", "22", ADDRESSES[1], "hostname;", "echo", "'a b'", "&&", "pwd"]);
        let said = read(command.current_dir("/usr"), SOON);
        fs::remove_file(agent).unwrap();
        assert_eq!(said.unwrap(), "node1\na b\n/usr\n");
    }

    /// Variable of a process that a test starts.
    const ROLE: &str = "TEST_MAKES_NODES";

    /// The process of the test below.
    #[test]
    fn a_process_in_its_role() {
        if env::var_os(ROLE).is_none() {
            return;
        }
        let nodes = Nodes::make().unwrap();
        println!("held {} {}", nodes.holder(0), nodes.holder(1));
        loop {
            std::thread::park();
        }
    }

    #[test]
    fn nodes_end_with_their_maker_also_by_kill_9() {
        let Some(_) = nodes("nodes whose maker is killed") else { return };
        let mut maker = Command::new(env::current_exe().unwrap());
        maker.args(["--exact", "--nocapture", "nodes::tests::a_process_in_its_role"]);
        maker.env(ROLE, "").stdout(Stdio::piped());
        let mut maker = Running::start(&mut maker).unwrap();
        let held = loop {
            let line = maker.next_line(Stream::Out, SOON).unwrap();
            if let Some(held) = line.strip_prefix("held ") {
                break held.to_owned();
            }
        };
        maker.signal(rustix::process::Signal::KILL);
        let began = std::time::Instant::now();
        for holder in held.split(' ') {
            while fs::read_to_string(format!("/proc/{holder}/comm")).is_ok_and(|it| it == "cat\n") {
                assert!(began.elapsed() < SOON, "{holder} still holds a node");
                crate::pause();
            }
        }
    }
}
