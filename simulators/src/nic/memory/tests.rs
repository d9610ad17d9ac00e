use super::*;
use std::os::fd::AsFd;

const ALL: Access = Access(15);
const HERE: Domain = Domain(1);

fn regions() -> Regions {
    Regions::new(&Limits { memory_regions: 10, on_demand: false, ..Limits::default() }, Vec::new())
}

#[test]
fn a_key_is_for_its_domain_range_and_purpose() {
    let regions = regions();
    let memory = [0_u8; 100];
    let addr = memory.as_ptr().expose_provenance();
    let key = regions.register(HERE, addr, 100, 0x1000, Access::REMOTE_READ).unwrap();
    let at = |addr, key| Remote { addr, key };
    let mut into = [1; 100];
    assert_eq!(regions.read(HERE, at(0x1000, key), Access::REMOTE_READ, &mut into), Ok(()));
    assert_eq!(into, [0; 100]);
    let refused = [
        regions.check(Domain(2), at(0x1000, key), 1, Access::REMOTE_READ),
        regions.check(HERE, at(0x1000, key ^ 1), 1, Access::REMOTE_READ),
        regions.check(HERE, at(0xfff, key), 1, Access::REMOTE_READ),
        regions.check(HERE, at(0x1001, key), 100, Access::REMOTE_READ),
        regions.check(HERE, at(u64::MAX, key), 2, Access::REMOTE_READ),
        regions.check(HERE, at(0x1000, key), 1, Access::REMOTE_WRITE),
    ];
    assert_eq!(refused, [Err(Unreachable::Key); 6]);
    assert!(regions.deregister(key) && !regions.deregister(key));
    assert_eq!(regions.check(HERE, at(0x1000, key), 1, Access::REMOTE_READ), Err(Unreachable::Key));
}

#[test]
fn what_is_not_there_cannot_be_registered() {
    let regions = regions();
    assert_eq!(regions.register(HERE, PAGE, 10, 0, ALL), Err(Errno::FAULT));
    assert_eq!(regions.register(HERE, 1 << 20, 0, 0, ALL), Err(Errno::INVAL));
    assert_eq!(regions.register(HERE, usize::MAX, 2, 0, ALL), Err(Errno::INVAL));
    let memory = [0_u8; 8];
    let addr = memory.as_ptr().expose_provenance();
    assert_eq!(regions.register(HERE, addr, 8, 0, Access::REMOTE_WRITE), Err(Errno::INVAL));
    assert_eq!(
        regions.register(HERE, addr, 8, 0, Access(ibv::IBV_ACCESS_ON_DEMAND)),
        Err(Errno::OPNOTSUPP)
    );
    let relaxed = Access(ibv::IBV_ACCESS_LOCAL_WRITE | ibv::IBV_ACCESS_RELAXED_ORDERING);
    assert!(regions.register(HERE, addr, 8, 0, relaxed).is_ok());
}

#[test]
fn what_is_locked_counts_until_it_is_deregistered_and_what_is_paged_on_demand_does_not() {
    let limits = Limits { locked: 10, ..Limits::default() };
    let regions = Regions::new(&limits, Vec::new());
    let memory = [0_u8; 8];
    let register =
        |access| regions.register(HERE, memory.as_ptr().expose_provenance(), 8, 0, access);
    let first = register(Access::NONE).unwrap();
    assert_eq!(register(Access::NONE), Err(Errno::NOMEM));
    assert!(register(Access::ON_DEMAND).is_ok_and(|key| regions.deregister(key)));
    assert!(regions.deregister(first) && register(Access::NONE).is_ok());
}

#[test]
fn memory_behind_a_descriptor_is_reached_by_its_own_mapping() {
    let regions = regions();
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 3 * PAGE as u64).unwrap();
    let (fd, offset) = (file.as_fd(), PAGE as u64 + 128);
    let key = regions.register_descriptor(HERE, fd, (offset, PAGE), 0x5080, ALL).unwrap();
    regions.write(HERE, Remote { addr: 0x5081, key }, Access::REMOTE_WRITE, b"there").unwrap();
    let mut found = [0; 5];
    rustix::io::pread(&file, &mut found, offset + 1).unwrap();
    assert_eq!(&found, b"there");
    let refused =
        |offset, len, iova| regions.register_descriptor(HERE, fd, (offset, len), iova, ALL);
    assert_eq!(refused(offset, PAGE, 0x5000), Err(Errno::INVAL), "offset and address disagree");
    assert_eq!(refused(0, 4 * PAGE, 0), Err(Errno::INVAL), "beyond the end");
}

#[test]
fn words_are_changed_in_place() {
    let regions = regions();
    let words = [AtomicU64::new(5), AtomicU64::new(0)];
    let addr = words.as_ptr().expose_provenance();
    let key = regions.register(HERE, addr, 16, 0, ALL).unwrap();
    assert_eq!(regions.change(HERE, Remote { addr: 0, key }, |old| old + 2), Ok(5));
    assert_eq!(words[0].load(Ordering::SeqCst), 7);
    assert_eq!(
        regions.change(HERE, Remote { addr: 4, key }, |old| old),
        Err(Unreachable::Alignment)
    );
    assert_eq!(regions.change(HERE, Remote { addr: 16, key }, |old| old), Err(Unreachable::Key));
}
