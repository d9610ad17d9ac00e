//! GPUs that read a buffer and are kept from writing it, and GPUs that write it and have none of
//! it.

use super::{STRIPE, check, fill, stripes};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, Kind, can_order, enough_for};
use carrack::alloc::{GrowableBuffer, GrowableError};
use carrack::transports::gpu::{Access, Gpu, Rights};
use carrack::transports::mem::Transfer;
use carrack::{Rank, Runtime, Synchronizer, trial};
use std::sync::Arc;

/// Plays the role of a process that was started for a trial. Without one it does nothing.
#[test]
fn answers_in_its_own_process() {
    if std::env::var_os("CARRACK_TRIAL").is_some() {
        trial::answer();
    }
}

/// Reserves a buffer of the first GPU's memory, with access for the second.
fn buffer(gpus: &Gpus, rights: Rights) -> GrowableBuffer {
    let program = std::env::current_exe().unwrap();
    trial::by(
        program,
        ["--exact", "growable_buffer::readers::answers_in_its_own_process", "--nocapture"],
    );
    let builder = GrowableBuffer::reserve(&gpus.all[..1], 8 * STRIPE).stripe(STRIPE);
    let others = &gpus.all[1..2];
    let builder = match rights {
        Rights::Read => builder.readers(others),
        Rights::ReadWrite => builder.writers(others),
    };
    builder.build().unwrap()
}

/// Returns a GPU's rights to each stripe, as its driver reports them.
fn rights(gpu: &Arc<dyn Gpu>, buffer: &GrowableBuffer) -> Vec<Option<Rights>> {
    stripes(buffer).iter().map(|stripe| gpu.rights_at(stripe.addr()).unwrap()).collect()
}

/// Kernels of the reader, and copies in its context, are `cuda reserved`'s to show: simulated ones
/// write where they like.
#[test]
fn a_reader_is_given_every_stripe_for_reading_and_those_that_come_later() {
    let _watchdog = Watchdog::over("reads");
    if !enough_for("access for reading only", 2) {
        return;
    }
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, Rights::Read);
    let uuid = |at: usize| gpus.all[at].info().uuid;
    assert_eq!(buffer.access(), [Access::read_write(uuid(0)), Access::read(uuid(1))]);
    for len in [1, 3] {
        buffer.grow_to(len * STRIPE).unwrap();
        assert_eq!(rights(&gpus.all[0], &buffer), vec![Some(Rights::ReadWrite); len]);
        assert_eq!(rights(&gpus.all[1], &buffer), vec![Some(Rights::Read); len]);
    }
    assert!(gpus.all[0].rights_at(buffer.addr() + 3 * STRIPE).is_err(), "nothing is there");
}

/// Real drivers refuse writes in the reader's context; a simulated one does not.
#[test]
fn what_the_runtime_writes_there_is_written_by_the_owner_wherever_it_comes_from() {
    let _watchdog = Watchdog::over("by the owner");
    if !enough_for("access for reading only", 2) {
        return;
    }
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, Rights::Read);
    buffer.grow_to(2 * STRIPE).unwrap();
    let runtime = Runtime::builder().gpu_driver(gpus.driver.clone()).start().unwrap();
    let near = Kind::Plain(1).region(&gpus, STRIPE);
    for (at, stripe) in stripes(&buffer).iter().enumerate() {
        fill(&near, 7 + at as u64);
        let registered = runtime.register_memory(stripe).unwrap();
        let (put, got) = (Synchronizer::new(1), Synchronizer::new(1));
        let to = registered.remote_key();
        assert!(runtime.post_put(Rank(0), near.whole(), &to, 0).comp(&put).submit().is_ok());
        put.wait(&runtime).unwrap();
        check(stripe, 7 + at as u64);
        fill(&near, 0);
        assert!(runtime.post_get(Rank(0), near.whole(), &to, 0).comp(&got).submit().is_ok());
        got.wait(&runtime).unwrap();
        check(&near, 7 + at as u64);
    }
}

#[test]
fn a_writer_without_stripes_reads_and_writes() {
    let _watchdog = Watchdog::over("writes");
    if !enough_for("access of GPUs without stripes", 2) {
        return;
    }
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, Rights::ReadWrite);
    buffer.grow_to(2 * STRIPE).unwrap();
    assert_eq!(buffer.gpus().len(), 1);
    assert_eq!(rights(&gpus.all[1], &buffer), [Some(Rights::ReadWrite); 2]);
    let near = Kind::Plain(1).region(&gpus, STRIPE);
    fill(&near, 3);
    for stripe in stripes(&buffer) {
        // By the writer's engine.
        let stream = gpus.all[1].stream().unwrap();
        let mut copy =
            Transfer::start_on(&*stream, stripe.whole().into(), near.whole().into()).unwrap();
        while copy.poll().is_none() {}
        assert!(copy.failure().is_none());
        check(&stripe, 3);
    }
}

#[test]
fn where_the_driver_lets_readers_write_there_is_no_access_for_reading_only() {
    let _watchdog = Watchdog::over("lets them write");
    if !can_order("what a driver lets readers do") {
        return;
    }
    let gpus = Gpus::here();
    let fake = gpus.fake.as_ref().unwrap();
    fake.faults().let_readers_write(true);
    let build = || GrowableBuffer::reserve(&gpus.all[..1], STRIPE).readers(&gpus.all[1..]).build();
    let why = build().unwrap_err();
    let GrowableError::ReadOnly { gpu, owner, cause } = &why else { panic!("{why}") };
    assert_eq!((*gpu, *owner, cause.code), (gpus.all[1].info().uuid, gpus.all[0].info().uuid, 801));
    let says = why.to_string();
    assert!(
        says.contains("writes there all the same") && says.contains("name it among the writers"),
        "{says}"
    );
    assert_eq!(fake.counters().reservations, 0);
    fake.faults().let_readers_write(false);
    assert!(build().is_ok());
}
