//! Ranks on two nodes: the same test runs on both at once, and starts the ranks of its own. They
//! join over TCP.

use super::course::{Course, PARTED, Parting, RUNNING};
use super::network::{LIMIT, Trouble};
use super::{is_in_guests, node};
use crate::support::Watchdog;
use crate::support::built;
use crate::support::children::{Watched as _, succeeded};
use crate::support::guests::{Port, joining};
use crate::support::ranks::far_rank;
use children::Running;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const NODES: u32 = 2;

/// Starts this node's ranks of a program that has `ranks_each` on each node. Returns each one's
/// output once all have succeeded.
#[track_caller]
fn run(program: &Path, arguments: &[&str], ranks_each: u32, port: Port) -> Vec<String> {
    let start = |at: u32| {
        let mut command = Command::new(program);
        command.args(arguments).env("RANK", (node() * ranks_each + at).to_string());
        command.env("WORLD_SIZE", (NODES * ranks_each).to_string());
        Running::start(joining(&mut command, port)).unwrap()
    };
    let ranks: Vec<_> = (0..ranks_each).map(start).collect();
    ranks.into_iter().map(|rank| succeeded(&rank.ends())).collect()
}

#[test]
fn ranks_of_a_node_are_reached_by_shared_memory_and_others_by_verbs() {
    if !is_in_guests("explain", "2") {
        return;
    }
    let _watchdog = Watchdog::patient("explain", LIMIT);
    let said = run(built::carrack(), &["explain", "--all"], 2, Port(31000));
    if node() != 0 {
        return;
    }
    println!("{}", said[0]);
    for rank in 0..4 {
        for peer in 0..4 {
            let begin = format!("rank {rank} to rank {peer}");
            let (itself, chosen) = match peer {
                _ if peer == rank => (" (itself)", "loopback"),
                _ if peer / 2 == rank / 2 => ("", "shm"),
                _ => ("", "verbs"),
            };
            let head = format!("{begin}{itself}, device 0: {chosen}");
            let mut lines = said[0].lines().skip_while(|line| *line != head);
            assert!(lines.next().is_some(), "no line {head:?}");
            let verdicts: Vec<&str> = lines.take_while(|line| !line.starts_with("rank ")).collect();
            for transport in ["loopback", "shm", "verbs"] {
                let has = |word: &str| {
                    verdicts
                        .iter()
                        .any(|line| line.starts_with(&format!("  {transport:<10} {word}")))
                };
                assert_eq!(has("chosen"), transport == chosen, "{head}: {verdicts:?}");
                assert!(
                    has("chosen") || has("passed: ") || has("refused: "),
                    "{head}: {verdicts:?}"
                );
            }
        }
    }
}

#[test]
fn four_ranks_on_two_nodes_fill_an_array_together_and_each_finds_all_of_it() {
    if !is_in_guests("distributed_array", "2") {
        return;
    }
    let _watchdog = Watchdog::patient("distributed_array", LIMIT);
    for (at, said) in run(&built::examples().join("distributed_array"), &[], 2, Port(31001))
        .into_iter()
        .enumerate()
    {
        print!("{said}");
        assert_eq!(said, format!("rank {}: 400000 words, all right\n", 2 * node() as usize + at));
    }
}

#[test]
fn four_ranks_on_two_nodes_steal_work_until_the_whole_tree_is_searched() {
    if !is_in_guests("work_stealing", "2") {
        return;
    }
    let _watchdog = Watchdog::patient("work_stealing", LIMIT);
    let said = run(&built::examples().join("work_stealing"), &[], 2, Port(31002));
    print!("{}", said.concat());
    if node() == 0 {
        assert!(
            said[0].contains(" nodes by 4 ranks in ") && said[0].ends_with("verified\n"),
            "{said:?}"
        );
    }
}

/// This node's rank on a course of two.
pub(crate) struct OnCourse(Running);

impl OnCourse {
    pub(crate) fn start(course: Course, port: Port) -> Self {
        let mut command = far_rank("verbs_guest::course", (node(), course.ranks), &course.words());
        Self(Running::start(joining(&mut command, port).envs(course.nic())).unwrap())
    }

    /// Waits until it says this.
    #[track_caller]
    pub(crate) fn hears(&mut self, word: &str) {
        self.0.hears(word);
    }

    /// Ends the process, which is of no further interest: its bootstrap waits two minutes for a
    /// node that is silent.
    pub(crate) fn end(mut self) {
        self.0.end();
    }

    #[track_caller]
    pub(crate) fn succeed(self) {
        succeeded(&self.0.ends());
    }
}

#[test]
fn a_cut_of_a_second_between_nodes_is_survived() {
    if !is_in_guests("a short cut between nodes", "2") {
        return;
    }
    let _watchdog = Watchdog::patient("a short cut between nodes", LIMIT);
    let mut rank = OnCourse::start(Course::of(200), Port(31003));
    rank.hears(RUNNING);
    if node() == 0 {
        let cut = Trouble::begin("loss 100%");
        std::thread::sleep(Duration::from_secs(1));
        drop(cut);
    }
    rank.succeed();
}

/// Each node cuts its own way to the other one until its rank has lost its peer. So it lasts as
/// long as it takes, and neither has to know how far the other one is.
#[test]
fn a_cut_that_lasts_between_nodes_ends_every_operation_on_both() {
    if !is_in_guests("a long cut between nodes", "2") {
        return;
    }
    let _watchdog = Watchdog::patient("a long cut between nodes", LIMIT);
    let parting = Parting::EachOther;
    let mut rank = OnCourse::start(Course { parting, ..Course::of(4000) }, Port(31004));
    rank.hears(RUNNING);
    let cut = Trouble::begin("loss 100%");
    rank.hears(PARTED);
    drop(cut);
    rank.succeed();
}
