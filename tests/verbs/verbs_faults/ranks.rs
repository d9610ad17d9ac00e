//! Faults as a runtime's operations see them: each ends once, with its buffer, and where it fails
//! the error names the rank.

use crate::support::nics::{fabric, nic};
use crate::support::sink::Sink;
use crate::support::{Job, OverSimulatedNic, Watchdog, built, connect, pattern, until_with_errors};
use carrack::bootstrap::InProcess;
use carrack::{OpError, PostError, Rank, Runtime, Tag, UserContext};
use carrack_simulators::nic::{Call, Config, SimulatedNic, Visibility, Which};
use carrack_transports::verbs::VerbsOptions;
use carrack_transports::verbs::sys::bindings::{
    IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Starts three ranks, each with a NIC of its own, whose links are up.
fn job() -> (Vec<Runtime>, Vec<Arc<SimulatedNic>>) {
    let fabric = fabric();
    let nics: Vec<_> = (0..3).map(|_| nic(Config::default(), &fabric)).collect();
    let settings = built(OverSimulatedNic::settings());
    let start = |(bootstrap, nic): (InProcess, &Arc<SimulatedNic>)| {
        let options = VerbsOptions {
            packet_size: settings.packet_size(),
            receives: 32,
            ..VerbsOptions::default()
        };
        let builder = Runtime::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap));
        builder.transport(Box::new(nic.transport(options))).start().unwrap()
    };
    let ranks: Vec<_> = InProcess::job(3).unwrap().into_iter().zip(&nics).map(start).collect();
    connect(&ranks);
    (ranks, nics)
}

/// Sends of all lengths between all ranks, and their receives.
struct Traffic {
    ends: Sink,
    posted: BTreeSet<u64>,
    /// Operations between ranks that stay connected.
    must_succeed: BTreeSet<u64>,
    next: u64,
}

impl Traffic {
    fn post(&mut self, ranks: &[Runtime], lost: Rank) {
        for from in ranks {
            for to in ranks.iter().filter(|to| to.rank() != from.rank()) {
                for size in [8, 300, 5000, 100_000] {
                    self.next += 2;
                    let (tag, concerned) =
                        (Tag(self.next), [from.rank(), to.rank()].contains(&lost));
                    let recv = to
                        .post_recv(from.rank(), vec![0; size], tag)
                        .user_context(UserContext(self.next))
                        .comp(&self.ends)
                        .submit();
                    self.note(self.next, concerned, recv);
                    let send = from
                        .post_send(to.rank(), pattern(self.next, size), tag)
                        .user_context(UserContext(self.next + 1))
                        .comp(&self.ends)
                        .submit();
                    self.note(self.next + 1, concerned, send);
                }
            }
        }
    }

    fn note(&mut self, number: u64, concerned: bool, outcome: Result<(), PostError>) {
        match outcome {
            Ok(()) => {
                self.posted.insert(number);
                if !concerned {
                    self.must_succeed.insert(number);
                }
            }
            Err(error) => {
                assert!(concerned && matches!(error, PostError::PeerDown { .. }), "{error}")
            }
        }
    }
}

/// Checks that each operation posted around a fault of rank 0's NIC ends once. Those that do not
/// involve rank 0 succeed.
fn everything_ends_once(what: &str, fault: impl FnOnce(&SimulatedNic)) {
    let (ranks, nics) = job();
    let mut traffic = Traffic {
        ends: Sink::keeping(),
        posted: BTreeSet::new(),
        must_succeed: BTreeSet::new(),
        next: 0,
    };
    traffic.post(&ranks, Rank(0));
    fault(&nics[0]);
    traffic.post(&ranks, Rank(0));
    let mut ended = BTreeSet::new();
    let mut failed = 0;
    until_with_errors(&ranks, || {
        for status in traffic.ends.take() {
            let number = status.user_context.0;
            assert!(ended.insert(number), "{what}: {number} has ended twice");
            let size = status.buffer.len();
            assert!([8, 300, 5000, 100_000].contains(&size), "{what}: its buffer is lost");
            if let Some(error) = &status.error {
                failed += 1;
                assert!(
                    !traffic.must_succeed.contains(&number),
                    "{what}: {number} between others: {error}"
                );
                assert!(
                    matches!(**error, OpError::PeerDown { .. } | OpError::Refused(_)),
                    "{what}: {error}"
                );
            } else if number % 2 == 0 {
                let right = carrack::transports::mem::copy::copy_now;
                let mut bytes = vec![0; size];
                right(carrack::transports::mem::MemMut::host(&mut bytes), status.buffer.view())
                    .unwrap();
                assert!(bytes == pattern(number, size), "{what}: {number} is torn");
            }
        }
        ended.len() == traffic.posted.len()
    });
    println!("{what}: {failed} of {} failed", ended.len());
    assert_eq!(ended, traffic.posted);
}

#[test]
#[ignore = "full: half a minute; every fault in turn"]
fn whatever_a_nic_does_each_operation_ends_once() {
    let _watchdog = Watchdog::over("operations");
    for nth in [1, 4, 30] {
        for status in [IBV_WC_RETRY_EXC_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR] {
            everything_ends_once("a request fails", |nic| {
                nic.faults().fail_sends(Which::Nth(nth), status)
            });
            everything_ends_once("a receive fails", |nic| {
                nic.faults().fail_receives(Which::Nth(nth), status)
            });
        }
        everything_ends_once("overrun", |nic| nic.faults().overrun(Which::Nth(nth)));
        everything_ends_once("polling", |nic| {
            nic.faults().fail_call(Call::PollCq, Which::Nth(nth), libc::EIO)
        });
        everything_ends_once("posting", |nic| {
            nic.faults().fail_call(Call::PostSend, Which::Nth(nth), libc::EIO)
        });
        everything_ends_once("receives", |nic| {
            nic.faults().fail_call(Call::PostSrqRecv, Which::Nth(nth), libc::EIO);
        });
    }
    everything_ends_once("the port goes down", |nic| assert!(nic.set_port(0, 1, false)));
    everything_ends_once("the device is taken out", |nic| assert!(nic.remove(0)));
    for visibility in [Visibility::WithCompletion, Visibility::WithRead] {
        everything_ends_once("late", |nic| nic.faults().write_visibility(visibility, true));
    }
}
