//! Faults on request, and counts of driver calls.
//!
//! One [`Faults`] belongs to a driver and all of its devices; it can be set at any time, from any
//! thread.

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

/// Counts of driver calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Copies taken (those refused at submit are not counted).
    pub copies: u64,
    /// Calls that gave several copies together, which `copies` does not count.
    pub batches: u64,
    /// Allocations made.
    pub allocs: u64,
    /// Allocations freed.
    pub frees: u64,
    /// Handles exported.
    pub exports: u64,
    /// Handles opened, the second opening of one handle included.
    pub opens: u64,
    /// Opened regions dropped.
    pub closes: u64,
    /// Mappings of other processes' memory made; fewer than `opens` if a handle was opened twice.
    pub maps: u64,
    /// Mappings of other processes' memory removed.
    pub unmaps: u64,
    /// Calls of [`Driver::classify`](carrack_transports::gpu::Driver::classify).
    pub classifies: u64,
    /// Calls of [`Driver::buffer_id`](carrack_transports::gpu::Driver::buffer_id).
    pub buffer_ids: u64,
    /// Kernels launched.
    pub launches: u64,
    /// Copies taken from a device to host memory that is not known to be pinned: a real driver's
    /// call waits for these.
    pub to_pageable: u64,
    /// Allocations of pinned host memory made, which `allocs` does not count.
    pub pinned: u64,
    /// Allocations of pinned host memory freed.
    pub unpinned: u64,
    /// Ranges exported to NICs as dma-bufs.
    pub dmabufs: u64,
    /// Flushes of NICs' writes.
    pub flushes: u64,
    /// Launches of resident copier kernels; `launches` are the program's.
    pub copier_launches: u64,
    /// Copies that were given to these kernels, which `copies` does not count.
    pub copier_copies: u64,
    /// Ranges of addresses reserved.
    pub reservations: u64,
    /// Ranges of addresses released.
    pub releases: u64,
}

macro_rules! counts {
    ($($name:ident),*) => {
        #[derive(Debug, Default)]
        pub(super) struct Counts { $(pub(super) $name: AtomicU64),* }

        impl Counts {
            fn read(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counts!(
    copies,
    batches,
    allocs,
    frees,
    exports,
    opens,
    closes,
    maps,
    unmaps,
    classifies,
    buffer_ids,
    launches,
    pinned,
    unpinned,
    to_pageable,
    dmabufs,
    flushes,
    copier_launches,
    copier_copies,
    reservations,
    releases
);

/// Adds one.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[derive(Debug, Clone, Copy)]
struct CopyFault {
    at: FailAt,
    which: Which,
    code: i32,
}

/// Switches for all faults of a driver. All are off to begin with.
#[derive(Debug, Default)]
pub struct Faults {
    reuse_addresses: AtomicBool,
    null_context: AtomicBool,
    all_waits: AtomicBool,
    refused: Mutex<HashSet<HandleForm>>,
    open: Mutex<Option<i32>>,
    no_pinned: AtomicBool,
    no_contexts: AtomicBool,
    no_dmabufs: AtomicBool,
    no_reservations: AtomicBool,
    none_across: AtomicBool,
    readers_write: AtomicBool,
    udmabufs: AtomicBool,
    remote_writes: Mutex<Option<RemoteWrites>>,
    copies: Mutex<Option<CopyFault>>,
    copy_delay: AtomicU64,
    launch_delay: AtomicU64,
    apart: Mutex<HashSet<(GpuUuid, GpuUuid)>>,
    hidden: Mutex<HashSet<GpuUuid>>,
    held: Mutex<u64>,
    released: Condvar,
    no_copiers: AtomicBool,
    sharer: Mutex<Option<i32>>,
    stalled_copiers: AtomicBool,
    lost_copiers: AtomicBool,
    pub(super) counts: Counts,
}

impl Faults {
    /// Gives the next allocation the address of the one freed last, if it fits, under a new buffer
    /// id. Off, addresses are reused as late as possible.
    pub fn reuse_addresses(&self, on: bool) {
        self.reuse_addresses.store(on, Ordering::SeqCst);
    }

    /// Makes `classify` report no context for plain memory either, as for VMM and pool memory.
    pub fn null_context(&self, on: bool) {
        self.null_context.store(on, Ordering::SeqCst);
    }

    /// Lets streams wait beyond the bound, as the driver does and the library never does: for
    /// tests of the device's behaviour then.
    pub fn take_all_waits(&self, on: bool) {
        self.all_waits.store(on, Ordering::SeqCst);
    }

    pub(super) fn takes_all_waits(&self) -> bool {
        self.all_waits.load(Ordering::SeqCst)
    }

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

    /// Makes allocations of pinned memory fail.
    pub fn refuse_pinned(&self, on: bool) {
        self.no_pinned.store(on, Ordering::SeqCst);
    }

    /// Makes exports of dma-bufs fail.
    pub fn refuse_dmabufs(&self, on: bool) {
        self.no_dmabufs.store(on, Ordering::SeqCst);
    }

    /// Makes allocations at chosen addresses fail, as with a driver that is too old.
    pub fn refuse_reservations(&self, on: bool) {
        self.no_reservations.store(on, Ordering::SeqCst);
    }

    pub(super) fn refuses_reservations(&self) -> bool {
        self.no_reservations.load(Ordering::SeqCst)
    }

    /// Makes copies fail that cross from one device's memory into another's behind it, as with a
    /// driver that does not support them.
    pub fn refuse_copies_across(&self, on: bool) {
        self.none_across.store(on, Ordering::SeqCst);
    }

    pub(super) fn refuses_copies_across(&self) -> bool {
        self.none_across.load(Ordering::SeqCst)
    }

    /// Makes devices write where they were given read-only access, as an attempt would show.
    /// Rights are recorded here, but not enforced: kernels are closures, and copies name the
    /// owner.
    pub fn let_readers_write(&self, on: bool) {
        self.readers_write.store(on, Ordering::SeqCst);
    }

    /// Returns the reason why there is no read-only access, if there is none.
    pub(super) fn lets_readers_write(&self) -> Option<&'static str> {
        self.readers_write
            .load(Ordering::SeqCst)
            .then_some("it writes there all the same, as was ordered")
    }

    /// Exports a device's memory as real dma-bufs of the kernel's (`/dev/udmabuf`), for NICs that
    /// are not simulated here. Off, the memfd stands for one, for those that are.
    pub fn lend_udmabufs(&self, on: bool) {
        self.udmabufs.store(on, Ordering::SeqCst);
    }

    pub(super) fn lends_udmabufs(&self) -> bool {
        self.udmabufs.load(Ordering::SeqCst)
    }

    pub(super) fn refuses_dmabufs(&self) -> bool {
        self.no_dmabufs.load(Ordering::SeqCst)
    }

    /// Sets the devices' answer about the visibility of a NIC's writes, which is `InOrder` by
    /// default. For NICs that hold writes back; the devices themselves hold none back.
    pub fn order_remote_writes(&self, when: RemoteWrites) {
        *self.remote_writes.lock() = Some(when);
    }

    pub(super) fn remote_writes(&self) -> RemoteWrites {
        self.remote_writes.lock().clone().unwrap_or(RemoteWrites::InOrder)
    }

    /// Makes `check` report that the contexts of all devices are gone.
    pub fn lose_contexts(&self, on: bool) {
        self.no_contexts.store(on, Ordering::SeqCst);
    }

    /// Makes copies fail with `code` (700 is an illegal address, 719 a failed launch). Replaces
    /// earlier orders. Every copy of all of the driver's devices counts, those of `Region::read`
    /// and `write` included. The failure belongs to the copy: later ones work, unless they are
    /// selected, too.
    pub fn fail_copies(&self, at: FailAt, which: Which, code: i32) {
        *self.copies.lock() = Some(CopyFault { at, which, code });
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
    pub fn hold_copies(self: &Arc<Self>) -> Held {
        *self.held.lock() += 1;
        Held(Arc::clone(self))
    }

    /// Refuses resident copiers on all devices, from their first copy on.
    pub fn refuse_copiers(&self, on: bool) {
        self.no_copiers.store(on, Ordering::SeqCst);
    }

    /// Simulates a process of this number that wants copiers on all devices, too, which is found
    /// when a kernel is launched. `None` ends it; copiers refused meanwhile stay refused.
    pub fn share_copiers(&self, with: Option<i32>) {
        *self.sharer.lock() = with;
    }

    pub(super) fn shares_copiers(&self) -> Option<i32> {
        *self.sharer.lock()
    }

    /// Keeps launched kernels of resident copiers from beginning, as behind one of the program's
    /// that fills the device.
    pub fn stall_copiers(&self, on: bool) {
        self.stalled_copiers.store(on, Ordering::SeqCst);
    }

    /// Makes the kernels of resident copiers end without a word when they are given a copy, as
    /// when a device is lost.
    pub fn lose_copiers(&self, on: bool) {
        self.lost_copiers.store(on, Ordering::SeqCst);
    }

    pub(super) fn refuses_copiers(&self) -> bool {
        self.no_copiers.load(Ordering::SeqCst)
    }

    pub(super) fn stalls_copiers(&self) -> bool {
        self.stalled_copiers.load(Ordering::SeqCst)
    }

    pub(super) fn loses_copiers(&self) -> bool {
        self.lost_copiers.load(Ordering::SeqCst)
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

    /// Hides the owner of a device's memory, as for a device that the process cannot see: a
    /// library of the program's may have opened such memory.
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

    pub(super) fn reuses_addresses(&self) -> bool {
        self.reuse_addresses.load(Ordering::SeqCst)
    }

    pub(super) fn nulls_context(&self) -> bool {
        self.null_context.load(Ordering::SeqCst)
    }

    pub(super) fn refuses_export(&self, form: HandleForm) -> bool {
        self.refused.lock().contains(&form)
    }

    pub(super) fn has_lost_contexts(&self) -> bool {
        self.no_contexts.load(Ordering::SeqCst)
    }

    pub(super) fn refuses_pinned(&self) -> bool {
        self.no_pinned.load(Ordering::SeqCst)
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
        let mut ordered = self.copies.lock();
        let CopyFault { at, which, code } = (*ordered)?;
        match which {
            Which::All => {}
            Which::Nth(1) => *ordered = None,
            Which::Nth(0) => {
                *ordered = None;
                return None;
            }
            Which::Nth(more) => {
                *ordered = Some(CopyFault { at, which: Which::Nth(more - 1), code });
                return None;
            }
        }
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
pub struct Held(Arc<Faults>);

impl Drop for Held {
    fn drop(&mut self) {
        *self.0.held.lock() -= 1;
        self.0.released.notify_all();
    }
}

fn pair(one: GpuUuid, other: GpuUuid) -> (GpuUuid, GpuUuid) {
    (one.min(other), one.max(other))
}

fn nanos(delay: Duration) -> u64 {
    u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_copy_from_now_fails_and_no_other() {
        let faults = Faults::default();
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
        let faults = Faults::default();
        faults.refuse_peer(other, one, true);
        assert!(faults.are_apart(one, other) && faults.are_apart(other, one));
        faults.refuse_peer(one, other, false);
        assert!(!faults.are_apart(other, one));
    }
}
