//! Unsolicited arrivals: active messages and notifications, counted by sender.

use super::script::{Plan, Script, StepKind, Tally};
use crate::words::wrong;
use carrack::{Handler, RemoteComp, Runtime, Status};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// In the tag of an active message: it says how many of this rank's messages have arrived there.
pub const ACK: u64 = 1 << 61;
/// In the tag of an active message: all operations of its sender have ended.
pub const DONE: u64 = 1 << 60;

#[derive(Clone, Copy, Default, Debug)]
pub struct Arrivals {
    pub tally: Tally,
    /// Arrivals of this rank's messages that the peer has acknowledged.
    pub acked: u64,
    pub done: bool,
}

/// Arrivals of one lane.
pub struct Inbox {
    peers: Vec<Mutex<Arrivals>>,
    /// Counts all arrivals.
    pub activity: AtomicU64,
    pub am: RemoteComp,
    pub notification: RemoteComp,
}

impl Inbox {
    pub fn register(runtime: &Runtime, plan: Plan, lane: u32) -> Arc<Self> {
        let me = runtime.rank().0;
        let reserved = runtime.reserve_comps(2).unwrap();
        let inbox = Arc::new(Self {
            peers: (0..runtime.size()).map(|_| Mutex::default()).collect(),
            activity: AtomicU64::new(0),
            am: reserved,
            notification: RemoteComp(reserved.0 + 1),
        });
        let scripts: Vec<_> =
            (0..runtime.size()).map(|from| Script::new(plan, from, me, lane)).collect();
        let here = inbox.clone();
        let script = move |status: &Status| scripts[status.rank.0 as usize];
        let message = Handler::new(move |status| here.message(&script(&status), &status));
        runtime.register_comp_at(inbox.am, &message).unwrap();
        let here = inbox.clone();
        let notification = Handler::new(move |status| here.note(status.rank.0, status.tag.0));
        runtime.register_comp_at(inbox.notification, &notification).unwrap();
        inbox
    }

    fn message(&self, script: &Script, status: &Status) {
        let tag = status.tag.0;
        if tag & (ACK | DONE) == 0 {
            let step = script.step(tag);
            checked(|| {
                assert_eq!((step.kind, step.size), (StepKind::Am, status.size), "{status:?}");
                assert!(status.error.is_none(), "{status:?}");
                assert_eq!(wrong(status.bytes().unwrap(), step.salt, 0), None, "{step:?}");
            });
            return self.note(status.rank.0, tag);
        }
        let mut peer = self.peers[status.rank.0 as usize].lock();
        match tag & ACK {
            0 => peer.done = true,
            _ => peer.acked = peer.acked.max(tag & !ACK),
        }
        drop(peer);
        self.activity.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a message has arrived.
    pub fn note(&self, from: u32, tag: u64) {
        self.peers[from as usize].lock().tally.note(tag);
        self.activity.fetch_add(1, Ordering::Relaxed);
    }

    pub fn from(&self, rank: u32) -> Arrivals {
        *self.peers[rank as usize].lock()
    }
}

/// Ends the process if the check fails: the runtime catches a panic in a handler.
fn checked(check: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err() {
        std::process::exit(101);
    }
}
