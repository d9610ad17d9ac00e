//! Where a datagram goes.

use super::super::bindings::{ibv_ah, ibv_ah_attr};
use super::super::error::VerbsError;
use super::domain::ProtectionDomain;
use super::handle::Handle;
use std::fmt;
use std::sync::Arc;

/// The way to a peer's port, for work of [`Datagram`](super::QueuePairKind::Datagram) queue pairs.
pub struct AddressHandle {
    raw: Handle<ibv_ah>,
    domain: Arc<ProtectionDomain>,
}

impl AddressHandle {
    /// The way that `attr` describes.
    ///
    /// # Errors
    /// There is no such way (over Ethernet: no route, or nobody answers), or the device has room for no more.
    pub fn create(domain: &Arc<ProtectionDomain>, attr: &mut ibv_ah_attr) -> Result<Self, VerbsError> {
        let context = domain.context();
        // SAFETY: the domain is there.
        let raw = unsafe { context.verbs().create_ah(domain.base().as_raw(), attr) };
        let raw = raw.map_err(|error| context.name_in(error).at_port(attr.port_num))?;
        // SAFETY: what is not a failure is not null.
        let raw = unsafe { Handle::new(raw) };
        Ok(Self { raw, domain: Arc::clone(domain.base()) })
    }

    /// The library's own structure, which is there as long as this is.
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_ah {
        self.raw.raw()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: made here; that no work under way names it was promised where that was posted.
        self.domain.context().release("address handle", |verbs| unsafe { verbs.destroy_ah(self.as_raw()) });
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AddressHandle({})", self.domain.context().name())
    }
}
