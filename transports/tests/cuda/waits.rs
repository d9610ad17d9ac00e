//! Streams that wait for words: the deadlock rules of docs/gpu.md on real GPUs. Each test runs in
//! a process of its own, because a waiting stream of a context blocks every thread that frees its
//! memory.

use crate::roles::Other;
use crate::support::{MIB, make, need, payload};
use crate::user;
use carrack_transports::gpu::cuda::CudaStream;
use carrack_transports::gpu::words::GpuWords;
use carrack_transports::gpu::{Driver, Stream};
use carrack_transports::mem::{Region, Transfer};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn rule_a_as_many_streams_wait_as_may_and_everything_else_goes_on() {
    let Some(_) = need(1) else { return };
    Other::alone("rule a");
}

pub fn rule_a() {
    let (_, gpus) = need(1).unwrap();
    let word = GpuWords::of(&gpus[0]).word().unwrap();
    let streams: Vec<_> = (0..40).map(|_| gpus[0].stream().unwrap()).collect();
    let waiting = streams.iter().take_while(|stream| word.hold(&***stream, 1).is_ok()).count();
    println!("{waiting} streams wait");
    let refused = word.hold(&*streams[waiting], 1).unwrap_err();
    assert!(refused.hint.contains("CUDA_DEVICE_MAX_CONNECTIONS"), "{refused}");
    let region = make(&gpus[0], "plain", MIB);
    for _ in 0..10 {
        region.whole().write(&payload(MIB, 5)).unwrap();
        assert!(region.whole().to_vec().unwrap() == payload(MIB, 5));
    }
    streams[waiting].synchronize().unwrap();
    word.raise();
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    word.hold(&*streams[waiting], 2).expect("there is room again");
    word.poison();
    streams[waiting].synchronize().unwrap();
}

#[test]
fn rule_b_memory_is_freed_when_no_stream_waits_any_more() {
    let Some(_) = need(1) else { return };
    Other::alone("rule b");
}

pub fn rule_b() {
    let (driver, gpus) = need(1).unwrap();
    let kinds = ["plain", "pinned", "shareable", "managed"];
    let regions = kinds.map(|kind| make(&gpus[0], kind, MIB));
    let addresses: Vec<_> = regions.iter().map(Region::addr).collect();
    let host = Region::host(3 * 4096);
    // SAFETY: the region outlives the registration.
    let registered =
        unsafe { gpus[0].register_host(host.addr().next_multiple_of(4096) as *mut u8, 4096) };
    let (stream, word) = (gpus[0].stream().unwrap(), GpuWords::of(&gpus[0]).word().unwrap());
    word.hold(&*stream, 1).unwrap();
    let began = Instant::now();
    drop((regions, registered.unwrap()));
    driver.look_after();
    println!("dropping all of it took {:?}", began.elapsed());
    assert!(driver.classify(addresses[0]).unwrap().is_some(), "it would have blocked");
    word.raise();
    stream.synchronize().unwrap();
    driver.look_after();
    for (kind, addr) in kinds.iter().zip(addresses) {
        assert!(driver.classify(addr).unwrap().is_none(), "{kind} is still there");
    }
}

#[test]
fn rule_e_what_a_program_calls_goes_on_when_another_thread_lets_the_stream_go() {
    let Some(_) = need(1) else { return };
    Other::alone("rule e");
}

pub fn rule_e() {
    let (_, gpus) = need(1).unwrap();
    let (stream, word) = (gpus[0].stream().unwrap(), GpuWords::of(&gpus[0]).word().unwrap());
    user::set_current(user::primary(0));
    let ptr = user::alloc(MIB);
    let calls: [fn(usize); 2] = [|_| user::synchronize_all(), user::free];
    for (turn, call) in (1..).zip(calls) {
        word.hold(&*stream, turn).unwrap();
        let end = stream.record().unwrap();
        let blocked = std::thread::spawn(move || {
            user::set_current(user::primary(0));
            call(ptr);
        });
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((blocked.is_finished(), end.query()), (false, Ok(false)), "call {turn}");
        word.raise();
        end.wait().unwrap();
        blocked.join().unwrap();
    }
}

#[test]
fn a_copy_on_the_programs_stream_stands_in_its_order_and_its_events_are_taken_by_their_handles() {
    let Some(_) = need(1) else { return };
    Other::alone("copies in order");
}

pub fn copies_in_order() {
    let (driver, gpus) = need(1).unwrap();
    user::set_current(user::primary(0));
    let raw = user::stream(1);
    // SAFETY: a stream that lives to the end of the program.
    let stream: Arc<dyn Stream> = Arc::new(unsafe { CudaStream::from_raw(&driver, raw) }.unwrap());
    assert_eq!(stream.gpu().unwrap().info().uuid, gpus[0].info().uuid);
    let [src, dst] = ["plain", "plain"].map(|kind| make(&gpus[0], kind, MIB));
    let pinned = make(&gpus[0], "pinned", MIB);
    dst.whole().write(&vec![0; MIB]).unwrap();
    let word = GpuWords::of(&gpus[0]).word().unwrap();
    let theirs = user::event();
    // SAFETY: an event that lives to the end of the program.
    let event = unsafe { driver.event_from_raw(theirs) }.unwrap();
    assert_eq!(event.query(), Ok(true), "as long as there is no record");
    for turn in 1..4 {
        src.whole().write(&payload(MIB, turn)).unwrap();
        word.hold(&*stream, turn).unwrap();
        let copy = |to: &Region, from: &Region| {
            Transfer::start_on(&*stream, to.whole().into(), from.whole().into()).unwrap()
        };
        let mut copies = [copy(&dst, &src), copy(&pinned, &dst)];
        user::record(theirs, raw);
        std::thread::sleep(Duration::from_millis(5));
        assert!(copies[0].poll().is_none() && event.query() == Ok(false), "turn {turn}");
        word.raise();
        event.wait().unwrap();
        assert!(copies.iter_mut().all(|copy| copy.poll().is_some()));
        assert!(pinned.whole().to_vec().unwrap() == payload(MIB, turn));
        let other = gpus[0].stream().unwrap();
        other.wait(&event).unwrap();
        other.synchronize().unwrap();
    }
}
