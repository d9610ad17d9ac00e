//! The variables of launchers.
//!
//! A process that cannot find its job, although a launcher started it as one of several, must not
//! silently run as a job of one.

#![forbid(unsafe_code)]

use super::error::BootstrapError;

/// The environment variables of a launcher. A name is empty where the launcher has no such
/// variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launcher {
    /// The name of the launcher.
    pub name: &'static str,
    /// The variable that only the processes of this launcher have.
    pub mark: &'static str,
    /// The number of a process in the job.
    pub rank: &'static str,
    /// The number of processes of the job.
    pub size: &'static str,
    /// The number of a process among those of its node.
    pub rank_on_node: &'static str,
    /// The number of processes of the job on the node.
    pub size_on_node: &'static str,
    /// The number of nodes of the job.
    pub nodes: &'static str,
}

/// Makes the table of launchers: name and mark; rank and size; on the node, rank and size; nodes.
macro_rules! launchers {
    ($($name:literal $mark:literal: $rank:literal $size:literal,
        $rank_on_node:literal $size_on_node:literal $nodes:literal;)*) => {
        &[$(Launcher {
            name: $name,
            mark: $mark,
            rank: $rank,
            size: $size,
            rank_on_node: $rank_on_node,
            size_on_node: $size_on_node,
            nodes: $nodes,
        }),*]
    };
}

/// The known launchers, the innermost first: within a Slurm job another launcher's variables are
/// more exact than Slurm's. An MPI library's launcher also sets the variables of PMI or PMIx, so
/// those rows come last.
pub const LAUNCHERS: &[Launcher] = launchers! {
    "jsrun" "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_RANK" "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK" "JSM_NAMESPACE_LOCAL_SIZE" "";
    "Open MPI" "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_RANK" "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK" "OMPI_COMM_WORLD_LOCAL_SIZE" "";
    "MVAPICH" "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_RANK" "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK" "MV2_COMM_WORLD_LOCAL_SIZE" "";
    "Hydra" "MPI_LOCALRANKID": "PMI_RANK" "PMI_SIZE",
        "MPI_LOCALRANKID" "MPI_LOCALNRANKS" "";
    "PALS" "PALS_RANKID": "PALS_RANKID" "PALS_SIZE",
        "PALS_LOCAL_RANKID" "PALS_LOCAL_SIZE" "";
    "Flux" "FLUX_TASK_RANK": "FLUX_TASK_RANK" "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID" "" "FLUX_JOB_NNODES";
    // Batch scripts and the shells of salloc have SLURM_PROCID or SLURM_NTASKS as well. Only tasks
    // of srun have this mark.
    "Slurm" "SLURM_STEP_NUM_TASKS": "SLURM_PROCID" "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID" "" "SLURM_NNODES";
    "a launcher with PMIx" "PMIX_RANK": "PMIX_RANK" "PMIX_SIZE",
        "" "" "";
    "a launcher with PMI" "PMI_RANK": "PMI_RANK" "PMI_SIZE",
        "" "" "";
    "a launcher with PMI" "PMI_ID": "PMI_ID" "",
        "" "" "";
};

impl Launcher {
    /// Returns `true` if the variables are those of a process of this launcher.
    pub fn is_marked(&self, variable: impl Fn(&str) -> Option<String>) -> bool {
        variable(self.mark).is_some()
    }
}

/// Refuses to run this process as a job of one where a launcher started it as one of several.
/// Checks all launchers: a launcher of one process may itself run within a launcher of several.
pub(super) fn refuse(variable: impl Fn(&str) -> Option<String>) -> Result<(), BootstrapError> {
    let size = |launcher: &Launcher| variable(launcher.size)?.trim().parse::<u32>().ok();
    let marked = || LAUNCHERS.iter().filter(|launcher| launcher.is_marked(&variable));
    let most = marked().filter_map(size).max();
    let Some(launcher) =
        marked().find(|launcher| size(launcher) != Some(1)).filter(|_| most != Some(1))
    else {
        return Ok(());
    };
    let mut names = vec![launcher.mark, launcher.rank, launcher.size];
    names.sort_unstable();
    names.dedup();
    let told = names.into_iter().filter_map(|name| Some(format!("{name}={}", variable(name)?)));
    let variables = told.collect::<Vec<_>>().join(", ");
    Err(BootstrapError::OtherLauncher { launcher: launcher.name, variables })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(variables: &[(&str, &str)]) -> Option<String> {
        let variable = |wanted: &str| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        };
        refuse(variable).err().map(|error| error.to_string())
    }

    #[test]
    fn one_process_of_several_is_refused_by_each_launchers_name_and_variables() {
        for launcher in LAUNCHERS {
            let variables = [(launcher.mark, "1"), (launcher.rank, "1"), (launcher.size, "2")];
            let variables: Vec<_> =
                variables.into_iter().filter(|(name, _)| !name.is_empty()).collect();
            // Slurm's mark is its size.
            let first =
                if launcher.mark == launcher.size { variables[1..].to_vec() } else { variables };
            let why = refused(&first).unwrap_or_else(|| panic!("{} is not seen", launcher.name));
            for part in [
                launcher.name,
                launcher.rank,
                launcher.size,
                "CARRACK_BOOTSTRAP=alone",
                "carrack run",
            ] {
                assert!(why.contains(part), "{part}: {why}");
            }
        }
    }

    #[test]
    fn the_only_process_of_a_launcher_is_alone() {
        assert_eq!(refused(&[("PATH", "/bin")]), None);
        for launcher in LAUNCHERS.iter().filter(|launcher| !launcher.size.is_empty()) {
            let alone = [(launcher.size, "1"), (launcher.mark, "0"), (launcher.rank, "0")];
            assert_eq!(refused(&alone), None, "{}", launcher.name);
        }
        // PMIx has no variable of the size here; Slurm has.
        let task = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("PMIX_RANK", "0")];
        assert_eq!(refused(&task), None);
    }

    #[test]
    fn batch_scripts_and_shells_of_a_slurm_job_are_alone() {
        let batch = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_ID", "7"),
        ];
        assert_eq!(refused(&batch), None);
        assert_eq!(refused(&[("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")]), None);
    }

    #[test]
    fn of_several_launchers_one_that_started_several_counts_and_the_innermost_is_named() {
        let of_slurm = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")];
        let within = |others: &[(&'static str, &'static str)]| {
            refused(&[others, &of_slurm].concat()).unwrap()
        };
        let hydra = [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "1")];
        assert!(within(&hydra).contains("Hydra"));
        let alone = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        assert!(within(&alone).contains("Slurm"));
    }

    #[test]
    fn a_size_that_is_not_told_or_no_number_is_not_taken_for_one() {
        assert!(refused(&[("PMIX_RANK", "0")]).unwrap().contains("PMIX_RANK=0"));
        assert!(
            refused(&[("PMI_RANK", "0"), ("PMI_SIZE", "many")]).unwrap().contains("PMI_SIZE=many")
        );
    }
}
