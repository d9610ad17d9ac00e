//! The words and operations that streams of the user wait for, and their release when the wait
//! cannot end any more.

use crate::comp::StreamCounterState;
use crate::matching::ReceiveName;
use crate::names::Rank;
use crate::op::{Ended, Ending, Holder, PendingOp};
use carrack_transports::gpu::Gpu;
use carrack_transports::gpu::words::GpuWords;
use carrack_transports::mem::GpuUuid;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The words of a runtime, and the counters that are made of them.
#[derive(Default)]
pub(crate) struct Streams {
    words: Mutex<Vec<(GpuUuid, Arc<GpuWords>)>>,
    /// Checked when a rank ends, this one included.
    counters: Mutex<Vec<Weak<StreamCounterState>>>,
    /// Operations that have waited for events, to tell them apart.
    numbers: AtomicU64,
    /// The names of receives that have a number, once they were posted.
    names: Mutex<HashMap<u64, Option<ReceiveName>>>,
}

impl Streams {
    /// Returns the words for the streams of a GPU.
    pub(crate) fn words(&self, gpu: &Arc<dyn Gpu>) -> Arc<GpuWords> {
        let uuid = gpu.info().uuid;
        let mut all = self.words.lock();
        if let Some((_, words)) = all.iter().find(|(other, _)| *other == uuid) {
            return words.clone();
        }
        let words = GpuWords::of(gpu);
        all.push((uuid, words.clone()));
        words
    }

    pub(crate) fn add(&self, counter: &Arc<StreamCounterState>) {
        let mut counters = self.counters.lock();
        counters.retain(|other| other.strong_count() > 0);
        counters.push(Arc::downgrade(counter));
    }

    fn living(&self) -> Vec<Arc<StreamCounterState>> {
        self.counters.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns a number for an operation that waits, higher than those before.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Gives a receive a number, until it is forgotten.
    pub(crate) fn name(&self, number: u64) {
        self.names.lock().insert(number, None);
    }

    /// Notes the name of a posted receive, unless it has ended before.
    pub(crate) fn rename(&self, number: u64, new: Option<ReceiveName>) {
        if let Some(name) = self.names.lock().get_mut(&number) {
            *name = new;
        }
    }

    /// Returns its name since it was posted.
    pub(crate) fn renamed(&self, number: u64) -> Option<ReceiveName> {
        *self.names.lock().get(&number)?
    }

    /// Forgets the number of a receive that has ended.
    pub(crate) fn forget(&self, number: u64) {
        self.names.lock().remove(&number);
    }
}

/// The waits of streams for counters. They are no operations: streams go on when they end.
impl Holder for Streams {
    fn end(&self, why: &Ending<'_>, _: &mut Vec<Ended>) {
        for counter in self.living() {
            match *why {
                Ending::Gone(rank, _) if counter.hears_of(rank) => {
                    counter.give_up(|| why.error(rank));
                }
                Ending::Closing => counter.give_up(|| why.error(Rank::ANY)),
                Ending::Gone(..) | Ending::Down(..) | Ending::Late(..) | Ending::Closed => {}
            }
        }
    }

    fn list(&self, _: &mut dyn FnMut(PendingOp)) {}

    fn count(&self) -> usize {
        0
    }
}
