//! Settings of this transport.

use crate::settings::AutoChoice;
use crate::settings::form::Word;

crate::declare_settings! {
    /// Settings of the transport that maps GPU memory.
    pub struct CudaIpcSettings {
        /// Lets ranks of a node map each other's GPU memory.
        gpu_ipc: AutoChoice,
            "CARRACK_GPU_IPC", Word, AutoChoice::Auto;
    }
}
