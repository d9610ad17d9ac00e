//! Attributes of devices, and memory that is registered with them.

use crate::verbs::*;
use carrack_transports::verbs::sys::AccessFlags;
use carrack_transports::verbs::sys::bindings as ibv;

#[test]
fn a_device_tells_what_it_can_do() {
    let bench = Bench::chosen();
    let attr = bench.a.context.device_attr().unwrap();
    assert!(
        attr.max_qp > 0
            && attr.max_qp_wr > 0
            && attr.max_sge > 0
            && attr.max_cqe > 0
            && attr.max_mr > 0
    );
    assert!(attr.max_qp_rd_atom > 0 && attr.phys_port_cnt >= 1);
    let port = bench.a.port;
    assert_eq!(port.state, ibv::IBV_PORT_ACTIVE);
    assert!(port.max_msg_sz >= 1 << 20 && port.gid_tbl_len > 0);
    assert!(bench.a.context.port_attr(200).is_err());
    assert_ne!(bench.a.gid.gid, bench.b.gid.gid);
}

#[test]
fn a_large_region_is_registered_and_used_to_its_end() {
    let bench = Bench::chosen();
    let len = 64 << 20;
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(len));
    let (qa, _qb) = bench.connect(&Options::default());
    let sent = a.fill(6);
    Request::write(&[a.whole()], b.remote(len - 64)).post(&qa);
    bench.a.success();
    assert_eq!(b.read(len - 64..len), sent);
}

#[test]
fn memory_may_be_registered_for_relaxed_ordering() {
    let bench = Bench::chosen();
    drop(Buffer::new(&bench.a.domain, 8192, all_access() | AccessFlags::RELAXED_ORDERING));
}

#[test]
fn memory_that_is_not_there_is_not_registered() {
    let bench = Bench::chosen();
    assert!(nowhere(&bench.a.domain).is_err());
}
