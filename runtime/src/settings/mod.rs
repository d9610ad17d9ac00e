//! Every setting of the runtime, in one typed place.
//!
//! | module | content |
//! |---|---|
//! | `table` | **the settings**: name, type, variable, form, default and doc line, one entry each |
//! | `declare` | the macro that turns the table into [`Settings`] and [`SettingsBuilder`] |
//! | `resolve` | precedence: program, environment, default |
//! | `form` | notation, range and display of values |
//! | `choice` | the settings that are one word, or several, out of a few |
//! | `size` | sizes in bytes, such as `8KiB` |
//! | `variables` | the `CARRACK_*` variables found, and the known one nearest to an unknown one |
//! | `error` | faults, reported all at once |
//! | `report` | the value of each setting and its origin, for `carrack info` |
//!
//! A value set in the program wins over the environment, and the environment over the default:
//!
//! ```
//! use carrack::settings::{Origin, Settings};
//!
//! let vars = [("CARRACK_PACKET_SIZE", "4KiB"), ("CARRACK_BACKLOG", "64")];
//! let settings = Settings::builder().backlog(16).build_from_vars(vars)?;
//! assert_eq!(settings.packet_size(), 4096); // the environment's
//! assert_eq!(settings.backlog(), 16); // the program's
//! assert_eq!(settings.poll_batch(), 32); // the default
//!
//! let line = settings.describe().into_iter().find(|line| line.name == "packet_size");
//! assert_eq!(line.map(|line| line.origin), Some(Origin::Environment("CARRACK_PACKET_SIZE")));
//! # Ok::<(), carrack::settings::SettingsError>(())
//! ```

mod choice;
mod declare;
#[cfg(test)]
mod document;
mod error;
mod form;
mod report;
mod resolve;
mod size;
mod table;
mod variables;

#[cfg(test)]
mod tests;

pub use choice::{
    BootstrapChoice, DumpChoice, GpuChoice, GpuIpcChoice, KernelCopyChoice, ProgressChoice,
    SwitchChoice, TransportChoice,
};
pub use error::{SettingFault, SettingsError};
pub use report::{Origin, SettingLine};
pub use size::{SizeError, parse_size};
pub use table::{RESERVED, Reserved, Settings, SettingsBuilder};
