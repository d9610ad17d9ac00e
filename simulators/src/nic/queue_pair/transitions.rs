//! Permitted sequences of states, and the attributes that each transition requires: the tables of
//! the InfiniBand specification (11.2.5.2), in the form of the Linux kernel's.

use carrack_transports::verbs::sys::bindings as ibv;
use rustix::io::Errno;

/// The state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum State {
    Reset,
    Init,
    ReadyToReceive,
    ReadyToSend,
    Error,
}

impl State {
    pub(in super::super) fn number(self) -> u32 {
        match self {
            Self::Reset => ibv::IBV_QPS_RESET,
            Self::Init => ibv::IBV_QPS_INIT,
            Self::ReadyToReceive => ibv::IBV_QPS_RTR,
            Self::ReadyToSend => ibv::IBV_QPS_RTS,
            Self::Error => ibv::IBV_QPS_ERR,
        }
    }

    /// Returns the state of that number; the drained ones are not simulated.
    pub(in super::super) fn from_number(number: u32) -> Option<Self> {
        [Self::Reset, Self::Init, Self::ReadyToReceive, Self::ReadyToSend, Self::Error]
            .into_iter()
            .find(|state| state.number() == number)
    }

    /// Returns `true` if packets are received in this state.
    pub(super) fn receives(self) -> bool {
        matches!(self, Self::ReadyToReceive | Self::ReadyToSend)
    }
}

/// Checks a transition, and the attributes that the caller gives for it.
///
/// # Errors
/// EINVAL: there is no such transition, or an attribute is missing for it, or is not permitted.
pub(super) fn check(from: State, to: State, mask: u32) -> Result<(), Errno> {
    let (required, optional) = masks(from, to).ok_or(Errno::INVAL)?;
    let given = mask & !ibv::IBV_QP_STATE;
    let complete = given & required == required;
    if complete && given & !(required | optional) == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

/// Returns the required attributes, and the optional ones.
fn masks(from: State, to: State) -> Option<(u32, u32)> {
    const CONNECT: u32 = ibv::IBV_QP_AV
        | ibv::IBV_QP_PATH_MTU
        | ibv::IBV_QP_DEST_QPN
        | ibv::IBV_QP_RQ_PSN
        | ibv::IBV_QP_MAX_DEST_RD_ATOMIC
        | ibv::IBV_QP_MIN_RNR_TIMER;
    const START: u32 = ibv::IBV_QP_TIMEOUT
        | ibv::IBV_QP_RETRY_CNT
        | ibv::IBV_QP_RNR_RETRY
        | ibv::IBV_QP_SQ_PSN
        | ibv::IBV_QP_MAX_QP_RD_ATOMIC;
    const PATHS: u32 = ibv::IBV_QP_CUR_STATE
        | ibv::IBV_QP_ALT_PATH
        | ibv::IBV_QP_PATH_MIG_STATE
        | ibv::IBV_QP_ACCESS_FLAGS
        | ibv::IBV_QP_MIN_RNR_TIMER;
    const FIRST: u32 = ibv::IBV_QP_PKEY_INDEX | ibv::IBV_QP_PORT | ibv::IBV_QP_ACCESS_FLAGS;
    const TO_RECEIVE: u32 =
        ibv::IBV_QP_ALT_PATH | ibv::IBV_QP_PKEY_INDEX | ibv::IBV_QP_ACCESS_FLAGS;
    Some(match (from, to) {
        (_, State::Reset | State::Error) => (0, 0),
        (State::Reset, State::Init) => (FIRST, 0),
        (State::Init, State::Init) => (0, FIRST),
        (State::Init, State::ReadyToReceive) => (CONNECT, TO_RECEIVE),
        (State::ReadyToReceive, State::ReadyToSend) => (START, PATHS),
        (State::ReadyToSend, State::ReadyToSend) => (0, PATHS),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u32 = ibv::IBV_QP_PKEY_INDEX | ibv::IBV_QP_PORT | ibv::IBV_QP_ACCESS_FLAGS;

    #[test]
    fn states_follow_each_other_in_order_only() {
        let rc = |from, to, mask| check(from, to, mask).is_ok();
        assert!(rc(State::Reset, State::Init, FIRST | ibv::IBV_QP_STATE));
        assert!(!rc(State::Reset, State::ReadyToReceive, FIRST));
        assert!(!rc(State::Init, State::ReadyToSend, FIRST));
        assert!(!rc(State::ReadyToSend, State::ReadyToReceive, 0));
        assert!(!rc(State::Error, State::Init, FIRST));
        assert!(rc(State::Error, State::Reset, 0) && rc(State::ReadyToSend, State::Error, 0));
    }

    #[test]
    fn what_is_missing_or_too_much_is_refused() {
        let rc = |mask| check(State::Reset, State::Init, mask).is_ok();
        assert!(!rc(FIRST & !ibv::IBV_QP_PORT));
        assert!(!rc(FIRST | ibv::IBV_QP_DEST_QPN));
    }
}
