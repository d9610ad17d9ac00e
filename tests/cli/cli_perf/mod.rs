//! `carrack perf`, `info` and `explain`, with real processes.
//!
//! No test asserts how quick something is: figures are only compared with each other.

mod memory;

use crate::support::built::carrack;
use crate::support::children::{Watched as _, limit, started, unset};
use children::{Heard, Running, Stream};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

/// Returns the command with these arguments, and with none of the variables that this test may have
/// been started with.
fn command(args: &[&str]) -> Command {
    let mut command = Command::new(carrack());
    unset(&mut command, &[]).args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    let said = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{:?}\n{said}\n{}", output.status, stderr(output));
    said
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the lines of `perf` with these arguments, as JSON.
fn perf(args: &[&str]) -> Vec<Value> {
    let output = run(&[&["perf", "--json", "--seconds", "0.02"], args].concat());
    lines(&stdout(&output))
}

fn lines(said: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    said.lines().map(parse).collect()
}

/// Fails unless a line has all fields, with values that can be.
fn assert_sane(line: &Value) {
    let field = |name: &str| line.get(name).unwrap_or_else(|| panic!("no {name} in {line}"));
    let positive =
        |value: &Value| value.as_f64().is_some_and(|value| value > 0.0 && value.is_finite());
    assert!(field("messages").as_u64() > Some(0), "{line}");
    if field("test") == "latency" {
        let us = field("latency_us");
        let names = ["min", "p50", "p90", "p99", "p999", "p9999", "max"];
        let figures = names.map(|name| us[name].as_f64().unwrap());
        assert!(0.0 < figures[0] && figures.is_sorted(), "{line}");
        assert!(positive(&us["mean"]), "{line}");
        assert!(field("bandwidth_gbps").is_null() && field("rate_mps").is_null(), "{line}");
    } else {
        assert!(field("latency_us").is_null(), "{line}");
        assert!(positive(field("rate_mps")), "{line}");
        let bytes = field("rate_mps").as_f64().unwrap() * 1e6 * field("size").as_f64().unwrap();
        let bandwidth = field("bandwidth_gbps").as_f64().unwrap() * 1e9;
        assert!((bandwidth - bytes).abs() <= bytes * 1e-6, "{line}");
    }
}

/// Returns the point that a line describes.
fn point(line: &Value) -> (String, String, u64, u64) {
    let text = |name: &str| line[name].as_str().unwrap().to_owned();
    (text("op"), text("test"), line["size"].as_u64().unwrap(), line["threads"].as_u64().unwrap())
}

#[test]
fn every_point_is_a_line_of_json_with_sane_figures() {
    let lines = perf(&["--size", "0,8,4K"]);
    lines.iter().for_each(assert_sane);
    let mut expected = Vec::new();
    for op in ["am", "send"] {
        for test in ["latency", "bandwidth", "rate"] {
            expected.extend([0, 8, 4096].map(|size| (op.to_owned(), test.to_owned(), size, 1)));
        }
    }
    assert_eq!(lines.iter().map(point).collect::<Vec<_>>(), expected);
    assert!(lines.iter().all(|line| line["transport"] == "shm"));
    assert!(lines.iter().all(|line| line["mem"] == "host" && line["peer_mem"] == "host"));
}

#[test]
fn rate_is_of_eight_bytes_unless_asked_otherwise() {
    let lines = perf(&["rate", "--op", "am"]);
    assert_eq!(lines.iter().map(point).collect::<Vec<_>>(), [("am".into(), "rate".into(), 8, 1)]);
}

#[test]
fn operations_on_remote_memory_are_measured_over_both_transports() {
    for transport in ["shm", "loopback"] {
        let lines =
            perf(&["--op", "put,get,fetch_add", "--size", "0,8,20000", "--transport", transport]);
        lines.iter().for_each(assert_sane);
        let of =
            |op: &str| lines.iter().map(point).filter(|point| point.0 == op).collect::<Vec<_>>();
        assert_eq!((of("put").len(), of("get").len()), (9, 9));
        let words = ["latency", "rate"].map(|test| ("fetch_add".to_owned(), test.to_owned(), 8, 1));
        assert_eq!(of("fetch_add"), words);
    }
}

#[test]
fn a_batch_of_pieces_is_measured_over_both_transports_and_onto_simulated_gpus() {
    for args in
        [&["--transport", "shm"][..], &["--transport", "loopback"], &["--mem", "device,host"]]
    {
        let batch = [
            "perf",
            "--json",
            "--seconds",
            "0.05",
            "--op",
            "put_batch",
            "--size",
            "0,8,100",
            "--pieces",
            "30",
        ];
        let output =
            command(&[&batch[..], args].concat()).env("CARRACK_GPU", "fake").output().unwrap();
        let lines = lines(&stdout(&output));
        lines.iter().for_each(assert_sane);
        let of = |size| ("put_batch".to_owned(), "latency".to_owned(), size, 1);
        assert_eq!(lines.iter().map(point).collect::<Vec<_>>(), [0, 8, 100].map(of));
        assert!(lines.iter().all(|line| line["pieces"] == 30), "{lines:?}");
    }
}

#[test]
fn a_barrier_is_measured_over_as_many_ranks_as_there_are() {
    let carrack = carrack().to_str().unwrap();
    let launched = |ranks: &str| {
        let perf = ["perf", "--op", "barrier", "--seconds", "0.05", "--json"];
        lines(&stdout(
            &run(&[&["run", "--no-tag", "-n", ranks, "--", carrack], &perf[..]].concat()),
        ))
    };
    for (ranks, lines) in [
        (2, perf(&["--op", "barrier"])),
        (4, perf(&["--op", "barrier", "--ranks", "4", "--threads", "1,2"])),
        (3, perf(&["--op", "barrier", "--ranks", "3", "--transport", "loopback"])),
        (4, launched("4")),
    ] {
        lines.iter().for_each(assert_sane);
        let expected = [("barrier".to_owned(), "latency".to_owned(), 0, 1)];
        assert_eq!(lines.iter().map(point).collect::<Vec<_>>(), expected);
        assert_eq!(lines[0]["ranks"], ranks);
    }
}

#[test]
fn threads_have_a_device_each_and_all_their_messages_are_counted() {
    let lines = perf(&["--op", "am,send", "--size", "8", "--threads", "1,2"]);
    lines.iter().for_each(assert_sane);
    assert_eq!(lines.len(), 2 * 2 * 3);
    assert_eq!(lines.iter().filter(|line| line["threads"] == 2).count(), 6);
}

#[test]
fn loopback_is_measured_within_one_process_and_says_so() {
    let lines = perf(&["--transport", "loopback", "--size", "8,4K"]);
    lines.iter().for_each(assert_sane);
    assert!(lines.len() == 12 && lines.iter().all(|line| line["transport"] == "loopback"));
}

#[test]
fn two_ranks_of_a_launcher_are_used_and_another_number_is_refused() {
    let perf = |ranks: &str| {
        let carrack = carrack().to_str().unwrap();
        let perf = ["perf", "latency", "--op", "am", "--size", "8", "--seconds", "0.05", "--json"];
        run(&[&["run", "--no-tag", "-n", ranks, "--", carrack], &perf[..]].concat())
    };
    lines(&stdout(&perf("2"))).iter().for_each(assert_sane);
    let three = perf("3");
    assert_eq!(three.status.code(), Some(2), "{}", stderr(&three));
    assert!(stderr(&three).contains("carrack run -n 2"), "{}", stderr(&three));
}

#[test]
fn ranks_that_share_one_core_are_measured_all_the_same() {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu)).unwrap();
    let mut one = rustix::thread::CpuSet::new();
    one.set(first);
    // In a thread of its own: what it starts inherits its place.
    std::thread::spawn(move || {
        rustix::thread::sched_setaffinity(None, &one).unwrap();
        let lines = perf(&["--size", "8"]);
        lines.iter().for_each(assert_sane);
        assert_eq!(lines.len(), 6);
    })
    .join()
    .unwrap();
}

#[test]
fn people_get_a_table() {
    let said = stdout(&run(&["perf", "latency", "--size", "8,4K", "--seconds", "0.05"]));
    let rows: Vec<_> = said.lines().collect();
    assert!(rows[0].starts_with("# two ranks over shm, host memory"), "{said}");
    assert!(rows[1].contains("p50 µs") && rows[1].contains("GB/s"), "{said}");
    assert_eq!(rows.len(), 2 + 4, "{said}");
    assert!(
        rows[2].starts_with("am ") && rows[3].contains("4 KiB") && rows[4].starts_with("send "),
        "{said}"
    );
    assert!(!said.contains('\u{1b}'), "no colours in a pipe");
}

#[test]
fn a_plot_has_both_charts_with_both_operations() {
    let file = std::env::temp_dir().join(format!("carrack-perf-{}.svg", std::process::id()));
    let output =
        run(&["perf", "--size", "8,64,4K", "--seconds", "0.02", "--plot", file.to_str().unwrap()]);
    stdout(&output);
    let svg = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    let texts: Vec<_> = svg.lines().map(str::trim).collect();
    for label in ["latency (µs)", "bandwidth (GB/s)", "message size (bytes)", "4 KiB"] {
        assert!(texts.iter().any(|text| text.contains(label)), "no {label}");
    }
    for op in ["am", "send"] {
        assert_eq!(texts.iter().filter(|text| **text == op).count(), 2, "{op} is in both legends");
    }
    assert!(!svg.contains("NaN"));
}

#[test]
fn a_plot_of_percentiles_has_a_curve_for_each_latency_and_a_mark_for_each_nine() {
    let file = std::env::temp_dir().join(format!("carrack-percentiles-{}.svg", std::process::id()));
    let path = file.to_str().unwrap();
    let ops = ["--op", "am,get,barrier", "--size", "8,4K"];
    stdout(&run(
        &[&["perf", "all", "--seconds", "0.05", "--plot-percentiles", path], &ops[..]].concat()
    ));
    let svg = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let texts: Vec<_> = svg.lines().map(str::trim).collect();
    for label in ["p50", "p90", "p99", "p99.9", "p99.99", "max"] {
        assert!(texts.contains(&label), "no {label}");
    }
    for name in ["am, 8 B", "am, 4 KiB", "get, 8 B", "get, 4 KiB", "barrier"] {
        assert_eq!(texts.iter().filter(|text| **text == name).count(), 1, "{name}");
    }
    assert!(!svg.contains("NaN"));
}

#[test]
fn threads_may_share_their_ranks_device() {
    for transport in ["shm", "loopback"] {
        let sizes = ["--size", "8,20000", "--threads", "2", "--transport", transport];
        let lines =
            perf(&[&["--op", "am,send,put,get,fetch_add", "--share-device"], &sizes[..]].concat());
        lines.iter().for_each(assert_sane);
        assert_eq!(lines.len(), 4 * 6 + 2);
        assert!(lines.iter().all(|line| line["device"] == "shared"));
    }
    assert!(perf(&["rate"]).iter().all(|line| line["device"] == "own"));
}

#[test]
fn threads_wait_as_they_are_asked_to() {
    for (wait, said) in [("sleep", "sleep when idle"), ("poll", "a rank poll")] {
        for transport in ["shm", "tcp"] {
            let words = ["perf", "latency", "--size", "8", "--seconds", "0.02", "--wait", wait];
            let output = run(&[&words[..], &["--transport", transport]].concat());
            assert!(output.status.success(), "{}", stderr(&output));
            let told = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(told.contains(said), "{told}");
        }
    }
}

#[test]
fn a_plot_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let output = run(&["perf", "--seconds", "600", "--plot", "/no/such/folder/plot.svg"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("carrack: --plot"), "{}", stderr(&output));
}

#[test]
fn what_makes_no_sense_is_refused_with_what_would() {
    for (args, hint) in [
        (&["--size", "4KB"][..], "4KiB"),
        (&["--op", "teleport"], "possible values: am, send"),
        (&["--threads", "0"], "1 to 256"),
        (&["--ranks", "1", "--op", "barrier"], "2 to 4096"),
        (&["--ranks", "4", "--op", "am,barrier"], "all but --op barrier"),
        (&["bandwidth", "--op", "barrier"], "a latency only"),
        (&["--op", "fetch_add", "--mem", "host,device:3"], "not with --mem host,device:3"),
        (&["--op", "put_seen", "--mem", "device,host"], "host memory of both ranks only"),
        (&["--mem", "gpu"], "host, pinned, device or device:N"),
        (&["--mem", "device:x"], "counted from 0"),
        (&["--mem", "host,host,host"], "or two"),
        (&["--transport", "pigeon"], "loopback, shm"),
        (&["--transport", "shm,loopback"], "one transport"),
        (&["--seconds", "0"], "above 0"),
        (&["throughput"], "possible values: latency, bandwidth, rate, all"),
    ] {
        let output = run(&[&["perf"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
#[ignore = "full: ten seconds; many measurements"]
fn messages_longer_than_a_packet_are_measured_too() {
    for kernel_copy in ["auto", "off"] {
        let args = ["perf", "latency", "--size", "1K,20000,1M", "--seconds", "0.05", "--json"];
        let output = command(&args)
            .env("CARRACK_PACKET_SIZE", "1K")
            .env("CARRACK_KERNEL_COPY", kernel_copy)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let sizes: Vec<_> =
            lines(&stdout(&output)).iter().map(|line| line["size"].as_u64().unwrap()).collect();
        assert_eq!(sizes, [1024, 20_000, 1 << 20, 1024, 20_000, 1 << 20]);
    }
}

#[test]
fn a_rank_that_dies_ends_the_measurement_with_an_error_that_names_it() {
    use rustix::process::{Pid, Signal, kill_process};
    use std::time::Duration;
    let carrack = carrack().to_str().unwrap();
    let script = format!(
        "if [ $CARRACK_RANK = 1 ]; then echo $$ >&2; fi; exec {carrack} perf latency --op am \
        --size 8 --seconds 60"
    );
    let mut job = started(command(&["run", "--no-tag", "-n", "2", "--", "/bin/sh", "-c", &script]));
    let pid = job.next_line(Stream::Err, limit()).unwrap();
    let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    // Long enough for it to be a rank that measures; were it not, the job would have to end all the
    // same.
    std::thread::sleep(Duration::from_secs(1));
    kill_process(pid, Signal::KILL).unwrap();
    let Heard { status, stderr: rest, .. } = job.ends();
    assert!(!status.success() && rest.contains("rank 1"), "{status:?}: {rest}");
}

#[test]
fn info_says_what_there_is_and_where_each_setting_comes_from() {
    let output = command(&["info"])
        .env("CARRACK_SHM_SLOTS", "512")
        .env("CARRACK_GPU", "fake")
        .output()
        .unwrap();
    let said = stdout(&output);
    for part in
        ["Machine", "kernel   Linux", "loopback  available", "shm       available", "simulated"]
    {
        assert!(said.contains(part), "no {part} in\n{said}");
    }
    let setting = |name: &str| {
        let line =
            said.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("no {name}"));
        line.split_whitespace().skip(1).take(2).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(setting("CARRACK_SHM_SLOTS"), "512 environment");
    assert_eq!(setting("CARRACK_BACKLOG"), "1024 default");
}

#[test]
fn info_has_the_same_as_json() {
    let info: Value = serde_json::from_str(&stdout(&run(&["info", "--json"]))).unwrap();
    assert!(
        info["machine"]["cpu_count"].as_u64() > Some(0)
            && info["machine"]["memory_bytes"].as_u64() > Some(1 << 20)
    );
    let transports: Vec<_> =
        info["transports"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(transports, ["loopback", "shm", "verbs", "tcp", "verbs-simulated"]);
    let settings = info["settings"].as_array().unwrap();
    let packet =
        settings.iter().find(|setting| setting["variable"] == "CARRACK_PACKET_SIZE").unwrap();
    assert!(packet["value"] == "8192" && packet["origin"] == "default", "{packet}");
}

#[test]
fn info_names_each_gpu_by_uuid_and_address_and_says_what_it_can_do_with_each_other() {
    let gpus = |args: &[&str]| {
        let output = command(args)
            .env("CARRACK_GPU", "fake")
            .env("CARRACK_FAKE_GPUS", "3")
            .output()
            .unwrap();
        stdout(&output)
    };
    let info: Value = serde_json::from_str(&gpus(&["info", "--json"])).unwrap();
    let text = gpus(&["info"]);
    let devices = info["gpus"][0]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 3, "{info:#}");
    for (at, device) in devices.iter().enumerate() {
        let word = |name: &str| device[name].as_str().unwrap();
        assert!(word("uuid").starts_with("GPU-") && word("uuid").len() == 40, "{device}");
        assert!(word("pci").ends_with(".0") && word("pci").matches(':').count() == 2, "{device}");
        assert_eq!((&device["ordinal"], &device["simulated"]), (&at.into(), &true.into()));
        let peers = device["peers"].as_array().unwrap();
        let others: Vec<_> =
            peers.iter().map(|peer| peer["ordinal"].as_u64().unwrap() as usize).collect();
        assert_eq!(others, (0..3).filter(|other| *other != at).collect::<Vec<_>>());
        for peer in peers {
            assert_eq!(
                (&peer["access"], &peer["no_access"]),
                (&true.into(), &Value::Null),
                "{peer}"
            );
            assert!(
                peer["native_atomics"].is_boolean() && peer["performance_rank"].is_i64(),
                "{peer}"
            );
            assert_eq!(peer["link"], "simulated");
        }
        for name in ["uuid", "pci", "name"] {
            assert!(text.contains(word(name)), "no {name} of {at} in\n{text}");
        }
    }
    let uuids: std::collections::BTreeSet<_> =
        devices.iter().map(|device| device["uuid"].as_str()).collect();
    assert_eq!(uuids.len(), 3);
    let link = "peer access, no native atomics, performance rank 0, simulated";
    assert_eq!(text.matches(link).count(), 6, "{text}");
}

#[test]
fn a_wrong_variable_of_the_launcher_is_a_wrong_environment() {
    let torchruns = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "::1")];
    for verb in [&["explain"][..], &["perf", "latency"]] {
        for (wrong, value) in [("MASTER_PORT", "http"), ("CARRACK_JOB_SECRET", "abc")] {
            let mut command = command(verb);
            let output = command.env("MASTER_PORT", "29500").envs(torchruns).env(wrong, value);
            let output = output.output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{verb:?}: {}", stderr(&output));
            assert!(stderr(&output).contains(wrong), "{verb:?}: {}", stderr(&output));
        }
    }
}

#[test]
fn a_variable_that_is_misspelt_is_met_with_the_one_that_was_meant() {
    for verb in ["info", "perf", "explain"] {
        let output = command(&[verb]).env("CARRACK_PACKET_SIZ", "4K").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{verb}");
        assert!(
            stderr(&output).contains("did you mean CARRACK_PACKET_SIZE?"),
            "{verb}: {}",
            stderr(&output)
        );
        assert!(stderr(&output).starts_with("carrack: "), "{verb}: {}", stderr(&output));
    }
}

#[test]
fn explain_says_of_each_peer_which_path_was_taken_and_why_no_other() {
    let said = stdout(&run(&["explain"]));
    assert!(said.contains("rank 0 to rank 0 (itself), device 0: loopback"), "{said}");
    assert!(
        said.contains("rank 0 to rank 1, device 0: shm") && said.contains("loopback   refused:"),
        "{said}"
    );
    assert!(said.contains("from host memory:") && !said.contains("rank 1 to"), "{said}");
    let hint = "This is the view of rank 0 of 2; --all prints that of every rank.";
    assert_eq!(said.lines().last(), Some(hint), "{said}");
    assert!(!stdout(&run(&["explain", "--all"])).contains("the view of rank 0"));
    assert_eq!(lines(&stdout(&run(&["explain", "--json"]))).len(), 2, "JSON and nothing else");
}

#[test]
fn explain_knows_of_a_new_link_whether_the_kernel_copies() {
    let said = |choice: &str| {
        let output = command(&["explain"]).env("CARRACK_KERNEL_COPY", choice).output().unwrap();
        let said = stdout(&output);
        said.split_once("rank 0 to rank 1").unwrap().1.to_owned()
    };
    let off = said("off");
    assert!(off.contains("(the kernel does not copy: CARRACK_KERNEL_COPY=off)"), "{off}");
    let auto = said("auto");
    assert!(auto.contains("offered and copied by the kernel beyond"), "{auto}");
}

#[test]
fn rust_log_says_what_is_logged_where_carrack_log_is_not_set() {
    let logs = |vars: &[(&str, &str)]| {
        let mut explain = command(&["explain"]);
        let output = explain.env_remove("RUST_LOG").envs(vars.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let path = "path chosen";
    assert!(!logs(&[]).contains(path));
    assert!(logs(&[("RUST_LOG", "info")]).contains(path));
    assert!(logs(&[("CARRACK_LOG", "info")]).contains(path));
    assert!(!logs(&[("RUST_LOG", "info"), ("CARRACK_LOG", "warn")]).contains(path));
    // Launcher, keeper and both ranks have the variable.
    let said = logs(&[("RUST_LOG", "carrack=loud")]);
    assert_eq!(said.matches("RUST_LOG=carrack=loud is no filter").count(), 1, "{said}");
}

#[test]
fn memory_that_a_nic_reaches_is_not_said_to_be_reached_through_its_owner() {
    let args = [
        "perf",
        "latency",
        "--op",
        "put",
        "--transport",
        "verbs-simulated",
        "--size",
        "8",
        "--seconds",
        "0.05",
    ];
    let output = command(&args).env("CARRACK_LOG", "info").output().unwrap();
    stdout(&output);
    let said = stderr(&output);
    assert!(said.contains("not mapped here") && said.contains("by=\"the NIC\""), "{said}");
    assert!(!said.contains("its owner\"") && !said.contains("through its owner"), "{said}");
}

#[test]
fn explain_has_every_ranks_view_in_order_when_asked() {
    let views = lines(&stdout(&run(&["explain", "--all", "--json"])));
    let pairs: Vec<_> =
        views.iter().map(|view| (view["rank"].as_u64(), view["peer"].as_u64())).collect();
    let expected = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(rank, peer)| (Some(rank), Some(peer)));
    assert_eq!(pairs, expected);
    for view in views {
        let chosen = if view["rank"] == view["peer"] { "loopback" } else { "shm" };
        assert_eq!(view["chosen"], chosen, "{view}");
        for path in view["paths"].as_array().unwrap() {
            assert!((path["verdict"] == "chosen") == path["why"].is_null(), "{view}");
        }
    }
}

#[test]
fn a_reader_that_has_heard_enough_is_no_failure() {
    let first_line_of = |args: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = command(args);
        let child = Running::start(command.stdout(writer).stderr(Stdio::piped())).unwrap();
        // Its copy of the writer.
        drop(command);
        let mut first = String::new();
        // The reader is dropped here, and the pipe with it.
        BufReader::with_capacity(1, reader).read_line(&mut first).unwrap();
        (first, child.ends())
    };
    for args in [
        &["info"][..],
        &["explain"],
        &["perf", "--seconds", "0.05", "--size", "8"],
        &["perf", "--help"],
        &["put_get_bench", "all", "-m", "8:8", "--seconds", "0.01"],
    ] {
        let (first, output) = first_line_of(args);
        assert!(!first.is_empty(), "{args:?}");
        assert!(output.status.success(), "{args:?}: {:?} {}", output.status, output.stderr);
        assert!(!output.stderr.contains("panicked"), "{args:?}: {}", output.stderr);
    }
}

/// Returns the comments and the rows of `put_get_bench` with these arguments.
fn osu(args: &[&str]) -> (Vec<String>, Vec<Vec<f64>>) {
    let output = run(&[&["put_get_bench", "--seconds", "0.02"], args].concat());
    let said = stdout(&output);
    let (comments, rows): (Vec<_>, Vec<_>) =
        said.lines().filter(|line| !line.is_empty()).partition(|line| line.starts_with('#'));
    let figures = |row: &&str| row.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (comments.into_iter().map(str::to_owned).collect(), rows.iter().map(figures).collect())
}

#[test]
fn the_osu_format_has_a_row_of_size_and_figure_for_each_power_of_two() {
    let tests = ["latency", "bw", "put_latency", "put_bw", "get_latency", "get_bw", "am_latency"];
    for test in tests {
        let (comments, rows) = osu(&[test, "H", "H", "-m", "8:32"]);
        let sizes: Vec<_> = rows.iter().map(|row| row[0]).collect();
        assert_eq!(sizes, [8.0, 16.0, 32.0], "{test}");
        assert!(rows.iter().all(|row| row.len() == 2 && row[1] > 0.0), "{test}: {rows:?}");
        let buffers = match test.starts_with("put") || test.starts_with("get") {
            true => "# Rank 0 Memory on HOST (H) and Rank 1 Memory on HOST (H)",
            false => "# Send Buffer on HOST (H) and Receive Buffer on HOST (H)",
        };
        assert!(comments.iter().any(|line| line == buffers), "{comments:?}");
        let column = if test.ends_with("latency") { "Latency (us)" } else { "Bandwidth (MB/s)" };
        assert!(comments.last().unwrap().ends_with(column), "{comments:?}");
    }
    let (_, rows) = osu(&["mbw_mr", "-m", "8:8"]);
    let [[size, megabytes, messages]] =
        rows.iter().map(|row| row[..].try_into().unwrap()).collect::<Vec<[f64; 3]>>()[..]
    else {
        panic!("{rows:?}");
    };
    // It is printed with two digits behind the point.
    let difference = (messages * 8.0 / 1e6 - megabytes).abs();
    assert!(size == 8.0 && difference <= 0.005 + 0.02 * megabytes, "{rows:?}");
}

#[test]
fn the_osu_format_goes_through_every_pair_of_memory() {
    let output =
        command(&["put_get_bench", "get_latency", "all", "-m", "64:64", "--seconds", "0.01"])
            .env("CARRACK_GPU", "fake")
            .output()
            .unwrap();
    let said = stdout(&output);
    let pairs: Vec<_> = said.lines().filter(|line| line.starts_with("# Rank 0 Memory")).collect();
    assert!(
        pairs.len() == 9
            && pairs[8] == "# Rank 0 Memory on DEVICE (D) and Rank 1 Memory on DEVICE (D)",
        "{said}"
    );
    assert_eq!(said.lines().filter(|line| line.starts_with("64 ")).count(), 9, "{said}");
    for wrong in
        [&["latency", "H"][..], &["latency", "M", "M"], &["latency", "-m", "8:4"], &["speed"]]
    {
        let output = run(&[&["put_get_bench"], wrong].concat());
        assert!(output.status.code() == Some(2) && !stderr(&output).is_empty(), "{wrong:?}");
    }
    // Not in words of the options of perf, which this command has not.
    let output = command(&["put_get_bench", "latency", "D7", "H"])
        .env("CARRACK_GPU", "fake")
        .output()
        .unwrap();
    let said = stderr(&output);
    assert!(
        !output.status.success() && said.contains("device:7") && !said.contains("--mem"),
        "{said}"
    );
}

/// Programs that have no `main` of their own have the command make their trials.
#[test]
fn the_command_answers_the_process_that_orders_a_trial_and_does_nothing_else() {
    let said = command(&["info"]).env("CARRACK_TRIAL", "whether this is known").output().unwrap();
    assert_eq!(
        stdout(&said),
        "carrack trial: failed: this program knows no trial `whether this is known`\n"
    );
    assert_eq!(stderr(&said), "");
}

#[test]
fn messages_longer_than_the_machine_has_room_for_are_an_error_and_no_crash() {
    for op in ["am", "send", "put", "get"] {
        let said = run(&["perf", "--op", op, "--size", "900000000G"]);
        assert_eq!(said.status.code(), Some(1), "{op}: {}", stderr(&said));
        assert!(
            stderr(&said).contains("no room for 966367641600000000 bytes"),
            "{op}: {}",
            stderr(&said)
        );
    }
}
