//! GPUs that a test works on: simulated ones, or real ones with `TEST_GPU=cuda`.

use carrack::Runtime;
use carrack::settings::GpuChoice;
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Gpu};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;

/// Returns `true` if the tests run on real GPUs.
pub fn are_real() -> bool {
    match std::env::var("TEST_GPU").as_deref() {
        Ok("cuda") => true,
        Ok("fake") | Err(_) => false,
        Ok(other) => panic!("TEST_GPU={other}: cuda or fake"),
    }
}

/// Returns the tested GPUs as a setting.
pub fn choice() -> GpuChoice {
    if are_real() { GpuChoice::Cuda } else { GpuChoice::Fake }
}

/// Returns the devices that a runtime has.
pub fn of(runtime: &Runtime) -> Vec<Arc<dyn Gpu>> {
    let driver = runtime.gpu_drivers().iter().find_map(|driver| driver.devices().ok());
    driver.expect("a driver with devices")
}

/// A driver with devices, and the simulated one as itself where it is that.
pub struct TestDriver {
    pub driver: Arc<dyn Driver>,
    pub fake: Option<FakeDriver>,
    pub gpus: Vec<Arc<dyn Gpu>>,
}

impl TestDriver {
    /// Starts a driver: with two devices if they are simulated, else with those that there are.
    #[allow(clippy::new_without_default, reason = "it starts a driver")]
    pub fn new() -> Self {
        let fake = (!are_real()).then(|| FakeDriver::new(FakeConfig::devices(2)).unwrap());
        let driver: Arc<dyn Driver> = match &fake {
            Some(fake) => Arc::new(fake.clone()),
            None => Arc::new(CudaDriver::initialise().expect("TEST_GPU=cuda: NVIDIA's driver")),
        };
        let gpus = driver.devices().expect("devices");
        assert!(!gpus.is_empty(), "a driver without devices");
        Self { driver, fake, gpus }
    }

    /// Returns the last device: another one than the first, where there are several.
    pub fn last(&self) -> &Arc<dyn Gpu> {
        &self.gpus[self.gpus.len() - 1]
    }
}

/// Returns `true` if the GPUs are real, and prints then why a test does not run on them.
/// `carrack selftest` finds that line.
pub fn is_for_simulated_only(why: &str) -> bool {
    if are_real() {
        println!("skipped: on real GPUs {why}");
    }
    are_real()
}
