//! Tests that need a process for themselves: descriptors, limits and allocations are the process's.

use std::process::Command;

const ALONE: &str = "TEST_ALONE";

/// Returns `true` in the process that was started for the test of this path (`module_path!()` and
/// the function's name). Else runs the test in such a process, and fails unless it passes there.
#[track_caller]
pub fn is_alone(module: &str, test: &str) -> bool {
    let (_, module) = module.split_once("::").expect("a module of a test program");
    let path = format!("{module}::{test}");
    if std::env::var(ALONE).is_ok_and(|told| told == path) {
        return true;
    }
    let again = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &path, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(ALONE, &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&again.stdout);
    let complained = String::from_utf8_lossy(&again.stderr);
    // A path of no test passes, too.
    let is_passed = again.status.success() && said.contains("1 passed");
    assert!(is_passed, "{path}:\n{}{}", quoted(&said), quoted(&complained));
    false
}

/// Marks each line of what another test run printed: a reader of this run does not take it for
/// this run's.
pub fn quoted(output: &str) -> String {
    output.lines().map(|line| format!("| {line}\n")).collect()
}
