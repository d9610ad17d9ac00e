//! The rules on our own sources that no lint knows.
//!
//! | module | rule |
//! |---|---|
//! | `unsafe_code` | `unsafe` stands only in the files of `xtask/unsafe-files.txt` |
//! | `copies` | memory is copied only in the files of `xtask/copy-files.txt` |
//! | `primitives` | the lock-free structures take atomics and cells from one module, which loom can replace |
//! | `length` | a long file is asking to be two; this one only warns |
//!
//! They look at sources whose comments and strings `code` has blanked, listed by `tree`.

mod allowed;
mod code;
mod copies;
mod length;
mod primitives;
mod tree;
mod unsafe_code;

use std::path::Path;

use crate::error::TaskError;
use allowed::Allowed;
pub(crate) use tree::{Source, read as sources};

/// Findings of the rules.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Each fails the check.
    pub(crate) violations: Vec<String>,
    /// These do not.
    pub(crate) warnings: Vec<String>,
}

/// Checks all sources below the workspace's root.
pub(crate) fn check(root: &Path) -> Result<Findings, TaskError> {
    let sources = tree::read(root)?;
    let mut violations = Vec::new();
    violations.extend(unsafe_code::check(&sources, &Allowed::read(root, unsafe_code::LIST)?));
    violations.extend(copies::check(&sources, &Allowed::read(root, copies::LIST)?));
    violations.extend(primitives::check(&sources));
    Ok(Findings { violations, warnings: length::check(&sources) })
}
