//! Processes that tests start.

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

/// Returns the processes that have inherited this variable. A zombie has none; another user's
/// cannot be read.
pub fn with_variable(name: &str, value: &str) -> Vec<i32> {
    let entry = format!("{name}={value}").into_bytes();
    let has_it = |pid: &i32| {
        let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == entry)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has_it).collect()
}
