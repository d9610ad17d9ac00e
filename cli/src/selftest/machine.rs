//! Hardware of the machine, as `carrack info` reports it. A process of its own asks the drivers,
//! so a driver that hangs ends only that process.

use super::SelftestError;
use super::child;
use super::kit::Kit;
use super::options::Choice;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Gpus {
    Cuda,
    Simulated,
}

impl Gpus {
    /// Returns the value for `CARRACK_GPU` and `TEST_GPU`, and the name in reports.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Cuda => ["cuda", "cuda"],
            Self::Simulated => ["fake", "simulated"],
        }
    }

    pub(super) fn setting(self) -> &'static str {
        self.names()[0]
    }

    pub(super) fn in_words(self) -> &'static str {
        self.names()[1]
    }
}

impl Machine {
    pub(super) fn look(choice: Choice, kit: &Kit, scratch: &Path) -> Result<Self, SelftestError> {
        let no_cuda = if choice == Choice::Fake {
            "--gpu fake".to_owned()
        } else {
            let info = info("auto", kit, scratch)?;
            match devices(&info, "cuda") {
                Ok(count) => return Ok(Self { info, gpus: Gpus::Cuda, count, no_cuda: None }),
                Err(why) if choice == Choice::Cuda => return Err(SelftestError::NoGpu(why)),
                Err(why) => why,
            }
        };
        let info = info("fake", kit, scratch)?;
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

fn info(gpu: &str, kit: &Kit, scratch: &Path) -> Result<Value, SelftestError> {
    let mut command = Command::new(&kit.carrack);
    command.args(["info", "--json"]);
    super::part::clean(&mut command);
    command.env("CARRACK_GPU", gpu);
    let [said, complained] = ["info.out", "info.err"].map(|name| scratch.join(name));
    let ended = child::capture(&mut command, [&said, &complained], LIMIT, || {});
    let failed = |what: String| {
        SelftestError::Machine(format!("{what} {}", ended.complaints.trim()).trim_end().to_owned())
    };
    ended.end.as_ref().map_err(|trouble| failed(trouble.to_string()))?;
    serde_json::from_str(&ended.said)
        .map_err(|error| failed(format!("it printed what is no JSON: {error}")))
}
