//! What a buffer is to be, looked at before any address is taken.

use super::{GrowableBuffer, GrowableError};
use crate::alloc::MOST;
use carrack_transports::gpu::{Access, Gpu};
use carrack_transports::mem::GpuUuid;
use std::sync::Arc;

/// A buffer that is to be made: see [`GrowableBuffer::reserve`].
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

    /// Bytes of a stripe: the buffer grows and shrinks by these, and each GPU in turn has one. A
    /// multiple of the largest [granularity](Gpu::granularity) among the GPUs, which it is if
    /// nothing is said (2 MiB on NVIDIA's GPUs). Each stripe takes a tenth of a millisecond or so
    /// to map, and each that is registered a descriptor: buffers of gigabytes do well with stripes
    /// of 64 MiB or more.
    pub fn stripe(mut self, bytes: usize) -> Self {
        self.stripe = Some(bytes);
        self
    }

    /// GPUs that read and write the buffer as those do that it is made of, and have no stripe of
    /// it.
    pub fn writers(mut self, gpus: &'a [Arc<dyn Gpu>]) -> Self {
        self.writers = gpus;
        self
    }

    /// GPUs that read the buffer, and are kept from writing it: by the driver, which refuses copies
    /// in their contexts, and ends the context of a kernel that writes there all the same. What the
    /// runtime is told to write there it writes in the context of the GPU that has the memory, or
    /// the first of several that have it, wherever it comes from. Other processes that map the
    /// buffer have rights of their own.
    ///
    /// Drivers take such rights and promise nothing. Whether this one keeps each of these out is
    /// found out by [`build`](Self::build), the first time in a process, by attempts in processes
    /// of their own: that takes seconds for each pair of GPUs, and a program that answers for them
    /// ([`trial`](crate::trial)). An attempt leaves a fault of its kernel in the system's log (Xid
    /// 31). Under MPS it goes round the server, or is not made; there a fault of a reader is that
    /// of all clients.
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
        // The largest, and whose it is: its addresses suit all.
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
        // Last: what is refused above is refused without a process for it.
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

/// There are some, each once, and each reaches all of those that it is made of.
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
