//! Costs of operations: instructions, counted by callgrind, and calls of the GPU driver. A program
//! of its own, without the counting allocator of `alone`.
//!
//! | module | one idea |
//! |---|---|
//! | `gpu_costs` | calls of the driver, and instructions, of operations on memory of a GPU |
//! | `verbs_instructions` | instructions of a short message over verbs |
//! | `host_instructions` | instructions of a short message over shared memory |
//! | `report` | all instructions, next to those that are noted |
//! | `profile` | callgrind runs this program once more |

mod gpu_costs;
mod host_instructions;
mod profile;
mod report;
mod verbs_instructions;

use carrack_test_support as support;
