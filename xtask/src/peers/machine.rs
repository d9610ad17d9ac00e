//! Machine and date of a measurement: without them a figure says nothing.

use std::process::Command;
use std::time::Duration;

use fs_err as fs;
use serde::Serialize;

use crate::error::TaskError;

/// The machine, as far as a figure depends on it.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    pub(super) cpus: usize,
    pub(super) kernel: String,
    pub(super) date: String,
    /// Load of the minute before the first round: others' work on this machine disturbs all sides.
    pub(super) load_before: f64,
}

/// Load from which on the user is warned. A build just before the run may reach it, too.
const BUSY: f64 = 0.5;

impl Machine {
    /// Looks at the machine, and warns of a load that disturbs the rounds.
    pub(super) fn look_before_rounds() -> Result<Self, TaskError> {
        let machine = Self::look()?;
        let load = machine.load_before;
        if load > BUSY {
            eprintln!("warning: the load is {load:.2}; other work here disturbs all sides");
        }
        Ok(machine)
    }

    pub(super) fn look() -> Result<Self, TaskError> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
        let model =
            cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let load = fs::read_to_string("/proc/loadavg")?;
        let load = load.split(' ').next().and_then(|load| load.parse().ok());
        let mut date = Command::new("date");
        let date =
            children::read(date.args(["-u", "+%Y-%m-%d %H:%M UTC"]), Duration::from_secs(10))?;
        Ok(Self {
            cpu: model.map_or("an unknown CPU", |(_, model)| model.trim()).to_owned(),
            cpus: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            date: date.trim().to_owned(),
            load_before: load.unwrap_or_default(),
        })
    }
}
