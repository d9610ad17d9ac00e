//! The objects over a table of functions that only keeps account (simulated: no bytes move).

mod account;

use super::super::bindings::{
    IBV_ACCESS_RELAXED_ORDERING, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ERR,
    IBV_EVENT_QP_FATAL, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, ibv_qp_attr, ibv_recv_wr,
    ibv_send_wr, ibv_wc,
};
use super::*;
use crate::verbs::sys::{Functions, Verbs};
use account::Account;
use proptest::prelude::*;
use rustix::fs::{OFlags, fcntl_getfl};
use std::any::Any;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::Arc;

const ALL: AccessFlags = AccessFlags::LOCAL_WRITE;

fn open() -> Arc<Context> {
    Context::open(&account::verbs(), "account0").expect("the simulated device opens")
}

fn spec<'a>(
    queue: &'a Arc<CompletionQueue>,
    srq: Option<&'a Arc<SharedReceiveQueue>>,
) -> QueuePairSpec<'a> {
    QueuePairSpec {
        send_cq: queue,
        recv_cq: queue,
        srq,
        send_depth: 16,
        recv_depth: 0,
        send_sge: 2,
        recv_sge: 1,
        inline: 64,
    }
}

/// Makes one object of each type, and returns them in the order in which they are made.
fn one_of_everything() -> Vec<Box<dyn Any>> {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let alone = domain.for_one_thread().expect("a domain for one thread");
    let channel = CompletionChannel::create(&context).expect("a channel");
    let queue = CompletionQueue::create(&context, 100, Some(&channel)).expect("a queue");
    let receives = SharedReceiveQueue::create(&domain, 10, 1).expect("receives");
    let pair = QueuePair::create(&alone, &spec(&queue, Some(&receives))).expect("a queue pair");
    let mut memory = vec![0_u8; 64];
    // SAFETY: the memory goes last, and nothing is posted.
    let region = unsafe { alone.register(memory.as_mut_ptr(), 64, ALL) }.expect("a region");
    let made: Vec<Box<dyn Any>> = vec![
        Box::new(context),
        Box::new(domain),
        Box::new(alone),
        Box::new(channel),
        Box::new(queue),
        Box::new(receives),
        Box::new(pair),
        Box::new(region),
    ];
    made
}

proptest! {
    #[test]
    fn in_whatever_order_things_are_dropped_nothing_ends_before_what_stands_on_it(
        order in Just((0..8_usize).collect::<Vec<_>>()).prop_shuffle()
    ) {
        let before = Account::now();
        let mut made: Vec<_> = one_of_everything().into_iter().map(Some).collect();
        for index in order {
            drop(made[index].take());
        }
        let now = Account::now();
        prop_assert_eq!(now.refused, before.refused, "something was destroyed under what stood on \
            it");
        // The thread's own domain is two objects of the library's.
        prop_assert_eq!(now.made - before.made, 9);
        prop_assert_eq!(now.destroyed - before.destroyed, 9);
    }
}

#[test]
fn what_the_program_has_opened_is_not_closed_here_and_keeps_its_events() {
    let verbs = account::verbs();
    let theirs = open();
    let before = Account::now();
    // SAFETY: it is closed last.
    let ours = unsafe { Context::from_raw(&verbs, theirs.as_raw()) };
    let domain = ProtectionDomain::alloc(&theirs).expect("a domain");
    // SAFETY: it is deallocated later than this.
    let adopted = unsafe { ProtectionDomain::from_raw(&ours, domain.as_raw()) };
    account::happens(theirs.as_raw(), |event| event.event_type = IBV_EVENT_DEVICE_FATAL);
    assert_eq!(ours.async_event(), Ok(None));
    assert_eq!(ours.name(), "account0");
    drop((adopted, ours));
    let now = Account::now();
    assert_eq!((now.destroyed, now.refused), (before.destroyed, before.refused));
    assert!(theirs.async_event().is_ok_and(|event| event.is_some()));
}

#[test]
fn in_a_forked_child_nothing_is_destroyed() {
    let made = one_of_everything();
    let before = Account::now().destroyed;
    // SAFETY: the child only drops, counts and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(made);
        let count = Account::now().destroyed - before;
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::try_from(count).unwrap_or(99)) };
    }
    let mut status = 0;
    // SAFETY: the child was made above, and is waited for once.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "{status}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "that many objects of the parent's were destroyed");
    drop(made);
    assert_eq!(Account::now().destroyed - before, 9);
}

#[test]
fn a_machine_without_devices_is_said_to_have_none_however_libibverbs_says_it() {
    unsafe extern "C" fn none(_: *mut i32) -> *mut *mut super::super::bindings::ibv_device {
        super::super::table::set_errno(libc::ENOSYS);
        ptr::null_mut()
    }
    unsafe extern "C" fn empty(count: *mut i32) -> *mut *mut super::super::bindings::ibv_device {
        // SAFETY: libibverbs's caller gives a place.
        unsafe { *count = 0 };
        ptr::dangling_mut()
    }
    unsafe extern "C" fn refused(_: *mut i32) -> *mut *mut super::super::bindings::ibv_device {
        super::super::table::set_errno(libc::EPERM);
        ptr::null_mut()
    }
    for (answer, is_none) in [(none as _, true), (empty as _, true), (refused as _, false)] {
        let functions = Functions { get_device_list: Some(answer), ..Functions::default() };
        // SAFETY: the one function does what libibverbs's may do.
        let verbs = unsafe { Verbs::from_parts(functions, "a table") };
        for error in [
            Context::list(&verbs).expect_err("there is none"),
            Context::open(&verbs, "mlx5_0").expect_err("there is none"),
        ] {
            assert_eq!(error.errno == libc::ENODEV, is_none, "{error}");
            assert!(!is_none || error.to_string().contains("no RDMA device"), "{error}");
        }
    }
    // SAFETY: nothing is called.
    let verbs = unsafe { Verbs::from_parts(Functions::default(), "an empty table") };
    assert_eq!(Context::list(&verbs).expect_err("nothing to ask").errno, libc::ENOSYS);
}

/// Test of the machine's own library, which a CI machine may or may not have, with or without
/// devices.
#[test]
fn the_machines_own_library_answers_or_says_in_words_what_is_missing() {
    let verbs = match Verbs::open() {
        Ok(verbs) => verbs,
        Err(error) => {
            assert!(error.to_string().contains("libibverbs.so.1"), "{error}");
            eprintln!("skipped: {error}");
            return;
        }
    };
    assert!(Arc::ptr_eq(&verbs, &Verbs::open().expect("it is open already")));
    assert!(verbs.name().contains("libibverbs.so.1"), "{verbs:?}");
    let event = verbs.event_name(IBV_EVENT_PORT_ERR);
    assert!(event.contains("port"), "{event}");
    match Context::list(&verbs) {
        Ok(names) => assert!(!names.is_empty()),
        Err(error) => assert_eq!(error.errno, libc::ENODEV, "{error}"),
    }
}

#[test]
fn a_device_that_is_not_there_is_refused_with_the_names_of_those_that_are() {
    let error = Context::open(&account::verbs(), "mlx5_7").expect_err("there is no such device");
    assert_eq!(error.device.as_deref(), Some("mlx5_7"));
    assert!(error.to_string().contains("those that there are: account0, account1"), "{error}");
}

#[test]
fn descriptors_of_events_do_not_block() {
    let context = open();
    let channel = CompletionChannel::create(&context).expect("a channel");
    for fd in [context.async_fd(), channel.fd()] {
        assert!(fcntl_getfl(fd).expect("it is open").contains(OFlags::NONBLOCK));
    }
    assert_eq!(context.async_event(), Ok(None));
    assert_eq!(channel.take_events(), 0);
}

#[test]
fn events_are_told_with_what_they_are_about_and_acknowledged_at_once() {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let queue = CompletionQueue::create(&context, 1, None).expect("a queue");
    let pair = QueuePair::create(&domain, &spec(&queue, None)).expect("a queue pair");
    let next = || context.async_event().expect("the device answers").expect("it has happened");
    let before = Account::now().acknowledged;

    account::happens(context.as_raw(), |event| {
        event.event_type = IBV_EVENT_QP_FATAL;
        event.element.qp = pair.as_raw();
    });
    assert_eq!(
        next(),
        AsyncEvent {
            kind: IBV_EVENT_QP_FATAL,
            about: Subject::QueuePair { number: pair.number() }
        }
    );
    account::happens(context.as_raw(), |event| {
        event.event_type = IBV_EVENT_CQ_ERR;
        event.element.cq = queue.as_raw();
    });
    assert_eq!(next().about, Subject::CompletionQueue { address: queue.as_raw().addr() });
    account::happens(context.as_raw(), |event| {
        event.event_type = IBV_EVENT_PORT_ERR;
        event.element.port_num = 2;
    });
    assert_eq!(next().about, Subject::Port(2));
    account::happens(context.as_raw(), |event| event.event_type = 999);
    assert_eq!(next(), AsyncEvent { kind: 999, about: Subject::Unknown });
    assert_eq!(Account::now().acknowledged - before, 4);
    assert_eq!(context.async_event(), Ok(None));
}

#[test]
fn events_of_a_completion_channel_are_all_taken_and_acknowledged() {
    let context = open();
    let channel = CompletionChannel::create(&context).expect("a channel");
    let queue = CompletionQueue::create(&context, 1, Some(&channel)).expect("a queue");
    let before = Account::now().acknowledged;
    for _ in 0..3 {
        account::notifies(queue.as_raw());
    }
    assert_eq!(channel.take_events(), 3);
    assert_eq!(Account::now().acknowledged - before, 3);
    assert_eq!(channel.take_events(), 0);
}

#[test]
fn the_wish_for_relaxed_ordering_goes_where_it_may_be_ignored_and_nowhere_else() {
    let (plain, relaxed) = (ALL, ALL | AccessFlags::RELAXED_ORDERING);
    let register = |verbs: &Arc<Verbs>, access| {
        let context = Context::open(verbs, "account0").expect("the simulated device opens");
        let domain = ProtectionDomain::alloc(&context).expect("a domain");
        let mut memory = [0_u8; 8];
        // SAFETY: the memory outlives the region, in which nothing is posted.
        let region =
            unsafe { domain.register(memory.as_mut_ptr(), 8, access) }.expect("it is registered");
        assert_eq!((region.addr(), region.len()), (memory.as_ptr().addr(), 8));
        account::last_registration()
    };
    let bits = IBV_ACCESS_RELAXED_ORDERING;
    assert_eq!(register(&account::verbs(), plain), ("ibv_reg_mr", plain.bits()));
    assert_eq!(register(&account::verbs(), relaxed), ("ibv_reg_mr_iova2", plain.bits() | bits));
    // A library that is too old for it does not learn of the wish.
    let functions = Functions { reg_mr_iova2: None, ..account::functions() };
    // SAFETY: the rest of a good table.
    let old = unsafe { Verbs::from_parts(functions, "an older table") };
    assert_eq!(register(&old, relaxed), ("ibv_reg_mr", plain.bits()));
}

#[test]
fn a_kernel_that_refuses_the_wish_for_memory_of_a_dma_buf_registers_it_without() {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let fd = std::fs::File::open("/dev/null").expect("it is always there");
    let access = ALL | AccessFlags::RELAXED_ORDERING;
    // SAFETY: nothing is registered by the account.
    let region = unsafe { domain.register_dmabuf(fd.as_fd(), 4096, 100, 0x7000, access) };
    let region = region.expect("it is registered");
    assert_eq!((region.addr(), region.len()), (0x7000, 100));
    assert_eq!(account::last_registration(), ("ibv_reg_dmabuf_mr", ALL.bits()));
}

#[test]
fn parts_of_two_contexts_do_not_make_a_queue_pair() {
    let (one, other) = (open(), Context::open(&account::verbs(), "account1").expect("another one"));
    let domain = ProtectionDomain::alloc(&one).expect("a domain");
    let queue = CompletionQueue::create(&other, 1, None).expect("a queue");
    let error =
        QueuePair::create(&domain, &spec(&queue, None)).expect_err("they are of two devices");
    assert_eq!(error.errno, libc::EINVAL);
    assert!(
        error.to_string().contains("send completion queue is of another context (account1)"),
        "{error}"
    );
    let channel = CompletionChannel::create(&one).expect("a channel");
    assert!(CompletionQueue::create(&other, 1, Some(&channel)).is_err());
}

#[test]
fn what_a_device_grants_is_what_is_told() {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let queue = CompletionQueue::create(&context, 100, None).expect("a queue");
    assert_eq!(queue.depth(), 128);
    queue.resize(129).expect("there is room");
    assert_eq!(queue.depth(), 256);
    assert_eq!(queue.resize(u32::MAX).expect_err("nothing is that deep").errno, libc::EINVAL);
    assert_eq!(queue.depth(), 256);
    let pair = QueuePair::create(&domain, &spec(&queue, None)).expect("a queue pair");
    // The account grants half of what is asked for inline, and one more of everything else.
    assert_eq!((pair.inline(), pair.send_depth(), pair.send_sge()), (32, 17, 3));
}

#[test]
fn a_list_that_is_taken_in_part_names_the_first_that_was_not() {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let queue = CompletionQueue::create(&context, 1, None).expect("a queue");
    let receives = SharedReceiveQueue::create(&domain, 10, 1).expect("receives");
    let pair = QueuePair::create(&domain, &spec(&queue, None)).expect("a queue pair");

    let mut second = ibv_send_wr { wr_id: account::REFUSED, ..Default::default() };
    let mut first = ibv_send_wr { wr_id: 1, next: &raw mut second, ..Default::default() };
    // SAFETY: a list of two without pieces, of which the account reads only numbers.
    let failure = unsafe { pair.post_send(&raw mut first) }.expect_err("the second is refused");
    assert_eq!((failure.errno, failure.bad_wr), (libc::ENOMEM, &raw mut second));
    assert!(
        failure.error("ibv_post_send", context.name()).to_string().contains("account0"),
        "{failure:?}"
    );

    let mut second = ibv_recv_wr { wr_id: account::REFUSED, ..Default::default() };
    let mut first = ibv_recv_wr { wr_id: 1, next: &raw mut second, ..Default::default() };
    // SAFETY: as above.
    let failures = unsafe { [pair.post_recv(&raw mut first), receives.post(&raw mut first)] };
    for failure in failures {
        let failure = failure.expect_err("the second is refused");
        assert_eq!((failure.errno, failure.bad_wr), (libc::ENOMEM, &raw mut second));
    }
}

#[test]
fn completions_come_in_order_and_a_queue_that_has_failed_says_so() {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let queue = CompletionQueue::create(&context, 8, None).expect("a queue");
    let pair = QueuePair::create(&domain, &spec(&queue, None)).expect("a queue pair");
    for wr_id in 1..=3 {
        let mut work = ibv_send_wr { wr_id, ..Default::default() };
        // SAFETY: without pieces.
        unsafe { pair.post_send(&raw mut work) }.expect("it is taken");
    }
    let mut room = [ibv_wc::default(); 2];
    let ids = |found: &[ibv_wc]| found.iter().map(|one| one.wr_id).collect::<Vec<_>>();
    assert_eq!(queue.poll(&mut room).map(ids), Ok(vec![1, 2]));
    assert_eq!(queue.poll(&mut room).map(ids), Ok(vec![3]));
    assert_eq!(queue.poll(&mut room).map(ids), Ok(vec![]));
    account::fails(queue.as_raw());
    assert_eq!(queue.poll(&mut room).map(ids), Err(PollFailure { code: -1 }));
    assert_eq!(queue.request_notification(), Ok(()));
}

#[test]
fn a_device_that_answers_with_more_than_was_asked_for_is_not_believed() {
    let context = open();
    let queue = CompletionQueue::create(&context, 8, None).expect("a queue");
    account::boasts(queue.as_raw());
    assert_eq!(queue.poll(&mut [ibv_wc::default(); 2]).expect_err("it cannot be").code, 3);
}

#[test]
fn a_refused_step_of_a_queue_pair_names_device_and_port() {
    let context = open();
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let queue = CompletionQueue::create(&context, 1, None).expect("a queue");
    let pair = QueuePair::create(&domain, &spec(&queue, None)).expect("a queue pair");
    let mut attr = ibv_qp_attr { port_num: 9, ..Default::default() };
    let mask = super::super::bindings::IBV_QP_PORT | super::super::bindings::IBV_QP_STATE;
    let error = pair.modify(&mut attr, mask).expect_err("there is no such port").to_string();
    assert!(error.starts_with("ibv_modify_qp on account0, port 9: Invalid argument"), "{error}");
    attr = ibv_qp_attr { port_num: 1, qp_state: 1, ..Default::default() };
    assert_eq!(pair.modify(&mut attr, mask), Ok(()));
    assert_eq!(pair.state(), Ok(1));
}

#[test]
fn addresses_of_a_port_are_found_by_the_table_and_without_it() {
    let by_table = open().gids(1).expect("there are some");
    let functions = Functions { query_gid_table: None, ..account::functions() };
    // SAFETY: the rest of a good table.
    let old = unsafe { Verbs::from_parts(functions, "an older table") };
    let one_by_one =
        Context::open(&old, "account0").and_then(|context| context.gids(1)).expect("the same");

    let mut v4 = [0; 16];
    v4[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
    let expected = GidEntry { index: GidIndex(2), gid: v4, kind: GidKind::RoceV2, ifindex: 7 };
    assert_eq!(by_table, [expected]);
    // A simulated device has no files of the kernel's.
    assert_eq!(one_by_one, [GidEntry { kind: GidKind::RoceV1, ifindex: 0, ..expected }]);
    assert_eq!((IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET), (2, 2));
    let error = open().gids(9).expect_err("there is no such port");
    assert_eq!(error.port, Some(9));
}

#[test]
fn what_only_newer_libraries_have_is_unsupported_without_an_end_of_everything() {
    let context =
        Context::open(&account::verbs(), "account1").expect("one without extended functions");
    let domain = ProtectionDomain::alloc(&context).expect("a domain");
    let error = domain.for_one_thread().expect_err("there is no such thing");
    assert!(error.is_unsupported(), "{error}");
    assert_eq!((error.call, error.device.as_deref()), ("ibv_alloc_td", Some("account1")));
    let attr = context.extended_attr().expect("what the older call says");
    assert_eq!((attr.orig_attr.phys_port_cnt, attr.odp_caps.general_caps), (1, 0));
    assert_eq!(open().extended_attr().expect("all of it").odp_caps.general_caps, 1);
    assert_eq!(context.port_attr(1).expect("it is there").active_speed_ex, 0);
    assert_eq!(open().port_attr(1).expect("it is there").active_speed_ex, 128);
    assert!(context.sysfs().is_none());
    assert!(context.async_fd().as_raw_fd() >= 0);
}

#[test]
fn all_objects_may_go_from_thread_to_thread() {
    fn shared<T: Send + Sync>() {}
    shared::<Context>();
    shared::<ProtectionDomain>();
    shared::<MemoryRegion>();
    shared::<CompletionChannel>();
    shared::<CompletionQueue>();
    shared::<SharedReceiveQueue>();
    shared::<QueuePair>();
}
