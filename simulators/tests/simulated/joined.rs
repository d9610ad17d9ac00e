use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_transports::gpu::{Flavour, Gpu};
use carrack_transports::mem::Region;
use std::any::Any;

const BLOCK: usize = 2 << 20;

fn two() -> (FakeDriver, Region, Region) {
    let driver = FakeDriver::new(FakeConfig::devices(2)).unwrap();
    let make = || driver.gpu(0).unwrap().allocate(BLOCK, Flavour::Shareable).unwrap();
    let (one, other) = (make(), make());
    assert_eq!(one.addr() + BLOCK, other.addr());
    (driver, one, other)
}

#[test]
fn a_kernel_that_is_given_more_than_one_allocation_reads_none_of_it() {
    let (driver, one, other) = two();
    let whole = Region::joined(vec![one, other]).unwrap().slice(BLOCK - 10, 20).unwrap();
    let stream = driver.gpu(0).unwrap().fake_stream().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let launched = stream.launch(move |kernel| {
        tell.send(kernel.read(&whole)).unwrap();
        Ok(())
    });
    launched.unwrap();
    assert!(told.recv().unwrap().is_err());
}

#[test]
fn neighbours_are_one_region_that_keeps_both_and_others_are_none() {
    let (driver, one, other) = two();
    let far = driver.gpu(1).unwrap().allocate(BLOCK, Flavour::Shareable).unwrap();
    assert!(Region::joined(vec![]).is_none());
    assert!(Region::joined(vec![other.clone(), one.clone()]).is_none());
    assert!(Region::joined(vec![one.clone(), far]).is_none());
    assert!(Region::joined(vec![Region::host(1)]).is_none());
    let whole = Region::joined(vec![one.clone(), other]).unwrap();
    assert!(whole.is_joined() && whole.subregion(1, 1).unwrap().is_joined() && !one.is_joined());
    let reached = |at, len| {
        let parts = whole.subregion(at, len).unwrap().joined_parts();
        parts.iter().map(|part| (part.addr() - whole.addr()) / BLOCK).collect::<Vec<_>>()
    };
    assert_eq!(
        (reached(0, BLOCK), reached(BLOCK - 1, 2), reached(BLOCK, 1)),
        (vec![0], vec![0, 1], vec![1])
    );
    assert!(one.joined_parts().is_empty());
    let bytes: Vec<u8> = (0..100_u8).collect();
    whole.slice(BLOCK - 33, 100).unwrap().write(&bytes).unwrap();
    assert_eq!(one.slice(BLOCK - 33, 33).unwrap().to_vec().unwrap(), bytes[..33]);
    let (part, frees) = (whole.subregion(BLOCK, 67).unwrap(), driver.counters().frees);
    drop((whole, one));
    assert_eq!(part.whole().to_vec().unwrap(), bytes[33..]);
    assert_eq!(driver.counters().frees, frees);
    drop(part);
    assert_eq!(driver.counters().frees, frees + 2);
}

#[test]
fn a_region_is_taken_by_its_only_handle_and_by_no_other() {
    type Keep = fn(&Region) -> Box<dyn Any>;
    let (driver, one, other) = two();
    assert!(!one.is_held_elsewhere());
    let keeps: [Keep; 3] = [
        |region| Box::new(region.clone()),
        |region| Box::new(region.subregion(5, 5).unwrap()),
        |region| Box::new(region.slice(5, 5).unwrap()),
    ];
    let mut one = one;
    for keep in keeps {
        let kept = keep(&one);
        assert!(one.is_held_elsewhere());
        one = one.into_sole().unwrap_err();
        drop(kept);
    }
    let weak = one.downgrade();
    let sole = one.into_sole().unwrap();
    assert!(weak.upgrade().is_none(), "it has no other holder any more");
    let again = sole.into_region();
    again.whole().write(&[3; BLOCK]).unwrap();
    let (frees, sole) = (driver.counters().frees, again.into_sole().unwrap());
    drop((sole, other));
    assert_eq!(driver.counters().frees, frees + 2);
}
