//! Packets that are lost, repeated, spoilt or late, cuts, and a port that goes down. The kernel's
//! `netem` makes them on the ways between the two devices, or an interface is taken down.

use super::course::{Course, PARTED, Parting, RUNNING};
use super::{is_in_guests, told};
use crate::support::Watchdog;
use crate::support::ranks::Ranks;
use carrack::Rank;
use rustix::process::Signal;
use std::process::Command;
use std::time::Duration;

/// Long enough for a processor that is emulated.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// A network that is as bad as `netem` is told to make it. Dropped, it is good again.
pub(crate) struct Trouble;

impl Trouble {
    pub(crate) fn begin(what: &str) -> Self {
        for interface in interfaces() {
            tool("tc", &format!("qdisc replace dev {interface} root netem {what}"));
        }
        Self
    }
}

impl Drop for Trouble {
    fn drop(&mut self) {
        for interface in interfaces() {
            tool("tc", &format!("qdisc del dev {interface} root"));
        }
    }
}

/// Returns the interfaces through which packets of the RDMA devices leave.
fn interfaces() -> Vec<String> {
    let is_one = |name: &String| name.starts_with('v') || name.starts_with('e');
    let names = std::fs::read_dir("/sys/class/net").unwrap();
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(is_one).collect()
}

/// Runs a program with these words.
fn tool(name: &str, words: &str) {
    let status = Command::new(name).args(words.split(' ')).status();
    assert!(
        status.as_ref().is_ok_and(std::process::ExitStatus::success),
        "{name} {words}: {status:?}"
    );
}

/// Returns the devices' counter of one kind of event.
fn counted(name: &str) -> u64 {
    let read = |device: &str| {
        let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/{name}");
        std::fs::read_to_string(path).map_or(0, |text| text.trim().parse().unwrap())
    };
    ["rxe0", "rxe1"].into_iter().map(read).sum()
}

/// Waits until the traffic of each of two ranks is running.
#[track_caller]
fn are_running(ranks: &mut Ranks) {
    for rank in 0..2 {
        assert!(ranks.hears(RUNNING, rank), "rank {rank} has ended");
    }
}

/// Waits until each of two ranks has lost the other one.
#[track_caller]
fn have_parted(ranks: &mut Ranks) {
    for rank in 0..2 {
        assert!(ranks.hears(PARTED, rank), "rank {rank} has ended otherwise");
    }
}

fn trouble(what: &str, counter: &str) {
    if !is_in_guests(what, "1") {
        return;
    }
    let _watchdog = Watchdog::patient(what, LIMIT);
    let before = counted(counter);
    let trouble = Trouble::begin(what);
    Course::of(150).start(&[]).succeed();
    drop(trouble);
    let times = counted(counter) - before;
    println!("netem {what}: {counter} {times}");
    assert!(times > 0, "nothing has happened to any packet");
}

#[test]
fn nothing_is_lost_where_packets_are() {
    trouble("loss 1%", "out_of_seq_request");
}

#[test]
fn nothing_is_doubled_where_packets_are() {
    trouble("duplicate 5%", "duplicate_request");
}

#[test]
fn what_is_spoilt_on_its_way_is_not_taken_for_a_message() {
    trouble("corrupt 1%", "out_of_seq_request");
}

#[test]
fn packets_that_overtake_others_change_nothing() {
    trouble("delay 1ms reorder 1%", "out_of_seq_request");
}

/// Returns the number of packets that the injected fault has dropped.
fn swallowed() -> u64 {
    let output = Command::new("tc").args(["-s", "qdisc", "show"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let of_netem =
        said.lines().skip_while(|line| !line.starts_with("qdisc netem")).filter_map(|line| {
            let (_, rest) = line.split_once("(dropped ")?;
            rest.split(',').next()?.parse::<u64>().ok()
        });
    of_netem.sum()
}

#[test]
fn a_cut_of_a_second_harms_nothing() {
    if !is_in_guests("a short cut", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("a short cut", LIMIT);
    let mut ranks = Course::of(400).start(&[]);
    are_running(&mut ranks);
    // Stopped meanwhile: else they may be done before it is cut, where this process gets too little
    // of the processor.
    let both = |signal| (0..2).for_each(|rank| ranks.signal(Rank(rank), signal));
    both(Signal::STOP);
    while !(0..2).all(|rank| ranks.is_stopped(Rank(rank))) {
        std::thread::yield_now();
    }
    let cut = Trouble::begin("loss 100%");
    both(Signal::CONT);
    std::thread::sleep(Duration::from_secs(1));
    while swallowed() == 0 {
        let has_ended = (0..2).any(|rank| ranks.has_said("over", rank));
        assert!(!has_ended, "a rank was done before the cut: it was no test");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(cut);
    ranks.succeed();
}

/// Until both have given up, however long the NIC tries.
#[test]
fn a_cut_that_lasts_ends_every_operation_on_both_sides() {
    if !is_in_guests("a long cut", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("a long cut", LIMIT);
    let mut ranks = Course { parting: Parting::EachOther, ..Course::of(4000) }.start(&[]);
    are_running(&mut ranks);
    let cut = Trouble::begin("loss 100%");
    have_parted(&mut ranks);
    drop(cut);
    ranks.succeed();
    Course::of(50).start(&[]).succeed();
}

#[test]
fn a_port_that_goes_down_ends_every_operation_and_serves_others_when_it_is_up() {
    if !is_in_guests("a port that goes down", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("a port that goes down", LIMIT);
    let mut ranks = Course { parting: Parting::EachOther, ..Course::of(4000) }.start(&[]);
    are_running(&mut ranks);
    tool("ip", "link set v0 down");
    have_parted(&mut ranks);
    ranks.succeed();
    tool("ip", "link set v0 up");
    // The routes went with the link.
    let (own, peer) = (told("ADDRESS").unwrap(), told("PEER").unwrap());
    tool("ip", &format!("route replace {peer} dev v0 src {own} table 101"));
    tool("ip", &format!("route replace {own} dev v1 src {peer} table 102"));
    tool("ip", &format!("neigh replace {peer} lladdr 52:54:00:77:00:02 dev v0 nud permanent"));
    tool("ip", &format!("neigh replace {own} lladdr 52:54:00:77:00:01 dev v1 nud permanent"));
    Course::of(50).start(&[]).succeed();
}
