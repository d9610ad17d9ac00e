//! Small copies by a resident kernel: they copy right, in the order of other copies, and the
//! kernel blocks no other work. They run on simulated GPUs, and on real ones with `TEST_GPU=cuda`.
//! All tests share one process, because a process that has a copier on a GPU keeps it.
//! `gpu_copier_ranks` tests several ranks.

mod alone;
