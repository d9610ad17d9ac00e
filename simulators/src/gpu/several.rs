//! Copies that cross from one VMM allocation into the next, as in a mapping of several handles.

use super::shared::Shared;

impl Shared {
    /// Returns the bytes from `addr` to the end of its allocation, if `len` bytes cross into
    /// others that follow without a gap. All must be VMM memory: of one device, or of several
    /// unless a fault forbids that. `None`: one allocation has all bytes, or the range is not of
    /// this kind.
    pub(super) fn border(&self, addr: usize, len: usize) -> Option<usize> {
        let end = addr.checked_add(len)?;
        let first = self.find(addr)?;
        let (mut at, is_vmm) = (first.base + first.len, first.is_vmm);
        let border = at;
        while is_vmm && at < end {
            let next = self.find(at)?;
            let is_of_another = next.ordinal != first.ordinal;
            if next.base != at
                || !next.is_vmm
                || is_of_another && self.faults.refuses_copies_across()
            {
                return None;
            }
            at = next.base + next.len;
        }
        (is_vmm && border < end).then_some(border - addr)
    }
}
