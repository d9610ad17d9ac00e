//! The client of `carrack run`, over the socket that a rank inherits.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, getpid};

use super::adopt::{adopt, wrong};
use super::arrivals::Arrivals;
use super::error::BootstrapError;
use super::job::JobId;
use super::protocol::{
    FD_VARIABLE, Frame, MAX_FRAME, RANK_VARIABLE, SIZE_VARIABLE, VERSION, check_key, check_total,
    check_value,
};
use super::{Bootstrap, MAX_RANKS};

/// The bootstrap of a program that `carrack run` has started.
///
/// There is one to a process: share it between runtimes. It must not be used after a `fork` in the
/// child, where every call is an error.
#[derive(Debug)]
pub struct FromLauncher {
    rank: u32,
    size: u32,
    job: JobId,
    made_in: Pid,
    /// Watches the socket and the answers that another thread took in; what `wait_fd` gives.
    watch: OwnedFd,
    /// Wakes a fence whose end another thread took in.
    fence_news: OwnedFd,
    /// Held through a fence, so that those of several threads take turns.
    fence_turn: Mutex<()>,
    connection: Mutex<Connection>,
    socket: OwnedFd,
}

#[derive(Debug)]
struct Connection {
    arrivals: Arrivals,
    /// Frames that the socket had no room for. Bounded: by what a rank may put, and ask for.
    outbox: VecDeque<Vec<u8>>,
    bytes_put: usize,
    fences: u64,
    buffer: Vec<u8>,
}

impl FromLauncher {
    /// The bootstrap that the environment describes, or `None` when no launcher started this
    /// process: then the job is [`Alone`](super::Alone).
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

    /// The bootstrap of this rank at this end of the launcher's socket pair.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Variable`] when the launcher's greeting is of another rank or has been
    /// read before; [`BootstrapError::Version`]; [`BootstrapError::LauncherGone`];
    /// [`BootstrapError::Os`].
    pub fn from_socket(socket: OwnedFd, rank: u32, size: u32) -> Result<Self, BootstrapError> {
        let mut buffer = vec![0; MAX_FRAME];
        let job = greeting(&socket, &mut buffer, rank, size)?;
        let arrivals = Arrivals::new()?;
        let fence_news = arrivals.for_fences()?;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC)
            .and_then(|watch| {
                let data = epoll::EventData::new_u64(0);
                epoll::add(&watch, &socket, data, epoll::EventFlags::IN)?;
                epoll::add(&watch, arrivals.for_gets(), data, epoll::EventFlags::IN)?;
                Ok(watch)
            })
            .map_err(|errno| BootstrapError::os("making an epoll for the bootstrap", errno))?;
        Ok(Self {
            rank,
            size,
            job,
            made_in: getpid(),
            watch,
            fence_news,
            fence_turn: Mutex::new(()),
            connection: Mutex::new(Connection {
                arrivals,
                outbox: VecDeque::new(),
                bytes_put: 0,
                fences: 0,
                buffer,
            }),
            socket,
        })
    }

    /// The connection, after what has come has been taken in and what waits has been sent as far
    /// as there is room.
    fn connection(&self) -> Result<MutexGuard<'_, Connection>, BootstrapError> {
        // Calls in a forked child are an error: parent and child would take each other's answers
        // off the one socket.
        let used_in = getpid();
        if used_in != self.made_in {
            return Err(BootstrapError::Forked {
                made_in: self.made_in.as_raw_pid(),
                used_in: used_in.as_raw_pid(),
            });
        }
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.receive(&self.socket)?;
        self.flush(&mut connection)?;
        Ok(connection)
    }

    /// Sends, or keeps for later when the socket has no room.
    fn send(&self, connection: &mut Connection, frame: &Frame) -> Result<(), BootstrapError> {
        connection.arrivals.check_end()?;
        connection.outbox.push_back(frame.encode());
        self.flush(connection)
    }

    fn flush(&self, connection: &mut Connection) -> Result<(), BootstrapError> {
        let had_to_wait = !connection.outbox.is_empty();
        while let Some(bytes) = connection.outbox.front() {
            match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => drop(connection.outbox.pop_front()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    connection.arrivals.launcher_gone();
                    connection.outbox.clear();
                }
                Err(errno) => return Err(BootstrapError::os("sending to the launcher", errno)),
            }
        }
        if had_to_wait {
            // A sleeper is also to be woken when there is room again, for nobody else would send.
            let data = epoll::EventData::new_u64(0);
            epoll::modify(&self.watch, &self.socket, data, connection.interest())
                .map_err(|errno| BootstrapError::os("watching the launcher's socket", errno))?;
        }
        Ok(())
    }

    /// Sleeps until there is something to take in or send, or another thread has taken it in.
    fn sleep(&self, connection: MutexGuard<'_, Connection>) -> Result<(), BootstrapError> {
        let mut interest = PollFlags::IN;
        if !connection.outbox.is_empty() {
            interest |= PollFlags::OUT;
        }
        drop(connection);
        let mut fds =
            [PollFd::new(&self.socket, interest), PollFd::new(&self.fence_news, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(BootstrapError::os("waiting for the launcher", errno)),
        }
    }
}

impl Connection {
    fn receive(&mut self, socket: &OwnedFd) -> Result<(), BootstrapError> {
        loop {
            match recv(socket, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET) => {
                    self.arrivals.launcher_gone();
                    return Ok(());
                }
                Ok((len, _)) => self.arrivals.take_in(Frame::decode(&self.buffer[..len])?),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => {
                    return Err(BootstrapError::os("receiving from the launcher", errno));
                }
            }
        }
    }

    fn interest(&self) -> epoll::EventFlags {
        if self.outbox.is_empty() {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::IN | epoll::EventFlags::OUT
        }
    }
}

impl Bootstrap for FromLauncher {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn job(&self) -> &JobId {
        &self.job
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        check_key(key)?;
        check_value(value)?;
        let mut connection = self.connection()?;
        let total = connection.bytes_put + key.len() + value.len();
        check_total(total)?;
        connection.bytes_put = total;
        self.send(&mut connection, &Frame::Put { key: key.into(), value: value.into() })
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        check_key(key)?;
        let mut connection = self.connection()?;
        if let Some(value) = connection.arrivals.answer(key) {
            return Ok(Some(value));
        }
        if connection.arrivals.ask(key) {
            // Asked even when a rank is gone: what it put before is still to be had.
            self.send(&mut connection, &Frame::Get { key: key.into() })?;
            return Ok(None);
        }
        connection.arrivals.check_get()?;
        Ok(None)
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        let _turn = self.fence_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut connection = self.connection()?;
        // Before it counts: one that cannot end must not be the server's to wait for.
        connection.arrivals.check_fence()?;
        let number = connection.fences + 1;
        connection.fences = number;
        self.send(&mut connection, &Frame::Fence { number })?;
        while !connection.arrivals.fence_is_done(number)? {
            self.sleep(connection)?;
            connection = self.connection()?;
        }
        Ok(())
    }

    fn finish(&self) -> Result<(), BootstrapError> {
        let mut connection = self.connection()?;
        self.send(&mut connection, &Frame::Finished)?;
        // The process may be about to exit, and what is still here would be lost.
        while !connection.outbox.is_empty() {
            self.sleep(connection)?;
            connection = self.connection()?;
        }
        connection.arrivals.check_end()
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watch.as_fd())
    }
}

/// Reads the launcher's `Hello`, which lies in the socket before the program starts.
fn greeting(
    socket: &OwnedFd,
    buffer: &mut [u8],
    rank: u32,
    size: u32,
) -> Result<JobId, BootstrapError> {
    let len = loop {
        match recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(BootstrapError::LauncherGone),
            Ok((len, _)) => break len,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                return Err(wrong(
                    "names a socket that is in use: a process has one bootstrap, which its \
                     runtimes share"
                        .into(),
                ));
            }
            Err(errno) => return Err(BootstrapError::os("receiving from the launcher", errno)),
        }
    };
    match Frame::hello_version(&buffer[..len]) {
        Some(theirs) if theirs != VERSION => {
            return Err(BootstrapError::Version { ours: VERSION, theirs });
        }
        _ => {}
    }
    match Frame::decode(&buffer[..len])? {
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

/// The values of `CARRACK_BOOTSTRAP_FD`, `CARRACK_RANK` and `CARRACK_SIZE`, checked.
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
