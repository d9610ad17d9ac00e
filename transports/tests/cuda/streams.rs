//! Streams, events, and words that streams write and wait for.

use crate::roles::Other;
use crate::support::{MIB, make, need, payload, start};
use crate::user;
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_transports::gpu::cuda::CudaStream;
use carrack_transports::gpu::{Gpu, Stream};
use carrack_transports::mem::Region;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_stream_waits_for_our_copies_and_for_another_streams_record() {
    let Some((_, gpus)) = need(1) else { return };
    let (src, dst) = (make(&gpus[0], "plain", 256 * MIB), make(&gpus[0], "plain", 256 * MIB));
    let (one, other) = (gpus[0].stream().unwrap(), gpus[gpus.len() - 1].stream().unwrap());
    let copied = start(&*gpus[0], (&dst, 0), (&src, 0), 256 * MIB).unwrap();
    one.wait(&copied).unwrap();
    other.wait(&one.record().unwrap()).unwrap();
    let all = other.record().unwrap();
    all.wait().unwrap();
    assert_eq!(copied.query(), Ok(true), "what the last waits for has come before it");
    one.synchronize().unwrap();
    other.synchronize().unwrap();
}

#[test]
fn an_event_or_stream_of_another_driver_is_refused() {
    let Some((_, gpus)) = need(1) else { return };
    let fake = FakeDriver::new(FakeConfig::default()).unwrap();
    let theirs = fake.gpu(0).unwrap().stream().unwrap();
    let ours = gpus[0].stream().unwrap();
    assert_eq!(ours.wait(&theirs.record().unwrap()).unwrap_err().name, "INVALID_HANDLE");
    assert_eq!(
        gpus[0].shared_event().unwrap().record(&*theirs).unwrap_err().name,
        "INVALID_HANDLE"
    );
}

/// `cudaStream_t` and the default streams are taken as they are.
#[test]
fn streams_of_the_program_are_taken_by_their_handles() {
    let Some((driver, gpus)) = need(1) else { return };
    let (src, dst) = (make(&gpus[0], "plain", 8 * MIB), make(&gpus[0], "plain", 8 * MIB));
    src.whole().write(&payload(8 * MIB, 4)).unwrap();
    user::set_current(user::primary(0));
    let own = user::stream(1);
    for raw in [own, user::stream(0), 0, 1, 2] {
        // SAFETY: a stream that lives to the end of the program, or a default one.
        let stream = unsafe { CudaStream::from_raw(&driver, raw) }.unwrap();
        assert_eq!(stream.as_raw(), raw);
        dst.whole().write(&vec![0; 8 * MIB]).unwrap();
        user::copy_async(dst.addr(), src.addr(), 8 * MIB, raw);
        stream.record().unwrap().wait().unwrap();
        assert!(dst.whole().to_vec().unwrap() == payload(8 * MIB, 4), "stream {raw:#x}");
        stream.synchronize().unwrap();
    }
    user::set_current(0);
    // SAFETY: a default stream of no context is refused.
    assert!(unsafe { CudaStream::from_raw(&driver, 0) }.is_err());
}

fn word(at: usize) -> &'static AtomicU64 {
    // SAFETY: the tests give aligned words of host memory that they keep, and use them as atomics
    // only.
    unsafe { AtomicU64::from_ptr(at as *mut u64) }
}

/// Streams rule 7, as it should work: a value releases the stream, and the stream writes its own.
#[test]
fn a_stream_waits_for_a_word_and_writes_one_in_pinned_and_in_registered_memory() {
    let Some(_) = need(1) else { return };
    // Alone, like all tests that wait: other tests would defer their frees.
    Other::alone("words");
}

/// Lets streams wait for words and write words, in the process that the test above starts.
pub fn words() {
    let (_, gpus) = need(1).unwrap();
    let pinned = make(&gpus[0], "pinned", 4096);
    let host = Region::host(3 * 4096);
    let page = host.addr().next_multiple_of(4096);
    // SAFETY: the region outlives the registration.
    let registered = unsafe { gpus[0].register_host(page as *mut u8, 4096) }.unwrap();
    let (src, dst) = (make(&gpus[0], "plain", MIB), make(&gpus[0], "plain", MIB));
    src.whole().write(&payload(MIB, 8)).unwrap();
    for (what, at) in [("pinned", pinned.addr()), ("registered", page)] {
        for gpu in &gpus {
            let (gate, flag) = (word(at), word(at + 8));
            gate.store(0, Ordering::Release);
            flag.store(0, Ordering::Release);
            let stream = gpu.stream().unwrap();
            // SAFETY: the words are aligned, locked, and outlive the stream's work.
            let (first, second) = unsafe {
                let first = stream.wait_value64(gate.as_ptr(), 5).unwrap();
                stream.write_value64(flag.as_ptr(), 0x5ead_beef_0000_0007).unwrap();
                let written = 0x5ead_beef_0000_0007;
                (first, stream.wait_value64(flag.as_ptr(), written).unwrap())
            };
            println!(
                "{what}: one call for a wait and what tells of it: {}",
                second.is_behind(&first)
            );
            assert!(!first.is_behind(&second));
            let are_past = || [&first, &second].map(|event| event.query().unwrap());
            let end = stream.record().unwrap();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(
                (end.query(), flag.load(Ordering::Acquire)),
                (Ok(false), 0),
                "{what}: it waits"
            );
            assert_eq!(are_past(), [false; 2], "{what}");
            // Streams rule 1: no work of the program holds up the library's copies.
            start(&**gpu, (&dst, 0), (&src, 0), MIB).unwrap().wait().unwrap();
            gate.store(6, Ordering::Release);
            end.wait().unwrap();
            assert_eq!(are_past(), [true; 2], "{what}");
            assert_eq!(flag.load(Ordering::Acquire), 0x5ead_beef_0000_0007, "{what}");
        }
    }
    let stream = gpus[0].stream().unwrap();
    // SAFETY: refused.
    unsafe {
        assert_eq!(
            stream.write_value64((page + 1) as *mut u64, 1).unwrap_err().name,
            "INVALID_VALUE"
        );
        assert_eq!(
            stream.write_value64(std::ptr::null_mut(), 1).unwrap_err().name,
            "INVALID_VALUE"
        );
    }
    drop(registered);
}

/// Streams rule 1, with a kernel: in a process of its own, because a running kernel holds up much
/// of the driver.
#[test]
fn a_kernel_on_the_default_stream_does_not_hold_up_our_copies() {
    let Some(_) = need(1) else { return };
    Other::alone("next to a kernel");
}

/// Copies next to a kernel on the default stream, in the process that the test above starts.
pub fn next_to_a_kernel() {
    let (_, gpus) = need(1).unwrap();
    user::set_current(user::primary(0));
    let flag = make(&gpus[0], "pinned", 8);
    let places =
        [make(&gpus[0], "plain", MIB), make(&gpus[0], "pinned", MIB), make(&gpus[0], "plain", MIB)];
    let copies = || {
        for (dst, src) in [(0, 1), (1, 0), (2, 0)] {
            start(&*gpus[0], (&places[dst], 0), (&places[src], 0), MIB).unwrap().wait().unwrap();
        }
    };
    copies();
    word(flag.addr()).store(0, Ordering::Release);
    user::spin(0, flag.addr());
    let began = Instant::now();
    copies();
    let took = began.elapsed();
    let stream = gpus[0].stream().unwrap();
    let (after, query) = (began.elapsed(), stream.record().unwrap().query());
    println!(
        "three copies next to a kernel took {took:?}, a new stream {:?}, {query:?}",
        after - took
    );
    assert!(took < Duration::from_secs(2), "the copies waited for the kernel: {took:?}");
    word(flag.addr()).store(1, Ordering::Release);
    let released = Instant::now();
    user::synchronize_all();
    assert!(released.elapsed() < Duration::from_secs(2), "nothing of ours holds the program up");
}

/// No work of the library is left on the device when its events have fired: the program's own
/// synchronisation returns.
#[test]
fn the_programs_synchronisation_is_not_held_up_by_what_waits_in_our_streams() {
    let Some(_) = need(1) else { return };
    Other::alone("synchronisation");
}

/// Synchronises while a stream of the library waits, in the process that the test above starts.
pub fn synchronisation() {
    let (_, gpus) = need(1).unwrap();
    let stream = gpus[0].stream().unwrap();
    let pinned = make(&gpus[0], "pinned", 8);
    word(pinned.addr()).store(0, Ordering::Release);
    user::set_current(user::primary(0));
    let own = user::stream(0);
    // SAFETY: an aligned word of pinned memory that outlives the wait.
    unsafe { stream.wait_value64(pinned.addr() as *const u64, 1) }.unwrap();
    // The legacy default stream, and streams that go with it, do not wait for a non-blocking one.
    user::synchronize(own);
    user::synchronize(0);
    word(pinned.addr()).store(1, Ordering::Release);
    stream.synchronize().unwrap();
}

/// While a thread captures a stream in the global mode, the driver refuses many calls of other
/// threads, and spoils the capture.
#[test]
fn work_next_to_a_thread_that_captures_a_graph_goes_on_and_does_not_spoil_it() {
    let Some(_) = need(1) else { return };
    Other::alone("captured");
}

pub fn next_to_a_capture() {
    let (driver, gpus) = need(1).unwrap();
    let gpu = &gpus[0];
    user::set_current(user::primary(0));
    let (theirs, recorded) = (user::stream(1), user::event());
    user::record(recorded, theirs);
    // SAFETY: an event that is never destroyed.
    let recorded = unsafe { driver.event_from_raw(recorded) }.unwrap();
    let (dst, src) = (make(gpu, "plain", MIB), make(gpu, "plain", MIB));
    src.whole().write(&payload(MIB, 3)).unwrap();
    let turns = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            user::set_current(user::primary(0));
            let stream = user::stream(1);
            user::begin_capture(stream);
            turns.wait();
            turns.wait();
            assert_eq!(user::end_capture(stream), 0, "the capture was spoilt");
        });
        turns.wait();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let event = start(&**gpu, (&dst, 0), (&src, 0), MIB).unwrap();
            while !event.query().unwrap() {}
            while !recorded.query().unwrap() {}
            recorded.wait().unwrap();
            for kind in ["plain", "shareable", "pooled", "pinned"] {
                let region = make(gpu, kind, MIB);
                region.whole().write(&payload(MIB, 4)).unwrap();
                assert!(region.whole().to_vec().unwrap() == payload(MIB, 4), "{kind}");
            }
            gpu.stream().unwrap().synchronize().unwrap();
        }));
        turns.wait();
        outcome.unwrap();
    });
    assert!(dst.whole().to_vec().unwrap() == payload(MIB, 3));
}
