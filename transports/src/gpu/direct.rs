//! What a NIC that reaches a device's memory by itself (GPUDirect) has to know of the device.

use std::os::fd::OwnedFd;

/// A range of a device's memory as a descriptor, which a NIC's driver takes in the place of its
/// addresses. To be closed as soon as the NIC has it (gpu.md, dma-buf rule 2).
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Where the range begins in what it stands for, in bytes: that begins and ends with a page of
    /// the host's.
    pub offset: u64,
}

/// When a device's own work sees what a NIC has written to its memory (gpu.md, streams rule 8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RemoteWrites {
    /// As soon as the NIC has told of it.
    InOrder,
    /// After the next [`Gpu::flush_remote_writes`](super::Gpu::flush_remote_writes).
    AfterFlush,
    /// Nobody can tell, for the reason given: nothing may be written there by a NIC.
    Unordered(String),
}

/// Bytes of a page of the host's: what dma-bufs begin and end with.
pub(super) fn page() -> usize {
    rustix::param::page_size()
}

/// The pages of the host's that a range lies in: where they begin, and how many bytes they are.
pub(super) fn pages(addr: usize, len: usize) -> Option<(usize, usize)> {
    let base = addr - addr % page();
    let end = addr.checked_add(len)?.checked_next_multiple_of(page())?;
    Some((base, end - base))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_rounded_out_to_pages() {
        let page = page();
        assert_eq!(pages(10 * page, 1), Some((10 * page, page)));
        assert_eq!(pages(10 * page + 1, page), Some((10 * page, 2 * page)));
        assert_eq!(pages(10 * page, page), Some((10 * page, page)));
        assert_eq!(pages(usize::MAX - 1, 1), None);
        assert_eq!(pages(usize::MAX, 1), None);
    }
}
