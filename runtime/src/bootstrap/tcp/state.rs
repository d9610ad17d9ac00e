//! What the program's threads and the tree's thread share: the tree, its links, and what has come
//! for this rank.

#![forbid(unsafe_code)]

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rustix::event::PollFlags;

use super::super::arrivals::Arrivals;
use super::super::error::Departure;
use super::super::protocol::Frame;
use super::link::Link;
use super::tree::{Outgoing, Side, Tree};
use super::wire::Envelope;

#[derive(Debug)]
pub(super) struct State {
    rank: u32,
    tree: Tree,
    pub(super) arrivals: Arrivals,
    above: Option<Link>,
    below: Vec<Option<Link>>,
    /// Whose end has been read.
    ended: Vec<Side>,
    /// The bootstrap is dropped.
    pub(super) stop: bool,
    /// The thread has ended.
    pub(super) is_over: bool,
    pub(super) bytes_put: usize,
    pub(super) fences: u64,
    pub(super) traffic: Traffic,
}

/// What this rank has had to do for the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) links: usize,
    pub(super) sent: usize,
    pub(super) received: usize,
}

impl State {
    pub(super) fn new(tree: Tree, rank: u32, arrivals: Arrivals, above: Option<Link>) -> Self {
        let below = (0..tree.places_below()).map(|_| None).collect();
        let traffic = Traffic { links: usize::from(above.is_some()), ..Traffic::default() };
        Self {
            rank,
            tree,
            arrivals,
            above,
            below,
            ended: Vec::new(),
            stop: false,
            is_over: false,
            bytes_put: 0,
            fences: 0,
            traffic,
        }
    }

    /// Whether nobody else can come to a place below.
    pub(super) fn is_full(&self) -> bool {
        self.tree.vacancies() == 0
    }

    /// Which of the places below this is, if nobody has it.
    pub(super) fn vacancy(&self, place: u32) -> Option<usize> {
        self.tree.vacancy(place)
    }

    /// A rank has come to a place below.
    pub(super) fn attach(&mut self, place: u32, rank: u32, stream: TcpStream, from: SocketAddr) {
        let Some(at) = self.tree.vacancy(place) else { return };
        match Link::new(stream, rank, from) {
            Ok(link) => {
                self.below[at] = Some(link);
                self.traffic.links += 1;
                let out = self.tree.attach(at, rank);
                self.deliver(out);
            }
            Err(error) => {
                tracing::warn!(%from, rank, %error, "a rank that was let in is lost");
                self.missing(rank, Departure::Disconnected);
            }
        }
    }

    /// A rank is gone which has no link here.
    pub(super) fn missing(&mut self, rank: u32, how: Departure) {
        let out = self.tree.missing(rank, how);
        self.deliver(out);
    }

    /// This rank's own word.
    pub(super) fn say(&mut self, frame: Frame) {
        self.take(Side::Own, Envelope { rank: self.rank, frame });
        self.flush();
    }

    /// Reads what there is from this side.
    pub(super) fn fill(&mut self, side: Side) {
        if let Some(link) = self.link(side)
            && !link.fill()
        {
            self.ended.push(side);
        }
    }

    /// Takes in what has come and sends what there is room for, until nothing of either is left.
    pub(super) fn turn(&mut self) {
        loop {
            let mut taken = false;
            for side in self.sides() {
                taken |= self.pump(side);
            }
            self.flush();
            if !taken {
                return;
            }
        }
    }

    /// Whether some link has more to send than there was room for.
    pub(super) fn has_to_send(&self) -> bool {
        self.above.iter().chain(self.below.iter().flatten()).any(Link::has_to_send)
    }

    /// Whether all is said and done, here and below.
    pub(super) fn may_end(&self) -> bool {
        self.tree.is_over() && !self.has_to_send()
    }

    /// What to sleep for, at each link.
    pub(super) fn interests(&self) -> Vec<(Side, Arc<TcpStream>, PollFlags)> {
        let interest = |side| {
            let link = self.look(side)?;
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, self.listens_to(side) && !self.ended.contains(&side));
            flags.set(PollFlags::OUT, link.has_to_send());
            // Without either, the kernel would still tell of its end, over and over.
            (!flags.is_empty()).then(|| (side, link.stream(), flags))
        };
        self.sides().into_iter().filter_map(interest).collect()
    }

    /// Closes what is open; whoever still waits for something is told that it will not come.
    pub(super) fn end(&mut self) {
        if !self.tree.is_over() && !self.stop {
            let rank = self.rank;
            self.arrivals
                .above_gone(rank, "this very process, whose bootstrap thread has ended".into());
        }
        self.above = None;
        self.below.fill_with(|| None);
        self.is_over = true;
        let Traffic { links, sent, received } = self.traffic;
        tracing::debug!(rank = self.rank, links, sent, received, "the bootstrap has ended");
    }

    fn sides(&self) -> Vec<Side> {
        let below = self.below.iter().enumerate().filter(|(_, link)| link.is_some());
        let above = self.above.is_some().then_some(Side::Above);
        above.into_iter().chain(below.map(|(at, _)| Side::Below(at))).collect()
    }

    fn look(&self, side: Side) -> Option<&Link> {
        match side {
            Side::Own => None,
            Side::Above => self.above.as_ref(),
            Side::Below(at) => self.below.get(at)?.as_ref(),
        }
    }

    fn link(&mut self, side: Side) -> Option<&mut Link> {
        match side {
            Side::Own => None,
            Side::Above => self.above.as_mut(),
            Side::Below(at) => self.below.get_mut(at)?.as_mut(),
        }
    }

    /// Not to those below whose answers, or whose puts, do not get away.
    fn listens_to(&self, side: Side) -> bool {
        let is_full = |side| self.look(side).is_some_and(Link::is_full);
        side == Side::Above || !(is_full(side) || is_full(Side::Above))
    }

    /// Takes in what a side has sent. Whether there was anything.
    fn pump(&mut self, side: Side) -> bool {
        let mut taken = false;
        while self.listens_to(side) {
            let Some(link) = self.link(side) else { break };
            match link.next() {
                Ok(Some(envelope)) => {
                    taken = true;
                    self.traffic.received += 1;
                    self.take(side, envelope);
                }
                Ok(None) => {
                    if self.ended.contains(&side) {
                        self.lose(side, Departure::Disconnected);
                    }
                    break;
                }
                Err(bad) => {
                    self.misbehaved(side, &bad.to_string());
                    break;
                }
            }
        }
        taken
    }

    fn take(&mut self, side: Side, envelope: Envelope) {
        match self.tree.handle(side, envelope) {
            Ok(out) => self.deliver(out),
            Err(why) => self.misbehaved(side, &why),
        }
    }

    fn misbehaved(&mut self, side: Side, why: &str) {
        let rank = self.rank;
        let Some(link) = self.link(side) else {
            self.arrivals.take_in(Frame::Refused { why: why.to_owned() });
            return;
        };
        let (peer, address) = (link.rank, link.address);
        tracing::warn!(rank, peer, %address, why, "a rank sent what no rank sends, and is cut off");
        if side != Side::Above {
            let why = format!("rank {rank} cannot make sense of what rank {peer} sent: {why}");
            link.push(&Envelope { rank: peer, frame: Frame::Refused { why } });
            link.flush();
        }
        self.lose(side, Departure::Misbehaved);
    }

    fn lose(&mut self, side: Side, how: Departure) {
        self.ended.retain(|ended| *ended != side);
        let link = match side {
            Side::Own => None,
            Side::Above => self.above.take(),
            Side::Below(at) => self.below.get_mut(at).and_then(Option::take),
        };
        let Some(link) = link else { return };
        let out = self.tree.cut(side, link.rank, how);
        self.deliver(out);
        if side == Side::Above && !self.tree.is_over() {
            self.arrivals.above_gone(link.rank, link.address.to_string());
        }
    }

    fn deliver(&mut self, out: Outgoing) {
        for (side, envelope) in out {
            match self.link(side) {
                Some(link) => {
                    link.push(&envelope);
                    self.traffic.sent += 1;
                }
                None if side == Side::Own => self.arrivals.take_in(envelope.frame),
                None => {}
            }
        }
    }

    fn flush(&mut self) {
        self.above.iter_mut().chain(self.below.iter_mut().flatten()).for_each(Link::flush);
    }
}
