//! `carrack selftest`: of a built tree, and of bundles in which something is wrong on purpose.

#[path = "../../xtask/src/bundle/pack.rs"]
mod pack;

use crate::support::built;
use crate::support::built::carrack;
use crate::support::children::{Watched as _, started, succeeded, unset};
use pack::{ARCHIVE, ArchiveWriter};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A folder for a test; removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("selftest-{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    /// Creates a bundle with these shell scripts in the place of test programs.
    fn bundle(test: &str, scripts: &[(&str, &str)]) -> Self {
        let folder = Self::new(test);
        let place = folder.0.join("carrack");
        // Not a symbolic link: it looks for its bundle where it lies.
        fs::hard_link(carrack(), &place)
            .or_else(|_| fs::copy(carrack(), &place).map(drop))
            .unwrap();
        let about = r#"{"version": "1.2.3", "commit": "a0b1c2", "built": "by a test"}"#;
        fs::write(folder.0.join("bundle.json"), about).unwrap();
        fs::create_dir_all(folder.0.join("tests")).unwrap();
        for (name, script) in scripts {
            let path = folder.0.join("tests").join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        folder
    }

    /// Creates a bundle with the scripts in an archive, as xtask packs it.
    fn packed(test: &str, scripts: &[(&str, &str)]) -> Self {
        let folder = Self::bundle(test, scripts);
        let mut writer = ArchiveWriter::begin(&folder.0.join(ARCHIVE), 1 << 16).unwrap();
        for (name, _) in scripts {
            let below = Path::new("tests").join(name);
            writer.add(&below, &folder.0.join(&below)).unwrap();
        }
        writer.finish().unwrap();
        fs::remove_dir_all(folder.0.join("tests")).unwrap();
        folder
    }

    /// Creates a temporary folder for the selftest.
    fn temporary(&self) -> PathBuf {
        let folder = self.0.join("temporary");
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn report(&self) -> PathBuf {
        self.0.join("report")
    }

    /// Returns the selftest of the bundle on simulated GPUs, of the parts with `filter` in their
    /// names.
    fn selftest(&self, filter: &str, args: &[&str]) -> Command {
        selftest(&self.0.join("carrack"), &self.report(), filter, args)
    }

    fn json(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.report().join("report.json")).unwrap())
            .unwrap()
    }

    fn people(&self) -> String {
        fs::read_to_string(self.report().join("report.md")).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn selftest(carrack: &Path, report: &Path, filter: &str, args: &[&str]) -> Command {
    let mut command = Command::new(carrack);
    command
        .args(["selftest", "--gpu", "fake", "--filter", filter, "--report"])
        .arg(report)
        .args(args);
    unset(&mut command, &[]);
    command
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text)).concat()
}

fn part<'a>(report: &'a Value, name: &str) -> &'a Value {
    let parts = report["parts"].as_array().unwrap();
    parts
        .iter()
        .find(|part| part["name"] == name)
        .unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

/// Counts the processes that have a word on their command line.
fn running(word: &str) -> usize {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.split(|byte| *byte == 0).any(|arg| arg == word.as_bytes())).count()
}

const GOOD: &str = "echo 'skipped: it is not here'; echo 'test result: ok. 2 passed; 0 failed; 1 \
    ignored; 0 measured'";

#[test]
#[ignore = "full: ten seconds, and it builds programs"]
fn a_built_tree_is_tested_and_its_simulated_gpus_are_called_simulated() {
    built::test_program("alone");
    built::examples();
    let folder = Folder::new("tree");
    let filter = "quiet_path,ring_p2p,halo scaling,perf copy pinned,device:0";
    let output = selftest(carrack(), &folder.report(), filter, &["--quick", "--seconds", "0.03"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let report = folder.json();
    assert!(
        part(&report, "perf copy pinned,host (simulated)")["command"]
            .as_str()
            .unwrap()
            .contains("--seconds 0.03 ")
    );
    assert_eq!((&report["gpus"], &report["no_cuda"]), (&"simulated".into(), &"--gpu fake".into()));
    assert!(report["date"].as_str().unwrap().ends_with(" UTC"));
    assert!(report["command"].as_str().unwrap().contains("--filter"));
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["info"]["machine"]["cpu_count"].as_u64() > Some(0));
    let device = &report["info"]["gpus"][0]["devices"][0];
    assert_eq!(device["simulated"], true);
    assert!(
        device["peers"][0]["performance_rank"].is_i64()
            && device["peers"][0]["native_atomics"].is_boolean()
    );

    let tests = part(&report, "quiet_path");
    assert_eq!(tests["outcome"], "passed");
    assert!(tests["tests"]["passed"].as_u64() > Some(3), "{tests}");
    let example = part(&report, "example ring_p2p (simulated)");
    assert!(example["words"].as_str().unwrap().contains("came back unchanged"), "{example}");
    let figures = report["perf"].as_array().unwrap();
    assert!(!figures.is_empty());
    for line in figures.iter().filter(|line| line["mem"] != "host") {
        assert!(line["mem"].as_str().unwrap().contains("(simulated)"), "{line}");
    }
    let halo = report["halo"].as_array().unwrap();
    assert_eq!(halo.iter().map(|run| run["gpus"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(2)]);
    assert!(halo.iter().all(|run| run["step_us"].as_f64() > Some(0.0)), "{halo:?}");
    for (drawn, holds) in
        [("halo-field.svg", "<rect"), ("halo-scaling.svg", "simulated: says nothing")]
    {
        let svg = fs::read_to_string(folder.report().join(drawn)).unwrap();
        assert!(svg.contains(holds) && svg.ends_with("</svg>\n"), "{drawn}: {svg}");
        assert!(folder.people().contains(&format!("]({drawn})")));
    }
    let people = folder.people();
    for told in ["**simulated**", "| quiet_path | passed |", "µs", "performance rank"] {
        assert!(people.contains(told), "{told}: {people}");
    }
}

#[test]
fn a_part_that_fails_fails_the_run_and_is_named_with_its_last_words() {
    let bad = "echo 'test a::b ... FAILED'; echo 'thread a::b panicked: the last words'; echo \
        elsewhere >&2\n\
        echo 'test result: FAILED. 4 passed; 1 failed; 0 ignored'; exit 101";
    let scripts = [
        ("planted_good", GOOD),
        ("planted_bad", bad),
        ("planted_mute", "exit 0"),
        ("planted_crash", "kill -9 $$"),
    ];
    let folder = Folder::bundle("failing", &scripts);
    let output = folder.selftest("planted", &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report = folder.json();
    assert_eq!((&report["commit"], &report["version"]), (&"a0b1c2".into(), &"1.2.3".into()));
    let good = part(&report, "planted_good (simulated)");
    assert_eq!((&good["outcome"], &good["tests"]["passed"]), (&"passed".into(), &2.into()));
    assert_eq!(good["tests"]["left_out"]["it is not here"], 1);
    for (name, why) in
        [("bad", "1 tests failed: a::b"), ("mute", "no result"), ("crash", "before its tests did")]
    {
        let part = part(&report, &format!("planted_{name} (simulated)"));
        assert_eq!(part["outcome"], "failed");
        assert!(part["reason"].as_str().unwrap().contains(why), "{part}");
        assert!(
            said(&output).contains(&format!("planted_{name} (simulated): ")),
            "{}",
            said(&output)
        );
    }
    let tail = part(&report, "planted_bad (simulated)")["tail"].as_str().unwrap();
    assert!(tail.contains("the last words") && tail.contains("elsewhere"), "{tail}");
    let totals = &report["totals"];
    assert_eq!((&totals["parts_failed"], &totals["tests_passed"]), (&3.into(), &6.into()));
    let people = folder.people();
    for told in ["**failed**", "## What failed", "the last words", "it is not here"] {
        assert!(people.contains(told), "{told}: {people}");
    }
}

#[test]
fn a_part_that_hangs_ends_at_its_limit_with_all_it_has_started() {
    // One that leaves its group and its session, too.
    let hangs = "setsid sleep 91827361 & env -i setsid sleep 91827361 & trap '' TERM; \
        sleep 91827361; sleep 91827361";
    let folder = Folder::bundle("hanging", &[("planted_hang", hangs), ("planted_good", GOOD)]);
    let start = Instant::now();
    let output = folder.selftest("planted", &["--limit", "0.5"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(start.elapsed() < Duration::from_secs(60), "it took {:?}", start.elapsed());
    assert_eq!(running("91827361"), 0, "processes are left");
    let report = folder.json();
    let reason = part(&report, "planted_hang (simulated)")["reason"].as_str().unwrap();
    assert!(reason.contains("still running after 0.5 s"), "{reason}");
    assert_eq!(
        part(&report, "planted_good (simulated)")["outcome"],
        "passed",
        "the others are run all the same"
    );
}

#[test]
fn a_signal_ends_everything_and_what_was_done_is_reported() {
    let hangs = "echo here > $TEST_SCRATCH/../$NAME; sleep 73645281 & sleep 73645281";
    let folder = Folder::bundle(
        "interrupted",
        &[("planted_a", GOOD), ("planted_b", hangs), ("planted_c", GOOD)],
    );
    let name = format!("carrack-planted-{}", std::process::id());
    let here = std::env::temp_dir().join(&name);
    let mut command = folder.selftest("planted", &[]);
    command.env("NAME", &name);
    let child = started(command);
    while !here.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    // A shell starts its background jobs with SIGINT ignored, and may have started this test.
    child.signal(Signal::TERM);
    let output = child.ends_with_all();
    fs::remove_file(here).unwrap();
    assert_eq!(output.status.code(), Some(130), "{}{}", output.stdout, output.stderr);
    assert_eq!(running("73645281"), 0, "processes are left");
    let report = folder.json();
    let outcomes = ["a", "b", "c"]
        .map(|name| part(&report, &format!("planted_{name} (simulated)"))["outcome"].clone());
    assert_eq!(outcomes, ["passed", "skipped", "skipped"]);
}

#[test]
fn a_run_that_is_killed_takes_its_part_along_and_a_later_one_removes_its_folders() {
    let hangs = "echo > $STARTED; exec sleep 64738291";
    let folder = Folder::packed("killed", &[("planted_a", hangs), ("planted_b", GOOD)]);
    let (temporary, here) = (folder.temporary(), folder.0.join("started"));
    let mut command = folder.selftest("planted_a", &[]);
    command.env("TMPDIR", &temporary).env("STARTED", &here);
    let child = started(command);
    let later = || folder.selftest("planted_b", &[]).env("TMPDIR", &temporary).output().unwrap();
    let left = || fs::read_dir(&temporary).unwrap().count();
    while running("64738291") == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    // One that runs keeps its folders.
    assert!(said(&later()).contains("another selftest writes there"));
    assert_eq!(left(), 2);
    child.signal(Signal::KILL);
    let start = Instant::now();
    while running("64738291") > 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "the part still runs");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(left(), 2);
    let output = later();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(left(), 0);
}

#[test]
fn what_was_started_to_outlive_its_terminal_does() {
    let script = format!("echo > $STARTED; sleep 0.5; {GOOD}");
    let folder = Folder::bundle("nohup", &[("planted_a", &script), ("planted_b", &script)]);
    let here = std::env::temp_dir().join(format!("carrack-nohup-{}", std::process::id()));
    let selftest = folder.selftest("planted", &[]);
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).env("STARTED", &here);
    command.arg(selftest.get_program()).args(selftest.get_args());
    let child = started(command);
    while !here.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    child.signal(Signal::HUP);
    succeeded(&child.ends_with_all());
    fs::remove_file(here).unwrap();
    assert_eq!(folder.json()["totals"]["parts_passed"], 2);
}

#[test]
fn all_is_tested_and_reported_where_no_process_reads_the_output() {
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    for (name, stdout) in [("closed", Stdio::from(closed)), ("full", full.into())] {
        let folder = Folder::bundle(name, &[("planted_a", GOOD), ("planted_b", GOOD)]);
        let output = folder.selftest("planted", &[]).stdout(stdout).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(folder.json()["totals"]["parts_passed"], 2);
    }
}

#[test]
fn one_rank_of_a_node_works_and_the_others_say_so_and_end_well() {
    let folder = Folder::bundle("ranks", &[("planted_good", GOOD)]);
    let alone = folder.selftest("planted", &[]);
    let mut command = Command::new(carrack());
    command.args(["run", "-n", "3", "--"]).arg(alone.get_program()).args(alone.get_args());
    let output = command.output().unwrap();
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("leaves this node to the first rank on it").count(), 2, "{text}");
    assert_eq!(text.matches("1 parts passed").count(), 1, "{text}");
    assert_eq!(folder.json()["launcher"], "carrack run, rank 0");

    // Of several nodes each writes its own.
    let slurm = [
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_PROCID", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NNODES", "2"),
    ];
    let output = folder.selftest("planted", &[]).envs(slurm).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let names = fs::read_dir(folder.report())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(
        names.filter(|name| name.starts_with("report-") && name.ends_with(".json")).count(),
        1
    );
}

#[test]
fn a_packed_bundle_is_unpacked_for_a_run_and_its_programs_find_the_command_above_them() {
    // As tests/support/src/built.rs does.
    let above = "test -x $(dirname $(dirname $0))/carrack || exit 3";
    let script = format!("{above}; $(dirname $(dirname $0))/carrack --version; {GOOD}");
    let folder = Folder::packed("packed", &[("planted_a", &script), ("planted_b", GOOD)]);
    let temporary = folder.temporary();
    let output = folder.selftest("planted", &[]).env("TMPDIR", &temporary).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let line = format!("into {}", temporary.display());
    assert_eq!(said(&output).matches(&line).count(), 1, "{}", said(&output));
    assert_eq!(folder.json()["totals"]["parts_passed"], 2);
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "nothing is left");

    // A list is for programs to read: the unpacking is told elsewhere.
    let listed = folder.selftest("planted_a", &["--list"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&listed.stdout), "planted_a (simulated)\n");

    let by_hand = Folder::bundle("by-hand", &[("planted_a", &script)]);
    let output = by_hand.selftest("planted", &[]).output().unwrap();
    assert!(output.status.success() && !said(&output).contains("unpacking"), "{}", said(&output));
}

#[test]
fn several_selftests_at_once_unpack_one_bundle() {
    let folder = Folder::packed("at-once", &[("planted_good", GOOD)]);
    let temporary = folder.temporary();
    let selftest = |number: usize| {
        let report = folder.0.join(format!("report-{number}"));
        let mut command = selftest(&folder.0.join("carrack"), &report, "planted", &[]);
        command.env("TMPDIR", &temporary);
        started(command)
    };
    let all: Vec<_> = (0..4).map(selftest).collect();
    for child in all {
        succeeded(&child.ends());
    }
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "nothing is left");
}

#[test]
fn a_folder_of_another_runs_report_is_refused_and_left_as_it_is() {
    let script = format!("echo > $STARTED; read line < $STARTED.end; {GOOD}");
    let folder = Folder::bundle("taken", &[("planted_a", &script), ("planted_b", GOOD)]);
    let here = folder.0.join("started");
    let end = folder.0.join("started.end");
    assert!(Command::new("mkfifo").arg(&end).status().unwrap().success());
    let mut first = folder.selftest("planted_a", &[]);
    first.env("STARTED", &here);
    let first = started(first);
    while !here.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    let second = folder.selftest("planted_b", &[]).output().unwrap();
    fs::write(&end, "\n").unwrap();
    succeeded(&first.ends());
    assert_eq!(second.status.code(), Some(1), "{}", said(&second));
    assert!(said(&second).contains("another selftest writes there"), "{}", said(&second));
    part(&folder.json(), "planted_a (simulated)");
}

#[test]
fn a_temporary_folder_that_is_not_there_is_named_with_its_variable() {
    let folder = Folder::bundle("no-tmp", &[("planted_good", GOOD)]);
    let output = folder.selftest("planted", &[]).env("TMPDIR", "/nowhere").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let named = said(&output).contains("/nowhere") && said(&output).contains("TMPDIR");
    assert!(named, "{}", said(&output));
}

#[test]
fn a_bundle_of_which_not_all_has_arrived_says_so() {
    let folder = Folder::packed("cut-off", &[("planted_good", GOOD)]);
    let archive = folder.0.join(ARCHIVE);
    let bytes = fs::read(&archive).unwrap();
    fs::write(&archive, &bytes[..bytes.len() - 10]).unwrap();
    let temporary = folder.temporary();
    let output = folder.selftest("planted", &[]).env("TMPDIR", &temporary).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("carry the bundle here again"), "{}", said(&output));
    assert!(fs::read_dir(&temporary).unwrap().count() == 0 && !folder.report().exists());
}

#[test]
fn a_temporary_folder_without_room_is_named_as_the_reason() {
    let folder = Folder::bundle("full", &[("good", GOOD)]);
    let full = "mount -t tmpfs -o size=4k tmpfs \"$TMPDIR\" && head -c 4096 /dev/zero \
        > \"$TMPDIR/all\" || exit 77; exec \"$@\"";
    let selftest = folder.selftest("good", &[]);
    let mut within = Command::new("unshare");
    within.args(["--mount", "sh", "-c", full, "sh"]).arg(selftest.get_program());
    unset(within.args(selftest.get_args()).env("TMPDIR", folder.temporary()), &[]);
    let output = within.output().unwrap();
    if output.status.code() == Some(77) || !said(&output).contains("carrack") {
        return println!("skipped: no full folder: {}", said(&output));
    }
    assert!(said(&output).contains("No space left on device"), "{}", said(&output));
    assert!(!output.status.success());
}

#[test]
fn a_run_of_nothing_is_no_success() {
    let folder = Folder::bundle("nothing", &[("planted_good", GOOD)]);
    let output = folder.selftest("no such part", &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("--list"), "{}", said(&output));
    // What is skipped altogether proves nothing.
    let output = folder.selftest("example readme", &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("nothing was tested"), "{}", said(&output));
    // One word of several that is in no name would go unseen.
    let output = folder.selftest("planted,no such part", &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("--filter no such part: no part"), "{}", said(&output));
    let listed = folder.selftest("planted", &["--list"]).output().unwrap();
    assert_eq!(
        (listed.status.code(), said(&listed)),
        (Some(0), "planted_good (simulated)\n".into())
    );
    let elsewhere = Folder::new("no-kit");
    fs::copy(carrack(), elsewhere.0.join("carrack")).unwrap();
    // The kernel refuses to start a file that is open for writing. A child that another test has
    // just forked may hold the copy's descriptor until its `exec`.
    let output = loop {
        match elsewhere.selftest("planted", &[]).output() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => thread::yield_now(),
            ended => break ended.unwrap(),
        }
    };
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("cargo xtask bundle"), "{}", said(&output));
}
