//! Errors of drivers.

/// Error of a driver, with the driver's own code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} said {code} ({name}){}{hint}", if hint.is_empty() { "" } else { ": " })]
pub struct GpuError {
    /// The driver's call.
    pub call: &'static str,
    /// The driver's code.
    pub code: i32,
    /// The code's name.
    pub name: &'static str,
    /// Meaning of the code here and what to do, or empty.
    pub hint: String,
}

impl GpuError {
    /// Returns an error of a driver that lacks a feature.
    pub(crate) fn unsupported(call: &'static str, hint: impl Into<String>) -> Self {
        Self { call, code: 801, name: "NOT_SUPPORTED", hint: hint.into() }
    }
}
