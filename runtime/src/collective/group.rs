//! Groups of ranks, and the forms of their names.

use crate::api::Runtime;
use crate::boards::{Board, GROUPS, Members};
use crate::error::GroupError;
use crate::names::Rank;
use std::sync::Arc;

/// Names from here on are the library's: behind this bit the root's rank, of which there are no
/// more than `MAX_JOB`, and its ticket.
pub(super) const OWN_NAMES: u32 = 1 << 31;
const OWN_BITS: u32 = 17;
const _: () = assert!(crate::bootstrap::MAX_JOB <= 1 << (31 - OWN_BITS));

/// Ranks that do collective operations together.
///
/// The program names groups by numbers from 1 to 2147483647. Ranks that use the same name must
/// mean the same ranks in the same order. Making a group sends nothing. The same name gives the
/// same group again.
#[derive(Clone)]
pub struct Group {
    pub(super) runtime: Runtime,
    pub(super) board: Arc<Board>,
}

impl Runtime {
    /// Returns the group of all ranks.
    pub fn world(&self) -> Group {
        Group { runtime: self.clone(), board: self.0.boards.world() }
    }

    /// Returns a group of ranks, in an order of the program's choice. This rank must be one of
    /// them. All of them must make it alike.
    ///
    /// # Errors
    /// See [`GroupError`].
    pub fn group(&self, name: u32, ranks: &[Rank]) -> Result<Group, GroupError> {
        if name == 0 || name >= OWN_NAMES {
            return Err(GroupError::Name(name));
        }
        self.group_of(name, ranks)
    }

    /// Returns a fresh number for a group of the library with this rank as its root. `None` once
    /// all have been used.
    pub(crate) fn group_ticket(&self) -> Option<u32> {
        self.0.boards.ticket().filter(|&ticket| ticket < 1 << OWN_BITS)
    }

    /// Returns a group of the library, named by its root and a ticket of that rank: no other group
    /// has that name.
    pub(crate) fn own_group(
        &self,
        root: Rank,
        ticket: u32,
        ranks: &[Rank],
    ) -> Result<Group, GroupError> {
        let name = OWN_NAMES | root.0 << OWN_BITS | ticket;
        // The ticket came from another rank.
        if ticket >> OWN_BITS != 0 {
            Err(GroupError::Name(name))
        } else {
            self.group_of(name, ranks)
        }
    }

    fn group_of(&self, name: u32, ranks: &[Rank]) -> Result<Group, GroupError> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(GroupError::Twice(pair[0]));
        }
        if let Some(&rank) = sorted.last().filter(|rank| rank.0 >= self.size()) {
            return Err(GroupError::NoSuchRank { rank, last: self.size() - 1 });
        }
        if sorted.binary_search(&self.rank()).is_err() {
            return Err(GroupError::NotMember(self.rank()));
        }
        let board = self.0.boards.make(name).ok_or(GroupError::TooMany(GROUPS))?;
        if board.found(Members::Some(ranks.into())) {
            Ok(Group { runtime: self.clone(), board })
        } else {
            Err(GroupError::Taken { name, count: board.members().count() })
        }
    }
}

impl Group {
    /// Returns the runtime that has it.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Returns its name; 0 for the group of all ranks.
    pub fn name(&self) -> u32 {
        self.board.name
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        self.board.members().count()
    }

    /// Returns its ranks, in its order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.size()).map(|place| self.board.members().at(place))
    }

    /// Returns this rank's place in the group.
    pub fn place(&self) -> u32 {
        // This rank is a member, or the group would not exist.
        self.board.members().place(self.runtime.rank()).unwrap_or(0)
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(#{}, {} ranks)", self.name(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{CollectiveError, OpError};
    use crate::settings::{GpuChoice, Settings, TransportChoice};
    use carrack_transports::contract::DownCause;
    use std::sync::mpsc;
    use std::time::Duration;

    type Collective = fn(&Group) -> Result<(), CollectiveError>;

    /// Returns the errors of the others in the operation after one that a member has abandoned for
    /// this cause.
    fn heard(cause: &CollectiveError, next: Collective) -> Vec<CollectiveError> {
        let settings =
            Settings::builder().transports(vec![TransportChoice::Loopback]).gpu(GpuChoice::None);
        let ranks = Runtime::in_process_with(5, &settings.build().unwrap()).unwrap();
        let members: Vec<Rank> = (0..4).map(Rank).collect();
        let groups: Vec<Group> =
            ranks[..4].iter().map(|rank| rank.own_group(Rank(1), 7, &members).unwrap()).collect();
        std::thread::scope(|threads| {
            let all: Vec<_> = groups
                .iter()
                .map(|group| {
                    threads.spawn(move || {
                        group.barrier().unwrap();
                        if group.place() == 1 {
                            group.abandon(cause);
                            None
                        } else {
                            Some(next(group).unwrap_err())
                        }
                    })
                })
                .collect();
            all.into_iter().filter_map(|one| one.join().unwrap()).collect()
        })
    }

    #[test]
    fn no_member_waits_for_one_that_abandons_an_operation_and_all_learn_the_cause() {
        let operations: [Collective; 3] = [
            Group::barrier,
            |group| group.allgather(b"x").map(drop),
            |group| group.broadcast(Rank(1), b"x").map(drop),
        ];
        for next in operations {
            let failed = CollectiveError::Failed { what: "allgather", rank: Rank(1) };
            // The member that hears it first fails, too, and the others may name that one.
            let heard_first = |why: &CollectiveError| {
                matches!(why, CollectiveError::Failed { rank: Rank(1), .. })
            };
            let all = heard(&failed, next);
            assert!(all.iter().all(|why| matches!(why, CollectiveError::Failed { .. })), "{all:?}");
            assert!(all.len() == 3 && all.iter().any(heard_first), "{all:?}");
            let cause = OpError::PeerDown { rank: Rank(4), cause: DownCause::Closed };
            for why in heard(&CollectiveError::Op { what: "allgather", cause }, next) {
                assert!(why.to_string().contains("rank 4 is gone"), "{why}");
            }
        }
    }

    #[test]
    fn a_rank_that_leaves_a_broadcast_which_others_have_ended_holds_up_no_next_operation() {
        let settings =
            Settings::builder().transports(vec![TransportChoice::Loopback]).gpu(GpuChoice::None);
        let ranks = Runtime::in_process_with(4, &settings.build().unwrap()).unwrap();
        let members: Vec<Rank> = (0..4).map(Rank).collect();
        let groups: Vec<Group> =
            ranks.iter().map(|rank| rank.own_group(Rank(0), 7, &members).unwrap()).collect();
        let ((ends, ended), (fails, failed)) = (mpsc::channel(), mpsc::channel());
        for place in [0, 2, 3] {
            let (group, ends, fails) = (groups[place].clone(), ends.clone(), fails.clone());
            std::thread::spawn(move || {
                group.barrier().unwrap();
                // It ends without rank 1, which forwards the bytes to no rank.
                assert_eq!(group.broadcast(Rank(0), b"x").unwrap(), b"x");
                ends.send(()).unwrap();
                fails.send(group.allgather(b"y")).unwrap();
            });
        }
        groups[1].barrier().unwrap();
        (0..3).for_each(|_| ended.recv().unwrap());
        let cause = OpError::PeerDown { rank: Rank(9), cause: DownCause::Closed };
        groups[1].leave(&CollectiveError::Op { what: "barrier", cause });
        for _ in 0..3 {
            let why = failed
                .recv_timeout(Duration::from_secs(100))
                .expect("no member waits")
                .unwrap_err();
            assert!(why.to_string().contains("rank 9 is gone"), "{why}");
        }
    }

    #[test]
    fn a_ticket_is_given_once_and_one_that_is_none_makes_no_group() {
        let rank = &Runtime::in_process(1).unwrap()[0];
        let tickets = [(); 3].map(|()| rank.group_ticket().unwrap());
        assert_eq!(tickets, [0, 1, 2]);
        let made = |ticket| rank.own_group(Rank(0), ticket, &[Rank(0)]);
        assert!(made((1 << OWN_BITS) - 1).unwrap().barrier().is_ok());
        // The ticket would be of another rank.
        assert!(matches!(made(1 << OWN_BITS), Err(GroupError::Name(_))));
    }
}
