//! A thread's current context, before and after calls of the library.

use crate::roles::Other;
use crate::support::{MIB, copy_and_check, make, need, payload, start};
use crate::user;
use carrack_transports::gpu::{Driver, Gpu, HandleForm};
use carrack_transports::mem::{AllocId, MemKind, Region};
use std::ptr::NonNull;
use std::sync::Arc;

/// Makes every call that may change a thread's context.
fn busy(gpu: &Arc<dyn Gpu>) {
    for kind in ["plain", "shareable", "pooled", "pinned", "managed"] {
        drop(make(gpu, kind, 100));
    }
    let (one, other) = (make(gpu, "plain", 100), make(gpu, "plain", 100));
    start(&**gpu, (&one, 0), (&other, 0), 100).unwrap().wait().unwrap();
    one.whole().write(&[1; 100]).unwrap();
    let stream = gpu.stream().unwrap();
    let event = stream.record().unwrap();
    stream.wait(&event).unwrap();
    stream.synchronize().unwrap();
    gpu.export(&one, HandleForm::Bytes).unwrap();
    gpu.export(&one, HandleForm::Fd).unwrap_err();
    drop(gpu.shared_event().unwrap());
    let pinned = Region::host(8192);
    // SAFETY: the region outlives the registration.
    drop(unsafe { gpu.register_host(pinned.addr().next_multiple_of(4096) as *mut u8, 4096) });
}

/// Legacy IPC rule 7; streams rule 6.
#[test]
fn a_thread_has_its_own_context_back_after_every_call() {
    let Some((_, gpus)) = need(1) else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(user::current(), 0);
            gpus.iter().for_each(busy);
            assert_eq!(user::current(), 0, "none before, none after");
            let own = user::new_context(0);
            gpus.iter().for_each(busy);
            assert_eq!(user::current(), own, "one of the user's own");
            let primary = user::primary(0);
            user::set_current(primary);
            gpus.iter().for_each(busy);
            assert_eq!(user::current(), primary, "the primary one");
            user::set_current(own);
            user::destroy_context(own);
        });
    });
}

/// Streams rule 6: the context of the pointer is adopted, and work is done there.
#[test]
fn memory_of_a_context_of_the_users_is_worked_on_in_that_context() {
    let Some((driver, gpus)) = need(1) else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let context = user::new_context(0);
            let ptr = user::alloc(2 * MIB);
            user::set_current(0);
            let extent = driver.classify(ptr + 3).unwrap().unwrap();
            println!("in a context of its own: {extent:?}");
            assert_eq!(extent.context, Some(context as u64));
            assert_eq!(extent.kind, MemKind::Device(gpus[0].info().uuid));
            let gpu = extent.gpu.unwrap();
            let base = NonNull::new(ptr as *mut u8).unwrap();
            // SAFETY: allocated above, and freed below after the region's last use.
            let theirs = unsafe {
                Region::from_parts(
                    base,
                    2 * MIB,
                    extent.kind,
                    extent.id,
                    Some(Arc::clone(&gpu)),
                    Box::new(()),
                )
            };
            let (host, primary) = (Region::host(2 * MIB), make(&gpus[0], "plain", 2 * MIB));
            copy_and_check(&*gpu, (&theirs, 5), (&host, 9), MIB, 1);
            copy_and_check(&*gpu, (&host, 5), (&theirs, 9), MIB, 2);
            // Between two contexts of one device, by either.
            copy_and_check(&*gpu, (&theirs, 5), (&primary, 9), MIB, 3);
            copy_and_check(&*gpus[0], (&primary, 5), (&theirs, 9), MIB, 4);
            assert!(!gpu.export(&theirs, HandleForm::Bytes).unwrap().form().eq(&HandleForm::Fd));
            assert_eq!(user::current(), 0);
            let event = start(&*gpu, (&theirs, 0), (&host, 0), 100).unwrap();
            event.wait().unwrap();
            drop((event, theirs));
            user::set_current(context);
            user::free(ptr);
            user::set_current(0);
        });
    });
}

/// Life and death rule 2, for a context: objects of a destroyed context give errors, and no crash.
#[test]
fn a_destroyed_context_is_an_error_and_its_handle_may_come_back() {
    let Some(_) = need(1) else { return };
    Other::alone("destroyed context");
}

/// Uses objects of a destroyed context, in the process that the test above starts: alone in case
/// the driver crashes.
pub fn in_a_destroyed_context() {
    let (driver, gpus) = need(1).unwrap();
    let context = user::new_context(0);
    let ptr = user::alloc(2 * MIB);
    let gpu = driver.classify(ptr).unwrap().unwrap().gpu.unwrap();
    let region = gpu.allocate(100, carrack_transports::gpu::Flavour::Plain).unwrap();
    let host = Region::host(100);
    let event = start(&*gpu, (&region, 0), (&host, 0), 100).unwrap();
    event.wait().unwrap();
    let stream = gpu.stream().unwrap();
    user::destroy_context(context);
    println!("the thread's context is now {:#x}", user::current());
    println!("a stream in a destroyed context: {:?}", gpu.stream().map(drop));
    println!("a record in a destroyed context: {:?}", stream.record().map(drop));
    println!(
        "a copy in a destroyed context: {:?}",
        start(&*gpu, (&region, 0), (&host, 0), 100).map(drop)
    );
    println!("an event of a destroyed context: {:?}", event.query());
    drop((stream, event, region, gpu));
    let again = user::new_context(0);
    let ptr = user::alloc(2 * MIB);
    println!("the first context was {context:#x}, the second is {again:#x}");
    let gpu = driver.classify(ptr).unwrap().unwrap().gpu.unwrap();
    gpu.stream().unwrap().synchronize().unwrap();
    let region = gpu.allocate(100, carrack_transports::gpu::Flavour::Plain).unwrap();
    region.whole().write(&payload(100, 3)).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), payload(100, 3));
    let region = make(&gpus[0], "plain", 100);
    region.whole().write(&payload(100, 4)).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), payload(100, 4), "the primary context goes on");
}

/// Streams rule 4.
#[test]
fn the_contexts_that_we_work_in_have_sync_memops_set() {
    let Some((_, gpus)) = need(1) else { return };
    drop(make(&gpus[0], "plain", 100));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            user::set_current(user::primary(0));
            println!("flags of the primary context: {:#x}", user::context_flags());
            assert_ne!(user::context_flags() & 0x80, 0);
        });
    });
}

/// Legacy IPC rule 6. A region whose memory the user frees is a stale name, as the buffer id
/// tells.
#[test]
fn a_stale_region_is_not_exported() {
    let Some((driver, gpus)) = need(1) else { return };
    let region = make(&gpus[0], "plain", 100);
    let base = NonNull::new(region.addr() as *mut u8).unwrap();
    let (kind, id) = (region.kind(), AllocId(region.id().0 - 1));
    // SAFETY: the memory is the region's, which outlives this; only its number is another.
    let stale = unsafe {
        Region::from_parts(base, 100, kind, id, Some(Arc::clone(&gpus[0])), Box::new(()))
    };
    let why = gpus[0].export(&stale, HandleForm::Bytes).unwrap_err();
    assert!(why.hint.contains("allocated again"), "{why}");
    assert!(driver.classify(region.addr()).unwrap().is_some());
    let host = Region::host(10);
    assert!(gpus[0].export(&host, HandleForm::Bytes).unwrap_err().hint.contains("host memory"));
    region.whole().write(&payload(100, 3)).unwrap();
}
