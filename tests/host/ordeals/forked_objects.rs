//! A child of a rank that drops one of each object: to the rank, and to its peer, nothing has
//! happened.

use super::fork::forked;
use crate::support::gpu_ranks::{Gpus, Kind, get, heard, holds, receive, registered, send, told};
use crate::support::ranks::{Ranks, Role};
use crate::support::sink::Sink;
use crate::support::{Job, OverShm, OverSimulatedNic, Watchdog, pattern, sent, until};
use carrack::alloc::{Scope, SharedDeviceAllocator};
use carrack::region::{Mr, Region};
use carrack::transports::gpu::{GpuEvent, Stream};
use carrack::{
    AsCompletion, Buffer, CollectiveError, CompQueue, Counter, Handler, Outcome, PostError, Rank,
    RemoteComp, RemoteKey, Runtime, Status, StreamCounter, Tag, UserContext,
};
use carrack_simulators::gpu::HeldCopies;
use carrack_simulators::nic::FABRIC_VARIABLE;
use parking_lot::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

const SHM: u64 = 0;
const NIC: u64 = 1;
/// States of a stream and an engine of the rank's GPU: running or held.
const FREE: u64 = 0;
const WAIT: u64 = 1;

#[test]
fn a_child_that_drops_one_of_each_object_does_its_parent_no_harm() {
    let _watchdog = Watchdog::over("forked objects");
    let network = format!("forked-{}", std::process::id());
    // What is mapped is closed only when no stream waits.
    for (transport, streams) in [(SHM, WAIT), (SHM, FREE), (NIC, WAIT)] {
        let words = [transport, streams];
        Ranks::start_each(|_| (FABRIC_VARIABLE, &network), "ordeals::forked-objects", 2, &words)
            .succeed();
    }
}

/// Bytes of a message that lies in a chunk of its sender's while it is on loan.
const MEDIUM: usize = 4000;
/// Bytes of a message that is offered.
const LARGE: usize = 1 << 20;
/// Bytes of memory of a GPU's that a peer maps.
const MAPPED: usize = 2 << 20;

const OFFERED: Tag = Tag(1);
const AWAITED: Tag = Tag(2);
const FROM_GPU: Tag = Tag(3);
const ON_STREAM: Tag = Tag(4);

/// Names by which peers reach a rank's completion objects: the same on both ranks.
#[derive(Clone, Copy)]
struct Names {
    lent: RemoteComp,
    queued: RemoteComp,
    counted: RemoteComp,
}

pub(crate) fn rank(role: &Role) {
    let settings = match role.words[0] {
        NIC => OverSimulatedNic::settings(),
        _ => OverShm::settings(),
    };
    let gpus = Gpus::here();
    let runtime = gpus.rank(settings, Box::new(role.bootstrap()));
    let (kept, queue, count) =
        (Arc::new(Mutex::new(Vec::new())), CompQueue::new(16), Counter::new());
    let lent = {
        let kept = kept.clone();
        Handler::of_loans(move |status| kept.lock().push(status))
    };
    let names = Names {
        lent: runtime.register_comp(&lent).unwrap(),
        queued: runtime.register_comp(&queue).unwrap(),
        counted: runtime.register_comp(&count).unwrap(),
    };
    // Memory of GPUs is mapped where ranks share memory.
    let together = (role.words[0] == SHM).then(|| {
        let allocator =
            SharedDeviceAllocator::new(&runtime.world(), &gpus.all[0], Scope::Node).unwrap();
        (allocator.allocate(MAPPED).unwrap(), allocator)
    });
    if role.rank == 1 {
        return serves(role, &gpus, &runtime, names);
    }
    let objects = Objects::of(role, &gpus, &runtime, (&kept, &queue));
    let mut all = Some((objects, together, runtime, gpus, lent, kept, queue));
    let status = forked(|| drop(all.take()));
    assert_eq!(status.code(), Some(42), "the child: {status}");
    let (objects, _together, runtime, _gpus, ..) = all.unwrap();
    role.says("forked");
    objects.are_as_they_were(role, &runtime, &count);
    role.meet("over", &runtime, 0..2);
}

/// Returns which messages of rank 0 wait: one for an engine, and one for a stream. Over a NIC the
/// second would have to wait behind the first, and be refused.
fn waiting(role: &Role) -> [bool; 2] {
    let wait = role.words[1] == WAIT;
    [wait && role.words[0] == SHM, wait]
}

/// A collective that has told the other ranks, and has not heard of them.
type Barrier = Pin<Box<dyn Future<Output = Result<(), CollectiveError>> + Send>>;

/// One of each object, in use.
struct Objects {
    /// Simulated copies stand still while it lives.
    held: Option<HeldCopies>,
    statuses: [Status; 2],
    registered: Vec<Mr>,
    mapped: [RemoteKey; 2],
    sent: Sink,
    received: Sink,
    stream: Arc<dyn Stream>,
    counter: StreamCounter,
    past: GpuEvent,
    barrier: Barrier,
}

impl Objects {
    fn of(
        role: &Role,
        gpus: &Gpus,
        runtime: &Runtime,
        (kept, queue): (&Mutex<Vec<Status>>, &CompQueue),
    ) -> Self {
        let gpu = &gpus.all[0];
        let here = std::slice::from_ref(runtime);
        // A message on loan, and one in a packet.
        until(here, || kept.lock().len() == 1 && !queue.is_empty());
        let statuses = [kept.lock().pop().unwrap(), queue.pop().unwrap()];
        // Memory that the peer can reach, and memory of the peer's.
        let regions = [runtime.allocate(64).unwrap(), Region::host(64), gpus.plain(MAPPED)];
        let registered =
            regions.iter().map(|region| runtime.register_memory(region).unwrap()).collect();
        let mapped = ["shared", "gpu"].map(|what| told(role, what, 1));
        for rmr in &mapped {
            get(runtime, || Buffer::Vec(vec![0; 64]), rmr, 0);
        }
        role.says("mapped");
        role.told("looked", 1);
        // Operations: offered, waiting for a message, waiting for an engine, and for a stream.
        let (sent, received) = (Sink::keeping(), Sink::keeping());
        let from_gpu = Kind::Plain(0).full(gpus, MEDIUM, 3);
        let [at_engine, on_stream] = waiting(role);
        let held = gpus.fake.as_ref().filter(|_| at_engine).map(|fake| fake.faults().hold_copies());
        let (stream, counter) = (gpu.stream().unwrap(), StreamCounter::new(runtime, gpu).unwrap());
        if on_stream {
            counter.wait_on(&stream, 1).unwrap();
        }
        let past = stream.record().unwrap();
        let _posted = |call: &mut dyn FnMut() -> Result<Outcome, PostError>| {
            while call().unwrap().is_retry() {
                runtime.progress().unwrap();
            }
        };
        let to = Rank(1);
        let mut post = runtime.post_send(to, pattern(1, LARGE), OFFERED).comp(&sent);
        post.submit().unwrap();
        if at_engine {
            let mut post = runtime.post_send(to, from_gpu, FROM_GPU).comp(&sent);
            post.submit().unwrap();
        }
        if on_stream {
            let post = runtime.post_send(to, pattern(4, MEDIUM), ON_STREAM).on_stream(&stream);
            let mut post = post.comp(&sent);
            post.submit().unwrap();
        }
        let mut post = runtime.post_recv(to, vec![0; LARGE], AWAITED).comp(&received);
        post.submit().unwrap();
        // It has its place among the collectives, and its note is on its way.
        let of = runtime.clone();
        let mut barrier: Barrier = Box::pin(async move { of.world().barrier_async().await });
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(barrier.as_mut().poll(&mut context), Poll::Pending));
        for _ in 0..100 {
            runtime.progress().unwrap();
        }
        assert_eq!((sent.count(), received.count()), (0, 0));
        Self { held, statuses, registered, mapped, sent, received, stream, counter, past, barrier }
    }

    fn are_as_they_were(self, role: &Role, runtime: &Runtime, count: &Counter) {
        let here = std::slice::from_ref(runtime);
        let [at_engine, on_stream] = waiting(role).map(usize::from);
        if on_stream == 0 {
            // A thread of the simulated GPU fires the event: it may not have run yet.
            until(here, || self.past.query().unwrap());
        } else {
            assert!(!self.past.query().unwrap(), "the stream waits");
        }
        // The sender would use a chunk again that it had back.
        until(here, || count.get() == MORE);
        for (status, number) in self.statuses.iter().zip(8..) {
            assert!(status.buffer.to_vec().unwrap() == pattern(number, MEDIUM), "message {number}");
        }
        drop(self.held);
        until(here, || self.sent.count() == 1 + at_engine);
        raise(&self.counter);
        until(here, || {
            self.sent.count() == 1 + at_engine + on_stream && self.received.count() == 1
        });
        assert!(self.past.query().unwrap());
        self.stream.synchronize().unwrap();
        assert!(self.sent.take().iter().all(|status| status.error.is_none()));
        assert!(self.received.one(here).bytes().unwrap() == pattern(2, LARGE));
        runtime.block_on(self.barrier).unwrap().unwrap();
        assert_eq!(runtime.peer_down(Rank(1)), None);
        drop((self.registered, self.mapped));
    }
}

/// Messages that follow one that is on loan.
const MORE: u64 = 50;

/// Plays the other side, rank 1.
fn serves(role: &Role, gpus: &Gpus, runtime: &Runtime, names: Names) {
    let to = Rank(0);
    let here = std::slice::from_ref(runtime);
    let regions = [runtime.allocate(64).unwrap(), gpus.plain(MAPPED)];
    let mut mrs = Vec::new();
    for (what, region) in ["shared", "gpu"].into_iter().zip(&regions) {
        mrs.push(registered(role, runtime, what, region));
    }
    sent(here, || runtime.post_am(to, pattern(8, MEDIUM), names.lent).try_submit());
    sent(here, || runtime.post_am(to, pattern(9, MEDIUM), names.queued).try_submit());
    heard(role, runtime, "mapped", 0);
    let is_mapped = || runtime.invalidate_memory(regions[1].addr(), MAPPED).is_err();
    // A NIC releases the memory when its owner tells it to.
    let maps = role.words[0] == SHM;
    assert!(is_mapped() || !maps);
    role.says("looked");
    heard(role, runtime, "forked", 0);
    assert!(is_mapped() || !maps, "rank 0 has it mapped, whatever its child has dropped");
    for number in 0..MORE {
        sent(here, || {
            runtime.post_am(to, pattern(100 + number, MEDIUM), names.counted).try_submit()
        });
    }
    let received = |tag, len| receive(runtime, to, vec![0; len], tag).unwrap().ok().unwrap();
    assert!(received(OFFERED, LARGE).bytes().unwrap() == pattern(1, LARGE));
    let [at_engine, on_stream] = waiting(role);
    if at_engine {
        holds(&received(FROM_GPU, MEDIUM).buffer, MEDIUM, 3);
    }
    if on_stream {
        assert!(received(ON_STREAM, MEDIUM).bytes().unwrap() == pattern(4, MEDIUM));
    }
    send(runtime, to, pattern(2, LARGE), AWAITED).unwrap().ok().unwrap();
    runtime.barrier().unwrap();
    assert_eq!(runtime.peer_down(to), None);
    role.meet("over", runtime, 0..2);
}

fn raise(counter: &StreamCounter) {
    let (rank, tag, user_context) = (Rank(0), Tag(0), UserContext(0));
    let status = Status { rank, tag, size: 0, user_context, buffer: Buffer::Empty, error: None };
    assert!(counter.as_completion().signal(status).is_ok());
}
