//! Settings of this transport.

use crate::settings::AutoChoice;
use crate::settings::form::{Count, Word};

crate::declare_settings! {
    /// Settings of the shared-memory transport.
    pub struct ShmSettings {
        /// 64-byte slots of a shared-memory ring.
        shm_slots: usize,
            "CARRACK_SHM_SLOTS", Count::of("slots", 8, 64 << 10).power_of_two(), 256;

        /// Packet-sized chunks of a shared-memory link, for each direction.
        shm_chunks: usize,
            "CARRACK_SHM_CHUNKS", Count::of("chunks", 1, 64), 32;

        /// Lets the kernel copy long messages between processes, where permitted.
        kernel_copy: AutoChoice,
            "CARRACK_KERNEL_COPY", Word, AutoChoice::Auto;
    }
}
