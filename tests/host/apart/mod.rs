//! Claims of the conformance suite, between two ranks of different processes. These cannot look
//! into each other's memory, make progress for each other, or wait for anything except messages.
//! They run on one machine, in a guest, and on two nodes, which are two guests.
//!
//! Both ranks carry out each test. They go through the same cases, told apart by their numbers.
//!
//! | module | one idea |
//! |---|---|
//! | `messages` | operation × completion × matching × size × buffer, in all pairs, both ways |
//! | `order` | many messages both ways at once come in the order in which they were sent; floods |
//! | `memory` | puts, gets, notifications, atomic operations, flushes; a registration that ends |
//! | `together` | barriers, allgathers, broadcasts |
//! | `ends` | messages that are too long, and a rank that goes |

mod ends;
mod memory;
mod messages;
mod order;
mod together;

use crate::support::guests::{NEVER_GIVES_UP, Port, is_in_guests, joining, node};
use crate::support::ranks::{Ranks, Role, far_rank, launched};
use crate::support::sink::Sink;
use crate::support::{
    Job, OverShm, OverSimulatedNic, OverTcp, OverVerbs, Watchdog, patience, posted, rdma_device,
    rng, until,
};
use carrack::{Outcome, PostError, Rank, RemoteComp, Runtime, Status, Tag};
use rand::RngCore;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time limit of a test, and of a rank of it.
const LIMIT: Duration = Duration::from_secs(60);

const SIZE: u32 = 2;

/// A role whose ranks have a tiny backlog.
const FLOOD: &str = "ranks_that_flood_each_other_with_requests_get_every_reply";

/// A role of all cases with ordinary settings, one after the other.
const EVERY_CASE: &str = "every_case";

/// Transport between the two ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Between {
    Shm,
    /// TCP of this machine.
    Tcp,
    SimulatedNic,
    /// RDMA devices of one guest.
    Devices,
    /// The real NICs of two nodes.
    Nodes,
}

macro_rules! apart {
    ($($number:literal: $what:ident,)+) => {
        const CASES: &[&str] = &[$(stringify!($what)),+];
        apart!(in shm, Shm, $($number: $what,)+);
        apart!(in tcp, Tcp, $($number: $what,)+);
        apart!(in simulated_nic, SimulatedNic, $($number: $what,)+);
        apart!(in devices, Devices, $($number: $what,)+);
        apart!(in nodes, Nodes, $($number: $what,)+);
    };
    (in $module:ident, $between:ident, $($number:literal: $what:ident,)+) => {
        mod $module {
            $(#[test]
            fn $what() {
                super::between(super::Between::$between, (stringify!($what), $number));
            })+
        }
    };
}

apart! {
    0: every_pair_of_operation_completion_policy_size_and_buffer_arrives_to_the_last_byte,
    1: messages_of_one_key_come_in_order_both_ways_at_once,
    2: what_is_put_is_there_and_what_is_there_is_got,
    3: atomic_operations_of_both_count,
    4: a_flush_ends_after_everything_before_it,
    5: what_is_not_registered_is_refused_and_not_written,
    6: both_meet_and_are_told_the_same,
    7: a_message_that_is_too_long_fails_and_writes_nothing,
    8: what_was_sent_before_a_rank_went_arrives_and_what_it_would_have_sent_fails,
    9: ranks_that_flood_each_other_with_requests_get_every_reply,
}

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(patience(LIMIT)) else { return };
    let me = PairedRank::start(role);
    match &*me.role.name.clone() {
        EVERY_CASE => CASES.iter().filter(|case| **case != FLOOD).try_fold(me, play),
        case => play(me, &case),
    };
}

/// Carries out a case. Returns `None` if that has ended a rank.
fn play(me: PairedRank, case: &&str) -> Option<PairedRank> {
    match *case {
        "every_pair_of_operation_completion_policy_size_and_buffer_arrives_to_the_last_byte" => {
            messages::in_all_pairs(&me)
        }
        "messages_of_one_key_come_in_order_both_ways_at_once" => order::both_ways(&me),
        "what_is_put_is_there_and_what_is_there_is_got" => memory::put_and_got(&me),
        "atomic_operations_of_both_count" => memory::counted(&me),
        "a_flush_ends_after_everything_before_it" => memory::flushed(&me),
        "what_is_not_registered_is_refused_and_not_written" => memory::refused(&me),
        "both_meet_and_are_told_the_same" => together::meet(&me),
        "a_message_that_is_too_long_fails_and_writes_nothing" => ends::too_long(&me),
        "what_was_sent_before_a_rank_went_arrives_and_what_it_would_have_sent_fails" => {
            ends::goes(me);
            return None;
        }
        FLOOD => order::flood(&me),
        other => panic!("no role {other}"),
    }
    me.meet();
    Some(me)
}

/// Returns the words of a rank of a launcher's job of two, with TCP between them.
pub(crate) fn launched_cases() -> Vec<String> {
    launched(&format!("apart::{EVERY_CASE}"), SIZE, &[rng().next_u64(), Between::Tcp as u64])
}

/// Has two ranks with something between them do what a role says, and succeed.
fn between(what: Between, (role, number): (&str, u16)) {
    match what {
        Between::Devices if !is_in_guests(role, "1") => return,
        Between::Nodes if !is_in_guests(role, "2") => return,
        _ => {}
    }
    let _watchdog = Watchdog::patient(role, patience(LIMIT) + Duration::from_secs(20));
    // The ranks of two machines need the same seed, and neither can tell it to the other.
    let seed = if what == Between::Nodes { 11 } else { rng().next_u64() };
    let words = [seed, what as u64];
    let role_here = format!("apart::{role}");
    if what != Between::Nodes {
        let network = format!("apart {} {number}", std::process::id());
        let variable = |_| (carrack_simulators::nic::FABRIC_VARIABLE, network.as_str());
        return Ranks::start_each(variable, &role_here, SIZE, &words).succeed();
    }
    let mut rank: Command = far_rank(&role_here, (node(), SIZE), &words);
    let ended = joining(&mut rank, Port(31100 + number)).output().unwrap();
    assert!(ended.status.success(), "{}\n{}", ended.status, String::from_utf8_lossy(&ended.stderr));
}

/// Returns the statuses of operations in the order in which they were posted.
fn by_context(sink: &Sink) -> Vec<Status> {
    let mut all = sink.take();
    all.sort_by_key(|status| status.user_context.0);
    all
}

/// A rank, and how it comes to an understanding with the other one.
struct PairedRank {
    role: Role,
    runtime: Runtime,
    peer: Rank,
    seed: u64,
    notes: Sink,
    note: RemoteComp,
    /// Number of meetings that this rank has announced, and that it has heard of.
    said: AtomicU64,
    heard: AtomicU64,
}

impl PairedRank {
    fn start(role: Role) -> Self {
        let [seed, between] = role.words[..] else { panic!("two words") };
        let device = || match role.is_far() {
            true => rdma_device(0),
            false => rdma_device(role.rank as usize),
        };
        let settings = match between {
            _ if between == Between::Shm as u64 => OverShm::settings(),
            _ if between == Between::Tcp as u64 => OverTcp::settings(),
            _ if between == Between::SimulatedNic as u64 => OverSimulatedNic::settings(),
            _ => OverVerbs::settings().setting("verbs_device", device()),
        };
        let settings = if role.name == FLOOD { settings.backlog(4) } else { settings };
        let settings = settings.build_from_vars(NEVER_GIVES_UP).unwrap();
        let runtime = role.runtime_with(settings);
        let notes = Sink::keeping();
        let note = runtime.register_comp(&notes).unwrap();
        let (said, heard) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { peer: Rank(1 - role.rank), role, runtime, seed, notes, note, said, heard }
    }

    fn is_first(&self) -> bool {
        self.role.rank == 0
    }

    /// Returns this rank's runtime, for what makes progress.
    fn all(&self) -> &[Runtime] {
        std::slice::from_ref(&self.runtime)
    }

    /// Waits until both ranks are here.
    fn meet(&self) {
        self.runtime.barrier().unwrap();
    }

    /// Tells the other one to go on.
    fn says_go(&self) {
        let number = self.said.fetch_add(1, Ordering::Relaxed);
        let _ = posted(self.all(), || {
            self.runtime.post_am(self.peer, &[], self.note).tag(Tag(number)).try_submit()
        });
    }

    /// Waits until the other one says so.
    fn hears_go(&self) {
        until(self.all(), || self.notes.count() > 0);
        let mut all = self.notes.take();
        // One at a time is said: the next one waits for an answer.
        assert_eq!(all.len(), 1, "more than was said: {all:?}");
        let number = self.heard.fetch_add(1, Ordering::Relaxed);
        assert_eq!(all.remove(0).tag, Tag(number));
    }

    /// Calls until it is no retry, and waits for the end of what has begun.
    #[track_caller]
    fn ended(&self, sink: &Sink, call: impl FnMut() -> Result<Outcome, PostError>) -> Status {
        match posted(self.all(), call) {
            Outcome::Done(status) => status,
            _ => sink.one(self.all()),
        }
    }

    /// Progress for a little: what comes twice is seen.
    fn lingers(&self) {
        for _ in 0..20 {
            self.runtime.progress_all().expect("progress");
        }
    }
}
