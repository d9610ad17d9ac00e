//! Memory of every kind goes by its way, or by another for a reason.

use super::exchange::{LEN, lends, messages, uses};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{
    Gpus, Kind, PATIENCE, Went, can_order, heard, receive, registered, send, told,
};
use crate::support::kernel;
use crate::support::ranks::{Ranks, Role};
use carrack::transports::gpu::HandleForm;
use carrack::{Rank, Tag};

/// gpu.md, legacy IPC rules 1 and 8; VMM rule 3. The owner knows why others cannot map a pool's
/// memory; they find out that it is not exported.
#[test]
fn memory_of_every_kind_is_put_to_got_from_and_sent_and_what_is_not_mapped_is_told_why() {
    let _watchdog = Watchdog::over("kinds");
    Ranks::start("gpu_ordeals::kinds", 2, &[]).succeed();
}

/// gpu.md, VMM rule 3: all forms are tried, and each refusal is told, the fabric's too.
#[test]
fn a_driver_that_exports_or_opens_nothing_costs_speed_only_and_its_reason_is_told() {
    let _watchdog = Watchdog::over("refused");
    if can_order("a driver that refuses") {
        Ranks::start("gpu_ordeals::refused", 2, &[]).succeed();
    }
}

/// gpu.md, VMM rule 4: where the kernel forbids to fetch a descriptor from another process, as in
/// many containers, it goes over a socket.
#[test]
fn a_kernel_that_lets_no_descriptor_be_fetched_costs_nothing() {
    let _watchdog = Watchdog::over("no descriptors");
    Ranks::start("gpu_ordeals::no_descriptors", 2, &[0]).succeed();
}

/// gpu.md, VMM rule 4: and where there is no such socket either, that costs speed only, and is
/// named as the reason.
#[test]
fn a_kernel_that_lets_no_descriptor_through_at_all_costs_speed_only_and_is_named_as_the_reason() {
    let _watchdog = Watchdog::over("no sockets");
    Ranks::start("gpu_ordeals::no_descriptors", 2, &[1]).succeed();
}

const LOCAL: [Kind; 5] =
    [Kind::Host, Kind::Pinned, Kind::Plain(0), Kind::Shareable(1), Kind::Pooled(1)];
const WINDOWS: [Kind; 6] = [
    Kind::Host,
    Kind::Pinned,
    Kind::Plain(1),
    Kind::Shareable(0),
    Kind::Shareable(1),
    Kind::Pooled(1),
];

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    for kind in WINDOWS {
        let name = format!("{kind:?}");
        if role.rank == 1 {
            let region = kind.region(&gpus, LEN);
            let mr = registered(role, &runtime, &name, &region);
            let refused = mr.refused().iter().find(|(transport, _)| *transport == "cuda_ipc");
            assert_eq!(refused.is_none(), kind.is_mapped(), "{kind:?}: {refused:?}");
            if let (Kind::Pooled(_), Some((_, why))) = (kind, refused) {
                let why = why.to_lowercase();
                assert!(
                    why.contains("pool") && why.contains("fabric"),
                    "each form's refusal: {why}"
                );
            }
            lends(role, &runtime, (&name, &region), 0, &LOCAL);
            continue;
        }
        let rmr = told(role, &name, 1);
        heard(role, &runtime, &format!("{name} is clear"), 1);
        for way in uses(role, &runtime, &gpus, (&name, &rmr), &LOCAL) {
            assert_eq!(way.why().is_empty(), kind.is_mapped(), "{kind:?}: {way:?}");
            assert!(
                kind.is_mapped() || way.why().contains("its owner could not export it"),
                "{way:?}"
            );
        }
    }
    messages(role, &runtime, &gpus, &LOCAL);
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: rank 1 can export nothing, and rank 0 can open nothing. Each has a window for the
/// other.
pub(crate) fn refused(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let faults = gpus.fake.as_ref().unwrap().faults();
    let local = [Kind::Host, Kind::Plain(0)];
    if role.rank == 0 {
        faults.fail_open(Some(205));
    } else {
        HandleForm::ALL.iter().for_each(|&form| faults.refuse_export(form, true));
    }
    // First those of rank 1, which are not exported; then its driver is well, and they are not
    // opened.
    for (turn, kind) in
        [Kind::Plain(0), Kind::Shareable(1), Kind::Plain(1), Kind::Shareable(0)].iter().enumerate()
    {
        let (name, exports) = (format!("window {turn}"), turn >= 2);
        if role.rank == 1 {
            HandleForm::ALL.iter().for_each(|&form| faults.refuse_export(form, !exports));
            let region = kind.region(&gpus, LEN);
            let mr = registered(role, &runtime, &name, &region);
            let refused = mr.refused().iter().find(|(transport, _)| *transport == "cuda_ipc");
            assert_eq!(refused.is_none(), exports);
            for form in [HandleForm::Bytes, HandleForm::Fd, HandleForm::Fabric] {
                assert!(
                    refused.is_none_or(|(_, why)| why.contains(&format!("{form:?}"))),
                    "{refused:?}"
                );
            }
            lends(role, &runtime, (&name, &region), 0, &local);
            continue;
        }
        let rmr = told(role, &name, 1);
        heard(role, &runtime, &format!("{name} is clear"), 1);
        let reason = if exports { "205 (MAP_FAILED)" } else { "its owner could not export it" };
        for way in uses(role, &runtime, &gpus, (&name, &rmr), &local) {
            assert!(way.why().contains(reason), "{way:?}");
        }
    }
    messages(role, &runtime, &gpus, &local);
    role.meet("done", &runtime, 0..2);
    // A person who asks is told the same.
    if role.rank == 1 {
        HandleForm::ALL.iter().for_each(|&form| faults.refuse_export(form, true));
    }
    let other = &runtime.explain(PATIENCE)[1 - role.rank as usize];
    let whys = || other.kinds.iter().filter_map(|kind| kind.why.as_deref());
    let reason = if role.rank == 0 { "205 (MAP_FAILED)" } else { "cannot be exported" };
    assert!(whys().any(|why| why.contains(reason)), "{other:?}");
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: rank 0 cannot fetch the descriptors of VMM memory, nor, once it is connected, ask
/// for them.
pub(crate) fn no_descriptors(role: &Role) {
    let is_deaf = role.words[0] == 1;
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    for sender in [0, 1] {
        if role.rank == sender {
            send(&runtime, Rank(1 - sender), vec![1], Tag(0)).unwrap().ok().unwrap();
        } else {
            receive(&runtime, Rank(sender), vec![0], Tag(0)).unwrap().ok().unwrap();
        }
    }
    if role.rank == 0 {
        kernel::refuses(&[libc::SYS_pidfd_getfd]);
        if is_deaf {
            kernel::refuses(&[libc::SYS_connect]);
        }
    }
    let local = [Kind::Host, Kind::Shareable(0)];
    for kind in [Kind::Shareable(0), Kind::Plain(0)] {
        let name = format!("{kind:?}");
        if role.rank == 1 {
            let region = kind.region(&gpus, LEN);
            let _mr = registered(role, &runtime, &name, &region);
            lends(role, &runtime, (&name, &region), 0, &local);
            continue;
        }
        let rmr = told(role, &name, 1);
        heard(role, &runtime, &format!("{name} is clear"), 1);
        for way in uses(role, &runtime, &gpus, (&name, &rmr), &local) {
            match kind {
                // It has no descriptor.
                Kind::Plain(_) => assert_eq!(way, Went::Mapped),
                _ if !is_deaf => assert_eq!(way, Went::Mapped),
                _ => {
                    let why = way.why();
                    assert!(why.contains("its descriptor cannot be fetched"), "{why}");
                    assert!(why.contains("its process does not hand it out"), "{why}");
                }
            }
        }
    }
    messages(role, &runtime, &gpus, &[Kind::Host, Kind::Plain(0), Kind::Shareable(1)]);
    role.meet("over", &runtime, 0..2);
}
