//! A thousand ranks in one process.

use crate::support::nics::{fabric, nic};
use crate::support::{Job, OverSimulatedNic, Watchdog, built, pattern, posted};
use carrack::bootstrap::InProcess;
use carrack::settings::TransportChoice;
use carrack::{Counter, Handler, Rank, Runtime, Tag};
use carrack_simulators::nic::Config;
use carrack_transports::verbs::VerbsOptions;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const RANKS: u32 = 1000;

/// Descriptors that a rank takes here, both ends of its connections included: measured, and some
/// more.
const DESCRIPTORS: u64 = 16;

/// Raises this process's limit on descriptors to `count`. Returns `true` if it may open as many.
fn may_open(count: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= count) {
        return true;
    }
    let may = limit.maximum.is_none_or(|maximum| maximum >= count);
    may && setrlimit(Resource::Nofile, Rlimit { current: Some(count), ..limit }).is_ok()
}

#[test]
fn a_thousand_ranks_send_to_their_neighbours_and_to_rank_0() {
    let _watchdog = Watchdog::patient("a thousand ranks", Duration::from_secs(400));
    if !may_open(u64::from(RANKS) * DESCRIPTORS) {
        println!(
            "skipped: the hard limit on open files (`ulimit -Hn`) is below {}",
            u64::from(RANKS) * DESCRIPTORS
        );
        return;
    }
    let nic = nic(Config::default(), &fabric());
    // Little of everything: a thousand times.
    let options =
        VerbsOptions { send_depth: 16, receives: 16, packet_size: 1024, ..VerbsOptions::default() };
    let settings = OverSimulatedNic::settings()
        .transports(vec![TransportChoice::VerbsSimulated])
        .packet_size(1024);
    let settings = built(settings);
    let start = |bootstrap: InProcess| {
        let transport = nic.transport(options.clone());
        let builder = Runtime::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap));
        builder.transport(Box::new(transport)).start().unwrap()
    };
    let ranks: Vec<Runtime> = InProcess::job(RANKS).unwrap().into_iter().map(start).collect();
    let (wrong, arrived) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    // The same on all of them.
    let mut name = None;
    for rank in &ranks {
        let (wrong, arrived) = (wrong.clone(), arrived.clone());
        let check = move |status: carrack::Status| {
            let from = u64::from(status.rank.0);
            let right = status.error.is_none()
                && status.bytes() == Some(&pattern(from + status.tag.0, 100)[..]);
            wrong.fetch_add(u64::from(!right), Ordering::Relaxed);
            arrived.fetch_add(1, Ordering::Relaxed);
        };
        name = Some(rank.register_comp(&Handler::new(check)).unwrap());
    }
    let name = name.unwrap();
    let done = Counter::new();
    let mut sent = 0;
    for rank in &ranks {
        let me = rank.rank().0;
        for to in [0, (me + 1) % RANKS, (me + RANKS - 1) % RANKS] {
            let bytes = pattern(u64::from(me) + u64::from(to), 100);
            let mut am = rank.post_am(Rank(to), bytes, name).tag(Tag(to.into())).comp(&done);
            am.submit().unwrap();
            sent += 1;
        }
    }
    let begun = Instant::now();
    while arrived.load(Ordering::Relaxed) < sent {
        for rank in &ranks {
            rank.progress().unwrap();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(300),
            "{} of {sent}",
            arrived.load(Ordering::Relaxed)
        );
    }
    assert_eq!((arrived.load(Ordering::Relaxed), wrong.load(Ordering::Relaxed)), (sent, 0));
    // And back, over the connections that are there.
    let peer = [ranks[0].clone(), ranks[500].clone()];
    assert!(
        posted(&peer, || ranks[0]
            .post_am(Rank(500), pattern(500, 100), name)
            .tag(Tag(500))
            .try_submit())
        .is_done()
    );
    while arrived.load(Ordering::Relaxed) <= sent {
        for rank in &peer {
            rank.progress().unwrap();
        }
    }
    assert_eq!(wrong.load(Ordering::Relaxed), 0);
}
