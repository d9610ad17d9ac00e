//! Sources of values. Precedence: the program's choice over the environment's, the environment's
//! over the default.

use super::error::{SettingFault, SettingsError};
use super::form::{Form, Refusal};
use super::report::{Origin, Sourced};
use super::{Declared, SettingLine};
use std::collections::BTreeMap;

pub(super) const PREFIX: &str = "CARRACK_";

/// Least similarity (Jaro-Winkler, 0 to 1) at which a known name is offered for an unknown one.
/// At 0.75 a slip or a plural is caught, and two names that share only a few letters are not.
const LIKE_ENOUGH: f64 = 0.75;

/// Values that no setting has taken yet, and the faults of those that were taken. Without any, each
/// setting is its default.
#[derive(Debug, Default)]
pub struct Sources {
    /// Pairs of a setting's name or variable and a value; the last one of a setting holds.
    program: Vec<(String, String)>,
    /// Variables that begin with `CARRACK_`.
    environment: BTreeMap<String, String>,
    faults: Vec<SettingFault>,
}

impl Sources {
    /// Makes sources of the program's choices: names or variables of settings, with values in the
    /// notation of the variables.
    pub fn of_program<N: Into<String>, V: Into<String>>(
        chosen: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let program = chosen.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Self { program, ..Self::default() }
    }

    /// Adds variables, of which those of other programs are left out. Of two with one name the last
    /// one holds.
    #[must_use]
    pub fn and_vars<N: Into<String>, V: Into<String>>(
        mut self,
        vars: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let vars = vars.into_iter().map(|(name, value)| (name.into(), value.into()));
        self.environment.extend(vars.filter(|(name, _)| name.starts_with(PREFIX)));
        self
    }

    /// Adds the variables of this process. A name or value that is not Unicode gets U+FFFD in it,
    /// which is in no variable's name and no number. It is then reported as any other misspelling.
    #[must_use]
    pub fn and_environment(self) -> Self {
        self.and_vars(std::env::vars_os().map(|(name, value)| {
            (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
        }))
    }

    /// Resolves settings. `reserved`: variables that other programs read.
    ///
    /// # Errors
    /// Everything that is wrong in the program's choices and in the environment, all at once.
    pub fn resolve<T: Declared>(mut self, reserved: &[&'static str]) -> Result<T, SettingsError> {
        let settings = T::resolve(&mut self);
        let lines = settings.describe();
        let mut faults = self.faults;
        let in_program = self.program.into_iter().map(|(name, _)| name);
        let in_environment =
            self.environment.into_keys().filter(|name| !reserved.contains(&name.as_str()));
        faults.extend(
            in_program.chain(in_environment).map(|name| SettingFault::Unknown {
                nearest: nearest(&name, &lines, reserved),
                name,
            }),
        );
        if faults.is_empty() { Ok(settings) } else { Err(SettingsError { faults }) }
    }

    /// Takes one setting from the program, else from its variable, else from the default.
    ///
    /// A fault leaves the default in place, so that the other faults are found too. The variable is
    /// checked even where the program overrides it, so that a misspelling is found now.
    pub fn take<T>(
        &mut self,
        name: &'static str,
        variable: &'static str,
        form: &impl Form<T>,
        default: T,
    ) -> Sourced<T> {
        let in_program = self.program.extract_if(.., |(key, _)| key == name || key == variable);
        let in_program = in_program.last().map(|(_, text)| (text, Origin::Builder));
        let in_environment = self.environment.remove(variable);
        let in_environment = in_environment.map(|text| (text, Origin::Environment(variable)));
        let mut chosen = Sourced { value: default, origin: Origin::Default };
        for (value, origin) in in_environment.into_iter().chain(in_program) {
            match form.parse(&value).and_then(|value| form.check(&value).map(|()| value)) {
                Ok(value) => chosen = Sourced { value, origin },
                Err(refusal) => {
                    let (expected, example) = (form.expected(), form.example());
                    self.faults.push(match refusal {
                        Refusal::Malformed => {
                            SettingFault::Malformed { name, origin, value, expected, example }
                        }
                        Refusal::OutOfRange => {
                            SettingFault::OutOfRange { name, origin, value, expected, example }
                        }
                    });
                }
            }
        }
        chosen
    }
}

/// Returns the known variable, or name of a setting, most like `found`, if one is like enough.
fn nearest(found: &str, lines: &[SettingLine], reserved: &[&'static str]) -> Option<&'static str> {
    let known: Vec<_> = match found.starts_with(PREFIX) {
        true => lines.iter().map(|line| line.variable).chain(reserved.iter().copied()).collect(),
        false => lines.iter().map(|line| line.name).collect(),
    };
    // The prefix is common to all, and would make any two alike.
    let plain = |name: &str| name.trim_start_matches(PREFIX).to_ascii_uppercase();
    known
        .into_iter()
        .map(|known| (strsim::jaro_winkler(&plain(found), &plain(known)), known))
        .filter(|(likeness, _)| *likeness >= LIKE_ENOUGH)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, known)| known)
}
