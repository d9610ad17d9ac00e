//! Programs of the selftest. A bundle has them in the archive that `cargo xtask bundle` puts next
//! to the command, or in folders that the user unpacked there. A built tree has them in its target
//! folder.

use super::unpacked::{ARCHIVE, Programs};
use super::{SelftestError, suites};
use crate::launch::is_executable;
use carrack_transports::stderr::say;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// File that describes a bundle, in the bundle's folder.
const ABOUT: &str = "bundle.json";

/// Limit of git, which looks at each file of a tree.
const GIT: Duration = Duration::from_secs(10);

/// Programs of the selftest, by name.
pub(super) struct Kit {
    /// The carrack command, to be started again.
    pub(super) carrack: PathBuf,
    pub(super) tests: BTreeMap<String, PathBuf>,
    pub(super) examples: BTreeMap<String, PathBuf>,
    pub(super) about: About,
    /// Folder of the unpacked programs, removed when this is dropped.
    _unpacked: Option<TempDir>,
}

/// Origin of the programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct About {
    pub(super) version: String,
    pub(super) commit: String,
    /// Profile, and date if it is known.
    pub(super) built: String,
}

impl Kit {
    /// Finds the programs next to the running command. An archive is unpacked for this run.
    pub(super) fn find(report: &Path) -> Result<Self, SelftestError> {
        let system = |source| SelftestError::System {
            doing: "finding this program (/proc/self/exe)",
            source,
        };
        let carrack = std::env::current_exe().map_err(system)?;
        let folder = carrack.parent().unwrap_or(Path::new("/")).to_owned();
        let about = fs::read_to_string(folder.join(ABOUT)).ok();
        let (about, tests, examples, unpacked) =
            match about.and_then(|text| serde_json::from_str(&text).ok()) {
                Some(about) => {
                    let unpacked = unpack(&folder, &carrack, report)?;
                    let folder = unpacked.as_ref().map_or(folder.as_path(), TempDir::path);
                    let [tests, examples] = ["tests", "examples"].map(|name| folder.join(name));
                    (about, programs(&tests), programs(&examples), unpacked)
                }
                None => {
                    let mut examples = programs(&folder.join("examples"));
                    // Cargo keeps a copy of each under a longer name.
                    let is_plain =
                        |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
                    examples.retain(|name, _| is_plain(name));
                    (About::of_tree(&folder), of_cargo(&folder.join("deps")), examples, None)
                }
            };
        if tests.is_empty() {
            return Err(SelftestError::NoKit(folder));
        }
        Ok(Self { carrack, tests, examples, about, _unpacked: unpacked })
    }
}

/// Unpacks a bundle's programs. Returns `None` for a bundle without an archive, whose programs the
/// user unpacked by hand.
fn unpack(bundle: &Path, carrack: &Path, report: &Path) -> Result<Option<TempDir>, SelftestError> {
    let archive = bundle.join(ARCHIVE);
    if !archive.exists() {
        return Ok(None);
    }
    let tell = |what: &str| say(format_args!("selftest: {what}"));
    let programs =
        Programs { archive: &archive, carrack, stop: &children::interrupted, tell: &tell };
    Ok(Some(programs.folder(&std::env::temp_dir(), report)?))
}

impl About {
    fn of_tree(folder: &Path) -> Self {
        let profile =
            folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let mut git = Command::new("git");
        git.arg("-C").arg(folder).args(["describe", "--always", "--abbrev=40", "--exclude=*"]);
        let said = children::read(git.arg("--dirty=, changed"), GIT);
        let commit = said.map_or_else(|_| "unknown".into(), |said| said.trim().to_owned());
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            commit,
            built: format!("in a tree, {profile}"),
        }
    }
}

/// Returns the executable files of a folder, by name.
fn programs(folder: &Path) -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.path()).filter(|path| is_executable(path));
    files.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path))).collect()
}

/// Returns the known test programs among Cargo's outputs (`NAME-HASH`), the newest of each name.
fn of_cargo(folder: &Path) -> BTreeMap<String, PathBuf> {
    let of_test = |(file, path): (String, PathBuf)| {
        let (name, hash) = file.rsplit_once('-')?;
        let built = fs::metadata(&path).and_then(|about| about.modified()).ok()?;
        (is_hash(hash) && suites::is_known(name)).then(|| (built, name.to_owned(), path))
    };
    let mut all: Vec<_> = programs(folder).into_iter().filter_map(of_test).collect();
    all.sort();
    // Of one name the last stays.
    all.into_iter().map(|(_, name, path)| (name, path)).collect()
}

fn is_hash(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
