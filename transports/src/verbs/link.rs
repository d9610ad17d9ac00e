//! The link to a peer, which the runtime holds.

use super::chunks::ShownChunks;
use super::connection::Connection;
use super::device::RdmaDevice;
use super::domain::DomainShared;
use super::rails::{Rail, Ways};
use super::transfers::{self, Direction, PlaceKey};
use crate::contract::{
    BufferChunk, DownCause, Exposed, ExposedChunks, Header, Link, Op, OpToken, RemotePlace, Short,
    Submit, SubmitError, WordChange,
};
use crate::mem::{Buffer, MemRef};
use std::sync::{Arc, Weak};

/// A link to one peer's device.
pub(super) struct RdmaLink {
    pub(super) connection: Arc<Connection>,
    pub(super) device: Weak<RdmaDevice>,
    pub(super) shared: Arc<DomainShared>,
    /// Ways over further NICs.
    pub(super) ways: Ways,
}

impl Link for RdmaLink {
    #[inline]
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError> {
        match op {
            Op::AmCopied { header, bytes } => self.copied(header, bytes),
            Op::AmOwned { header, buffer, .. } => self.copied(header, buffer.view()),
            Op::Put { to, buffer, token } => self.transfer((Direction::Put, to), (buffer, token)),
            Op::Get { from, buffer, token } => {
                self.transfer((Direction::Get, from), (buffer, token))
            }
            Op::Atomic { word, change, token } => self.atomic((word, change), token),
        }
    }

    #[inline]
    fn am_short(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        if bytes.len() > self.connection.packet_size() {
            return Short::Ask;
        }
        answer(self.connection.send(Header(header.into()), MemRef::host(bytes)))
    }

    fn am_more(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        if bytes.len() > self.connection.packet_size() {
            return Short::Ask;
        }
        answer(self.connection.send_with_more(Header(header.into()), MemRef::host(bytes)))
    }

    fn expose(&self, buffer: Buffer) -> Result<Box<dyn Exposed>, (String, Buffer)> {
        transfers::expose(&self.shared.registrations, buffer)
    }

    fn expose_chunks(&self, buffer: Buffer) -> Result<Box<dyn ExposedChunks>, (String, Buffer)> {
        let device = self.device.upgrade().filter(|_| self.ways.len() > 0);
        let further = device.iter().flat_map(|device| {
            let way = |number| self.ways.get(number, &device.rails, self.connection.peer);
            (1..=self.ways.len()).filter_map(move |number| Some(Rail::of(number, way(number)?)))
        });
        ShownChunks::of(std::iter::once(Rail::of(0, self)).chain(further).collect(), buffer)
    }

    fn put_chunk(
        &self,
        to: RemotePlace,
        chunk: &BufferChunk,
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        let rail = PlaceKey::decode(to.key).map_or(0, |key| usize::from(key.rail));
        if rail == 0 {
            return self.connection.put_chunk(to, (chunk, token), &self.shared.registrations);
        }
        match self.device.upgrade() {
            Some(device) => {
                device.put_by_rail((&self.ways, rail, &self.connection), to, (chunk, token))
            }
            None => Err(SubmitError::Down { peer: self.connection.peer, cause: DownCause::Closed }),
        }
    }

    fn puts_in_order(&self, to: RemotePlace) -> bool {
        PlaceKey::decode(to.key).is_none_or(|key| key.rail == 0)
    }

    fn nics(&self) -> usize {
        1 + self.ways.len()
    }

    fn is_up(&self) -> bool {
        self.connection.is_up()
    }
}

impl RdmaLink {
    #[cold]
    fn transfer(
        &self,
        way: (Direction, RemotePlace),
        what: (&mut Buffer, OpToken),
    ) -> Result<Submit, SubmitError> {
        self.connection.transfer(way, what, &self.shared.registrations)
    }

    #[cold]
    fn atomic(
        &self,
        what: (RemotePlace, WordChange),
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        match &self.shared.port.atomics {
            Ok(()) => self.connection.atomic(what, token),
            Err(why) => {
                Err(SubmitError::Unregistered(format!("{}: {why}", self.shared.context.name())))
            }
        }
    }

    #[inline]
    fn copied(&self, header: Header, bytes: MemRef<'_>) -> Result<Submit, SubmitError> {
        if !bytes.place().is_host() {
            return Err(SubmitError::Kind(bytes.place().kind()));
        }
        let max = self.connection.packet_size();
        if bytes.len() > max {
            return Err(SubmitError::TooLong { len: bytes.len(), max });
        }
        self.connection.send(header, bytes)
    }
}

#[inline(always)]
fn answer(sent: Result<Submit, SubmitError>) -> Short {
    match sent {
        Ok(Submit::Done) => Short::Done,
        Ok(Submit::Busy(busy)) => Short::Busy(busy),
        _ => Short::Ask,
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        self.connection.lose_link();
        if let Some(device) = self.device.upgrade() {
            device.link_has_gone();
        }
    }
}
