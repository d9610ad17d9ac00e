//! Ranks of one process, whose messages go through its queues.

use crate::support::sink::Sink;
use crate::support::{
    Job, OverLoopback, Watchdog, built, happens, posted, settle, unstarted, until,
    until_with_errors,
};
use carrack::buffer::Region;
use carrack::settings::TransportChoice;
use carrack::transports::gpu::{EventState, GpuError, GpuEvent};
use carrack::{
    AtomicAgent, Mr, OpError, Outcome, PostError, Rank, RegisterError, RemoteKey, Runtime, Status,
    Synchronizer, Tag,
};
use carrack_simulators::nic::{Config, Limits, SimulatedNic, Which};
use carrack_transports::verbs::VerbsOptions;
use carrack_transports::verbs::sys::bindings::IBV_WC_RETRY_EXC_ERR;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Creates a NIC for each configuration, on a network of their own.
fn nics(configs: impl IntoIterator<Item = Config>) -> Vec<Arc<SimulatedNic>> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let fabric = format!("words {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let nic =
        |config| SimulatedNic::new(Config { fabric: Some(fabric.clone()), ..config }).unwrap();
    configs.into_iter().map(|config| Arc::new(nic(config))).collect()
}

/// Starts a rank for each NIC. Their messages go through the queues of this process, since that is
/// quicker.
fn ranks(nics: &[Arc<SimulatedNic>]) -> Vec<Runtime> {
    let transports = vec![TransportChoice::Loopback, TransportChoice::VerbsSimulated];
    let settings = built(OverLoopback::settings().transports(transports));
    // A quarter of a second until something is sent again, of what is lost.
    let options = VerbsOptions {
        timeout: 16,
        packet_size: settings.packet_size(),
        ..VerbsOptions::default()
    };
    let ranks = unstarted(u32::try_from(nics.len()).unwrap()).into_iter().zip(nics);
    let start = |(bootstrap, nic): (_, &Arc<SimulatedNic>)| {
        let builder = Runtime::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap));
        builder.transport(Box::new(nic.transport(options.clone()))).start().unwrap()
    };
    ranks.map(start).collect()
}

fn words(owner: &Runtime, region: &Region) -> Result<(Mr, RemoteKey), RegisterError> {
    let mr = owner.registration(region).atomics(AtomicAgent::Nic).register()?;
    let rmr = mr.remote_key();
    Ok((mr, rmr))
}

/// Adds to a word while all ranks make progress, and returns the word's previous value.
fn add(ranks: &[Runtime], at: usize, rmr: &RemoteKey, value: u64) -> Result<u64, String> {
    let sink = Sink::keeping();
    let post = || ranks[at].post_fetch_add(rmr.owner(), rmr, 0, value).comp(&sink).submit();
    post().map_err(|error| error.to_string())?;
    let status = sink.one(ranks).ok().map_err(|error| error.to_string())?;
    Ok(status.value().unwrap())
}

#[test]
fn ranks_that_reach_the_memory_otherwise_go_by_the_nic_all_the_same() {
    let _watchdog = Watchdog::over("words of a NIC next to a loopback");
    let ranks = ranks(&nics([(); 3].map(|()| Config::default())));
    let region = Region::host(64);
    let (_mr, rmr) = words(&ranks[1], &region).unwrap();
    // First: who has mapped the memory, and who owns it, has the NIC's word, not its own.
    let put =
        ranks[0].post_put(Rank(1), 5_u64.to_le_bytes().to_vec(), &rmr, 0).try_submit().unwrap();
    assert!(put.is_done(), "it is mapped");
    for at in [0, 1, 2, 1, 0] {
        add(&ranks, at, &rmr, 10).unwrap();
    }
    assert_eq!(region.fetch_add(0, 0), Ok(55), "no operation uses it any more");
    const EACH: u64 = 1000;
    std::thread::scope(|scope| {
        for rank in &ranks {
            let rmr = RemoteKey::from_bytes(&rmr.to_bytes()).unwrap();
            scope.spawn(move || {
                let (mut left, ended) = (EACH, Synchronizer::new(EACH as usize));
                while left > 0 {
                    match rank
                        .post_fetch_add(Rank(1), &rmr, 8, 1)
                        .comp(&ended)
                        .try_submit()
                        .unwrap()
                    {
                        Outcome::Posted => left -= 1,
                        _ => {
                            rank.progress().unwrap();
                        }
                    }
                }
                while !ended.test() {
                    rank.progress().unwrap();
                    std::thread::yield_now();
                }
            });
        }
    });
    assert_eq!(region.fetch_add(8, 0), Ok(3 * EACH), "operations were lost: there were two agents");
}

#[test]
fn a_nic_without_atomic_operations_is_no_agent_and_says_so() {
    let _watchdog = Watchdog::over("no atomic operations");
    let none = || Limits { atomics: false, ..Limits::default() };
    let few = || Limits { reads: 0, ..Limits::default() };
    let configs =
        [Limits::default(), none(), few()].map(|limits| Config { limits, ..Config::default() });
    let ranks = ranks(&nics(configs));
    let region = Region::host(64);
    for rank in &ranks[1..] {
        let refused = words(rank, &region).unwrap_err().to_string();
        assert!(
            refused.contains("verbs-simulated: sim0: the NIC does no atomic operations"),
            "{refused}"
        );
        assert!(
            refused.contains("loopback: it has no NIC") && refused.contains("AtomicAgent::Owner"),
            "{refused}"
        );
        // Its owner does them, as ever.
        let mr = rank.register_memory(&region).unwrap();
        ranks[0].post_fetch_add(rank.rank(), &mr.remote_key(), 0, 1).wait().unwrap();
    }
    assert_eq!(region.fetch_add(0, 0), Ok(2));
    // Nor does it ask for any of others.
    let (_mr, rmr) = words(&ranks[0], &region).unwrap();
    for at in [1, 2] {
        let refused = add(&ranks, at, &rmr, 1).unwrap_err();
        assert!(
            refused.contains("rank 0 cannot be reached") && refused.contains("no atomic"),
            "{refused}"
        );
    }
    assert_eq!(add(&ranks, 0, &rmr, 1), Ok(2), "the owner itself has a NIC that does");
    // An end that is just being made is waited for, when it closes.
    settle(&ranks);
}

#[test]
fn a_nic_that_has_few_atomic_operations_in_flight_holds_the_others_back() {
    let _watchdog = Watchdog::over("few atomic operations at a time");
    let few = [16, 1, 2]
        .map(|reads| Config { limits: Limits { reads, ..Limits::default() }, ..Config::default() });
    let ranks = ranks(&nics(few));
    let region = Region::host(64);
    for owner in &ranks {
        let (mr, rmr) = words(owner, &region).unwrap();
        let (sink, before) = (Sink::keeping(), region.fetch_add(0, 0).unwrap());
        for rank in &ranks {
            for _ in 0..50 {
                let post = || rank.post_fetch_add(rmr.owner(), &rmr, 0, 1).comp(&sink).try_submit();
                assert!(posted(&ranks, post).is_posted());
            }
        }
        until(&ranks, || sink.count() == 150);
        let mut held: Vec<_> =
            sink.take().iter().map(|status| status.value().unwrap() - before).collect();
        held.sort_unstable();
        assert!(held.into_iter().eq(0..150), "one is lost, or was done twice");
        // The next one's NIC is the agent then.
        drop(mr);
        settle(&ranks);
    }
}

#[test]
fn what_a_rank_without_that_transport_is_told() {
    let _watchdog = Watchdog::over("no NIC");
    let nics = nics([Config::default()]);
    let settings = built(OverLoopback::settings());
    let mut job = unstarted(2).into_iter();
    let both = built(
        OverLoopback::settings()
            .transports(vec![TransportChoice::Loopback, TransportChoice::VerbsSimulated]),
    );
    let options = VerbsOptions { packet_size: both.packet_size(), ..VerbsOptions::default() };
    let builder = Runtime::builder().settings(both).bootstrap(Box::new(job.next().unwrap()));
    let has = builder.transport(Box::new(nics[0].transport(options))).start().unwrap();
    let lacks = Runtime::builder()
        .settings(settings)
        .bootstrap(Box::new(job.next().unwrap()))
        .start()
        .unwrap();
    let ranks = [has, lacks];
    let region = Region::host(64);
    let refused = words(&ranks[1], &region).unwrap_err().to_string();
    assert!(refused.contains("verbs-simulated: CARRACK_TRANSPORT leaves it out"), "{refused}");
    let (_mr, rmr) = words(&ranks[0], &region).unwrap();
    let refused = add(&ranks, 1, &rmr, 1).unwrap_err();
    assert!(refused.contains("CARRACK_TRANSPORT leaves it out"), "{refused}");
    assert_eq!(add(&ranks, 0, &rmr, 1), Ok(0));
}

#[test]
fn an_end_is_withdrawn_only_behind_what_goes_over_the_other_link() {
    let _watchdog = Watchdog::over("withdrawn words");
    let nics = nics([(); 2].map(|()| Config::default()));
    let ranks = ranks(&nics);
    let region = Region::host(64);
    let (mr, rmr) = words(&ranks[1], &region).unwrap();
    assert_eq!(add(&ranks, 0, &rmr, 1), Ok(0));
    // Requests are lost for a while; meanwhile the owner ends the registration, and says so by the
    // path of messages.
    assert!(nics[0].set_port(0, 1, false));
    let sink = Sink::keeping();
    let mut begun = 0;
    let mut is_stale =
        || match ranks[0].post_fetch_add(Rank(1), &rmr, 0, 1).comp(&sink).try_submit() {
            Err(PostError::Stale(Rank(1))) => true,
            Ok(outcome) => {
                begun += u64::from(outcome.is_posted());
                false
            }
            Err(other) => panic!("{other}"),
        };
    assert!(!is_stale());
    drop(mr);
    assert!(happens(&ranks, Duration::from_secs(20), &mut is_stale), "it never heard of it");
    assert_eq!(sink.count(), 0, "they have ended: it was no test");
    assert!(nics[0].set_port(0, 1, true));
    until(&ranks, || sink.count() as u64 == begun);
    for status in sink.take() {
        assert!(status.error.is_none(), "a stale key has reached the NIC: {status:?}");
    }
    assert_eq!(region.fetch_add(0, 0), Ok(1 + begun));
    // And the link stands.
    settle(&ranks);
    let (_mr, rmr) = words(&ranks[1], &region).unwrap();
    assert_eq!(add(&ranks, 0, &rmr, 1), Ok(1 + begun));
}

#[test]
fn the_end_of_that_link_is_not_the_end_of_the_rank() {
    let _watchdog = Watchdog::over("a NIC that is gone");
    let nics = nics([(); 2].map(|()| Config::default()));
    let ranks = ranks(&nics);
    let region = Region::host(64);
    let (_mr, rmr) = words(&ranks[1], &region).unwrap();
    assert_eq!(add(&ranks, 0, &rmr, 1), Ok(0));
    let sink = Sink::keeping();
    assert!(nics[0].remove(0));
    let failed = || {
        let post = ranks[0].post_fetch_add(Rank(1), &rmr, 0, 1).comp(&sink).try_submit();
        matches!(
            post,
            Err(PostError::Unreachable { rank: Rank(1), ref why }) if why.contains("has ended")
        )
    };
    assert!(happens(&ranks, Duration::from_secs(20), failed), "operations go on without a NIC");
    for status in sink.take() {
        assert!(matches!(status.error.as_deref(), Some(OpError::PeerDown { .. })), "{status:?}");
    }
    // Messages go on in both directions.
    for [from, to] in [[0, 1], [1, 0]] {
        let arrived = Synchronizer::new(1);
        let from_rank = ranks[from].rank();
        let _ =
            ranks[to].post_recv(from_rank, vec![0; 5], Tag(1)).comp(&arrived).try_submit().unwrap();
        let _ = posted(&ranks, || {
            ranks[from].post_send(ranks[to].rank(), b"still", Tag(1)).try_submit()
        });
        until(&ranks, || arrived.test());
    }
    assert!(ranks.iter().all(|rank| rank.pending().down.is_empty()));
}

#[test]
fn what_a_rank_has_sent_before_it_went_is_heard_though_its_nic_went_first() {
    let _watchdog = Watchdog::over("the last messages");
    for _ in 0..20 {
        let mut ranks = ranks(&nics([(); 2].map(|()| Config::default())));
        let region = Region::host(64);
        let (_mr, rmr) = words(&ranks[1], &region).unwrap();
        assert_eq!(add(&ranks, 0, &rmr, 1), Ok(0));
        let (arrived, last) = (Sink::keeping(), ranks.remove(0));
        for number in 0..100 {
            let outcome =
                last.post_send(Rank(1), &[number], Tag(number.into())).try_submit().unwrap();
            assert!(outcome.is_done());
            let mut recv =
                ranks[0].post_recv(Rank(0), vec![0; 1], Tag(number.into())).comp(&arrived);
            recv.submit().unwrap();
        }
        drop(last);
        until(&ranks, || arrived.count() == 100 && ranks[0].peer_down(Rank(0)).is_some());
        for status in arrived.take() {
            assert!(status.error.is_none(), "a message was lost: {status:?}");
        }
    }
}

#[test]
fn a_flush_behind_an_atomic_that_fails_with_its_link_fails_though_the_rank_is_up() {
    let _watchdog = Watchdog::over("a link to words");
    let nics = nics([Config::default(), Config::default()]);
    let ranks = ranks(&nics);
    let region = Region::host(64);
    let (_mr, rmr) = words(&ranks[1], &region).unwrap();
    add(&ranks, 0, &rmr, 1).unwrap();
    let held = nics[0].faults().hold_device(0);
    let (added, flushed) = (Sink::keeping(), Sink::keeping());
    ranks[0].post_fetch_add(Rank(1), &rmr, 0, 1).comp(&added).submit().unwrap();
    assert!(ranks[0].post_flush(Rank(1)).comp(&flushed).try_submit().unwrap().is_posted());
    nics[0].faults().fail_sends(Which::All, IBV_WC_RETRY_EXC_ERR);
    drop(held);
    until_with_errors(&ranks, || added.count() == 1 && flushed.count() == 1);
    let is_down = |status: Status| matches!(status.ok(), Err(OpError::PeerDown { .. }));
    assert!(added.take().into_iter().chain(flushed.take()).all(is_down));
    let later = ranks[0].post_flush(Rank(1)).comp(&flushed).try_submit();
    assert!(matches!(later, Err(PostError::PeerDown { rank: Rank(1), .. })), "{later:?}");
    assert!(ranks[0].peer_down(Rank(1)).is_none());
}

/// Returns `true` if a barrier of these ranks ends well in time.
fn barrier_ends(ranks: &[Runtime], within: Duration) -> bool {
    let (ended, ends) = std::sync::mpsc::channel();
    for rank in ranks {
        let (rank, ended) = (rank.clone(), ended.clone());
        std::thread::spawn(move || {
            let outcome = rank.barrier();
            let _ = ended.send(outcome.map_err(|error| error.to_string()));
        });
    }
    ranks.iter().all(|_| ends.recv_timeout(within).is_ok_and(|outcome| outcome.is_ok()))
}

/// The owner waits, in its next collective, until all ranks have released the region.
#[test]
fn a_region_is_released_behind_an_atomic_that_ended_well_or_was_lost_with_its_link() {
    let _watchdog = Watchdog::over("a release");
    for fails in [false, true] {
        let nics = nics([Config::default(), Config::default()]);
        let ranks = ranks(&nics);
        let region = Region::host(64);
        let (mr, rmr) = words(&ranks[1], &region).unwrap();
        add(&ranks, 0, &rmr, 1).unwrap();
        assert!(barrier_ends(&ranks, Duration::from_secs(10)), "before");
        let held = nics[0].faults().hold_device(0);
        let added = Sink::keeping();
        ranks[0].post_fetch_add(Rank(1), &rmr, 0, 1).comp(&added).submit().unwrap();
        // The owner ends the registration, while the atomic operation is in flight.
        drop(mr);
        (0..300).for_each(|_| crate::support::step(&ranks));
        assert_eq!(added.count(), 0);
        if fails {
            nics[0].faults().fail_sends(Which::All, IBV_WC_RETRY_EXC_ERR);
        }
        drop(held);
        until_with_errors(&ranks, || added.count() == 1);
        assert_eq!(added.take()[0].error.is_some(), fails);
        happens(&ranks, Duration::from_millis(300), || false);
        assert!(ranks.iter().all(|rank| rank.pending().down.is_empty()), "both ranks are up");
        assert!(barrier_ends(&ranks, Duration::from_secs(15)), "the owner's barrier never ends");
    }
}

/// An event that fires when its program says so.
#[derive(Debug)]
struct Fires(AtomicBool);

impl EventState for Fires {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(self.0.load(Ordering::SeqCst))
    }

    fn wait(&self) -> Result<(), GpuError> {
        Ok(())
    }
}

#[test]
fn a_flush_behind_an_atomic_that_waits_and_is_lost_with_its_link_fails() {
    let _watchdog = Watchdog::over("a waiting atomic");
    let nics = nics([Config::default(), Config::default()]);
    let ranks = ranks(&nics);
    let region = Region::host(64);
    let (_mr, rmr) = words(&ranks[1], &region).unwrap();
    add(&ranks, 0, &rmr, 1).unwrap();
    let fires = Arc::new(Fires(false.into()));
    let event = GpuEvent::new(fires.clone());
    let (added, flushed) = (Sink::keeping(), Sink::keeping());
    let mut post = ranks[0].post_fetch_add(Rank(1), &rmr, 0, 1).after(&event).comp(&added);
    post.submit().unwrap();
    ranks[0].post_flush(Rank(1)).comp(&flushed).submit().unwrap();
    assert!(nics[1].remove(0));
    happens(&ranks, Duration::from_secs(2), || false);
    let now = ranks[0].post_fetch_add(Rank(1), &rmr, 0, 1).comp(&added).try_submit();
    assert!(now.is_err(), "the link is up: {now:?}");
    assert_eq!(added.count() + flushed.count(), 0);
    fires.0.store(true, Ordering::SeqCst);
    until_with_errors(&ranks, || added.count() == 1 && flushed.count() == 1);
    let added = added.take().remove(0).ok();
    let flushed = flushed.take().remove(0).ok();
    assert!(added.is_err(), "{added:?}");
    assert!(flushed.is_err(), "the atomic ended with {added:?}, and the flush with {flushed:?}");
}
