//! Streams that wait for words: a bound on their number, and tasks that are put off until none
//! waits.
//!
//! A stream that waits takes up one of the context's connections to the device, of which the
//! driver has `CUDA_DEVICE_MAX_CONNECTIONS`. When all are taken, nothing moves any more, not even
//! the copies that would have released them. Priorities do not help (measured on driver 580). So a
//! wait beyond the bound is refused. While one stream waits, three operations block until it is
//! released: freeing memory, unlocking it, and closing another process's memory. A thread that
//! makes progress would block in them for ever. So they are put off.

use super::{GpuError, GpuEvent};
use crate::fork::Owner;
use parking_lot::{Mutex, RwLock};
use std::fmt;
use std::sync::{Arc, Weak};

/// Variable with the number of connections of a context.
pub const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Connections if the variable is not set.
const DEFAULT_CONNECTIONS: usize = 8;

/// A task that is put off.
type Task = Box<dyn FnOnce() + Send>;

/// Tasks that are put off while a stream of any context waits. Memory may be mapped in several
/// contexts, by peer access or because it is pinned for all.
#[derive(Default)]
pub struct PutOff {
    contexts: Mutex<Vec<Weak<Waits>>>,
    tasks: Mutex<Vec<Task>>,
}

/// The waits of one context.
pub struct Waits {
    /// Streams that may wait at a time.
    most: usize,
    put_off: Arc<PutOff>,
    /// The process that initialised the driver.
    owner: Owner,
    /// Streams that wait, or did at the last query, each with the event behind its last wait.
    /// Locked for writing while a wait is given to a stream, which may block; a thread that frees
    /// memory does not wait for that. Locked for reading by a thread that frees memory, so that no
    /// wait is given meanwhile.
    waiting: RwLock<Vec<(usize, GpuEvent)>>,
}

/// Forgets streams that have gone on. Failed work does not wait.
fn forget_released(waiting: &mut Vec<(usize, GpuEvent)>) {
    waiting.retain(|(_, past)| past.query() == Ok(false));
}

/// Returns the connections of a context, as the driver reads the variable when it is initialised.
pub fn connections() -> usize {
    let said = std::env::var(CONNECTIONS).ok().and_then(|text| text.trim().parse().ok());
    said.unwrap_or(DEFAULT_CONNECTIONS).clamp(1, 32)
}

impl Waits {
    /// Creates the bound for a context. Two connections are left to copies and kernels, but with
    /// two connections one stream may still wait.
    pub fn over(connections: usize, put_off: &Arc<PutOff>) -> Arc<Self> {
        let most = connections.saturating_sub(2).max(1).min(connections.saturating_sub(1));
        let (put_off, owner) = (put_off.clone(), Owner::this_process());
        let waits = Arc::new(Self { most, put_off, owner, waiting: RwLock::default() });
        let mut contexts = waits.put_off.contexts.lock();
        contexts.retain(|other| other.strong_count() > 0);
        contexts.push(Arc::downgrade(&waits));
        drop(contexts);
        waits
    }

    /// Has a stream wait: `begin` gives it the wait, and returns the event behind it. A stream
    /// counts once for any number of waits, from its first wait until it is past the last.
    ///
    /// # Errors
    /// Too many other streams wait, and `begin` was not called; or the error of `begin`.
    pub fn arm(
        &self,
        stream: usize,
        begin: impl FnOnce() -> Result<GpuEvent, GpuError>,
    ) -> Result<GpuEvent, GpuError> {
        // Held until the wait is counted, so that no operation that the wait would block begins
        // meanwhile.
        let mut waiting = self.waiting.write();
        let known = waiting.iter().position(|(other, _)| *other == stream);
        if known.is_none() && waiting.len() >= self.most {
            forget_released(&mut waiting);
            if waiting.len() >= self.most {
                return Err(self.too_many());
            }
        }
        let past = begin()?;
        match known.and_then(|at| waiting.get_mut(at)) {
            Some((_, last)) => *last = past.clone(),
            None => waiting.push((stream, past.clone())),
        }
        Ok(past)
    }

    /// Runs a task that would block while a stream waits: now, or as soon as none is found to
    /// wait. A forked child does not run it: the driver is the parent's.
    pub fn when_none(&self, task: impl FnOnce() + Send + 'static) {
        if !self.owner.is_here() {
            return;
        }
        self.put_off.catch_up();
        let mut task = Some(task);
        self.put_off.while_none_waits(&mut || task.take().into_iter().for_each(|task| task()));
        if let Some(task) = task {
            self.put_off.tasks.lock().push(Box::new(task));
        }
    }

    /// Runs the tasks that were put off, if no stream waits any more.
    pub fn catch_up(&self) {
        self.put_off.catch_up();
    }

    #[cold]
    fn too_many(&self) -> GpuError {
        let most = self.most;
        GpuError {
            call: "cuStreamWaitValue64",
            code: TOO_MANY_WAITING,
            name: "TOO_MANY_WAITING",
            hint: format!(
                "{most} other streams of this context wait already, and when all its connections \
                are taken by streams that \
                 wait nothing moves any more: let some go on first, give their work to fewer \
                 streams, or set {CONNECTIONS} \
                 to {most} + 3 or more (at most 32) before CUDA is initialised"
            ),
        }
    }
}

impl PutOff {
    /// Runs the tasks that were put off, if no stream waits any more.
    pub fn catch_up(&self) {
        if self.tasks.lock().is_empty() {
            return;
        }
        self.while_none_waits(&mut || {
            let tasks = std::mem::take(&mut *self.tasks.lock());
            for task in tasks {
                task();
            }
        });
    }

    /// Runs `work` while no stream waits. Does nothing if a stream waits, or may at this moment.
    /// Several threads may run it at once.
    fn while_none_waits(&self, work: &mut dyn FnMut()) {
        let contexts: Vec<_> = self.contexts.lock().iter().filter_map(Weak::upgrade).collect();
        let mut held = Vec::with_capacity(contexts.len());
        for context in &contexts {
            // Not waited for: another thread gives a wait to a stream at this moment.
            let Some(waiting) = context.waiting.try_read() else { return };
            if waiting.is_empty() {
                held.push(waiting);
                continue;
            }
            drop(waiting);
            let Some(mut waiting) = context.waiting.try_write() else { return };
            forget_released(&mut waiting);
            drop(waiting);
            match context.waiting.try_read() {
                Some(waiting) if waiting.is_empty() => held.push(waiting),
                _ => return,
            }
        }
        work();
    }
}

/// No code of a driver's: one more stream may not wait.
const TOO_MANY_WAITING: i32 = -4;

impl fmt::Debug for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Waits(at most {})", self.most)
    }
}

impl fmt::Debug for PutOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PutOff({})", self.tasks.lock().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::EventState;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    #[derive(Debug, Default)]
    struct FlagEvent(AtomicBool);

    impl EventState for FlagEvent {
        fn query(&self) -> Result<bool, GpuError> {
            Ok(self.0.load(Ordering::SeqCst))
        }

        fn wait(&self) -> Result<(), GpuError> {
            Ok(())
        }
    }

    fn armed(waits: &Waits, stream: usize) -> Result<Arc<FlagEvent>, GpuError> {
        let flag = Arc::new(FlagEvent::default());
        waits.arm(stream, || Ok(GpuEvent::new(flag.clone()))).map(|_| flag)
    }

    #[test]
    fn rule_a_as_many_streams_wait_as_leave_connections_to_others() {
        for (connections, most) in [(1, 0), (2, 1), (3, 1), (4, 2), (8, 6), (32, 30)] {
            let waits = Waits::over(connections, &Arc::default());
            let flags: Vec<_> = (0..most).map(|stream| armed(&waits, stream).unwrap()).collect();
            let refused = armed(&waits, 99).unwrap_err();
            assert_eq!(refused.name, "TOO_MANY_WAITING", "{connections} connections");
            assert!(refused.hint.contains(CONNECTIONS), "{refused}");
            let Some(first) = flags.first() else { continue };
            armed(&waits, 0).expect("a stream counts once");
            first.0.store(true, Ordering::SeqCst);
            assert!(armed(&waits, 99).is_err(), "it is past its first wait only");
        }
    }

    #[test]
    fn rule_b_what_would_block_is_put_off_until_no_stream_waits() {
        let (put_off, done) = (Arc::<PutOff>::default(), Arc::new(AtomicU32::new(0)));
        let (waits, another) = (Waits::over(8, &put_off), Waits::over(8, &put_off));
        let free = || {
            let done = done.clone();
            waits.when_none(move || {
                done.fetch_add(1, Ordering::SeqCst);
            });
        };
        free();
        assert_eq!(done.load(Ordering::SeqCst), 1);
        // The other in another context.
        let (one, other) = (armed(&waits, 1).unwrap(), armed(&another, 2).unwrap());
        free();
        one.0.store(true, Ordering::SeqCst);
        waits.catch_up();
        assert_eq!(done.load(Ordering::SeqCst), 1, "the other waits");
        other.0.store(true, Ordering::SeqCst);
        waits.catch_up();
        assert_eq!(done.load(Ordering::SeqCst), 2);
    }
}
