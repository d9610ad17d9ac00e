//! Errors of tasks, each with its remedy.

use std::fmt;
use std::io;
use std::path::PathBuf;

use children::ChildError;

/// Error of a task.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    /// A command did not end well.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// A file could not be read or written. The file system's own errors name it.
    #[error("{0}; check the path, its permissions and the room on its disk")]
    Io(#[from] io::Error),
    /// The same, of what names no file by itself.
    #[error(
        "{}: {source}; check that it exists, that this user may use it, and that its disk has room",
        path.display()
    )]
    File { path: PathBuf, source: io::Error },
    /// A folder could not be read.
    #[error(transparent)]
    Walk(#[from] walkdir::Error),
    /// A program's output is not of the form that this task knows.
    #[error("{program} did not print {expected}; try another version of it. It printed:\n{found}")]
    Output { program: &'static str, expected: &'static str, found: String },
    /// Something is missing that this task does not install.
    #[error("{what} is missing; {remedy}")]
    Missing { what: String, remedy: &'static str },
    /// Packages are not there, and were not installed.
    #[error(
        "the packages {packages} are missing (names are Debian's); {why}: install them, then call \
        again"
    )]
    Packages { packages: String, why: String },
    /// No step of the test run has such a name.
    #[error("no step has that in its name; name one of: {names}")]
    NoStep { names: String },
}

impl TaskError {
    /// Returns a function for `map_err` that adds `path` to an I/O error.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}

/// Returns the error of a program that Cargo has built, and that is not among its messages.
pub(crate) fn not_built(what: impl fmt::Display) -> TaskError {
    TaskError::Missing {
        what: format!("{what} among what Cargo has built"),
        remedy: "please report this, with the version of Cargo",
    }
}
