//! Memory that other ranks reach.

use super::Runtime;
use crate::error::RegisterError;
use crate::region::{Mr, Region, Registration};

impl Runtime {
    /// Allocates zeroed host memory that the ranks of this machine can map once it is registered.
    ///
    /// # Errors
    /// The system has no shared memory, or no descriptor, left.
    pub fn allocate(&self, len: usize) -> Result<Region, RegisterError> {
        Region::shared(len).map_err(|error| RegisterError::System { len, why: error.to_string() })
    }

    /// Lets other ranks reach a region, of any kind of memory. One registration serves all devices.
    ///
    /// Raw memory is registered by
    /// `buffer::raw::register_memory`, which finds its
    /// kind. [`registration`](Self::registration) chooses the coherence owner of its words.
    ///
    /// # Errors
    /// As of [`Registration::register`].
    pub fn register_memory(&self, region: &Region) -> Result<Mr, RegisterError> {
        self.registration(region).register()
    }

    /// Lets other ranks reach a region, with choices that
    /// [`register_memory`](Self::register_memory) does not have.
    pub fn registration<'a>(&'a self, region: &'a Region) -> Registration<'a> {
        Registration::new(&self.0, &self.0.regions, region)
    }

    /// Ends a registration.
    pub fn deregister_memory(&self, mr: Mr) {
        drop(mr);
    }
}
