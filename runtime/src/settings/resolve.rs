//! Settings of a runtime from the program, the environment and the defaults.

use super::table::{RESERVED, Settings};
use carrack_transports::settings::{Declared, SettingLine, SettingsError, Sources};
use std::fmt::Display;

/// Builder of settings from the program's choices; others come from the environment or the default.
///
/// Nothing is checked before `build`, which reports everything that is wrong at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct SettingsBuilder {
    chosen: Vec<(String, String)>,
}

impl Settings {
    /// Returns the settings of this process: the environment's, and the defaults for the others.
    ///
    /// # Errors
    /// Every `CARRACK_*` variable that is unknown, ill-formed or out of range, all at once.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::builder().build()
    }

    /// Resolves as [`from_env`](Self::from_env), from variables of the caller instead of the
    /// process's own.
    ///
    /// # Errors
    /// As for [`from_env`](Self::from_env).
    pub fn from_vars<K, V>(vars: impl IntoIterator<Item = (K, V)>) -> Result<Self, SettingsError>
    where
        K: Into<String>,
        V: Into<String>,
    {
        Self::builder().build_from_vars(vars)
    }

    /// Returns the defaults, without the environment.
    pub fn defaults() -> Self {
        Declared::defaults()
    }

    /// Returns one line for each setting: the runtime's own, then those of each transport.
    pub fn describe(&self) -> Vec<SettingLine> {
        Declared::describe(self)
    }

    /// Starts a program's own choice of settings.
    pub fn builder() -> SettingsBuilder {
        SettingsBuilder::default()
    }
}

impl SettingsBuilder {
    /// Sets any setting, those of transports included, by its name or its variable, to a value in
    /// the notation of the variable. Of two values for one setting the last one holds.
    pub fn setting(mut self, name: impl Into<String>, value: impl Display) -> Self {
        self.chosen.push((name.into(), value.to_string()));
        self
    }

    /// Resolves the settings: the program's choices, then the environment's, then the defaults.
    ///
    /// # Errors
    /// Everything that is wrong in the program's choices and in the environment, all at once.
    pub fn build(self) -> Result<Settings, SettingsError> {
        Sources::of_program(self.chosen).and_environment().resolve(&reserved())
    }

    /// Resolves as [`build`](Self::build), and with them settings that the program declares: those
    /// of a transport for [`RuntimeBuilder::transport`](crate::RuntimeBuilder::transport).
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_with<T: Declared>(self) -> Result<(Settings, T), SettingsError> {
        Sources::of_program(self.chosen).and_environment().resolve(&reserved())
    }

    /// Resolves as [`build`](Self::build), from variables of the caller instead of the process's
    /// own. With none the program alone chooses.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_from_vars<K, V>(
        self,
        vars: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Settings, SettingsError>
    where
        K: Into<String>,
        V: Into<String>,
    {
        Sources::of_program(self.chosen).and_vars(vars).resolve(&reserved())
    }
}

fn reserved() -> Vec<&'static str> {
    RESERVED.iter().map(|reserved| reserved.variable).collect()
}
