//! Jobs over several nodes: the command is started once on each, and ranks meet over TCP.
//!
//! The ranks get torchrun's variables in place of a socket to the keeper, which then watches over
//! the ranks of its node only.

use std::fmt;
use std::net::ToSocketAddrs as _;
use std::time::Duration;

use carrack::bootstrap::MAX_JOB;
use carrack::bootstrap::tcp::StandIn;
use carrack::bootstrap::tcp::variables::{
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RANK, RUN_ID, WORLD_SIZE,
};
use clap::Args;

use crate::args;

/// The name of each run of several nodes.
pub(super) const RUN: &str = "carrack run";

/// The nodes of a job, and the place of this one.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Nodes {
    /// Number of nodes; this command is started once on each.
    #[arg(long = "nodes", value_name = "M", value_parser = parse_count)]
    #[arg(requires_all = ["place", "at"])]
    count: Option<u32>,

    /// Number of this node, from 0.
    #[arg(long = "node", value_name = "K", requires = "count")]
    place: Option<u32>,

    /// Address of node 0, and a port that is free there.
    #[arg(long, value_name = "HOST:PORT", requires = "count", value_parser = parse_at)]
    at: Option<At>,
}

/// The address of rank 0.
#[derive(Clone, Debug)]
struct At {
    host: String,
    port: u16,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Nodes {
    /// Returns the reason why there are no such nodes with this number of ranks on each.
    pub(super) fn fault(&self, ranks: u32) -> Option<String> {
        let (count, place) = (self.count?, self.place?);
        let size = count.saturating_mul(ranks);
        if size > MAX_JOB {
            return Some(format!(
                "{count} nodes of {ranks} ranks exceed the limit of {MAX_JOB}: start fewer"
            ));
        }
        (place >= count)
            .then(|| format!("--node {place} is not below --nodes {count}: count nodes from 0"))
    }

    /// Returns the reason why node 0 has no such address, where this is node 0. Elsewhere a name
    /// may come to exist while ranks wait for rank 0.
    pub(super) fn unresolved(&self) -> Option<String> {
        let At { host, port } = self.at.as_ref().filter(|_| self.place == Some(0))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let resolve = || (host, *port).to_socket_addrs().err();
        // The first try may meet a server of names that does not answer for a moment.
        let error = resolve().and_then(|_| {
            std::thread::sleep(Duration::from_secs(1));
            resolve()
        })?;
        Some(format!("{host} of --at cannot be resolved: {error}; name an address of this machine"))
    }

    /// Returns the rank in the job of a rank of this node.
    pub(super) fn rank(&self, of_node: u32, ranks: u32) -> u32 {
        self.place.unwrap_or(0) * ranks + of_node
    }

    /// Returns the variables of a rank of this node; none on the only node.
    pub(super) fn variables(&self, of_node: u32, ranks: u32) -> Vec<(&'static str, String)> {
        let (Some(count), Some(at)) = (self.count, &self.at) else { return Vec::new() };
        vec![
            (RANK, self.rank(of_node, ranks).to_string()),
            (WORLD_SIZE, (count * ranks).to_string()),
            (LOCAL_RANK, of_node.to_string()),
            (LOCAL_WORLD_SIZE, ranks.to_string()),
            (MASTER_ADDR, at.host.clone()),
            (MASTER_PORT, at.port.to_string()),
            ("CARRACK_PORT", at.port.to_string()),
            // So these come before what another launcher has set.
            (RUN_ID, RUN.into()),
        ]
    }

    /// Answers for rank 0 of a job of several nodes, which has ended here: ranks that call it are
    /// told `how`.
    pub(super) fn stand_in(&self, rank: u32, how: &str) -> Option<StandIn> {
        let At { host, port } = self.at.as_ref().filter(|_| self.rank(rank, 1) == 0)?;
        let advice = "look for its own messages first, and start the job again";
        let why = format!("rank 0 {how}; {advice}");
        // It fails where another process has the port, which answers.
        StandIn::open(host, *port, why).ok()
    }

    /// Returns these options as arguments of a command.
    pub(super) fn to_args(&self) -> Vec<String> {
        let Self { count, place, at } = self;
        let count = count.map(|count| format!("--nodes={count}"));
        let place = place.map(|place| format!("--node={place}"));
        let at = at.as_ref().map(|at| format!("--at={at}"));
        [count, place, at].into_iter().flatten().collect()
    }
}

fn parse_count(text: &str) -> Result<u32, String> {
    args::number(text, 1..=MAX_JOB, &format!("a job has 1 to {MAX_JOB} nodes"))
}

fn parse_at(text: &str) -> Result<At, String> {
    let at = text.rsplit_once(':').and_then(|(host, port)| {
        let port = port.parse().ok().filter(|port| *port > 0)?;
        (!host.is_empty()).then(|| At { host: host.to_owned(), port })
    });
    at.ok_or_else(|| "give an address and a port, such as node0:7000 or [fd00::1]:7000".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct NodesCommand {
        #[command(flatten)]
        nodes: Nodes,
    }

    fn nodes(args: &[&str]) -> Option<Nodes> {
        Some(NodesCommand::try_parse_from([&["x"], args].concat()).ok()?.nodes)
    }

    #[test]
    fn a_node_has_its_ranks_and_says_what_it_was_told() {
        let one = nodes(&["--nodes", "3", "--node", "1", "--at", "[fd00::1]:7000"]).unwrap();
        assert_eq!((one.rank(0, 4), one.rank(3, 4), one.fault(4)), (4, 7, None));
        let variables = one.variables(3, 4);
        for (name, value) in [(RANK, "7"), (WORLD_SIZE, "12"), (MASTER_ADDR, "[fd00::1]")] {
            assert!(variables.contains(&(name, value.into())), "{variables:?}");
        }
        assert_eq!(one.to_args(), ["--nodes=3", "--node=1", "--at=[fd00::1]:7000"]);
        let only = nodes(&[]).unwrap();
        assert!(only.variables(0, 4).is_empty() && only.to_args().is_empty());
        assert_eq!((only.rank(2, 4), only.fault(4)), (2, None));
    }

    #[test]
    fn half_a_description_and_nodes_that_there_are_not_are_refused() {
        for wrong in [
            &["--nodes", "2"][..],
            &["--node", "0"],
            &["--nodes", "2", "--node", "0", "--at", "host"],
            &["--nodes", "2", "--node", "0", "--at", ":7000"],
            &["--nodes", "2", "--node", "0", "--at", "host:0"],
            &["--nodes", "0", "--node", "0", "--at", "host:1"],
        ] {
            assert!(nodes(wrong).is_none(), "{wrong:?}");
        }
        let place = |place| nodes(&["--nodes", "2", "--node", place, "--at", "host:1"]).unwrap();
        let unresolved = |at| {
            let nodes = nodes(&["--nodes", "2", "--node", "0", "--at", at]).unwrap();
            nodes.unresolved()
        };
        assert!(unresolved("no-such-host.invalid:1").unwrap().contains("cannot be resolved"));
        assert_eq!((unresolved("127.0.0.1:1"), unresolved("[::1]:1")), (None, None));
        assert!(place("2").fault(1).unwrap().contains("--node 2"));
        assert!(place("1").fault(MAX_JOB).unwrap().contains("exceed"));
    }
}
