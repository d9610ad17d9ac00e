//! Taking queue pairs through their states.

use super::{Node, all_access};
use carrack_transports::verbs::sys::bindings::*;
use carrack_transports::verbs::sys::{AccessFlags, QueuePair};

/// Attributes that the transition of a connected queue pair to RTR needs.
pub const TO_RTR: ibv_qp_attr_mask = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_DEST_QPN
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER;

/// Attributes of a connection.
#[derive(Clone, Copy)]
pub struct Options {
    pub depth: u32,
    pub inline: u32,
    pub timeout: u8,
    pub retries: u8,
    pub rnr_retries: u8,
    /// Permissions of peers.
    pub access: AccessFlags,
}

impl Default for Options {
    fn default() -> Self {
        Self { depth: 64, inline: 0, timeout: 14, retries: 6, rnr_retries: 7, access: all_access() }
    }
}

/// Connects both sides to each other.
pub fn connect(a: &Node, qa: &QueuePair, b: &Node, qb: &QueuePair, options: &Options) {
    bring_up(qa, &a.route_to(b), qb.number(), a.port.active_mtu, options);
    bring_up(qb, &b.route_to(a), qa.number(), b.port.active_mtu, options);
}

/// Takes a queue pair through all states up to RTS.
pub fn bring_up(qp: &QueuePair, route: &ibv_ah_attr, peer: u32, mtu: ibv_mtu, options: &Options) {
    initialize(qp, options);
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: mtu,
        dest_qp_num: peer,
        rq_psn: 100,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 12,
        ah_attr: *route,
        ..ibv_qp_attr::default()
    };
    qp.modify(&mut attr, TO_RTR).expect("RTR");
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: 100,
        timeout: options.timeout,
        retry_cnt: options.retries,
        rnr_retry: options.rnr_retries,
        max_rd_atomic: 16,
        ..ibv_qp_attr::default()
    };
    let start = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    let mask = IBV_QP_STATE | IBV_QP_SQ_PSN | start;
    qp.modify(&mut attr, mask).expect("RTS");
}

/// Takes a queue pair to INIT.
pub fn initialize(qp: &QueuePair, options: &Options) {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: 1,
        qp_access_flags: options.access.bits(),
        ..ibv_qp_attr::default()
    };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    qp.modify(&mut attr, mask).expect("INIT");
}

/// Takes a queue pair to a state that needs nothing else.
pub fn go_to(qp: &QueuePair, state: ibv_qp_state) {
    let mut attr = ibv_qp_attr { qp_state: state, ..ibv_qp_attr::default() };
    qp.modify(&mut attr, IBV_QP_STATE).expect("a state");
}
