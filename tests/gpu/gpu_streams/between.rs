//! Between processes.

use super::{Brake, KINDS, filled, gpus, is_past, memory, settings};
use crate::support::ranks::{Ranks, Role, die};
use crate::support::words::wrong;
use crate::support::{Watchdog, until};
use carrack::buffer::RegionSlice;
use carrack::post::Post;
use carrack::transports::gpu::{Flavour, GpuEvent, Stream};
use carrack::transports::mem::{Region, Transfer};
use carrack::{
    CompQueue, Counter, OpError, Outcome, PostError, Rank, RemoteComp, RemoteKey, Runtime, Status,
    StreamCounter, Synchronizer, Tag, UserContext,
};
use std::sync::Arc;

/// gpu.md, streams rule 8.
#[test]
fn kernels_puts_notifications_and_kernels_follow_each_other_round_a_ring_without_the_host() {
    let _watchdog = Watchdog::over("ring");
    for (ranks, kind) in [(2, 2), (3, 2), (2, 1)] {
        Ranks::start("gpu_streams::ring", ranks, &[kind, 0]).succeed();
    }
}

/// Rule d: each rank has a context of its own, and a stream that waits in one does not hold up the
/// other.
#[test]
fn rule_d_two_ranks_share_a_gpu_and_wait_for_each_other() {
    let _watchdog = Watchdog::over("one GPU");
    Ranks::start("gpu_streams::ring", 2, &[2, 1]).succeed();
}

#[test]
fn every_operation_waits_for_events_and_streams_and_streams_for_it() {
    let _watchdog = Watchdog::over("every");
    Ranks::start("gpu_streams::every", 2, &[]).succeed();
}

#[test]
fn a_stream_that_waits_for_a_rank_that_is_killed_goes_on_and_the_error_names_the_rank() {
    let _watchdog = Watchdog::over("killed");
    for watches in 0..2 {
        Ranks::start("gpu_streams::killed", 3, &[watches]).succeed_except(Rank(1));
    }
}

// ---- the ring -----------------------------------------------------------------------------------

const STEPS: u64 = 100;
const PIECE: usize = 10_007;

fn part(region: &Region, at: u64) -> RegionSlice {
    region.slice(at as usize * PIECE, PIECE).unwrap()
}

/// Stands for a kernel: work on the stream that reads one place and writes another.
fn kernel(stream: &Arc<dyn Stream>, to: RegionSlice, from: RegionSlice) -> Transfer {
    Transfer::start_on(&**stream, to.into(), from.into()).expect("a copy on the stream")
}

/// Runs the role: each rank starts a piece on its way round. In a step a kernel writes down the
/// piece that has come, and another makes the one to be passed on. A put brings that to the next
/// rank, and its notification lets that rank's stream go on. The host gives all of it to the
/// stream, and makes progress.
pub(crate) fn ring(role: &Role) {
    let [kind, shared] = role.words[..] else { panic!("two words") };
    let runtime = role.runtime(settings());
    let gpus = gpus(&runtime);
    let gpu = &gpus[if shared == 1 { 0 } else { role.rank as usize % gpus.len() }];
    let (stream, arrived) = (gpu.stream().unwrap(), StreamCounter::new(&runtime, gpu).unwrap());
    let name = runtime.register_comp(&arrived).unwrap();
    // A rank can be as many steps ahead of the next as there are ranks.
    let slots = u64::from(role.size) + 1;
    let flavour = if kind == 2 { Flavour::Plain } else { Flavour::Pinned };
    let window = gpu.allocate(slots as usize * PIECE, flavour).unwrap();
    let outgoing = gpu.allocate(slots as usize * PIECE, flavour).unwrap();
    let history = gpu.allocate(STEPS as usize * PIECE, Flavour::Plain).unwrap();
    let mr = runtime.register_memory(&window).unwrap();
    role.tells("window", &mr.remote_key().to_bytes());
    let next = (role.rank + 1) % role.size;
    let previous = Rank((role.rank + role.size - 1) % role.size);
    let rmr = RemoteKey::from_bytes(&role.told("window", next)).unwrap();
    arrived.watch(previous);
    role.meet("ready", &runtime, 0..role.size);
    part(&outgoing, 0).write(&filled(PIECE, u64::from(role.rank))).unwrap();
    let (sent, mut kernels) = (Counter::new(), Vec::new());
    for step in 0..STEPS {
        let mut put = runtime
            .post_put(Rank(next), part(&outgoing, step % slots), &rmr, step % slots * PIECE as u64)
            .on_stream(&stream)
            .remote_comp(name)
            .comp(&sent);
        while put.try_submit().unwrap().is_retry() {
            runtime.progress().unwrap();
        }
        arrived.wait_on(&stream, step + 1).unwrap();
        kernels.push(kernel(&stream, part(&history, step), part(&window, step % slots)));
        // Pinned memory is reached by way of the device.
        let came = part(&history, step);
        kernels.push(kernel(&stream, part(&outgoing, (step + 1) % slots), came));
        // A stream has room for some hundred operations.
        until(std::slice::from_ref(&runtime), || sent.get() + 40 > step);
    }
    let end = stream.record().unwrap();
    until(std::slice::from_ref(&runtime), || is_past(&end) && sent.get() == STEPS);
    assert_eq!(arrived.error().map(|error| error.to_string()), None);
    for step in 0..STEPS {
        let from =
            (u64::from(role.rank) + STEPS * u64::from(role.size) - 1 - step) % u64::from(role.size);
        assert_eq!(wrong(&part(&history, step).to_vec().unwrap(), from, 0), None, "step {step}");
    }
    role.meet("over", &runtime, 0..role.size);
}

// ---- every operation ----------------------------------------------------------------------------

const LENGTHS: [usize; 2] = [24, 100_000];
const ROOM: usize = 100_000;
const OPERATIONS: [&str; 8] = ["send", "am", "recv", "put", "get", "add", "swap", "flush"];
/// Behind the bytes of the window.
const WORD: u64 = ROOM as u64;

#[derive(Clone, Copy)]
enum InOrder {
    After,
    OnStream,
    Both,
}

/// One operation, as both ranks know it.
struct Case {
    operation: &'static str,
    order: InOrder,
    kind: usize,
    window: usize,
    len: usize,
    salt: u64,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in OPERATIONS {
        for order in [InOrder::After, InOrder::OnStream, InOrder::Both] {
            for kind in 0..KINDS {
                for (window, len) in
                    LENGTHS.into_iter().enumerate().flat_map(|(at, len)| [(at, len), (1 - at, len)])
                {
                    let salt = 1 + cases.len() as u64;
                    cases.push(Case { operation, order, kind, window, len, salt });
                }
            }
        }
    }
    cases
}

fn in_order<'a, K>(
    post: Post<'a, K>,
    order: InOrder,
    event: &GpuEvent,
    stream: &Arc<dyn Stream>,
) -> Post<'a, K> {
    match order {
        InOrder::After => post.after(event),
        InOrder::OnStream => post.on_stream(stream),
        InOrder::Both => post.after(event).on_stream(stream),
    }
}

/// Runs the role: rank 0 posts each operation behind a held stream, and then releases the stream.
/// Rank 1 takes part.
pub(crate) fn every(role: &Role) {
    let runtime = role.runtime(settings());
    let came = CompQueue::new(1024);
    let name = runtime.register_comp(&came).unwrap();
    if role.rank == 1 { accept(role, &runtime, &came) } else { operate(role, &runtime, name) }
}

fn accept(role: &Role, runtime: &Runtime, came: &CompQueue) {
    let gpu = gpus(runtime).remove(0);
    let host = runtime.allocate(ROOM + 8).unwrap();
    let device = gpu.allocate(ROOM, Flavour::Plain).unwrap();
    let registrations = [&host, &device].map(|region| runtime.register_memory(region).unwrap());
    for (at, mr) in registrations.iter().enumerate() {
        role.tells(&format!("window {at}"), &mr.remote_key().to_bytes());
    }
    for case in cases() {
        let tag = Tag(case.salt);
        match case.operation {
            "send" => {
                let mut recv = runtime.post_recv(Rank(0), vec![0; ROOM], tag).comp(came);
                recv.submit().unwrap();
            }
            "recv" => {
                let mut send = runtime.post_send(Rank(0), filled(case.len, case.salt), tag);
                send.submit().unwrap();
            }
            _ => {}
        }
    }
    until(std::slice::from_ref(runtime), || {
        if let Some(status) = came.pop() {
            let status = status.ok().unwrap();
            assert_eq!(
                wrong(&status.buffer.to_vec().unwrap()[..status.size], status.tag.0, 0),
                None
            );
            role.says(&format!("got {}", status.tag.0));
        }
        role.has_said("done", 0)
    });
    role.meet("over", runtime, 0..2);
}

/// Calls an operation until it is in flight.
fn begin(runtime: &Runtime, mut call: impl FnMut() -> Result<Outcome, PostError>) {
    loop {
        match call().unwrap() {
            Outcome::Posted => return,
            Outcome::Done(status) => panic!("it was to wait: {status:?}"),
            Outcome::Retry(_) => drop(runtime.progress().unwrap()),
        }
    }
}

/// Does an operation in no order.
fn at_once(
    runtime: &Runtime,
    mut call: impl FnMut(&Synchronizer) -> Result<Outcome, PostError>,
) -> Status {
    let done = Synchronizer::new(1);
    loop {
        match call(&done).unwrap() {
            Outcome::Done(status) => return status.ok().unwrap(),
            Outcome::Posted => {
                until(std::slice::from_ref(runtime), || done.test());
                return done.take().unwrap().remove(0).ok().unwrap();
            }
            Outcome::Retry(_) => drop(runtime.progress().unwrap()),
        }
    }
}

fn operate(role: &Role, runtime: &Runtime, name: RemoteComp) {
    let gpu = gpus(runtime).remove(0);
    let (stream, brake) = (gpu.stream().unwrap(), Brake::new(runtime, &gpu));
    let windows =
        [0, 1].map(|at| RemoteKey::from_bytes(&role.told(&format!("window {at}"), 1)).unwrap());
    let read = |window: usize, at: u64, len: usize| -> Vec<u8> {
        at_once(runtime, |done| {
            runtime.post_get(Rank(1), vec![0; len], &windows[window], at).comp(done).try_submit()
        })
        .buffer
        .to_vec()
        .unwrap()
    };
    let word = || u64::from_le_bytes(read(0, WORD, 8).try_into().unwrap());
    for Case { operation, order, kind, window, len, salt } in cases() {
        let what = format!("{operation} of {len} B of kind {kind}, window {window}");
        let (rmr, bytes, nothing) = (&windows[window], filled(len, salt), vec![0; len]);
        let before = read(window, 0, len);
        let count = word();
        let done = Synchronizer::new(1);
        brake.hold(&stream);
        let event = stream.record().unwrap();
        macro_rules! start {
            ($post:expr) => {{
                let mut post = in_order($post, order, &event, &stream);
                post = post.comp(&done).user_context(UserContext(salt));
                begin(runtime, || post.try_submit());
            }};
        }
        let filled = |bytes: &[u8]| memory(&gpu, kind, bytes);
        match operation {
            "send" => start!(runtime.post_send(Rank(1), filled(&bytes), Tag(salt))),
            "am" => start!(runtime.post_am(Rank(1), filled(&bytes), name).tag(Tag(salt))),
            "recv" => start!(runtime.post_recv(Rank(1), filled(&nothing), Tag(salt))),
            "put" => start!(runtime.post_put(Rank(1), filled(&bytes), rmr, 0)),
            "get" => start!(runtime.post_get(Rank(1), filled(&nothing), rmr, 0)),
            "add" => start!(runtime.post_fetch_add(Rank(1), &windows[0], WORD, salt)),
            "swap" => start!(runtime.post_compare_swap(Rank(1), &windows[0], WORD, count, salt)),
            _ => start!(runtime.post_flush(Rank(1))),
        }
        let behind = stream.record().unwrap();
        (0..100).for_each(|_| assert!(runtime.progress().is_ok()));
        assert!(!done.test() && !is_past(&behind), "{what} did not wait");
        assert!(!role.has_said(&format!("got {salt}"), 1), "{what} did not wait");
        assert_eq!((read(window, 0, len) == before, word()), (true, count), "{what} did not wait");
        brake.release();
        until(std::slice::from_ref(runtime), || done.test() && is_past(&behind));
        let status = done.take().unwrap().remove(0).ok().unwrap();
        assert_eq!(status.user_context, UserContext(salt), "{what}");
        match operation {
            "send" | "am" => {
                until(std::slice::from_ref(runtime), || role.has_said(&format!("got {salt}"), 1))
            }
            "recv" => assert_eq!(wrong(&status.buffer.to_vec().unwrap(), salt, 0), None, "{what}"),
            "get" => assert!(status.buffer.to_vec().unwrap() == before, "{what}"),
            "put" => assert_eq!(wrong(&read(window, 0, len), salt, 0), None, "{what}"),
            "add" => assert_eq!((status.value(), word()), (Some(count), count + salt), "{what}"),
            "swap" => assert_eq!((status.value(), word()), (Some(count), salt), "{what}"),
            _ => {}
        }
    }
    role.says("done");
    role.meet("over", runtime, 0..2);
}

// ---- a peer that is killed ----------------------------------------------------------------------

/// Runs the role: rank 0 waits in every way there is for rank 1, which is killed. Rank 2 is there
/// all the time.
pub(crate) fn killed(role: &Role) {
    let runtime = role.runtime(settings());
    let region = runtime.allocate(4096).unwrap();
    let mr = runtime.register_memory(&region).unwrap();
    role.tells("memory", &mr.remote_key().to_bytes());
    if role.rank != 0 {
        let victim = role.rank == 1;
        until(std::slice::from_ref(&runtime), || {
            role.has_said(if victim { "waits" } else { "went on" }, 0)
        });
        if victim {
            die();
        }
        return role.meet("over", &runtime, [0, 2].into_iter());
    }
    let gpu = gpus(&runtime).remove(0);
    let [held, receives, other] = [(); 3].map(|()| gpu.stream().unwrap());
    let arrived = StreamCounter::new(&runtime, &gpu).unwrap();
    let of_another = StreamCounter::new(&runtime, &gpu).unwrap();
    of_another.watch(Rank(2));
    if role.words[0] == 1 {
        arrived.watch(Rank(1));
    }
    let rmr = RemoteKey::from_bytes(&role.told("memory", 1)).unwrap();
    // From here on rank 1 is connected.
    let first =
        at_once(&runtime, |done| runtime.post_put(Rank(1), b"up", &rmr, 0).comp(done).try_submit());
    assert_eq!(first.size, 2);
    at_once(&runtime, |done| runtime.post_send(Rank(1), b"up", Tag(9)).comp(done).try_submit());
    arrived.wait_on(&held, 1).unwrap();
    of_another.wait_on(&other, 1).unwrap();
    let (event, ended) = (held.record().unwrap(), CompQueue::new(16));
    let in_order = |at: u64| {
        let context = UserContext(at);
        match at {
            0 => runtime
                .post_put(Rank(1), vec![1; 100], &rmr, 0)
                .after(&event)
                .comp(&ended)
                .user_context(context)
                .try_submit(),
            1 => runtime
                .post_get(Rank(1), vec![1; 100], &rmr, 0)
                .after(&event)
                .comp(&ended)
                .user_context(context)
                .try_submit(),
            2 => runtime
                .post_fetch_add(Rank(1), &rmr, 0, 1)
                .after(&event)
                .comp(&ended)
                .user_context(context)
                .try_submit(),
            3 => runtime.post_flush(Rank(1)).comp(&ended).user_context(context).try_submit(),
            4 => runtime
                .post_recv(Rank(1), vec![1; 100], Tag(1))
                .on_stream(&receives)
                .comp(&ended)
                .user_context(context)
                .try_submit(),
            5 => runtime
                .post_recv(Rank(1), vec![1; 100], Tag(2))
                .after(&event)
                .comp(&ended)
                .user_context(context)
                .try_submit(),
            _ => runtime
                .post_send(Rank(1), vec![1; 100], Tag(3))
                .after(&event)
                .comp(&ended)
                .user_context(context)
                .try_submit(),
        }
    };
    for at in 0..7 {
        begin(&runtime, || in_order(at));
    }
    let released = [&held, &receives].map(|stream| stream.record().unwrap());
    (0..100).for_each(|_| assert!(runtime.progress().is_ok()));
    assert!(
        ended.is_empty() && released.iter().all(|event| !is_past(event)),
        "no rank has ended yet"
    );
    role.says("waits");
    let mut contexts = Vec::new();
    until(std::slice::from_ref(&runtime), || {
        while let Some(status) = ended.pop() {
            contexts.push(status.user_context.0);
            if matches!(status.user_context.0, 0 | 1 | 4..) {
                assert_eq!(status.buffer.to_vec().unwrap(), [1; 100], "the buffer comes back");
            }
            let error = status.ok().expect_err("its peer is dead");
            assert!(matches!(error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
        }
        contexts.len() == 7 && released.iter().all(is_past)
    });
    contexts.sort_unstable();
    assert_eq!(contexts, [0, 1, 2, 3, 4, 5, 6], "each ends once");
    let error = arrived.error().expect("it is poisoned");
    assert!(matches!(error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
    assert_eq!((arrived.value(), of_another.error().is_none()), (0, true));
    // What comes too late is let through at once.
    arrived.wait_on(&held, 5).unwrap();
    let late = held.record().unwrap();
    until(std::slice::from_ref(&runtime), || is_past(&late));
    let behind = other.record().unwrap();
    assert!(!is_past(&behind), "the rank that it watches is alive");
    super::raise(&of_another);
    until(std::slice::from_ref(&runtime), || is_past(&behind));
    role.says("went on");
    role.meet("over", &runtime, [0, 2].into_iter());
}
