//! Drivers as the transports call them: CUDA's against a mock library, verbs against the simulated
//! NIC, or a real one.
//!
//! | module | one idea |
//! |---|---|
//! | `cuda_mock` | our side of CUDA; the mock library needs a C compiler |
//! | `simulated_nic` | what can be planted in the simulated NIC |
//! | `verbs_calls` | what the transport takes for granted of verbs, call by call |
//! | `verbs` | two devices of either sort, and requests to them |

mod cuda_mock;
mod simulated_nic;
mod verbs;
mod verbs_calls;

use carrack_test_support::mock;
