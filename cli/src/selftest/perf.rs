//! The measurements: `carrack perf` in host memory, and between every pair of kinds of memory that
//! the machine has.

use super::kit::Kit;
use super::machine::{Gpus, Machine};
use super::part::{Part, Sort};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);
/// Sizes for GPU memory, up to more than a core copies in a moment.
const GPU_SIZES: &str = "8,4K,64K,1M,16M";
/// Sizes for simulated GPUs. A simulated engine is a thread, so its figures say nothing.
const SIMULATED_SIZES: &str = "8,64K";

/// Returns all measurements; `seconds` is the time of each figure.
pub(super) fn parts(
    kit: &Kit,
    machine: &Machine,
    quick: bool,
    seconds: Option<Duration>,
) -> Vec<Part> {
    let measure = |what: &str, gpus: Option<Gpus>, args: &[&str]| {
        let otherwise = if quick || gpus == Some(Gpus::Simulated) { 0.02 } else { 0.1 };
        let seconds = seconds.map_or(otherwise, |seconds| seconds.as_secs_f64()).to_string();
        let always = ["perf", "--json", "--seconds", &seconds];
        Part {
            args: always.iter().chain(args).map(|arg| (*arg).to_owned()).collect(),
            env: vec![("CARRACK_GPU", gpus.map_or("none", Gpus::setting).to_owned())],
            limit: LIMIT,
            ..Part::new(&format!("perf {what}"), Sort::Perf, gpus, kit)
        }
    };
    let mut parts: Vec<Part> = ["am", "send", "put", "get"]
        .iter()
        .map(|op| measure(&format!("{op} host"), None, &["all", "--op", op]))
        .collect();
    parts.push(measure("fetch_add host", None, &["latency", "--op", "fetch_add"]));
    parts.push(measure("put_batch host", None, &["latency", "--op", "put_batch"]));
    parts.push(measure("barrier of 4", None, &["latency", "--op", "barrier", "--ranks", "4"]));
    let sizes = if machine.gpus == Gpus::Simulated { SIMULATED_SIZES } else { GPU_SIZES };
    let kinds = kinds(machine.count);
    for (from, to) in kinds.iter().flat_map(|from| kinds.iter().map(move |to| (from, to))) {
        let is_host = |kind: &String| kind == "host";
        // Two GPUs, or host memory on one side.
        let is_important =
            from.starts_with("device") && to.starts_with("device") || is_host(from) || is_host(to);
        if is_host(from) && is_host(to) || quick && !is_important {
            continue;
        }
        let pair = format!("{from},{to}");
        let batch = ["latency", "--op", "put_batch", "--mem", &pair];
        parts.push(measure(&format!("put_batch {pair}"), Some(machine.gpus), &batch));
        for op in ["send", "put", "get", "copy"] {
            let args = ["all", "--op", op, "--mem", &pair, "--size", sizes];
            parts.push(measure(&format!("{op} {pair}"), Some(machine.gpus), &args));
        }
    }
    parts
}

/// Returns the kinds of memory, with two devices at most: others are like those.
fn kinds(devices: usize) -> Vec<String> {
    let devices = (0..devices.min(2)).map(|number| format!("device:{number}"));
    ["host", "pinned"].map(str::to_owned).into_iter().chain(devices).collect()
}
