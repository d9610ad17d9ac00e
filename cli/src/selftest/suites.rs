//! Test programs: their names, GPUs and time limits.
//!
//! From a bundle, programs that are not listed here run as well, except [`NO_PARTS`]. From a built
//! tree, where many other programs lie in the same folder, only listed ones run.

use super::kit::Kit;
use super::machine::{Gpus, Machine};
use super::part::{Part, Sort};
use std::time::Duration;

/// A module of a test program, or a whole program, whose name is the suite's.
struct Suite {
    program: &'static str,
    name: &'static str,
    on: On,
    /// Returns `true` if `--quick` runs it.
    quick: bool,
    minutes: u64,
    /// Filter of the tests that also run on simulated GPUs when real ones are tested.
    also_simulated: Option<&'static str>,
}

/// GPUs that a test program runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// No GPU, or simulated ones that the program makes for itself.
    Nothing,
    /// The tested GPUs, as `TEST_GPU` says, and simulated ones.
    Any,
    /// NVIDIA's GPUs only.
    Cuda,
}

const fn suite(
    program: &'static str,
    name: &'static str,
    on: On,
    quick: bool,
    minutes: u64,
) -> Suite {
    Suite { program, name, on, quick, minutes, also_simulated: None }
}

/// Arguments of a run that is not quick: slow tests included, except those that need a device.
const AT_LENGTH: [&str; 3] = ["--include-ignored", "--skip", "::verbs::"];

/// Suites whose ignored tests need more than time: memory, or a reader of figures.
const NOT_AT_LENGTH: [&str; 2] = ["cuda", "huge"];

const SUITES: &[Suite] = &[
    // Only its tests of GPU memory differ from one sort of GPU to another.
    Suite {
        also_simulated: Some("gpu::"),
        ..suite("conformance", "conformance", On::Any, true, 15)
    },
    suite("cuda", "cuda", On::Cuda, true, 15),
    suite("gpu", "gpu_ipc", On::Any, true, 10),
    suite("gpu", "ipc_handles", On::Any, true, 10),
    suite("gpu", "shared_allocator", On::Any, true, 10),
    suite("gpu", "growable_buffer", On::Any, true, 10),
    suite("gpu", "am_into_gpu", On::Any, true, 10),
    suite("gpu", "gpu_staged", On::Any, true, 10),
    suite("gpu", "gpu_streams", On::Any, true, 10),
    suite("gpu", "known_memory", On::Any, true, 10),
    suite("gpu", "gpu_ordeals", On::Any, true, 15),
    suite("gpu", "gpu_copier", On::Any, true, 10),
    suite("gpu", "gpu_copier_ranks", On::Any, true, 10),
    suite("gpu", "explain_copier", On::Any, true, 10),
    suite("gpu", "fake_gpu", On::Nothing, true, 10),
    suite("drivers", "simulated_nic", On::Nothing, true, 5),
    suite("drivers", "verbs_calls", On::Nothing, true, 5),
    suite("host", "apart", On::Nothing, true, 5),
    suite("host", "processes", On::Nothing, true, 10),
    suite("host", "signals", On::Nothing, true, 5),
    suite("alone", "quiet_path", On::Nothing, true, 5),
    suite("host", "cuts", On::Nothing, false, 5),
    suite("host", "hostile", On::Nothing, false, 10),
    suite("host", "played", On::Nothing, false, 10),
    suite("verbs", "verbs_faults", On::Nothing, false, 20),
    suite("verbs", "verbs_chunks", On::Nothing, true, 10),
    suite("verbs", "verbs_gpu", On::Nothing, true, 10),
    suite("verbs", "nic_words", On::Nothing, true, 5),
    suite("verbs", "verbs_memory", On::Nothing, true, 5),
    suite("verbs", "verbs_hostile", On::Nothing, false, 10),
    suite("cli", "launcher", On::Nothing, false, 10),
    suite("cli", "tcp_bootstrap", On::Nothing, false, 10),
    suite("cli", "other_launchers", On::Nothing, false, 10),
    suite("cli", "cli_perf", On::Nothing, false, 15),
    suite("host", "ordeals", On::Nothing, false, 30),
    suite("alone", "growth", On::Nothing, false, 10),
    suite("host", "huge", On::Nothing, false, 30),
];

/// Modules of test programs that are no suites of a selftest. It runs the examples by itself, and
/// one of its own tests would run it again. Four modules need a C compiler for the mock library.
/// Counts of instructions, the table of rules, the traces, the type names and the guest need the
/// source tree. Two nodes need root.
#[cfg(test)]
const NO_PARTS: &[&str] = &[
    "cli_selftest",
    "cuda_mock",
    "examples",
    "explain_claims",
    "gpu_costs",
    "gpu_rules",
    "host_instructions",
    "mpi_programs",
    "nodes",
    "profile",
    "report",
    "traces",
    "type_names",
    "verbs_guest",
    "verbs_instructions",
];

/// Returns `true` if a test program of that name is one of the parts.
pub(super) fn is_known(program: &str) -> bool {
    SUITES.iter().any(|suite| suite.program == program)
}

/// Returns all test programs, each with the GPUs that it runs on.
pub(super) fn parts(kit: &Kit, machine: &Machine, quick: bool) -> Vec<Part> {
    let mut parts: Vec<Part> =
        SUITES.iter().flat_map(|suite| suite.parts(kit, machine, quick)).collect();
    for name in kit.tests.keys().filter(|name| !is_known(name)) {
        // A process leaks a few names at most.
        let name = name.clone().leak();
        parts.extend(suite(name, name, On::Any, true, 15).parts(kit, machine, quick));
    }
    parts
}

impl Suite {
    fn parts(&self, kit: &Kit, machine: &Machine, quick: bool) -> Vec<Part> {
        let part = |gpus, skip| self.part(kit, gpus, skip, quick);
        if !kit.tests.contains_key(self.program) {
            return vec![part(
                None,
                Some("it is not here: not built, or left out of the bundle".into()),
            )];
        }
        let left_out = (quick && !self.quick).then(|| "--quick leaves it out".to_owned());
        match (self.on, machine.gpus) {
            (On::Nothing, _) => vec![part(None, left_out)],
            (On::Cuda, Gpus::Simulated) => {
                let why = machine.no_cuda.as_deref().unwrap_or("there is none");
                let why = format!("it needs an NVIDIA GPU: {why}");
                vec![part(Some(Gpus::Cuda), left_out.or(Some(why)))]
            }
            (On::Any, Gpus::Cuda) => {
                let why = "--quick leaves it out where there are real GPUs";
                let mut simulated = part(Some(Gpus::Simulated), quick.then(|| why.to_owned()));
                simulated.args.extend(self.also_simulated.map(str::to_owned));
                vec![part(Some(Gpus::Cuda), left_out), simulated]
            }
            (On::Any | On::Cuda, gpus) => vec![part(Some(gpus), left_out)],
        }
    }

    fn part(&self, kit: &Kit, gpus: Option<Gpus>, skip: Option<String>, quick: bool) -> Part {
        // Tests that say why they skip something say it in their output, which is shown only if it
        // is asked for.
        let mut args = vec!["--show-output".to_owned()];
        if self.program != self.name {
            args.push(format!("{}::", self.name));
        }
        if !quick && is_known(self.program) && !NOT_AT_LENGTH.contains(&self.name) {
            args.extend(AT_LENGTH.map(str::to_owned));
        }
        let mut env: Vec<_> =
            gpus.map(|gpus| ("TEST_GPU", gpus.setting().to_owned())).into_iter().collect();
        if gpus == Some(Gpus::Cuda) {
            // Processes that share a device take turns of milliseconds, so parallel tests take
            // longer.
            args.push("--test-threads=1".into());
        }
        if self.on == On::Cuda {
            env.push(("TEST_REQUIRE_GPU", "1".into()));
        }
        let program = kit.tests.get(self.program).cloned();
        Part {
            program: program.unwrap_or_else(|| self.program.into()),
            args,
            env,
            limit: Duration::from_secs(60 * self.minutes),
            skip,
            ..Part::new(self.name, Sort::Tests, gpus, kit)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn each_module_of_a_test_program_is_a_suite_or_left_out_on_purpose() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut modules = BTreeSet::new();
        for folder in ["tests", "transports/tests"] {
            for entry in std::fs::read_dir(root.join(folder)).unwrap() {
                let folder = entry.unwrap().path();
                let program = folder.file_name().unwrap().to_str().unwrap().to_owned();
                let Ok(main) = std::fs::read_to_string(folder.join("main.rs")) else { continue };
                if SUITES.iter().any(|suite| suite.name == program) {
                    continue;
                }
                let names = main.lines().filter_map(|line| line.strip_prefix("mod "));
                let names = names.filter_map(|line| line.strip_suffix(';'));
                modules.extend(names.map(|module| (program.clone(), module.to_owned())));
            }
        }
        assert!(modules.contains(&("gpu".into(), "gpu_ipc".into())), "{modules:?}");
        for (program, module) in &modules {
            let is = |suite: &Suite| suite.program == program && suite.name == module;
            let left_out =
                NO_PARTS.contains(&module.as_str()) || module == "verbs" && program == "drivers";
            assert!(
                SUITES.iter().any(is) != left_out,
                "{program}::{module}: put it into SUITES or NO_PARTS"
            );
        }
        for suite in SUITES.iter().filter(|suite| suite.program != suite.name) {
            let is_there = modules.contains(&(suite.program.into(), suite.name.into()));
            assert!(is_there, "there is no {}::{}", suite.program, suite.name);
        }
    }
}
