//! Rank 0's list of who has come, and where each listens.
//!
//! Places are given out in the order in which ranks come. So whoever is above is here already, and
//! nobody who comes has to wait for somebody who does not; and the last to come, who are many, have
//! nobody below them.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use super::greeting::{Call, Errand, Seat, Welcome};
use super::key::Nonce;
use super::tree;

/// Those who have come: a few dozen bytes for each rank, at rank 0 only.
#[derive(Debug)]
pub(super) struct Register {
    size: u32,
    salt: Nonce,
    /// By place.
    seats: Vec<Seat>,
    /// Where each came from, to tell who has its number.
    came_from: HashMap<u32, SocketAddr>,
    closed: bool,
}

impl Register {
    /// Rank 0 is there.
    pub(super) fn new(size: u32, salt: Nonce) -> Self {
        let zero = Seat { rank: 0, ip: IpAddr::from([0; 4]), port: 0 };
        Self { size, salt, seats: vec![zero], came_from: HashMap::new(), closed: false }
    }

    /// Gives a rank its place.
    ///
    /// # Errors
    ///
    /// Why it gets none, and what to do, for it to show.
    pub(super) fn admit(&mut self, call: &Call, from: SocketAddr) -> Result<Welcome, String> {
        let Call { rank, size, .. } = *call;
        if call.errand != Errand::Join {
            return Err("rank 0 has not given that place out: start the job again".into());
        }
        if size != self.size {
            return Err(format!(
                "rank {rank} has WORLD_SIZE={size} and rank 0 has WORLD_SIZE={}; give all ranks \
                the same",
                self.size
            ));
        }
        if rank >= size {
            return Err(format!("rank {rank} is not below WORLD_SIZE={size}; ranks count from 0"));
        }
        if rank == 0 {
            return Err("rank 0 is here already, which is the one that you have reached".into());
        }
        if let Some(other) = self.came_from.get(&rank) {
            return Err(format!(
                "rank {rank} has come before, from {}; give each process a RANK of its own, and \
                end what is left of earlier jobs",
                other.ip()
            ));
        }
        if self.closed {
            return Err("it is too late: rank 0 has given the job up; start it again, or raise \
                CARRACK_BOOTSTRAP_TIMEOUT"
                .into());
        }
        // There are as many places as ranks, and each rank came once.
        let place = u32::try_from(self.seats.len()).unwrap_or(u32::MAX);
        let above = tree::above(place).filter(|above| *above > 0);
        let above = above.and_then(|above| self.seats.get(above as usize)).copied();
        self.seats.push(Seat { rank, ip: from.ip().to_canonical(), port: call.port });
        self.came_from.insert(rank, from);
        Ok(Welcome { place, salt: self.salt, above })
    }

    /// Whether all have come, or nobody may come any more.
    pub(super) fn is_complete(&self) -> bool {
        self.closed || self.seats.len() == self.size as usize
    }

    /// Lets nobody in any more. The first rank that has not come.
    pub(super) fn close(&mut self) -> Option<u32> {
        self.closed = true;
        (1..self.size).find(|rank| !self.came_from.contains_key(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(rank: u32, size: u32) -> Call {
        let nonce = [rank as u8; 16];
        Call {
            errand: Errand::Join,
            rank,
            size,
            place: 0,
            port: 1000 + rank as u16,
            salt: [0; 16],
            nonce,
        }
    }

    fn from(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 5000))
    }

    #[test]
    fn whoever_is_above_has_come_before() {
        let mut register = Register::new(300, [9; 16]);
        // In an order of their own.
        for (at, rank) in (1..300).rev().enumerate() {
            let welcome = register.admit(&call(rank, 300), from((rank % 200) as u8)).unwrap();
            let place = at as u32 + 1;
            assert_eq!((welcome.place, welcome.salt), (place, [9; 16]));
            let above = (place - 1) / tree::ARITY;
            match welcome.above {
                None => assert_eq!(above, 0),
                Some(seat) => {
                    assert_eq!(seat.rank, 300 - above);
                    assert_eq!(seat.port, 1000 + seat.rank as u16);
                }
            }
        }
        assert!(register.is_complete());
    }

    #[test]
    fn who_has_no_place_is_told_why() {
        let mut register = Register::new(3, [9; 16]);
        register.admit(&call(1, 3), from(1)).unwrap();
        let mut refuse = |call: &Call| register.admit(call, from(2)).unwrap_err();
        assert!(refuse(&call(1, 3)).contains("from 10.0.0.1; give each process a RANK of its own"));
        assert!(
            refuse(&call(2, 4)).contains("rank 2 has WORLD_SIZE=4 and rank 0 has WORLD_SIZE=3")
        );
        assert!(refuse(&call(3, 3)).contains("not below WORLD_SIZE=3"));
        assert!(refuse(&call(0, 3)).contains("rank 0 is here already"));
        assert_eq!(register.close(), Some(2));
        assert!(
            register.admit(&call(2, 3), from(2)).unwrap_err().contains("CARRACK_BOOTSTRAP_TIMEOUT")
        );
    }
}
