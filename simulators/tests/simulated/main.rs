//! The transports over simulated hardware, and the resident copier's kernel run by software.

mod copier_text;
mod joined;
mod keys_of_several;
mod known_memory;
mod nic_gpu_memory;
mod pools;
mod together;
