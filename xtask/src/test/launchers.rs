//! Jobs under real launchers, which come from the package registry.

use std::process::Command;
use std::time::Duration;

use super::step::{Context, Outcome, Stopped};
use crate::child;
use crate::error::TaskError;
use crate::peers::install::{self, MPICH, OPEN_MPI};
use crate::workspace::clean;

/// Time limit of a job of four ranks.
const LIMIT: Duration = Duration::from_secs(60);

/// Hydra, whose ranks find each other by PMI-1.
pub(super) fn step(context: &mut Context) -> Outcome {
    jobs(context, MPICH, &[])
}

/// PRRTE, whose ranks find each other by PMIx.
pub(super) fn long_step(context: &mut Context) -> Outcome {
    jobs(context, OPEN_MPI, &["--allow-run-as-root", "--oversubscribe"])
}

/// Runs the tests of MPI programs with a package, and an example under its launcher: four ranks,
/// each of which gets a message from the one before it.
fn jobs(context: &mut Context, package: &str, options: &[&str]) -> Outcome {
    let target = context.workspace.target.clone();
    let home = install::mpi(package, &target.join("peers")).or_else(Stopped::skipped)?;
    let mut tests = context.workspace.cargo("test --workspace --test cli -- mpi_programs");
    context.run_tests(tests.env("TEST_MPI", &home))?;
    context.run(&mut context.workspace.cargo("build --workspace --example readme"))?;
    let mut job = Command::new(home.join("bin/mpiexec"));
    clean(&mut job);
    job.args(["-n", "4"]).args(options).arg(target.join("debug/examples/readme"));
    println!("$ {}", child::spoken(&job));
    let said = child::read(&mut job, LIMIT)?;
    print!("{said}");
    if is_one_job(&said) {
        return Ok(());
    }
    let expected = "that each of 4 ranks got a message from the one before it";
    Err(TaskError::Output { program: "readme", expected, found: said }.into())
}

fn is_one_job(said: &str) -> bool {
    let line = |rank: u32| format!("rank {rank} got Some(\"ahoy\") from rank {}", (rank + 3) % 4);
    (0..4).all(|rank| said.lines().any(|said| said == line(rank)))
}

#[cfg(test)]
mod tests {
    use super::is_one_job;

    #[test]
    fn four_jobs_of_one_rank_are_not_one_of_four() {
        let line = |rank, from| format!("rank {rank} got Some(\"ahoy\") from rank {from}\n");
        let of_four = |from: [u32; 4]| from.map(|from| line((from + 1) % 4, from)).concat();
        assert!(is_one_job(&of_four([2, 0, 1, 3])));
        assert!(!is_one_job(&of_four([2, 0, 1, 1])));
        assert!(!is_one_job(&line(0, 0).repeat(4)));
    }
}
