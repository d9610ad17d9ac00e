//! The test programs: what each is about, on which GPUs it runs, and how long it may take.
//!
//! A bundle's are run also if they are not known here, but for those that are no parts. In a built
//! tree, where programs of many sorts lie side by side, only those that are known.

use super::kit::Kit;
use super::machine::{Gpus, Machine};
use super::part::{Part, Sort};
use std::path::PathBuf;
use std::time::Duration;

/// A test program.
struct Suite {
    name: &'static str,
    on: On,
    /// Whether `--quick` runs it.
    quick: bool,
    minutes: u64,
    /// The part of it that runs on simulated GPUs beside real ones.
    beside: Option<&'static str>,
}

/// Which GPUs a test program runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// None, or simulated ones that it makes for itself.
    Nothing,
    /// Those that are tested, as `TEST_GPU` says; and simulated ones, too.
    Any,
    /// NVIDIA's alone.
    Cuda,
}

const fn suite(name: &'static str, on: On, quick: bool, minutes: u64) -> Suite {
    Suite { name, on, quick, minutes, beside: None }
}

const SUITES: &[Suite] = &[
    // Only its tests of GPU memory differ from one sort of GPU to another.
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

/// Test programs of the tree that are no parts of a selftest: it runs the examples by itself, one
/// of its own tests would run it again, the mock library needs a C compiler and its source (three
/// programs), the table of rules is read in the tree, and a guest is made from it. A bundle leaves
/// them out; a test of xtask sees to that.
const NO_PARTS: &[&str] = &[
    "cli_selftest",
    "cuda_mock",
    "examples",
    "explain_claims",
    "gpu_costs",
    "gpu_rules",
    "verbs_guest",
];

/// Whether a test program of that name is one of the parts.
pub(super) fn is_known(name: &str) -> bool {
    SUITES.iter().any(|suite| suite.name == name)
}

/// All test programs, on all GPUs that they are to run on.
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

/// A few names in the life of a process.
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
        // Tests that say why they skip something say it in their output, which is shown only if it
        // is asked for.
        let mut args = vec!["--show-output".to_owned()];
        let mut env = Vec::new();
        if let Some(gpus) = gpus {
            env.push(("TEST_GPU", gpus.setting().to_owned()));
        }
        if gpus == Some(Gpus::Cuda) {
            // Two processes that share a device take turns of milliseconds: several tests at once
            // take longer, not shorter.
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
