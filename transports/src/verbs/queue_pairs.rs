//! Queue pairs of a port: their creation, and their transitions to the states in which they send
//! and receive.

use super::address::Fabric;
use super::options::VerbsOptions;
use super::sys::bindings::{
    IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS,
    IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_INIT,
    IBV_QPS_RTR, IBV_QPS_RTS, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_attr,
};
use super::sys::{
    CompletionQueue, ProtectionDomain, QueuePair, QueuePairSpec, SharedReceiveQueue, VerbsError,
};
use super::wire::QueuePairEnd;
use std::sync::Arc;

/// Inline bytes to ask for: most devices have room for them in a request of 256 bytes.
const INLINE: u32 = 220;

/// Retries without end, in the specification's code: the peer is alive, and has no receive posted.
const FOR_EVER: u8 = 7;

/// A port, and its attributes.
#[derive(Clone, Debug)]
pub(super) struct RdmaPort {
    pub(super) number: u8,
    pub(super) fabric: Fabric,
    pub(super) lid: u16,
    /// MTU in the specification's code.
    pub(super) mtu: u8,
    pub(super) gid: [u8; 16],
    pub(super) gid_index: u8,
    /// Network interface, on Ethernet.
    pub(super) interface: u32,
    /// Reads and atomic operations in flight for a queue pair, that the device answers, and that
    /// it requests.
    pub(super) reads: (u8, u8),
    /// Error if the device does no atomic operations on words of eight bytes.
    pub(super) atomics: Result<(), String>,
    /// Completions that a queue can hold, and receives.
    pub(super) most_completions: u32,
    pub(super) most_receives: u32,
    /// Queue pairs of the device, for an error text.
    pub(super) most_queue_pairs: u32,
    /// Requests that a queue pair can hold.
    pub(super) most_requests: u32,
}

/// Creates a reliable queue pair in the state INIT: it has a number, and receives nothing.
pub(super) fn create(
    domain: &Arc<ProtectionDomain>,
    (port, options): (&RdmaPort, &VerbsOptions),
    queue: &Arc<CompletionQueue>,
    receives: &Arc<SharedReceiveQueue>,
) -> Result<Arc<QueuePair>, VerbsError> {
    let mut inline = INLINE;
    let made = loop {
        let spec = QueuePairSpec {
            send_cq: queue,
            recv_cq: queue,
            srq: Some(receives),
            send_depth: options.send_depth,
            recv_depth: 0,
            send_sge: 2,
            recv_sge: 0,
            inline,
        };
        match QueuePair::create(domain, &spec) {
            // Devices do not report their inline limit: ask for less until it fits.
            Err(error) if error.errno == libc::EINVAL && inline > 0 => inline /= 2,
            other => break other?,
        }
    };
    let access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: port.number,
        qp_access_flags: access,
        ..Default::default()
    };
    made.modify(&mut attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)?;
    Ok(made)
}

/// Joins it to the peer's end: from then on it can receive and send.
pub(super) fn join(
    pair: &QueuePair,
    (port, options): (&RdmaPort, &VerbsOptions),
    mine: &QueuePairEnd,
    theirs: &QueuePairEnd,
) -> Result<(), VerbsError> {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: port.mtu.min(theirs.mtu).into(),
        dest_qp_num: theirs.queue_pair,
        rq_psn: theirs.first_psn,
        max_dest_rd_atomic: mine.reads,
        min_rnr_timer: options.rnr_timer,
        ah_attr: path(port, options, theirs),
        ..Default::default()
    };
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    pair.modify(&mut attr, mask)?;
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: mine.first_psn,
        timeout: options.timeout,
        retry_cnt: options.retries,
        rnr_retry: FOR_EVER,
        max_rd_atomic: port.reads.1.min(theirs.reads),
        ..Default::default()
    };
    let mask = IBV_QP_STATE
        | IBV_QP_SQ_PSN
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_MAX_QP_RD_ATOMIC;
    pair.modify(&mut attr, mask)
}

/// Returns the path to the peer's port.
fn path(port: &RdmaPort, options: &VerbsOptions, theirs: &QueuePairEnd) -> ibv_ah_attr {
    // Within an InfiniBand subnet the LID is enough; RoCE has only the GID.
    let is_global = port.fabric != Fabric::InfiniBand || port.gid[..8] != theirs.gid[..8];
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: theirs.gid },
            flow_label: 0,
            sgid_index: port.gid_index,
            hop_limit: options.hop_limit,
            traffic_class: options.traffic_class,
        },
        dlid: theirs.lid,
        sl: options.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: is_global.into(),
        port_num: port.number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(fabric: Fabric) -> RdmaPort {
        RdmaPort {
            number: 1,
            fabric,
            lid: 3,
            mtu: 5,
            gid: [1; 16],
            gid_index: 4,
            interface: 2,
            reads: (16, 16),
            atomics: Ok(()),
            most_completions: 100,
            most_receives: 100,
            most_queue_pairs: 100,
            most_requests: 100,
        }
    }

    #[test]
    fn the_path_is_the_lids_within_a_subnet_and_the_gids_else() {
        let options = VerbsOptions {
            traffic_class: 96,
            service_level: 3,
            hop_limit: 9,
            ..VerbsOptions::default()
        };
        let near = QueuePairEnd { gid: [1; 16], lid: 7, ..QueuePairEnd::default() };
        let far = QueuePairEnd { gid: [2; 16], lid: 7, ..QueuePairEnd::default() };
        let path_to = |fabric, end| path(&port(fabric), &options, end);
        assert_eq!(path_to(Fabric::InfiniBand, &near).is_global, 0);
        assert_eq!(path_to(Fabric::InfiniBand, &near).dlid, 7);
        assert_eq!(path_to(Fabric::InfiniBand, &far).is_global, 1);
        let roce = path_to(Fabric::Ethernet, &near);
        assert_eq!((roce.is_global, roce.sl, roce.grh.sgid_index), (1, 3, 4));
        assert_eq!((roce.grh.hop_limit, roce.grh.traffic_class), (9, 96));
    }
}
