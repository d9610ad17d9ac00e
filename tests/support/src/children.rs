//! Processes that tests start.

use rustix::process::Pid;
use std::process::Command;

/// Removes Carrack's variables, and these, with which the test itself may have been started.
pub fn unset<'a>(command: &'a mut Command, also: &[&str]) -> &'a mut Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARRACK_") || also.contains(&&*text) {
            command.env_remove(&name);
        }
    }
    command
}

/// Returns the processes that have inherited this variable.
pub fn with_variable(name: &str, value: &str) -> Vec<Pid> {
    ::children::with_variable(name, |other| other == value.as_bytes()).collect()
}
