//! Tests of what this process allocates: its global allocator counts.
//!
//! | module | one idea |
//! |---|---|
//! | `growth` | a silent peer costs less than 100 bytes |
//! | `quiet_path` | a small message makes no allocation and no system call after warm-up |

mod growth;
mod quiet_path;

use carrack_test_support as support;

#[global_allocator]
static GLOBAL: support::counting::Counting = support::counting::Counting;
