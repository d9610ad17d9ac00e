//! Faults on request.
//!
//! One [`Faults`] belongs to a simulated NIC and all of its devices. It can be set at any time,
//! from any thread. Calls that fail have no other effect. Work requests that fail end as a real
//! one with that status does, with the queue pair in error.

use super::engine::Bell;
use super::wire::QueueNumber;
use carrack_transports::verbs::sys::bindings::ibv_wc_status;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub use crate::gpu::Which;
use crate::gpu::faults::{OrderedFault, nanos};

/// A call of libibverbs that can be told to fail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Call {
    /// `ibv_get_device_list`
    GetDeviceList,
    /// `ibv_open_device`
    OpenDevice,
    /// `ibv_query_device`
    QueryDevice,
    /// `ibv_query_port`
    QueryPort,
    /// `ibv_query_gid` and the calls for its table.
    QueryGid,
    /// `ibv_alloc_pd`
    AllocPd,
    /// `ibv_reg_mr` and its kin.
    RegMr,
    /// `ibv_reg_dmabuf_mr`
    RegDmabufMr,
    /// `ibv_create_comp_channel`
    CreateCompChannel,
    /// `ibv_create_cq`
    CreateCq,
    /// `ibv_resize_cq`
    ResizeCq,
    /// `ibv_req_notify_cq`
    ReqNotifyCq,
    /// `ibv_poll_cq`, counted by calls; the answer is -1 for every code.
    PollCq,
    /// `ibv_create_srq`
    CreateSrq,
    /// `ibv_create_qp`
    CreateQp,
    /// `ibv_modify_qp`
    ModifyQp,
    /// `ibv_query_qp`
    QueryQp,
    /// `ibv_post_send`, counted by work requests, so that a list is taken up to the one that
    /// fails.
    PostSend,
    /// `ibv_post_recv`, counted likewise.
    PostRecv,
    /// `ibv_post_srq_recv`, counted likewise.
    PostSrqRecv,
}

/// Time at which bytes that a peer wrote become visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Visibility {
    /// The time of their arrival.
    #[default]
    AtOnce,
    /// The time when the writer's device next gives this one a completion, or reads from it: a
    /// program that polls memory waits in vain.
    WithCompletion,
    /// The time when this device next reads for a peer, or does an atomic operation: a completion
    /// does not tell that the bytes have arrived. Unless a GPU says otherwise, its owner must
    /// expect that also of bytes that its own device has read into the GPU's memory. A flush of the
    /// GPU's is [`SimulatedNic::flush`](super::SimulatedNic::flush).
    WithRead,
}

type Order<T> = Mutex<Option<OrderedFault<T>>>;

fn order<T>(slot: &Order<T>, which: Which, what: T) {
    *slot.lock() = Some(OrderedFault { which, what });
}

/// Switches for all faults of a NIC. All are off to begin with.
#[derive(Debug)]
pub struct Faults {
    calls: Mutex<HashMap<Call, Option<OrderedFault<Errno>>>>,
    sends: Order<ibv_wc_status>,
    receives: Order<ibv_wc_status>,
    overruns: Order<()>,
    held_completions: AtomicU64,
    completion_delay: AtomicU64,
    held_queues: Mutex<HashSet<(u64, QueueNumber)>>,
    held_receives: AtomicU64,
    silent_ends: AtomicBool,
    held_devices: Mutex<Vec<u64>>,
    scatter: AtomicU64,
    losses: AtomicU64,
    dice: AtomicU64,
    visibility: Mutex<(Visibility, bool)>,
    bell: Arc<Bell>,
}

impl Faults {
    pub(super) fn new(bell: Arc<Bell>) -> Self {
        Self {
            calls: Mutex::default(),
            sends: Mutex::default(),
            receives: Mutex::default(),
            overruns: Mutex::default(),
            held_completions: AtomicU64::new(0),
            completion_delay: AtomicU64::new(0),
            held_queues: Mutex::default(),
            held_receives: AtomicU64::new(0),
            silent_ends: AtomicBool::new(false),
            held_devices: Mutex::default(),
            scatter: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            dice: AtomicU64::new(0x2545_f491_4f6c_dd1d),
            visibility: Mutex::default(),
            bell,
        }
    }

    /// Makes calls fail with this `errno`. Replaces an earlier order for this call.
    pub fn fail_call(&self, call: Call, which: Which, errno: i32) {
        let what = Errno::from_raw_os_error(errno);
        self.calls.lock().insert(call, Some(OrderedFault { which, what }));
    }

    /// Makes calls work again.
    pub fn heal_call(&self, call: Call) {
        self.calls.lock().remove(&call);
    }

    /// Makes send work requests end with this status, reads, writes and atomic operations
    /// included. They are counted in the order in which the NIC processes them, and are not
    /// carried out.
    pub fn fail_sends(&self, which: Which, status: ibv_wc_status) {
        order(&self.sends, which, status);
    }

    /// Makes receives that a message has come for end with this status. The sender's request ends
    /// with `IBV_WC_REM_OP_ERR`.
    pub fn fail_receives(&self, which: Which, status: ibv_wc_status) {
        order(&self.receives, which, status);
    }

    /// Makes the completion find its queue full, whatever room there is.
    pub fn overrun(&self, which: Which) {
        order(&self.overruns, which, ());
    }

    /// Loses one in `one_in` packets of connections on its way in, at random, answers included. 0
    /// ends it.
    pub fn lose_packets(&self, one_in: u32) {
        self.losses.store(u64::from(one_in), Ordering::SeqCst);
    }

    /// Ends the failures of work requests.
    pub fn heal_work(&self) {
        for slot in [&self.sends, &self.receives] {
            *slot.lock() = None;
        }
        *self.overruns.lock() = None;
    }

    /// Hides completions until the guard is dropped. The work itself is done.
    #[must_use = "completions show when the guard is dropped"]
    pub fn hold_completions(self: &Arc<Self>) -> HeldWork {
        self.held_completions.fetch_add(1, Ordering::SeqCst);
        HeldWork { faults: Arc::clone(self), what: Standing::Completions }
    }

    /// Keeps all queue pairs of a device from sending requests until the guard is dropped. They
    /// still receive from peers. The device is named by its number in the list of devices.
    #[must_use = "queue pairs go on when the guard is dropped"]
    pub fn hold_device(self: &Arc<Self>, device: usize) -> HeldWork {
        self.held_devices.lock().push(device as u64);
        HeldWork { faults: Arc::clone(self), what: Standing::Device(device as u64) }
    }

    /// Delays the visibility of completions by this time.
    pub fn delay_completions(&self, delay: Duration) {
        self.completion_delay.store(nanos(delay), Ordering::SeqCst);
    }

    /// Keeps one queue pair of a device from sending requests until the guard is dropped, while
    /// others send. So work that was posted to it first is carried out last. The device is named
    /// by its number in the list of devices.
    #[must_use = "the queue pair goes on when the guard is dropped"]
    pub fn hold_queue_pair(self: &Arc<Self>, device: usize, number: u32) -> HeldWork {
        let queue = (device as u64, QueueNumber(number));
        self.held_queues.lock().insert(queue);
        HeldWork { faults: Arc::clone(self), what: Standing::QueuePair(queue) }
    }

    /// Simulates failing queue pairs that were taking a message in. Each has a receive of its
    /// shared queue, which comes back when the guard is dropped. Only then the event of its last
    /// receive follows (`IBV_EVENT_QP_LAST_WQE_REACHED`). A queue pair that is destroyed before
    /// loses the receive.
    #[must_use = "receives come back when the guard is dropped"]
    pub fn hold_last_receives(self: &Arc<Self>) -> HeldWork {
        self.held_receives.fetch_add(1, Ordering::SeqCst);
        HeldWork { faults: Arc::clone(self), what: Standing::LastReceives }
    }

    /// Makes queue pairs fail without the event of their last receive, as with some drivers.
    pub fn leave_out_last_receives(&self, on: bool) {
        self.silent_ends.store(on, Ordering::SeqCst);
    }

    /// Delays each queue pair's new work by up to this time, at random, so that queue pairs
    /// overtake each other. Zero ends it.
    pub fn scatter_queue_pairs(&self, longest: Duration) {
        self.scatter.store(nanos(longest), Ordering::SeqCst);
        self.bell.ring();
    }

    /// Sets the visibility of peers' writes: in memory of GPUs only, or in all.
    pub fn write_visibility(&self, visibility: Visibility, gpus_only: bool) {
        *self.visibility.lock() = (visibility, gpus_only);
        self.bell.ring_for_all();
    }

    pub(super) fn check(&self, call: Call) -> Result<(), Errno> {
        let mut calls = self.calls.lock();
        if calls.is_empty() {
            return Ok(());
        }
        calls.get_mut(&call).and_then(OrderedFault::next).map_or(Ok(()), Err)
    }

    pub(super) fn next_send(&self) -> Option<ibv_wc_status> {
        OrderedFault::next(&mut self.sends.lock())
    }

    pub(super) fn next_receive(&self) -> Option<ibv_wc_status> {
        OrderedFault::next(&mut self.receives.lock())
    }

    pub(super) fn overruns(&self) -> bool {
        OrderedFault::next(&mut self.overruns.lock()).is_some()
    }

    pub(super) fn holds_completions(&self) -> bool {
        self.held_completions.load(Ordering::SeqCst) > 0
    }

    pub(super) fn completion_delay(&self) -> Duration {
        Duration::from_nanos(self.completion_delay.load(Ordering::SeqCst))
    }

    pub(super) fn holds_queue(&self, device: usize, number: QueueNumber) -> bool {
        self.held_devices.lock().contains(&(device as u64))
            || self.held_queues.lock().contains(&(device as u64, number))
    }

    pub(super) fn holds_last_receives(&self) -> bool {
        self.held_receives.load(Ordering::SeqCst) > 0
    }

    pub(super) fn tells_of_last_receives(&self) -> bool {
        !self.silent_ends.load(Ordering::SeqCst)
    }

    /// Returns the time for which a queue pair waits before its work.
    pub(super) fn next_scatter(&self) -> Duration {
        let longest = self.scatter.load(Ordering::SeqCst);
        Duration::from_nanos(self.throw().checked_rem(longest).unwrap_or(0))
    }

    pub(super) fn loses_packet(&self) -> bool {
        let one_in = self.losses.load(Ordering::Relaxed);
        one_in != 0 && self.throw().is_multiple_of(one_in)
    }

    /// Returns a random number: xorshift, the same in every run as far as threads permit.
    fn throw(&self) -> u64 {
        let mut dice = self.dice.load(Ordering::Relaxed);
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        self.dice.store(dice, Ordering::Relaxed);
        dice
    }

    pub(super) fn visibility(&self, of_a_gpu: bool) -> Visibility {
        let (visibility, gpus_only) = *self.visibility.lock();
        if gpus_only && !of_a_gpu { Visibility::AtOnce } else { visibility }
    }
}

/// Guard that holds completions, requests or last receives back while it lives.
#[derive(Debug)]
pub struct HeldWork {
    faults: Arc<Faults>,
    what: Standing,
}

/// Part of the device that is held back.
#[derive(Debug)]
enum Standing {
    Completions,
    /// One queue pair of a device.
    QueuePair((u64, QueueNumber)),
    /// All queue pairs of a device.
    Device(u64),
    LastReceives,
}

impl Drop for HeldWork {
    fn drop(&mut self) {
        match &self.what {
            Standing::QueuePair(queue) => {
                self.faults.held_queues.lock().remove(queue);
            }
            Standing::Device(device) => {
                let mut held = self.faults.held_devices.lock();
                if let Some(at) = held.iter().position(|other| other == device) {
                    held.swap_remove(at);
                }
            }
            Standing::Completions => {
                self.faults.held_completions.fetch_sub(1, Ordering::SeqCst);
            }
            Standing::LastReceives => {
                self.faults.held_receives.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.faults.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_from_now_fails_and_no_other() {
        let faults = Faults::new(Arc::new(Bell::new().unwrap()));
        faults.fail_call(Call::RegMr, Which::Nth(3), libc::ENOMEM);
        let failed: Vec<bool> = (0..5).map(|_| faults.check(Call::RegMr).is_err()).collect();
        assert_eq!(failed, [false, false, true, false, false]);
        faults.fail_call(Call::CreateQp, Which::All, libc::EAGAIN);
        assert!((0..3).all(|_| faults.check(Call::CreateQp) == Err(Errno::AGAIN)));
        assert!(faults.check(Call::RegMr).is_ok());
        faults.heal_call(Call::CreateQp);
        assert!(faults.check(Call::CreateQp).is_ok());
        faults.fail_sends(Which::Nth(0), 12);
        assert_eq!((faults.next_send(), faults.next_send()), (None, None));
    }
}
