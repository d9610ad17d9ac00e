//! Objects that a program has from other crates: their pointers are C's, as ours are.
//!
//! A program with these features is linked with libibverbs, and
//! [`Verbs::open`](super::Verbs::open) finds the same library. `transports/layout` checks their
//! structures against ours.

#[cfg(feature = "rdma-sys")]
mod rdma_sys {
    use crate::verbs::sys::{Context, ProtectionDomain, Verbs};
    use std::sync::Arc;

    impl Context {
        /// Adopts a context of the crate `rdma-sys`: see [`Context::from_raw`].
        ///
        /// # Safety
        /// As there.
        pub unsafe fn from_rdma_sys(
            verbs: &Arc<Verbs>,
            raw: *mut rdma_sys::ibv_context,
        ) -> Arc<Self> {
            // SAFETY: passed on from the caller; the structures are the same.
            unsafe { Self::from_raw(verbs, raw.cast()) }
        }
    }

    impl ProtectionDomain {
        /// Adopts a protection domain of the crate `rdma-sys`: see [`ProtectionDomain::from_raw`].
        ///
        /// # Safety
        /// As there.
        pub unsafe fn from_rdma_sys(
            context: &Arc<Context>,
            raw: *mut rdma_sys::ibv_pd,
        ) -> Arc<Self> {
            // SAFETY: passed on from the caller; the structures are the same.
            unsafe { Self::from_raw(context, raw.cast()) }
        }
    }
}

/// The crate `ibverbs` (0.9) keeps its pointers private, so these functions take those of
/// `ibverbs-sys`.
#[cfg(feature = "ibverbs")]
mod ibverbs {
    use crate::verbs::sys::{Context, ProtectionDomain, Verbs};
    use std::sync::Arc;

    impl Context {
        /// Adopts a context of the crate `ibverbs-sys`: see [`Context::from_raw`].
        ///
        /// # Safety
        /// As there.
        pub unsafe fn from_ibverbs(
            verbs: &Arc<Verbs>,
            raw: *mut ibverbs_sys::ibv_context,
        ) -> Arc<Self> {
            // SAFETY: passed on from the caller; the structures are the same.
            unsafe { Self::from_raw(verbs, raw.cast()) }
        }
    }

    impl ProtectionDomain {
        /// Adopts a protection domain of the crate `ibverbs-sys`: see
        /// [`ProtectionDomain::from_raw`].
        ///
        /// # Safety
        /// As there.
        pub unsafe fn from_ibverbs(
            context: &Arc<Context>,
            raw: *mut ibverbs_sys::ibv_pd,
        ) -> Arc<Self> {
            // SAFETY: passed on from the caller; the structures are the same.
            unsafe { Self::from_raw(context, raw.cast()) }
        }
    }
}
