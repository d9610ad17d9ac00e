//! A list of files that may do what others may not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::tree::Source;
use crate::error::TaskError;

/// The entries of a list.
#[derive(Debug)]
pub(super) struct Allowed {
    list: String,
    entries: Vec<String>,
}

impl Allowed {
    /// Reads a list: an entry a line, `#` begins a comment.
    pub(super) fn read(root: &Path, list: &str) -> Result<Self, TaskError> {
        let path = root.join(list);
        let text = fs::read_to_string(&path).map_err(TaskError::file(path))?;
        Ok(Self::parse(list, &text))
    }

    pub(super) fn parse(list: &str, text: &str) -> Self {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        let entries = lines.filter(|line| !line.is_empty()).map(str::to_owned).collect();
        Self { list: list.to_owned(), entries }
    }

    /// Compares the list with the files that do it: each must be in the list, and each entry must
    /// be needed.
    ///
    /// `found` yields the file and line of each place, and what stands there.
    pub(super) fn compare<'a>(
        &self,
        found: impl IntoIterator<Item = (&'a Source, usize, &'a str)>,
    ) -> Vec<String> {
        let mut needed = vec![false; self.entries.len()];
        // A file is named once, at its first place: it is the file that wants an entry, or wants
        // cleaning.
        let mut strangers: BTreeMap<&str, (usize, &str, usize)> = BTreeMap::new();
        for (source, line, what) in found {
            let mut allowed = false;
            for (entry, needed) in self.entries.iter().zip(&mut needed) {
                if covers(entry, &source.path) {
                    (*needed, allowed) = (true, true);
                }
            }
            if !allowed {
                let (.., places) = strangers.entry(&source.path).or_insert((line, what, 0));
                *places += 1;
            }
        }
        let mut violations: Vec<String> = strangers
            .into_iter()
            .map(|(path, (line, what, places))| match places {
                1 => format!("{path}:{line}: `{what}` in a file that is not in {}", self.list),
                _ => format!(
                    "{path}:{line} and {} more: `{what}` in a file that is not in {}",
                    places - 1,
                    self.list
                ),
            })
            .collect();
        let stale = self.entries.iter().zip(needed).filter(|(_, needed)| !needed);
        violations.extend(
            stale.map(|(entry, _)| format!("{}: {entry} no longer needs its entry", self.list)),
        );
        violations
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(String::as_str)
    }
}

/// Returns `true` if an entry names this file or a folder above it.
fn covers(entry: &str, path: &str) -> bool {
    if entry.ends_with('/') { path.starts_with(entry) } else { path == entry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_covers_what_is_in_it_and_a_file_only_itself() {
        assert!(covers("a/b/", "a/b/c.rs") && covers("a/b.rs", "a/b.rs"));
        assert!(
            !covers("a/b", "a/b/c.rs")
                && !covers("a/b.rs", "a/b.rs.rs")
                && !covers("a/b/", "a/bc.rs")
        );
    }

    #[test]
    fn a_file_with_many_places_is_named_once_with_the_first_of_them() {
        let source = Source::new("a.rs", "");
        let found = [(&source, 3, "unsafe"), (&source, 5, "unsafe"), (&source, 9, "unsafe")];
        let violations = Allowed::parse("list", "").compare(found);
        assert_eq!(violations, ["a.rs:3 and 2 more: `unsafe` in a file that is not in list"]);
    }

    #[test]
    fn comments_and_empty_lines_of_a_list_are_no_entries() {
        let list = Allowed::parse("list", "# comment\n\n  a.rs  # why\nb/\n");
        assert_eq!(list.entries().collect::<Vec<_>>(), ["a.rs", "b/"]);
    }
}
