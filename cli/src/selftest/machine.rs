//! What the machine has, as `carrack info` says. Asked of another process: a driver that hangs then
//! ends nothing but that.

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

/// The machine, and which of its GPUs are tested.
pub(super) struct Machine {
    /// What `carrack info --json` printed, with the drivers that are tested.
    pub(super) info: Value,
    pub(super) gpus: Gpus,
    /// How many devices are tested.
    pub(super) count: usize,
    /// Why NVIDIA's GPUs are not tested, where they are not.
    pub(super) no_cuda: Option<String>,
}

/// Which GPUs are tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Gpus {
    Cuda,
    Simulated,
}

impl Gpus {
    /// As `CARRACK_GPU` and `TEST_GPU` have it.
    pub(super) fn setting(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Simulated => "fake",
        }
    }

    /// For people.
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

/// How many devices the driver has whose name begins like that, or why it has none.
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
        End::NotStarted(why) => return Err(failed(format!("could not be started: {why}"))),
    }
    let text = fs::read_to_string(&said).map_err(file(&said))?;
    serde_json::from_str(&text).map_err(|error| failed(format!("printed what is no JSON: {error}")))
}
