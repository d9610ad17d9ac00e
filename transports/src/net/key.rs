//! Names of devices.

/// Unique name of a device in the job. It tells a device from its predecessor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceKey(pub [u8; 16]);

impl DeviceKey {
    /// Returns a new, unique key.
    ///
    /// # Errors
    /// The kernel's, if it has no random numbers.
    pub fn fresh() -> rustix::io::Result<Self> {
        super::random().map(Self)
    }
}
