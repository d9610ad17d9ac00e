//! The launcher's socket, which this process inherits.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use carrack_transports::net::adopt::{self, AdoptError};

use super::error::BootstrapError;
use super::protocol::FD_VARIABLE;

/// Takes over the launcher's socket: the descriptor whose `number` the environment holds.
pub(super) fn adopt(number: i32) -> Result<OwnedFd, BootstrapError> {
    adopt::inherited().map_err(|error| match error {
        AdoptError::NotOpen => wrong(format!(
            "is {number}, which is not an open descriptor here: only the program that \
             `carrack run` starts inherits it, and not what that program starts in turn"
        )),
        AdoptError::NotASocket => wrong(format!("is {number}, which is not a socket")),
        AdoptError::OtherSocket => wrong(format!("is {number}, a socket of another kind")),
        AdoptError::Taken => wrong(format!(
            "is {number}, which a runtime of this process, or of the one that it is a fork of, has \
             taken over: a rank starts once, and runtimes of one process share their bootstrap"
        )),
        AdoptError::System(errno) => BootstrapError::os("adopting the launcher's socket", errno),
    })
}

/// Makes an error about the descriptor's variable.
pub(super) fn wrong(problem: String) -> BootstrapError {
    BootstrapError::Variable { name: FD_VARIABLE, problem }
}
