//! Errors for missing devices and ports: they name device, port, reason and remedy.

use crate::support::nics::{Side, fabric, identity, nic, options};
use crate::support::{Job, LIMIT, OverSimulatedNic, Watchdog, built, happens, until_with_errors};
use carrack::bootstrap::InProcess;
use carrack::settings::{SettingsBuilder, TransportChoice};
use carrack::transports::contract::{Event, Identity, PeerId};
use carrack::{Rank, Runtime, StartError, Tag};
use carrack_simulators::nic::{Call, Config, SimulatedNic, Which};
use carrack_transports::verbs::VerbsOptions;
use std::sync::Arc;
use std::time::Duration;

/// Returns the error of a rank's start with these settings, over the process's own simulated NIC.
fn refused(settings: SettingsBuilder) -> String {
    let bootstrap = InProcess::job(1).unwrap().remove(0);
    let started =
        Runtime::builder().settings(built(settings)).bootstrap(Box::new(bootstrap)).start();
    match started.map(drop) {
        Err(error @ StartError::NoTransport(_)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word} in: {text}");
    }
}

#[test]
fn a_device_or_port_or_gid_that_is_not_there_is_named_with_those_that_are() {
    let _watchdog = Watchdog::over("what is not there");
    let settings = OverSimulatedNic::settings;
    says(
        &refused(settings().setting("verbs_device", "mlx5_7")),
        &["verbs-simulated", "mlx5_7", "sim0"],
    );
    says(&refused(settings().setting("verbs_device", "sim0:2")), &["sim0", "1 ports", "number 2"]);
    says(&refused(settings().setting("verbs_device", "sim0:x")), &["\"x\"", "DEVICE:1"]);
    says(&refused(settings().setting("verbs_device", ":1")), &["names no device"]);
    says(
        &refused(settings().setting("verbs_gid", 77)),
        &["port 1 of sim0", "index 77", "0, 1, 2, 3", "CARRACK_VERBS_GID"],
    );
}

#[test]
fn a_machine_without_the_library_or_a_device_is_told_so_and_what_to_look_at() {
    let _watchdog = Watchdog::over("no library");
    // This machine has neither, or it has a device, and then there is nothing to be refused.
    let bootstrap = InProcess::job(1).unwrap().remove(0);
    let settings = built(OverSimulatedNic::settings().transports(vec![TransportChoice::Verbs]));
    match Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap)).start() {
        Err(error) => says(&error.to_string(), &["verbs is not available"]),
        Ok(_) => println!("skipped: this machine has an RDMA device"),
    }
    // A library without a device.
    let nic = nic(Config::devices(0), &fabric());
    let error = nic.transport(options());
    let text = carrack::transports::contract::Transport::devices(&error).unwrap_err().to_string();
    says(&text, &["verbs-simulated", "no RDMA device", "rdma link", "/dev/infiniband"]);
}

#[test]
fn a_port_that_is_down_at_the_start_is_named_with_its_state() {
    let _watchdog = Watchdog::over("port down");
    let nic = nic(Config { ports: 2, ..Config::default() }, &fabric());
    nic.set_port(0, 1, false);
    // The other one is taken.
    Side::open(nic.clone(), options(), identity(0, 2)).map(drop).unwrap();
    let first = VerbsOptions { device: Some("sim0:1".into()), ..options() };
    let text = Side::open(nic.clone(), first, identity(0, 2)).map(drop).unwrap_err().to_string();
    says(&text, &["no port is active", "port 1 of sim0", "rdma link"]);
    nic.set_port(0, 2, false);
    let text = Side::open(nic, options(), identity(0, 2)).map(drop).unwrap_err().to_string();
    says(&text, &["port 1 of sim0", "port 2 of sim0"]);
}

fn pair(nics: [&Arc<SimulatedNic>; 2], packet_sizes: [usize; 2]) -> Vec<Runtime> {
    let start = |(at, bootstrap): (usize, InProcess)| {
        let settings = built(OverSimulatedNic::settings().packet_size(packet_sizes[at]));
        let options = VerbsOptions { packet_size: packet_sizes[at], ..VerbsOptions::default() };
        let builder = Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap));
        builder.transport(Box::new(nics[at].transport(options))).start().unwrap()
    };
    InProcess::job(2).unwrap().into_iter().enumerate().map(start).collect()
}

/// Returns the error of a send from rank 0 to rank 1.
fn send_fails(ranks: &[Runtime]) -> String {
    let done = crate::support::sink::Sink::keeping();
    let sent = ranks[0].post_send(Rank(1), vec![1; 8], Tag(1)).comp(&done).submit();
    match sent {
        Err(error) => error.to_string(),
        Ok(_) => {
            until_with_errors(ranks, || done.count() > 0);
            done.take().remove(0).ok().unwrap_err().to_string()
        }
    }
}

#[test]
fn no_queue_pair_left_is_an_error_of_the_post_with_the_number() {
    let _watchdog = Watchdog::over("no queue pair");
    let fabric = fabric();
    let (poor, rich) = (nic(Config::default(), &fabric), nic(Config::default(), &fabric));
    let ranks = pair([&poor, &rich], [8192; 2]);
    poor.faults().fail_call(Call::CreateQp, Which::All, libc::ENOMEM);
    // A shortage ends no peer. A post that may fail says what is lacking, and queued operations
    // wait until the shortage has ended.
    let error = ranks[0].post_send(Rank(1), vec![1; 8], Tag(1)).try_submit().unwrap_err();
    says(&error.to_string(), &["ibv_create_qp", "sim0", "0 connections", "262144 queue pairs"]);
    let done = crate::support::sink::Sink::keeping();
    ranks[0].post_send(Rank(1), vec![1; 8], Tag(1)).comp(&done).submit().unwrap();
    assert!(!happens(&ranks, Duration::from_millis(50), || done.count() > 0));
    poor.faults().fail_call(Call::CreateQp, Which::Nth(0), libc::ENOMEM);
    assert!(done.one(&ranks).error.is_none());
}

#[test]
fn ranks_with_packets_of_different_sizes_are_told_of_the_setting() {
    let _watchdog = Watchdog::over("packet sizes");
    let nic = nic(Config::default(), &fabric());
    says(&send_fails(&pair([&nic, &nic], [8192, 4096])), &["CARRACK_PACKET_SIZE", "8192", "4096"]);
}

#[test]
fn a_rank_of_another_job_is_told_that_it_is_one() {
    let _watchdog = Watchdog::over("another secret");
    let nic = nic(Config::default(), &fabric());
    let mut here = Side::open(nic.clone(), options(), identity(0, 2)).unwrap();
    let other = Identity { secret: [1; 16], ..identity(1, 2) };
    let mut there = Side::open(nic, options(), other).unwrap();
    let _link = there.device.connect(&here.device.address(), PeerId(0)).unwrap();
    let start = std::time::Instant::now();
    loop {
        assert!(here.poll().is_empty(), "a pending connection causes no event");
        if let Some(Event::PeerDown { peer: PeerId(0), cause }) = there.poll().pop() {
            says(&cause.to_string(), &["secret", "another job"]);
            return;
        }
        assert!(start.elapsed() < LIMIT / 2);
    }
}

#[test]
fn explain_tells_why_rdma_cannot_be_used() {
    let _watchdog = Watchdog::over("explain");
    let transports = vec![TransportChoice::Loopback, TransportChoice::VerbsSimulated];
    let settings =
        OverSimulatedNic::settings().transports(transports).setting("verbs_device", "mlx5_7");
    let bootstrap = InProcess::job(1).unwrap().remove(0);
    let rank = Runtime::builder()
        .settings(built(settings))
        .bootstrap(Box::new(bootstrap))
        .start()
        .unwrap();
    let explained = format!("{:?}", rank.explain(Duration::from_secs(5)));
    says(&explained, &["loopback", "mlx5_7", "sim0"]);
}
