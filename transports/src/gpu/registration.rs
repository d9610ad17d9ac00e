//! Host memory that engines may use.

use std::any::Any;
use std::fmt;

/// Host memory that is locked for a driver's engines. Dropping this unlocks it.
pub struct HostRegistration {
    _owner: Box<dyn Any + Send + Sync>,
}

impl HostRegistration {
    /// Creates a registration that ends when `owner` is dropped.
    pub fn new(owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { _owner: owner }
    }
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostRegistration")
    }
}
