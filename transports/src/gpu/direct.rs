//! Access of a NIC to a device's memory (GPUDirect).

use std::os::fd::OwnedFd;

/// A range of a device's memory as a descriptor, which a NIC's driver takes in place of addresses.
/// It is closed as soon as the NIC has it (gpu.md, dma-buf rule 2).
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Offset of the range in the descriptor's memory, in bytes. That memory consists of whole
    /// pages of the host's.
    pub offset: u64,
}

/// Visibility of a NIC's writes to a device's own work (gpu.md, streams rule 8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RemoteWrites {
    /// Visible as soon as the NIC has completed them.
    InOrder,
    /// Visible after the next [`Gpu::flush_remote_writes`](super::Gpu::flush_remote_writes).
    AfterFlush,
    /// Unknown, for the reason given: no NIC may write there.
    Unordered(String),
}

/// Returns the bytes of a host page, the unit of dma-bufs.
pub(super) fn page() -> usize {
    rustix::param::page_size()
}

/// Returns the host pages in which a range lies: their address, and their length in bytes.
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
