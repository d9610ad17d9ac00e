//! Errors in settings. All are reported at once, each with a correct value.

use thiserror::Error;

use super::report::Origin;
use super::sources::PREFIX;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SettingFault {
    /// An unknown `CARRACK_*` variable, or name of a setting in the program; most likely a
    /// misspelling.
    #[error("{name} is not a {} of Carrack; {}", kind(name), advice(name, *nearest))]
    Unknown {
        /// The variable or the name, as found.
        name: String,
        /// The known one that is most like it, if one is.
        nearest: Option<&'static str>,
    },
    /// A value that cannot be read.
    #[error(
        "{} cannot be read; expected {expected}, for example {example}",
        assignment(name, origin, value)
    )]
    Malformed {
        /// The setting's name.
        name: &'static str,
        /// The origin of the value.
        origin: Origin,
        /// The value, as found.
        value: String,
        /// The form that was expected.
        expected: String,
        /// A value that would be accepted.
        example: String,
    },
    /// A value that can be read, but is not allowed.
    #[error(
        "{} is not allowed; expected {expected}, for example {example}",
        assignment(name, origin, value)
    )]
    OutOfRange {
        /// The setting's name.
        name: &'static str,
        /// The origin of the value.
        origin: Origin,
        /// The value, as found.
        value: String,
        /// The range that was expected.
        expected: String,
        /// A value that would be accepted.
        example: String,
    },
}

/// Everything that is wrong with the settings, in the table's order, then the unknown variables by
/// name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}", one_a_line(faults))]
pub struct SettingsError {
    pub(super) faults: Vec<SettingFault>,
}

impl SettingsError {
    /// Returns the faults, at least one.
    pub fn faults(&self) -> &[SettingFault] {
        &self.faults
    }
}

fn kind(name: &str) -> &'static str {
    if name.starts_with(PREFIX) { "variable" } else { "setting" }
}

fn advice(name: &str, nearest: Option<&str>) -> String {
    match nearest {
        Some(known) => format!("did you mean {known}?"),
        None if name.starts_with(PREFIX) => {
            "unset it, or see `carrack info` for those that there are".into()
        }
        None => "see `carrack info` for those that there are".into(),
    }
}

/// Returns the value as the user wrote it.
fn assignment(name: &str, origin: &Origin, value: &str) -> String {
    match origin {
        Origin::Environment(variable) => format!("{variable}={value}"),
        Origin::Builder | Origin::Default => format!("setting {name} = {value} ({origin})"),
    }
}

fn one_a_line(faults: &[SettingFault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
