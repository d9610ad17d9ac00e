//! The client of `carrack run`, over the socket that a rank inherits.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};

use carrack_transports::net::greeting::{Carrier as _, Fault};
use carrack_transports::net::packets::{Channel, ConnectError};

use super::adopt::{adopt, wrong};
use super::client::{Client, Host, Wire, by_client};
use super::error::BootstrapError;
use super::job::JobId;
use super::protocol::{FD_VARIABLE, Frame, MAX_FRAME, RANK_VARIABLE, SIZE_VARIABLE, VERSION};
use super::{Bootstrap, MAX_RANKS};

/// The bootstrap of a program that `carrack run` has started.
///
/// A process has one, which its runtimes share. In a forked child every call is an error.
#[derive(Debug)]
pub struct FromLauncher {
    rank: u32,
    size: u32,
    job: JobId,
    client: Client,
}

impl FromLauncher {
    /// Returns the bootstrap that the environment describes, or `None` when no launcher started
    /// this process: then it is a job of one.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Variable`] when only some of the variables are set or one is ill-formed;
    /// [`BootstrapError::Version`]; [`BootstrapError::Os`].
    pub fn from_env() -> Result<Option<Self>, BootstrapError> {
        let text = |name: &'static str| match env::var_os(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(variable(name, "is not text".into())),
        };
        let (fd, rank, size) = (text(FD_VARIABLE)?, text(RANK_VARIABLE)?, text(SIZE_VARIABLE)?);
        match described(fd.as_deref(), rank.as_deref(), size.as_deref())? {
            Some((fd, rank, size)) => Self::from_socket(adopt(fd)?, rank, size).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the bootstrap of this rank at this end of the launcher's socket pair.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Variable`] when the launcher's greeting is of another rank or has been
    /// read before; [`BootstrapError::Version`]; [`BootstrapError::LauncherGone`];
    /// [`BootstrapError::Os`].
    pub fn from_socket(socket: OwnedFd, rank: u32, size: u32) -> Result<Self, BootstrapError> {
        let channel = Channel::inherited(socket).map_err(|error| match error {
            ConnectError::System(errno) => {
                BootstrapError::os("taking over the launcher's socket", errno)
            }
            other => wrong(format!("names a socket that is not the launcher's: {other}")),
        })?;
        let mut wire = Wire::Packets(channel, VecDeque::new());
        let job = greeting(&mut wire, rank, size)?;
        Ok(Self { rank, size, job, client: Client::new(rank, wire, Host::Launcher)? })
    }
}

impl Bootstrap for FromLauncher {
    by_client!();
}

/// Reads the launcher's `Hello`, which lies in the socket before the program starts.
fn greeting(wire: &mut Wire, rank: u32, size: u32) -> Result<JobId, BootstrapError> {
    let bytes = match wire.hear(MAX_FRAME) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => {
            return Err(wrong(
                "names a socket that is in use: a process has one bootstrap, which its runtimes \
                share"
                    .into(),
            ));
        }
        Err(Fault::Gone(_)) => return Err(BootstrapError::LauncherGone),
        Err(Fault::Wrong(why)) => return Err(wrong(format!("names a socket with {why}"))),
        Err(Fault::Short(errno)) => {
            return Err(BootstrapError::os("receiving from the launcher", errno));
        }
    };
    match Frame::hello_version(&bytes) {
        Some(theirs) if theirs != VERSION => {
            return Err(BootstrapError::Version { ours: VERSION, theirs });
        }
        _ => {}
    }
    match Frame::decode(&bytes)? {
        Frame::Hello { job, rank: theirs, size: their_size, .. } => {
            if theirs != rank {
                let problem = format!("is {rank}, but the launcher's socket is rank {theirs}'s");
                return Err(variable(RANK_VARIABLE, problem));
            }
            if their_size != size {
                let problem = format!("is {size}, but the launcher has {their_size} ranks");
                return Err(variable(SIZE_VARIABLE, problem));
            }
            Ok(job)
        }
        _ => Err(wrong("names a socket on which no launcher says hello".into())),
    }
}

fn missing(name: &'static str) -> BootstrapError {
    variable(name, "is not set, although another variable of the launcher's is".into())
}

fn variable(name: &'static str, problem: String) -> BootstrapError {
    BootstrapError::Variable { name, problem }
}

/// Returns the checked values of `CARRACK_BOOTSTRAP_FD`, `CARRACK_RANK` and `CARRACK_SIZE`.
fn described(
    fd: Option<&str>,
    rank: Option<&str>,
    size: Option<&str>,
) -> Result<Option<(i32, u32, u32)>, BootstrapError> {
    let (fd, rank, size) = match (fd, rank, size) {
        (None, None, None) => return Ok(None),
        (Some(fd), Some(rank), Some(size)) => (fd, rank, size),
        (None, ..) => return Err(missing(FD_VARIABLE)),
        (_, None, _) => return Err(missing(RANK_VARIABLE)),
        (.., None) => return Err(missing(SIZE_VARIABLE)),
    };
    let Ok(fd) = number(FD_VARIABLE, fd)?.try_into() else {
        return Err(wrong(format!("is {fd}, which is no descriptor's number")));
    };
    let rank = number(RANK_VARIABLE, rank)?;
    let size = number(SIZE_VARIABLE, size)?;
    if !(1..=MAX_RANKS).contains(&size) {
        return Err(variable(SIZE_VARIABLE, format!("is {size}, not in 1..={MAX_RANKS}")));
    }
    if rank >= size {
        return Err(variable(RANK_VARIABLE, format!("is {rank}, not below the size {size}")));
    }
    Ok(Some((fd, rank, size)))
}

fn number(name: &'static str, text: &str) -> Result<u32, BootstrapError> {
    // `parse` would also take a plus sign, which the launcher never writes.
    match text.parse() {
        Ok(number) if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(number),
        _ => Err(variable(name, format!("is {text:?}, which is not a number"))),
    }
}

#[cfg(test)]
mod tests;
