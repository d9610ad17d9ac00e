//! Unreliable datagrams: one packet each, complete as soon as they are on their way, and nobody knows whether they arrive.

use super::super::LinkLayer;
use super::super::address::PortAddress;
use super::super::engine::Outbox;
use super::super::receives::{gather, length, scatter};
use super::super::wire::{Body, Notice, Packet, QueueNumber, Sequence};
use super::attributes::AddressVector;
use super::requester::{Data, Operation, Work};
use super::{Inner, QueuePair, State};
use crate::verbs::sys::bindings::{self as ibv, ibv_wc_status};
use std::sync::Arc;

/// Bytes in front of what was sent: the route by which it came.
const HEADER: usize = 40;

/// The largest datagram: what the ports say of their MTU.
pub(in super::super) const MTU: u64 = 4096;

/// Where a datagram goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct Destination {
    pub(in super::super) port: PortAddress,
    pub(in super::super) vector: AddressVector,
    pub(in super::super) queue: QueueNumber,
    pub(in super::super) key: u32,
}

impl QueuePair {
    pub(super) fn send_datagrams(self: &Arc<Self>, inner: &mut Inner, out: &mut Outbox) {
        if inner.state != State::ReadyToSend || self.device.is_removed() {
            return;
        }
        if self.device.faults.holds_queue(self.device.index, self.number) {
            return out.hold();
        }
        while let Some(work) = inner.requester.take_first() {
            match self.send_datagram(inner, &work) {
                Ok(packet) => {
                    if self.device.port_at(packet.source.0).is_some_and(|port| port.is_up()) {
                        out.send(packet);
                    }
                    self.complete_send(&work, ibv::IBV_WC_SUCCESS, 0);
                }
                Err(status) => {
                    self.complete_send(&work, status, 0);
                    return self.enter_error(inner);
                }
            }
        }
    }

    fn send_datagram(&self, inner: &Inner, work: &Work) -> Result<Packet, ibv_wc_status> {
        let Operation::Datagram(to, notice) = work.operation else {
            return Err(ibv::IBV_WC_LOC_QP_OP_ERR);
        };
        if let Some(status) = self.device.faults.next_send() {
            return Err(status);
        }
        if work.len() > MTU {
            return Err(ibv::IBV_WC_LOC_LEN_ERR);
        }
        let payload = match &work.data {
            Data::Inline(bytes) => bytes.clone(),
            Data::Pieces(pieces) => {
                let len = usize::try_from(work.len()).map_err(|_| ibv::IBV_WC_LOC_LEN_ERR)?;
                gather(&self.device.regions, self.parts.domain, pieces, 0, len)
                    .map_err(|_| ibv::IBV_WC_LOC_PROT_ERR)?
            }
        };
        let local = self.device.port(inner.attributes.port).ok_or(ibv::IBV_WC_LOC_QP_OP_ERR)?;
        let gid = to.vector.global.map_or(NO_GID, |(_, index)| index);
        Ok(Packet {
            source: (local.address, self.number),
            target: (to.port, to.queue),
            sequence: Sequence::new(0),
            body: Body::Datagram { key: to.key, notice, gid },
            payload,
        })
    }

    /// A datagram has come. It is dropped without a word when it has the wrong key, or nobody waits for it.
    pub(super) fn take_datagram(
        self: &Arc<Self>,
        inner: &Inner,
        packet: &Packet,
        (key, notice, gid): (u32, Notice, u8),
    ) {
        let wanted = self.parts.kind == super::Kind::Datagram && inner.state.receives();
        let here = self.device.port(inner.attributes.port).map(|port| port.address) == Some(packet.target.0);
        if !wanted || !here || key != inner.attributes.key || self.device.is_removed() {
            return;
        }
        let Some(receive) = self.parts.receives.take() else { return };
        let planted = self.device.faults.next_receive();
        let mut bytes = route_header(packet, self.device.layer, gid);
        bytes.extend_from_slice(&packet.payload);
        let domain = self.parts.receives.domain;
        let status = if let Some(status) = planted {
            status
        } else if bytes.len() as u64 > length(&receive.pieces) {
            ibv::IBV_WC_LOC_LEN_ERR
        } else if scatter(&self.device.regions, domain, &receive.pieces, 0, &bytes).is_err() {
            ibv::IBV_WC_LOC_PROT_ERR
        } else {
            ibv::IBV_WC_SUCCESS
        };
        if status != ibv::IBV_WC_SUCCESS {
            return self.complete_receive(&receive, status);
        }
        let mut what = self.blank(receive.id, status);
        what.opcode = ibv::IBV_WC_RECV;
        what.byte_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        what.src_qp = packet.source.1.0;
        what.wc_flags = if gid == NO_GID { 0 } else { ibv::IBV_WC_GRH };
        what.slid = if self.device.layer == LinkLayer::InfiniBand { packet.source.0.lid() } else { 0 };
        if let Some(immediate) = notice.immediate {
            what.anon_1 = ibv::ibv_wc__bindgen_ty_1 { imm_data: immediate };
            what.wc_flags |= ibv::IBV_WC_WITH_IMM;
        }
        self.push_receive(what, notice.solicited);
    }
}

/// The entry of a table of GIDs that stands for none: a datagram within a subnet of LIDs.
const NO_GID: u8 = u8::MAX;

/// The 40 bytes in front: a global route header; for a RoCE v2 IPv4 address an IPv4 header in its second half. The rest is
/// not defined, and is poisoned here.
fn route_header(packet: &Packet, layer: LinkLayer, gid: u8) -> Vec<u8> {
    let mut header = vec![0xd5; HEADER];
    if gid == NO_GID {
        return header;
    }
    let of = |port: PortAddress| port.gids(layer).get(usize::from(gid)).map_or([0; 16], |(gid, _)| *gid);
    let (from, to) = (of(packet.source.0), of(packet.target.0));
    let put = |header: &mut [u8], at: usize, bytes: &[u8]| {
        header.iter_mut().skip(at).zip(bytes).for_each(|(slot, byte)| *slot = *byte);
    };
    if from.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]) {
        let total = u16::try_from(packet.payload.len() + 20 + 8 + 12 + 4).unwrap_or(u16::MAX).to_be_bytes();
        put(&mut header, 20, &[0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, 17, 0, 0]);
        put(&mut header, 32, &from[12..]);
        put(&mut header, 36, &to[12..]);
    } else {
        let len = u16::try_from(packet.payload.len()).unwrap_or(u16::MAX).to_be_bytes();
        put(&mut header, 0, &[0x60, 0, 0, 0, len[0], len[1], 0x1b, 64]);
        put(&mut header, 8, &from);
        put(&mut header, 24, &to);
    }
    header
}
