//! Errors of growable buffers.

use crate::error::other_error;
use carrack_transports::gpu::GpuError;
use carrack_transports::mem::GpuUuid;

/// A [`GrowableBuffer`](super::GrowableBuffer) was not made or not changed. The buffer is as it
/// was before the call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GrowableError {
    /// No GPU was named.
    #[error("a growable buffer needs a GPU whose memory it is made of: name one or more")]
    NoGpu,
    /// A GPU was named twice.
    #[error(
        "{gpu} is named twice: it has stripes of the buffer, writes it, or reads it; name it once"
    )]
    Twice {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// No address range has that many bytes.
    #[error(
        "{most} bytes cannot be reserved: ask for at least 1, and for less than a quarter of the \
        address space"
    )]
    Most {
        /// Bytes that were asked for.
        most: usize,
    },
    /// The stripe is no multiple of a GPU's allocation granularity.
    #[error(
        "a stripe of {stripe} bytes is no multiple of the {granularity} by which {gpu} allocates: \
        make it {}",
        nearest(*.stripe, *.granularity)
    )]
    Stripe {
        /// Bytes of a stripe that were asked for.
        stripe: usize,
        /// The required divisor of a stripe: the largest granularity among the GPUs.
        granularity: usize,
        /// The GPU that has this granularity.
        gpu: GpuUuid,
    },
    /// A GPU's driver does not allocate at chosen addresses.
    #[error("{gpu} has no memory that could grow in place: {cause}; leave it out")]
    Unsupported {
        /// The GPU.
        gpu: GpuUuid,
        /// The driver's reason.
        cause: GpuError,
    },
    /// The GPUs do not reach each other's memory.
    #[error(
        "{gpu} does not reach memory of {owner}, which would have stripes of the buffer: {cause}; \
        leave one of the two out"
    )]
    Apart {
        /// The GPU that lacks access.
        gpu: GpuUuid,
        /// The GPU whose memory it does not reach.
        owner: GpuUuid,
        /// The driver's reason.
        cause: GpuError,
    },
    /// A GPU asked for read-only access, and its driver does not prevent writes, or this is not
    /// known.
    #[error(
        "{gpu} is not given access for reading only to memory of {owner}: {cause}; name it among \
        the writers, or leave it out"
    )]
    ReadOnly {
        /// The first of them.
        gpu: GpuUuid,
        /// The GPU whose memory it would read.
        owner: GpuUuid,
        /// The result of the trial, or the reason why there was none.
        cause: GpuError,
    },
    /// The addresses were not reserved.
    #[error("{most} bytes of addresses cannot be reserved: {cause}; reserve less")]
    NotReserved {
        /// Bytes, in whole stripes.
        most: usize,
        /// The driver's reason.
        cause: GpuError,
    },
    /// The length exceeds the reserved capacity.
    #[error(
        "the buffer cannot grow to {len} bytes: {capacity} were reserved; reserve a larger one, \
        and move there"
    )]
    Beyond {
        /// Bytes that were asked for.
        len: usize,
        /// Bytes that were reserved.
        capacity: usize,
    },
    /// A GPU has no memory for a stripe. The stripes that this call had allocated were freed.
    #[error(
        "the buffer does not grow from {held} to {len} bytes: no memory for a stripe of {stripe} \
        bytes on {gpu}: {cause}; free memory there, or ask for less"
    )]
    NotAllocated {
        /// Bytes that were asked for.
        len: usize,
        /// Bytes that there are.
        held: usize,
        /// Bytes of a stripe.
        stripe: usize,
        /// The GPU whose turn it was.
        gpu: GpuUuid,
        /// The driver's reason.
        cause: GpuError,
    },
    /// The bytes behind the requested length are in use.
    #[error("the buffer cannot shrink to {len} bytes: its first {used} are in use: \
        {}", holders(.processes))]
    InUse {
        /// Bytes that were asked for.
        len: usize,
        /// Bytes that have to stay, in whole stripes: the buffer can shrink to this length.
        used: usize,
        /// Other processes that have part of it mapped, where this process does not use it any
        /// more.
        processes: Vec<u32>,
    },
    /// The buffer has no such range.
    #[error(
        "{len} bytes at {offset} are no range of the buffer, which has {held}: grow it first, and \
        ask for at least 1"
    )]
    Outside {
        /// The beginning of the range, in bytes.
        offset: usize,
        /// Bytes of the range.
        len: usize,
        /// Length of the buffer in bytes.
        held: usize,
    },
    /// The range lies on several GPUs, and copies cannot cross the border between two of them, or
    /// the trial of that failed.
    #[error(
        "{len} bytes at {offset} lie on {gpus} GPUs, in stripes of {stripe}, and are no region \
        unless copies go from one GPU's memory into \
         the next one's: {cause}; take the pieces, which go together in a batch"
    )]
    OnSeveral {
        /// The beginning of the range, in bytes.
        offset: usize,
        /// Bytes of the range.
        len: usize,
        /// Bytes of a stripe.
        stripe: usize,
        /// GPUs on which the range lies.
        gpus: usize,
        /// The result of the trial.
        cause: String,
    },
}

other_error!(GrowableError);

/// Names the nearest multiples of the granularity below and above a stripe.
fn nearest(stripe: usize, granularity: usize) -> String {
    let below = stripe / granularity * granularity;
    let above = below.saturating_add(granularity);
    if below == 0 { above.to_string() } else { format!("{below} or {above}") }
}

fn holders(processes: &[u32]) -> String {
    if processes.is_empty() {
        return "registered, in an operation, or held as a region or a part of one; deregister, \
            wait for operations and drop regions, \
                then call again"
            .into();
    }
    format!(
        "processes {processes:?} have them mapped: they drop what names them, and close them when \
        they are next idle in progress; then call again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stripe_is_told_which_lengths_are_next_to_it() {
        assert_eq!(
            [(1, 10), (15, 10), (0, 10)].map(|(stripe, by)| nearest(stripe, by)),
            ["10", "10 or 20", "10"]
        );
        assert!(nearest(usize::MAX, 10).contains(" or "));
    }
}
