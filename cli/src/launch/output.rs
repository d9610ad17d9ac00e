//! The way from the ranks' pipes to this process's stdout and stderr, in whole tagged lines.
//!
//! A thread for each of the two writes, and sleeps in a write while the reader is slow. The ranks
//! then wait for room in their pipes, and the keeper's event loop goes on.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Write as _};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::io::{Errno, read, write};
use rustix::stdio;

use super::lines::Lines;

const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The threads that write, and what they report.
pub(super) struct Outputs {
    /// One for stdout and one for stderr. Where both go to the same place, one serves both, so that
    /// no line breaks into a line of the other stream.
    writers: Vec<Writer>,
    /// Pipe with a byte, the error's number, when stdout cannot be written to any more. Ends when
    /// all is written.
    pub(super) news: PipeReader,
}

/// Orders to a thread, which a byte in its pipe announces.
struct Writer {
    orders: Sender<WriterOrder>,
    wake: PipeWriter,
}

enum WriterOrder {
    /// Write what comes out of this pipe, in lines.
    Pipe(OwnedFd, Lines),
    /// Write a line of the launcher's own.
    Say(String),
}

impl Outputs {
    /// Starts the threads.
    pub(super) fn start() -> io::Result<Self> {
        let (out, err) = (stdio::stdout(), stdio::stderr());
        let are_one = match (fstat(out), fstat(err)) {
            (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
            _ => false,
        };
        let (news, report) = io::pipe()?;
        let mut writers = Vec::new();
        for is_stdout in if are_one { &[true][..] } else { &[true, false] } {
            let ((orders, to_do), (woken, wake)) = (channel(), io::pipe()?);
            let report = report.try_clone()?;
            let sink = if *is_stdout { out } else { err };
            let mut output =
                Output { sink: sink.try_clone_to_owned()?.into(), pipes: Vec::new(), to_do, woken };
            thread::Builder::new().name("carrack-output".into()).spawn(move || {
                output.write_all(is_stdout.then_some(&report));
                drop(report);
            })?;
            writers.push(Writer { orders, wake });
        }
        Ok(Self { writers, news })
    }

    /// Adds a stream of a rank, whose lines are to bear this tag.
    pub(super) fn add(&mut self, is_stdout: bool, pipe: OwnedFd, tag: String) {
        self.order(is_stdout, WriterOrder::Pipe(pipe, Lines::new(tag)));
    }

    /// Writes a line of the launcher's own to stderr.
    pub(super) fn say(&mut self, line: &str) {
        self.order(false, WriterOrder::Say(format!("{line}\n")));
    }

    fn order(&mut self, is_stdout: bool, order: WriterOrder) {
        if let Some(writer) =
            if is_stdout { self.writers.first_mut() } else { self.writers.last_mut() }
        {
            // A thread ends only when this sender does.
            let _ = writer.orders.send(order);
            let _ = writer.wake.write(&[0]);
        }
    }

    /// Has the threads write what the pipes still hold, and ends them. All ranks have ended before.
    /// A pipe that a process outside the job holds open is read until it is empty.
    pub(super) fn finish(&mut self) {
        self.writers.clear();
    }
}

/// A thread's part of it.
struct Output {
    sink: File,
    pipes: Vec<(OwnedFd, Lines)>,
    to_do: Receiver<WriterOrder>,
    woken: PipeReader,
}

impl Output {
    /// Writes to the end. When a write fails, `report` gets the error, and the rest is read and
    /// dropped.
    fn write_all(&mut self, report: Option<&PipeWriter>) {
        let mut bytes = vec![0; 64 * 1024];
        let (mut lines, mut is_open, mut goes_on) = (Vec::new(), true, true);
        loop {
            let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
            fds.extend(self.pipes.iter().map(|(pipe, _)| PollFd::new(pipe, PollFlags::IN)));
            let fds = &mut fds[usize::from(!goes_on)..];
            match poll(fds, (!goes_on).then_some(&NO_TIME)) {
                Ok(0) if !goes_on => break,
                Ok(_) => {}
                Err(_) => continue,
            }
            let mut ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if goes_on && ready.remove(0) {
                goes_on = self.take_orders(&mut bytes, &mut lines);
                ready.resize(self.pipes.len(), false);
            }
            let mut ready = ready.into_iter();
            self.pipes.retain_mut(|(pipe, unfinished)| {
                if !ready.next().unwrap_or(false) {
                    return true;
                }
                match read(&*pipe, &mut bytes[..]) {
                    Ok(0) => unfinished.finish(&mut lines),
                    Ok(len) => {
                        unfinished.feed(&bytes[..len], &mut lines);
                        return true;
                    }
                    Err(Errno::INTR | Errno::AGAIN) => return true,
                    Err(_) => {}
                }
                false
            });
            self.write(&mut lines, &mut is_open, report);
        }
        self.pipes.iter_mut().for_each(|(_, unfinished)| unfinished.finish(&mut lines));
        self.write(&mut lines, &mut is_open, report);
    }

    /// Takes new orders. Returns `false` if there will be no more.
    fn take_orders(&mut self, bytes: &mut [u8], lines: &mut Vec<u8>) -> bool {
        let _ = read(&self.woken, bytes);
        loop {
            match self.to_do.try_recv() {
                Ok(WriterOrder::Pipe(pipe, unfinished)) => self.pipes.push((pipe, unfinished)),
                Ok(WriterOrder::Say(line)) => lines.extend_from_slice(line.as_bytes()),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn write(&mut self, lines: &mut Vec<u8>, is_open: &mut bool, report: Option<&PipeWriter>) {
        if *is_open && let Err(errno) = write_whole(&self.sink, lines) {
            *is_open = false;
            let errno = u8::try_from(errno.raw_os_error()).unwrap_or(u8::MAX);
            let _ = report.map(|mut report| report.write(&[errno]));
        }
        lines.clear();
    }
}

/// Writes all bytes, also where another process has made the sink non-blocking.
fn write_whole(sink: &File, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match write(sink, bytes) {
            Ok(0) => return Err(Errno::IO),
            Ok(len) => bytes = &bytes[len..],
            // An interruption is tried again.
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::new(sink, PollFlags::OUT)], None);
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
