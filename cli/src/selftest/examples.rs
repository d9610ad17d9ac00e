//! The examples: each verifies what it has done, and ends with an error if that is wrong.

use super::kit::Kit;
use super::machine::Machine;
use super::part::{Part, Sort};
use std::path::PathBuf;
use std::time::Duration;

/// An example, and the ranks that it is run on; none: by itself, without the launcher.
const EXAMPLES: &[(&str, u32, Memory)] = &[
    ("readme", 3, Memory::Host),
    ("hello_am", 4, Memory::Host),
    ("pingpong", 2, Memory::Host),
    ("distributed_array", 4, Memory::Host),
    ("hash_table", 4, Memory::Host),
    ("futures", 4, Memory::Host),
    ("stencil", 4, Memory::Host),
    ("work_stealing", 4, Memory::Host),
    ("gpu_pingpong", 2, Memory::Gpu),
    ("ring_p2p", 0, Memory::Gpu),
    ("ring_ipc", 2, Memory::EachGpu),
    ("am_into_gpu", 2, Memory::Gpu),
    ("stream_ordered", 2, Memory::Gpu),
    ("halo_2d", 2, Memory::EachGpu),
    ("halo_3d", 2, Memory::EachGpu),
    ("shared_allocator", 2, Memory::EachGpu),
    ("growable_buffer", 3, Memory::Gpu),
];

/// Kind of memory that an example works on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Host,
    Gpu,
    /// GPU memory, with a rank for each GPU if there are more GPUs than ranks.
    EachGpu,
}

const LIMIT: Duration = Duration::from_secs(300);

/// All examples.
pub(super) fn parts(kit: &Kit, machine: &Machine) -> Vec<Part> {
    let known = |name: &str| EXAMPLES.iter().any(|(known, ..)| *known == name);
    let others =
        kit.examples.keys().filter(|name| !known(name)).map(|name| (name.as_str(), 2, Memory::Gpu));
    EXAMPLES.iter().copied().chain(others).map(|example| part(example, kit, machine)).collect()
}

fn part((name, ranks, memory): (&str, u32, Memory), kit: &Kit, machine: &Machine) -> Part {
    let program = kit.examples.get(name);
    let gpus = (memory != Memory::Host).then_some(machine.gpus);
    let ranks = if memory == Memory::EachGpu {
        ranks.max(u32::try_from(machine.count).unwrap_or(2))
    } else {
        ranks
    };
    let path = program.cloned().unwrap_or_else(|| PathBuf::from(name));
    let (program_of_part, args) = match ranks {
        0 => (path, Vec::new()),
        ranks => {
            let args =
                ["run", "-n", &ranks.to_string(), "--no-tag", "--", &path.display().to_string()];
            (kit.carrack.clone(), args.map(str::to_owned).to_vec())
        }
    };
    let on = gpus.map_or_else(String::new, |gpus| format!(" ({})", gpus.in_words()));
    Part {
        name: format!("example {name}{on}"),
        sort: Sort::Example,
        gpus,
        program: program_of_part,
        args,
        env: gpus.map(|gpus| ("CARRACK_GPU", gpus.setting().to_owned())).into_iter().collect(),
        limit: LIMIT,
        skip: program.is_none().then(|| "it is not here: not built".into()),
    }
}
