//! The examples: each verifies what it has done, and ends with an error if that is wrong.

use super::kit::Kit;
use super::machine::Machine;
use super::part::{Part, Sort};

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
    ("growable_buffer", 3, Memory::EachGpu),
];

/// Kind of memory that an example works on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Host,
    Gpu,
    /// GPU memory, with a rank for each GPU if there are more GPUs than ranks.
    EachGpu,
}

/// Returns a part for each example.
pub(super) fn parts(kit: &Kit, machine: &Machine) -> Vec<Part> {
    let known = |name: &str| EXAMPLES.iter().any(|(known, ..)| *known == name);
    let others =
        kit.examples.keys().filter(|name| !known(name)).map(|name| (name.as_str(), 2, Memory::Gpu));
    let part = |(name, ranks, memory): (&str, u32, Memory)| {
        let gpus = (memory != Memory::Host).then_some(machine.gpus);
        let each = u32::try_from(machine.count).unwrap_or(2);
        let ranks = if memory == Memory::EachGpu { ranks.max(each) } else { ranks };
        let part = Part::new(&format!("example {name}"), Sort::Example, gpus, kit);
        part.of_example(name, ranks, kit)
    };
    EXAMPLES.iter().copied().chain(others).map(part).collect()
}
