//! Precedence: the program's choice over the environment's, the environment's over the default.

use super::error::{SettingFault, SettingsError};
use super::form::{Form, Refusal};
use super::report::{Origin, Sourced};
use super::table::{Settings, SettingsBuilder};
use super::variables::Variables;

/// Takes one setting from the program, else from its variable, else from the default.
///
/// A fault leaves the default in place, so that the other faults are found too. The variable is
/// checked even where the program overrides it, so that a misspelling is found now.
pub(super) fn resolve<T>(
    name: &'static str,
    variable: &'static str,
    form: &impl Form<T>,
    in_program: Option<T>,
    in_environment: Option<String>,
    default: T,
    faults: &mut Vec<SettingFault>,
) -> Sourced<T> {
    let fault = |value, origin, refusal| {
        let (expected, example) = (form.expected(), form.example());
        match refusal {
            Refusal::Malformed => {
                SettingFault::Malformed { name, origin, value, expected, example }
            }
            Refusal::OutOfRange => {
                SettingFault::OutOfRange { name, origin, value, expected, example }
            }
        }
    };
    let mut chosen = Sourced::by_default(default);
    if let Some(text) = in_environment {
        let origin = Origin::Environment(variable);
        match form.parse(&text).and_then(|value| form.check(&value).map(|()| value)) {
            Ok(value) => chosen = Sourced { value, origin },
            Err(refusal) => faults.push(fault(text, origin, refusal)),
        }
    }
    if let Some(value) = in_program {
        match form.check(&value) {
            Ok(()) => chosen = Sourced { value, origin: Origin::Builder },
            Err(refusal) => faults.push(fault(form.show(&value), Origin::Builder, refusal)),
        }
    }
    chosen
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

    /// Starts a program's own choice of settings.
    pub fn builder() -> SettingsBuilder {
        SettingsBuilder::default()
    }
}

impl SettingsBuilder {
    /// Resolves the settings: the program's choices, then the environment's, then the defaults.
    ///
    /// # Errors
    /// Everything that is wrong in the program's choices and in the environment, all at once.
    pub fn build(self) -> Result<Settings, SettingsError> {
        self.build_with(Variables::of_this_process())
    }

    /// Resolves as [`build`](Self::build), from variables of the caller instead of the process's
    /// own. With none a test does not depend on its environment.
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
        self.build_with(vars.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }

    fn build_with(self, mut variables: Variables) -> Result<Settings, SettingsError> {
        let mut faults = Vec::new();
        let settings = self.resolve(&mut variables, &mut faults);
        faults.extend(variables.unknown());
        if faults.is_empty() { Ok(settings) } else { Err(SettingsError { faults }) }
    }
}
