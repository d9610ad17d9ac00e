//! Settings, each declared once by its owner: the runtime, or a transport in its own folder.
//!
//! | module | content |
//! |---|---|
//! | `declare` | the macro that turns a table of settings into a struct of checked values |
//! | [`form`] | notation, range and display of values |
//! | `choice` | the settings that are one word, or several, out of a few |
//! | `size` | sizes in bytes, such as `8KiB` |
//! | `sources` | precedence: program, environment, default; names that no setting has |
//! | `error` | faults, reported all at once |
//! | `report` | the value of each setting and its origin |
//!
//! A transport of the program's own declares its settings in the same way:
//!
//! ```
//! use carrack_transports::settings::{Sources, form::Count};
//!
//! carrack_transports::declare_settings! {
//!     /// Settings of the transport `mynet`.
//!     pub struct MyNetSettings {
//!         /// Requests that a queue holds.
//!         mynet_depth: usize, "CARRACK_MYNET_DEPTH", Count::of("requests", 1, 64), 16;
//!     }
//! }
//!
//! let sources = Sources::of_program([("mynet_depth", "32")]);
//! assert_eq!(sources.resolve::<MyNetSettings>(&[])?.mynet_depth(), 32);
//! # Ok::<(), carrack_transports::settings::SettingsError>(())
//! ```

mod choice;
mod declare;
mod error;
pub mod form;
mod report;
mod size;
mod sources;

pub use choice::{AutoChoice, Choice};
pub use error::{SettingFault, SettingsError};
pub use report::{Origin, SettingLine, Sourced};
pub use size::{SizeError, parse_size};
pub use sources::Sources;

/// Settings of one owner, or of several: [`declare_settings`](crate::declare_settings) implements
/// it.
pub trait Declared: Sized {
    /// Takes each setting from its source, which collects the faults.
    fn resolve(sources: &mut Sources) -> Self;

    /// Returns one line for each setting, in the table's order.
    fn describe(&self) -> Vec<SettingLine>;

    /// Returns the defaults, without the environment.
    fn defaults() -> Self {
        Self::resolve(&mut Sources::default())
    }
}

impl<A: Declared, B: Declared> Declared for (A, B) {
    fn resolve(sources: &mut Sources) -> Self {
        (A::resolve(sources), B::resolve(sources))
    }

    fn describe(&self) -> Vec<SettingLine> {
        [self.0.describe(), self.1.describe()].concat()
    }
}
