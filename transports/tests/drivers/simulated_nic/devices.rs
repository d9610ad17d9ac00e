//! Devices, addresses, limits, and the order in which things may end.

#![expect(unsafe_code, reason = "registrations of memory, and libibverbs by its functions")]

use crate::verbs::*;
use carrack_simulators::nic::{Config, Limits, LinkLayer, SimulatedNic, go_round};
use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{
    CompletionChannel, CompletionQueue, Context, GidKind, ProtectionDomain, QueuePair,
    SharedReceiveQueue, Verbs,
};
use std::sync::Arc;
use std::time::Duration;

/// Writes once from `a` to `b`, and checks the bytes.
fn write_once(bench: &Bench) {
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(100), bench.b.buffer(100));
    let sent = a.fill(1);
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    bench.a.success();
    assert_eq!(b.read(0..100), sent);
}

#[test]
fn ports_of_infiniband_are_reached_by_their_lids() {
    let config = Config { link_layer: LinkLayer::InfiniBand, ..Config::devices(2) };
    let bench = Bench::simulated(config);
    let (a, b) = (&bench.a, &bench.b);
    assert_eq!(u32::from(a.port.link_layer), ibv::IBV_LINK_LAYER_INFINIBAND);
    assert!(a.port.lid != 0 && b.port.lid != 0 && a.port.lid != b.port.lid);
    assert_eq!(
        a.context.gids(1).unwrap().iter().map(|gid| gid.kind).collect::<Vec<_>>(),
        [GidKind::Infiniband]
    );
    assert_eq!(a.route_to(b).is_global, 0);
    write_once(&bench);
}

#[test]
fn an_ethernet_port_has_the_addresses_that_real_drivers_have_and_no_lid() {
    let nic = SimulatedNic::new(Config { ports: 2, ..Config::default() }).unwrap();
    let context = Context::open(&nic.verbs(), "sim0").unwrap();
    let kinds = |port| context.gids(port).unwrap().iter().map(|gid| gid.kind).collect::<Vec<_>>();
    use GidKind::{RoceV1, RoceV2};
    assert_eq!(kinds(1), [RoceV1, RoceV2, RoceV1, RoceV2]);
    assert_eq!(kinds(2), kinds(1));
    assert_ne!(context.gids(1).unwrap()[3].gid, context.gids(2).unwrap()[3].gid);
    assert_eq!(context.port_attr(1).unwrap().lid, 0);
    assert!(context.port_attr(3).is_err());
}

#[test]
fn a_device_without_extended_calls_works_as_an_old_library_does() {
    let bench = Bench::simulated(Config { extended: false, ..Config::devices(2) });
    assert!(bench.a.domain.for_one_thread().is_err());
    write_once(&bench);
    let bench = Bench::simulated(Config::devices(2));
    let alone = bench.a.domain.for_one_thread().unwrap();
    drop(Buffer::new(&alone, 10, all_access()));
}

#[test]
fn nics_of_one_process_have_their_own_devices_and_do_not_meet() {
    let (one, other) = (Bench::simulated(Config::devices(3)), Bench::simulated(Config::devices(2)));
    assert_eq!(Context::list(&one.nic().verbs()).unwrap().len(), 3);
    assert_eq!(Context::list(&other.nic().verbs()).unwrap().len(), 2);
    let options = Options { timeout: 8, retries: 1, ..Options::default() };
    let (qa, qb) = (one.a.queue_pair(&options, None), other.b.queue_pair(&options, None));
    connect(&one.a, &qa, &other.b, &qb, &options);
    let (a, b) = (one.a.buffer(8), other.b.buffer(8));
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    // At that address is a device of its own network, which has no such queue pair.
    assert_eq!(one.a.completion().status, ibv::IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn limits_are_kept_to() {
    let limits = Limits {
        queue_pairs: 2,
        work_requests: 8,
        pieces: 2,
        inline: 0,
        completion_queues: 3,
        completions: 10,
        shared_receive_queues: 1,
        shared_receives: 4,
        memory_regions: 1,
        protection_domains: 2,
        reads: 1,
        atomics: true,
        on_demand: false,
        locked: 5000,
        thread_domains: 1,
        message: 1000,
    };
    let nic = SimulatedNic::new(Config { limits, ..Config::default() }).unwrap();
    let context = Context::open(&nic.verbs(), "sim0").unwrap();
    let attr = context.device_attr().unwrap();
    assert_eq!(
        (attr.max_qp, attr.max_qp_wr, attr.max_sge, attr.max_cqe, attr.max_mr),
        (2, 8, 2, 10, 1)
    );
    assert_eq!(context.port_attr(1).unwrap().max_msg_sz, 1000);
    let domain = ProtectionDomain::alloc(&context).unwrap();
    let other = ProtectionDomain::alloc(&context).unwrap();
    assert_eq!(ProtectionDomain::alloc(&context).err().map(|why| why.errno), Some(libc::ENOMEM));
    drop(other);
    drop(ProtectionDomain::alloc(&context).unwrap());
    assert!(CompletionQueue::create(&context, 11, None).is_err());
    let cq = CompletionQueue::create(&context, 10, None).unwrap();
    assert!(SharedReceiveQueue::create(&domain, 5, 1).is_err());
    let srq = SharedReceiveQueue::create(&domain, 4, 1).unwrap();
    assert!(SharedReceiveQueue::create(&domain, 4, 1).is_err());
    drop(srq);
    let spec = |send_depth, send_sge, inline| carrack_transports::verbs::sys::QueuePairSpec {
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        send_depth,
        recv_depth: 1,
        send_sge,
        recv_sge: 1,
        inline,
    };
    for (send_depth, send_sge, inline) in [(9, 1, 0), (1, 3, 0), (1, 1, 1)] {
        assert!(QueuePair::create(&domain, &spec(send_depth, send_sge, inline)).is_err());
    }
    let _two = [(); 2].map(|()| QueuePair::create(&domain, &spec(8, 2, 0)).unwrap());
    assert!(QueuePair::create(&domain, &spec(1, 1, 0)).is_err());
    let region = Buffer::new(&domain, 64, all_access());
    assert!(nowhere(&domain).is_err());
    drop(region);
}

#[test]
fn a_message_that_is_too_long_for_the_device_fails_locally() {
    let limits = Limits { message: 1000, ..Limits::default() };
    let bench = Bench::simulated(Config { limits, ..Config::devices(2) });
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(1001), bench.b.buffer(1001));
    Request::write(&[a.piece(0..1000)], b.remote(0)).post(&qa);
    bench.a.success();
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    assert_eq!(bench.a.completion().status, ibv::IBV_WC_LOC_LEN_ERR);
}

#[test]
fn reads_beyond_what_may_be_in_flight_wait_for_their_turn() {
    let limits = Limits { reads: 1, ..Limits::default() };
    let bench = Bench::simulated(Config { limits, ..Config::devices(2) });
    let options = Options::default();
    let (qa, qb) = (bench.a.queue_pair(&options, None), bench.b.queue_pair(&options, None));
    initialize(&qa, &options);
    let mut attr = ibv::ibv_qp_attr {
        qp_state: ibv::IBV_QPS_RTR,
        max_dest_rd_atomic: 2,
        path_mtu: 5,
        dest_qp_num: qb.number(),
        ah_attr: bench.a.route_to(&bench.b),
        ..ibv::ibv_qp_attr::default()
    };
    assert!(qa.modify(&mut attr, TO_RTR).is_err(), "more than the device can");
}

#[test]
fn packets_of_any_size_carry_messages_of_any_length() {
    for packet in [1 << 10, 4096, 60 << 10] {
        let bench = Bench::simulated(Config { packet, ..Config::devices(2) });
        let (qa, qb) = bench.connect(&Options::default());
        for len in [packet - 1, packet, packet + 1, 40 * packet + 7] {
            let (a, b) = (bench.a.buffer(len), bench.b.buffer(len));
            let sent = a.fill(len as u8);
            post_receive(&qb, 1, &[b.piece(0..len / 2), b.piece(len / 2..len)]);
            Request::send(&[a.whole()]).post(&qa);
            bench.a.success();
            bench.b.success();
            assert!(b.read(0..len) == sent, "send of {len}");
            let back = b.fill(len as u8 ^ 0xff);
            Request::read(&[a.whole()], b.remote(0)).post(&qa);
            bench.a.success();
            assert!(a.read(0..len) == back, "read of {len}");
        }
    }
    assert!(SimulatedNic::new(Config { packet: 100, ..Config::default() }).is_err());
}

/// The raw table refuses to destroy objects that are still in use.
#[test]
fn what_others_stand_on_is_not_destroyed() {
    let bench = Bench::simulated(Config::devices(2));
    let (qa, _qb) = bench.connect(&Options::default());
    let verbs: Arc<Verbs> = bench.nic().verbs();
    let node = &bench.a;
    // SAFETY: these calls are refused, so no object that is in use is destroyed.
    let refused = unsafe {
        [
            verbs.close_device(node.context.as_raw()),
            verbs.dealloc_pd(node.domain.as_raw()),
            verbs.destroy_cq(node.cq.as_raw()),
            verbs.destroy_comp_channel(node.channel.as_raw()),
        ]
    };
    assert!(
        refused.iter().all(|answer| answer.as_ref().is_err_and(|why| why.errno == libc::EBUSY)),
        "{refused:?}"
    );
    let srq = SharedReceiveQueue::create(&node.domain, 1, 1).unwrap();
    let qp = node.queue_pair(&Options::default(), Some(&srq));
    // SAFETY: as above.
    assert!(unsafe { verbs.destroy_srq(srq.as_raw()) }.is_err());
    drop((qp, qa));
}

#[test]
fn a_queue_whose_events_are_not_acknowledged_is_destroyed_when_they_are() {
    let bench = Bench::simulated(Config::devices(2));
    let verbs = bench.nic().verbs();
    let channel = CompletionChannel::create(&bench.a.context).unwrap();
    let cq = CompletionQueue::create(&bench.a.context, 10, Some(&channel)).unwrap();
    let options = Options::default();
    let qa = bench.a.queue_pair_with(&options, None, &cq).unwrap();
    let qb = bench.b.queue_pair(&options, None);
    connect(&bench.a, &qa, &bench.b, &qb, &options);
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    cq.request_notification().unwrap();
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    assert!(readable(channel.fd(), PATIENCE));
    let (mut found, mut of) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the channel is there, and the places for the answers are.
    unsafe { verbs.get_cq_event(channel.as_raw(), &raw mut found, &raw mut of) }.unwrap();
    assert_eq!(found, cq.as_raw());
    drop(qa);
    let (tell, told) = std::sync::mpsc::channel();
    let ending = std::thread::spawn(move || {
        drop(cq);
        let _ = tell.send(());
    });
    assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "it waits");
    // SAFETY: the queue is not gone before this event is acknowledged.
    unsafe { verbs.ack_cq_events(found, 1) }.unwrap();
    told.recv_timeout(PATIENCE).unwrap();
    ending.join().unwrap();
}

#[test]
fn everything_can_be_destroyed_that_is_not_in_use() {
    let nic = SimulatedNic::new(Config::default()).unwrap();
    let limits =
        Limits { queue_pairs: 1, completion_queues: 1, protection_domains: 1, ..Limits::default() };
    drop(nic);
    let nic = SimulatedNic::new(Config { limits, ..Config::default() }).unwrap();
    for _ in 0..3 {
        let context = Context::open(&nic.verbs(), "sim0").unwrap();
        let domain = ProtectionDomain::alloc(&context).unwrap();
        let channel = CompletionChannel::create(&context).unwrap();
        let cq = CompletionQueue::create(&context, 10, Some(&channel)).unwrap();
        let node = Node {
            gid: context.gids(1).unwrap()[3],
            port: context.port_attr(1).unwrap(),
            context,
            domain,
            channel,
            cq,
        };
        let qp = node.queue_pair(&Options::default(), None);
        drop((qp, node));
    }
}

#[test]
fn a_route_that_cannot_be_is_refused() {
    let bench = Bench::simulated(Config::devices(2));
    let right = bench.a.route_to(&bench.b);
    let options = Options::default();
    let create = |route: ibv::ibv_ah_attr| {
        let pair = bench.a.queue_pair(&options, None);
        initialize(&pair, &options);
        let mut attr = ibv::ibv_qp_attr {
            qp_state: ibv::IBV_QPS_RTR,
            path_mtu: bench.a.port.active_mtu,
            dest_qp_num: 1,
            min_rnr_timer: 12,
            ah_attr: route,
            ..ibv::ibv_qp_attr::default()
        };
        pair.modify(&mut attr, TO_RTR).is_ok()
    };
    assert!(create(right));
    let mut wrong = [right; 4];
    wrong[0].port_num = 2;
    wrong[1].grh.sgid_index = 4;
    wrong[2].is_global = 0;
    wrong[3].grh.dgid = ibv::ibv_gid { raw: [9; 16] };
    assert!(wrong.into_iter().all(|route| !create(route)));
}

#[test]
fn a_connection_whose_first_packets_numbers_differ_never_comes_about() {
    let bench = Bench::simulated(Config::devices(2));
    let options = Options { timeout: 8, retries: 0, ..Options::default() };
    let (qa, qb) = bench.connect(&options);
    let other = bench.b.queue_pair(&options, None);
    drop(qb);
    // The right device, but not the queue pair that `qa` knows.
    bring_up(&other, &bench.b.route_to(&bench.a), qa.number(), 5, &options);
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    assert_eq!(bench.a.completion().status, ibv::IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn a_thousand_ranks_in_one_process_write_to_each_other() {
    const RANKS: usize = 1000;
    raise_descriptors();
    let nic = SimulatedNic::new(Config::devices(RANKS)).unwrap();
    let verbs = nic.verbs();
    let nodes: Vec<Node> = (0..RANKS).map(|at| Node::open(&verbs, &format!("sim{at}"))).collect();
    let options = Options { depth: 4, ..Options::default() };
    let buffers: Vec<Buffer> = nodes.iter().map(|node| node.buffer(16)).collect();
    let pairs: Vec<_> = (0..RANKS)
        .map(|at| {
            let next = (at + 1) % RANKS;
            let (from, to) =
                (nodes[at].queue_pair(&options, None), nodes[next].queue_pair(&options, None));
            connect(&nodes[at], &from, &nodes[next], &to, &options);
            (from, to)
        })
        .collect();
    for (at, (qp, _)) in pairs.iter().enumerate() {
        buffers[at].write(0, &(at as u64).to_ne_bytes());
        Request::write(&[buffers[at].piece(0..8)], buffers[(at + 1) % RANKS].remote(8)).post(qp);
    }
    for node in &nodes {
        node.success();
    }
    for at in 0..RANKS {
        assert_eq!(buffers[(at + 1) % RANKS].word(8), at as u64);
    }
}

/// Raises the limit of descriptors to the system's maximum: each rank has two of its own, for its
/// events.
fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit })
        .unwrap();
}

#[test]
fn a_nic_without_devices_is_a_machine_without_them() {
    let nic = SimulatedNic::new(Config::devices(0)).unwrap();
    let refused = Context::open(&nic.verbs(), "sim0").expect_err("there is none");
    assert_eq!(refused.errno, libc::ENODEV, "{refused}");
}

#[test]
fn nics_that_come_and_go_on_one_network_always_have_an_engine() {
    let fabric = format!("coming and going in {}", std::process::id());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    write_once(&Bench::simulated(Config {
                        fabric: Some(fabric.clone()),
                        ..Config::devices(2)
                    }));
                }
            });
        }
    });
}

#[test]
fn when_a_nic_has_gone_round_all_that_was_posted_before_has_ended() {
    let fabric = format!("rounds in {}", std::process::id());
    let bench = Bench::simulated(Config { fabric: Some(fabric), ..Config::devices(2) });
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    for number in 0..200 {
        post_receive(&qb, number, &[b.whole()]);
        Request::send(&[a.whole()]).id(number).post(&qa);
        go_round();
        for node in [&bench.a, &bench.b] {
            let mut space = [ibv::ibv_wc::default()];
            let found = node.cq.poll(&mut space).unwrap();
            let found: Vec<_> = found.iter().map(|found| (found.wr_id, found.status)).collect();
            assert_eq!(found, [(number, ibv::IBV_WC_SUCCESS)]);
        }
    }
    drop((qa, qb, a, b, bench));
    // Calls to engines that have stopped, or stop now, do not wait forever.
    go_round();
}
