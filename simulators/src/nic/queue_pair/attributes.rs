//! Attributes of a queue pair, set by `ibv_modify_qp`.

use super::super::LinkLayer;
use super::super::address::PortAddress;
use super::super::device::NicDevice;
use super::super::memory::Access;
use super::super::wire::{QueueNumber, Sequence};
use carrack_transports::verbs::sys::bindings::{self as ibv, ibv_qp_attr};
use rustix::io::Errno;
use std::time::Duration;

/// Path to a target, as in an `ibv_ah_attr`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct AddressVector {
    /// GID of the target, and the index of the sender's in its port's table.
    pub(in super::super) global: Option<([u8; 16], u8)>,
    pub(in super::super) lid: u16,
    pub(in super::super) port: u8,
}

impl AddressVector {
    /// Returns the sender's port and the target's.
    ///
    /// # Errors
    /// EINVAL: no such port or GID, or one that cannot be on the network, or no GID on a network
    /// without LIDs.
    pub(in super::super) fn route(
        &self,
        device: &NicDevice,
    ) -> Result<(PortAddress, PortAddress), Errno> {
        let port = device.port(self.port).ok_or(Errno::INVAL)?;
        let to = match (self.global, device.layer) {
            (Some((gid, index)), _) => {
                let gids = port.address.gids(device.layer);
                gids.get(usize::from(index)).ok_or(Errno::INVAL)?;
                PortAddress::from_gid(&gid)
            }
            (None, LinkLayer::InfiniBand) => PortAddress::from_lid(self.lid),
            (None, LinkLayer::Ethernet) => None,
        };
        Ok((port.address, to.ok_or(Errno::INVAL)?))
    }
}

/// Present attributes of a queue pair.
#[derive(Clone, Debug)]
pub(in super::super) struct Attributes {
    pub(in super::super) port: u8,
    pub(in super::super) key: u32,
    pub(in super::super) access: Access,
    /// Port of this end, and of the other.
    pub(in super::super) route: Option<(PortAddress, PortAddress)>,
    pub(in super::super) vector: Option<AddressVector>,
    pub(in super::super) peer: QueueNumber,
    pub(in super::super) path_mtu: u32,
    pub(in super::super) first_received: Sequence,
    pub(in super::super) first_sent: Sequence,
    pub(in super::super) rq_psn: u32,
    pub(in super::super) sq_psn: u32,
    pub(in super::super) min_rnr_timer: u8,
    pub(in super::super) timeout: u8,
    pub(in super::super) retries: u8,
    pub(in super::super) rnr_retries: u8,
    /// Maximum reads and atomic operations in flight, of this end and of the other.
    pub(in super::super) reads: u8,
    pub(in super::super) peer_reads: u8,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            port: 0,
            key: 0,
            access: Access::NONE,
            route: None,
            vector: None,
            peer: QueueNumber(0),
            path_mtu: 0,
            first_received: Sequence::new(0),
            first_sent: Sequence::new(0),
            rq_psn: 0,
            sq_psn: 0,
            min_rnr_timer: 0,
            timeout: 0,
            retries: 0,
            rnr_retries: 0,
            reads: 0,
            peer_reads: 0,
        }
    }
}

impl Attributes {
    /// Returns a copy, changed as the mask says.
    ///
    /// # Errors
    /// EINVAL: an impossible value.
    pub(super) fn with(
        &self,
        attr: &ibv_qp_attr,
        mask: u32,
        vector: Option<AddressVector>,
        device: &NicDevice,
    ) -> Result<Self, Errno> {
        let mut new = self.clone();
        let has = |bit| mask & bit != 0;
        let up_to = |value: u8, most: u8| if value <= most { Ok(value) } else { Err(Errno::INVAL) };
        if has(ibv::IBV_QP_PORT) {
            device.port(attr.port_num).ok_or(Errno::INVAL)?;
            new.port = attr.port_num;
        }
        if has(ibv::IBV_QP_PKEY_INDEX) && attr.pkey_index != 0 {
            return Err(Errno::INVAL);
        }
        if has(ibv::IBV_QP_QKEY) {
            new.key = attr.qkey;
        }
        if has(ibv::IBV_QP_ACCESS_FLAGS) {
            new.access = Access(attr.qp_access_flags);
        }
        if has(ibv::IBV_QP_AV) {
            let vector = vector.ok_or(Errno::INVAL)?;
            new.route = Some(vector.route(device)?);
            new.vector = Some(vector);
        }
        if has(ibv::IBV_QP_PATH_MTU) {
            new.path_mtu = attr.path_mtu;
            if !(ibv::IBV_MTU_256..=ibv::IBV_MTU_4096).contains(&attr.path_mtu) {
                return Err(Errno::INVAL);
            }
        }
        if has(ibv::IBV_QP_DEST_QPN) {
            new.peer = QueueNumber(attr.dest_qp_num & 0xff_ffff);
        }
        if has(ibv::IBV_QP_RQ_PSN) {
            (new.first_received, new.rq_psn) = (Sequence::new(attr.rq_psn), attr.rq_psn);
        }
        if has(ibv::IBV_QP_SQ_PSN) {
            (new.first_sent, new.sq_psn) = (Sequence::new(attr.sq_psn), attr.sq_psn);
        }
        if has(ibv::IBV_QP_MIN_RNR_TIMER) {
            new.min_rnr_timer = up_to(attr.min_rnr_timer, 31)?;
        }
        if has(ibv::IBV_QP_TIMEOUT) {
            new.timeout = up_to(attr.timeout, 31)?;
        }
        if has(ibv::IBV_QP_RETRY_CNT) {
            new.retries = up_to(attr.retry_cnt, 7)?;
        }
        if has(ibv::IBV_QP_RNR_RETRY) {
            new.rnr_retries = up_to(attr.rnr_retry, 7)?;
        }
        if has(ibv::IBV_QP_MAX_QP_RD_ATOMIC) {
            new.reads = up_to(attr.max_rd_atomic, device.limits.reads)?;
        }
        if has(ibv::IBV_QP_MAX_DEST_RD_ATOMIC) {
            new.peer_reads = up_to(attr.max_dest_rd_atomic, device.limits.reads)?;
        }
        Ok(new)
    }

    /// Returns the time for which a request may be unanswered before it is sent again; `None`: no
    /// limit.
    pub(super) fn patience(&self) -> Option<Duration> {
        (self.timeout != 0).then(|| Duration::from_nanos(4096_u64 << self.timeout))
    }
}

/// Returns the time for which a requester waits when the responder has posted no receive: the
/// specification's table 45, in units of 10 µs.
pub(super) fn rnr_delay(timer: u8) -> Duration {
    const TENS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * u64::from(TENS[usize::from(timer & 31)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_those_of_the_specification() {
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(12), Duration::from_micros(640));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
        let attributes = Attributes { timeout: 14, ..Attributes::default() };
        assert_eq!(attributes.patience(), Some(Duration::from_nanos(67_108_864)));
        assert_eq!(Attributes::default().patience(), None);
    }
}
