//! Ranks on this machine, most of them processes: their operations with each other, and their ends.
//! Some are killed, stopped, forked, short of resources, or break the protocol.
//!
//! | module | one idea |
//! |---|---|
//! | `apart` | the conformance suite's cases between two processes, and between two nodes |
//! | `cuts` | connections of the TCP transport that break while both processes live |
//! | `hostile` | peers and unauthenticated processes that break the protocol over shared memory |
//! | `huge` | messages of more than 4 GiB |
//! | `nodes` | two nodes: faults of their network, launchers |
//! | `ordeals` | kills, stops, forks, want of everything, a soak |
//! | `played` | one rank, and a peer that the test plays step by step |
//! | `processes` | ranks that are processes, and some that are killed |
//! | `signals` | signals to the process |

mod apart;
mod cuts;
mod hostile;
mod huge;
mod nodes;
mod ordeals;
mod played;
mod processes;
mod signals;

use carrack_test_support as support;
