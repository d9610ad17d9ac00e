//! Notes that members of groups leave for each other.

use super::Members;
use crate::names::Rank;
use carrack_transports::mem::SmallBytes;
use carrack_transports::sync::Ticks;
use parking_lot::{Mutex, MutexGuard};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The notes for one group, which may not have been made at this rank yet.
pub(crate) struct Board {
    pub(crate) name: u32,
    me: Rank,
    members: OnceLock<Members>,
    hash: OnceLock<u64>,
    state: Mutex<BoardState>,
    /// Number of the last operation whose note has arrived, for each step of a barrier. A barrier's
    /// notes say no more, so they need no list. An unexpected one goes into the list. Listeners
    /// have a waker in the state.
    barriers: Ticks<STEPS>,
    /// Counts the other events that listeners may wait for.
    stirred: AtomicU64,
}

/// Steps of a barrier: a group has at most 2^32 ranks.
const STEPS: usize = 32;

#[derive(Default)]
struct BoardState {
    /// Operations that have begun here.
    begun: u64,
    /// Operations in flight.
    active: Vec<Active>,
    notes: Vec<Note>,
    wakers: Vec<Waker>,
}

/// An operation in flight here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Active {
    pub(crate) number: u64,
    kind: CollectiveKind,
    /// The rank that it waits for.
    pub(crate) awaits: Option<Rank>,
}

impl Active {
    pub(crate) fn name(&self) -> &'static str {
        self.kind.name()
    }
}

/// A message from one member to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Note {
    pub(crate) from: Rank,
    /// The number of the operation in the group.
    pub(crate) number: u64,
    /// The number of the message in the operation.
    pub(crate) step: u32,
    pub(crate) meaning: Meaning,
    /// A value of the algorithm.
    pub(crate) word: u64,
}

/// The operation as a member understands it: must be the same at all members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Meaning {
    /// The hash of the list of members.
    pub(crate) hash: u64,
    pub(crate) count: u32,
    pub(crate) kind: CollectiveKind,
    /// The root of a broadcast, or the culprit of a failure.
    pub(crate) root: Rank,
}

/// The kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CollectiveKind {
    Barrier,
    Broadcast,
    Allgather,
    /// The sender has failed.
    Failed,
}

impl CollectiveKind {
    const ALL: [Self; 4] = [Self::Barrier, Self::Broadcast, Self::Allgather, Self::Failed];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
            Self::Allgather => "allgather",
            Self::Failed => "failure",
        }
    }

    fn code(self) -> u32 {
        Self::ALL.iter().position(|&kind| kind == self).unwrap_or(0) as u32
    }
}

impl Note {
    pub(crate) fn encode(&self) -> SmallBytes {
        let Meaning { hash, count, kind, root } = self.meaning;
        let payload = Payload {
            hash: hash.into(),
            kind: kind.code().into(),
            count: count.into(),
            root: root.0.into(),
            step: self.step.into(),
            word: self.word.into(),
        };
        let mut bytes = [0; SmallBytes::MAX];
        // There is room: a payload has 32 bytes.
        let _ = payload.write_to_prefix(&mut bytes);
        SmallBytes::first(size_of::<Payload>(), bytes)
    }

    pub(crate) fn decode(from: Rank, number: u64, bytes: &[u8]) -> Option<Self> {
        let Payload { hash, kind, count, root, step, word } =
            Payload::read_from_bytes(bytes).ok()?;
        let kind = *CollectiveKind::ALL.get(usize::try_from(kind.get()).ok()?)?;
        let (count, root) = (count.get(), Rank(root.get()));
        let meaning = Meaning { hash: hash.get(), count, kind, root };
        Some(Self { from, number, step: step.get(), meaning, word: word.get() })
    }
}

/// The payload of a note.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Payload {
    hash: U64,
    kind: U32,
    count: U32,
    root: U32,
    step: U32,
    word: U64,
}

impl Board {
    pub(crate) fn new(name: u32, me: Rank) -> Self {
        Self {
            name,
            me,
            members: OnceLock::new(),
            hash: OnceLock::new(),
            state: Mutex::default(),
            barriers: Ticks::default(),
            stirred: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock()
    }

    /// Makes it the board of these members. Returns `false` if it belongs to others.
    pub(crate) fn found(&self, members: Members) -> bool {
        let is_so = *self.members.get_or_init(|| members.clone()) == members;
        self.hash();
        is_so
    }

    pub(crate) fn members(&self) -> &Members {
        // The board has members, since its group was made.
        self.members.get().unwrap_or(&Members::All(0))
    }

    pub(crate) fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| self.members().hash())
    }

    /// Returns the operations in flight.
    pub(crate) fn active(&self) -> Vec<Active> {
        self.lock().active.clone()
    }

    /// Begins an operation, and returns its number.
    pub(crate) fn begin(&self, kind: CollectiveKind) -> u64 {
        let mut state = self.lock();
        let number = state.begun;
        state.begun += 1;
        state.active.push(Active { number, kind, awaits: None });
        number
    }

    /// Handles the note of a member that has reached a barrier. Returns `true` if it was such a
    /// note, and expected.
    #[inline]
    pub(crate) fn tick(&self, note: &Note) -> bool {
        let (Some(members), Some(&hash)) = (self.members.get(), self.hash.get()) else {
            return false;
        };
        let count = members.count();
        let meaning = Meaning { hash, count, kind: CollectiveKind::Barrier, root: Rank(0) };
        if note.meaning != meaning || members.before(self.me, note.step) != Some(note.from) {
            return false;
        }
        // Two threads may deliver two of them in any order.
        let Some(are_listeners) = self.barriers.raise(note.step, note.number) else { return false };
        if are_listeners {
            self.wake();
        }
        true
    }

    /// Adds a note.
    pub(crate) fn pin(&self, note: Note) {
        let mut state = self.lock();
        if note.number < state.begun
            && !state.active.iter().any(|active| active.number == note.number)
        {
            // The note reports the failure of an operation that has ended here.
            return;
        }
        state.notes.push(note);
        drop(state);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        self.stirred.fetch_add(1, Ordering::AcqRel);
        let wakers = {
            let mut state = self.lock();
            self.barriers.set_listeners(0);
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns the note of a member that is in a barrier, where this rank's operation of that
    /// number is none.
    pub(crate) fn barrier_instead(&self, number: u64) -> Option<Note> {
        // A member with a higher number has passed this operation.
        let step = self.barriers.last_was(number)?;
        let members = self.members.get()?;
        let meaning = Meaning {
            hash: self.hash(),
            count: members.count(),
            kind: CollectiveKind::Barrier,
            root: Rank(0),
        };
        Some(Note { from: members.before(self.me, step)?, number, step, meaning, word: 0 })
    }

    /// Returns `true` if the note of a barrier's step has arrived.
    #[inline]
    pub(crate) fn has_ticked(&self, number: u64, step: u32) -> bool {
        self.barriers.has(step, number)
    }

    /// Returns a number that changes with each event for listeners.
    #[inline]
    pub(crate) fn stirred(&self) -> u64 {
        self.stirred.load(Ordering::Acquire)
    }

    /// Returns the rank that an operation waits for.
    pub(crate) fn awaits(&self, number: u64) -> Option<Rank> {
        self.lock().active.iter().find(|active| active.number == number)?.awaits
    }

    /// Takes the note that is meant, or the first that speaks against it; if there is neither,
    /// `waker` will be told.
    pub(crate) fn take(
        &self,
        number: u64,
        from: Option<Rank>,
        is_meant: impl Fn(&Note) -> bool,
        speaks_against: impl Fn(&Note) -> bool,
        waker: &Waker,
    ) -> Option<Note> {
        let mut state = self.lock();
        let of_this = |note: &&Note| note.number == number;
        if let Some(&note) = state.notes.iter().filter(of_this).find(|note| speaks_against(note)) {
            return Some(note);
        }
        match state.notes.iter().position(|note| note.number == number && is_meant(note)) {
            Some(at) => Some(state.notes.swap_remove(at)),
            None => {
                if let Some(active) = state.active.iter_mut().find(|active| active.number == number)
                {
                    active.awaits = from;
                }
                self.add(&mut state, waker);
                None
            }
        }
    }

    /// Wakes `waker` at the next event.
    pub(crate) fn listen(&self, waker: &Waker) {
        self.add(&mut self.lock(), waker);
    }

    fn add(&self, state: &mut BoardState, waker: &Waker) {
        if !state.wakers.iter().any(|other| other.will_wake(waker)) {
            state.wakers.push(waker.clone());
            self.barriers.set_listeners(state.wakers.len());
        }
    }

    /// Ends an operation: further and late notes on it are dropped.
    pub(crate) fn forget(&self, number: u64) {
        let mut state = self.lock();
        state.notes.retain(|note| note.number != number);
        state.active.retain(|active| active.number != number);
    }

    /// Returns a note from a rank on an operation that has not begun here. A failure does not
    /// count, since the rank has left that operation.
    pub(crate) fn unclaimed(&self, from: Rank) -> Option<Note> {
        let state = self.lock();
        let is_one = |note: &&Note| {
            note.from == from
                && note.number >= state.begun
                && note.meaning.kind != CollectiveKind::Failed
        };
        let listed = state.notes.iter().find(is_one).copied();
        let begun = state.begun;
        drop(state);
        listed.or_else(|| {
            let members = self.members.get()?;
            let step = (0..STEPS as u32).find(|&step| {
                members.before(self.me, step) == Some(from) && self.has_ticked(begun, step)
            })?;
            let meaning = Meaning {
                hash: self.hash(),
                count: members.count(),
                kind: CollectiveKind::Barrier,
                root: Rank(0),
            };
            Some(Note { from, number: begun, step, meaning, word: 0 })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boards::Boards;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A member that has failed in an operation has left it. Another group's operation may wait
    /// for it without a limit.
    #[test]
    fn a_member_is_taken_to_be_elsewhere_for_what_it_does_there_and_not_for_what_it_has_given_up() {
        let boards = Boards::new(Rank(0), 2);
        let group = boards.make(7).unwrap();
        group.found(Members::Some([Rank(0), Rank(1)].into()));
        let meaning =
            Meaning { hash: group.hash(), count: 2, kind: CollectiveKind::Failed, root: Rank(1) };
        let note = Note { from: Rank(1), number: 0, step: u32::MAX, meaning, word: 0 };
        boards.pin(7, note);
        assert_eq!(boards.unclaimed(Rank(1), 0), None);
        let comes = Note {
            number: 1,
            step: 0,
            meaning: Meaning { kind: CollectiveKind::Allgather, ..meaning },
            ..note
        };
        boards.pin(7, comes);
        assert_eq!(boards.unclaimed(Rank(1), 0), Some((7, comes)));
    }

    proptest! {
        #[test]
        fn notes_survive_the_wire(
            hash: u64, count: u32, root: u32, step: u32, word: u64, number: u64,
            kind in 0_usize..4,
        ) {
            let (kind, root) = (CollectiveKind::ALL[kind], Rank(root));
            let meaning = Meaning { hash, count, kind, root };
            let note = Note { from: Rank(3), number, step, meaning, word };
            prop_assert_eq!(Note::decode(Rank(3), number, note.encode().as_slice()), Some(note));
        }

        #[test]
        fn whatever_comes_is_a_note_or_nothing(bytes in vec(any::<u8>(), 0..=40)) {
            if let Some(note) = Note::decode(Rank(3), 1, &bytes) {
                let encoded = note.encode();
                prop_assert_eq!(encoded.as_slice(), &bytes[..]);
            }
        }
    }
}
