//! Links that share a connection: a link joins that of the peer's link, and goes the other way on
//! it.

use super::{Line, NONE, Outgoing, Sending};
use crate::contract::DownCause;
use crate::tcp::frame::Frame;
use crate::tcp::incoming::Told;
use crate::tcp::shared::Shared;
use crate::tcp::wire::{ENDED, Hello};
use rustix::net::SendFlags;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[derive(Debug)]
pub(in crate::tcp) struct Joined {
    pub(super) socket: Arc<TcpStream>,
    /// Place of the link that leads here.
    pub(super) reader: u32,
    /// The peer has said behind which byte the link goes on.
    pub(super) is_welcome: bool,
}

impl Outgoing {
    /// Returns `true` if it has no connection, and is making none.
    pub(in crate::tcp) fn is_alone(&self) -> bool {
        matches!(self.sending.lock().line, Line::Pause(_))
    }

    /// Returns `true` while a connection is being made.
    pub(in crate::tcp) fn is_dialling(&self) -> bool {
        matches!(self.sending.lock().line, Line::Dialling(_))
    }

    /// Returns the place of the link that leads here on the same connection.
    pub(in crate::tcp) fn reader(&self) -> Option<u32> {
        Some(self.reader.load(Ordering::Relaxed)).filter(|reader| *reader != NONE)
    }

    pub(in crate::tcp) fn set_reader(&self, reader: Option<u32>) {
        self.reader.store(reader.unwrap_or(NONE), Ordering::Relaxed);
    }

    /// Returns `true` if the connection that it shared with a link of the peer has broken.
    pub(in crate::tcp) fn has_parted(&self) -> bool {
        self.has_parted.load(Ordering::Acquire)
    }

    /// Goes the other way on a connection of the peer's link, which leads here, if it has none. Of
    /// two links that are dialling at once, that of the device with the higher key gives way.
    /// Returns `true` if it does.
    pub(in crate::tcp) fn join(
        &self,
        shared: &Shared,
        reader: u32,
        socket: &Arc<TcpStream>,
    ) -> bool {
        let mut sending = self.sending.lock();
        let joins = match &sending.line {
            Line::Over(_) | Line::Up(_) | Line::Joined(_) => false,
            Line::Pause(_) => true,
            Line::Dialling(_) => shared.address.key.0 > self.address.key.0,
        };
        if !joins {
            return false;
        }
        let words = self.hello(&mut sending, shared).join();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(socket, &words, flags) {
            Ok(sent) if sent == words.len() => {}
            // Only acknowledgements went that way, so there is room.
            Ok(1..) => {
                let _ = socket.shutdown(Shutdown::Both);
                return false;
            }
            _ => return false,
        }
        sending.waits_for_room = false;
        let socket = socket.clone();
        sending.line = Line::Joined(Joined { socket, reader, is_welcome: false });
        self.set_reader(Some(reader));
        self.has_parted.store(false, Ordering::Release);
        true
    }

    /// Returns the introduction of a peer's link that joins this link's connection, the connection,
    /// and what has come behind the introduction: the end of a link whose device has closed.
    pub(in crate::tcp) fn joins(&self) -> Option<(Hello, Arc<TcpStream>, Vec<u8>)> {
        let mut sending = self.sending.lock();
        let Line::Up(socket) = &sending.line else { return None };
        let socket = socket.clone();
        let hello = sending.joins.take()?;
        let behind = std::mem::take(&mut sending.ack).split_off(hello.join().len());
        Some((hello, socket, behind))
    }

    /// Sends a word about the peer's link on the connection that both share. Returns `false` if
    /// that is not this link's connection now.
    pub(in crate::tcp) fn note(&self, shared: &Shared, on: &Arc<TcpStream>, word: Frame) -> bool {
        let mut sending = self.sending.lock();
        let carries = sending.line.carries().is_some_and(|socket| Arc::ptr_eq(socket, on));
        if carries {
            sending.flow.push_note(word);
            self.flush(&mut sending, shared);
        }
        carries
    }

    /// Takes up what the peer says of this link on the connection that both share.
    pub(in crate::tcp) fn is_told(&self, shared: &Shared, on: &Arc<TcpStream>, told: Told) {
        let mut sending = self.sending.lock();
        if !sending.line.is(on) {
            return;
        }
        if let Some(Frame::Welcome { link, attempt, received }) = told.welcome
            && (link, attempt) == (self.number, sending.attempts)
        {
            self.welcome(&mut sending, shared, received);
        }
        if let Some(Frame::Ack { link, received }) = told.ack
            && link == self.number
            && sending.line.carries().is_some()
        {
            self.acknowledge(&mut sending, shared, received);
        }
    }

    fn welcome(&self, sending: &mut Sending, shared: &Shared, received: u64) {
        let Line::Joined(joined) = &mut sending.line else { return };
        if received == ENDED {
            let why = DownCause::Refused("the link has ended".into());
            return self.end(sending, shared, why);
        }
        joined.is_welcome = true;
        if self.goes_on(sending, shared, received) {
            self.flush(sending, shared);
        }
    }

    /// A connection has ended, as its reader has found.
    pub(in crate::tcp) fn hung_up(&self, shared: &Shared, on: &Arc<TcpStream>) {
        let mut sending = self.sending.lock();
        if sending.line.is(on) {
            self.broke(&mut sending, shared, "it has hung up");
        }
    }
}
