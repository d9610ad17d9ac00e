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
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use fs_err as fs;
use serde_json::json;

use crate::child;
use crate::error::{TaskError, not_built};
use crate::files;
use crate::workspace::{BUILD, Package, Target, Workspace};
use pack::{ARCHIVE, Packing};

mod pack;

/// Test programs that a bundle does not have, with the reasons.
const LEFT_OUT: &[(&str, &str)] = &[
    ("alone", "what it counts is the same on every machine"),
    ("costs", "it needs valgrind, a C compiler and the mock's source"),
    ("simulated", "what it tests is the same on every machine"),
];

/// Programs that each bundle must have.
const NEEDED: &[&str] = &["conformance", "gpu", "cuda"];

/// Distance, in bytes, at which the packer finds repeated content. Content common to all programs
/// repeats at a program's length; content of some programs only, at tens of megabytes. Packing
/// takes about ten times this in memory, unpacking once.
const DICTIONARY: u32 = 64 << 20;

/// Place of the command in a bundle. All other programs are in the archive.
const COMMAND: &str = "carrack";

/// Largest bundle that is easily carried, in bytes.
const MOST: u64 = 60_000_000;

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
pub(crate) struct Options {
    /// The folder; replaced if it is a bundle [default: bundle in the target directory]
    dir: Option<PathBuf>,
}

/// Built programs, by their place in the bundle.
type Programs = BTreeMap<PathBuf, PathBuf>;

/// Builds it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let folder = options.dir.clone().unwrap_or_else(|| workspace.target.join("bundle"));
    let tests = tests(&workspace)?;
    // Before the build, which takes minutes: the tree may change meanwhile.
    let about = about(&workspace)?;
    let programs = build(&workspace, &tests)?;
    begin(&folder)?;
    for (name, text) in [("selftest.sh", SCRIPT), ("README.txt", README), (ABOUT, about.as_str())] {
        fs::write(folder.join(name), text)?;
    }
    let executable = std::fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.join("selftest.sh"), executable)?;
    let sizes = fill(&folder, &programs)?;
    let bytes = carried(&folder)?;
    if bytes > MOST {
        return Err(TaskError::TooLarge { folder, bytes, most: MOST, sizes: by_size(&sizes) });
    }
    let (folder, count) = (folder.display(), sizes.len());
    let (unpacked, bytes) = (sizes.values().sum::<u64>() as f64 / 1e6, bytes as f64 / 1e6);
    println!("{folder}: {count} programs, {bytes:.1} MB, unpacked {unpacked:.1} MB");
    println!("there: {folder}/selftest.sh");
    Ok(ExitCode::SUCCESS)
}

/// Puts the programs into the folder, the command as it is and all others into the archive, and
/// gives the sizes that they have without it.
fn fill(folder: &Path, programs: &Programs) -> Result<BTreeMap<PathBuf, u64>, TaskError> {
    println!("packing {} programs, which takes a minute", programs.len());
    let (archive, next) = (folder.join(ARCHIVE), folder.join("next"));
    let mut packing = Packing::begin(&archive, DICTIONARY).map_err(TaskError::file(&archive))?;
    let mut sizes = BTreeMap::new();
    for (below, from) in programs {
        let size = if below == Path::new(COMMAND) {
            files::strip(from, &folder.join(below))?
        } else {
            files::strip(from, &next)?;
            packing.add(below, &next).map_err(TaskError::file(&archive))?
        };
        sizes.insert(below.clone(), size);
    }
    packing.finish().map_err(TaskError::file(&archive))?;
    fs::remove_file(&next)?;
    Ok(sizes)
}

/// The bytes of all files of a folder.
fn carried(folder: &Path) -> Result<u64, TaskError> {
    let sizes = fs::read_dir(folder)?.map(|entry| Ok(entry?.metadata()?.len()));
    Ok(sizes.sum::<io::Result<u64>>()?)
}

/// Returns the tree's test programs except those of [`LEFT_OUT`]. A name of [`LEFT_OUT`] or
/// [`NEEDED`] that the tree does not have is an error.
fn tests(workspace: &Workspace) -> Result<Vec<String>, TaskError> {
    let ours = workspace.packages.iter().filter(|package| package.source.is_none());
    let tests = ours.flat_map(Package::tests);
    belonging(tests.map(|target| target.name.clone()).collect())
}

fn belonging(all: Vec<String>) -> Result<Vec<String>, TaskError> {
    let listed = LEFT_OUT.iter().map(|(name, _)| name).chain(NEEDED);
    if let Some(missing) = listed.into_iter().find(|name| !all.iter().any(|test| test == *name)) {
        return Err(TaskError::Missing {
            what: format!("a test program {missing}"),
            remedy: "it is in a list in xtask/src/bundle.rs: was it renamed or removed?",
        });
    }
    let mut tests = all;
    tests.retain(|test| !LEFT_OUT.iter().any(|(name, _)| name == test));
    tests.sort();
    Ok(tests)
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
        println!("$ {}", child::spoken(cargo));
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

/// An empty folder. One that is something else is left as it is.
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
        let said = child::read(command.args(args).current_dir(&workspace.root), limit)?;
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

/// The largest first.
fn by_size(sizes: &BTreeMap<PathBuf, u64>) -> String {
    let mut sizes: Vec<_> = sizes.iter().collect();
    sizes.sort_by_key(|(_, size)| std::cmp::Reverse(**size));
    let line = |(below, size): &(&PathBuf, &u64)| {
        format!("{:>8.2} MB  {}", **size as f64 / 1e6, below.display())
    };
    sizes.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn every_test_program_belongs_in_but_for_those_that_are_left_out() {
        let all = ["gpu", "cuda", "alone", "costs", "simulated", "conformance", "another"];
        assert_eq!(belonging(names(&all)).unwrap(), ["another", "conformance", "cuda", "gpu"]);
        for gone in ["costs", "conformance"] {
            let error =
                belonging(names(&all.map(|name| if name == gone { "renamed" } else { name })));
            assert!(error.unwrap_err().to_string().contains(gone));
        }
    }

    #[test]
    fn the_command_lies_in_the_folder_and_all_others_in_the_archive() {
        let folder = std::env::temp_dir().join(format!("xtask-bundle-{}", std::process::id()));
        begin(&folder).unwrap();
        let program = std::env::current_exe().unwrap();
        let places =
            [COMMAND, "tests/a", "examples/b"].map(|below| (PathBuf::from(below), program.clone()));
        let sizes = fill(&folder, &Programs::from(places)).unwrap();
        let names: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        let carried = carried(&folder).unwrap();
        let command = fs::metadata(folder.join(COMMAND)).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert!(
            names.len() == 2 && names.contains(&COMMAND.into()) && names.contains(&ARCHIVE.into()),
            "{names:?}"
        );
        assert_eq!(sizes.len(), 3);
        assert_eq!(sizes[Path::new(COMMAND)], command.len());
        // The second of the two takes no room, and the first less than it had.
        assert!(
            carried > command.len() && carried < sizes.values().sum::<u64>() * 2 / 3,
            "{carried} of {sizes:?}"
        );
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
