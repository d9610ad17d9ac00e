//! Memory at reserved addresses, as by the VMM calls.
//!
//! The addresses belong to one device's window; the memory there may be any device's.

use super::alloc::{Placement, room};
use super::error::{INVALID_VALUE, NOT_SUPPORTED, error};
use super::faults::count;
use super::memory::{Alias, GRANULE, create};
use super::shared::Shared;
use super::table::{Allocation, Origin, Table};
use carrack_transports::gpu::{Access, GpuError, Reservation};
use carrack_transports::mem::{MemKind, Region};
use std::os::fd::AsFd;
use std::sync::Arc;

/// Reserved addresses, released when this is dropped.
struct Reserved {
    shared: Arc<Shared>,
    /// The device in whose window they are.
    window: usize,
    base: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.shared.table.lock().release(self.base);
        count(&self.shared.faults.counts.releases);
    }
}

/// A piece of memory there, allocated or opened. It is unmapped before the addresses are released.
/// Unmapping waits for no stream, so it is never put off.
pub(super) struct MappedPiece {
    shared: Arc<Shared>,
    base: usize,
    opened: bool,
    _addresses: Reservation,
}

impl Drop for MappedPiece {
    fn drop(&mut self) {
        self.shared.free(self.base, self.opened);
    }
}

impl Shared {
    /// Returns the unit of lengths and offsets.
    pub(super) fn granularity(&self) -> Result<usize, GpuError> {
        if self.faults.refuses_reservations() {
            let hint = "memory at chosen addresses was ordered to be refused";
            return Err(error("granularity", NOT_SUPPORTED, hint));
        }
        Ok(GRANULE)
    }

    /// Reserves addresses in a device's window.
    pub(super) fn reserve(
        self: &Arc<Self>,
        ordinal: usize,
        len: usize,
    ) -> Result<Reservation, GpuError> {
        let granule = self.granularity()?;
        let span = len.checked_next_multiple_of(granule).filter(|span| *span > 0);
        let span = span.ok_or_else(|| {
            error("reserve", INVALID_VALUE, format!("{len} addresses are none, or too many"))
        })?;
        let mut table = self.table.lock();
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
        access: &[Access],
    ) -> Result<Region, GpuError> {
        const CALL: &str = "allocate_at";
        let device = self.device(CALL, ordinal)?;
        let (window, base) = self.place_at(CALL, (reservation, offset), len)?;
        let each = Access::of_each(device.info.uuid, access)
            .map_err(|why| error(CALL, INVALID_VALUE, why))?;
        let mut allowed = Vec::with_capacity(each.len());
        for Access { gpu, rights } in each {
            let other = self.ordinal(CALL, gpu)?;
            self.reaches(CALL, other, device.info.uuid)?;
            allowed.push((other, rights));
        }
        let access = Some(allowed);
        device.waits.catch_up();
        let mut table = self.table.lock();
        check_empty(CALL, &table, base, len)?;
        let span = room(CALL, device, &table, ordinal, len)?;
        let fd = create(CALL, span)?;
        let alias = Arc::new(Alias::map(CALL, span, &fd)?);
        let (id, kind) = (self.fresh_id(), MemKind::Device(device.info.uuid));
        self.device(CALL, window)?.window.map(CALL, base, span, &fd)?;
        let origin = Origin::Shareable(fd);
        table.insert(
            base,
            Allocation {
                len,
                span,
                ordinal,
                window,
                kind,
                id,
                context: None,
                alias,
                origin,
                access,
            },
        );
        drop(table);
        count(&self.faults.counts.allocs);
        let piece = MappedPiece {
            shared: Arc::clone(self),
            base,
            opened: false,
            _addresses: reservation.clone(),
        };
        self.region(Placement { ordinal, window, base, len, kind, id }, Box::new(piece))
    }

    /// Maps another process's memory at reserved addresses.
    pub(super) fn adopt_at(
        self: &Arc<Self>,
        ordinal: usize,
        place: (&Reservation, usize),
        len: usize,
        fd: impl AsFd,
    ) -> Result<(Placement, MappedPiece), GpuError> {
        const CALL: &str = "open_at";
        let device = self.device(CALL, ordinal)?;
        let (window, base) = self.place_at(CALL, place, len)?;
        let mut table = self.table.lock();
        check_empty(CALL, &table, base, len)?;
        let alias = Arc::new(Alias::map(CALL, len, &fd)?);
        let (id, kind) = (self.fresh_id(), MemKind::Device(device.info.uuid));
        self.device(CALL, window)?.window.map(CALL, base, len, &fd)?;
        let (span, origin) = (len, Origin::Opened);
        let access = None;
        table.insert(
            base,
            Allocation {
                len,
                span,
                ordinal,
                window,
                kind,
                id,
                context: None,
                alias,
                origin,
                access,
            },
        );
        drop(table);
        count(&self.faults.counts.maps);
        let piece = MappedPiece {
            shared: Arc::clone(self),
            base,
            opened: true,
            _addresses: place.0.clone(),
        };
        Ok((Placement { ordinal, window, base, len, kind, id }, piece))
    }

    /// Returns the place of a piece of a reservation: the device in whose window it lies, and its
    /// address.
    fn place_at(
        self: &Arc<Self>,
        call: &'static str,
        (reservation, offset): (&Reservation, usize),
        len: usize,
    ) -> Result<(usize, usize), GpuError> {
        let granule = self.granularity()?;
        let wrong = |what: &str| {
            error(call, INVALID_VALUE, format!("{len} bytes at {offset} of {reservation:?} {what}"))
        };
        let own = reservation.own::<Reserved>().filter(|own| Arc::ptr_eq(&own.shared, self));
        let own = own.ok_or_else(|| wrong("are at addresses of another driver"))?;
        if len == 0 || !len.is_multiple_of(granule) || !offset.is_multiple_of(granule) {
            return Err(wrong(&format!("are no multiples of {granule}, or none")));
        }
        let base = reservation.place(offset, len).ok_or_else(|| wrong("are not inside"))?;
        Ok((own.window, base))
    }
}

fn check_empty(call: &'static str, table: &Table, base: usize, len: usize) -> Result<(), GpuError> {
    if table.is_empty(base, len) {
        return Ok(());
    }
    Err(error(call, INVALID_VALUE, format!("{len} bytes at {base:#x} are where other memory lies")))
}
