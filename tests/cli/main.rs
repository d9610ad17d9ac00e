//! Programs that a user starts: the `carrack` command, its launcher, and the examples.
//!
//! | module | one idea |
//! |---|---|
//! | `cli_perf` | `carrack perf`, `info` and `explain` |
//! | `cli_selftest` | `carrack selftest`, of a tree and of bundles |
//! | `examples` | the examples, which verify their own results |
//! | `explain_claims` | `carrack explain` where the driver is the mock library |
//! | `launcher` | `carrack run`: exits, signals, output, limits |
//! | `mpi_programs` | ranks of MPI communicators, with a mock of each ABI |
//! | `other_launchers` | ranks of launchers with PMI, and of Slurm's variables |
//! | `tcp_bootstrap` | ranks that find each other over TCP, by torchrun's variables |
//! | `traces` | the traces of docs/architecture.md, by the names in the sources |
//! | `type_names` | each type name is used once in a crate |

mod cli_perf;
mod cli_selftest;
mod examples;
mod explain_claims;
mod launcher;
mod mpi_programs;
mod other_launchers;
mod tcp_bootstrap;
mod traces;
mod type_names;

use carrack_test_support as support;
