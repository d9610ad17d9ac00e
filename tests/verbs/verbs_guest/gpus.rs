//! Memory of simulated GPUs that a real driver's dma-bufs are made of. The kernel's Soft-RoCE
//! writes to it and reads from it, with the driver that `--dmabuf` builds.

use super::is_in_guests;
use super::network::LIMIT;
use crate::support::guard::Guarded;
use crate::support::sink::Sink;
use crate::support::{Job, OverVerbs, Watchdog, built, connect, pattern, rdma_device};
use carrack::bootstrap::InProcess;
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Rank, Runtime, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;
use std::time::Duration;

/// Within a packet; what is written by a NIC; more than one request's pages.
const SIZES: [usize; 5] = [1, 4096, 8193, 100_003, 1 << 20];

/// Returns `true` if the driver takes dma-bufs.
fn takes_dmabufs() -> bool {
    let is_there = std::env::var("LD_PRELOAD").is_ok_and(|libraries| libraries.contains("dmabuf"));
    if !is_there {
        println!(
            "skipped: dma-bufs: cargo xtask rdma-guest --dmabuf --test verbs -- verbs_guest::gpus \
            runs it"
        );
    }
    is_there
}

#[test]
fn a_gpus_memory_is_put_got_and_sent_by_its_dma_buf_and_no_engine_copies_it() {
    if !is_in_guests("dma-bufs", "1") || !takes_dmabufs() {
        return;
    }
    let _watchdog = Watchdog::patient("dma-bufs", LIMIT);
    let drivers = [21, 22].map(|seed| {
        let driver = FakeDriver::new(FakeConfig { seed, ..FakeConfig::default() }).unwrap();
        driver.faults().lend_udmabufs(true);
        driver
    });
    let start = |(at, bootstrap): (usize, InProcess)| {
        let settings = OverVerbs::settings()
            .setting("verbs_device", rdma_device(at))
            .setting("verbs_retries", 7);
        let builder = Runtime::builder().settings(built(settings)).bootstrap(Box::new(bootstrap));
        builder.gpu_driver(Arc::new(drivers[at].clone())).start().unwrap()
    };
    let ranks: Vec<_> = InProcess::job(2).unwrap().into_iter().enumerate().map(start).collect();
    connect(&ranks);
    let memory = |rank: usize, len: usize| {
        let gpu = drivers[rank].gpu(0).unwrap();
        let whole = gpu.allocate(Guarded::room(len) + 13, Flavour::Plain).unwrap();
        // At an odd place.
        Guarded::within(whole.subregion(13, Guarded::room(len)).unwrap(), len, len as u64)
    };
    let copies = || drivers.iter().map(|driver| driver.counters().copies).sum::<u64>();
    for (seed, size) in (1..).zip(SIZES) {
        let (bytes, back) = (pattern(seed, size), memory(0, size));
        let (source, target) = (memory(0, size).filled(&bytes), memory(1, size));
        let mr = ranks[1].register_memory(target.slice().region()).unwrap();
        let slice = target.slice();
        let rmr = mr.remote_key().slice(slice.offset() as u64, slice.len() as u64).unwrap();
        let sink = Sink::keeping();
        // The first operation asks where the region is, and goes by its owner.
        let mut get = ranks[0].post_get(Rank(1), vec![0; 1], &rmr, 0).comp(&sink);
        get.submit().unwrap();
        assert!(sink.one(&ranks).error.is_none());

        let before = copies();
        let mut put = ranks[0].post_put(Rank(1), source.slice(), &rmr, 0).comp(&sink);
        put.submit().unwrap();
        assert!(sink.one(&ranks).error.is_none());
        let mut get = ranks[0].post_get(Rank(1), back.slice(), &rmr, 0).comp(&sink);
        get.submit().unwrap();
        assert!(sink.one(&ranks).error.is_none());
        assert_eq!(copies(), before, "an engine has copied what the NIC was to move, {size} B");
        target.assert_holds(&bytes);
        back.assert_holds(&bytes);

        let (arrives, received, sent) = (memory(1, size), Sink::keeping(), Sink::keeping());
        let mut receive = ranks[1].post_recv(Rank(0), arrives.slice(), Tag(seed)).comp(&received);
        receive.submit().unwrap();
        let mut send = ranks[0].post_send(Rank(1), source.slice(), Tag(seed)).comp(&sent);
        send.submit().unwrap();
        assert!(received.one(&ranks).error.is_none() && sent.one(&ranks).error.is_none());
        arrives.assert_holds(&bytes);
    }
    assert!(drivers.iter().all(|driver| driver.counters().dmabufs > 0));
    let paths = ranks[0].explain(Duration::from_secs(10));
    let to_the_other = paths.iter().find(|paths| paths.rank == Rank(1)).unwrap();
    let way = to_the_other.kinds.iter().find(|kind| kind.memory.starts_with("device 0")).unwrap();
    assert!(way.way.contains("by a dma-buf"), "{way:?}");
}

/// The driver as the kernel has it: the reason is told, and what cannot be registered goes by
/// engines.
#[test]
fn a_driver_that_takes_no_dma_bufs_is_named_as_the_reason() {
    if !is_in_guests("no dma-bufs", "1") || takes_dmabufs() {
        return;
    }
    let _watchdog = Watchdog::patient("no dma-bufs", LIMIT);
    let driver = FakeDriver::new(FakeConfig { seed: 23, ..FakeConfig::default() }).unwrap();
    driver.faults().lend_udmabufs(true);
    let start = |(at, bootstrap): (usize, InProcess)| {
        let settings = built(
            OverVerbs::settings()
                .setting("verbs_device", rdma_device(at))
                .setting("verbs_retries", 7),
        );
        let builder = Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap));
        builder.gpu_driver(Arc::new(driver.clone())).start().unwrap()
    };
    let ranks: Vec<_> = InProcess::job(2).unwrap().into_iter().enumerate().map(start).collect();
    connect(&ranks);
    let paths = ranks[0].explain(Duration::from_secs(10));
    let to_the_other = paths.iter().find(|paths| paths.rank == Rank(1)).unwrap();
    let way = to_the_other.kinds.iter().find(|kind| kind.memory.starts_with("device 0")).unwrap();
    println!("{way:?}");
    let why = format!("{} {:?}", way.way, way.why);
    assert!(why.contains("ibv_reg_dmabuf_mr"), "{why}");
}
