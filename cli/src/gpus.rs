//! Selection of the GPUs that a command works on.

use carrack::Runtime;
use carrack::transports::gpu::Gpu;
use std::sync::Arc;

/// Returns the GPUs of the first driver that has any; none, if no driver has.
pub(crate) fn of(runtime: &Runtime) -> Vec<Arc<dyn Gpu>> {
    let all = runtime.gpu_drivers().iter().filter_map(|driver| driver.devices().ok());
    all.into_iter().find(|gpus| !gpus.is_empty()).unwrap_or_default()
}
