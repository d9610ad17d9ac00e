//! Only tests: whether the structures of `carrack_transports::verbs::sys::bindings` are laid out as
//! those of two other crates, which make theirs anew from the headers of the machine (`rdma-sys`)
//! and of rdma-core 55 (`ibverbs-sys`).
