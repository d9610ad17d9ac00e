//! Flushes behind operations that fail with their link. A flush vouches for none that was lost.

use crate::support::nics::{fabric, nic};
use crate::support::sink::Sink;
use crate::support::{Job, OverSimulatedNic, Watchdog, built, connect, until, until_with_errors};
use carrack::bootstrap::InProcess;
use carrack::region::Region;
use carrack::transports::gpu::{EventState, GpuError, GpuEvent};
use carrack::{Counter, Handler, Mr, OpError, PostError, Rank, Runtime, Status, Tag};
use carrack_simulators::nic::{Config, SimulatedNic, Which};
use carrack_transports::verbs::VerbsOptions;
use carrack_transports::verbs::sys::bindings::IBV_WC_RETRY_EXC_ERR;
use parking_lot::Mutex;
use std::sync::Arc;

/// Two ranks with a NIC each, and memory of the second whose place the first one knows.
struct FailingJob {
    ranks: Vec<Runtime>,
    nics: Vec<Arc<SimulatedNic>>,
    memory: Mr,
}

impl FailingJob {
    /// `batch`: completions that a call of progress takes at most.
    fn new(batch: usize) -> Self {
        let fabric = fabric();
        let nics: Vec<_> = (0..2).map(|_| nic(Config::default(), &fabric)).collect();
        let settings = built(OverSimulatedNic::settings().poll_batch(batch));
        let start = |(bootstrap, nic): (InProcess, &Arc<SimulatedNic>)| {
            let options = VerbsOptions {
                packet_size: settings.packet_size(),
                receives: 32,
                ..VerbsOptions::default()
            };
            let builder = Runtime::builder().settings(settings.clone());
            let builder = builder.bootstrap(Box::new(bootstrap));
            builder.transport(Box::new(nic.transport(options))).start().unwrap()
        };
        let jobs = InProcess::job(2).unwrap();
        let ranks: Vec<_> = jobs.into_iter().zip(&nics).map(start).collect();
        connect(&ranks);
        let memory = ranks[1].register_memory(&Region::host(1 << 16)).unwrap();
        let job = Self { ranks, nics, memory };
        for _ in 0..3 {
            let counter = Counter::new();
            job.puts(&counter);
            until(&job.ranks, || counter.get() == 1);
        }
        job
    }

    fn puts(&self, comp: &impl carrack::AsCompletion) {
        let rmr = self.memory.remote_key();
        self.ranks[0].post_put(Rank(1), vec![1; 9000], &rmr, 0).comp(comp).submit().unwrap();
    }

    /// Lets the link fail with its next request, though both ranks stay up.
    fn fails(&self) {
        self.nics[0].faults().fail_sends(Which::All, IBV_WC_RETRY_EXC_ERR);
    }
}

fn is_down(status: &Status) -> bool {
    matches!(status.error.as_deref(), Some(OpError::PeerDown { rank: Rank(1), .. }))
}

#[test]
fn a_flush_over_puts_that_fail_with_their_link_fails() {
    let _watchdog = Watchdog::over("flush");
    // The puts fail in one call of progress, and the end of the link comes in another.
    for batch in [1, 2, 4, 32] {
        let job = FailingJob::new(batch);
        let (puts, flushed) = (Sink::keeping(), Sink::keeping());
        let held = job.nics[0].faults().hold_device(0);
        (0..batch.min(4)).for_each(|_| job.puts(&puts));
        assert!(job.ranks[0].post_flush(Rank(1)).comp(&flushed).try_submit().unwrap().is_posted());
        job.fails();
        drop(held);
        until_with_errors(&job.ranks, || flushed.count() == 1 && puts.count() == batch.min(4));
        assert!(puts.take().iter().all(is_down) && flushed.take().iter().all(is_down), "{batch}");
    }
}

#[test]
fn a_flush_by_the_handler_of_a_put_that_failed_fails() {
    let _watchdog = Watchdog::over("flush");
    let job = FailingJob::new(32);
    let flushes = Arc::new(Mutex::new(Vec::new()));
    let (told, zero) = (flushes.clone(), job.ranks[0].clone());
    let handler = Handler::new(move |status: Status| {
        assert!(is_down(&status), "{status:?}");
        told.lock().push(zero.post_flush(Rank(1)).comp(&Counter::new()).try_submit());
    });
    job.fails();
    job.puts(&handler);
    until_with_errors(&job.ranks, || !flushes.lock().is_empty());
    let flush = flushes.lock().pop().unwrap();
    assert!(matches!(flush, Err(PostError::PeerDown { rank: Rank(1), .. })), "{flush:?}");
}

#[derive(Debug)]
struct NeverFires;

impl EventState for NeverFires {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(false)
    }

    fn wait(&self) -> Result<(), GpuError> {
        Ok(())
    }
}

#[test]
fn a_flush_on_a_device_whose_put_had_not_begun_when_its_rank_was_lost_fails() {
    let _watchdog = Watchdog::over("flush");
    let job = FailingJob::new(32);
    let [zero, one] = &job.ranks[..] else { unreachable!("two ranks") };
    let (other, _theirs) = (zero.device().build().unwrap(), one.device().build().unwrap());
    let (puts, rmr) = (Sink::keeping(), job.memory.remote_key());
    let never = GpuEvent::new(Arc::new(NeverFires));
    let put = zero.post_put(Rank(1), vec![2; 90], &rmr, 0).device(&other).after(&never);
    put.comp(&puts).submit().unwrap();
    job.fails();
    // The default device hears of the end.
    let _ = zero.post_send(Rank(1), vec![1; 8], Tag(1)).submit();
    until_with_errors(&job.ranks, || puts.count() == 1);
    assert!(puts.take().iter().all(is_down));
    let flush = zero.post_flush(Rank(1)).device(&other).comp(&puts).try_submit();
    assert!(matches!(flush, Err(PostError::PeerDown { rank: Rank(1), .. })), "{flush:?}");
}
