//! How many instructions a short message takes in this transport, outside of kernel and provider.
//!
//! Counted by callgrind, which runs this program once more; what the simulated NIC's functions take, and whatever they call, is taken
//! off. A debug build, or a machine without valgrind, has nothing to count: the test says so.

mod support;

#[path = "verbs_faults/ground.rs"]
#[allow(dead_code, reason = "shared with the suite of faults, which uses more of it")]
mod ground;
#[path = "verbs_instructions/profile.rs"]
mod profile;

use carrack::transports::contract::{Batch, Device, Event, Link, PeerId, Polled, Short};
use carrack::transports::verbs::simulated::Config;
use ground::{Side, fabric, identity, nic, options};
use profile::instructions;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use support::Watchdog;

/// The most that sending 8 bytes may take, the end of the request included; and that receiving them may take.
const MOST: u64 = 400;

/// Messages that are counted, each way.
const COUNTED: u64 = 400;

const ROLE: &str = "TEST_INSTRUCTIONS";

#[inline(never)]
fn measured_send(link: &dyn Link, number: u64) -> bool {
    matches!(link.am_short((number, 1), &number.to_le_bytes()), Short::Done)
}

#[inline(never)]
fn measured_poll(device: &dyn Device, batch: &mut Batch, found: &mut Vec<Event>) -> bool {
    device.poll(batch, &mut |batch| found.extend(batch.drain())) == Polled::Some
}

/// A ping-pong. Each poll is to find its message there, so the NIC is given time; one that comes too early adds to what is counted.
#[test]
fn a_rank_in_its_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let nic = nic(Config::default(), &fabric());
    let side = |me| Side::open(nic.clone(), options(), identity(me, 2)).unwrap();
    let mut sides = [side(0), side(1)];
    let links: [Arc<dyn Link>; 2] =
        [0, 1].map(|me| sides[me].device.connect(&sides[1 - me].device.address(), PeerId(1 - me as u32)).unwrap());
    while !links.iter().all(|link| link.is_up()) {
        sides.iter_mut().for_each(|side| drop(side.poll()));
    }
    let (mut batch, mut found) = (Batch::new(8), Vec::with_capacity(8));
    for number in 0..COUNTED {
        for me in 0..2 {
            while !measured_send(black_box(&*links[me]), number) {}
            std::thread::sleep(Duration::from_micros(500));
            while !measured_poll(black_box(&*sides[1 - me].device), &mut batch, &mut found) {}
            assert!(matches!(found.pop(), Some(Event::Arrived { .. })) && found.is_empty());
        }
    }
}

#[test]
fn a_message_of_8_bytes_takes_no_more_instructions_than_it_did() {
    let _watchdog = Watchdog::over("instructions");
    if cfg!(debug_assertions) {
        println!("skipped: a debug build; `cargo test --release --test verbs_instructions`");
        return;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: there is no valgrind here");
        return;
    }
    let mut counts = [0; 2];
    for (count, name) in counts.iter_mut().zip(["measured_send", "measured_poll"]) {
        let out = std::env::temp_dir().join(format!("carrack-callgrind-{}-{name}", std::process::id()));
        let status = Command::new("valgrind")
            .args(["-q", "--tool=callgrind", "--collect-atstart=no", "--compress-strings=no", "--compress-pos=no"])
            .arg(format!("--toggle-collect=*{name}*"))
            .arg(format!("--callgrind-out-file={}", out.display()))
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "a_rank_in_its_role", "--test-threads=1"])
            .env(ROLE, "1")
            .output()
            .unwrap();
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
        let profile = std::fs::read_to_string(&out).unwrap();
        let _ = std::fs::remove_file(&out);
        *count = instructions(&profile, |function| function.contains("simulated") && function.contains("abi")) / (2 * COUNTED);
    }
    let [send, poll] = counts;
    println!("8 bytes: {send} instructions to send, {poll} to find a message and what else there is");
    assert!(send > 20 && poll > 20, "nothing was counted: {counts:?}");
    // A poll finds the end of some requests, too: with it, sending takes no more than both.
    assert!(send <= MOST && poll <= MOST, "more than {MOST} instructions: {counts:?}");
}
