//! Faults on request, and counts of driver calls.
//!
//! One [`GpuFaults`] belongs to a driver and all of its devices; it can be set at any time, from
//! any thread.

use super::error::error;
use carrack_transports::gpu::{GpuError, HandleForm, RemoteWrites};
use carrack_transports::mem::GpuUuid;
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Point at which an ordered failure of a copy shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailAt {
    /// [`Gpu::copy`](crate::gpu::Gpu::copy) itself fails.
    Submit,
    /// The copy is taken; its event reports the failure, and no byte is moved.
    Event,
}

/// Selection of the copies that fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// The n-th from now, counted from 1, and only that one. 0 is none.
    Nth(u64),
    /// All from now on.
    All,
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of driver calls.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Counters { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Debug, Default)]
        pub(super) struct Counts { $(pub(super) $name: AtomicU64,)* }

        impl Counts {
            fn read(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counts! {
    /// Copies taken (those refused at submit are not counted).
    copies,
    /// Calls that gave several copies together, which `copies` does not count.
    batches,
    /// Allocations made.
    allocs,
    /// Allocations freed.
    frees,
    /// Handles exported.
    exports,
    /// Handles opened, the second opening of one handle included.
    opens,
    /// Opened regions dropped.
    closes,
    /// Mappings of other processes' memory made; fewer than `opens` if a handle was opened twice.
    maps,
    /// Mappings of other processes' memory removed.
    unmaps,
    /// Calls of [`Driver::classify`](carrack_transports::gpu::Driver::classify).
    classifies,
    /// Calls of [`Driver::buffer_id`](carrack_transports::gpu::Driver::buffer_id).
    buffer_ids,
    /// Kernels launched.
    launches,
    /// Copies taken from a device to host memory that is not known to be pinned: a real driver's
    /// call waits for these.
    to_pageable,
    /// Allocations of pinned host memory made, which `allocs` does not count.
    pinned,
    /// Allocations of pinned host memory freed.
    unpinned,
    /// Ranges exported to NICs as dma-bufs.
    dmabufs,
    /// Flushes of NICs' writes.
    flushes,
    /// Launches of resident copier kernels; `launches` are the program's.
    copier_launches,
    /// Copies that were given to these kernels, which `copies` does not count.
    copier_copies,
    /// Ranges of addresses reserved.
    reservations,
    /// Ranges of addresses released.
    releases,
}

/// Adds one.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// An ordered fault, and the calls before it.
#[derive(Debug)]
pub(crate) struct OrderedFault<T> {
    pub(crate) which: Which,
    pub(crate) what: T,
}

impl<T: Copy> OrderedFault<T> {
    /// Counts one down. Returns the fault if its turn has come.
    pub(crate) fn next(slot: &mut Option<Self>) -> Option<T> {
        let ordered = slot.as_mut()?;
        let what = ordered.what;
        match ordered.which {
            Which::All => return Some(what),
            Which::Nth(0 | 1) => {}
            Which::Nth(more) => {
                ordered.which = Which::Nth(more - 1);
                return None;
            }
        }
        let now = matches!(ordered.which, Which::Nth(1));
        *slot = None;
        now.then_some(what)
    }
}

/// Switches for all faults of a driver. All are off to begin with.
#[derive(Debug, Default)]
pub struct GpuFaults {
    switches: Switches,
    refused: Mutex<HashSet<HandleForm>>,
    open: Mutex<Option<i32>>,
    remote_writes: Mutex<Option<RemoteWrites>>,
    copies: Mutex<Option<OrderedFault<(FailAt, i32)>>>,
    copy_delay: AtomicU64,
    launch_delay: AtomicU64,
    apart: Mutex<HashSet<(GpuUuid, GpuUuid)>>,
    hidden: Mutex<HashSet<GpuUuid>>,
    held: Mutex<u64>,
    released: Condvar,
    sharer: Mutex<Option<i32>>,
    pub(super) counts: Counts,
}

/// Faults that are on or off: the call that sets one, and the call that asks for it.
macro_rules! switches {
    ($($(#[$doc:meta])* $set:ident, $is_on:ident;)*) => {
        #[derive(Debug, Default)]
        struct Switches { $($set: AtomicBool,)* }

        impl GpuFaults { $(
            $(#[$doc])*
            pub fn $set(&self, on: bool) {
                self.switches.$set.store(on, Ordering::SeqCst);
            }

            pub(super) fn $is_on(&self) -> bool {
                self.switches.$set.load(Ordering::SeqCst)
            }
        )* }
    };
}

switches! {
    /// Gives the next allocation the address of the one freed last, if it fits, under a new buffer
    /// id. Off, addresses are reused as late as possible.
    reuse_addresses, reuses_addresses;
    /// Makes `classify` report no context for plain memory either, as for VMM and pool memory.
    null_context, nulls_context;
    /// Lets streams wait beyond the bound, as the driver does and the library never does: for
    /// tests of the device's behaviour then.
    take_all_waits, takes_all_waits;
    /// Makes allocations of pinned memory fail.
    refuse_pinned, refuses_pinned;
    /// Makes exports of dma-bufs fail.
    refuse_dmabufs, refuses_dmabufs;
    /// Makes allocations at chosen addresses fail, as with a driver that is too old.
    refuse_reservations, refuses_reservations;
    /// Makes copies fail that cross from one device's memory into another's behind it, as with a
    /// driver that does not support them.
    refuse_copies_across, refuses_copies_across;
    /// Makes devices write where they were given read-only access, as an attempt would show.
    /// Rights are recorded here, but not enforced: kernels are closures, and copies name the
    /// owner.
    let_readers_write, lets_readers_write;
    /// Exports a device's memory as real dma-bufs of the kernel's (`/dev/udmabuf`), for NICs that
    /// are not simulated here. Off, the memfd stands for one, for those that are.
    lend_udmabufs, lends_udmabufs;
    /// Makes `check` report that the contexts of all devices are gone.
    lose_contexts, has_lost_contexts;
    /// Refuses resident copiers on all devices, from their first copy on.
    refuse_copiers, refuses_copiers;
    /// Keeps launched kernels of resident copiers from beginning, as behind one of the program's
    /// that fills the device.
    stall_copiers, stalls_copiers;
    /// Makes the kernels of resident copiers end without a word when they are given a copy, as
    /// when a device is lost.
    lose_copiers, loses_copiers;
}

impl GpuFaults {
    /// Makes exports in this form fail.
    pub fn refuse_export(&self, form: HandleForm, on: bool) {
        let mut refused = self.refused.lock();
        if on {
            refused.insert(form);
        } else {
            refused.remove(&form);
        }
    }

    /// Makes opening any handle fail with this code, until `None` is set.
    pub fn fail_open(&self, code: Option<i32>) {
        *self.open.lock() = code;
    }

    /// Sets the devices' answer about the visibility of a NIC's writes, which is `InOrder` by
    /// default. For NICs that hold writes back; the devices themselves hold none back.
    pub fn order_remote_writes(&self, when: RemoteWrites) {
        *self.remote_writes.lock() = Some(when);
    }

    pub(super) fn remote_writes(&self) -> RemoteWrites {
        self.remote_writes.lock().clone().unwrap_or(RemoteWrites::InOrder)
    }

    /// Makes copies fail with `code` (700 is an illegal address, 719 a failed launch). Replaces
    /// earlier orders. Every copy of all of the driver's devices counts, those of `Region::read`
    /// and `write` included. The failure belongs to the copy: later ones work, unless they are
    /// selected, too.
    pub fn fail_copies(&self, at: FailAt, which: Which, code: i32) {
        *self.copies.lock() = Some(OrderedFault { which, what: (at, code) });
    }

    /// Ends the failures of copies.
    pub fn heal_copies(&self) {
        *self.copies.lock() = None;
    }

    /// Makes every copy submitted from now on take this much longer.
    pub fn copy_delay(&self, delay: Duration) {
        self.copy_delay.store(nanos(delay), Ordering::SeqCst);
    }

    /// Makes every kernel launched from now on start this much later.
    pub fn launch_delay(&self, delay: Duration) {
        self.launch_delay.store(nanos(delay), Ordering::SeqCst);
    }

    /// Keeps copies from ending until the guard is dropped: for tests that must see `Pending`,
    /// without a race against a delay.
    #[must_use = "copies go on when the guard is dropped"]
    pub fn hold_copies(self: &Arc<Self>) -> HeldCopies {
        *self.held.lock() += 1;
        HeldCopies(Arc::clone(self))
    }

    /// Simulates a process of this number that wants copiers on all devices, too, which is found
    /// when a kernel is launched. `None` ends it; copiers refused meanwhile stay refused.
    pub fn share_copiers(&self, with: Option<i32>) {
        *self.sharer.lock() = with;
    }

    pub(super) fn shares_copiers(&self) -> Option<i32> {
        *self.sharer.lock()
    }

    /// Returns `true` if a fault is ordered for copies that only an engine simulates.
    pub(super) fn orders_copies(&self) -> bool {
        self.copies.lock().is_some() || *self.held.lock() > 0 || !self.delay_of_copies().is_zero()
    }

    /// Takes peer access between two devices away, in both directions, or gives it back.
    pub fn refuse_peer(&self, one: GpuUuid, other: GpuUuid, refused: bool) {
        let mut apart = self.apart.lock();
        if refused {
            apart.insert(pair(one, other));
        } else {
            apart.remove(&pair(one, other));
        }
    }

    /// Hides the owner of a device's memory, as for a device that the process cannot see. A library
    /// of the program's may have opened such memory.
    pub fn hide(&self, gpu: GpuUuid, hidden: bool) {
        let mut all = self.hidden.lock();
        if hidden {
            all.insert(gpu);
        } else {
            all.remove(&gpu);
        }
    }

    /// Returns the counts of driver calls.
    pub fn counters(&self) -> Counters {
        self.counts.read()
    }

    pub(super) fn refuses_export(&self, form: HandleForm) -> bool {
        self.refused.lock().contains(&form)
    }

    pub(super) fn opening_fails(&self) -> Option<i32> {
        *self.open.lock()
    }

    pub(super) fn delay_of_copies(&self) -> Duration {
        Duration::from_nanos(self.copy_delay.load(Ordering::SeqCst))
    }

    pub(super) fn delay_of_launches(&self) -> Duration {
        Duration::from_nanos(self.launch_delay.load(Ordering::SeqCst))
    }

    pub(super) fn are_apart(&self, one: GpuUuid, other: GpuUuid) -> bool {
        self.apart.lock().contains(&pair(one, other))
    }

    pub(super) fn hides(&self, gpu: GpuUuid) -> bool {
        self.hidden.lock().contains(&gpu)
    }

    /// Counts a copy down, and returns its ordered failure, if there is one.
    pub(super) fn next_copy(&self) -> Option<(FailAt, GpuError)> {
        let (at, code) = OrderedFault::next(&mut self.copies.lock())?;
        Some((at, error("copy", code, "a failure ordered by a test")))
    }

    pub(super) fn wait_while_held(&self) {
        let mut held = self.held.lock();
        while *held > 0 {
            self.released.wait(&mut held);
        }
    }
}

/// Guard that stops copies while it lives.
#[derive(Debug)]
pub struct HeldCopies(Arc<GpuFaults>);

impl Drop for HeldCopies {
    fn drop(&mut self) {
        *self.0.held.lock() -= 1;
        self.0.released.notify_all();
    }
}

fn pair(one: GpuUuid, other: GpuUuid) -> (GpuUuid, GpuUuid) {
    (one.min(other), one.max(other))
}

/// Returns a time in nanoseconds, the longest for one that is longer.
pub(crate) fn nanos(delay: Duration) -> u64 {
    u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_copy_from_now_fails_and_no_other() {
        let faults = GpuFaults::default();
        faults.fail_copies(FailAt::Event, Which::Nth(3), 700);
        let failed: Vec<bool> = (0..5).map(|_| faults.next_copy().is_some()).collect();
        assert_eq!(failed, [false, false, true, false, false]);
        faults.fail_copies(FailAt::Submit, Which::All, 719);
        assert!(
            (0..3).all(
                |_| matches!(faults.next_copy(), Some((FailAt::Submit, why)) if why.code == 719)
            )
        );
        faults.heal_copies();
        assert!(faults.next_copy().is_none());
        faults.fail_copies(FailAt::Event, Which::Nth(0), 700);
        assert!(faults.next_copy().is_none() && faults.next_copy().is_none());
    }

    #[test]
    fn devices_are_apart_in_both_directions() {
        let (one, other) = (GpuUuid([1; 16]), GpuUuid([2; 16]));
        let faults = GpuFaults::default();
        faults.refuse_peer(other, one, true);
        assert!(faults.are_apart(one, other) && faults.are_apart(other, one));
        faults.refuse_peer(one, other, false);
        assert!(!faults.are_apart(other, one));
    }
}
