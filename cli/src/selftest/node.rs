//! Choice of the rank that does the work of a node.
//!
//! Launchers give ranks their number in the job by environment variables, and most of them the
//! number on the node, too. If the launcher gives only the former, the first rank to come on a
//! node does its work.

use carrack::bootstrap::launchers::{LAUNCHERS, Launcher};
use carrack::bootstrap::tcp::variables::{LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// `carrack run`, whose ranks are all on one node.
const OURS: Launcher = Launcher {
    name: "carrack run",
    mark: "CARRACK_RANK",
    rank: "CARRACK_RANK",
    size: "CARRACK_SIZE",
    rank_on_node: "CARRACK_RANK",
    size_on_node: "CARRACK_SIZE",
    nodes: "",
};

/// torchrun, and `carrack run` where it starts the ranks of one node of several.
const TORCHRUN: Launcher = Launcher {
    name: "torchrun's variables",
    mark: LOCAL_RANK,
    rank: RANK,
    size: WORLD_SIZE,
    rank_on_node: LOCAL_RANK,
    size_on_node: LOCAL_WORLD_SIZE,
    nodes: "",
};

/// Variables that tell one job of a launcher from another on the same node.
const JOBS: [&str; 3] = ["PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID"];

/// This process among those of its node.
pub(super) struct Node {
    /// Launcher and rank of this process; `None` without a launcher.
    launched: Option<LaunchedRank>,
    /// Socket that holds the work of the node, if this process was the first to come.
    turn: Option<UnixListener>,
}

#[derive(Debug, PartialEq, Eq)]
struct LaunchedRank {
    launcher: &'static str,
    rank: u32,
    /// Local rank; `None` if the launcher does not tell it.
    on_node: Option<u32>,
    /// `true` if the job may have other nodes.
    has_others: bool,
}

impl LaunchedRank {
    fn find(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let number = |name: &str| variable(name)?.trim().parse::<u32>().ok();
        [OURS, TORCHRUN]
            .iter()
            .chain(LAUNCHERS)
            .filter(|launcher| launcher.is_marked(&variable))
            .find_map(|launcher| {
                let Launcher { name, rank, size, rank_on_node, size_on_node, nodes, .. } =
                    *launcher;
                let has_others = match (number(size), number(size_on_node), number(nodes)) {
                    (_, _, Some(nodes)) => nodes > 1,
                    (Some(size), Some(here), _) => size > here,
                    (size, ..) => size != Some(1),
                };
                Some(Self {
                    launcher: name,
                    rank: number(rank)?,
                    on_node: number(rank_on_node),
                    has_others,
                })
            })
    }
}

impl Node {
    pub(super) fn of_this_process() -> Self {
        let launched = LaunchedRank::find(|name| std::env::var(name).ok());
        let is_untold = launched.as_ref().is_some_and(|launched| launched.on_node.is_none());
        Self { launched, turn: if is_untold { first_come() } else { None } }
    }

    /// Returns the reason why this process does nothing, if another one does the work of its node.
    pub(super) fn stands_by(&self) -> Option<String> {
        let LaunchedRank { launcher, rank, on_node, .. } = self.launched.as_ref()?;
        match on_node {
            Some(0) => None,
            Some(_) => {
                Some(format!("rank {rank} of {launcher} leaves this node to the first rank on it"))
            }
            None if self.turn.is_some() => None,
            None => Some(format!(
                "rank {rank} of {launcher} leaves this node to another rank, which came first"
            )),
        }
    }

    /// Describes the launcher in words.
    pub(super) fn launcher(&self) -> String {
        self.launched.as_ref().map_or_else(
            || "none".into(),
            |LaunchedRank { launcher, rank, .. }| format!("{launcher}, rank {rank}"),
        )
    }

    /// Returns the suffix of the report's file names, if several nodes write reports.
    pub(super) fn suffix(&self) -> Option<String> {
        self.launched.as_ref().filter(|launched| launched.has_others).map(|_| host())
    }
}

/// Returns this machine's name, with only those characters that a file name can have.
pub(super) fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '-' })
        .collect()
}

/// Takes the work of this node, unless another process of the same job has it. The name in the
/// abstract namespace ends with its process.
fn first_come() -> Option<UnixListener> {
    let job = JOBS.iter().find_map(|name| std::env::var(name).ok());
    // The ranks of a node have the same parent, as a rule.
    let job = job.unwrap_or_else(|| {
        rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get()).to_string()
    });
    let name = format!("carrack-selftest-{}-{job}", rustix::process::getuid().as_raw());
    let address = SocketAddr::from_abstract_name(name.as_bytes()).ok()?;
    UnixListener::bind_addr(&address).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launched(variables: &[(&str, &str)]) -> Option<LaunchedRank> {
        LaunchedRank::find(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn without_a_launcher_no_rank_is_found_and_all_is_done_here() {
        assert_eq!(launched(&[("PATH", "/bin"), ("PMI_RANK", "none")]), None);
        let batch = [("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NNODES", "2")];
        assert_eq!(launched(&batch), None, "a batch script is on one node");
        let node = Node { launched: None, turn: None };
        assert_eq!((node.stands_by(), node.suffix(), node.launcher()), (None, None, "none".into()));
    }

    #[test]
    fn each_launcher_is_known_by_its_variables_and_one_rank_of_a_node_works() {
        let ours = launched(&[("CARRACK_RANK", "1"), ("CARRACK_SIZE", "2")]).unwrap();
        assert_eq!(
            ours,
            LaunchedRank { launcher: "carrack run", rank: 1, on_node: Some(1), has_others: false }
        );
        let torchrun =
            launched(&[(RANK, "3"), (WORLD_SIZE, "4"), (LOCAL_RANK, "1"), (LOCAL_WORLD_SIZE, "2")]);
        let launcher = "torchrun's variables";
        assert_eq!(
            torchrun.unwrap(),
            LaunchedRank { launcher, rank: 3, on_node: Some(1), has_others: true }
        );
        let within_slurm = [
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let open_mpi = launched(&within_slurm).unwrap();
        assert_eq!(
            open_mpi,
            LaunchedRank { launcher: "Open MPI", rank: 5, on_node: Some(1), has_others: true }
        );
        assert!(
            Node { launched: Some(open_mpi), turn: None }
                .stands_by()
                .unwrap()
                .contains("rank 5 of Open MPI")
        );
        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_PROCID", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NNODES", "2"),
        ];
        let slurm = launched(&slurm).unwrap();
        assert_eq!(
            slurm,
            LaunchedRank { launcher: "Slurm", rank: 4, on_node: Some(0), has_others: true }
        );
        let node = Node { launched: Some(slurm), turn: None };
        assert_eq!((node.stands_by(), node.suffix()), (None, Some(host())));
        let hydra = [
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "1"),
            ("MPI_LOCALNRANKS", "2"),
        ];
        assert_eq!(launched(&hydra).unwrap().launcher, "Hydra");
        let told_little = launched(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]).unwrap();
        let launcher = "a launcher with PMI";
        assert_eq!(
            told_little,
            LaunchedRank { launcher, rank: 1, on_node: None, has_others: true }
        );
        assert!(
            Node { launched: Some(told_little), turn: None }
                .stands_by()
                .unwrap()
                .contains("came first")
        );
    }
}
