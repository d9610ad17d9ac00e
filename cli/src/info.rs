//! `carrack info`: what this machine has, and the settings in force.

use crate::own_ranks::{allowed_cpus, cpu_list};
use crate::{USAGE, print, template};
use carrack::Runtime;
use carrack::bootstrap::Source;
use carrack::settings::{RESERVED, Settings};
use carrack::transports::contract::{DeviceInfo, Transport};
use carrack::transports::gpu::{CopierState, Driver, Gpu, GpuInfo, PeerInfo};
use carrack_transports::stderr::say;
use clap::Args;
use minijinja::context;
use serde_json::{Value, json};
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;

/// The options of `carrack info`.
#[derive(Args, Clone, Debug)]
pub(crate) struct InfoOptions {
    /// Print one JSON object: version, job, machine, transports, gpus, settings.
    #[arg(long)]
    json: bool,
}

/// Prints it.
pub(crate) fn info(options: &InfoOptions) -> ExitCode {
    let settings = match Settings::from_env() {
        Ok(settings) => settings,
        Err(error) => {
            say(error);
            return ExitCode::from(USAGE);
        }
    };
    let info = gather(&settings);
    if options.json {
        return print(&format!("{info:#}\n"));
    }
    match to_text(&settings, &info) {
        Ok(text) => print(&text),
        Err(error) => {
            say(error);
            ExitCode::FAILURE
        }
    }
}

fn to_text(settings: &Settings, info: &Value) -> Result<String, minijinja::Error> {
    let lines = settings.describe();
    let variables = lines.iter().map(|line| line.variable.len()).max();
    let values = lines.iter().map(|line| line.value.len()).max();
    let reserved = RESERVED.iter().map(|other| (other.variable, other.set_by, other.doc));
    let reserved: Vec<_> = reserved.collect();
    let more = context! { widths => [variables, values], reserved };
    let values = context! { ..more, ..minijinja::Value::from_serialize(info) };
    template::fill(include_str!("info.txt.jinja"), values)
}

fn gather(settings: &Settings) -> Value {
    let transports = Runtime::all_transports(settings);
    let lines = settings.describe().into_iter().map(|line| {
        json!({
            "name": line.name,
            "value": line.value,
            // `default`, or the variable that it comes from.
            "origin": line.origin.to_string(),
            "variable": line.variable,
            "expected": line.expected,
            "doc": line.doc,
        })
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        // Where the ranks of a job would find each other.
        "job": Source::find(settings).map_or_else(|why| why.to_string(), |job| job.to_string()),
        "machine": machine(),
        "transports": transports.iter().map(|one| transport(&**one, settings)).collect::<Value>(),
        "gpus": gpus(settings),
        "settings": lines.collect::<Value>(),
    })
}

fn machine() -> Value {
    let cpus = allowed_cpus();
    let (system, memory) = (rustix::system::uname(), rustix::system::sysinfo());
    let kernel = [system.sysname(), system.release(), system.machine()];
    json!({
        "cpu": cpu_model(),
        // As Linux lists them.
        "cpus_allowed": cpu_list(&cpus),
        "cpu_count": cpus.len(),
        "kernel": kernel.map(|part| part.to_string_lossy()).join(" "),
        "memory_bytes": memory.totalram * u64::from(memory.mem_unit),
    })
}

/// Returns the processor's name. Where the kernel gives none (many ARM machines), there is none.
fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?;
    Some(line.1.trim().to_owned())
}

/// Describes a transport. `note` describes the devices, or says why there are none. `devices` are
/// those that can be opened, in the order in which a rank that is alone would take them.
fn transport(transport: &dyn Transport, settings: &Settings) -> Value {
    let name = transport.name();
    let (available, note, devices) = match transport.devices() {
        Ok(devices) => {
            let notes = devices.iter().map(|device| format!("{}: {}", device.name, device.note));
            (true, notes.collect::<Vec<_>>().join("; "), devices)
        }
        Err(why) => (false, why.reason, Vec::new()),
    };
    let device = |device: &DeviceInfo| json!({ "name": device.name, "note": device.note });
    json!({
        "name": name,
        "available": available,
        "note": note,
        // By CARRACK_TRANSPORT.
        "allowed": settings.transports().iter().any(|choice| choice.name() == name),
        "devices": devices.iter().map(device).collect::<Value>(),
    })
}

/// Describes the drivers that a runtime with these settings has. Only a runtime knows which they
/// are.
fn gpus(settings: &Settings) -> Value {
    match Runtime::in_process_with(1, settings) {
        Ok(alone) => {
            alone.iter().flat_map(Runtime::gpu_drivers).map(|found| driver(&**found)).collect()
        }
        Err(why) => {
            let reason = format!("a runtime could not be started to look: {why}");
            json!([{ "driver": "unknown", "version": null, "devices": [], "reason": reason }])
        }
    }
}

/// Describes a driver, with the reason if it has no devices.
fn driver(driver: &dyn Driver) -> Value {
    let (devices, reason) = match driver.devices() {
        Ok(gpus) => (gpus.iter().map(|gpu| device(&**gpu, &gpus)).collect(), None),
        Err(why) => (json!([]), Some(why.to_string())),
    };
    let (name, version) = (driver.name(), driver.version());
    json!({ "driver": name, "version": version, "devices": devices, "reason": reason })
}

fn device(gpu: &dyn Gpu, all: &[Arc<dyn Gpu>]) -> Value {
    let info = gpu.info();
    let others = all.iter().map(|other| other.info()).filter(|other| other.uuid != info.uuid);
    // This command copies nothing, so no copier is set up yet.
    let copier = match gpu.copier() {
        CopierState::Off => None,
        CopierState::Wanted | CopierState::On { .. } => {
            Some("asked for; whether there can be one shows at the first copy".to_owned())
        }
        CopierState::Refused(why) => Some(format!("none: {why}")),
    };
    json!({
        "ordinal": info.ordinal,
        "name": info.name,
        "uuid": info.uuid.to_string(),
        "pci": info.pci,
        "memory_bytes": info.memory,
        "simulated": info.simulated,
        "copier": copier,
        "peers": others.map(|other| peer(gpu, other)).collect::<Value>(),
    })
}

/// Returns the access of a device to the memory of another one of its driver's. `link` is its kind,
/// or the reason why it is unknown.
fn peer(gpu: &dyn Gpu, other: &GpuInfo) -> Value {
    let PeerInfo { access, performance_rank, native_atomics, link } =
        gpu.peer(other.uuid).unwrap_or_else(|why| PeerInfo {
            access: false,
            performance_rank: -1,
            native_atomics: false,
            link: why.to_string(),
        });
    let reached = if access { Ok(()) } else { gpu.reaches(other.uuid) };
    json!({
        "ordinal": other.ordinal,
        "access": access,
        "no_access": reached.err().map(|why| why.to_string()),
        "native_atomics": native_atomics,
        "performance_rank": performance_rank,
        "link": link,
    })
}
