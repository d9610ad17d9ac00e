//! Pools over host memory.

use super::*;
use crate::mem::HostAllocator;

fn pool(limit: usize) -> PacketPool {
    PacketPool::new(Arc::new(HostAllocator), 100, limit)
}

#[test]
fn miri_packets_are_distinct_and_come_back() {
    let pool = pool(20);
    assert_eq!(pool.allocated(), 0, "nothing is allocated before the first packet");
    let mut packets: Vec<Packet> = std::iter::from_fn(|| pool.take_with_len(100)).collect();
    assert_eq!(packets.len(), 32, "a limit is rounded up to whole slabs");
    for (at, packet) in packets.iter_mut().enumerate() {
        packet.as_mut_slice().unwrap().fill(at as u8);
    }
    for (at, packet) in packets.iter().enumerate() {
        assert!(packet.as_slice().unwrap().iter().all(|&byte| byte == at as u8));
    }
    drop(packets);
    assert!(pool.take().is_some());
    assert_eq!(pool.allocated(), 32);
}

#[test]
fn miri_a_packet_outlives_the_handle_of_its_pool() {
    let packet = pool(1).take_with_len(64).unwrap();
    assert_eq!(packet.as_slice().unwrap(), [0; 64]);
}

#[test]
fn a_message_longer_than_a_packet_gets_none() {
    assert!(pool(1).take_with_len(129).is_none());
    assert!(pool(1).take_with_len(128).is_some(), "100 is rounded up to whole cache lines");
}
