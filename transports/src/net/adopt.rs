//! The sockets that a process inherits from its launcher.

#![expect(unsafe_code, reason = "a file descriptor comes by its number")]

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

/// The reason why an inherited descriptor was not adopted. The descriptor is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdoptError {
    /// Nothing is open under the number.
    NotOpen,
    /// The descriptor is no socket.
    NotASocket,
    /// The descriptor is a socket of another kind.
    OtherSocket,
    /// The descriptor was taken over before.
    Taken,
    /// The system's word.
    System(Errno),
}

/// The variable by which a launcher tells a process the number of the socket that it inherits.
pub const INHERITED: &str = "CARRACK_BOOTSTRAP_FD";

/// Takes over the socket that this process inherited, under the number in [`INHERITED`].
///
/// # Errors
/// See [`AdoptError`].
pub fn inherited() -> Result<OwnedFd, AdoptError> {
    let number = std::env::var(INHERITED).ok().and_then(|number| number.parse().ok());
    // SAFETY: the variable is the launcher's word that the descriptor was passed on for this, and
    // it alone can pass one on. Safe code of this edition sets no variable.
    unsafe { adopt(number.ok_or(AdoptError::NotOpen)?) }
}

/// Takes over a Unix socket of sequenced packets, and sets it to close on exec. Each number can be
/// taken over once.
///
/// # Errors
/// See [`AdoptError`].
///
/// # Safety
/// The descriptor of that number, if it is open, is owned by nothing else in this process.
///
/// ```compile_fail,E0133
/// let standard_error = carrack_transports::net::adopt::adopt(2);
/// ```
pub unsafe fn adopt(number: i32) -> Result<OwnedFd, AdoptError> {
    static TAKEN: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
    let mut taken = TAKEN.lock();
    if taken.contains(&number) {
        return Err(AdoptError::Taken);
    }
    // SAFETY: the call reads a flag and touches no memory; a number that is not open is an error.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(AdoptError::NotOpen);
    }
    // SAFETY: it is open, and only looked at.
    let seen = unsafe { BorrowedFd::borrow_raw(number) };
    match (rustix::net::sockopt::socket_domain(seen), rustix::net::sockopt::socket_type(seen)) {
        (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => {}
        (Ok(_), Ok(_)) => return Err(AdoptError::OtherSocket),
        (Err(Errno::NOTSOCK), _) => return Err(AdoptError::NotASocket),
        (Err(error), _) | (_, Err(error)) => return Err(AdoptError::System(error)),
    }
    rustix::io::fcntl_setfd(seen, rustix::io::FdFlags::CLOEXEC).map_err(AdoptError::System)?;
    taken.insert(number);
    // SAFETY: it is open. Nothing else owns it, says the caller, and the set remembers that this
    // does.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The variable by which a launcher with PMI tells a process the number of its socket.
pub const PMI: &str = "PMI_FD";

/// Returns `true` if there is a stream socket under the number in [`PMI`].
pub fn has_pmi() -> bool {
    duplicate(of_pmi(), false).is_ok()
}

/// Returns a duplicate of the stream socket under the number in [`PMI`]. The number itself stays
/// with the process, whose MPI library may use it. It is not inherited any more: a program that
/// this one starts is no rank.
///
/// # Errors
/// See [`AdoptError`].
pub fn pmi() -> Result<OwnedFd, AdoptError> {
    duplicate(of_pmi(), true)
}

fn of_pmi() -> i32 {
    std::env::var(PMI).ok().and_then(|number| number.parse().ok()).unwrap_or(-1)
}

fn duplicate(number: i32, keeps: bool) -> Result<OwnedFd, AdoptError> {
    // SAFETY: the call reads a flag and touches no memory; a number that is not open is an error.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(AdoptError::NotOpen);
    }
    // SAFETY: it is open, and only looked at and duplicated.
    let seen = unsafe { BorrowedFd::borrow_raw(number) };
    match rustix::net::sockopt::socket_type(seen) {
        Ok(SocketType::STREAM) => {}
        Ok(_) => return Err(AdoptError::OtherSocket),
        Err(Errno::NOTSOCK) => return Err(AdoptError::NotASocket),
        Err(error) => return Err(AdoptError::System(error)),
    }
    if keeps {
        rustix::io::fcntl_setfd(seen, rustix::io::FdFlags::CLOEXEC).map_err(AdoptError::System)?;
    }
    rustix::io::fcntl_dupfd_cloexec(seen, 3).map_err(AdoptError::System)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SocketFlags, socket_with};
    use std::os::fd::IntoRawFd;

    #[test]
    fn a_stream_is_duplicated_and_nothing_else_is() {
        use std::os::fd::AsRawFd;
        for number in [-1, 987_654] {
            assert_eq!(duplicate(number, true).unwrap_err(), AdoptError::NotOpen);
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(duplicate(file.as_raw_fd(), true).unwrap_err(), AdoptError::NotASocket);
        let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert_eq!(duplicate(datagrams.as_raw_fd(), true).unwrap_err(), AdoptError::OtherSocket);
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        rustix::io::fcntl_setfd(&one, rustix::io::FdFlags::empty()).unwrap();
        let is_inherited = || rustix::io::fcntl_getfd(&one).unwrap().is_empty();
        assert_ne!(duplicate(one.as_raw_fd(), false).unwrap().as_raw_fd(), one.as_raw_fd());
        assert!(is_inherited());
        assert_ne!(duplicate(one.as_raw_fd(), true).unwrap().as_raw_fd(), one.as_raw_fd());
        assert!(!is_inherited());
    }

    #[test]
    fn a_descriptor_is_taken_over_once_and_only_if_it_is_a_socket_of_packets() {
        // SAFETY: nothing owns these numbers: they are not open, or were given up.
        let adopt = |number| unsafe { adopt(number) };
        for number in [-1, 987_654] {
            assert_eq!(adopt(number).unwrap_err(), AdoptError::NotOpen);
        }
        let file = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
        assert_eq!(adopt(file).unwrap_err(), AdoptError::NotASocket);
        let stream = std::os::unix::net::UnixStream::pair().unwrap().0.into_raw_fd();
        assert_eq!(adopt(stream).unwrap_err(), AdoptError::OtherSocket);
        let flags = SocketFlags::CLOEXEC;
        let made = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let number = made.unwrap().into_raw_fd();
        let socket = adopt(number).unwrap();
        assert_eq!(adopt(number).unwrap_err(), AdoptError::Taken);
        let flags = rustix::io::fcntl_getfd(&socket).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
