//! SIGUSR1: a rank that waits says what it waits for.

use carrack::{Counter, Rank, Runtime, Tag};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

const ROLE: &str = "SIGNALS_ROLE";

/// The child: waits for a message that never comes.
#[test]
fn a_rank_in_its_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let runtime = Runtime::start().unwrap();
    let never = Counter::new();
    let recv = runtime.post_recv(Rank(0), vec![0; 21], Tag(4711)).comp(&never).call().unwrap();
    assert!(recv.is_posted());
    println!("\nready");
    runtime.wait(|| never.get() > 0).unwrap();
}

#[test]
fn a_rank_that_waits_prints_what_is_pending_when_it_is_asked_by_a_signal() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_rank_in_its_role", "--nocapture"])
        .env(ROLE, "waits")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"));
    let pid = child.id().to_string();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    // Twice: it goes on after the first.
    for _ in 0..2 {
        assert!(Command::new("kill").args(["-USR1", &pid]).status().unwrap().success());
        let mut text = String::new();
        while !text.contains("tag 4711") {
            assert!(errors.read_line(&mut text).unwrap() > 0, "it has ended: {text}");
        }
        assert!(text.contains("rank 0 of 1: 1 operations pending"), "{text}");
        assert!(text.contains("receive, rank 0, tag 4711, 21 B: waits for its message"), "{text}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    errors.read_to_string(&mut String::new()).unwrap();
}
