//! One of eight ranks is stopped, goes on, and is killed, with messages to it in flight. The others
//! exchange messages all the time.
//!
//! `TEST_SLOW=40` runs this number of phases, and gives figures. Rank 0 prints the lower quartile,
//! over the phases, of the time of an exchange. The peer is in turn idle and stopped, and then
//! dead.

use crate::support::ranks::{Ranks, Role};
use crate::support::{Job, OverShm, OverTcp, Watchdog, amount, pattern, rng, sent};
use carrack::{CompQueue, OpError, PostError, Rank, Runtime, Synchronizer, Tag, WaitError};
use rand::Rng;
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

const SIZE: u32 = 8;
const SLOW: Rank = Rank(SIZE - 1);
/// Exchanges in a phase.
const ROUNDS: u64 = 50;
/// Lengths of the messages to the slow rank. The last one needs an answer.
const TO_SLOW: [usize; 33] = {
    let mut lengths = [8; 33];
    lengths[32] = 300_000;
    lengths
};

/// Phases with an idle peer or a stopped one.
pub(crate) fn phases() -> u64 {
    amount("TEST_SLOW", 4, 4)
}

#[test]
fn a_rank_that_is_stopped_or_killed_among_eight_holds_up_no_message_between_the_others() {
    let _watchdog = Watchdog::patient("slow", Duration::from_secs(120 + 4 * phases()));
    for is_tcp in [0, 1] {
        let mut ranks = Ranks::start("ordeals::slow", SIZE, &[rng().random(), is_tcp]);
        let all_say = |ranks: &mut Ranks, what: &str, phase: u64| {
            let what = format!("{what} {phase}");
            assert!((0..SLOW.0).all(|rank| ranks.hears(&what, rank)), "{what}: one has ended");
        };
        let stop = |ranks: &Ranks| {
            ranks.signal(SLOW, Signal::STOP);
            while !ranks.is_stopped(SLOW) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for phase in 0..phases() {
            let stops = phase % 2 == 1;
            if stops {
                stop(&ranks);
            }
            ranks.says(&format!("go {phase}"));
            all_say(&mut ranks, "exchanged", phase);
            if stops {
                assert!(ranks.is_stopped(SLOW), "it went on: it was no test");
                ranks.signal(SLOW, Signal::CONT);
            }
            all_say(&mut ranks, "settled", phase);
        }
        stop(&ranks);
        for phase in phases()..phases() * 3 / 2 {
            ranks.says(&format!("go {phase}"));
            all_say(&mut ranks, "posted", phase);
            if phase == phases() {
                ranks.signal(SLOW, Signal::KILL);
            }
            all_say(&mut ranks, "settled", phase);
        }
        ranks.succeed_except(SLOW);
    }
}

pub(crate) fn rank(role: &Role) {
    let [seed, is_tcp] = role.words[..] else { panic!("two words") };
    let settings = if is_tcp == 1 { OverTcp::settings() } else { OverShm::settings() };
    let me =
        ExchangingRank { role, seed, runtime: role.runtime(settings), ended: CompQueue::new(256) };
    me.exchange(0, SIZE);
    if me.runtime.rank() == SLOW {
        return me.is_slow();
    }
    let mut took: [Vec<Duration>; 3] = Default::default();
    for phase in 0..phases() * 3 / 2 {
        let is_dead = phase >= phases();
        role.awaits(&format!("go {phase}"), &me.runtime);
        let flying = if is_dead || phase % 2 == 1 { me.post(phase) } else { 0 };
        role.says(&format!("posted {phase}"));
        let began = Instant::now();
        for round in 0..ROUNDS {
            me.exchange(1 + phase * ROUNDS + round, SLOW.0);
        }
        took[if is_dead { 2 } else { phase as usize % 2 }].push(began.elapsed());
        role.says(&format!("exchanged {phase}"));
        me.settle(flying, is_dead);
        role.says(&format!("settled {phase}"));
    }
    if role.rank == 0 && phases() > 4 {
        let [idle, stopped, dead] = took.map(|mut took| {
            took.sort();
            took[took.len() / 4].as_secs_f64() / ROUNDS as f64 * 1e6
        });
        let (by_stopped, by_dead) = (stopped / idle, dead / idle);
        let path = ["shm", "tcp"][is_tcp as usize];
        eprintln!(
            "{path}: {idle:.0} us with an idle peer, {stopped:.0} us with a stopped one \
            ({by_stopped:.3}), {dead:.0} us with a dead one ({by_dead:.3})"
        );
    }
    me.sleeps();
    role.meet("over", &me.runtime, 0..SLOW.0);
}

struct ExchangingRank<'a> {
    role: &'a Role,
    seed: u64,
    runtime: Runtime,
    /// Messages to the slow rank.
    ended: CompQueue,
}

impl ExchangingRank<'_> {
    fn bytes(&self, from: Rank, number: u64, len: usize) -> Vec<u8> {
        pattern(self.seed ^ u64::from(from.0) << 40 ^ number, len)
    }

    /// Sends a message to each of the first ranks, and receives theirs.
    fn exchange(&self, number: u64, ranks: u32) {
        let others = || (0..ranks).filter(|&rank| rank != self.role.rank).map(Rank);
        let (tag, arrived) = (Tag(number), Synchronizer::new(others().count()));
        for from in others() {
            self.runtime.post_recv(from, vec![0; 40], tag).comp(&arrived).submit().unwrap();
        }
        let own = self.bytes(self.runtime.rank(), number, 40);
        for to in others() {
            let runtime = std::slice::from_ref(&self.runtime);
            sent(runtime, || self.runtime.post_send(to, &own[..], tag).try_submit());
        }
        for status in arrived.wait(&self.runtime).unwrap() {
            assert_eq!(status.bytes().unwrap(), self.bytes(status.rank, number, 40), "{status:?}");
        }
    }

    /// Checks that a thread which waits takes no core, though a peer is dead.
    fn sleeps(&self) {
        let used = || clock_gettime(ClockId::ThreadCPUTime);
        let before = used();
        let ended = self.runtime.wait_for(Duration::from_millis(500), || false);
        assert!(matches!(ended, Err(WaitError::TimedOut(_))), "{ended:?}");
        let used = used() - before;
        assert!(used.tv_sec == 0 && used.tv_nsec < 20_000_000, "{used:?} of half a second");
    }

    fn tag(phase: u64, at: usize) -> Tag {
        Tag(1 << 50 | phase << 20 | at as u64)
    }

    /// Posts messages to the slow rank, and returns their number. A dead one is known as such.
    fn post(&self, phase: u64) -> usize {
        let mut flying = 0;
        for (at, len) in TO_SLOW.into_iter().enumerate() {
            let tag = Self::tag(phase, at);
            let bytes = self.bytes(self.runtime.rank(), tag.0, len);
            let mut send = self.runtime.post_send(SLOW, bytes, tag).comp(&self.ended);
            match send.submit() {
                Ok(()) => flying += 1,
                Err(PostError::PeerDown { rank: SLOW, .. }) if phase > phases() => {}
                Err(error) => panic!("{error}"),
            }
        }
        flying
    }

    /// Waits for messages to the slow rank.
    fn settle(&self, flying: usize, is_dead: bool) {
        for _ in 0..flying {
            let status = self.ended.wait_pop(&self.runtime).unwrap();
            match status.error.as_deref() {
                // A short message is complete when it is copied.
                None => assert!(!is_dead || status.size <= 8, "{status:?}"),
                Some(OpError::PeerDown { rank: SLOW, .. }) if is_dead => {}
                Some(error) => panic!("{error}"),
            }
        }
    }

    /// Receives what comes while this rank is stopped, and waits for its end.
    fn is_slow(&self) {
        for phase in (1..phases()).step_by(2) {
            for from in (0..SLOW.0).map(Rank) {
                for (at, len) in TO_SLOW.into_iter().enumerate() {
                    let tag = Self::tag(phase, at);
                    let status = self.runtime.post_recv(from, vec![0; len], tag).wait().unwrap();
                    let expected = self.bytes(from, tag.0, len);
                    assert!(status.bytes().unwrap() == expected, "{status:?}: other bytes");
                }
            }
        }
        self.runtime.wait(|| false).unwrap();
    }
}
