//! The search for the program that the user named.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::error::LaunchError;

/// The places to look in, apart from the program's name, so that tests can give others.
pub(super) struct Places {
    /// The value of PATH.
    pub(super) path: OsString,
    /// The folder of the carrack command, where Cargo puts other binaries and `examples/`.
    pub(super) own_folder: Option<PathBuf>,
    /// The folder that the user is in.
    pub(super) current: Option<PathBuf>,
}

impl Places {
    /// Returns the places of this process.
    pub(super) fn of_this_process() -> Self {
        let own_folder = env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
        Self {
            path: env::var_os("PATH").unwrap_or_default(),
            own_folder,
            current: env::current_dir().ok(),
        }
    }

    /// Returns the path of a program: its name if that has a slash. Else PATH, the folder of the
    /// carrack command and the examples there are searched in turn.
    pub(super) fn look_up(&self, program: &OsStr) -> Result<PathBuf, LaunchError> {
        let named = Path::new(program);
        let (candidates, looked) = if program.as_bytes().contains(&b'/') {
            (vec![named.to_owned()], "that path".to_owned())
        } else {
            self.candidates(named)
        };
        let mut found_but_not_executable = None;
        // The empty name would find the folders themselves.
        for candidate in candidates.into_iter().filter(|_| !program.is_empty()) {
            if is_executable(&candidate) {
                return Ok(candidate);
            }
            if candidate.exists() && found_but_not_executable.is_none() {
                found_but_not_executable = Some(candidate);
            }
        }
        Err(match found_but_not_executable {
            Some(path) => LaunchError::NotExecutable { path },
            None => {
                LaunchError::NotFound { program: named.to_owned(), looked, hint: self.hint(named) }
            }
        })
    }

    fn candidates(&self, name: &Path) -> (Vec<PathBuf>, String) {
        let mut folders: Vec<_> = env::split_paths(&self.path).collect();
        let mut looked = "it in PATH".to_owned();
        if let Some(own) = &self.own_folder {
            let examples = own.join("examples");
            looked.push_str(&format!(", in {}, and in {}", own.display(), examples.display()));
            folders.push(own.clone());
            folders.push(examples);
        }
        (folders.iter().map(|folder| folder.join(name)).collect(), looked)
    }

    /// Returns the remedy for a missing program, which may be an example not yet built.
    fn hint(&self, program: &Path) -> String {
        if program.as_os_str().as_encoded_bytes().starts_with(b"-") {
            return "; if it is meant as an option, see `carrack run --help` for those that there \
                    are"
            .into();
        }
        let in_examples = program.parent().is_some_and(|folder| folder.ends_with("examples"));
        let has_source = program.file_name().is_some_and(|name| {
            let folder = Path::new("examples").join(name);
            let mut file = folder.clone().into_os_string();
            file.push(".rs");
            // Cargo takes either for an example.
            let sources = [file.into(), folder.join("main.rs")];
            let starts = [&self.own_folder, &self.current];
            starts
                .into_iter()
                .flatten()
                .flat_map(|start| start.ancestors())
                .any(|start| sources.iter().any(|source: &PathBuf| start.join(source).exists()))
        });
        if !in_examples && !has_source {
            return "; name a path that is there, or put its folder into PATH".into();
        }
        let of_debug_build = self.own_folder.as_ref().is_some_and(|own| own.ends_with("debug"));
        let release = if of_debug_build && !program.starts_with("target/release") {
            ""
        } else {
            " --release"
        };
        format!("; if it is one of the examples, build it: cargo build{release} --examples")
    }
}

/// Returns `true` if this user may execute the file.
pub(crate) fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(own_folder: Option<&Path>) -> Places {
        Places {
            path: "/bin:/usr/bin".into(),
            own_folder: own_folder.map(Path::to_owned),
            current: None,
        }
    }

    #[test]
    fn a_name_is_looked_for_in_path() {
        assert!(places(None).look_up("sh".as_ref()).is_ok_and(|path| path.ends_with("sh")));
    }

    #[test]
    fn what_is_not_found_is_named_with_the_places_looked_in() {
        let error =
            places(Some(Path::new("/nowhere/release"))).look_up("no-such".as_ref()).unwrap_err();
        assert_eq!(error.exit_status(), 127);
        let shown = error.to_string();
        for expected in ["no-such", "PATH", "/nowhere/release/examples"] {
            assert!(shown.contains(expected), "{shown}");
        }
        assert!(!shown.contains("cargo build"), "{shown}");
    }

    #[test]
    fn an_unknown_option_is_told_from_a_program() {
        let error = places(None).look_up("--frob".as_ref()).unwrap_err().to_string();
        assert!(error.contains("carrack run --help"), "{error}");
    }

    #[test]
    fn what_looks_like_an_example_comes_with_the_command_that_builds_it() {
        let error = places(None).look_up("target/release/examples/no-such".as_ref()).unwrap_err();
        assert!(error.to_string().ends_with("cargo build --release --examples"), "{error}");
    }

    #[test]
    fn a_folder_and_a_plain_file_are_not_executable_and_an_empty_name_is_not_found() {
        assert_eq!(places(None).look_up("/tmp".as_ref()).unwrap_err().exit_status(), 126);
        assert_eq!(places(None).look_up("/proc/version".as_ref()).unwrap_err().exit_status(), 126);
        assert_eq!(places(None).look_up("".as_ref()).unwrap_err().exit_status(), 127);
    }
}
