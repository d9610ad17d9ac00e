//! Every setting of the runtime, in one typed place, and those that its transports declare.
//!
//! | module | content |
//! |---|---|
//! | `table` | **the runtime's own**: name, type, variable, form, default and doc line of each |
//! | `declare` | the setters of [`SettingsBuilder`], made of the table |
//! | `resolve` | [`SettingsBuilder`], and the ways to build [`Settings`] |
//! | `choice` | the settings that are one word out of a few |
//!
//! Forms, precedence and errors are those of [`carrack_transports::settings`], where each transport
//! declares its own settings.
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
mod resolve;
mod table;

#[cfg(test)]
mod tests;

pub use carrack_transports::registry::{TransportChoice, TransportSettings};
pub use carrack_transports::settings::{
    AutoChoice, Declared, Origin, SettingFault, SettingLine, SettingsError, SizeError, parse_size,
};
pub use choice::{BootstrapChoice, DumpChoice, GpuChoice, ProgressChoice};
pub use resolve::SettingsBuilder;
pub use table::{RESERVED, Reserved, Settings};
