//! Hardware of the machine, as `carrack info` reports it. A process of its own asks the drivers,
//! so a driver that hangs ends only that process.

use super::child::{self, End, Interrupt};
use super::kit::Kit;
use super::options::Choice;
use super::{SelftestError, file};
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The start of a driver that has many devices takes seconds.
const LIMIT: Duration = Duration::from_secs(120);

/// Machine, and the GPUs that are tested.
pub(super) struct Machine {
    /// Output of `carrack info --json`, with the drivers that are tested.
    pub(super) info: Value,
    pub(super) gpus: Gpus,
    /// Number of devices that are tested.
    pub(super) count: usize,
    /// Reason why NVIDIA's GPUs are not tested; `None` if they are.
    pub(super) no_cuda: Option<String>,
}

/// Kind of GPUs that are tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Gpus {
    Cuda,
    Simulated,
}

impl Gpus {
    /// Returns the value for `CARRACK_GPU` and `TEST_GPU`.
    pub(super) fn setting(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Simulated => "fake",
        }
    }

    /// Returns the name in reports.
    pub(super) fn in_words(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Simulated => "simulated",
        }
    }
}

impl Machine {
    pub(super) fn look(
        choice: Choice,
        kit: &Kit,
        scratch: &Path,
        interrupt: &Interrupt,
    ) -> Result<Self, SelftestError> {
        let no_cuda = if choice == Choice::Fake {
            "--gpu fake".to_owned()
        } else {
            let info = info("auto", kit, scratch, interrupt)?;
            match devices(&info, "cuda") {
                Ok(count) => return Ok(Self { info, gpus: Gpus::Cuda, count, no_cuda: None }),
                Err(why) if choice == Choice::Cuda => return Err(SelftestError::NoGpu(why)),
                Err(why) => why,
            }
        };
        let info = info("fake", kit, scratch, interrupt)?;
        let count = devices(&info, "fake").unwrap_or(0);
        Ok(Self { info, gpus: Gpus::Simulated, count, no_cuda: Some(no_cuda) })
    }

    pub(super) fn gpus_in_words(&self) -> String {
        let simulated = if self.gpus == Gpus::Simulated { "simulated " } else { "" };
        format!("{} {simulated}GPU(s)", self.count)
    }
}

/// Returns the number of devices of the driver whose name begins with `driver`, or the reason why
/// there are none.
fn devices(info: &Value, driver: &str) -> Result<usize, String> {
    let drivers = info["gpus"].as_array().into_iter().flatten();
    let named =
        |entry: &&Value| entry["driver"].as_str().is_some_and(|name| name.starts_with(driver));
    let Some(found) = drivers.into_iter().find(named) else {
        return Err(format!("there is no driver {driver}"));
    };
    match found["devices"].as_array().map_or(0, Vec::len) {
        0 => Err(found["reason"].as_str().unwrap_or("the driver has no device").to_owned()),
        count => Ok(count),
    }
}

fn info(
    gpu: &str,
    kit: &Kit,
    scratch: &Path,
    interrupt: &Interrupt,
) -> Result<Value, SelftestError> {
    let (said, complained) = (scratch.join("info.out"), scratch.join("info.err"));
    let mut command = Command::new(&kit.carrack);
    command.args(["info", "--json"]);
    super::part::clean(&mut command);
    command.env("CARRACK_GPU", gpu);
    command.stdout(Stdio::from(File::create(&said).map_err(file(&said))?));
    command.stderr(Stdio::from(File::create(&complained).map_err(file(&complained))?));
    let end = child::run(&mut command, LIMIT, interrupt, || {});
    let failed = |what: String| {
        let complaints = fs::read_to_string(&complained).unwrap_or_default();
        SelftestError::Machine(format!("{what} {}", complaints.trim()).trim_end().to_owned())
    };
    match end {
        End::Exited(status) if status.success() => {}
        End::Exited(status) => return Err(failed(format!("ended with {status}"))),
        End::Overran(limit) => {
            return Err(failed(format!(
                "was still running after {limit:?} (a driver that hangs?)"
            )));
        }
        End::Interrupted => return Err(failed("was ended by a signal".into())),
        End::Lost(why) => return Err(failed(format!("cannot be watched: {why}"))),
        End::NotStarted(why) => return Err(failed(format!("could not be started: {why}"))),
    }
    let text = fs::read_to_string(&said).map_err(file(&said))?;
    serde_json::from_str(&text).map_err(|error| failed(format!("printed what is no JSON: {error}")))
}
