//! The suite that every transport passes: what the runtime promises, over each of them in turn, and
//! what the transport contract promises, below the runtime.
//!
//! | module | one idea |
//! |---|---|
//! | `matrix` | operation × completion × matching × size × buffer, in all pairs |
//! | `allowed` | which outcomes callers allow × operation × completion × room, in all combinations |
//! | `large` | messages too long for one piece |
//! | `memory` | puts, gets, atomic operations, flushes |
//! | `pieces`, `pieces_refused`, `pieces_ordeals`, `pieces_endings` | many puts or gets as one, batches and faces: what arrives, what is refused, waits or fails, and what ends under them |
//! | `nic_words` | atomic operations on words whose agent is a NIC |
//! | `awaiting` | operations as futures, the progress thread, what is pending |
//! | `buffers` | lists, packets filled in place, bytes on loan |
//! | `control` | looking, cancelling, deadlines, and messages that nobody expects |
//! | `groups` | barrier, broadcast, allgather of some ranks or all |
//! | `order` | messages of one key, and of one link, come in the order in which they were sent |
//! | `outcomes` | what operations come to, and what is an error |
//! | `pressure` | each reason for a retry, forced by tiny resources; nothing is lost |
//! | `ending` | runtimes and peers that go while operations are under way |
//! | `names` | tags, contexts and completion objects that other ranks name |
//! | `resources` | devices, engines, pools and runtimes, several of each |
//! | `waiting` | threads that post, poll, and sleep |
//! | `full_queues` | completion objects without room, and packets that are all out: everything else passes |
//! | `gpu` | memory that the CPU cannot touch |
//! | `gpu_packets` | active messages in a line before a GPU |
//! | `contract` | transports without a runtime |
//! | `contract_sleep` | threads that sleep on one device of a transport |
//! | `contract_ending` | operations of a transport whose device closes |

use carrack_test_support as support;

mod allowed;
mod awaiting;
mod buffers;
mod contract;
mod contract_ending;
mod contract_sleep;
mod control;
mod ending;
mod full_queues;
mod gpu;
mod gpu_packets;
mod groups;
mod large;
mod matrix;
mod memory;
mod names;
mod nic_words;
mod order;
mod outcomes;
mod pieces;
mod pieces_endings;
mod pieces_ordeals;
mod pieces_refused;
mod pressure;
mod resources;
mod waiting;
