//! The simulated NIC: what can be planted in it, what it does between processes, with memory of
//! GPUs, and with very many ranks. What it has in common with real devices is in `verbs_calls`.

mod devices;
mod faults;
mod gpus;
mod links;
mod processes;
