//! The setters of the program's choices.

/// Gives `SettingsBuilder` a setter for each entry of a table that is written as
/// [`declare_settings`](carrack_transports::declare_settings) takes it.
macro_rules! setters {
    (@value $type:ty) => { $type };
    (@value $type:ty, $view:ty) => { impl Into<$type> };
    ($(
        $(#[doc = $doc:literal])+
        $name:ident : $type:ty, $(seen as $view:ty,)? $variable:literal, $form:expr, $default:expr;
    )*) => {
        impl SettingsBuilder {
            $(
                #[doc = concat!($($doc),+)]
                ///
                #[doc = concat!("Takes precedence over `", $variable, "`.")]
                pub fn $name(self, value: setters!(@value $type $(, $view)?)) -> Self {
                    self.setting(stringify!($name), Form::<$type>::show(&$form, &value.into()))
                }
            )*
        }
    };
}

pub(super) use setters;
