//! Two nodes of this machine that a pair of virtual network cards joins.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::process::geteuid;

use super::cores::Cores;
use crate::error::TaskError;

/// The nodes, and a program that takes the place of ssh, which is removed with them.
#[derive(Debug)]
pub(super) struct Nodes {
    nodes: children::Nodes,
    agent: PathBuf,
}

impl Nodes {
    /// Makes them, with a program in `folder`.
    pub(super) fn make(folder: &Path) -> Result<Self, TaskError> {
        if !geteuid().is_root() {
            return Err(TaskError::Missing {
                what: "the right to make network namespaces, which rows of tcp take,".into(),
                remedy: "run this as root, or name other rows",
            });
        }
        let nodes = children::Nodes::make()?;
        let to = nodes.holder(1);
        nodes.ip(0, &format!("link add eth0 type veth peer name eth0 netns {to}"))?;
        for node in 0..2 {
            nodes.set_up(node)?;
        }
        // A rank publishes the addresses of cards that are up.
        for node in 0..2 {
            let began = Instant::now();
            let link = || nodes.ip(node, "link show dev eth0");
            let mut found = link()?;
            while !found.contains("LOWER_UP") {
                if began.elapsed() > Duration::from_secs(5) {
                    let (program, expected) = ("ip", "that the network card is up");
                    return Err(TaskError::Output { program, expected, found });
                }
                found = link()?;
            }
        }
        let agent = nodes.agent(folder)?;
        Ok(Self { nodes, agent })
    }

    /// Returns the program that takes the place of ssh: `AGENT ADDRESS COMMAND...`.
    pub(super) fn agent(&self) -> &Path {
        &self.agent
    }

    /// Returns a command that runs `program` on a node, on these cores.
    pub(super) fn command(
        &self,
        node: usize,
        cores: &[usize],
        program: impl AsRef<OsStr>,
    ) -> Command {
        let (words, pinned) = (self.nodes.wrapper(node), Cores::pin(cores, program));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(pinned.get_program()).args(pinned.get_args());
        command
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.agent);
    }
}
