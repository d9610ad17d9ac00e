//! Resources that are given back are free again.

use super::{STRIPE, between, buffer, check};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, Kind, Went, heard, put, registered, told};
use crate::support::possessions::Possessions;
use crate::support::ranks::{Ranks, Role};

const ROUNDS: usize = 1000;
/// In each such round a peer maps what there is.
const SHARED: usize = 20;
const LEN: usize = 10_007;

/// gpu.md, legacy IPC rules 4 and 5.
#[test]
fn after_a_thousand_rounds_of_growing_and_shrinking_mappings_and_descriptors_are_what_they_were() {
    let _watchdog = Watchdog::over("rounds");
    Ranks::start("growable_buffer::rounds", 2, &[]).succeed();
}

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let mut buffer = buffer(&gpus, 6);
    let mut middle = None;
    for round in 0..ROUNDS {
        if role.rank == 0 {
            buffer.grow_to((1 + round % 6) * STRIPE).unwrap();
        }
        if round.is_multiple_of(SHARED) {
            let name = format!("round {round}");
            if role.rank == 0 {
                let last = buffer.pieces(buffer.len() - LEN - 5, LEN).unwrap().remove(0);
                let mr = registered(role, &runtime, &name, &last);
                heard(role, &runtime, &name, 1);
                check(&last, round as u64);
                drop((mr, last));
            } else {
                let rmr = told(role, &name, 0);
                let source = || Kind::Plain(0).full(&gpus, LEN, round as u64);
                assert_eq!(put(&runtime, source, &rmr, 0), Went::Mapped);
                drop(rmr);
                role.says(&name);
            }
        }
        if role.rank == 0 {
            between::shrink(&runtime, &mut buffer, (round % 2) * STRIPE);
        }
        if round.is_multiple_of(SHARED) {
            runtime.barrier().unwrap();
        }
        if round == ROUNDS / 2 + 1 || round + 1 == ROUNDS {
            let now = Possessions::of_this_process(&gpus);
            eprintln!("{}: after {round} rounds {now:?}", runtime.rank());
            if let Some(live) = now.live {
                assert_eq!(
                    live[0],
                    (buffer.len() / STRIPE) as u64,
                    "of a simulated driver nothing else is left"
                );
            }
            let before: &Possessions = middle.get_or_insert(now);
            let now = Possessions::of_this_process(&gpus);
            assert!(now.within(before), "{before:?} in the middle, and at the end {now:?}");
        }
    }
    role.meet("over", &runtime, 0..2);
}
