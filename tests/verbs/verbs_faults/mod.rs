//! Failures of RDMA, injected into simulated NICs. With any fault of a NIC, each operation ends
//! once, no message is delivered twice or torn, and other ranks go on. Errors say what to do.
//!
//! | module | one idea |
//! |---|---|
//! | `statuses` | requests and receives that fail, with each status |
//! | `calls` | calls of libibverbs that fail, with each reason |
//! | `limits` | NICs that have little of something |
//! | `timing` | packets that come late, in another order, or not at all |
//! | `receives` | destinations of a message's bytes, and the credits owed for them |
//! | `together` | short messages that go in one request |
//! | `ranks` | the same, as a runtime's operations see it |
//! | `flushes` | flushes behind operations that are lost |
//! | `words` | errors for devices and ports that are not there |
//! | `many` | a thousand ranks |
//! | `few` | processes that have few of something |
//! | `partings` | queue pairs that fail while they are taking a message in |
//! | `processes` | a process that is killed, and one that is stopped |

use crate::support;
mod calls;
mod few;
mod flushes;
mod limits;
mod many;
mod partings;
mod processes;
mod ranks;
mod receives;
mod statuses;
mod timing;
mod together;
mod words;

/// Plays the role of a rank that is a process. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    if let Some(role) = support::ranks::Role::of_this_process(std::time::Duration::from_secs(100)) {
        match role.name.as_str() {
            "few" => few::rank(&role),
            _ => processes::rank(&role),
        }
    }
}
