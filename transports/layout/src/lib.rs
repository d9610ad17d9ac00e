//! Tests only: the structures of `carrack_transports::verbs::sys::bindings` have the layout of
//! those of two other crates. `rdma-sys` generates its own from the machine's headers,
//! `ibverbs-sys` from those of rdma-core 55.
