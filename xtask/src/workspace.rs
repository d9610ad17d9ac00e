//! Paths of the workspace, from Cargo's metadata, and the programs that Cargo builds.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::error::TaskError;

/// Time limit of a build, on a slow machine.
pub(crate) const BUILD: Duration = Duration::from_secs(20 * 60);

/// The workspace and everything that it depends on.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    /// Every package of the graph, ours and the registry's, for all platforms.
    pub(crate) packages: Vec<Package>,
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
    /// The target directory has nothing from which an incremental build could save work.
    #[serde(skip)]
    is_fresh: bool,
}

/// A package of the graph.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) rust_version: Option<String>,
    /// `None` for a package of the workspace.
    pub(crate) source: Option<String>,
    pub(crate) targets: Vec<Target>,
}

impl Package {
    /// Returns its test programs.
    pub(crate) fn tests(&self) -> impl Iterator<Item = &Target> {
        self.targets.iter().filter(|target| target.kind.iter().any(|kind| kind == "test"))
    }
}

/// A target of a package.
#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
}

/// A program that Cargo has built, as a line of its messages tells it. Other messages lack a field.
#[derive(Debug, Deserialize)]
pub(crate) struct Built {
    pub(crate) manifest_path: PathBuf,
    pub(crate) target: Target,
    pub(crate) executable: PathBuf,
}

impl Workspace {
    /// Asks Cargo; this also downloads what is missing, so that later steps may run offline.
    pub(crate) fn load() -> Result<Self, TaskError> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let said = children::read(&mut cargo(&root, "metadata --format-version 1"), BUILD)?;
        let mut workspace: Self =
            serde_json::from_str(&said).map_err(|error| TaskError::Output {
                program: "cargo metadata",
                expected: "the JSON of its format version 1",
                found: error.to_string(),
            })?;
        let (asked, notes) =
            (std::env::var_os("CARGO_INCREMENTAL"), workspace.target.join("debug/incremental"));
        workspace.is_fresh = is_fresh(asked.as_deref(), &notes);
        Ok(workspace)
    }

    /// Runs a build, and returns its programs.
    pub(crate) fn built(cargo: &mut Command, limit: Duration) -> Result<Vec<Built>, TaskError> {
        cargo.arg("--message-format=json-render-diagnostics");
        let mut built = Vec::new();
        children::run(cargo, limit, |line| built.extend(serde_json::from_str(line)))?;
        Ok(built)
    }

    /// Builds Carrack's command for release, and returns its path.
    pub(crate) fn release(&self) -> Result<PathBuf, TaskError> {
        let mut cargo = self.cargo("build --release --package carrack-cli");
        children::run(&mut cargo, BUILD, children::echo)?;
        Ok(self.target.join("release/carrack"))
    }

    /// Returns the folder of programs that [`Self::install`] has built.
    pub(crate) fn tools(&self) -> PathBuf {
        self.target.join("tools")
    }

    /// Builds a package's programs into the folder of tools. They are not optimised, since that
    /// takes half the time and they run for a second.
    pub(crate) fn install(&self, package: &str) -> Command {
        let mut cargo = self.cargo("install --locked --debug");
        cargo.args([package, "--root"]).arg(self.tools());
        cargo.env("CARGO_TARGET_DIR", self.tools().join("build"));
        cargo
    }

    /// Returns the Cargo that runs this task, in the workspace's root, with these words.
    pub(crate) fn cargo(&self, words: &str) -> Command {
        let mut cargo = cargo(&self.root, words);
        if self.is_fresh {
            // Notes for incremental builds take a quarter of the time of the first one.
            cargo.env("CARGO_INCREMENTAL", "0");
        }
        cargo
    }
}

/// Returns `true` if no developer has built the crates of this workspace incrementally, or says by
/// `CARGO_INCREMENTAL` what builds are to do. `xtask` is always in the folder.
fn is_fresh(asked: Option<&OsStr>, folder: &Path) -> bool {
    let is_ours = |name: &str| name.starts_with("carrack-");
    let has_notes = folder.read_dir().is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_ours))
    });
    asked.is_none() && !has_notes
}

fn cargo(root: &Path, words: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words.split_whitespace()).current_dir(root);
    clean(&mut command);
    command
}

/// Takes away the variables by which `cargo run` describes *this* program, and settings of Carrack
/// that the caller has. A step must find the same environment on every machine.
pub(crate) fn clean(command: &mut Command) {
    without(command, &["CARGO_PKG_", "CARGO_MANIFEST_", "CARRACK_"]);
}

/// Takes away the caller's variables whose names begin in one of these ways.
pub(crate) fn without(command: &mut Command, prefixes: &[&str]) {
    for (name, _) in std::env::vars_os() {
        if prefixes.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_folder_with_notes_of_our_crates_has_something_to_save() {
        let folder = tempfile::tempdir().unwrap();
        let notes = folder.path().join("incremental");
        assert!(is_fresh(None, &notes));
        std::fs::create_dir_all(notes.join("xtask-1abc")).unwrap();
        assert!(is_fresh(None, &notes));
        assert!(!is_fresh(Some("1".as_ref()), &notes), "the developer asks for notes");
        std::fs::create_dir(notes.join("carrack-1abc")).unwrap();
        assert!(!is_fresh(None, &notes));
    }

    #[test]
    fn of_cargos_messages_those_of_programs_are_read() {
        let line = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/w/p/Cargo.toml","#,
            r#""target":{"name":"it","kind":["test"]},"executable":"/t/it"}"#,
        );
        let built: Built = serde_json::from_str(line).unwrap();
        assert_eq!((&*built.target.name, &*built.target.kind), ("it", &["test".to_owned()][..]));
        assert_eq!(
            (built.manifest_path, built.executable),
            ("/w/p/Cargo.toml".into(), "/t/it".into())
        );
        let library = line.replace("\"/t/it\"", "null");
        for other in ["no JSON", r#"{"reason":"build-finished","success":true}"#, &library] {
            assert!(serde_json::from_str::<Built>(other).is_err(), "{other}");
        }
    }
}
