//! Completion objects of every sort, behind one interface.

use carrack::{
    AsCompletion, CompQueue, Completion, Counter, Handler, Runtime, Status, Synchronizer,
};
use parking_lot::Mutex;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sort {
    Handler,
    Queue,
    Synchronizer,
    Counter,
    User,
}

pub const SORTS: [Sort; 5] =
    [Sort::Handler, Sort::Queue, Sort::Synchronizer, Sort::Counter, Sort::User];

/// A completion object that keeps what it was told, as far as its sort does.
pub struct Sink {
    pub sort: Sort,
    object: Arc<dyn Completion>,
    source: Source,
    taken: Mutex<Vec<Status>>,
}

enum Source {
    Shared(Arc<Mutex<Vec<Status>>>),
    Queue(CompQueue),
    Synchronizer(Synchronizer),
    Counter(Counter),
}

struct User(Arc<Mutex<Vec<Status>>>);

impl Completion for User {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.0.lock().push(status);
        Ok(())
    }
}

impl AsCompletion for Sink {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}

impl Sink {
    pub fn new(sort: Sort) -> Self {
        let shared = Arc::new(Mutex::new(Vec::new()));
        let (object, source): (Arc<dyn Completion>, _) = match sort {
            Sort::Handler => {
                let into = shared.clone();
                let handler = Handler::new(move |status| into.lock().push(status));
                (handler.as_completion().clone(), Source::Shared(shared))
            }
            Sort::User => (Arc::new(User(shared.clone())), Source::Shared(shared)),
            Sort::Queue => {
                let queue = CompQueue::new(4096);
                (queue.as_completion().clone(), Source::Queue(queue))
            }
            Sort::Synchronizer => {
                let synchronizer = Synchronizer::new(1);
                (synchronizer.as_completion().clone(), Source::Synchronizer(synchronizer))
            }
            Sort::Counter => {
                let counter = Counter::new();
                (counter.as_completion().clone(), Source::Counter(counter))
            }
        };
        Self { sort, object, source, taken: Mutex::default() }
    }

    /// Creates a sink that keeps every status.
    pub fn keeping() -> Self {
        Self::new(Sort::Handler)
    }

    fn collect(&self) {
        let mut taken = self.taken.lock();
        match &self.source {
            Source::Shared(shared) => taken.append(&mut shared.lock()),
            Source::Queue(queue) => taken.extend(std::iter::from_fn(|| queue.pop())),
            Source::Synchronizer(synchronizer) => {
                taken.extend(synchronizer.take().into_iter().flatten())
            }
            Source::Counter(_) => {}
        }
    }

    /// Returns the number of its signals so far.
    pub fn count(&self) -> usize {
        self.collect();
        match &self.source {
            Source::Counter(counter) => (counter.get() + counter.failed()) as usize,
            _ => self.taken.lock().len(),
        }
    }

    /// Lets a counter begin again.
    pub fn reset(&self) {
        if let Source::Counter(counter) = &self.source {
            counter.set(0);
        }
    }

    /// Returns the number of its signals with an error.
    pub fn failed(&self) -> usize {
        self.collect();
        match &self.source {
            Source::Counter(counter) => counter.failed() as usize,
            _ => self.taken.lock().iter().filter(|status| status.error.is_some()).count(),
        }
    }

    /// Takes the statuses so far. A counter has none.
    pub fn take(&self) -> Vec<Status> {
        self.collect();
        std::mem::take(&mut *self.taken.lock())
    }

    /// Returns the only status there is, once it has come.
    #[track_caller]
    pub fn one(&self, ranks: &[Runtime]) -> Status {
        super::until(ranks, || self.count() > 0);
        let mut all = self.take();
        assert_eq!(all.len(), 1, "signalled more than once: {all:?}");
        all.pop().unwrap()
    }
}
