//! NVIDIA's driver, opened at run time: a program that contains this module also runs on machines
//! without a GPU.
//!
//! | module | one idea |
//! |---|---|
//! | `library` | opening `libcuda.so.1`, and telling a stub from a driver |
//! | `calls` | the table of the driver's calls, each of which may be missing |
//! | `sys`, `rows` | its types and numbers; those of many copies and of rows |
//! | `error` | its codes, in words |
//! | `driver` | the driver of the process: [`CudaDriver`] |
//! | `pointer` | classification of an address |
//! | `device` | one device, and its copies: [`CudaGpu`] |
//! | `context` | making a context current for a moment |
//! | `home` | streams, events and peers of one context |
//! | `lane` | the library's own streams, and their progress |
//! | `pieces` | many copies in one call, and rows at regular distances |
//! | `copier` | small copies by a resident kernel |
//! | `ends` | memory that the copier may access |
//! | `memory` | allocating and giving back |
//! | `vmm` | memory that is allocated apart from its addresses, and mapped there |
//! | `peer` | access to other devices |
//! | `links` | links between devices, for reports |
//! | `direct` | its memory, for NICs |
//! | `ipc` | handles between processes |
//! | `stream` | streams of the user's: [`CudaStream`] |
//! | `course` | progress of such a stream through its waits |
//! | `event` | events, our own and shared |
//!
//! # Why a table of our own, and not cudarc's
//!
//! cudarc's `driver::sys` has all of these calls, and is the oracle of the test in `sys`. It is
//! not the base, for four reasons. A symbol that the driver lacks is a panic there. Its results
//! are Rust enums, so that a code which only a newer driver knows would be undefined behaviour. It
//! tries `libcuda.so`, a toolkit's stub, before the driver's `libcuda.so.1`. Its CUDA version is a
//! feature that two users of one program would have to agree on.
//!
//! Here each call is looked up by itself, a missing one is an error that names it, and every
//! answer is an integer. So Carrack is built for no particular CUDA version.
//!
//! # Contexts
//!
//! [`CudaDriver::adopt`] initialises nothing: until the program has called `cuInit`, every address
//! is host memory. Memory found in a context is worked on in that context. The library's own work
//! is done in the device's primary context, which the CUDA runtime shares. A thread that calls in
//! has its own context back afterwards. The library's streams and contexts stay until the process
//! ends, because the driver belongs to the process.

#![expect(unsafe_code, reason = "the driver's functions and what they are told by address")]

mod attempt;
mod calls;
mod capture;
mod context;
mod copier;
mod course;
mod device;
mod direct;
mod driver;
mod ends;
mod error;
mod event;
mod giving;
mod home;
mod ipc;
mod lane;
mod library;
mod links;
mod memory;
mod peer;
mod pieces;
mod pointer;
mod rows;
mod stream;
mod sys;
mod vmm;

pub use copier::{KERNEL as COPIER_KERNEL, THREADS as COPIER_THREADS};
pub use device::CudaGpu;
pub use driver::CudaDriver;
pub use stream::CudaStream;

pub(crate) use attempt::answer as try_in_this_process;
