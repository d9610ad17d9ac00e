//! Memory at addresses that were reserved for it, as by the VMM calls.
//!
//! The addresses are one device's window's, the memory there may be any device's.

use super::alloc::{Parts, room};
use super::error::{INVALID_VALUE, NOT_SUPPORTED, error};
use super::faults::count;
use super::lock;
use super::memory::{Alias, GRANULE, create};
use super::shared::Shared;
use super::table::{Entry, Origin};
use crate::gpu::{GpuError, Reservation};
use crate::mem::{GpuUuid, MemKind, Region};
use std::sync::Arc;

/// Reserved addresses; given back when this is dropped.
struct Reserved {
    shared: Arc<Shared>,
    /// The device in whose window they are.
    window: usize,
    base: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        lock(&self.shared.table).release(self.base);
        count(&self.shared.faults.counts.releases);
    }
}

/// A piece of memory there: it goes before its addresses do. Unmapping waits for nothing, so it is never put off.
struct Piece {
    shared: Arc<Shared>,
    base: usize,
    _addresses: Reservation,
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.shared.free(self.base, false);
    }
}

impl Shared {
    /// What lengths and places are multiples of.
    pub(super) fn granularity(&self) -> Result<usize, GpuError> {
        if self.faults.refuses_reservations() {
            let hint = "memory at chosen addresses was ordered to be refused";
            return Err(error("granularity", NOT_SUPPORTED, hint));
        }
        Ok(GRANULE)
    }

    /// Reserves addresses in a device's window.
    pub(super) fn reserve(self: &Arc<Self>, ordinal: usize, len: usize) -> Result<Reservation, GpuError> {
        let granule = self.granularity()?;
        let span = len.checked_next_multiple_of(granule).filter(|span| *span > 0);
        let span = span.ok_or_else(|| {
            error("reserve", INVALID_VALUE, format!("{len} addresses are none, or too many"))
        })?;
        let mut table = lock(&self.table);
        let base = table.room("reserve", ordinal, span, false)?;
        table.reserve(ordinal, base, span);
        drop(table);
        count(&self.faults.counts.reservations);
        let own = Reserved { shared: Arc::clone(self), window: ordinal, base };
        Ok(Reservation::new(base, span, Arc::new(own)))
    }

    /// Allocates memory of a device at reserved addresses.
    pub(super) fn allocate_at(
        self: &Arc<Self>,
        ordinal: usize,
        reservation: &Reservation,
        (offset, len): (usize, usize),
        access: &[GpuUuid],
    ) -> Result<Region, GpuError> {
        const CALL: &str = "allocate_at";
        let device = self.device(CALL, ordinal)?;
        let granule = self.granularity()?;
        let wrong = |what: &str| {
            error(CALL, INVALID_VALUE, format!("{len} bytes at {offset} of {reservation:?} {what}"))
        };
        let own = reservation.own::<Reserved>().filter(|own| Arc::ptr_eq(&own.shared, self));
        let own = own.ok_or_else(|| wrong("are at addresses of another driver"))?;
        if len == 0 || !len.is_multiple_of(granule) || !offset.is_multiple_of(granule) {
            return Err(wrong(&format!("are no multiples of {granule}, or none")));
        }
        let base = reservation.place(offset, len).ok_or_else(|| wrong("are not inside"))?;
        for uuid in access {
            self.reaches(CALL, self.ordinal(CALL, *uuid)?, device.info.uuid)?;
        }
        device.waits.catch_up();
        let mut table = lock(&self.table);
        if !table.is_empty(base, len) {
            return Err(wrong("are where other memory lies"));
        }
        let span = room(CALL, device, &table, ordinal, len)?;
        let fd = create(CALL, span)?;
        let alias = Arc::new(Alias::map(CALL, span, &fd)?);
        let (id, kind, window) = (self.fresh_id(), MemKind::Device(device.info.uuid), own.window);
        self.device(CALL, window)?.window.map(CALL, base, span, &fd)?;
        let origin = Origin::Shareable(fd);
        table.insert(base, Entry { len, span, ordinal, window, kind, id, context: None, alias, origin });
        drop(table);
        count(&self.faults.counts.allocs);
        let piece = Piece { shared: Arc::clone(self), base, _addresses: reservation.clone() };
        self.region(Parts { ordinal, window, base, len, kind, id }, Box::new(piece))
    }
}
