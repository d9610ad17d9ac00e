//! Instructions of a short message in this transport, outside of kernel and provider.
//!
//! Callgrind runs this program once more and counts them. Instructions of the simulated NIC's
//! functions and of their callees are subtracted, and so are those of work that a clock triggers.

use crate::profile::counted;
use crate::report::Count;
use crate::support::Watchdog;
use crate::support::nics::{Side, fabric, identity, nic, options};
use carrack::transports::contract::{Batch, Device, Event, Link, PeerId, Polled, Short};
use carrack_simulators::nic::Config;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

/// Messages that are sent between two polls of the sender: completions are asked for more rarely.
const BETWEEN_POLLS: u64 = 8;

/// Messages that are counted, each way.
const COUNTED: u64 = 200;

const ROLE: &str = "TEST_INSTRUCTIONS";

#[inline(never)]
fn measured_send(link: &dyn Link, number: u64) -> bool {
    matches!(link.am_short((number, 1), &number.to_le_bytes()), Short::Done)
}

#[inline(never)]
fn measured_poll(device: &dyn Device, batch: &mut Batch) -> bool {
    device.poll(batch, &mut |_: &mut Batch| {}) == Polled::Some
}

#[inline(never)]
fn measured_afterwards(device: &dyn Device, batch: &mut Batch) -> bool {
    device.poll(batch, &mut |_: &mut Batch| {}) == Polled::Some
}

/// Polls as the sender, which finds only the ends of its requests.
#[inline(never)]
fn measured_completion(device: &dyn Device, batch: &mut Batch) -> bool {
    device.poll(batch, &mut |_: &mut Batch| {}) == Polled::Some
}

/// A ping-pong, and then one way. Each poll is to find its message there, so the NIC is given time;
/// one that comes too early adds to what is counted.
#[test]
fn a_rank_in_its_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let nic = nic(Config::default(), &fabric());
    let side = |me| Side::open(nic.clone(), options(), identity(me, 2)).unwrap();
    let mut sides = [side(0), side(1)];
    let links: [Arc<dyn Link>; 2] = [0, 1].map(|me| {
        sides[me].device.connect(&sides[1 - me].device.address(), PeerId(1 - me as u32)).unwrap()
    });
    while !links.iter().all(|link| link.is_up()) {
        sides.iter_mut().for_each(|side| drop(side.poll()));
    }
    let mut batch = Batch::new(8);
    for number in 0..COUNTED {
        for me in 0..2 {
            while !measured_send(black_box(&*links[me]), number) {}
            std::thread::sleep(Duration::from_millis(4));
            while !measured_poll(black_box(&*sides[1 - me].device), &mut batch) {
                std::thread::sleep(Duration::from_millis(4));
            }
            let mut found = batch.drain();
            assert!(matches!(found.next(), Some(Event::Arrived { .. })) && found.next().is_none());
            drop(found);
            assert!(!measured_afterwards(black_box(&*sides[1 - me].device), &mut batch));
        }
    }
    for number in 0..COUNTED {
        while !matches!(links[0].am_short((number, 1), &number.to_le_bytes()), Short::Done) {}
        std::thread::sleep(Duration::from_millis(4));
        while sides[1].poll().is_empty() {}
        if number % BETWEEN_POLLS == 0 {
            assert!(!measured_completion(black_box(&*sides[0].device), &mut batch));
        }
    }
}

pub(crate) fn counts() -> Vec<Count> {
    let _watchdog = Watchdog::over("instructions of verbs");
    let measured = [
        ("measured_send", 2),
        // The poll that finds a message adds to the latency of the message and of its answer.
        ("measured_poll", 2),
        // The next poll, which finds nothing and does the message's remaining work. Its receive is
        // posted again, and its share of credits goes back.
        ("measured_afterwards", 2),
        ("measured_completion", 1),
    ];
    let count = |(name, ways): (&str, u64)| {
        let path = format!("{}::{name}", module_path!());
        let role = "verbs_instructions::a_rank_in_its_role";
        let all = counted(&path, role, ROLE, is_taken_off);
        (name.replacen("measured", "verbs", 1), all / (ways * COUNTED))
    };
    measured.into_iter().map(count).collect()
}

/// Returns `true` if a function belongs to the simulated NIC, as libibverbs would call it. Also
/// for work that a clock triggers and not a message, which a slow machine does more often.
fn is_taken_off(function: &str) -> bool {
    function.contains("carrack_simulators") && function.contains("abi")
        || function.contains("verbs") && function.contains("look_by_the_clock")
}
