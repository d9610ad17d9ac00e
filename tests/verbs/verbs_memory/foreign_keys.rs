//! Remote keys of another job, and of ranks that have ended: each is a clear error, and none
//! reaches a NIC.

use super::{nics, ranks, settings};
use crate::support::folder::Folder;
use crate::support::ranks::scratch;
use crate::support::sink::Sink;
use crate::support::{Watchdog, built, connect, posted, settle, until};
use carrack::buffer::Region;
use carrack::{AtomicAgent, Mr, OpError, Outcome, PostError, Rank, RemoteKey, Runtime};
use carrack_simulators::nic::Config;
use carrack_transports::verbs::VerbsOptions;

fn registered(owner: &Runtime, region: &Region) -> [(Mr, RemoteKey); 2] {
    let agents = [(AtomicAgent::Owner, 0), (AtomicAgent::Nic, 512)];
    agents.map(|(agent, at)| {
        let part = region.subregion(at, 512).unwrap();
        let mr = owner.registration(&part).atomics(agent).register().unwrap();
        let rmr = mr.remote_key();
        (mr, rmr)
    })
}

/// Tries a put, a get and an atomic operation on rank 1's memory, and returns how each ended.
fn refusals(ranks: &[Runtime], rmr: &RemoteKey) -> [String; 3] {
    let zero = &ranks[0];
    let end = |call: &mut dyn FnMut(&Sink) -> Result<Outcome, PostError>| {
        let sink = Sink::keeping();
        loop {
            match call(&sink) {
                Ok(Outcome::Retry(_)) => {
                    zero.progress().unwrap();
                }
                Ok(Outcome::Posted) => return sink.one(ranks).ok().unwrap_err().to_string(),
                Ok(Outcome::Done(status)) => panic!("{status:?}"),
                Err(error) => return error.to_string(),
            }
        }
    };
    [
        end(&mut |sink| zero.post_put(Rank(1), vec![1; 100], rmr, 0).comp(sink).try_submit()),
        end(&mut |sink| zero.post_get(Rank(1), vec![1; 100], rmr, 0).comp(sink).try_submit()),
        end(&mut |sink| zero.post_fetch_add(Rank(1), rmr, 0, 1).comp(sink).try_submit()),
    ]
}

fn all_say(refusals: &[String; 3], what: &str) {
    assert!(refusals.iter().all(|refusal| refusal.contains(what)), "{refusals:?}");
}

/// Checks that the connection stands, and that valid keys still work.
fn still_works(ranks: &[Runtime], rmr: &RemoteKey) {
    let sink = Sink::keeping();
    for _ in 0..3 {
        let _ = posted(ranks, || {
            ranks[0].post_put(Rank(1), vec![0; 8], rmr, 8).comp(&sink).try_submit()
        });
        assert!(sink.one(ranks).error.is_none());
        ranks[0].post_fetch_add(Rank(1), rmr, 16, 1).comp(&sink).submit().unwrap();
        assert!(sink.one(ranks).error.is_none());
    }
    assert!(ranks.iter().all(|rank| rank.pending().down.is_empty()), "a connection has ended");
}

#[test]
fn a_region_of_another_job_is_none_of_this_one() {
    let _watchdog = Watchdog::over("another job");
    let options = VerbsOptions::default();
    let [mine, theirs] =
        [(); 2].map(|()| ranks(&nics([(); 2].map(|()| Config::default())), &options));
    // Registered in the same order on the same rank, so that all but the job is alike.
    let (own, other) = (Region::host(1024), Region::host(1024));
    let own_names = registered(&mine[1], &own);
    let names = registered(&theirs[1], &other);
    for ((_, foreign), (_, right)) in names.iter().zip(&own_names) {
        all_say(&refusals(&mine, foreign), "made in another job");
        // Also where it has come as bytes.
        let again = RemoteKey::from_bytes(&foreign.to_bytes()).unwrap();
        all_say(&refusals(&mine, &again), "rank 1");
        still_works(&mine, right);
    }
    assert!(other.whole().to_vec().unwrap().iter().all(|byte| *byte == 0));
    assert!(
        own.slice(0, 8).unwrap().to_vec().unwrap() == [0; 8],
        "it was taken for one of its own"
    );
}

#[test]
fn a_region_of_the_same_rank_before_it_started_again_is_not_registered() {
    let _watchdog = Watchdog::over("a rank that starts again");
    let folder = scratch().join(format!("carrack-again-{}", std::process::id()));
    let region = Region::host(1024);
    let life = || {
        // Empty, so that no rank finds keys that an earlier run published.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let ranks =
            nics([(); 2].map(|()| Config::default())).into_iter().zip(0..).map(|(nic, rank)| {
                let settings = built(settings());
                let options =
                    VerbsOptions { packet_size: settings.packet_size(), ..VerbsOptions::default() };
                let bootstrap = Folder::new(folder.clone(), rank, 2);
                let builder = Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap));
                builder.transport(Box::new(nic.transport(options))).start().unwrap()
            });
        let ranks: Vec<_> = ranks.collect();
        connect(&ranks);
        let names = registered(&ranks[1], &region);
        (ranks, names)
    };
    let (ranks, names) = life();
    still_works(&ranks, &names[0].1);
    let old = names.map(|(_, rmr)| RemoteKey::from_bytes(&rmr.to_bytes()).unwrap());
    drop(ranks);
    // The same job, rank, memory, and order of registrations.
    let (ranks, names) = life();
    for (old, (_, right)) in old.iter().zip(&names) {
        all_say(&refusals(&ranks, old), "not registered any more");
        still_works(&ranks, right);
    }
    drop(ranks);
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_region_of_a_rank_that_has_gone_is_refused_and_the_cause_named() {
    let _watchdog = Watchdog::over("a rank that has gone");
    let mut ranks = ranks(&nics([(); 2].map(|()| Config::default())), &VerbsOptions::default());
    let region = Region::host(1024);
    let names = registered(&ranks[1], &region);
    // One is known by use, the other not.
    let used = names[1].1.clone();
    let sink = Sink::keeping();
    ranks[0].post_fetch_add(Rank(1), &used, 0, 1).comp(&sink).submit().unwrap();
    assert!(sink.one(&ranks).error.is_none());
    settle(&ranks);
    // What waits for its owner's answer ends, too.
    let fresh = names.each_ref().map(|(_, rmr)| RemoteKey::from_bytes(&rmr.to_bytes()).unwrap());
    let late = Sink::keeping();
    let asks = ranks[0].post_fetch_add(Rank(1), &fresh[0], 0, 1).comp(&late).try_submit().unwrap();
    assert!(asks.is_posted());
    let names = names.map(|(mr, rmr)| {
        drop(mr);
        rmr
    });
    drop(ranks.remove(1));
    until(&ranks, || ranks[0].peer_down(Rank(1)).is_some() && late.count() == 1);
    let error = late.one(&ranks).ok().unwrap_err();
    assert!(
        matches!(error, OpError::PeerDown { rank: Rank(1), .. } | OpError::Stale(Rank(1))),
        "{error}"
    );
    for name in names.iter().chain(&fresh) {
        all_say(&refusals(&ranks, name), "rank 1 is gone");
    }
}
