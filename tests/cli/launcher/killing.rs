//! Interrupts, and kills of the launcher and of the keeper.

use super::*;

#[test]
fn an_interrupt_leaves_nothing_behind() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let running = script(3, &[], TWO_SLEEPERS).start(3);
        running.signal(signal);
        let run = running.end();
        assert_eq!(run.code(), code, "{}", run.stderr);
        assert!(run.stderr.contains("carrack: got SIG"), "{}", run.stderr);
    }
}

#[test]
fn a_second_interrupt_does_not_wait_for_the_grace() {
    // The ranks say that the first one has been passed on to them: two that come together are one.
    let heard = std::env::temp_dir().join(format!("carrack-launcher-heard-{}", std::process::id()));
    let text =
        format!("trap 'touch {}' INT; echo ready; sleep 1000 & wait; sleep 1000", heard.display());
    let running = script(2, &[], &text).start(2);
    running.signal(Signal::INT);
    let start = Instant::now();
    while !heard.exists() {
        assert!(start.elapsed() < WATCHDOG, "the ranks are not interrupted");
        thread::sleep(Duration::from_millis(2));
    }
    running.signal(Signal::INT);
    let run = running.end();
    fs::remove_file(&heard).unwrap();
    assert_eq!(run.code(), 130);
    assert!(run.stderr.contains("got SIGINT again; killing"), "{}", run.stderr);
}

#[test]
fn a_signal_that_asks_for_a_report_goes_to_all_ranks_and_ends_no_job() {
    for signal in [Signal::USR1, Signal::USR2] {
        let text = "trap 'echo heard; exit 0' USR1 USR2; echo ready; sleep 1000 & wait; sleep 1000";
        let running = script(2, &[], text).start(2);
        running.signal(signal);
        let run = running.end();
        assert_eq!(run.code(), 0, "{}", run.stderr);
        assert_eq!(run.stdout_lines(), BTreeSet::from(["[0] heard", "[1] heard"]));
    }
}

#[test]
fn killing_the_launcher_leaves_nothing_behind() {
    let running = script(3, &[], TWO_SLEEPERS).start(3);
    running.signal(Signal::KILL);
    assert_eq!(running.end().status.signal(), Some(9));
}

#[test]
fn killing_the_launchers_whole_process_group_leaves_nothing_behind() {
    let mut job = script(3, &[], TWO_SLEEPERS);
    job.command.process_group(0);
    let running = job.start(3);
    rustix::process::kill_process_group(Pid::from_child(&running.child), Signal::KILL).unwrap();
    assert_eq!(running.end().status.signal(), Some(9));
}

#[test]
fn killing_the_launcher_ends_ranks_whose_output_nobody_reads() {
    let mut job = script(2, &[], "yes");
    let mut child = job.command.spawn().unwrap();
    // Into a full pipe: the keeper must not sleep in a write.
    thread::sleep(Duration::from_millis(300));
    child.kill().unwrap();
    wait(&mut child);
    nothing_is_left(&job.mark);
}

/// It starts a job for each pair of memory, one after the other.
#[test]
fn killing_a_benchmark_of_many_jobs_leaves_nothing_behind() {
    let mut all = script(2, &[], "");
    let mut command = Command::new(carrack());
    command.args(["put_get_bench", "latency", "all", "-m", "1:8", "--seconds", "1000"]);
    command
        .env(MARK, &all.mark)
        .env("CARRACK_GPU", "fake")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    all.command = command;
    // Its first job runs: two ranks, what looks after them, and who has started these.
    let (running, began) = (all.start(0), Instant::now());
    while with_variable(MARK, &running.mark).len() < 5 {
        assert!(began.elapsed() < WATCHDOG, "it has not come to its first job");
        thread::sleep(Duration::from_millis(5));
    }
    running.signal(Signal::KILL);
    assert_eq!(running.end().status.signal(), Some(9));
}

#[test]
fn killing_the_keeper_leaves_nothing_behind() {
    let running = script(3, &[], TWO_SLEEPERS).start(3);
    kill_process(running.keeper(), Signal::KILL).unwrap();
    let run = running.end();
    assert_eq!(run.code(), 137);
    assert!(run.stderr.contains("keeper"), "{}", run.stderr);
}
