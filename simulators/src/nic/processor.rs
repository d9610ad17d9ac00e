//! The engine's thread.

use super::address::PortBlock;
use super::completion::CompletionQueue;
use super::engine::{Engine, NicJob, Outbox};
use super::faults::Visibility;
use super::network::Network;
use super::queue_pair::QueuePair;
use super::wire::Packet;
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Packets that are delivered between two looks at other work.
const AT_ONCE: usize = 256;

#[derive(Debug)]
pub(super) struct Processor {
    engine: Arc<Engine>,
    network: Network,
    packets: VecDeque<Packet>,
    /// Queue pairs that have to be woken. The number tells those of the same time apart. Neither
    /// they nor their devices are kept alive by this.
    timers: BTreeMap<(Instant, u64), Weak<QueuePair>>,
    ticks: u64,
    held: Vec<Weak<QueuePair>>,
    late: Vec<Arc<CompletionQueue>>,
    /// Threads that wait for the end of this round.
    rounds: Vec<Sender<()>>,
}

impl Processor {
    pub(super) fn new(engine: &Arc<Engine>) -> Result<Self, Errno> {
        Ok(Self {
            network: Network::new(engine.fabric(), engine.bell.fd())?,
            engine: Arc::clone(engine),
            packets: VecDeque::new(),
            timers: BTreeMap::new(),
            ticks: 0,
            held: Vec::new(),
            late: Vec::new(),
            rounds: Vec::new(),
        })
    }

    pub(super) fn run(mut self) {
        loop {
            let for_all = self.engine.bell.heard();
            if self.engine.has_stopped() {
                return;
            }
            if for_all {
                self.engine
                    .devices()
                    .iter()
                    .for_each(|device| device.settle_writes(Visibility::AtOnce));
            }
            self.look_at_jobs();
            for pair in std::mem::take(&mut self.held).iter().filter_map(Weak::upgrade) {
                self.with(&pair, QueuePair::proceed);
            }
            for _ in 0..AT_ONCE {
                let Some(packet) = self.packets.pop_front() else { break };
                self.deliver(packet);
            }
            let next = self.look_at_the_clock();
            for told in self.rounds.drain(..) {
                // The thread may have stopped waiting.
                let _ = told.send(());
            }
            self.look_at_the_network(next);
        }
    }

    fn look_at_jobs(&mut self) {
        for job in self.engine.take_jobs() {
            match job {
                NicJob::Work(pair) => {
                    pair.heard();
                    let wait = pair.device.faults.next_scatter();
                    if wait.is_zero() {
                        self.with(&pair, QueuePair::proceed);
                    } else {
                        self.wake_at(Instant::now() + wait, &pair);
                    }
                }
                NicJob::Late(queue) => {
                    if !self.late.iter().any(|known| Arc::ptr_eq(known, &queue)) {
                        self.late.push(queue);
                    }
                }
                NicJob::Overrun(queue) => self.break_queue(&queue),
                NicJob::Listen(listener) => self.network.listen(listener),
                NicJob::Round(told) => self.rounds.push(told),
            }
        }
    }

    /// Moves all queue pairs that complete in a broken queue to the error state.
    fn break_queue(&mut self, queue: &Arc<CompletionQueue>) {
        queue.tell_that_it_broke();
        for pair in self.engine.devices().iter().flat_map(|device| device.queues()) {
            if Arc::ptr_eq(&pair.parts.send_cq, queue) || Arc::ptr_eq(&pair.parts.recv_cq, queue) {
                pair.completions_are_lost();
            }
        }
    }

    /// Runs `act` on a queue pair, and fulfils its requests.
    fn with(&mut self, pair: &Arc<QueuePair>, act: impl FnOnce(&Arc<QueuePair>, &mut Outbox)) {
        let mut out = Outbox::default();
        act(pair, &mut out);
        for when in std::mem::take(&mut out.wakes) {
            self.wake_at(when, pair);
        }
        if out.held {
            self.held.push(Arc::downgrade(pair));
        }
        self.packets.extend(out.packets);
    }

    fn wake_at(&mut self, when: Instant, pair: &Arc<QueuePair>) {
        self.ticks += 1;
        self.timers.insert((when, self.ticks), Arc::downgrade(pair));
    }

    fn deliver(&mut self, packet: Packet) {
        let block = packet.target.0.block();
        if let Some(device) = self.engine.device(packet.target.0) {
            let pair = device.queue(packet.target.1);
            let mut out = Outbox::default();
            device.deliver(packet, &mut out);
            if let Some(pair) = pair {
                out.wakes.drain(..).for_each(|when| self.wake_at(when, &pair));
                if out.held {
                    self.held.push(Arc::downgrade(&pair));
                }
            }
            self.packets.extend(out.packets);
        } else if self.engine.has_block(block) || self.engine.fabric().is_none() {
            self.lose(packet);
        } else if let Err(packet) = self.network.send(packet) {
            self.lose(packet);
        }
    }

    /// Drops a packet that cannot be delivered. A sender of this process is told.
    fn lose(&mut self, packet: Packet) {
        let mut out = Outbox::default();
        if self.engine.device(packet.source.0).is_some() {
            out.lost_without_queue_pair(&packet);
        }
        self.packets.extend(out.packets);
    }

    /// Does the work that is due, and returns the time of the next.
    fn look_at_the_clock(&mut self) -> Option<Instant> {
        if self.timers.is_empty() && self.late.is_empty() {
            return None;
        }
        let now = Instant::now();
        while let Some(first) = self.timers.first_entry() {
            if first.key().0 > now {
                break;
            }
            if let Some(pair) = first.remove().upgrade() {
                self.with(&pair, |pair, out| pair.wake(now, out));
            }
        }
        let mut next = self.timers.first_key_value().map(|((when, _), _)| *when);
        self.late.retain(|queue| match queue.release(now) {
            None => false,
            Some(due) => {
                next = next.into_iter().chain(due).min();
                true
            }
        });
        next
    }

    /// Takes in packets of other processes. Sleeps if there is no other work.
    fn look_at_the_network(&mut self, next: Option<Instant>) {
        let busy = !self.packets.is_empty() || !self.engine.bell.may_sleep();
        if busy && self.network.is_alone() {
            return;
        }
        let timeout = match next {
            _ if busy => Some(Duration::ZERO),
            Some(next) => Some(next.saturating_duration_since(Instant::now())),
            None => None,
        };
        let engine = Arc::clone(&self.engine);
        let is_ours = |block| engine.has_block(block);
        let gone = self.network.poll(timeout, &mut self.packets, is_ours);
        gone.into_iter().for_each(|block| self.peers_are_gone(block));
    }

    /// Handles the end of a process: all packets to it are lost.
    fn peers_are_gone(&mut self, block: PortBlock) {
        for pair in self.engine.devices().iter().flat_map(|device| device.queues()) {
            self.with(&pair, |pair, out| pair.peer_is_gone(block, out));
        }
    }
}
