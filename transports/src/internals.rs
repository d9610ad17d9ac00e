//! Wire formats, for fuzz targets and tests of hostile peers.

/// Shared memory.
pub mod shm {
    pub use crate::shm::handshake::*;
}

/// TCP.
pub mod tcp {
    pub use crate::tcp::{address::*, frame::*};
}

/// RDMA verbs.
pub mod verbs {
    pub use crate::verbs::{address::*, channel::*, together::*, wire::*};
}
