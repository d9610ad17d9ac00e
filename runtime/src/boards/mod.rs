//! The boards on which members of groups leave notes for each other.

mod board;
mod members;

pub(crate) use board::{Board, CollectiveKind, Meaning, Note};
pub(crate) use members::Members;

use crate::names::{Rank, Tag};
use crate::op::{Ended, Ending, Holder, PendingOp};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Groups that a rank can have.
pub(crate) const GROUPS: usize = 1 << 16;

/// A runtime's boards, by the names of their groups.
pub(crate) struct Boards {
    me: Rank,
    world: Arc<Board>,
    others: Mutex<OtherBoards>,
    /// Numbers for groups of the library that this rank has offered.
    tickets: AtomicU32,
}

#[derive(Default)]
struct OtherBoards {
    boards: HashMap<u32, Arc<Board>>,
    /// Groups that this rank has not made, and for which a note has come.
    unmade: HashSet<u32>,
}

impl Boards {
    pub(crate) fn new(me: Rank, ranks: u32) -> Self {
        let world = Board::new(0, me);
        world.found(Members::All(ranks));
        let (others, tickets) = (Mutex::default(), AtomicU32::new(0));
        Self { me, world: Arc::new(world), others, tickets }
    }

    /// Returns a fresh number, or `None` if there are none left.
    pub(crate) fn ticket(&self) -> Option<u32> {
        self.tickets
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| last.checked_add(1))
            .ok()
    }

    fn lock(&self) -> MutexGuard<'_, OtherBoards> {
        self.others.lock()
    }

    fn others(&self) -> Vec<Arc<Board>> {
        self.lock().boards.values().cloned().collect()
    }

    pub(crate) fn world(&self) -> Arc<Board> {
        self.world.clone()
    }

    fn empty(&self, name: u32) -> Arc<Board> {
        Arc::new(Board::new(name, self.me))
    }

    /// Returns the board of a group that this rank makes, or `None` if there are too many.
    pub(crate) fn make(&self, name: u32) -> Option<Arc<Board>> {
        let mut others = self.lock();
        let OtherBoards { boards, unmade } = &mut *others;
        let is_made = boards.contains_key(&name) && !unmade.contains(&name);
        if !is_made && boards.len() - unmade.len() >= GROUPS {
            return None;
        }
        unmade.remove(&name);
        Some(boards.entry(name).or_insert_with(|| self.empty(name)).clone())
    }

    /// Returns the board of a group that another rank has sent a note for.
    fn heard_of(&self, name: u32) -> Arc<Board> {
        let mut others = self.lock();
        let OtherBoards { boards, unmade } = &mut *others;
        let fresh = || {
            unmade.insert(name);
            self.empty(name)
        };
        boards.entry(name).or_insert_with(fresh).clone()
    }

    /// Adds a note.
    pub(crate) fn pin(&self, name: u32, note: Note) {
        match name {
            0 => self.world.pin(note),
            _ => self.heard_of(name).pin(note),
        }
    }

    /// Handles the note of a member that has reached a barrier: the common path of each barrier.
    /// Returns `true` if it was such a note.
    #[inline]
    pub(crate) fn tick(&self, name: u32, note: &Note) -> bool {
        match name {
            0 => self.world.tick(note),
            _ => self.lock().boards.get(&name).is_some_and(|board| board.tick(note)),
        }
    }

    /// Wakes all listeners: a rank is gone.
    pub(crate) fn wake(&self) {
        self.world.wake();
        self.others().iter().for_each(|board| board.wake());
    }

    /// Returns a group other than `but` with a note of a rank for an operation that has not begun
    /// here.
    pub(crate) fn unclaimed(&self, from: Rank, but: u32) -> Option<(u32, Note)> {
        let others = self.others();
        let all = std::iter::once(&self.world).chain(&others).filter(|board| board.name != but);
        all.filter_map(|board| Some((board.name, board.unclaimed(from)?))).next()
    }
}

/// The operations of groups. Each ends in the thread or the future that waits for it.
impl Holder for Boards {
    fn end(&self, why: &Ending<'_>, _: &mut Vec<Ended>) {
        match why {
            Ending::Gone(..) | Ending::Late(..) => self.wake(),
            Ending::Down(..) | Ending::Closing | Ending::Closed => {}
        }
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        for board in std::iter::once(self.world()).chain(self.others()) {
            for active in board.active() {
                let waits_for = match active.awaits {
                    Some(rank) => format!("{rank} to come, in group {}", board.name),
                    None => format!("its messages, in group {}", board.name),
                };
                let (what, rank, tag) = (active.name(), Rank::ANY, Tag(active.number));
                list(PendingOp { what, rank, tag, size: 0, waits_for });
            }
        }
    }

    fn count(&self) -> usize {
        std::iter::once(self.world()).chain(self.others()).map(|board| board.active().len()).sum()
    }
}
