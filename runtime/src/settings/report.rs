//! The values of all settings, and their origins.

use std::fmt;

/// The origin of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The default: neither the environment nor the program has set it.
    Default,
    /// This variable of the environment.
    Environment(&'static str),
    /// The program, through a [`SettingsBuilder`](super::SettingsBuilder).
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
    /// The setting's name, which is also its accessor and its setter.
    pub name: &'static str,
    /// The variable that sets it.
    pub variable: &'static str,
    /// The effective value, in the notation of the variable.
    pub value: String,
    /// The origin of that value.
    pub origin: Origin,
    /// The values that are allowed, in words.
    pub expected: String,
    /// Its purpose, in one sentence.
    pub doc: &'static str,
}

/// A value with its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sourced<T> {
    pub(super) value: T,
    pub(super) origin: Origin,
}

impl<T> Sourced<T> {
    pub(super) fn by_default(value: T) -> Self {
        Self { value, origin: Origin::Default }
    }
}
