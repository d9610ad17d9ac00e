//! `carrack info`: what this machine has, and the settings in force.

use crate::own_ranks::{allowed_cpus, cpu_list};
use crate::{USAGE, complain, print};
use carrack::Runtime;
use carrack::bootstrap::Alone;
use carrack::settings::{RESERVED, Reserved, Settings};
use carrack::transports::contract::{DeviceInfo, Transport};
use carrack::transports::gpu::{CopierState, Driver, Gpu, GpuError, GpuInfo, PeerInfo};
use clap::Args;
use serde::Serialize;
use std::fmt::Write as _;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;

/// The options of `carrack info`.
#[derive(Args, Clone, Debug)]
pub(crate) struct InfoOptions {
    /// Print one JSON object: version, machine, transports, gpus, settings.
    #[arg(long)]
    json: bool,
}

/// Prints it.
pub(crate) fn info(options: &InfoOptions) -> ExitCode {
    let settings = match Settings::from_env() {
        Ok(settings) => settings,
        Err(error) => {
            complain(error);
            return ExitCode::from(USAGE);
        }
    };
    let info = Info::gather(&settings);
    print(&if options.json { info.to_json() } else { info.to_text() })
}

#[derive(Serialize)]
struct Info {
    version: &'static str,
    machine: Machine,
    transports: Vec<TransportInfo>,
    gpus: Vec<GpuDriver>,
    settings: Vec<Setting>,
}

#[derive(Serialize)]
struct Machine {
    cpu: Option<String>,
    /// CPUs that this process may use, as Linux lists them.
    cpus_allowed: String,
    cpu_count: usize,
    kernel: String,
    memory_bytes: u64,
}

#[derive(Serialize)]
struct TransportInfo {
    name: &'static str,
    available: bool,
    /// Description of the devices, or the reason why there are none.
    note: String,
    /// Returns `true` if CARRACK_TRANSPORT allows the transport.
    allowed: bool,
    /// Devices that can be opened, in the order in which a rank that is alone would take them.
    devices: Vec<TransportDevice>,
}

#[derive(Serialize)]
struct TransportDevice {
    name: String,
    note: String,
}

#[derive(Serialize)]
struct GpuDriver {
    driver: String,
    /// Version of the driver, if the driver tells it.
    version: Option<String>,
    devices: Vec<GpuDevice>,
    /// Reason why there are no devices.
    reason: Option<String>,
}

#[derive(Serialize)]
struct GpuDevice {
    ordinal: u32,
    name: String,
    uuid: String,
    pci: String,
    memory_bytes: u64,
    simulated: bool,
    /// State of the resident copier, in words; `None` if the copier was not asked for.
    copier: Option<String>,
    /// Access of this device to the memory of the driver's other devices.
    peers: Vec<GpuPeer>,
}

#[derive(Serialize)]
struct GpuPeer {
    ordinal: u32,
    access: bool,
    /// Reason why there is no access.
    no_access: Option<String>,
    native_atomics: bool,
    performance_rank: i32,
    /// Kind of the link between the devices, or the reason why it is unknown.
    link: String,
}

#[derive(Serialize)]
struct Setting {
    name: &'static str,
    value: String,
    /// `default`, or the variable that it comes from.
    origin: String,
    variable: &'static str,
    expected: String,
    doc: &'static str,
}

impl Info {
    fn gather(settings: &Settings) -> Self {
        let setting = |line: carrack::settings::SettingLine| Setting {
            name: line.name,
            value: line.value,
            origin: line.origin.to_string(),
            variable: line.variable,
            expected: line.expected,
            doc: line.doc,
        };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::gather(),
            transports: transports(settings),
            gpus: gpus(settings),
            settings: settings.describe().into_iter().map(setting).collect(),
        }
    }

    fn to_json(&self) -> String {
        // Plain data under names that are strings: it has a form in JSON.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        let Self { version, machine, transports, gpus, settings } = self;
        writeln!(text, "carrack {version}\n\nMachine")?;
        writeln!(text, "  CPU      {}", machine.cpu.as_deref().unwrap_or("unknown"))?;
        writeln!(text, "  allowed  {} CPU(s): {}", machine.cpu_count, machine.cpus_allowed)?;
        writeln!(text, "  kernel   {}", machine.kernel)?;
        writeln!(text, "  memory   {:.1} GiB", gib(machine.memory_bytes))?;
        writeln!(text, "\nTransports")?;
        for TransportInfo { name, available, note, allowed, devices } in transports {
            let state = if *available { "available" } else { "not available" };
            let left_out = if *allowed { "" } else { "; CARRACK_TRANSPORT leaves it out" };
            if devices.len() < 2 {
                writeln!(text, "  {name:<9} {state}: {note}{left_out}")?;
                continue;
            }
            writeln!(text, "  {name:<9} {state}: {} devices{left_out}", devices.len())?;
            for TransportDevice { name, note } in devices {
                writeln!(text, "    {name}: {note}")?;
            }
        }
        writeln!(text, "\nGPUs")?;
        for GpuDriver { driver, version, devices, reason } in gpus {
            match reason {
                Some(reason) => writeln!(text, "  {driver}: no device: {reason}")?,
                None => writeln!(text, "  {driver}: {} device(s)", devices.len())?,
            }
            if let Some(version) = version {
                writeln!(text, "    {version}")?;
            }
            for gpu in devices {
                let simulated = if gpu.simulated { ", simulated" } else { "" };
                let GpuDevice { ordinal, name, uuid, pci, memory_bytes, .. } = gpu;
                writeln!(
                    text,
                    "    {ordinal}  {name}, {:.1} GiB, at {pci}, {uuid}{simulated}",
                    gib(*memory_bytes)
                )?;
                if let Some(copier) = &gpu.copier {
                    writeln!(text, "       resident copier: {copier}")?;
                }
                for peer in &gpu.peers {
                    writeln!(text, "       to {}: {}", peer.ordinal, peer.to_text())?;
                }
            }
        }
        writeln!(text, "\nSettings")?;
        let widest = |of: fn(&Setting) -> usize| settings.iter().map(of).max().unwrap_or(0);
        let variables = widest(|setting| setting.variable.len());
        let values = widest(|setting| setting.value.len());
        for Setting { variable, value, origin, doc, .. } in settings {
            let origin = if origin == variable { "environment" } else { origin };
            writeln!(text, "  {variable:<variables$}  {value:<values$}  {origin:<11}  {doc}")?;
        }
        writeln!(text, "\nOther variables")?;
        for Reserved { variable, doc } in RESERVED {
            writeln!(text, "  {variable:<variables$}  {doc}")?;
        }
        Ok(())
    }
}

impl Machine {
    fn gather() -> Self {
        let cpus = allowed_cpus();
        let system = rustix::system::uname();
        let part = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        let info = rustix::system::sysinfo();
        Self {
            cpu: cpu_model(),
            cpus_allowed: cpu_list(&cpus),
            cpu_count: cpus.len(),
            kernel: format!(
                "{} {} {}",
                part(system.sysname()),
                part(system.release()),
                part(system.machine())
            ),
            memory_bytes: info.totalram as u64 * u64::from(info.mem_unit),
        }
    }
}

/// The processor's name. Where the kernel gives none (many ARM machines), there is none.
fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?;
    Some(line.1.trim().to_owned())
}

fn transports(settings: &Settings) -> Vec<TransportInfo> {
    let look = |transport: Box<dyn Transport>| {
        let (available, note, devices) = match transport.devices() {
            Ok(devices) => {
                let notes: Vec<_> = devices
                    .iter()
                    .map(|device| format!("{}: {}", device.name, device.note))
                    .collect();
                (true, notes.join("; "), devices)
            }
            Err(why) => (false, why.reason, Vec::new()),
        };
        let device = |DeviceInfo { name, note }| TransportDevice { name, note };
        TransportInfo {
            name: transport.name(),
            available,
            note,
            allowed: settings.transports().iter().any(|choice| choice.name() == transport.name()),
            devices: devices.into_iter().map(device).collect(),
        }
    };
    Runtime::all_transports(settings).into_iter().map(look).collect()
}

/// The drivers that a runtime with these settings has: it alone knows which they are.
fn gpus(settings: &Settings) -> Vec<GpuDriver> {
    let alone = Alone::new().map_err(|error| error.to_string());
    let runtime = alone.and_then(|alone| {
        let builder = Runtime::builder().settings(settings.clone()).bootstrap(Box::new(alone));
        builder.start().map_err(|error| error.to_string())
    });
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(why) => {
            let reason = Some(format!("a runtime could not be started to look: {why}"));
            let devices = Vec::new();
            return vec![GpuDriver { driver: "unknown".into(), version: None, devices, reason }];
        }
    };
    runtime.gpu_drivers().iter().map(|driver| GpuDriver::look(&**driver)).collect()
}

impl GpuDriver {
    fn look(driver: &dyn Driver) -> Self {
        let (name, version) = (driver.name().to_owned(), driver.version());
        match driver.devices() {
            Ok(gpus) => {
                let devices = gpus.iter().map(|gpu| GpuDevice::look(&**gpu, &gpus)).collect();
                Self { driver: name, version, devices, reason: None }
            }
            Err(why) => {
                Self { driver: name, version, devices: Vec::new(), reason: Some(why.to_string()) }
            }
        }
    }
}

impl GpuDevice {
    fn look(gpu: &dyn Gpu, all: &[Arc<dyn Gpu>]) -> Self {
        let info = gpu.info();
        let others = all.iter().map(|other| other.info()).filter(|other| other.uuid != info.uuid);
        Self {
            ordinal: info.ordinal,
            name: info.name.clone(),
            uuid: info.uuid.to_string(),
            pci: info.pci.clone(),
            memory_bytes: info.memory,
            simulated: info.simulated,
            copier: copier(gpu),
            peers: others.map(|other| GpuPeer::look(gpu, other)).collect(),
        }
    }
}

impl GpuPeer {
    fn look(gpu: &dyn Gpu, other: &GpuInfo) -> Self {
        let unknown = |why: GpuError| PeerInfo {
            access: false,
            performance_rank: -1,
            native_atomics: false,
            link: why.to_string(),
        };
        let PeerInfo { access, performance_rank, native_atomics, link } =
            gpu.peer(other.uuid).unwrap_or_else(unknown);
        let reached = if access { Ok(()) } else { gpu.reaches(other.uuid) };
        let no_access = reached.err().map(|why| why.to_string());
        Self { ordinal: other.ordinal, access, no_access, native_atomics, performance_rank, link }
    }

    fn to_text(&self) -> String {
        let access = match &self.no_access {
            None if self.access => "peer access".to_owned(),
            None => "no peer access".to_owned(),
            Some(why) => format!("no peer access ({why})"),
        };
        let atomics = if self.native_atomics { "native atomics" } else { "no native atomics" };
        let link = if self.link.is_empty() { "link unknown" } else { &self.link };
        format!("{access}, {atomics}, performance rank {}, {link}", self.performance_rank)
    }
}

/// Describes the state of a device's copier. This command copies nothing, so no copier is set up
/// yet.
fn copier(gpu: &dyn Gpu) -> Option<String> {
    match gpu.copier() {
        CopierState::Off => None,
        CopierState::Wanted | CopierState::On { .. } => {
            Some("asked for; whether there can be one shows at the first copy".to_owned())
        }
        CopierState::Refused(why) => Some(format!("none: {why}")),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
