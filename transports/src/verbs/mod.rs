//! The transport between nodes: RDMA by verbs.

pub mod address;
pub mod channel;
pub mod options;
pub mod sys;
pub mod wire;
