//! Test programs: their names, GPUs and time limits.
//!
//! From a bundle, programs that are not listed here run as well, except [`NO_PARTS`]. From a built
//! tree, where many other programs lie in the same folder, only listed ones run.

use super::kit::Kit;
use super::machine::{Gpus, Machine};
use super::part::{Part, Sort};
use std::path::PathBuf;
use std::time::Duration;

/// A test program.
struct Suite {
    name: &'static str,
    on: On,
    /// Returns `true` if `--quick` runs it.
    quick: bool,
    minutes: u64,
    /// Filter of the tests that also run on simulated GPUs when real ones are tested.
    beside: Option<&'static str>,
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

const fn suite(name: &'static str, on: On, quick: bool, minutes: u64) -> Suite {
    Suite { name, on, quick, minutes, beside: None }
}

const SUITES: &[Suite] = &[
    // Only the tests of GPU memory differ between real and simulated GPUs.
    Suite { beside: Some("gpu::"), ..suite("conformance", On::Any, true, 15) },
    suite("cuda", On::Cuda, true, 15),
    suite("gpu_ipc", On::Any, true, 10),
    suite("ipc_handles", On::Any, true, 10),
    suite("shared_allocator", On::Any, true, 10),
    suite("growable_buffer", On::Any, true, 10),
    suite("am_into_gpu", On::Any, true, 10),
    suite("gpu_staged", On::Any, true, 10),
    suite("gpu_streams", On::Any, true, 10),
    suite("known_memory", On::Any, true, 10),
    suite("gpu_ordeals", On::Any, true, 15),
    suite("gpu_copier", On::Any, true, 10),
    suite("gpu_copier_ranks", On::Any, true, 10),
    suite("explain_copier", On::Any, true, 10),
    suite("fake_gpu", On::Nothing, true, 10),
    suite("simulated_nic", On::Nothing, true, 5),
    suite("verbs_calls", On::Nothing, true, 5),
    suite("apart", On::Nothing, true, 5),
    suite("processes", On::Nothing, true, 10),
    suite("signals", On::Nothing, true, 5),
    suite("quiet_path", On::Nothing, true, 5),
    suite("hostile", On::Nothing, false, 10),
    suite("verbs_faults", On::Nothing, false, 20),
    suite("verbs_chunks", On::Nothing, true, 10),
    suite("verbs_gpu", On::Nothing, true, 10),
    suite("nic_words", On::Nothing, true, 5),
    suite("verbs_memory", On::Nothing, true, 5),
    suite("verbs_hostile", On::Nothing, false, 10),
    suite("verbs_instructions", On::Nothing, false, 5),
    suite("launcher", On::Nothing, false, 10),
    suite("tcp_bootstrap", On::Nothing, false, 10),
    suite("cli_perf", On::Nothing, false, 15),
    suite("ordeals", On::Nothing, false, 30),
    suite("growth", On::Nothing, false, 10),
    suite("huge", On::Nothing, false, 30),
];

/// Test programs of the tree that are no parts of a selftest. The selftest runs the examples by
/// itself, and `cli_selftest` would run the selftest again. Three programs need a C compiler and
/// the source of the mock library. The table of rules is read in the tree, and a guest is made
/// from it. A bundle leaves these programs out; a test of xtask checks that.
const NO_PARTS: &[&str] = &[
    "cli_selftest",
    "cuda_mock",
    "examples",
    "explain_claims",
    "gpu_costs",
    "gpu_rules",
    "verbs_guest",
];

/// Returns `true` if a test program of that name is one of the parts.
pub(super) fn is_known(name: &str) -> bool {
    SUITES.iter().any(|suite| suite.name == name)
}

/// Returns all test programs, each with the GPUs that it runs on.
pub(super) fn parts(kit: &Kit, machine: &Machine, quick: bool) -> Vec<Part> {
    let mut parts: Vec<Part> =
        SUITES.iter().flat_map(|suite| suite.parts(kit, machine, quick)).collect();
    for name in
        kit.tests.keys().filter(|name| !is_known(name) && !NO_PARTS.contains(&name.as_str()))
    {
        parts.extend(suite(name_for_ever(name), On::Any, true, 15).parts(kit, machine, quick));
    }
    parts
}

/// Leaks a name. A process leaks a few names at most.
fn name_for_ever(name: &str) -> &'static str {
    Box::leak(name.to_owned().into_boxed_str())
}

impl Suite {
    fn parts(&self, kit: &Kit, machine: &Machine, quick: bool) -> Vec<Part> {
        let Some(program) = kit.tests.get(self.name) else {
            return vec![self.part(
                PathBuf::from(self.name),
                None,
                Some("it is not here: not built, or left out of the bundle".into()),
            )];
        };
        let left_out = (quick && !self.quick).then(|| "--quick leaves it out".to_owned());
        match (self.on, machine.gpus) {
            (On::Nothing, _) => vec![self.part(program.clone(), None, left_out)],
            (On::Cuda, Gpus::Cuda) => vec![self.part(program.clone(), Some(Gpus::Cuda), left_out)],
            (On::Cuda, Gpus::Simulated) => {
                let why = machine.no_cuda.as_deref().unwrap_or("there is none");
                let why = format!("it needs an NVIDIA GPU: {why}");
                vec![self.part(program.clone(), Some(Gpus::Cuda), left_out.or(Some(why)))]
            }
            (On::Any, Gpus::Simulated) => {
                vec![self.part(program.clone(), Some(Gpus::Simulated), left_out)]
            }
            (On::Any, Gpus::Cuda) => {
                let beside =
                    (quick).then(|| "--quick leaves it out where there are real GPUs".to_owned());
                let mut simulated = self.part(program.clone(), Some(Gpus::Simulated), beside);
                simulated.args.extend(self.beside.map(str::to_owned));
                vec![self.part(program.clone(), Some(Gpus::Cuda), left_out), simulated]
            }
        }
    }

    fn part(&self, program: PathBuf, gpus: Option<Gpus>, skip: Option<String>) -> Part {
        // Tests print their reasons for skipping, and libtest shows that output only with this
        // option.
        let mut args = vec!["--show-output".to_owned()];
        let mut env = Vec::new();
        if let Some(gpus) = gpus {
            env.push(("TEST_GPU", gpus.setting().to_owned()));
        }
        if gpus == Some(Gpus::Cuda) {
            // Processes that share a device take turns of milliseconds, so parallel tests take
            // longer.
            args.push("--test-threads=1".into());
        }
        if self.on == On::Cuda {
            env.push(("CARRACK_REQUIRE_GPU", "1".into()));
        }
        let on = gpus.map_or_else(String::new, |gpus| format!(" ({})", gpus.in_words()));
        Part {
            name: format!("{}{on}", self.name),
            sort: Sort::Tests,
            gpus,
            program,
            args,
            env,
            limit: Duration::from_secs(60 * self.minutes),
            skip,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn each_test_program_of_the_tree_is_a_part_or_left_out_on_purpose() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let entries =
            std::fs::read_dir(root.join("tests")).unwrap().map(|entry| entry.unwrap().path());
        let files = entries.filter(|path| path.extension().is_some_and(|ending| ending == "rs"));
        let names: BTreeSet<String> =
            files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        assert!(names.contains("conformance"), "{names:?}");
        for name in &names {
            let left_out = NO_PARTS.contains(&name.as_str());
            assert!(is_known(name) != left_out, "{name}: put it into SUITES or NO_PARTS");
        }
    }
}
