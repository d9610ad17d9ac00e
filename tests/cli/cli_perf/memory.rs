//! `carrack perf` with memory of all kinds, on simulated GPUs.

use super::{assert_sane, command, lines, stderr, stdout};
use serde_json::Value;
use std::process::Output;

/// Runs the command's `perf` with simulated GPUs, and these arguments.
fn perf_on_fake_gpus(args: &[&str]) -> Output {
    let perf = ["perf", "--json", "--seconds", "0.01"];
    command(&[&perf, args].concat()).env("CARRACK_GPU", "fake").output().unwrap()
}

/// Returns the name of a memory kind in the results of simulated GPUs.
fn simulated(kind: &str) -> String {
    if kind == "host" { kind.into() } else { format!("{kind} (simulated)") }
}

#[test]
#[ignore = "full: half a minute; every operation is measured"]
fn the_memory_of_a_simulated_gpu_is_measured_and_called_simulated() {
    for (transport, ops, size) in
        [("shm", "am,send,put,get,copy", "20000"), ("loopback", "am,send", "4K")]
    {
        for sharing in [&["--threads", "2"][..], &["--threads", "2", "--share-device"]] {
            let args = [
                "--mem",
                "device",
                "--op",
                ops,
                "--size",
                &format!("8,{size}"),
                "--transport",
                transport,
            ];
            let output = perf_on_fake_gpus(&[&args, sharing].concat());
            let lines = lines(&stdout(&output));
            lines.iter().for_each(assert_sane);
            let sides = |line: &Value| {
                ["mem", "peer_mem"].map(|name| line[name].as_str().unwrap().to_owned())
            };
            assert!(lines.iter().all(|line| sides(line) == [const { "device:0 (simulated)" }; 2]));
            assert_eq!(lines.len(), ops.split(',').count() * 2 * 3);
            assert_eq!(stderr(&output), "", "nothing was dropped on the way");
        }
    }
}

#[test]
fn what_the_runtime_tells_itself_over_loopback_is_understood_when_packets_are_on_a_gpu() {
    for op in ["put", "send", "am"] {
        let args = [
            "latency",
            "--mem",
            "device",
            "--op",
            op,
            "--size",
            "20000",
            "--transport",
            "loopback",
        ];
        assert_eq!(stderr(&perf_on_fake_gpus(&args)), "", "{op}");
    }
}

#[test]
#[ignore = "full: half a minute; 36 measurements"]
fn every_pair_of_kinds_of_memory_is_measured_between_two_processes() {
    let kinds = ["host", "pinned", "device:0", "device:1"];
    // Memory that cannot be mapped included: its owner moves the bytes.
    for (mine, theirs) in kinds.iter().flat_map(|mine| kinds.map(|theirs| (*mine, theirs))) {
        let pair = format!("{mine},{theirs}");
        for test in ["latency", "bandwidth"] {
            let args = [test, "--op", "put,get,send", "--mem", &pair, "--size", "8,100K"];
            let output = perf_on_fake_gpus(&args);
            let lines = lines(&stdout(&output));
            lines.iter().for_each(assert_sane);
            assert_eq!(lines.len(), 6, "{pair}");
            let sides = (simulated(mine), simulated(theirs));
            assert!(
                lines.iter().all(|line| line["mem"] == sides.0 && line["peer_mem"] == sides.1),
                "{pair}"
            );
            assert_eq!(stderr(&output), "", "{pair}");
        }
    }
}

#[test]
fn a_copy_is_measured_in_rank_0_between_all_kinds_of_memory() {
    for pair in ["host", "host,pinned", "pinned,device:1", "device:0,device:1", "device,host"] {
        let lines = lines(&stdout(&perf_on_fake_gpus(&[
            "--op", "copy", "--mem", pair, "--size", "0,8,100K",
        ])));
        lines.iter().for_each(assert_sane);
        assert_eq!(lines.len(), 9);
        assert!(
            lines.iter().all(|line| line["op"] == "copy" && line["transport"] == "none"),
            "{pair}"
        );
    }
}

#[test]
fn people_are_told_what_memory_both_sides_have() {
    let args = [
        "perf",
        "latency",
        "--op",
        "put",
        "--mem",
        "host,device:1",
        "--size",
        "8",
        "--seconds",
        "0.01",
    ];
    let said = stdout(&command(&args).env("CARRACK_GPU", "fake").output().unwrap());
    assert!(
        said.starts_with("# two ranks over shm, host to device:1 (simulated) memory, on CPUs"),
        "{said}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_says_what_is() {
    let none: &[&str] = &["CARRACK_GPU=none", "CARRACK_GPU=fake gives"];
    let others: &[&str] = &["no such device", "fake (simulated) has device:0 (", "device:1 ("];
    for (gpu, mem, hints) in [
        ("none", "device", none),
        ("none", "host,pinned", none),
        ("none", "device:1,host", none),
        ("fake", "device:2", others),
        ("fake", "host,device:2", others),
    ] {
        for transport in ["shm", "loopback"] {
            let args = ["perf", "--mem", mem, "--transport", transport];
            let output = command(&args).env("CARRACK_GPU", gpu).output().unwrap();
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{gpu} {mem}: {said}");
            assert!(hints.iter().all(|hint| said.contains(hint)), "{gpu} {mem}: {said}");
            assert!(output.stdout.is_empty() && said.lines().count() == 1, "{gpu} {mem}: {said}");
        }
    }
}
