//! The values of all settings, and their origins.

use super::form::Form;
use std::fmt;

/// The origin of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The default: neither the environment nor the program has set it.
    Default,
    /// This variable of the environment.
    Environment(&'static str),
    /// The program.
    Builder,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.pad("default"),
            Self::Environment(variable) => f.pad(variable),
            Self::Builder => f.pad("set by the program"),
        }
    }
}

/// A setting as `carrack info` prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingLine {
    /// The setting's name, which is also its accessor.
    pub name: &'static str,
    /// The variable that sets it.
    pub variable: &'static str,
    /// The effective value, in the notation of the variable.
    pub value: String,
    /// The origin of that value.
    pub origin: Origin,
    /// The values that are allowed, in words.
    pub expected: String,
    /// Meaning of the setting.
    pub doc: &'static str,
}

/// A value with its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sourced<T> {
    /// The value, which its form accepts.
    pub value: T,
    /// The origin of that value.
    pub origin: Origin,
}

impl<T> Sourced<T> {
    /// Returns the line of this value's setting.
    pub fn line(
        &self,
        name: &'static str,
        variable: &'static str,
        form: &impl Form<T>,
        doc: &'static str,
    ) -> SettingLine {
        let (value, expected) = (form.show(&self.value), form.expected());
        let doc = doc.trim_ascii();
        SettingLine { name, variable, value, origin: self.origin, expected, doc }
    }
}
