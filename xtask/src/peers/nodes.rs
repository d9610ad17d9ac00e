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

/// A program that takes the place of ssh.
const AGENT: &str = include_str!("../../../tests/support/src/agent.sh");

/// The nodes' namespaces, and a program that takes the place of ssh; they are removed with it.
#[derive(Debug)]
pub(super) struct Nodes([String; 2], PathBuf);

impl Nodes {
    /// Makes them, with a program in `folder`. It takes root, and `ip` of iproute2.
    pub(super) fn make(folder: &Path) -> Result<Self, TaskError> {
        let names = [0, 1].map(|node| format!("carrack-{}-{node}", std::process::id()));
        let agent = folder.join(format!("{}-agent", names[0]));
        let nodes = Self(names, agent);
        let Self([zero, one], agent) = &nodes;
        fs::write(agent, format!("#!/bin/sh\nzero={zero} one={one}\n{AGENT}"))?;
        fs::set_permissions(agent, Permissions::from_mode(0o755))?;
        for name in [zero, one] {
            ip(&format!("netns add {name}"))?;
        }
        ip(&format!("-n {zero} link add eth0 type veth peer name eth0 netns {one}"))?;
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
            let mut found = link()?;
            while !found.contains("LOWER_UP") {
                if began.elapsed() > Duration::from_secs(5) {
                    let (program, expected) = ("ip", "that the network card is up");
                    return Err(TaskError::Output { program, expected, found });
                }
                found = link()?;
            }
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
