//! The macro behind every table of settings. It holds no knowledge of any one setting.

/// Declares the settings of one owner: a struct with an accessor for each, which implements
/// [`Declared`](crate::settings::Declared).
///
/// An entry is its doc lines, then `name: Type, "VARIABLE", form, default;`. Where the accessor
/// lends a view instead of returning a copy, `seen as &View` follows the type. Entries without doc
/// and variable follow: `part: Type;` is another declared struct, which becomes a part of this one.
///
/// Fields are private so that a struct in hand is known to be in range.
#[macro_export]
macro_rules! declare_settings {
    (@accessor $doc:expr, $name:ident, $type:ty) => {
        #[doc = $doc]
        pub fn $name(&self) -> $type {
            self.$name.value
        }
    };
    (@accessor $doc:expr, $name:ident, $type:ty, $view:ty) => {
        #[doc = $doc]
        pub fn $name(&self) -> $view {
            &self.$name.value
        }
    };
    (
        $(#[$about:meta])+
        pub struct $owner:ident {
            $(
                $(#[doc = $doc:literal])+
                $name:ident : $type:ty, $(seen as $view:ty,)?
                    $variable:literal, $form:expr, $default:expr;
            )*
            $($part:ident : $part_type:ty;)*
        }
    ) => {
        $(#[$about])+
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $owner {
            $($name: $crate::settings::Sourced<$type>,)*
            $($part: $part_type,)*
        }

        impl $owner {
            $($crate::declare_settings!(
                @accessor concat!($($doc),+), $name, $type $(, $view)?
            );)*
            $(
                #[doc = concat!("Returns the settings of `", stringify!($part), "`.")]
                pub fn $part(&self) -> &$part_type {
                    &self.$part
                }
            )*
        }

        impl $crate::settings::Declared for $owner {
            fn resolve(sources: &mut $crate::settings::Sources) -> Self {
                Self {
                    $($name: sources.take(stringify!($name), $variable, &$form, $default),)*
                    $($part: $crate::settings::Declared::resolve(sources),)*
                }
            }

            fn describe(&self) -> Vec<$crate::settings::SettingLine> {
                [
                    $(vec![
                        self.$name.line(stringify!($name), $variable, &$form, concat!($($doc),+))
                    ],)*
                    $($crate::settings::Declared::describe(&self.$part),)*
                ]
                .concat()
            }
        }
    };
}
