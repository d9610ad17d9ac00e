//! The simulated NIC: faults that tests plant, traffic between processes, GPU memory, and very
//! many ranks. Its common behaviour with real devices is tested in `verbs_calls`.

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
