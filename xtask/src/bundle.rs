//! `cargo xtask bundle`: one folder with which `carrack selftest` runs on a machine without Rust.
//!
//! ```text
//! carrack            the command
//! selftest.sh        starts `carrack selftest`
//! programs.tar.xz    tests/, the tree's test programs except those of `LEFT_OUT`, and examples/
//! bundle.json        version, commit, date and options of the build
//! README.txt
//! ```

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use fs_err as fs;
use serde_json::json;

use crate::error::{TaskError, not_built};
use crate::files;
use crate::workspace::{BUILD, Package, Target, Workspace};
use pack::{ARCHIVE, ArchiveWriter};

mod pack;

/// Test programs that a bundle does not have, with the reasons.
const LEFT_OUT: &[(&str, &str)] = &[
    ("alone", "what it counts is the same on every machine"),
    ("costs", "it needs valgrind, a C compiler and the mock's source"),
    ("simulated", "what it tests is the same on every machine"),
];

/// Distance, in bytes, at which the packer finds repeated content. Content common to all programs
/// repeats at a program's length; content of some programs only, at tens of megabytes. Packing
/// takes about ten times this in memory, unpacking once.
const DICTIONARY: u32 = 64 << 20;

/// Place of the command in a bundle. All other programs are in the archive.
const COMMAND: &str = "carrack";

const ABOUT: &str = "bundle.json";

const SCRIPT: &str = "\
#!/bin/sh
# Tests this machine. All arguments go to `carrack selftest`; --help tells what there are.
here=$(dirname -- \"$(readlink -f -- \"$0\")\")
exec \"$here/carrack\" selftest \"$@\"
";

const README: &str = "\
./selftest.sh tests this machine, in some minutes with --quick, and writes
carrack-selftest/report.md and report.json where it is started. It needs Linux and nothing else;
under mpirun or srun start it with one rank for each node. ./carrack --help tells the rest.

The programs that it runs are in programs.tar.xz. Each run unpacks them (some 100 MB) into TMPDIR,
or into carrack-selftest if programs cannot be started there, and removes them at its end. To
unpack them by hand: tar xJf programs.tar.xz && rm programs.tar.xz
";

/// Options of `cargo xtask bundle`.
#[derive(clap::Args)]
pub(crate) struct BundleOptions {
    /// The folder; replaced if it is a bundle [default: bundle in the target directory]
    dir: Option<PathBuf>,
}

/// Built programs, by their place in the bundle.
type Programs = BTreeMap<PathBuf, PathBuf>;

/// Builds the bundle.
pub(crate) fn run(options: &BundleOptions) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let folder = options.dir.clone().unwrap_or_else(|| workspace.target.join("bundle"));
    let tests = tests(&workspace);
    // Before the build, which takes minutes: the tree may change meanwhile.
    let about = about(&workspace)?;
    let programs = build(&workspace, &tests)?;
    begin(&folder)?;
    for (name, text) in [("selftest.sh", SCRIPT), ("README.txt", README), (ABOUT, about.as_str())] {
        fs::write(folder.join(name), text)?;
    }
    let executable = std::fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.join("selftest.sh"), executable)?;
    let (bytes, unpacked) = fill(&folder, &programs)?;
    let (folder, count) = (folder.display(), programs.len());
    let (bytes, unpacked) = (bytes as f64 / 1e6, unpacked as f64 / 1e6);
    say!("{folder}: {count} programs, {bytes:.1} MB, unpacked {unpacked:.1} MB");
    say!("there: {folder}/selftest.sh");
    Ok(ExitCode::SUCCESS)
}

/// Puts the programs into the folder, the command as it is and all others into the archive.
/// Returns their bytes there, and unpacked.
fn fill(folder: &Path, programs: &Programs) -> Result<(u64, u64), TaskError> {
    say!("packing {} programs, which takes a minute", programs.len());
    let (archive, next) = (folder.join(ARCHIVE), folder.join("next"));
    let mut writer =
        ArchiveWriter::begin(&archive, DICTIONARY).map_err(TaskError::file(&archive))?;
    let (mut command, mut unpacked) = (0, 0);
    for (below, from) in programs {
        if below == Path::new(COMMAND) {
            command = files::strip(from, &folder.join(below))?;
        } else {
            files::strip(from, &next)?;
            unpacked += writer.add(below, &next).map_err(TaskError::file(&archive))?;
        }
    }
    let packed = writer.finish().map_err(TaskError::file(&archive))?;
    fs::remove_file(&next)?;
    Ok((command + packed, command + unpacked))
}

/// Returns the tree's test programs except those of [`LEFT_OUT`].
fn tests(workspace: &Workspace) -> Vec<String> {
    let ours = workspace.packages.iter().filter(|package| package.source.is_none());
    let mut tests: Vec<_> = ours.flat_map(Package::tests).map(|test| test.name.clone()).collect();
    tests.retain(|test| !LEFT_OUT.iter().any(|(name, _)| name == test));
    tests.sort();
    tests
}

/// Builds everything, and returns the path of each program by its place in the bundle. The command
/// is a release build, since it measures. The many other programs are built to be small.
fn build(workspace: &Workspace, tests: &[String]) -> Result<Programs, TaskError> {
    let mut command = workspace.cargo("build --release --workspace --bin");
    command.arg(COMMAND);
    let mut others = workspace.cargo("build --profile carried --examples");
    let ours = workspace.packages.iter().filter(|package| package.source.is_none());
    for package in ours.filter(|ours| ours.tests().any(|test| tests.contains(&test.name))) {
        others.args(["-p", &package.name]);
    }
    others.args(tests.iter().flat_map(|test| ["--test", test]));
    let mut programs = Programs::new();
    for cargo in [&mut command, &mut others] {
        say!("$ {}", children::spoken(cargo));
        let built = Workspace::built(cargo, 2 * BUILD)?.into_iter();
        programs.extend(built.filter_map(|built| Some((place(&built.target)?, built.executable))));
    }
    let wanted = tests.iter().map(|test| Path::new("tests").join(test)).chain([COMMAND.into()]);
    match wanted.into_iter().find(|below| !programs.contains_key(below)) {
        None => Ok(programs),
        Some(below) => Err(not_built(below.display())),
    }
}

/// Returns the place of a target's program in the bundle, if it has one.
fn place(target: &Target) -> Option<PathBuf> {
    let folder = match target.kind.first()?.as_str() {
        "bin" => "",
        "test" => "tests",
        "example" => "examples",
        _ => return None,
    };
    Some(Path::new(folder).join(&target.name))
}

/// Makes an empty folder. A folder with other files than a bundle's is left as it is.
fn begin(folder: &Path) -> Result<(), TaskError> {
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        if !folder.join(ABOUT).exists() {
            return Err(TaskError::Missing {
                what: format!("an empty folder {}", folder.display()),
                remedy: "it has files, and is no bundle: name another one",
            });
        }
        fs::remove_dir_all(folder)?;
    }
    Ok(fs::create_dir_all(folder)?)
}

/// Returns the description of the programs that `carrack selftest` prints, in JSON.
fn about(workspace: &Workspace) -> Result<String, TaskError> {
    let limit = Duration::from_secs(60);
    let line = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        let said = children::read(command.args(args).current_dir(&workspace.root), limit)?;
        Ok::<_, TaskError>(said.trim().to_owned())
    };
    let is_clean = line("git", &["status", "--porcelain"])?.is_empty();
    let (date, rustc) = (line("date", &["-u", "+%F %T UTC"])?, line("rustc", &["--version"])?);
    let version = workspace.packages.iter().find(|package| package.name == "carrack-cli");
    let about = json!({
        "version": version.map_or("", |package| &package.version),
        "commit": line("git", &["rev-parse", "HEAD"])? + if is_clean { "" } else { ", changed" },
        "built": format!("{date}, release, {rustc}"),
    });
    Ok(format!("{about:#}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_lies_in_the_folder_and_all_others_in_the_archive() {
        let folder = std::env::temp_dir().join(format!("xtask-bundle-{}", std::process::id()));
        begin(&folder).unwrap();
        let program = std::env::current_exe().unwrap();
        let places =
            [COMMAND, "tests/a", "examples/b"].map(|below| (PathBuf::from(below), program.clone()));
        let (packed, unpacked) = fill(&folder, &Programs::from(places)).unwrap();
        let names: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        let command = fs::metadata(folder.join(COMMAND)).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert!(
            names.len() == 2 && names.contains(&COMMAND.into()) && names.contains(&ARCHIVE.into()),
            "{names:?}"
        );
        assert_eq!(unpacked, 3 * command.len());
        // The second of the two takes no room, and the first less than it had.
        assert!(packed > command.len() && packed < unpacked * 2 / 3, "{packed} of {unpacked}");
    }

    #[test]
    fn the_kind_of_a_program_tells_where_it_belongs() {
        let place = |kind: &str| place(&Target { name: "a".into(), kind: vec![kind.into()] });
        assert_eq!(place("bin"), Some("a".into()));
        assert_eq!(place("test"), Some("tests/a".into()));
        assert_eq!(place("example"), Some("examples/a".into()));
        assert_eq!(place("lib"), None);
    }

    #[test]
    fn a_folder_with_files_that_is_no_bundle_is_left_as_it_is() {
        let error = begin(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap_err().to_string();
        assert!(error.contains("no bundle"), "{error}");
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml").exists());
    }
}
