//! A thread of the program captures a stream into a graph, on a mocked driver. Meanwhile the
//! driver refuses certain calls of other threads, which also spoil the capture. The library makes
//! no such call.

use crate::mock::{library, open, word};
use carrack_transports::gpu::cuda::CudaStream;
use carrack_transports::gpu::{Driver, Flavour};
use carrack_transports::mem::{CopyError, Transfer};

#[test]
fn what_is_done_while_another_thread_captures_neither_waits_for_it_nor_spoils_it() {
    let library = library("captured", "-DHERE");
    let order = |what: &str| word(&library, what);
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let begin = || {
        let [dst, src] = [0, 1].map(|_| gpu.allocate(100, Flavour::Plain).unwrap());
        src.whole().write(&[7; 100]).unwrap();
        Transfer::between(dst.whole(), src.whole()).unwrap()
    };
    let before = begin();
    assert_eq!(order("mock_capture"), 1);
    // The last one is asked for by its stream, the others by an event.
    let [mut asked, dropped, mut last] = [before, begin(), begin()];
    drop(dropped);
    for transfer in [&mut asked, &mut last] {
        let answer = loop {
            if let Some(answer) = transfer.poll() {
                break answer;
            }
        };
        assert!(answer.is_ok());
    }
    let event = gpu.stream().unwrap().record().unwrap();
    while !event.query().unwrap() {}
    assert_eq!(event.wait(), Ok(()));
    assert_eq!(order("mock_capture_ends"), 0, "the capture was spoilt");
}

#[test]
fn a_threads_mode_is_as_it_was_behind_every_call() {
    let library = library("capture-modes", "-DHERE");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let exchange = |mode: i32| {
        let mut mode = mode;
        // SAFETY: the mock's function, which exchanges an int.
        unsafe {
            let library = libloading::Library::new(&library).unwrap();
            let call = library
                .get::<unsafe extern "C" fn(*mut i32) -> i32>("cuThreadExchangeStreamCaptureMode");
            assert_eq!(call.unwrap()(&raw mut mode), 0);
        }
        mode
    };
    for mode in [0, 1, 2] {
        exchange(mode);
        let region = gpu.allocate(100, Flavour::Plain).unwrap();
        assert_eq!(word(&library, "mock_capture_mode"), mode);
        region.whole().write(&[1; 100]).unwrap();
        let event = gpu.stream().unwrap().record().unwrap();
        while !event.query().unwrap() {}
        drop(region);
        assert_eq!(gpu.allocate(1 << 31, Flavour::Plain).unwrap_err().code, 4242);
        assert_eq!(word(&library, "mock_capture_mode"), mode);
    }
}

#[test]
fn a_stream_that_is_being_captured_is_refused_work_and_the_capture_goes_on() {
    let library = library("captured-stream", "-DHERE");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let [dst, src] = [0, 1].map(|_| gpu.allocate(100, Flavour::Plain).unwrap());
    let (stream, other) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let raw = (&*stream as &dyn std::any::Any).downcast_ref::<CudaStream>().unwrap().as_raw();
    // SAFETY: the mock's function, which takes an address and returns an int.
    unsafe {
        let library = libloading::Library::new(&library).unwrap();
        let say = library.get::<unsafe extern "C" fn(usize) -> i32>("mock_capture_stream").unwrap();
        assert_eq!(say(raw), 0);
    }
    assert_eq!(word(&library, "mock_capture"), 1);
    let event = other.record().unwrap();
    let mut target = 0_u64;
    // SAFETY: nothing is given to the stream.
    let written = unsafe { stream.write_value64(&raw mut target, 1) };
    let copied = match Transfer::start_on(&*stream, dst.whole().into(), src.whole().into()) {
        Err(refused) => match refused.cause {
            CopyError::Engine { cause, .. } => Err(cause),
            other => panic!("{other}"),
        },
        Ok(_) => Ok(()),
    };
    for refused in [stream.record().map(drop), stream.wait(&event), written, copied] {
        let why = refused.unwrap_err();
        assert!(why.code == 900 && why.hint.contains("before the capture, or after it"), "{why}");
    }
    assert_eq!(word(&library, "mock_capture_ends"), 0);
    stream.record().unwrap().wait().unwrap();
}
