//! The table of known memory, over simulated GPUs.

#![expect(unsafe_code, reason = "GPU memory is handed over by address")]

use carrack_simulators::gpu::{FakeConfig, FakeDriver, FakeGpu};
use carrack_transports::gpu::{Driver, Flavour, Gpu};
use carrack_transports::mem::{
    KnownMemory, MR_DEVICE, MR_HOST, MR_UNKNOWN, MemHint, MemKind, RawError, Region,
};
use proptest::prelude::*;
use std::sync::Arc;

struct Rig {
    known: KnownMemory,
    fake: FakeDriver,
    drivers: Vec<Arc<dyn Driver>>,
}

impl Rig {
    fn of(extents: usize) -> Self {
        let fake = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        Self { known: KnownMemory::of(extents), drivers: vec![Arc::new(fake.clone())], fake }
    }

    fn gpu(&self) -> Arc<FakeGpu> {
        self.fake.gpu(0).unwrap()
    }

    fn raw(&self, addr: usize, len: usize, hint: MemHint) -> Result<Region, RawError> {
        // SAFETY: the tests do not access the memory.
        unsafe { self.known.region(addr as *mut u8, len, hint, &self.drivers) }
    }
}

fn is_one(one: &Region, other: &Region) -> bool {
    one.root().downgrade().is_of(other.root())
}

#[test]
fn regions_of_one_allocation_have_one_root_until_it_is_forgotten() {
    let rig = Rig::of(10);
    let owner = rig.gpu().allocate(1000, Flavour::Plain).unwrap();
    let first = rig.raw(owner.addr() + 1, 10, MR_UNKNOWN).unwrap();
    let second = rig.raw(owner.addr() + 500, 500, MR_DEVICE).unwrap();
    assert!(is_one(&first, &second) && !is_one(&first, &owner));
    assert_eq!((first.root().addr(), first.root().len()), (owner.addr(), 1000));
    assert!(matches!(
        rig.raw(owner.addr() + 1, 1000, MR_DEVICE),
        Err(RawError::Beyond { left: 999, .. })
    ));
    assert_eq!(rig.known.forget(owner.addr() + 1000, 10), 0, "behind it");
    assert_eq!(rig.known.len(), 1);
    assert_eq!(
        rig.known.forget(owner.addr() + 999, 1),
        1,
        "two regions of one allocation are left"
    );
    assert!(rig.known.is_empty());
    let third = rig.raw(owner.addr(), 10, MR_UNKNOWN).unwrap();
    assert!(!is_one(&first, &third));
    drop((first, second));
    assert_eq!(rig.known.forget(owner.addr(), 1000), 1);
    drop(third);
    assert_eq!(rig.known.forget(owner.addr(), 1000), 0);
}

#[test]
fn what_makes_room_is_asked_about_anew() {
    let rig = Rig::of(2);
    let owners: Vec<_> =
        (0..5).map(|_| rig.gpu().allocate(1000, Flavour::Plain).unwrap()).collect();
    for _ in 0..3 {
        for owner in &owners {
            assert_eq!(rig.raw(owner.addr() + 9, 9, MR_DEVICE).unwrap().id(), owner.id());
            assert!(rig.known.len() <= 2);
        }
    }
    // Regions that are used while their extent makes room are still counted.
    let held: Vec<_> =
        owners.iter().map(|owner| rig.raw(owner.addr(), 9, MR_UNKNOWN).unwrap()).collect();
    assert_eq!(rig.known.forget(0, usize::MAX), 5);
    drop(held);
    assert_eq!(rig.known.forget(0, usize::MAX), 0);
}

#[test]
fn an_address_that_was_a_gpus_is_the_hosts_when_a_caller_says_so() {
    let rig = Rig::of(10);
    let owner = rig.gpu().allocate(1000, Flavour::Plain).unwrap();
    let (addr, _kept) = (owner.addr(), rig.raw(owner.addr(), 1, MR_UNKNOWN).unwrap());
    drop(owner);
    for _ in 0..2 {
        let error = rig.raw(addr + 5, 1, MR_UNKNOWN).unwrap_err();
        assert!(
            error.to_string().contains("has been freed") && error.to_string().contains("MR_HOST"),
            "{error}"
        );
    }
    assert_eq!(rig.raw(addr + 5, 1, MR_HOST).unwrap().kind(), MemKind::Host);
    assert!(rig.known.is_empty());
    assert_eq!(
        rig.raw(addr + 5, 1, MR_UNKNOWN).unwrap().kind(),
        MemKind::Host,
        "as far as the drivers know"
    );
}

#[test]
fn memory_that_was_locked_is_the_hosts_again_without_a_word() {
    let rig = Rig::of(10);
    let memory = Region::host(1000);
    // SAFETY: the memory outlives the registration.
    let locked = unsafe { rig.gpu().register_host(memory.addr() as *mut u8, 1000) }.unwrap();
    let region = rig.raw(memory.addr() + 10, 10, MR_UNKNOWN).unwrap();
    assert_eq!((region.kind(), region.root().len()), (MemKind::Pinned, 10), "the rest is not lent");
    assert_eq!(
        rig.raw(memory.addr() + 10, 10, MR_HOST).unwrap().kind(),
        MemKind::Pinned,
        "it is known to be"
    );
    drop(locked);
    assert_eq!(rig.raw(memory.addr() + 10, 10, MR_UNKNOWN).unwrap().kind(), MemKind::Host);
    assert!(rig.known.is_empty());
}

#[test]
fn what_was_freed_is_released_when_the_table_is_looked_after() {
    let rig = Rig::of(100);
    let owners: Vec<_> =
        (0..30).map(|_| rig.gpu().allocate(1000, Flavour::Plain).unwrap()).collect();
    let roots: Vec<_> = owners
        .iter()
        .map(|owner| rig.raw(owner.addr(), 9, MR_UNKNOWN).unwrap().root().downgrade())
        .collect();
    (0..10).for_each(|_| rig.known.look_after());
    assert!(roots.iter().all(|root| !root.is_gone()), "it is there");
    let kept: Vec<_> = owners.into_iter().step_by(2).collect();
    (0..10).for_each(|_| rig.known.look_after());
    for (at, root) in roots.iter().enumerate() {
        assert_eq!(root.is_gone(), at % 2 == 1, "{at}");
    }
    assert!(kept.iter().all(|owner| rig.raw(owner.addr(), 9, MR_UNKNOWN).is_ok()));
}

#[test]
fn a_driver_that_is_gone_is_not_asked_and_its_memory_not_believed_in() {
    let mut rig = Rig::of(10);
    let owner = rig.gpu().allocate(1000, Flavour::Plain).unwrap();
    let region = rig.raw(owner.addr(), 10, MR_UNKNOWN).unwrap();
    rig.drivers = vec![Arc::new(rig.fake.clone())];
    assert_eq!(region.recheck(), Ok(()));
    let again = rig.raw(owner.addr(), 10, MR_UNKNOWN).unwrap();
    assert_eq!(again.id(), owner.id());
    assert!(!is_one(&again, &region), "the driver that is here now has said so");
    assert_eq!(rig.known.len(), 1);
}

#[test]
fn threads_that_give_and_free_the_same_memory_never_see_what_was_freed_before() {
    let rig = Rig::of(4);
    rig.fake.faults().reuse_addresses(true);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..300 {
                    let owner = rig.gpu().allocate(1000, Flavour::Plain).unwrap();
                    for hint in [MR_UNKNOWN, MR_UNKNOWN, MR_DEVICE] {
                        let region = rig.raw(owner.addr() + 7, 10, hint).unwrap();
                        assert_eq!((region.id(), region.root().id()), (owner.id(), owner.id()));
                    }
                    match round % 3 {
                        0 => drop(rig.known.forget(owner.addr(), 1000)),
                        1 => rig.known.look_after(),
                        _ => {}
                    }
                }
            });
        }
    });
}

#[derive(Debug, Clone)]
enum Step {
    Allocate,
    Free(usize),
    Give(usize, usize, usize),
    Forget(usize),
    LookAfter,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => Just(Step::Allocate),
        2 => (0_usize..6).prop_map(Step::Free),
        6 => (0_usize..6, 0_usize..1000, 0_usize..1001)
            .prop_map(|(which, at, len)| Step::Give(which, at, len)),
        1 => (0_usize..6).prop_map(Step::Forget),
        1 => Just(Step::LookAfter),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any sequence of look-ups, frees and allocations, a region is of the memory that the
    /// driver has there now.
    #[test]
    fn it_answers_as_the_driver_would_each_time(limit in 1_usize..5, steps in steps()) {
        let rig = Rig::of(limit);
        rig.fake.faults().reuse_addresses(true);
        let (mut owners, mut addrs): (Vec<Region>, Vec<usize>) = (Vec::new(), vec![4096]);
        for step in steps {
            match step {
                Step::Allocate => {
                    owners.push(rig.gpu().allocate(1000, Flavour::Plain).unwrap());
                    addrs.push(owners.last().unwrap().addr());
                }
                Step::Free(which) if which < owners.len() => drop(owners.swap_remove(which)),
                Step::Free(_) => {}
                Step::Give(which, at, len) => {
                    let addr = addrs[which % addrs.len()] + at;
                    let given = rig.raw(addr, len, MR_UNKNOWN);
                    let is_there = |base: usize| (base..base + 1000).contains(&addr);
                    match owners.iter().find(|owner| is_there(owner.addr())) {
                        Some(owner) if at + len <= 1000 => {
                            let given = given.unwrap();
                            let (root, id) = (given.root(), given.id());
                            prop_assert_eq!((given.addr(), given.len()), (addr, len));
                            prop_assert_eq!(id, owner.id());
                            prop_assert_eq!((root.addr(), root.len()), (owner.addr(), 1000));
                        }
                        Some(_) => {
                            let beyond = matches!(given, Err(RawError::Beyond { .. }));
                            prop_assert!(beyond, "{}+{}", addr, len);
                        }
                        None => match given {
                            Ok(given) => prop_assert_eq!(given.kind(), MemKind::Host),
                            Err(error) => {
                                prop_assert!(matches!(error, RawError::Freed(_)), "{}", error);
                            }
                        },
                    }
                }
                Step::Forget(which) => {
                    rig.known.forget(addrs[which % addrs.len()], 1000);
                }
                Step::LookAfter => rig.known.look_after(),
            }
            prop_assert!(rig.known.len() <= limit);
        }
    }
}
