//! Copies that cross from one VMM allocation into the next, as they may where a mapping is made of
//! several handles.

use super::shared::Shared;

impl Shared {
    /// How far from `addr` on one allocation goes, where `len` bytes cross into others that follow
    /// without a gap, all of VMM's sort: of the same device, or of several where that was not
    /// ordered to fail. `None` where they do not: one allocation has them all, or it is no such
    /// range.
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
