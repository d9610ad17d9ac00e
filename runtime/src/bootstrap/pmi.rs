//! PMI-1: the protocol of MPICH's Hydra, Slurm's `--mpi=pmi2` and Flux, over a socket.
//!
//! A request is a line, `cmd=put kvsname=k key=a value=b`, and so is its answer, which
//! [`Reply::parse`] reads. Servers differ in the order of fields, and add some.
//!
//! The socket is inherited (`PMI_FD`), or the rank connects to `PMI_PORT` and names itself by
//! `PMI_ID`. Hydra takes the end of a socket without `cmd=finalize` for a failure, and kills all
//! ranks. So the rank says it when its bootstrap is dropped.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use carrack_transports::net::adopt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::error::BootstrapError;
use super::exchange::{Exchange, Seat};
use super::source::variable;
use super::tcp::variables;
use crate::settings::Settings;

/// The variable with the server's address, in place of a socket.
pub(super) const PORT: &str = "PMI_PORT";
/// The variable with a process's name at that address.
const ID: &str = "PMI_ID";
const RANK: &str = "PMI_RANK";
/// The variable with the number of ranks.
pub(super) const SIZE: &str = "PMI_SIZE";

/// The name in errors.
pub(super) const PMI: &str = "PMI";

/// The longest line that a server may send, in bytes.
const LONGEST: usize = 8192;

/// The longest value, in bytes: every server takes it, Slurm's with its limit of 1023 for a line,
/// too.
const PIECE: usize = 512;

/// The most pieces of a card.
const PIECES: usize = 64;

/// Time that the server has for the answer to the announcement of this rank's end.
const FAREWELL: Duration = Duration::from_secs(5);

/// A line of a server, by its fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    fields: Vec<(String, String)>,
}

impl Reply {
    /// Reads a line, without its end. Words without an equals sign are left out.
    ///
    /// # Errors
    ///
    /// The reason why it is no answer.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(line).map_err(|_| "it is not UTF-8".to_owned())?;
        let words = text.split_ascii_whitespace();
        let fields = words.filter_map(|word| word.split_once('='));
        let fields = fields.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let reply = Self { fields: fields.collect() };
        if reply.get("cmd").is_none() {
            return Err("it has no field `cmd`".into());
        }
        Ok(reply)
    }

    /// Returns the value of a field; of several, the first.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns `true` if the server has done what it was asked. Not every answer says so.
    pub fn is_success(&self) -> bool {
        self.get("rc").is_none_or(|rc| rc == "0")
    }
}

/// A session with a PMI server.
#[derive(Debug)]
pub(super) struct Pmi {
    socket: OwnedFd,
    unread: Vec<u8>,
    seat: Seat,
    /// The server's name of the job's table.
    table: String,
    deadline: Instant,
}

/// Greets the server that the environment names.
pub(super) fn connect(settings: &Settings) -> Result<Box<dyn Exchange>, BootstrapError> {
    let now = Instant::now();
    let deadline = now.checked_add(variables::patience(settings)).unwrap_or(now);
    let inherited = adopt::pmi();
    let is_called = inherited.is_err();
    let socket = match inherited {
        Ok(socket) => socket,
        Err(_) => call(&variable(PORT).unwrap_or_default(), deadline)?,
    };
    let seat = Seat { rank: 0, size: 1, place_on_node: 0 };
    let (unread, table) = (Vec::new(), String::new());
    let mut pmi = Pmi { socket, unread, seat, table, deadline };
    if is_called {
        pmi.introduce(&variable(ID).unwrap_or_default())?;
    } else {
        (pmi.seat.rank, pmi.seat.size) =
            (number(RANK, variable(RANK))?, number(SIZE, variable(SIZE))?);
    }
    if let Some(why) = pmi.seat.fault() {
        return Err(failed(why));
    }
    let greeting = pmi.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
    if greeting.get("pmi_version").is_some_and(|version| version != "1") {
        return Err(failed("its server does not speak version 1 of PMI".into()));
    }
    pmi.table = pmi.ask_for("cmd=get_my_kvsname", "my_kvsname", "kvsname")?;
    let mapping = format!("cmd=get kvsname={} key=PMI_process_mapping", pmi.table);
    let mapping = pmi.say(&mapping).and_then(|()| pmi.hear("get_result"))?;
    let place = mapping.get("value").filter(|_| mapping.is_success());
    let place = place.and_then(|mapping| place_on_node(mapping, pmi.seat.rank));
    pmi.seat.place_on_node = place.unwrap_or(pmi.seat.rank);
    Ok(Box::new(pmi))
}

impl Pmi {
    /// Names this process to a server that it has connected to, which answers with rank and size.
    fn introduce(&mut self, id: &str) -> Result<(), BootstrapError> {
        self.ask(&format!("cmd=initack pmiid={id}"), "initack")?;
        let mut told = BTreeMap::new();
        // Of size, rank and a level of debugging, in any order.
        for _ in 0..3 {
            told.extend(self.hear("set")?.fields);
        }
        self.seat.rank = number(RANK, told.remove("rank"))?;
        self.seat.size = number(SIZE, told.remove("size"))?;
        Ok(())
    }

    /// Returns a field of the answer to a request.
    fn ask_for(
        &mut self,
        request: &str,
        answer: &str,
        field: &str,
    ) -> Result<String, BootstrapError> {
        let reply = self.ask(request, answer)?;
        let value = reply.get(field).map(str::to_owned);
        value.ok_or_else(|| failed(format!("its server's `{answer}` has no `{field}`")))
    }

    /// Sends a request, and returns its answer, which must be a success.
    fn ask(&mut self, request: &str, answer: &str) -> Result<Reply, BootstrapError> {
        self.say(request)?;
        let reply = self.hear(answer)?;
        if !reply.is_success() {
            // The value of a put is the job's secret, so only the command is shown.
            let command = request.split(' ').next().unwrap_or_default();
            let rc = reply.get("rc").unwrap_or_default();
            return Err(failed(format!("its server refused `{command}` (rc={rc})")));
        }
        Ok(reply)
    }

    fn say(&mut self, request: &str) -> Result<(), BootstrapError> {
        let line = format!("{request}\n");
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, rest, flags) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(errno) => return Err(lost(errno)),
            }
        }
        Ok(())
    }

    /// Returns the next line, which must be this command.
    fn hear(&mut self, answer: &str) -> Result<Reply, BootstrapError> {
        let line = loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                break self.unread.drain(..=end).collect::<Vec<_>>();
            }
            if self.unread.len() > LONGEST {
                return Err(failed(format!("its server sent a line of over {LONGEST} bytes")));
            }
            let mut space = [0; 4096];
            match rustix::net::recv(&self.socket, &mut space, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(lost(Errno::PIPE)),
                Ok((_, count)) => self.unread.extend(&space[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(errno) => return Err(lost(errno)),
            }
        };
        let reply = Reply::parse(&line)
            .map_err(|why| failed(format!("its server sent a line that is no answer: {why}")))?;
        match reply.get("cmd") {
            Some(command) if command == answer => Ok(reply),
            other => {
                let other = other.unwrap_or_default();
                Err(failed(format!("its server answered with `{other}`, and not `{answer}`")))
            }
        }
    }

    fn wait(&self, flags: PollFlags) -> Result<(), BootstrapError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(&self.socket, flags)], limit.as_ref()) {
            Ok(0) => Err(failed(
                "its server has not answered in time: have all ranks started? \
                 CARRACK_BOOTSTRAP_TIMEOUT says how many seconds it has"
                    .into(),
            )),
            // Interrupted, or out of memory for a moment.
            _ => Ok(()),
        }
    }
}

impl Exchange for Pmi {
    fn seat(&self) -> Seat {
        self.seat
    }

    /// Puts the card as hexadecimal digits, in pieces.
    fn share(&mut self, card: Option<&[u8]>) -> Result<Vec<u8>, BootstrapError> {
        let table = self.table.clone();
        let mut put = |key: &str, value: &str| {
            let request = format!("cmd=put kvsname={table} key={key} value={value}");
            self.ask(&request, "put_result").map(drop)
        };
        if let Some(card) = card {
            let digits: Vec<_> = card.iter().map(|byte| format!("{byte:02x}")).collect();
            let pieces: Vec<_> = digits.chunks(PIECE / 2).map(<[String]>::concat).collect();
            put("carrack.pieces", &pieces.len().min(PIECES).to_string())?;
            for (at, piece) in pieces.iter().take(PIECES).enumerate() {
                put(&format!("carrack.{at}"), piece)?;
            }
        }
        self.ask("cmd=barrier_in", "barrier_out")?;
        let mut get = |key: &str| {
            let request = format!("cmd=get kvsname={} key={key}", self.table.clone());
            self.ask_for(&request, "get_result", "value")
        };
        let broken = || failed("what rank 0 has put has another form".into());
        let pieces = get("carrack.pieces")?.parse().ok().filter(|pieces| *pieces <= PIECES);
        let mut digits = String::new();
        for at in 0..pieces.ok_or_else(broken)? {
            digits += &get(&format!("carrack.{at}"))?;
        }
        bytes(&digits).ok_or_else(broken)
    }

    fn end(&mut self) {
        let now = Instant::now();
        self.deadline = now.checked_add(FAREWELL).unwrap_or(now);
        // The rank ends whatever the server says.
        let _ = self.ask("cmd=finalize", "finalize_ack");
    }
}

/// Connects to the server at `host:port`.
fn call(address: &str, deadline: Instant) -> Result<OwnedFd, BootstrapError> {
    let unreached = |why: String| failed(format!("its server at {PORT}={address:?}: {why}"));
    let mut why = "the name has no address".to_owned();
    for address in address.to_socket_addrs().map_err(|error| unreached(error.to_string()))? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream.into()),
            Err(error) => why = error.to_string(),
        }
    }
    Err(unreached(why))
}

/// Returns the bytes of hexadecimal digits.
fn bytes(digits: &str) -> Option<Vec<u8>> {
    let (pairs, more) = digits.as_bytes().as_chunks::<2>();
    let digit =
        |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    pairs.iter().map(byte).collect::<Option<_>>().filter(|_| more.is_empty())
}

/// Returns the place of a rank on its node, by `PMI_process_mapping`: `(vector,(0,2,2))` places two
/// ranks on each of two nodes from node 0 on. Its blocks are repeated until all ranks are placed.
fn place_on_node(mapping: &str, rank: u32) -> Option<u32> {
    let blocks = mapping.strip_prefix("(vector,(")?.strip_suffix("))")?;
    let block = |text: &str| {
        let numbers = text.split(',').map(|number| number.trim().parse::<u32>().ok());
        match numbers.collect::<Option<Vec<_>>>()?[..] {
            [first, nodes, ranks] if ranks > 0 => Some((first..first.checked_add(nodes)?, ranks)),
            _ => None,
        }
    };
    let blocks = blocks.split("),(").map(block).collect::<Option<Vec<_>>>()?;
    let nodes =
        blocks.iter().flat_map(|(nodes, ranks)| nodes.clone().map(move |node| (node, *ranks)));
    let mut before = 0_u32;
    let mut groups = Vec::new();
    for (node, ranks) in nodes.cycle() {
        groups.push((node, ranks));
        match before.checked_add(ranks)? {
            after if after > rank => {
                let earlier = groups.iter().rev().skip(1).filter(|(other, _)| *other == node);
                return Some(earlier.map(|(_, ranks)| ranks).sum::<u32>() + rank - before);
            }
            after => before = after,
        }
    }
    None
}

fn lost(errno: Errno) -> BootstrapError {
    failed(match errno {
        Errno::PIPE | Errno::CONNRESET => "its server has hung up".into(),
        other => format!("its server cannot be reached: {other}"),
    })
}

pub(super) fn failed(why: String) -> BootstrapError {
    BootstrapError::Exchange { launcher: PMI, why }
}

fn number(name: &str, text: Option<String>) -> Result<u32, BootstrapError> {
    let text = text.ok_or_else(|| failed(format!("{name} is not set")))?;
    text.parse().map_err(|_| failed(format!("{name} is {text:?}, which is not a number")))
}

#[cfg(test)]
mod tests;
