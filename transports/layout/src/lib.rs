//! Tests of the sizes, alignments and offsets of the structures that Carrack uses, against those of
//! two other crates: `rdma-sys` generates its own from the machine's headers, `ibverbs-sys` from
//! those of rdma-core 55.

#![cfg(test)]

use carrack_transports::verbs::sys::bindings as ours;

/// Structures that have grown at their ends since the oldest headers that `rdma-sys` may find
/// (rdma-core 44, Debian 12). The library never writes more of them than its caller has room for.
const GROWN: [&str; 1] = ["ibv_port_attr"];

/// Layout of a structure: its size, its alignment, and the offsets of its fields.
type Layout = Vec<(&'static str, usize)>;

macro_rules! layout {
    ($crate_:ident :: $name:ident { $($field:ident),* }) => {
        vec![
            ("its size", size_of::<$crate_::$name>()),
            ("its alignment", align_of::<$crate_::$name>()),
            $((stringify!($field), std::mem::offset_of!($crate_::$name, $field))),*
        ]
    };
}

/// Each structure's layouts, Carrack's first. Unions and structures without a name are checked by
/// the fields behind them.
macro_rules! both {
    ($theirs:ident: $($name:ident { $($field:ident),* })*) => {
        vec![$((
            stringify!($name),
            layout!(ours::$name { $($field),* }),
            layout!($theirs::$name { $($field),* }),
        )),*]
    };
}

macro_rules! structures {
    ($theirs:ident) => {
        both! {
            $theirs:
            ibv_gid { raw, global }
            ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
            ibv_device_attr {
                fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id,
                vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd,
                max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
                max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw,
                max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
                max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr,
                max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt
            }
            ibv_query_device_ex_input { comp_mask }
            ibv_odp_caps { general_caps, per_transport_caps }
            ibv_tso_caps { max_tso, supported_qpts }
            ibv_rss_caps {
                supported_qpts, max_rwq_indirection_tables, max_rwq_indirection_table_size,
                rx_hash_fields_mask, rx_hash_function
            }
            ibv_packet_pacing_caps { qp_rate_limit_min, qp_rate_limit_max, supported_qpts }
            ibv_tm_caps { max_rndv_hdr_size, max_num_tags, flags, max_ops, max_sge }
            ibv_cq_moderation_caps { max_cq_count, max_cq_period }
            ibv_pci_atomic_caps { fetch_add, swap, compare_swap }
            ibv_device_attr_ex {
                orig_attr, comp_mask, odp_caps, completion_timestamp_mask, hca_core_clock,
                device_cap_flags_ex, tso_caps, rss_caps, max_wq_type_rq, packet_pacing_caps,
                raw_packet_caps, tm_caps, cq_mod_caps, max_dm_size, pci_atomic_caps, xrc_odp_caps,
                phys_port_cnt_ex
            }
            ibv_port_attr {
                state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
                qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
                init_type_reply, active_width, active_speed, phys_state, link_layer, flags,
                port_cap_flags2
            }
            ibv_async_event { element, event_type }
            ibv_mw_bind_info { mr, addr, length, mw_access_flags }
            ibv_pd { context, handle }
            ibv_td_init_attr { comp_mask }
            ibv_td { context }
            ibv_mr { context, pd, addr, length, handle, lkey, rkey }
            ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
            ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
            ibv_srq_attr { max_wr, max_sge, srq_limit }
            ibv_srq_init_attr { srq_context, attr }
            ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
            ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
            ibv_qp_attr {
                qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
                qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
                en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
                port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit
            }
            ibv_sge { addr, length, lkey }
            ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr, qp_type }
            ibv_recv_wr { wr_id, next, sg_list, num_sge }
            ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed }
            ibv_qp {
                context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type,
                mutex, cond, events_completed
            }
            ibv_comp_channel { context, fd, refcnt }
            ibv_cq {
                context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
                async_events_completed
            }
            ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
            ibv_context_ops {
                _compat_query_device, _compat_query_port, _compat_alloc_pd, _compat_dealloc_pd,
                _compat_reg_mr, _compat_rereg_mr, _compat_dereg_mr, alloc_mw, bind_mw, dealloc_mw,
                _compat_create_cq, poll_cq, req_notify_cq, _compat_cq_event, _compat_resize_cq,
                _compat_destroy_cq, _compat_create_srq, _compat_modify_srq, _compat_query_srq,
                _compat_destroy_srq, post_srq_recv, _compat_create_qp, _compat_query_qp,
                _compat_modify_qp, _compat_destroy_qp, post_send, post_recv, _compat_create_ah,
                _compat_destroy_ah, _compat_attach_mcast, _compat_detach_mcast, _compat_async_event
            }
            ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
            ibv_parent_domain_init_attr { pd, td, comp_mask, alloc, free, pd_context }
        }
    };
}

/// Describes the differences between them.
fn differences(structures: Vec<(&str, Layout, Layout)>, grown: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, ours, theirs) in structures {
        for ((what, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
            let longer = what == "its size" && grown.contains(&name) && ours >= theirs;
            if ours != theirs && !longer {
                found.push(format!("{name}: {what} is {ours} here and {theirs} there"));
            }
        }
    }
    found
}

#[test]
fn our_structures_are_those_of_rdma_sys() {
    let mut all = structures!(rdma_sys);
    all.extend(both! {
        rdma_sys:
            ibv_wc {
                wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags, pkey_index,
                slid, sl, dlid_path_bits
            }
            verbs_context {
                query_port, advise_mr, alloc_null_mr, read_counters, attach_counters_point_flow,
                create_counters, destroy_counters, reg_dm_mr, alloc_dm, free_dm,
                modify_flow_action_esp, destroy_flow_action, create_flow_action_esp,
                modify_qp_rate_limit, alloc_parent_domain, dealloc_td, alloc_td, modify_cq,
                post_srq_ops, destroy_rwq_ind_table, create_rwq_ind_table, destroy_wq, modify_wq,
                create_wq, query_rt_values, create_cq_ex, priv_, query_device_ex, ibv_destroy_flow,
                ABI_placeholder2, ibv_create_flow, ABI_placeholder1, open_qp, create_qp_ex,
                get_srq_num, create_srq_ex, open_xrcd, close_xrcd, sz, context
            }
    });
    assert!(all.len() > 35, "only {} structures are compared", all.len());
    assert_eq!(differences(all, &GROWN), [""; 0]);
}

#[test]
fn our_structures_are_those_of_ibverbs_sys() {
    let all = structures!(ibverbs_sys);
    assert_eq!(differences(all, &[]), [""; 0]);
    // It keeps some fields of this one private.
    let public = both! {
        ibverbs_sys: ibv_wc { qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits }
    };
    assert_eq!(differences(public, &[]), [""; 0]);
}

#[test]
fn a_difference_is_found_and_named() {
    let (here, there) = (vec![("its size", 8), ("a", 0)], vec![("its size", 4), ("a", 4)]);
    let found = differences(vec![("one", here.clone(), there.clone())], &["one"]);
    assert_eq!(found, ["one: a is 0 here and 4 there"]);
    assert_eq!(differences(vec![("one", here, there)], &[]).len(), 2);
}

#[test]
fn numbers_are_those_of_both_crates() {
    for (ours, theirs, other) in [
        (
            ours::IBV_WC_RETRY_EXC_ERR,
            rdma_sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
            ibverbs_sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
        ),
        (
            ours::IBV_WC_RECV,
            rdma_sys::ibv_wc_opcode::IBV_WC_RECV,
            ibverbs_sys::ibv_wc_opcode::IBV_WC_RECV,
        ),
        (
            ours::IBV_WR_RDMA_READ,
            rdma_sys::ibv_wr_opcode::IBV_WR_RDMA_READ,
            ibverbs_sys::ibv_wr_opcode::IBV_WR_RDMA_READ,
        ),
        (ours::IBV_QPT_RC, rdma_sys::ibv_qp_type::IBV_QPT_RC, ibverbs_sys::ibv_qp_type::IBV_QPT_RC),
        (
            ours::IBV_QPS_ERR,
            rdma_sys::ibv_qp_state::IBV_QPS_ERR,
            ibverbs_sys::ibv_qp_state::IBV_QPS_ERR,
        ),
        (
            ours::IBV_PORT_ACTIVE,
            rdma_sys::ibv_port_state::IBV_PORT_ACTIVE,
            ibverbs_sys::ibv_port_state::IBV_PORT_ACTIVE,
        ),
        (
            ours::IBV_ACCESS_RELAXED_ORDERING,
            rdma_sys::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0,
            ibverbs_sys::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0,
        ),
        (
            ours::IBV_QP_MAX_DEST_RD_ATOMIC,
            rdma_sys::ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0,
            ibverbs_sys::ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0,
        ),
    ] {
        assert_eq!((ours, ours), (theirs, other));
    }
}

/// The functions that the two features add exist; calling them takes a device.
#[test]
fn objects_of_both_crates_can_be_handed_in() {
    use carrack_transports::verbs::sys::{Context, ProtectionDomain};
    let _ = (Context::from_rdma_sys, ProtectionDomain::from_rdma_sys);
    let _ = (Context::from_ibverbs, ProtectionDomain::from_ibverbs);
}
