use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_transports::gpu::{Flavour, Gpu};
use carrack_transports::mem::{Region, Together};

#[test]
fn memory_of_another_kind_than_the_first_pieces_is_never_copied_as_theirs() {
    let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
    let device = || driver.gpu(0).unwrap().allocate(100, Flavour::Plain).unwrap();
    let (one, other, host) = (device(), device(), Region::host(100));
    let mut together = Together::between(&one, &host, 4).unwrap();
    assert!(together.push((&one, 0), (&host, 0), 10) && together.push((&other, 0), (&host, 0), 10));
    // The CPU reads what is said to be the host's.
    assert!(
        !together.push((&one, 0), (&other, 0), 10) && !together.push((&host, 0), (&host, 0), 10)
    );
    assert!(together.between_parts((&one, 0..100), (&other, 0..100)).is_none());
    assert!(together.between_parts((&one, 0..100), (&host, 0..100)).is_some());
    assert_eq!(together.count(), 2);
}
