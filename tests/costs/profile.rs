//! Instructions of one function, as callgrind counts them when it runs this test program once more.

use crate::support::alone::quoted;
use std::path::Path;
use std::process::Command;

/// Returns the reason if nothing can be counted here: `test` is this program's name for Cargo.
pub(crate) fn why_not(test: &str) -> Option<String> {
    if cfg!(debug_assertions) || profile_of_this_build() == "optimised" {
        return Some(format!(
            "not optimised as a release is; `cargo test --release --test {test}`"
        ));
    }
    let has_valgrind = Command::new("valgrind").arg("--version").output().is_ok();
    (!has_valgrind).then(|| "there is no valgrind here".into())
}

/// Returns the profile's folder, as far as this program lies where Cargo has put it.
fn profile_of_this_build() -> String {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().and_then(Path::parent).and_then(Path::file_name);
    folder.unwrap_or_default().to_string_lossy().into_owned()
}

/// Counts the instructions that a function, named by its whole path, takes in all while the test
/// `role` runs. The variable `told` tells the test so. Functions for which `skipped` is true are
/// left out, with what they call.
pub(crate) fn counted(
    function: &str,
    role: &str,
    told: &str,
    skipped: impl Fn(&str) -> bool,
) -> u64 {
    let name = function.replace("::", "-");
    let out = std::env::temp_dir().join(format!("carrack-callgrind-{}-{name}", std::process::id()));
    let done = Command::new("valgrind")
        .args([
            "-q",
            "--tool=callgrind",
            "--collect-atstart=no",
            "--compress-strings=no",
            "--compress-pos=no",
        ])
        .arg(format!("--toggle-collect={function}"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", role, "--test-threads=1"])
        .env(told, "1")
        .output()
        .unwrap();
    let said = [done.stdout, done.stderr].concat();
    assert!(done.status.success(), "{}", quoted(&String::from_utf8_lossy(&said)));
    let profile = std::fs::read_to_string(&out).unwrap();
    let _ = std::fs::remove_file(&out);
    instructions(&profile, skipped)
}

/// Counts the instructions of a profile. Functions for which `skipped` is true when others call
/// them are left out, with what they call. Names and positions are not compressed in the profile.
fn instructions(profile: &str, skipped: impl Fn(&str) -> bool) -> u64 {
    let (mut total, mut taken_off) = (0, 0);
    let (mut function, mut callee) = ("", "");
    let mut is_call = false;
    for line in profile.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            function = name;
        } else if let Some(name) = line.strip_prefix("cfn=") {
            callee = name;
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            // A position, and the instructions there; or those of a call, inclusive.
            let cost =
                line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok()).unwrap_or(0);
            match std::mem::take(&mut is_call) {
                false => total += cost,
                true if skipped(callee) && !skipped(function) => taken_off += cost,
                true => {}
            }
        }
    }
    total - taken_off
}

#[test]
fn what_is_skipped_is_taken_off_with_what_it_calls() {
    let profile = "events: Ir\n\nfn=send\n10 7\ncfn=abi::post\ncalls=2 30\n11 40\n12 \
        3\n\nfn=abi::post\n30 15\ncfn=memcpy\ncalls=1 1\n31 25\n\n\
                   fn=memcpy\n1 25\n";
    assert_eq!(instructions(profile, |_| false), 50);
    assert_eq!(instructions(profile, |name| name.starts_with("abi")), 10);
}
