//! Masks: devices are known by their names, never by their numbers.

use super::exchange::{LEN, lends, messages, uses};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, Kind, are_real, enough_for, heard, registered, told};
use crate::support::ranks::{Ranks, Role};

const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const MASKS: [[&str; 2]; 3] = [["0", "1"], ["0,1", "1,0"], ["0", "0"]];
const APART: u64 = 0;

/// gpu.md, legacy IPC rule 9. Each rank takes the first device that it sees. The other uses its
/// memory there by its engine, or by another way for a reason that is told.
#[test]
#[ignore = "full: a quarter of a minute; many jobs of processes"]
fn ranks_under_masks_that_differ_reach_each_others_memory_or_say_why_not() {
    let _watchdog = Watchdog::over("masks");
    if !enough_for("masks", 2) {
        return;
    }
    for (number, masks) in MASKS.iter().enumerate() {
        println!("masks {masks:?}");
        let mask = |rank: u32| (VARIABLE, masks[rank as usize]);
        Ranks::start_each(mask, "gpu_ordeals::masks", 2, &[number as u64]).succeed();
    }
}

const WINDOWS: [Kind; 3] = [Kind::Plain(0), Kind::Shareable(0), Kind::Pooled(0)];
const LOCAL: [Kind; 4] = [Kind::Host, Kind::Pinned, Kind::Plain(0), Kind::Shareable(1)];

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::under(&std::env::var(VARIABLE).unwrap());
    let runtime = gpus.runtime(role);
    let (me, other) = (role.rank, 1 - role.rank);
    let own: Vec<_> = WINDOWS
        .iter()
        .map(|kind| {
            let region = kind.region(&gpus, LEN);
            (registered(role, &runtime, &format!("{kind:?}"), &region), region)
        })
        .collect();
    for user in 0..2 {
        for (kind, (_, region)) in WINDOWS.iter().zip(&own) {
            let name = format!("{kind:?} for {user}");
            if user != me {
                lends(role, &runtime, (&name, region), user, &LOCAL);
                continue;
            }
            heard(role, &runtime, &format!("{name} is clear"), other);
            let rmr = told(role, &format!("{kind:?}"), other);
            for way in uses(role, &runtime, &gpus, (&name, &rmr), &LOCAL) {
                let is_apart = role.words[0] == APART;
                let is_mapped = way.why().is_empty();
                eprintln!("{name}: {way:?}");
                match kind {
                    Kind::Pooled(_) => assert!(!is_mapped, "it would go with its owner"),
                    _ if !is_apart => assert!(is_mapped, "{way:?}"),
                    // Measured: legacy IPC opens what is out of sight. What VMM does is told by the
                    // line above.
                    Kind::Plain(_) if are_real() => assert!(is_mapped, "{way:?}"),
                    _ if are_real() => {}
                    _ => assert!(
                        way.why().contains("not among the devices that this process can see"),
                        "{way:?}"
                    ),
                }
            }
        }
    }
    messages(
        role,
        &runtime,
        &gpus,
        &[Kind::Host, Kind::Plain(0), Kind::Shareable(1), Kind::Pooled(0)],
    );
    role.meet("over", &runtime, 0..2);
}
