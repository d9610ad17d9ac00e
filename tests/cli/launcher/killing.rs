//! Interrupts, and kills of the launcher and of the keeper.

use super::*;

#[test]
fn an_interrupt_leaves_nothing_behind() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let running = start(script(3, &[], TWO_SLEEPERS), 3);
        running.signal(signal);
        let run = running.ends_with_all();
        assert_eq!(run.status.code(), Some(code), "{}", run.stderr);
        assert!(run.stderr.contains("carrack: got SIG"), "{}", run.stderr);
    }
}

#[test]
fn a_second_interrupt_does_not_wait_for_the_grace() {
    // The ranks say that the first one has been passed on to them. Two within 0.1 s are one.
    let heard = std::env::temp_dir().join(format!("carrack-launcher-heard-{}", std::process::id()));
    let text =
        format!("trap 'touch {}' INT; echo ready; sleep 1000 & wait; sleep 1000", heard.display());
    let running = start(script(2, &[], &text), 2);
    running.signal(Signal::INT);
    let start = Instant::now();
    while !heard.exists() {
        assert!(start.elapsed() < WATCHDOG, "the ranks are not interrupted");
        thread::sleep(Duration::from_millis(2));
    }
    thread::sleep(Duration::from_millis(200));
    running.signal(Signal::INT);
    let run = running.ends_with_all();
    fs::remove_file(&heard).unwrap();
    assert_eq!(run.status.code(), Some(130));
    assert!(run.stderr.contains("got SIGINT again; killing"), "{}", run.stderr);
}

#[test]
fn a_signal_that_asks_for_a_report_goes_to_all_ranks_and_ends_no_job() {
    for signal in [Signal::USR1, Signal::USR2] {
        let text = "trap 'echo heard; exit 0' USR1 USR2; echo ready; sleep 1000 & wait; sleep 1000";
        let running = start(script(2, &[], text), 2);
        running.signal(signal);
        let run = running.ends_with_all();
        assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
        assert_eq!(lines(&run), BTreeSet::from(["[0] heard", "[1] heard"]));
    }
}

#[test]
fn killing_the_launcher_leaves_nothing_behind() {
    let running = start(script(3, &[], TWO_SLEEPERS), 3);
    running.signal(Signal::KILL);
    assert_eq!(running.ends_with_all().status.signal(), Some(9));
}

#[test]
fn killing_the_launchers_whole_process_group_leaves_nothing_behind() {
    let mut job = script(3, &[], TWO_SLEEPERS);
    job.process_group(0);
    let running = start(job, 3);
    let group = Pid::from_raw(running.id().cast_signed()).unwrap();
    rustix::process::kill_process_group(group, Signal::KILL).unwrap();
    assert_eq!(running.ends_with_all().status.signal(), Some(9));
}

#[test]
fn killing_the_launcher_ends_ranks_whose_output_is_not_read() {
    let mut job = script(2, &[], "yes");
    let (reader, writer) = std::io::pipe().unwrap();
    let running = Running::start(job.stdout(writer)).unwrap();
    // Into a full pipe: the keeper must not sleep in a write.
    thread::sleep(Duration::from_millis(300));
    running.signal(Signal::KILL);
    running.ends_with_all();
    drop(reader);
}

/// It starts a job for each pair of memory, one after the other.
#[test]
fn killing_a_benchmark_of_many_jobs_leaves_nothing_behind() {
    let mut command = Command::new(carrack());
    command.args(["put_get_bench", "latency", "all", "-m", "1:8", "--seconds", "1000"]);
    command.env("CARRACK_GPU", "fake");
    // Its first job runs: two ranks, what looks after them, and who has started these.
    let (running, began) = (started(command), Instant::now());
    while running.processes().count() < 5 {
        assert!(began.elapsed() < WATCHDOG, "it has not come to its first job");
        thread::sleep(Duration::from_millis(5));
    }
    running.signal(Signal::KILL);
    assert_eq!(running.ends_with_all().status.signal(), Some(9));
}

#[test]
fn killing_the_keeper_leaves_nothing_behind() {
    let running = start(script(3, &[], TWO_SLEEPERS), 3);
    kill_process(keeper(&running), Signal::KILL).unwrap();
    let run = running.ends_with_all();
    assert_eq!(run.status.code(), Some(137));
    assert!(run.stderr.contains("keeper"), "{}", run.stderr);
}

#[test]
fn killing_the_keeper_leaves_nothing_behind_though_stderr_is_closed() {
    // What a rank has started outlives it, and ends by the launcher alone.
    let running = start(unheard(script(2, &[], TWO_SLEEPERS)), 2);
    kill_process(keeper(&running), Signal::KILL).unwrap();
    assert_eq!(running.ends_with_all().status.code(), Some(137));
}
