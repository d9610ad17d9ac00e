//! Settings of this transport.

use crate::settings::AutoChoice;
use crate::settings::form::Word;

crate::declare_settings! {
    /// Settings of the transport that maps GPU memory.
    pub struct CudaIpcSettings {
        /// Mapping of GPU memory between ranks of one node, where the driver allows that.
        gpu_ipc: AutoChoice,
            "CARRACK_GPU_IPC", Word, AutoChoice::Auto;
    }
}
