//! Two nodes of this machine: network namespaces that a pair of virtual network cards joins.

use std::ffi::OsStr;
use std::process::Command;
use std::time::{Duration, Instant};

use super::cores::Cores;
use crate::error::TaskError;
use crate::workspace::BUILD;

/// Address of a node, in its namespace.
pub(super) const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// The nodes' namespaces, which are removed with it.
#[derive(Debug)]
pub(super) struct Nodes([String; 2]);

impl Nodes {
    /// Makes them. It takes root, and `ip` of iproute2.
    pub(super) fn make() -> Result<Self, TaskError> {
        let nodes = Self([0, 1].map(|node| format!("carrack-{}-{node}", std::process::id())));
        let Self([one, other]) = &nodes;
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
        for name in &self.0 {
            // What is left is reported by `ip`.
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(words: &str) -> Result<(), TaskError> {
    Ok(children::run(Command::new("ip").args(words.split(' ')), BUILD, |_| {})?)
}
