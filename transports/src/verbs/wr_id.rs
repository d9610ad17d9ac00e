//! Names of work requests, by which a completion tells its request. The completion's own opcode is
//! undefined when the request has failed.

/// A request, as its completion names it: the kind in the highest byte, then the connection, then
/// a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WrId {
    /// A receive, posted with this slot's packet.
    Receive(u32),
    /// The connection's request of that sequence number, and with it all before it.
    Send { connection: u32, sequence: u32 },
    /// A request as [`Send`](Self::Send), which ends an operation on memory.
    Transfer { connection: u32, sequence: u32 },
    /// The last message of a connection.
    Bye { connection: u32 },
    /// The request behind all others, posted when the queue pair was in error already.
    Last { connection: u32 },
    /// A name that is not from here.
    Unknown,
}

const SEND: u64 = 1 << 56;
const BYE: u64 = 2 << 56;
const LAST: u64 = 3 << 56;
const TRANSFER: u64 = 4 << 56;

/// The most connections of a device.
pub(super) const MOST_CONNECTIONS: u32 = 1 << 24;

impl WrId {
    #[inline(always)]
    pub(super) fn encode(self) -> u64 {
        let of = |connection: u32| u64::from(connection) << 32;
        match self {
            Self::Receive(slot) => u64::from(slot),
            Self::Send { connection, sequence } => SEND | of(connection) | u64::from(sequence),
            Self::Transfer { connection, sequence } => {
                TRANSFER | of(connection) | u64::from(sequence)
            }
            Self::Bye { connection } => BYE | of(connection),
            Self::Last { connection } => LAST | of(connection),
            Self::Unknown => u64::MAX,
        }
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the parts are cut out")]
    pub(super) fn decode(id: u64) -> Self {
        let (connection, number) = ((id >> 32) as u32 & (MOST_CONNECTIONS - 1), id as u32);
        match id >> 56 {
            0 => Self::Receive(number),
            1 => Self::Send { connection, sequence: number },
            2 => Self::Bye { connection },
            3 => Self::Last { connection },
            4 => Self::Transfer { connection, sequence: number },
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_comes_back_as_it_was() {
        let connection = MOST_CONNECTIONS - 1;
        for id in [
            WrId::Receive(u32::MAX),
            WrId::Send { connection, sequence: u32::MAX },
            WrId::Send { connection: 0, sequence: 0 },
            WrId::Transfer { connection, sequence: 7 },
            WrId::Bye { connection },
            WrId::Last { connection: 1 },
            WrId::Unknown,
        ] {
            assert_eq!(WrId::decode(id.encode()), id);
        }
    }
}
