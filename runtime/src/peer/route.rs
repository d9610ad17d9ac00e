//! The route from a device to one peer: the link, and the backlog.

use super::address;
use super::backlog::Parked;
use super::endpoint::Endpoint;
use super::shares::Shares;
use crate::bootstrap::BootstrapError;
use crate::error::PostError;
use crate::local::Local;
use crate::names::Rank;
use crate::protocol::flow::{FlowSender, Hold, Room};
use crate::protocol::select::{PathVerdict, Verdict, choose};
use carrack_transports::contract::{
    Caps, DownCause, Link, Locality, PeerId, PeerMemory, Reach, SubmitError,
};
use carrack_transports::net::shortage;
use carrack_transports::sync::hurdles::{HurdleFlags, Hurdles};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The route from a device to one peer. Made when the peer is first used; a silent peer costs an
/// empty cell.
pub(crate) struct Route {
    pub(crate) rank: Rank,
    linked: OnceLock<Linked>,
    /// Lock that is held while the link is being made.
    linking: Mutex<()>,
    down: OnceLock<DownCause>,
    /// The peer's end, if an operation noticed it: this may be before progress does.
    told: OnceLock<DownCause>,
    backlog: Mutex<VecDeque<Parked>>,
    /// The number of waiting operations, and flags. [`DOWN`] is set once the peer is gone, [`HELD`]
    /// while it wants offers, and [`OFF`] while it wants replies only. Each post reads it without a
    /// lock.
    hurdles: Hurdles,
    /// The hold that the peer has told this device.
    hold: Mutex<FlowSender>,
    /// The peer keeps too many notifications.
    takes_no_notifications: AtomicBool,
    /// The link is made to find out whether the peer has closed this device, too.
    is_sought: AtomicBool,
    /// The link has been up, so its end is the peer's.
    was_up: AtomicBool,
    /// The transport over which one rank reaches words of the other rank whose coherence owner is a
    /// NIC.
    words_over: OnceLock<&'static str>,
    /// The link to the peer's NIC for these words, where messages take another path.
    to_words: OnceLock<Arc<dyn Link>>,
    /// The last shortage of this process for the link.
    lacks: Mutex<Option<String>>,
}

/// Flag of `hurdles`: the peer is gone. Its ring may still take a message, which would never be
/// read.
const DOWN: HurdleFlags = HurdleFlags::FIRST;
/// Flag of `hurdles`: the peer keeps too many messages already, so messages to be matched have to
/// be offered.
const HELD: HurdleFlags = HurdleFlags::SECOND;

/// Flag of `hurdles`: the peer has too many replies waiting, so nothing else may be posted.
const OFF: HurdleFlags = HurdleFlags::THIRD;

/// A link, and facts about it.
pub(crate) struct Linked {
    pub(crate) link: Arc<dyn Link>,
    pub(crate) transport: &'static str,
    pub(crate) caps: Caps,
    pub(crate) verdicts: Vec<PathVerdict>,
    /// The peer runs on this node, whatever path was chosen.
    pub(crate) is_on_this_node: bool,
    /// The peer's memory, or why the kernel does not copy from it.
    memory: OnceLock<Result<Arc<dyn PeerMemory>, String>>,
    /// Splits by which this rank and the peer share the copying.
    shares: OnceLock<Option<Arc<Shares>>>,
    /// The reason for which the kernel refused a copy.
    refused: OnceLock<String>,
}

impl Linked {
    /// Returns the peer's memory, if the kernel copies from it.
    pub(crate) fn peer_memory(&self) -> Option<Arc<dyn PeerMemory>> {
        let memory = match self.memory.get() {
            Some(known) => known.as_ref().ok()?.clone(),
            None => self.ask_for_memory().ok()?,
        };
        self.refused.get().is_none().then_some(memory)
    }

    /// Returns the reason why large messages go in fragments, if they do.
    pub(crate) fn why_parts(&self) -> Option<String> {
        let unasked = || match self.memory.get() {
            Some(known) => known.as_ref().err().cloned(),
            None => self.ask_for_memory().err(),
        };
        self.refused.get().cloned().or_else(unasked)
    }

    #[cold]
    fn ask_for_memory(&self) -> Result<Arc<dyn PeerMemory>, String> {
        let memory = self.link.peer_memory();
        // A link that is not connected may not know the reason yet.
        if memory.is_ok() || self.link.is_up() {
            let _ = self.memory.set(memory.clone());
        }
        memory
    }

    /// Returns the splits by which the peer helps with the copying of its messages, if the
    /// transport has them.
    pub(crate) fn shares(&self) -> Option<&Arc<Shares>> {
        self.shares.get_or_init(|| Some(Arc::new(Shares::new(self.link.splits()?)))).as_ref()
    }

    /// Notes that the kernel refused a copy: no further copy is tried.
    pub(crate) fn refuse_peer_memory(&self, why: String) {
        tracing::info!(why, "large messages go in fragments");
        let _ = self.refused.set(why);
    }
}

impl Linked {
    /// Returns the error for an operation that demands another path.
    #[cold]
    pub(crate) fn wrong_path(&self, rank: Rank, required: &'static str) -> PostError {
        let verdict = self.verdicts.iter().find(|path| path.transport == required);
        let why = verdict.map(|path| match &path.verdict {
            Verdict::Chosen => String::new(),
            Verdict::Passed(why) => {
                format!("{why}; set CARRACK_TRANSPORT={required} to have no other")
            }
            Verdict::Refused(why) => why.clone(),
        });
        let why = why.unwrap_or_else(|| "this build does not have it".into());
        PostError::Path { rank, chosen: self.transport, required, why }
    }
}

impl Route {
    pub(crate) fn new(rank: Rank) -> Self {
        Self {
            rank,
            linked: OnceLock::new(),
            linking: Mutex::new(()),
            down: OnceLock::new(),
            told: OnceLock::new(),
            backlog: Mutex::default(),
            hurdles: Hurdles::default(),
            hold: Mutex::default(),
            takes_no_notifications: AtomicBool::new(false),
            is_sought: AtomicBool::new(false),
            was_up: AtomicBool::new(false),
            words_over: OnceLock::new(),
            to_words: OnceLock::new(),
            lacks: Mutex::default(),
        }
    }

    /// Returns the link, if there is one already.
    #[inline(always)]
    pub(crate) fn linked(&self) -> Option<&Linked> {
        self.linked.get()
    }

    /// Returns the event that a link of a device waits for that is not up, for diagnostics.
    pub(crate) fn waits_for(&self, device: u32) -> Option<String> {
        match (self.linked(), self.lacks()) {
            (Some(linked), _) if linked.link.is_up() => None,
            (Some(_), _) => Some("the peer to accept the connection".into()),
            (None, Some(why)) => Some(format!("a connection: {why}")),
            (None, None) if device == 0 => Some("the peer to start".into()),
            (None, None) => Some(format!("the peer to make its device {device}")),
        }
    }

    /// Returns the last shortage of this process for the link.
    pub(crate) fn lacks(&self) -> Option<String> {
        self.lacks.lock().clone()
    }

    /// Returns the reason of the peer's end, if it is gone.
    pub(crate) fn down(&self) -> Option<&DownCause> {
        self.down.get()
    }

    /// Notes that the peer is gone. Returns `true` the first time.
    pub(crate) fn set_down(&self, cause: DownCause) -> bool {
        let news = self.down.set(cause).is_ok();
        self.hurdles.set(DOWN, true);
        news
    }

    /// Notes that an operation has noticed the peer's end.
    #[cold]
    pub(crate) fn tell_down(&self, cause: &DownCause) {
        // The end of a link to words is not the peer's end, and a shortage of descriptors says
        // nothing about the peer.
        let is_of_words =
            self.words_over.get().is_some_and(|transport| self.is_for_words(transport));
        if !is_of_words && !matches!(cause, DownCause::Lacking(_)) {
            let _ = self.told.set(cause.clone());
        }
    }

    /// Returns the reason of the peer's end, if an operation or progress has noticed it.
    pub(crate) fn told_down(&self) -> Option<&DownCause> {
        self.down().or_else(|| self.told.get())
    }

    /// Returns `true` if any message can go straight to the link. The backlog is empty, and the
    /// peer is neither known to be gone nor holds this sender.
    #[inline(always)]
    pub(crate) fn is_clear(&self) -> bool {
        self.hurdles.none()
    }

    /// Returns `true` if a message, or its offer, can go straight to the link.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.hurdles.none_but(HELD)
    }

    /// Returns `true` if a reply, or a message of the runtime's, can go straight to the link.
    #[inline]
    pub(crate) fn is_open_to_replies(&self) -> bool {
        self.hurdles.none_but(HELD.and(OFF))
    }

    /// Returns `true` if messages that will be matched have to be offered.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.hurdles.has(HELD)
    }

    /// Notes the hold that the peer tells this device.
    pub(crate) fn hold(&self, hold: Hold, turn: u64) {
        let mut tx = self.hold.lock();
        if tx.told(hold, turn) {
            self.hurdles.set(HELD, hold.room != Room::Any);
            self.takes_no_notifications.store(hold.room == Room::OffersOnly, Ordering::Relaxed);
        }
    }

    /// Returns `true` if the peer has told this device XOFF.
    pub(crate) fn was_told_off(&self) -> bool {
        self.hold.lock().hold().is_off
    }

    /// Notes that the peer has told XOFF to this device or another one, or to none.
    pub(crate) fn set_off(&self, is_off: bool) {
        self.hurdles.set(OFF, is_off);
    }

    /// Returns `true` if the peer takes only replies.
    #[inline]
    pub(crate) fn is_off(&self) -> bool {
        self.hurdles.has(OFF)
    }

    /// Returns `true` if puts and gets that notify the peer have to wait.
    pub(crate) fn takes_no_notifications(&self) -> bool {
        self.takes_no_notifications.load(Ordering::Relaxed)
    }

    /// Notes that the link is made to find out whether the peer has closed this device, too.
    pub(crate) fn seek(&self) {
        self.is_sought.store(true, Ordering::Relaxed);
    }

    /// Notes that the link has come up.
    pub(crate) fn connected(&self) {
        self.was_up.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the link was made to find that out, and has not come up.
    pub(crate) fn is_sought(&self) -> bool {
        self.is_sought.load(Ordering::Relaxed) && !self.was_up()
    }

    /// Returns `true` if the link has come up.
    pub(crate) fn was_up(&self) -> bool {
        self.was_up.load(Ordering::Relaxed)
    }

    /// Returns the number of operations in the backlog.
    pub(crate) fn waiting(&self) -> usize {
        self.hurdles.count()
    }

    pub(crate) fn backlog(&self) -> MutexGuard<'_, VecDeque<Parked>> {
        self.backlog.lock()
    }

    pub(crate) fn try_backlog(&self) -> Option<MutexGuard<'_, VecDeque<Parked>>> {
        self.backlog.try_lock()
    }

    /// Updates the hurdles after a change to the backlog, with its lock held.
    pub(crate) fn set_waiting(&self, count: usize) {
        self.hurdles.set_count(count);
    }

    /// Makes the link. `Ok(None)`: the peer has not published its address yet, another thread is
    /// making the link, or this process has a shortage, which was reported. A later call tries
    /// again.
    #[cold]
    pub(crate) fn link(
        &self,
        local: &Local,
        device: &Endpoint,
    ) -> Result<Option<&Linked>, PostError> {
        if local.is_forked() {
            // The peer would take the link for the parent's.
            return Err(PostError::Forked);
        }
        match self.try_link(local, device) {
            Err(PostError::Lacking { rank, why }) => {
                let mut lacks = self.lacks.lock();
                if lacks.is_none() {
                    shortage::tell(&format!("operations to {rank}"), &why);
                }
                *lacks = Some(why);
                Ok(None)
            }
            linked => linked,
        }
    }

    /// Makes the link, for a caller that can return a shortage of this process.
    #[cold]
    pub(crate) fn try_link(
        &self,
        local: &Local,
        device: &Endpoint,
    ) -> Result<Option<&Linked>, PostError> {
        if local.is_forked() {
            // The peer would take the link for the parent's.
            return Err(PostError::Forked);
        }
        let Some(_linking) = self.linking.try_lock() else { return Ok(None) };
        if let Some(linked) = self.linked.get() {
            return Ok(Some(linked));
        }
        if let Some(cause) = self.down() {
            return Err(PostError::PeerDown { rank: self.rank, cause: cause.clone() });
        }
        let Some((candidates, blobs)) = candidates(local, device, self.rank)? else {
            return Ok(None);
        };
        let (chosen, verdicts) = choose(&candidates);
        let is_on_this_node = candidates.iter().zip(&device.lanes).any(|((_, reach), lane)| {
            matches!(reach, Reach::Yes(_)) && lane.caps.locality < Locality::Network
        });
        let Some((lane, blob)) =
            chosen.and_then(|at| Some((device.lanes.get(at)?, blobs.get(at)?.as_ref()?)))
        else {
            let why = format!(
                "{}; name a transport in CARRACK_TRANSPORT that reaches it",
                reasons(&candidates)
            );
            return Err(PostError::Unreachable { rank: self.rank, why });
        };
        let link = lane.device.connect(blob, PeerId(self.rank.0)).map_err(|error| match error {
            SubmitError::Down { cause, .. } => {
                self.tell_down(&cause);
                device.undelivered.note_broken(self.rank, cause.clone());
                PostError::PeerDown { rank: self.rank, cause }
            }
            SubmitError::Lacking(why) => PostError::Lacking { rank: self.rank, why },
            other => PostError::Unreachable { rank: self.rank, why: other.to_string() },
        })?;
        tracing::info!(
            rank = self.rank.0,
            device = device.index,
            path = lane.transport,
            "path chosen"
        );
        let linked = Linked {
            link,
            transport: lane.transport,
            caps: lane.caps.clone(),
            verdicts,
            is_on_this_node,
            memory: OnceLock::new(),
            shares: OnceLock::new(),
            refused: OnceLock::new(),
        };
        let linked = self.linked.get_or_init(|| linked);
        *self.lacks.lock() = None;
        // Threads that sleep until the peer publishes its address have to move the backlog now.
        local.sleepers.wake();
        Ok(Some(linked))
    }
}

impl Route {
    /// Returns the link to the NIC that is the coherence owner of the peer's words. It is the link
    /// of messages where these use that NIC, or a second one. `Ok(None)`: the peer has not
    /// published its address yet, or another thread is making the link.
    #[cold]
    pub(crate) fn link_to_words(
        &self,
        local: &Local,
        device: &Endpoint,
        transport: &str,
    ) -> Result<Option<Arc<dyn Link>>, PostError> {
        let Some(linked) = self.linked() else { return Ok(None) };
        if linked.transport == transport {
            return Ok(Some(linked.link.clone()));
        }
        let why_not = |why: String| {
            let why = format!(
                "the NIC that is the agent of its words ({transport}): {why}; let the owner \
                register them with AtomicAgent::Owner"
            );
            PostError::Unreachable { rank: self.rank, why }
        };
        let Some((at, lane)) =
            device.lanes.iter().enumerate().find(|(_, lane)| lane.transport == transport)
        else {
            let refused = device.refused.iter().chain(&local.unavailable);
            let reason = refused
                .filter(|why| why.transport == transport)
                .map(|why| why.reason.clone())
                .next();
            return Err(why_not(
                reason.unwrap_or_else(|| "this rank has no such transport".into()),
            ));
        };
        if self.words_over.get_or_init(|| lane.transport) != &transport {
            return Err(why_not(
                "other words of this peer are reached over another NIC already".into(),
            ));
        }
        if let Some(link) = self.to_words.get() {
            return Ok(Some(link.clone()));
        }
        let Some(_linking) = self.linking.try_lock() else { return Ok(None) };
        let Some((reaches, blobs)) = candidates(local, device, self.rank)? else {
            return Ok(None);
        };
        if let Some((_, Reach::No(why))) = reaches.get(at) {
            return Err(why_not(why.clone()));
        }
        let Some(blob) = blobs.get(at).and_then(Option::as_ref) else { return Ok(None) };
        let link = match lane.device.connect(blob, PeerId(self.rank.0)) {
            Err(SubmitError::Lacking(why)) => {
                return Err(PostError::Lacking { rank: self.rank, why });
            }
            Err(SubmitError::Down { cause, .. }) => {
                return Err(PostError::PeerDown { rank: self.rank, cause });
            }
            connected => connected.map_err(|why| why_not(why.to_string()))?,
        };
        Ok(Some(self.to_words.get_or_init(|| link).clone()))
    }

    /// Notes that the peer gets the place of words whose coherence owner is this rank's NIC.
    pub(crate) fn shows_words(&self, transport: &'static str) {
        let _ = self.words_over.set(transport);
    }

    /// Returns `true` if a transport serves the peer's words only. Its end then does not mean the
    /// peer's end: the link of messages reports that, behind the last message.
    pub(crate) fn is_for_words(&self, transport: &str) -> bool {
        self.words_over.get().is_some_and(|words| *words == transport)
            && self.linked().is_some_and(|linked| linked.transport != transport)
    }
}

type Candidates =
    (Vec<(&'static str, Reach)>, Vec<Option<carrack_transports::contract::AddressBlob>>);

/// Returns each transport's answer for a peer. The transports of this device come first, in the
/// order of its lanes, then those that this rank could not open. `None`: the peer has not published
/// its address yet.
pub(crate) fn candidates(
    local: &Local,
    device: &Endpoint,
    rank: Rank,
) -> Result<Option<Candidates>, PostError> {
    let bad = |why: String| PostError::Bootstrap { rank, why };
    let key = address::key(rank.0, device.index);
    let found = match local.bootstrap.get(&key) {
        // The loss of another rank keeps this one from nothing, unless the job cannot start.
        Err(BootstrapError::RankGone { rank: gone, how })
            if gone != rank.0 && !how.forbids_start() =>
        {
            local.bootstrap.check(rank.0).map(|()| None)
        }
        found => found,
    };
    if let Err(BootstrapError::RankGone { rank: gone, how }) = &found {
        // Receives that wait for it have no link that would tell.
        let who = if *gone == rank.0 { "it".into() } else { format!("rank {gone}") };
        let cause = DownCause::Lost(format!("{who} {how}"));
        device.undelivered.note_broken(rank, cause.clone());
        if *gone == rank.0 {
            if let Some(route) = device.known_route(rank) {
                route.tell_down(&cause);
            }
            return Err(PostError::PeerDown { rank, cause });
        }
    }
    let Some(bytes) = found.map_err(|error| bad(error.to_string()))? else {
        if local.bootstrap.never_comes(&key, rank.0) {
            // It had no device of this number, so no link tells of its end.
            device.undelivered.note_broken(rank, DownCause::Closed);
            return Err(PostError::PeerDown { rank, cause: DownCause::Closed });
        }
        return Ok(None);
    };
    let theirs = address::decode(&bytes).ok_or_else(|| {
        let why = "what it published is not a list of addresses";
        bad(format!("{why}: run one version of Carrack on all ranks"))
    })?;
    let mut reaches = Vec::new();
    let mut blobs = Vec::new();
    for lane in &device.lanes {
        let blob =
            theirs.iter().find(|(name, _)| name == lane.transport).map(|(_, blob)| blob.clone());
        let reach = match &blob {
            Some(blob) => lane.device.reach(blob),
            None => Reach::No(
                "the peer does not have it (its CARRACK_TRANSPORT, its machine, or too few \
                descriptors, which it says)"
                    .into(),
            ),
        };
        reaches.push((lane.transport, reach));
        blobs.push(blob);
    }
    for unavailable in device.refused.iter().chain(&local.unavailable) {
        reaches.push((unavailable.transport, Reach::No(unavailable.reason.clone())));
        blobs.push(None);
    }
    Ok(Some((reaches, blobs)))
}

fn reasons(candidates: &[(&'static str, Reach)]) -> String {
    let each = candidates.iter().filter_map(|(name, reach)| match reach {
        Reach::No(why) => Some(format!("{name}: {why}")),
        Reach::Yes(_) => None,
    });
    each.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_gone_stays_an_obstacle_whatever_waits() {
        let route = Route::new(Rank(1));
        assert!(route.is_clear());
        route.set_waiting(3);
        assert!(!route.is_clear());
        route.set_waiting(0);
        assert!(route.is_clear());
        route.set_waiting(2);
        assert!(route.set_down(DownCause::Closed));
        route.set_waiting(0);
        assert!(!route.is_clear());
        assert!(!route.set_down(DownCause::Closed), "it is no news");
        route.set_waiting(5);
        route.set_waiting(0);
        assert!(!route.is_clear());
    }

    #[test]
    fn a_peer_that_holds_is_no_obstacle_to_offers() {
        let route = Route::new(Rank(1));
        let hold = |room, turn| route.hold(Hold { room, is_off: false }, turn);
        hold(Room::Offers, 1);
        assert!(!route.is_clear() && route.is_open() && route.is_held());
        route.set_waiting(3);
        assert!(!route.is_open() && route.is_held());
        hold(Room::Any, 2);
        route.set_waiting(0);
        assert!(route.is_clear());
        // Two words that cross: the later one counts.
        hold(Room::Any, 4);
        hold(Room::OffersOnly, 3);
        assert!(route.is_clear() && !route.takes_no_notifications());
        hold(Room::OffersOnly, 5);
        assert!(route.is_held() && route.takes_no_notifications());
        hold(Room::Offers, 6);
        assert!(route.is_held() && !route.takes_no_notifications());
    }
}
