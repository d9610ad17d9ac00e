//! The suite that every transport passes. It tests the promises of the runtime, over each transport
//! in turn, and those of the transport contract, below the runtime.
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
//! | `replies` | replies of handlers are accepted, and floods of requests held back |
//! | `ending` | runtimes and peers that end while operations are in flight |
//! | `news` | the end of a rank becomes known on one device, before the last messages of another |
//! | `flushes` | flushes of ranks that go: they fail if an operation was lost, and only then |
//! | `names` | tags, contexts and completion objects that other ranks name |
//! | `resources` | devices, engines, pools and runtimes, several of each |
//! | `waiting` | threads that post, poll, and sleep |
//! | `full_queues` | full completion objects, and no free packet: everything else passes |
//! | `gpu` | memory that the CPU cannot touch |
//! | `gpu_packets` | active messages in the reorder queue before a GPU |
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
mod flushes;
mod full_queues;
mod gpu;
mod gpu_packets;
mod groups;
mod large;
mod matrix;
mod memory;
mod names;
mod news;
mod nic_words;
mod order;
mod outcomes;
mod pieces;
mod pieces_endings;
mod pieces_ordeals;
mod pieces_refused;
mod pressure;
mod replies;
mod resources;
mod waiting;
