//! Our bindings of libibverbs against those of other crates, whose building needs more than Rust
//! and a C compiler.

use std::process::Command;
use std::time::Duration;

use super::step::{Context, Outcome};
use crate::child;

/// Debian packages that their build needs.
const NEEDS: [&str; 5] = ["cmake", "libclang-dev", "libibverbs-dev", "librdmacm-dev", "pkg-config"];

pub(super) fn step(context: &mut Context) -> Outcome {
    let missing: Vec<&str> = NEEDS.into_iter().filter(|package| !is_installed(package)).collect();
    if !missing.is_empty() && !install(context, &missing) {
        return Outcome::Skipped(format!("apt-get could not install {}", missing.join(", ")));
    }
    let mut command = context.workspace.cargo();
    command
        .args(["test", "--manifest-path", "transports/layout/Cargo.toml"])
        .env("CARGO_TARGET_DIR", context.workspace.target.join("layout"));
    context.run_tests(&mut command)
}

/// Returns `true` if Debian's package manager has installed it; elsewhere `false`.
fn is_installed(package: &str) -> bool {
    let mut ask = Command::new("dpkg-query");
    ask.args(["--show", "--showformat=${db:Status-Status}", package]);
    child::hear(&mut ask, Duration::from_secs(60))
        .is_ok_and(|heard| heard.said.trim() == "installed")
}

/// Installs packages by apt, after an update if necessary. Returns `true` on success.
fn install(context: &Context, packages: &[&str]) -> bool {
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        context.run(command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive")).is_ok()
    };
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    apt(&install) || (apt(&["update"]) && apt(&install))
}
