//! The simulated NIC: faults that tests plant, traffic between processes, GPU memory, and very
//! many ranks. Its common behaviour with real devices is tested in `verbs_calls`.

mod devices;
mod faults;
mod gpus;
mod links;
mod processes;
