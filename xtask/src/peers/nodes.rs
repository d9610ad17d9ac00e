//! Two nodes of this machine: network namespaces that a pair of virtual network cards joins.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fs_err as fs;

use super::cores::Cores;
use crate::error::TaskError;
use crate::workspace::BUILD;

/// Address of a node, in its namespace.
pub(super) const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// The nodes' namespaces, and a program that takes the place of ssh; they are removed with it.
#[derive(Debug)]
pub(super) struct Nodes([String; 2], PathBuf);

impl Nodes {
    /// Makes them, with a program in `folder`. It takes root, and `ip` of iproute2.
    pub(super) fn make(folder: &Path) -> Result<Self, TaskError> {
        let names = [0, 1].map(|node| format!("carrack-{}-{node}", std::process::id()));
        let agent = folder.join(format!("{}-agent", names[0]));
        let nodes = Self(names, agent);
        let Self([one, other], agent) = &nodes;
        // A launcher takes nodes of one name for one node.
        let script = format!(
            "#!/bin/sh\nwhile case $1 in -*) true ;; *) false ;; esac; do shift; done\n\
             case $1 in *.1) node=0 name={one} ;; *) node=1 name={other} ;; esac; shift\n\
             exec ip netns exec $name unshare --uts sh -c \"hostname node$node; $*\"\n"
        );
        fs::write(agent, script)?;
        fs::set_permissions(agent, Permissions::from_mode(0o755))?;
        for name in [one, other] {
            ip(&format!("netns add {name}"))?;
        }
        ip(&format!("-n {one} link add eth0 type veth peer name eth0 netns {other}"))?;
        for (name, address) in nodes.0.iter().zip(ADDRESSES) {
            ip(&format!("-n {name} address add {address}/24 dev eth0"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
        }
        // A rank publishes the addresses of cards that are up.
        for name in &nodes.0 {
            let words = format!("-n {name} link show dev eth0");
            let began = Instant::now();
            let link = || children::read(Command::new("ip").args(words.split(' ')), BUILD);
            while !link()?.contains("LOWER_UP") && began.elapsed() < Duration::from_secs(5) {}
        }
        Ok(nodes)
    }

    /// Returns the program that takes the place of ssh: `AGENT ADDRESS COMMAND...`.
    pub(super) fn agent(&self) -> &Path {
        &self.1
    }

    /// A command that runs `program` on a node, on these cores.
    pub(super) fn command(
        &self,
        node: usize,
        cores: &[usize],
        program: impl AsRef<OsStr>,
    ) -> Command {
        let pinned = Cores::pin(cores, program);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[node]]);
        command.arg(pinned.get_program()).args(pinned.get_args());
        command
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.1);
        for name in &self.0 {
            // What is left is reported by `ip`.
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(words: &str) -> Result<(), TaskError> {
    Ok(children::run(Command::new("ip").args(words.split(' ')), BUILD, |_| {})?)
}
