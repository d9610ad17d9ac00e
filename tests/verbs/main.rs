//! The verbs transport, over the simulated NIC, and over Soft-RoCE in a guest.
//!
//! | module | one idea |
//! |---|---|
//! | `nic_words` | atomic operations on words whose agent is a NIC |
//! | `verbs_chunks` | long messages in chunks, over one rail or several |
//! | `verbs_faults` | NICs that fail, one call or one link at a time |
//! | `verbs_gpu` | memory of GPUs that the NIC moves |
//! | `verbs_guest` | real kernels, networks and nodes: only in `cargo xtask rdma-guest` |
//! | `verbs_hostile` | peers and unauthenticated processes that break the protocol |
//! | `verbs_memory` | registration of the user's memory |

mod nic_words;
mod verbs_chunks;
mod verbs_faults;
mod verbs_gpu;
mod verbs_guest;
mod verbs_hostile;
mod verbs_memory;

use carrack_test_support as support;
