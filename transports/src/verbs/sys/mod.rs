//! libibverbs, opened at run time.
//!
//! | module | one idea |
//! |---|---|
//! | [`bindings`] | structures and numbers, made from rdma-core's headers by `cargo xtask bindings` |

pub mod bindings;
