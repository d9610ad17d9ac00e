//! Small copies by a resident kernel: that they are copies as others are, in the order of others,
//! and that the kernel holds nobody up. With simulated GPUs here, and with real ones where
//! `TEST_GPU=cuda` says so. One process: ranks are `gpu_copier_ranks`, because a process that has a
//! copier on a GPU keeps it.

mod alone;
