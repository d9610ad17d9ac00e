//! The macro behind the table. It holds no knowledge of any one setting.

/// Declares `Settings`, `SettingsBuilder` and the functions over all settings.
///
/// An entry is its doc lines, then `name: Type, "VARIABLE", form, default;`, with `seen as &View`
/// after the type where the accessor lends a view instead of returning a copy.
macro_rules! settings {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident : $type:ty, $(seen as $view:ty,)? $variable:literal, $form:expr, $default:expr;
    )+) => {
        /// The settings of a runtime, all checked. See the [module](crate::settings) for where they
        /// come from.
        ///
        /// Fields are private so that a `Settings` in hand is known to be in range.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Settings {
            $($name: $crate::settings::report::Sourced<$type>,)+
        }

        /// Sets the program's choices; other settings come from the environment or the default.
        ///
        /// Nothing is checked before `build`, which reports everything that is wrong at once.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        #[must_use = "a builder does nothing until `build` is called"]
        pub struct SettingsBuilder {
            $($name: Option<$type>,)+
        }

        impl Settings {
            $($crate::settings::declare::accessor!(concat!($($doc),+), $name, $type $(, $view)?);)+

            /// Returns the defaults, without the environment.
            pub fn defaults() -> Self {
                Self { $($name: $crate::settings::report::Sourced::by_default($default),)+ }
            }

            /// Returns one line for each setting, in the table's order.
            pub fn describe(&self) -> Vec<$crate::settings::SettingLine> {
                use $crate::settings::form::Form;
                vec![$({
                    let form = $form;
                    $crate::settings::SettingLine {
                        name: stringify!($name),
                        variable: $variable,
                        value: form.show(&self.$name.value),
                        origin: self.$name.origin,
                        expected: Form::<$type>::expected(&form),
                        doc: concat!($($doc),+).trim_ascii(),
                    }
                },)+]
            }
        }

        impl SettingsBuilder {
            $($crate::settings::declare::setter!(
                concat!($($doc),+), $name, $type, $variable $(, $view)?
            );)+

            /// Takes each setting from its source, and collects the faults.
            pub(super) fn resolve(
                self,
                variables: &mut $crate::settings::variables::Variables,
                faults: &mut Vec<$crate::settings::SettingFault>,
            ) -> Settings {
                Settings {
                    $($name: $crate::settings::resolve::resolve(
                        stringify!($name), $variable, &$form, self.$name, variables.take($variable),
                        $default, faults,
                    ),)+
                }
            }
        }

        /// The variables of all settings, in the table's order.
        pub(super) const VARIABLES: &[&str] = &[$($variable,)+];

        /// Returns the settings whose default their own form refuses: no other check would find
        /// such a default.
        #[cfg(test)]
        pub(super) fn defaults_that_their_form_refuses() -> Vec<&'static str> {
            use $crate::settings::form::Form as _;
            let mut refused = Vec::new();
            $(
                let default: $type = $default;
                let reread = $form.parse(&$form.show(&default));
                if $form.check(&default).is_err() || reread != Ok(default) {
                    refused.push(stringify!($name));
                }
            )+
            refused
        }
    };
}

/// An accessor that returns a copy, or lends a view where the entry says `seen as`.
macro_rules! accessor {
    ($doc:expr, $name:ident, $type:ty) => {
        #[doc = $doc]
        pub fn $name(&self) -> $type {
            self.$name.value
        }
    };
    ($doc:expr, $name:ident, $type:ty, $view:ty) => {
        #[doc = $doc]
        pub fn $name(&self) -> $view {
            &self.$name.value
        }
    };
}

/// A setter of the builder; for what is seen as a view, from anything that turns into the owned
/// value.
macro_rules! setter {
    ($doc:expr, $name:ident, $type:ty, $variable:literal) => {
        #[doc = $doc]
        ///
        #[doc = concat!("Takes precedence over `", $variable, "`.")]
        pub fn $name(mut self, value: $type) -> Self {
            self.$name = Some(value);
            self
        }
    };
    ($doc:expr, $name:ident, $type:ty, $variable:literal, $view:ty) => {
        #[doc = $doc]
        ///
        #[doc = concat!("Takes precedence over `", $variable, "`.")]
        pub fn $name(mut self, value: impl Into<$type>) -> Self {
            self.$name = Some(value.into());
            self
        }
    };
}

pub(super) use {accessor, setter, settings};
