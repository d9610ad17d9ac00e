//! From the ranks' pipes to this process's stdout and stderr, in whole tagged lines.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::{Errno, read};
use rustix::stdio;

use super::lines::Lines;
use super::sink::{Flushed, Sink};

/// One of a rank's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

impl Stream {
    /// Both.
    pub(super) const BOTH: [Self; 2] = [Self::Out, Self::Err];

    fn index(self) -> usize {
        match self {
            Self::Out => 0,
            Self::Err => 1,
        }
    }
}

/// The pipes of all ranks and where they lead.
pub(super) struct Outputs {
    /// One for each stream, or one for both when both go to the same place: a line must not break
    /// into a line of the other stream.
    sinks: Vec<Sink>,
    /// Sinks that are full; the keeper watches them for room.
    blocked: [bool; 2],
    flows: [Flow; 2],
    buffer: Vec<u8>,
}

/// The pipes of one stream.
struct Flow {
    pipes: Vec<Option<Pipe>>,
    /// Watches the pipes. It is itself watched by the event loop, but only while the sink has room:
    /// so one call pauses any number of pipes.
    watch: OwnedFd,
    is_watched: bool,
}

struct Pipe {
    fd: OwnedFd,
    lines: Lines,
}

impl Outputs {
    /// Creates outputs for this number of ranks, without pipes.
    pub(super) fn new(ranks: u32) -> rustix::io::Result<Self> {
        let (out, err) = (stdio::stdout(), stdio::stderr());
        let mut sinks = vec![Sink::new(out)];
        if !Sink::are_one(out, err) {
            sinks.push(Sink::new(err));
        }
        let flow = || {
            Ok(Flow {
                pipes: (0..ranks).map(|_| None).collect(),
                watch: epoll::create(epoll::CreateFlags::CLOEXEC)?,
                is_watched: false,
            })
        };
        Ok(Self {
            sinks,
            blocked: [false; 2],
            flows: [flow()?, flow()?],
            buffer: vec![0; 64 * 1024],
        })
    }

    /// Adds one stream of a rank, whose lines are to bear this tag.
    pub(super) fn add(
        &mut self,
        rank: u32,
        stream: Stream,
        fd: OwnedFd,
        tag: String,
    ) -> rustix::io::Result<()> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let flow = &mut self.flows[stream.index()];
        epoll::add(
            &flow.watch,
            &fd,
            epoll::EventData::new_u64(rank.into()),
            epoll::EventFlags::IN,
        )?;
        flow.pipes[rank as usize] = Some(Pipe { fd, lines: Lines::new(tag) });
        Ok(())
    }

    /// Queues a line of the launcher's own, on stderr.
    pub(super) fn say(&mut self, line: &str) {
        let queue = self.sink(Stream::Err).queue();
        queue.extend_from_slice(line.as_bytes());
        queue.push(b'\n');
    }

    /// Reads what some pipes of this stream hold, and queues their whole lines.
    pub(super) fn read(&mut self, stream: Stream) -> rustix::io::Result<()> {
        let mut events = [MaybeUninit::uninit(); 64];
        let watch = &self.flows[stream.index()].watch;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = match epoll::wait(watch, &mut events, Some(&now)) {
            Ok((ready, _)) => ready,
            Err(Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        for event in ready {
            if self.sink(stream).is_full() {
                break;
            }
            let data = event.data;
            let Ok(rank) = usize::try_from(data.u64()) else {
                continue;
            };
            self.read_pipe(rank, stream)?;
        }
        Ok(())
    }

    /// Reads one pipe once. False when nothing more will come now.
    fn read_pipe(&mut self, rank: usize, stream: Stream) -> rustix::io::Result<bool> {
        let flow = &mut self.flows[stream.index()];
        let Some(pipe) = &mut flow.pipes[rank] else {
            return Ok(false);
        };
        let which = stream.index().min(self.sinks.len() - 1);
        let queue = self.sinks[which].queue();
        match read(&pipe.fd, &mut self.buffer[..]) {
            Ok(0) => {
                pipe.lines.finish(queue);
                epoll::delete(&flow.watch, &pipe.fd)?;
                flow.pipes[rank] = None;
                Ok(false)
            }
            Ok(len) => {
                pipe.lines.feed(&self.buffer[..len], queue);
                Ok(true)
            }
            Err(Errno::INTR) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// Writes what can be written, and adjusts what the event loop watches: the pipes of a stream
    /// under `pipes_token(stream)` while there is room for more, a sink that is blocked under
    /// `sink_token`. False when stdout has no reader any more.
    pub(super) fn flush(
        &mut self,
        main: &OwnedFd,
        pipes_token: impl Fn(Stream) -> u64,
        sink_token: u64,
    ) -> rustix::io::Result<bool> {
        let mut stdout_is_read = true;
        for (which, sink) in self.sinks.iter_mut().enumerate() {
            let flushed = sink.flush();
            stdout_is_read &= which != 0 || flushed != Flushed::Closed;
            let blocked = flushed == Flushed::Blocked;
            if blocked != self.blocked[which] {
                if blocked {
                    let data = epoll::EventData::new_u64(sink_token);
                    epoll::add(main, &*sink, data, epoll::EventFlags::OUT)?;
                } else {
                    epoll::delete(main, &*sink)?;
                }
                self.blocked[which] = blocked;
            }
        }
        for stream in Stream::BOTH {
            let wanted = !self.sink(stream).is_full();
            let flow = &mut self.flows[stream.index()];
            if wanted != flow.is_watched {
                if wanted {
                    let data = epoll::EventData::new_u64(pipes_token(stream));
                    epoll::add(main, &flow.watch, data, epoll::EventFlags::IN)?;
                } else {
                    epoll::delete(main, &flow.watch)?;
                }
                flow.is_watched = wanted;
            }
        }
        Ok(stdout_is_read)
    }

    /// After all ranks have ended: reads what one more pipe still holds to its end. False when none
    /// is left. A pipe that a process outside the job holds open is read until it is empty.
    pub(super) fn read_to_end(&mut self) -> rustix::io::Result<bool> {
        for stream in Stream::BOTH {
            let index = stream.index();
            let Some(rank) = self.flows[index].pipes.iter().position(Option::is_some) else {
                continue;
            };
            while self.read_pipe(rank, stream)? {}
            let which = index.min(self.sinks.len() - 1);
            if let Some(mut pipe) = self.flows[index].pipes[rank].take() {
                pipe.lines.finish(self.sinks[which].queue());
                epoll::delete(&self.flows[index].watch, &pipe.fd)?;
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// The descriptor of a sink that its reader has to make room in, after a flush.
    pub(super) fn blocked(&self) -> Option<BorrowedFd<'_>> {
        let blocked = self.sinks.iter().zip(self.blocked).find(|(_, blocked)| *blocked);
        blocked.map(|(sink, _)| sink.as_fd())
    }

    fn sink(&mut self, stream: Stream) -> &mut Sink {
        let which = stream.index().min(self.sinks.len() - 1);
        &mut self.sinks[which]
    }
}
