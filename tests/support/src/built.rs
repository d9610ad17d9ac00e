//! Programs of this build that Cargo does not name to tests, as they are no binaries of the tests'
//! own package. They are built here: stale ones would be tested otherwise.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Returns the folder of the built programs: target/PROFILE, above the test's own folder.
pub(crate) fn folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().to_path_buf()
}

/// Builds programs as this test was built. A test that Cargo did not start finds them as they are.
///
/// All selections are of the workspace, and include examples or tests. Cargo unites the features of
/// all that it builds, and would compile the crates anew for a package alone.
fn build(what: &[&str]) {
    let Some(cargo) = std::env::var_os("CARGO") else { return };
    let folder = folder();
    let profile = match folder.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        other => other,
    };
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--profile", profile]).args(what);
    command
        .arg("--target-dir")
        .arg(folder.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(command.status().unwrap().success(), "building {what:?} failed");
}

/// Returns the carrack command, built.
pub fn carrack() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        build(&["--workspace", "--bin", "carrack", "--example", "readme"]);
        let carrack = folder().join("carrack");
        assert!(carrack.exists(), "no {}; run cargo build --workspace", carrack.display());
        carrack
    })
}

/// Returns the folder of the examples, built.
pub fn examples() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        build(&["--workspace", "--examples"]);
        folder().join("examples")
    })
}

/// Sees to it that a test program of the tests' own package is there.
pub fn test_program(name: &str) {
    build(&["--workspace", "--test", name]);
}
