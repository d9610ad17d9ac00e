//! The examples: each verifies what it has done, and ends with an error if that is wrong.

use super::kit::Kit;
use super::machine::Machine;
use super::part::{Part, Sort};

/// An example, and the ranks that it is run on; none: by itself, without the launcher.
const EXAMPLES: &[(&str, u32, MemoryKind)] = &[
    ("readme", 3, MemoryKind::Host),
    ("hello_am", 4, MemoryKind::Host),
    ("pingpong", 2, MemoryKind::Host),
    ("distributed_array", 4, MemoryKind::Host),
    ("hash_table", 4, MemoryKind::Host),
    ("futures", 4, MemoryKind::Host),
    ("stencil", 4, MemoryKind::Host),
    ("work_stealing", 4, MemoryKind::Host),
    ("gpu_pingpong", 2, MemoryKind::Gpu),
    ("ring_p2p", 0, MemoryKind::Gpu),
    ("ring_ipc", 2, MemoryKind::EachGpu),
    ("am_into_gpu", 2, MemoryKind::Gpu),
    ("stream_ordered", 2, MemoryKind::Gpu),
    ("halo_2d", 2, MemoryKind::EachGpu),
    ("halo_3d", 2, MemoryKind::EachGpu),
    ("shared_allocator", 2, MemoryKind::EachGpu),
    ("growable_buffer", 3, MemoryKind::EachGpu),
];

/// Kind of memory that an example works on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemoryKind {
    Host,
    Gpu,
    /// GPU memory, with a rank for each GPU if there are more GPUs than ranks.
    EachGpu,
}

/// Returns a part for each example.
pub(super) fn parts(kit: &Kit, machine: &Machine) -> Vec<Part> {
    let known = |name: &str| EXAMPLES.iter().any(|(known, ..)| *known == name);
    let others = kit
        .examples
        .keys()
        .filter(|name| !known(name))
        .map(|name| (name.as_str(), 2, MemoryKind::Gpu));
    let part = |(name, ranks, memory): (&str, u32, MemoryKind)| {
        let gpus = (memory != MemoryKind::Host).then_some(machine.gpus);
        let each = u32::try_from(machine.count).unwrap_or(2);
        let ranks = if memory == MemoryKind::EachGpu { ranks.max(each) } else { ranks };
        let part = Part::new(&format!("example {name}"), Sort::Example, gpus, kit);
        part.of_example(name, ranks, kit)
    };
    EXAMPLES.iter().copied().chain(others).map(part).collect()
}
