//! Memory of GPUs, simulated here, and real where `TEST_GPU=cuda` says so. On real GPUs run one
//! module at a time, as `carrack selftest` does: a process that has a copier keeps its GPU.
//!
//! | module | one idea |
//! |---|---|
//! | `am_into_gpu` | active messages into memory of a GPU |
//! | `explain_copier` | `carrack explain` where copiers were asked for |
//! | `fake_gpu` | the simulated GPU itself |
//! | `gpu_copier` | the resident copier in one process |
//! | `gpu_copier_ranks` | ranks with resident copiers |
//! | `gpu_ipc` | memory that other processes map |
//! | `gpu_ordeals` | kills, masks, refusals, many rounds |
//! | `gpu_rules` | the tables of docs/gpu.md name files and tests that exist |
//! | `gpu_staged` | memory that is not mapped goes through the host |
//! | `gpu_streams` | operations on the program's streams |
//! | `growable_buffer` | buffers that grow in place |
//! | `ipc_handles` | handles and events that the program hands over itself |
//! | `known_memory` | memory whose kind the program tells |
//! | `shared_allocator` | allocators whose memory all ranks reach |

mod am_into_gpu;
mod explain_copier;
mod fake_gpu;
mod gpu_copier;
mod gpu_copier_ranks;
mod gpu_ipc;
mod gpu_ordeals;
mod gpu_rules;
mod gpu_staged;
mod gpu_streams;
mod growable_buffer;
mod ipc_handles;
mod known_memory;
mod shared_allocator;

use carrack_test_support as support;
