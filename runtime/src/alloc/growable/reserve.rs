//! The builder of a growable buffer: checks everything before it reserves addresses.

use super::{GrowableBuffer, GrowableError};
use crate::alloc::MOST;
use carrack_transports::gpu::{Access, Gpu};
use carrack_transports::mem::GpuUuid;
use std::sync::Arc;

/// A builder of a buffer: see [`GrowableBuffer::reserve`].
#[must_use = "nothing is reserved until `build`"]
#[derive(Debug)]
pub struct GrowableBuilder<'a> {
    gpus: &'a [Arc<dyn Gpu>],
    most: usize,
    stripe: Option<usize>,
    writers: &'a [Arc<dyn Gpu>],
    readers: &'a [Arc<dyn Gpu>],
}

impl<'a> GrowableBuilder<'a> {
    pub(super) fn new(gpus: &'a [Arc<dyn Gpu>], most: usize) -> Self {
        Self { gpus, most, stripe: None, writers: &[], readers: &[] }
    }

    /// Sets the bytes of a stripe. The buffer grows and shrinks by stripes, and the GPUs provide
    /// them in turn. The length is a multiple of the largest [granularity](Gpu::granularity) among
    /// the GPUs, which is also the default (2 MiB on NVIDIA GPUs). Each stripe takes about 0.1 ms
    /// to map, and each registered one a file descriptor. For buffers of gigabytes use stripes of
    /// 64 MiB or more.
    pub fn stripe(mut self, bytes: usize) -> Self {
        self.stripe = Some(bytes);
        self
    }

    /// Adds GPUs that read and write the buffer, and provide no memory.
    pub fn writers(mut self, gpus: &'a [Arc<dyn Gpu>]) -> Self {
        self.writers = gpus;
        self
    }

    /// Adds GPUs that may only read the buffer. The driver refuses copies in their contexts that
    /// write it, and ends the context of a kernel that writes there. The runtime writes in the
    /// context of the GPU that has the memory, or of the first of several, whatever the source.
    /// Other processes that map the buffer have rights of their own.
    ///
    /// Drivers accept such rights without a promise. [`build`](Self::build) tries whether the
    /// driver blocks each of these GPUs, once in a process, in processes of their own. That takes
    /// seconds for each pair of GPUs, and a program that answers for them
    /// ([`trial`](crate::trial)). A trial leaves a fault of its kernel in the system's log (Xid
    /// 31). Under MPS the trial bypasses the server or is skipped, since a reader's fault there is
    /// a fault of all clients.
    pub fn readers(mut self, gpus: &'a [Arc<dyn Gpu>]) -> Self {
        self.readers = gpus;
        self
    }

    /// Reserves the addresses.
    ///
    /// # Errors
    /// See [`GrowableError`].
    pub fn build(self) -> Result<GrowableBuffer, GrowableError> {
        let Self { gpus, most, stripe, writers, readers } = self;
        if most == 0 || most > MOST {
            return Err(GrowableError::Most { most });
        }
        check_gpus(gpus, writers, readers)?;
        // The largest granularity, and its GPU: addresses aligned to it suit all.
        let mut largest: Option<(usize, &Arc<dyn Gpu>)> = None;
        for gpu in gpus {
            let unsupported = |cause| GrowableError::Unsupported { gpu: uuid(gpu), cause };
            let granularity = gpu.granularity().map_err(unsupported)?;
            if largest.is_none_or(|(most, _)| granularity > most) {
                largest = Some((granularity, gpu));
            }
        }
        let (granularity, first) = largest.ok_or(GrowableError::NoGpu)?;
        let stripe = stripe.unwrap_or(granularity);
        if stripe == 0 || !stripe.is_multiple_of(granularity) {
            return Err(GrowableError::Stripe { stripe, granularity, gpu: uuid(first) });
        }
        let most = most.checked_next_multiple_of(stripe).filter(|most| *most <= MOST);
        let most = most.ok_or(GrowableError::Most { most: self.most })?;
        let refused = |cause| GrowableError::NotReserved { most, cause };
        // Last: a request that the checks above refuse starts no process.
        for gpu in readers {
            for owner in gpus {
                let read_only =
                    |cause| GrowableError::ReadOnly { gpu: uuid(gpu), owner: uuid(owner), cause };
                gpu.keeps_from_writing(uuid(owner)).map_err(read_only)?;
            }
        }
        let reservation = first.reserve(most).map_err(refused)?;
        let all = gpus.iter().chain(writers).map(|gpu| Access::read_write(uuid(gpu)));
        let access = all.chain(readers.iter().map(|gpu| Access::read(uuid(gpu)))).collect();
        Ok(GrowableBuffer::empty(gpus.to_vec(), access, reservation, (most, stripe, granularity)))
    }
}

fn uuid(gpu: &Arc<dyn Gpu>) -> GpuUuid {
    gpu.info().uuid
}

/// Checks that there is a GPU, that each is named once, and that each reaches all that provide
/// memory.
fn check_gpus(
    gpus: &[Arc<dyn Gpu>],
    writers: &[Arc<dyn Gpu>],
    readers: &[Arc<dyn Gpu>],
) -> Result<(), GrowableError> {
    let named = || gpus.iter().chain(writers).chain(readers);
    for (at, gpu) in named().enumerate() {
        if named().take(at).any(|other| uuid(other) == uuid(gpu)) {
            return Err(GrowableError::Twice { gpu: uuid(gpu) });
        }
    }
    for gpu in named() {
        for owner in gpus.iter().filter(|owner| uuid(owner) != uuid(gpu)) {
            let apart = |cause| GrowableError::Apart { gpu: uuid(gpu), owner: uuid(owner), cause };
            gpu.reaches(uuid(owner)).map_err(apart)?;
        }
    }
    if gpus.is_empty() { Err(GrowableError::NoGpu) } else { Ok(()) }
}
