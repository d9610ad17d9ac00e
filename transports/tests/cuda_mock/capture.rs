//! A thread of the program's captures a stream into a graph, on a driver that is mocked: as long as it does, the driver lets no other
//! thread ask whether work is over, and says so as an error. That is no end of the work.

use super::mock::{library, word};
use carrack_transports::gpu::cuda::CudaDriver;
use carrack_transports::gpu::{Driver, Flavour};
use carrack_transports::mem::Transfer;

#[test]
fn copies_under_way_while_a_stream_is_captured_are_over_when_they_are_and_keep_their_memory() {
    let library = library("captured", "-DHERE");
    let order = |what: &str| word(&library, what);
    let gpu = CudaDriver::at(&library).devices().unwrap().remove(0);
    let begin = || {
        let [dst, src] = [0, 1].map(|_| gpu.allocate(100, Flavour::Plain).unwrap());
        src.whole().write(&[7; 100]).unwrap();
        Transfer::between(dst.whole(), src.whole()).unwrap()
    };
    order("mock_hold");
    // The last one is asked for by its stream, the other by an event.
    let mut transfers = [begin(), begin()];
    let last = begin();
    let live = order("mock_allocations");
    order("mock_capture");
    for _ in 0..100 {
        for transfer in &mut transfers {
            assert!(transfer.poll().is_none(), "nobody knows that it is over");
        }
    }
    assert_eq!(order("mock_allocations"), live);
    std::thread::scope(|threads| {
        // Who waits for a copy, as who drops it does, waits for the capture's end as well.
        let waits = threads.spawn(move || drop(last));
        order("mock_release");
        order("mock_capture_ends");
        waits.join().unwrap();
    });
    for transfer in &mut transfers {
        while transfer.poll().is_none() {}
        assert!(matches!(transfer.poll(), Some(Ok(()))));
    }
}

#[test]
fn an_event_of_the_programs_has_not_fired_while_nobody_may_ask_for_it() {
    let library = library("captured-events", "-DHERE");
    let driver = CudaDriver::at(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let event = gpu.stream().unwrap().record().unwrap();
    word(&library, "mock_capture");
    assert_eq!(event.query(), Ok(false));
    word(&library, "mock_capture_ends");
    while !event.query().unwrap() {}
}
