//! The suite that every transport passes: the promises of the runtime, over each of them in turn,
//! and those of the transport contract, below the runtime.
//!
//! | module | one idea |
//! |---|---|
//! | `matrix` | operation × completion × matching × size × buffer, in all pairs |
//! | `allowed` | allowed outcomes × operation × completion × room, in all combinations |
//! | `large` | messages too long for one piece |
//! | `memory` | puts, gets, atomic operations, flushes |
//! | `pieces`, `pieces_*` | batches and strided puts and gets: arrival, refusal, waits, failures |
//! | `nic_words` | atomic operations on words whose agent is a NIC |
//! | `awaiting` | operations as futures, the progress thread, what is pending |
//! | `buffers` | lists, packets filled in place, bytes on loan |
//! | `control` | looking, cancelling, deadlines, and messages without a receive |
//! | `groups` | barrier, broadcast, allgather of some ranks or all |
//! | `order` | messages of one key, and of one link, come in the order in which they were sent |
//! | `outcomes` | outcomes of operations, and errors |
//! | `pressure` | each reason for a retry, forced by tiny resources; nothing is lost |
//! | `ending` | runtimes and peers that end while operations are in flight |
//! | `names` | tags, contexts and completion objects that other ranks name |
//! | `resources` | devices, engines, pools and runtimes, several of each |
//! | `waiting` | threads that post, poll, and sleep |
//! | `full_queues` | full completion objects, and no free packet: everything else passes |
//! | `gpu` | memory that the CPU cannot touch |
//! | `gpu_packets` | active messages in the reorder queue before a GPU |
//! | `contract` | transports without a runtime |
//! | `contract_sleep` | threads that sleep on one device of a transport |
//! | `contract_ending` | operations of a transport whose device closes |

mod support;

#[path = "conformance/allowed.rs"]
mod allowed;
#[path = "conformance/awaiting.rs"]
mod awaiting;
#[path = "conformance/buffers.rs"]
mod buffers;
#[path = "conformance/contract.rs"]
mod contract;
#[path = "conformance/contract_ending.rs"]
mod contract_ending;
#[path = "conformance/contract_sleep.rs"]
mod contract_sleep;
#[path = "conformance/control.rs"]
mod control;
#[path = "conformance/ending.rs"]
mod ending;
#[path = "conformance/full_queues.rs"]
mod full_queues;
#[path = "conformance/gpu.rs"]
mod gpu;
#[path = "conformance/gpu_packets.rs"]
mod gpu_packets;
#[path = "conformance/groups.rs"]
mod groups;
#[path = "conformance/large.rs"]
mod large;
#[path = "conformance/matrix.rs"]
mod matrix;
#[path = "conformance/memory.rs"]
mod memory;
#[path = "conformance/names.rs"]
mod names;
#[path = "conformance/nic_words.rs"]
mod nic_words;
#[path = "conformance/order.rs"]
mod order;
#[path = "conformance/outcomes.rs"]
mod outcomes;
#[path = "conformance/pieces.rs"]
mod pieces;
#[path = "conformance/pieces_endings.rs"]
mod pieces_endings;
#[path = "conformance/pieces_ordeals.rs"]
mod pieces_ordeals;
#[path = "conformance/pieces_refused.rs"]
mod pieces_refused;
#[path = "conformance/pressure.rs"]
mod pressure;
#[path = "conformance/resources.rs"]
mod resources;
#[path = "conformance/waiting.rs"]
mod waiting;
