//! The examples, as a user starts them: several processes under the launcher, which verify what they have done.

use std::path::PathBuf;
use std::process::Command;

/// Where this build's programs are: target/PROFILE, above this test's own folder.
fn folder() -> PathBuf {
    let me = std::env::current_exe().unwrap();
    me.parent().and_then(|deps| deps.parent()).unwrap().to_path_buf()
}

/// Builds the launcher and the examples, if nobody has built them yet.
fn build() -> PathBuf {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let target = folder().parent().unwrap().to_path_buf();
    for what in [&["--package", "carrack-cli"][..], &["--package", "carrack-workspace", "--examples"]] {
        let mut command = Command::new(env!("CARGO"));
        command.args(["build", "--quiet", "--profile", profile]).args(what).arg("--target-dir").arg(&target);
        assert!(command.status().unwrap().success());
    }
    folder().join("carrack")
}

/// Runs an example on so many ranks. What it printed.
fn run(example: &str, ranks: u32) -> Vec<String> {
    let program = folder().join("examples").join(example);
    let mut command = Command::new(build());
    command.args(["run", "-n", &ranks.to_string(), "--timeout", "100", "--"]).arg(program);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARRACK_")) {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example} on {ranks}: {}\n{text}{errors}", output.status);
    text.lines().map(str::to_owned).collect()
}

#[test]
fn four_processes_fill_an_array_together_and_each_finds_all_of_it() {
    let lines = run("distributed_array", 4);
    assert_eq!(lines.iter().filter(|line| line.contains("400000 words, all right")).count(), 4, "{lines:?}");
}

#[test]
fn four_processes_share_a_hash_table_without_losing_a_key() {
    let lines = run("hash_table", 4);
    assert_eq!(lines.iter().filter(|line| line.contains("16384 keys found")).count(), 4, "{lines:?}");
}

#[test]
fn four_processes_steal_work_until_the_whole_tree_is_searched() {
    assert!(!run("work_stealing", 4).is_empty());
}

#[test]
fn processes_that_exchange_rows_with_their_neighbours_compute_what_one_does_alone() {
    for ranks in [1, 4, 7] {
        let lines = run("stencil", ranks);
        let right = lines.iter().filter(|line| line.contains("after 300 steps as if computed alone")).count();
        assert_eq!(right, ranks as usize, "{lines:?}");
    }
}

#[test]
fn four_processes_await_each_others_blocks_and_sums() {
    for ranks in [1, 4] {
        let lines = run("futures", ranks);
        assert_eq!(lines.iter().filter(|line| line.contains("all right")).count() as u32, ranks, "{lines:?}");
    }
}
