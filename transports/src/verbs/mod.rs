//! RDMA devices, through libibverbs.
//!
//! | module | one idea |
//! |---|---|
//! | [`sys`] | libibverbs as it is: its structures, its functions looked up at run time, its objects as owned values |
//! | [`simulated`] | a libibverbs in software, for tests and for machines without RDMA |

pub mod simulated;
pub mod sys;
