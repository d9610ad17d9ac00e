//! RDMA devices, through libibverbs.
//!
//! | module | one idea |
//! |---|---|
//! | [`sys`] | libibverbs as it is: its structures, its functions looked up at run time, its objects as owned values |

pub mod sys;
