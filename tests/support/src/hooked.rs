//! A bootstrap of ranks in one process whose calls a test sees first.

use crate::built;
use carrack::Runtime;
use carrack::bootstrap::{Bootstrap, BootstrapError, InProcess, JobId};
use carrack::settings::SettingsBuilder;

/// A call that a test sees.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BootstrapCall {
    Put,
    Get,
    Finish,
}

struct Hooked<F>(InProcess, F);

/// Starts a rank; `seen` runs before each call of its bootstrap, which fails with its error.
pub fn start_hooked(
    bootstrap: InProcess,
    settings: SettingsBuilder,
    seen: impl Fn(BootstrapCall) -> Result<(), BootstrapError> + Send + Sync + 'static,
) -> Runtime {
    let bootstrap = Box::new(Hooked(bootstrap, seen));
    Runtime::builder().settings(built(settings)).bootstrap(bootstrap).start().unwrap()
}

impl<F: Fn(BootstrapCall) -> Result<(), BootstrapError> + Send + Sync> Bootstrap for Hooked<F> {
    fn rank(&self) -> u32 {
        self.0.rank()
    }
    fn size(&self) -> u32 {
        self.0.size()
    }
    fn job(&self) -> &JobId {
        self.0.job()
    }
    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        (self.1)(BootstrapCall::Put)?;
        self.0.put(key, value)
    }
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        (self.1)(BootstrapCall::Get)?;
        self.0.get(key)
    }
    fn fence(&self) -> Result<(), BootstrapError> {
        self.0.fence()
    }
    fn finish(&self) -> Result<(), BootstrapError> {
        (self.1)(BootstrapCall::Finish)?;
        self.0.finish()
    }
}
