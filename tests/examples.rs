//! The examples, as a user starts them: several processes under the launcher, which verify what they have done.

#[path = "support/built.rs"]
mod built;

use built::{carrack, examples};
use std::process::Command;

/// Runs an example on so many ranks. What it printed.
fn run(example: &str, ranks: u32) -> Vec<String> {
    let program = examples().join(example);
    let mut command = Command::new(carrack());
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

#[test]
fn messages_lie_on_a_gpu_simulated_where_there_is_none() {
    for ranks in [1, 2, 3] {
        let lines = run("am_into_gpu", ranks);
        let right = lines
            .iter()
            .filter(|line| line.contains("messages lay in memory of") && line.ends_with("all right"));
        assert_eq!(right.count() as u32, ranks, "{lines:?}");
    }
}
