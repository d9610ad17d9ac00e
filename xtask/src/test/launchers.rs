//! Jobs under real launchers, which come from the package registry.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::step::{Context, Outcome, Stopped};
use super::steps;
use crate::apt;
use crate::error::TaskError;
use crate::peers::install::{self, MPICH, OPEN_MPI};
use crate::workspace::clean;

/// Time limit of a job of four ranks.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs the jobs under Hydra, whose ranks find each other by PMI-1.
pub(super) fn step(context: &mut Context) -> Outcome {
    jobs(context, MPICH, &[])
}

/// Runs the jobs under PRRTE, whose ranks find each other by PMIx.
pub(super) fn long_step(context: &mut Context) -> Outcome {
    jobs(context, OPEN_MPI, &["--allow-run-as-root", "--oversubscribe"])
}

/// Runs the tests of MPI programs with a package, and an example under its launcher. Its four ranks
/// each get a message from the one before.
fn jobs(context: &mut Context, package: &str, options: &[&str]) -> Outcome {
    let target = context.workspace.target.clone();
    let home = install::mpi(package, &target.join("peers")).or_else(Stopped::skipped)?;
    let mut tests = context.workspace.cargo("test --workspace --test cli -- mpi_programs");
    context.run_tests(tests.env("TEST_MPI", &home))?;
    if steps::need_nodes().is_ok() {
        let nodes = "test --workspace --test host -- --ignored --nocapture launchers_of_mpi";
        context.run_tests(context.workspace.cargo(nodes).env("TEST_MPI", &home))?;
    }
    context.run(&mut context.workspace.cargo("build --workspace --example readme"))?;
    let expected = "that each of 4 ranks got a message from the one before it";
    four(&home, options, &target.join("debug/examples/readme"), expected, is_one_job)?;
    // It is linked with the package's library.
    apt::see_to("libclang-dev")?;
    let own = target.join(package.split('=').next().unwrap_or(package));
    let mut build = context.workspace.cargo("build -p carrack --features mpi --example mpi_halves");
    build.env("MPICC", home.join("bin/mpicc")).env("CARGO_TARGET_DIR", &own);
    context.run(&mut build)?;
    let program = own.join("debug/examples/mpi_halves");
    four(&home, options, &program, "four ranks, and two in each half", is_halved)
}

/// Runs a program on four ranks, and checks what they say.
fn four(
    home: &Path,
    options: &[&str],
    program: &Path,
    expected: &'static str,
    is_right: fn(&str) -> bool,
) -> Outcome {
    let mut job = Command::new(home.join("bin/mpiexec"));
    clean(&mut job);
    job.args(["-n", "4"]).args(options).arg(program).env("LD_LIBRARY_PATH", home.join("lib"));
    say!("$ {}", children::spoken(&job));
    let said = children::read(&mut job, LIMIT)?;
    print!("{said}");
    if is_right(&said) {
        return Ok(());
    }
    Err(TaskError::Output { program: "mpiexec -n 4", expected, found: said }.into())
}

fn is_halved(said: &str) -> bool {
    let line = |rank: u32| format!("rank {rank} of 4; rank {} of 2", rank / 2);
    (0..4).all(|rank| said.lines().any(|said| said == line(rank)))
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
