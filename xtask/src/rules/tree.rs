//! The Rust sources of the workspace.

use std::fs;
use std::path::Path;

use super::code::{self, find_word};
use crate::error::TaskError;

/// A source file.
#[derive(Debug)]
pub(crate) struct Source {
    /// From the workspace's root, with slashes.
    pub(crate) path: String,
    /// Its lines, with comments, strings and characters blanked.
    pub(super) code: Vec<String>,
}

impl Source {
    pub(super) fn new(path: impl Into<String>, text: &str) -> Self {
        Self { path: path.into(), code: code::only(text).lines().map(str::to_owned).collect() }
    }

    /// The lines that are no test: those before a test module at the end of the file, and none of a
    /// file that is a test module by itself.
    ///
    /// `#[cfg(test)]` on anything but the body of a module does not count as its beginning: what
    /// follows is no test.
    pub(super) fn outside_tests(&self) -> impl Iterator<Item = (usize, &str)> {
        let is_test =
            |line: &str| line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test");
        let opens = |after: &[String]| {
            let item = after
                .iter()
                .map(|line| line.trim())
                .find(|line| !line.is_empty() && !line.starts_with("#["));
            item.is_some_and(|item| find_word(item, "mod").is_some() && item.contains('{'))
        };
        let own_file = self.path.ends_with("/tests.rs") || self.path.contains("/tests/");
        let begins =
            (0..self.code.len()).find(|at| is_test(&self.code[*at]) && opens(&self.code[at + 1..]));
        let end = if own_file { 0 } else { begins.unwrap_or(self.code.len()) };
        self.lines().take(end)
    }

    /// All lines, numbered from 1.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code.iter().enumerate().map(|(index, line)| (index + 1, line.as_str()))
    }
}

/// Reads every `.rs` file below the root, except build outputs and hidden folders.
pub(crate) fn read(root: &Path) -> Result<Vec<Source>, TaskError> {
    let mut sources = Vec::new();
    walk(root, "", &mut sources)?;
    sources.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(sources)
}

fn walk(folder: &Path, prefix: &str, sources: &mut Vec<Source>) -> Result<(), TaskError> {
    for entry in fs::read_dir(folder).map_err(TaskError::file(folder))? {
        let entry = entry.map_err(TaskError::file(folder))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().map_err(TaskError::file(entry.path()))?;
        if name.starts_with('.') || name == "target" {
            continue;
        }
        // Links are not followed: a loop of them would never end.
        if kind.is_dir() {
            walk(&entry.path(), &format!("{prefix}{name}/"), sources)?;
        } else if kind.is_file() && name.ends_with(".rs") {
            let text = fs::read_to_string(entry.path()).map_err(TaskError::file(entry.path()))?;
            sources.push(Source::new(format!("{prefix}{name}"), &text));
        }
    }
    Ok(())
}
