//! From the number of an inherited descriptor to an owned socket.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use super::error::BootstrapError;
use super::protocol::FD_VARIABLE;

/// Our own duplicate of descriptor `number`, close-on-exec, checked to be the launcher's kind of
/// socket.
///
/// That a number out of the environment names an open descriptor, and one that nobody else in this
/// process owns, is a promise that safe code cannot make. So the kernel is asked for a duplicate,
/// through a pidfd of this very process: the answer is owned by us whatever the number was. The
/// original stays open, as whoever owns it left it. It needs Linux 5.6.
pub(super) fn adopt(number: i32) -> Result<OwnedFd, BootstrapError> {
    let this_process = pidfd_open(getpid(), PidfdFlags::empty())
        .map_err(|errno| BootstrapError::os("opening a pidfd of this process", errno))?;
    let socket = match pidfd_getfd(&this_process, number, PidfdGetfdFlags::empty()) {
        Ok(socket) => socket,
        Err(Errno::BADF) => {
            return Err(wrong(format!(
                "is {number}, which is not an open descriptor here: only the program that \
                 `carrack run` starts inherits it, and not what that program starts in turn"
            )));
        }
        Err(errno) => {
            return Err(BootstrapError::os("adopting the launcher's socket (pidfd_getfd)", errno));
        }
    };
    // The kernel has set this already; said here because children depend on it.
    fcntl_setfd(&socket, FdFlags::CLOEXEC)
        .map_err(|errno| BootstrapError::os("setting close-on-exec on the bootstrap", errno))?;
    check(&socket, number)?;
    Ok(socket)
}

fn check(socket: &OwnedFd, number: i32) -> Result<(), BootstrapError> {
    match (socket_domain(socket), socket_type(socket)) {
        (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => Ok(()),
        (Ok(_), Ok(_)) => Err(wrong(format!("is {number}, a socket of another kind"))),
        (Err(Errno::NOTSOCK), _) => Err(wrong(format!("is {number}, which is not a socket"))),
        (Err(errno), _) | (_, Err(errno)) => {
            Err(BootstrapError::os("examining the launcher's socket", errno))
        }
    }
}

/// An error about the descriptor's variable.
pub(super) fn wrong(problem: String) -> BootstrapError {
    BootstrapError::Variable { name: FD_VARIABLE, problem }
}
