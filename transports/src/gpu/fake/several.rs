//! Copies that cross from one VMM allocation into the next, as they may where a mapping is made of several handles.

use super::shared::Shared;
use crate::gpu::{Event, EventState, GpuError};
use std::sync::Arc;

impl Shared {
    /// How far from `addr` on one allocation goes, where `len` bytes cross into others that follow without a gap, of the same device
    /// and all of VMM's sort. `None` where they do not: one allocation has them all, or it is no such range.
    pub(super) fn border(&self, addr: usize, len: usize) -> Option<usize> {
        let end = addr.checked_add(len)?;
        let first = self.find(addr)?;
        let (mut at, is_vmm) = (first.base + first.len, first.is_vmm);
        let border = at;
        while is_vmm && at < end {
            let next = self.find(at)?;
            let follows = next.base == at && next.ordinal == first.ordinal;
            if !follows || !next.is_vmm {
                return None;
            }
            at = next.base + next.len;
        }
        (is_vmm && border < end).then_some(border - addr)
    }
}

/// Two events as one: a copy's first piece, and what is left of it.
pub(super) struct Both(pub(super) Event, pub(super) Event);

impl Both {
    pub(super) fn of(one: Event, other: Event) -> Event {
        Event::new(Arc::new(Self(one, other)))
    }
}

impl EventState for Both {
    fn query(&self) -> Result<bool, GpuError> {
        let (one, other) = (self.0.query(), self.1.query());
        // An error is told when nothing writes any more.
        match (one, other) {
            (Ok(false), _) | (_, Ok(false)) => Ok(false),
            (one, other) => one.and(other),
        }
    }

    fn wait(&self) -> Result<(), GpuError> {
        let (one, other) = (self.0.wait(), self.1.wait());
        one.and(other)
    }
}
