//! The simulated NIC: what can be planted in it, what it does between processes, with memory of
//! GPUs, and with very many ranks. What it has in common with real devices is in `verbs_calls`.

mod verbs;

#[path = "simulated_nic/devices.rs"]
mod devices;
#[path = "simulated_nic/faults.rs"]
mod faults;
#[path = "simulated_nic/gpus.rs"]
mod gpus;
#[path = "simulated_nic/links.rs"]
mod links;
#[path = "simulated_nic/processes.rs"]
mod processes;
