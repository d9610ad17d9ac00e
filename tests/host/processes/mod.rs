//! Ranks that are processes: they find each other, and some of them are killed. See
//! [`support::ranks`].
//!
//! | module | one idea |
//! |---|---|
//! | `killed` | roles in which one rank is killed |
//! | `living` | roles in which all ranks live |

mod killed;
mod living;

use crate::support::folder::Folder;
use crate::support::ranks::{Ranks, Role};
use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::{AutoChoice, SettingsBuilder};
use carrack::{OpError, PostError, Rank, Runtime, Status, Tag};
use std::time::Duration;

/// The rank that is killed.
const VICTIM: Rank = Rank(2);
/// Time limit of a rank.
const PATIENCE: Duration = Duration::from_secs(20);

macro_rules! job_tests {
    ($($test:ident: $role:literal on [$($size:literal),+], $check:ident;)+) => {
        job_tests!(in shm, SHM, $($test: $role on [$($size),+], $check;)+);
        job_tests!(in tcp, TCP, $($test: $role on [$($size),+], $check;)+);
    };
    (in $module:ident, $word:ident,
     $($test:ident: $role:literal on [$($size:literal),+], $check:ident;)+) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $test() {
                let _watchdog = Watchdog::over(stringify!($test));
                $($check(Ranks::start(concat!("processes::", $role), $size, &[$word]));)+
            })+
        }
    };
}

// Over TCP what fits into the sender's window is done, whether the peer takes it or not.
job_tests!(in shm_alone, SHM,
    a_rank_killed_while_it_leaves_its_ring_full_fails_what_waits_for_it: "full" on [3],
        all_but_the_victim_succeed;
);

/// The first word of a role: the transport.
const SHM: u64 = 0;
const TCP: u64 = 1;

fn settings_of(role: &Role) -> SettingsBuilder {
    match role.words[..] {
        [SHM] => OverShm::settings(),
        [TCP] => OverTcp::settings(),
        ref words => panic!("no transport in {words:?}"),
    }
}

fn all_succeed(ranks: Ranks) {
    ranks.succeed();
}

fn all_but_the_victim_succeed(ranks: Ranks) {
    ranks.succeed_except(VICTIM);
}

job_tests! {
    everybody_sends_to_everybody: "all_to_all" on [2, 4, 8], all_succeed;
    barriers_and_allgathers_work_between_processes: "collectives" on [1, 2, 3, 5, 8], all_succeed;
    an_allgather_of_unequal_lengths_fails_on_every_rank: "uneven" on [2, 4], all_succeed;
    all_ranks_meet_in_a_barrier_while_the_queue_of_one_is_full: "gather" on [17], all_succeed;
    a_rank_killed_while_its_messages_wait_for_a_full_queue_loses_none_that_it_had_sent:
        "gather-killed" on [3], all_but_the_victim_succeed;
    idle_ranks_neither_burn_their_cores_nor_take_much_memory: "idle" on [8], all_succeed;
    a_runtime_that_was_dropped_has_given_all_descriptors_back: "descriptors" on [3], all_succeed;
    a_buffer_that_a_dropped_runtime_gave_back_is_copied_by_no_peer:
        "drops" on [2, 2, 2, 2, 2, 2], all_succeed;
    a_rank_killed_before_its_first_message_is_reported: "silent" on [3], all_but_the_victim_succeed;
    a_rank_killed_after_connecting_is_reported: "connected" on [3], all_but_the_victim_succeed;
    a_rank_killed_in_the_middle_of_a_stream_loses_nothing_that_it_had_sent: "stream" on [3],
        all_but_the_victim_succeed;
    a_rank_killed_inside_a_handler_is_reported: "handler" on [3], all_but_the_victim_succeed;
    a_rank_killed_before_anybody_connected_to_it_fails_the_receives_that_wait_for_it:
        "absent" on [3], all_but_the_victim_succeed;
    a_rank_that_was_received_from_before_it_started_is_reported_when_it_is_killed:
        "unstarted" on [3], all_but_the_victim_succeed;
    a_rank_killed_without_a_second_device_fails_what_waits_on_the_second_of_others:
        "second-device" on [3], all_but_the_victim_succeed;
    a_rank_killed_before_it_had_a_link_fails_what_is_posted_on_two_devices:
        "second-device-unlinked" on [3], all_but_the_victim_succeed;
    a_rank_killed_before_the_first_use_of_a_second_device_fails_what_is_posted_on_both:
        "second-device-late" on [3], all_but_the_victim_succeed;
    a_rank_killed_while_others_wait_in_a_barrier_fails_it_on_all_of_them: "barrier" on [3, 5],
        all_but_the_victim_succeed;
    a_rank_killed_while_a_peer_sleeps_wakes_it: "asleep" on [3], all_but_the_victim_succeed;
    a_rank_killed_in_the_midst_of_large_messages_ends_them:
        "large-auto" on [3, 3, 3, 3], all_but_the_victim_succeed;
    a_rank_killed_while_parts_of_messages_are_in_flight_ends_them: "large-off" on [3, 3, 3, 3],
        all_but_the_victim_succeed;
}

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    if role.name == "descriptors" {
        return living::descriptors(role);
    }
    if role.name == "unstarted" {
        return killed::unstarted(role);
    }
    if role.name == "drops" {
        return living::drops(role);
    }
    let kernel_copy = if role.name == "large-off" { AutoChoice::Off } else { AutoChoice::Auto };
    let settings = settings_of(&role).setting("kernel_copy", kernel_copy);
    let me = RoleRank::start(role, settings);
    match &*me.role.name {
        "all_to_all" => living::all_to_all(&me),
        "collectives" => living::collectives(&me),
        "gather" => living::gather(&me),
        "gather-killed" => killed::gather_killed(&me),
        "uneven" => living::uneven(&me),
        "idle" => living::idle(&me),
        "silent" => killed::silent(&me),
        "absent" => killed::absent(&me),
        "second-device" | "second-device-unlinked" | "second-device-late" => {
            killed::second_device(&me)
        }
        "connected" => killed::connected(&me),
        "stream" => killed::stream(&me),
        "full" => killed::full(&me),
        "handler" => killed::handler(&me),
        "barrier" => killed::barrier(&me),
        "asleep" => killed::asleep(&me),
        "large-auto" | "large-off" => killed::large(&me),
        other => panic!("no role {other}"),
    }
}

/// A rank in its role.
struct RoleRank {
    role: Role,
    folder: Folder,
    runtime: Runtime,
    ranks: [Runtime; 1],
}

impl RoleRank {
    fn start(role: Role, settings: SettingsBuilder) -> Self {
        let runtime = role.runtime(settings);
        Self { folder: role.bootstrap(), role, ranks: [runtime.clone()], runtime }
    }

    fn rank(&self) -> Rank {
        self.runtime.rank()
    }

    fn is_victim(&self) -> bool {
        self.rank() == VICTIM
    }

    fn says(&self, what: &str) {
        self.role.says(what);
    }

    /// Makes progress until some rank has said something.
    fn hears(&self, what: &str, from: u32) {
        until(&self.ranks, || self.role.has_said(what, from));
    }

    /// Waits until all ranks are here; progress goes on meanwhile.
    fn meet(&self, what: &str) {
        self.role.meet(what, &self.runtime, 0..self.runtime.size());
    }

    /// Waits until the survivors are here.
    fn survivors_meet(&self, what: &str) {
        let survivors = (0..self.runtime.size()).filter(|rank| *rank != VICTIM.0);
        self.role.meet(what, &self.runtime, survivors);
    }

    /// Messages between the survivors arrive, to the last byte.
    fn others_go_on(&self) {
        self.survivors_meet("going on");
        // In pairs; of an odd number the last talks to itself.
        let others: Vec<u32> = (0..self.runtime.size()).filter(|rank| *rank != VICTIM.0).collect();
        let at = others.iter().position(|rank| *rank == self.rank().0).unwrap();
        let other = Rank(*others.get(at ^ 1).unwrap_or(&self.rank().0));
        for number in 0..100 {
            let message = pattern(number, (number * 37 % 3000) as usize);
            let mut recv = self.runtime.post_recv(other, vec![0; 3000], Tag(1 << 40));
            sent(&self.ranks, || {
                self.runtime.post_send(other, &message[..], Tag(1 << 40)).try_submit()
            });
            assert_eq!(recv.wait().unwrap().bytes().unwrap(), message);
        }
        self.survivors_meet("gone on");
    }

    fn receive_from_victim(&self, sink: &Sink) {
        let recv = self.runtime.post_recv(VICTIM, vec![0; 100], Tag(9)).comp(sink).try_submit();
        assert!(recv.unwrap().is_posted());
    }

    fn ends_badly(&self, sink: &Sink) {
        is_down(sink.one(&self.ranks));
        assert!(self.runtime.peer_down(VICTIM).is_some());
        // And once it is known, at once.
        self.receive_from_victim(sink);
        is_down(sink.one(&self.ranks));
        let error = self.runtime.post_send(VICTIM, b"x", Tag(1)).try_submit().unwrap_err();
        assert!(matches!(error, PostError::PeerDown { rank: VICTIM, .. }), "{error}");
    }
}

#[track_caller]
fn is_down(status: Status) {
    let error = status.ok().expect_err("the victim is dead");
    assert!(matches!(error, OpError::PeerDown { rank: VICTIM, .. }), "{error}");
}
