//! A test program of the workspace: built here by Cargo, to be run in a guest.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::plan::Plan;
use crate::child;
use crate::error::TaskError;
use crate::workspace::Workspace;

/// A build of a test and all it depends on, on a slow machine.
const BUILD: Duration = Duration::from_secs(20 * 60);

/// A test program that was built.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestProgram {
    executable: PathBuf,
    /// Folder of its package, in which Cargo would run it.
    folder: PathBuf,
}

/// A line of Cargo's messages.
#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

impl TestProgram {
    /// Builds `name`, a target of kind `test` of any package.
    pub(crate) fn build(workspace: &Workspace, name: &str) -> Result<Self, TaskError> {
        let mut command = workspace.cargo();
        command.args([
            "test",
            "--no-run",
            "--workspace",
            "--message-format=json-render-diagnostics",
            "--test",
            name,
        ]);
        let mut built = None;
        child::run(&mut command, BUILD, |line| {
            built = built.take().or_else(|| program(line, name))
        })?;
        built.ok_or_else(|| TaskError::Missing {
            what: format!("the test program {name} among what Cargo has built"),
            remedy: "please report this, with the version of Cargo",
        })
    }

    /// Its run, as Cargo would run it.
    pub(crate) fn plan(self, arguments: &[OsString]) -> Plan {
        let mut command = vec![self.executable.into_os_string()];
        command.extend_from_slice(arguments);
        let mut plan = Plan::new(command, self.folder.clone());
        plan.environment.push(("CARGO_MANIFEST_DIR".into(), self.folder.into_os_string()));
        plan
    }
}

/// The program of a line of Cargo's messages, if it is the test `name`.
fn program(line: &str, name: &str) -> Option<TestProgram> {
    let message: Message = serde_json::from_str(line).ok()?;
    let target = message.target?;
    let is_it =
        message.reason == "compiler-artifact" && target.name == name && target.kind == ["test"];
    let folder = message.manifest_path?.parent().map(Path::to_owned)?;
    is_it.then_some(())?;
    Some(TestProgram { executable: message.executable?, folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_test_of_that_name_and_runs_in_its_package() {
        let line = |name: &str, kind: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/p/Cargo.toml","target":{{"name":"{name}","kind":["{kind}"]}},"executable":"/t/it"}}"#
            )
        };
        let found = program(&line("verbs_guest", "test"), "verbs_guest").unwrap();
        assert_eq!(found, TestProgram { executable: "/t/it".into(), folder: "/w/p".into() });
        assert_eq!(program(&line("verbs_guest", "bin"), "verbs_guest"), None);
        assert_eq!(program(&line("other", "test"), "verbs_guest"), None);
        assert_eq!(program("no JSON", "verbs_guest"), None);
        let plan = found.plan(&["a_filter".into()]);
        assert_eq!(
            (plan.command, plan.folder),
            (vec!["/t/it".into(), "a_filter".into()], "/w/p".into())
        );
    }
}
