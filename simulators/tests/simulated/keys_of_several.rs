//! A key that names several allocations, and keys that were tampered with.

use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_transports::contract::{Domain, WireKey};
use carrack_transports::cuda_ipc::CudaIpc;
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::Region;
use std::sync::Arc;

const UNIT: usize = 2 << 20;

/// The key's layout: a mark, two numbers, and the keys of the parts, each behind its length.
#[derive(Clone)]
struct Several {
    mark: Vec<u8>,
    offset: u64,
    len: u64,
    keys: Vec<WireKey>,
}

impl Several {
    const MARK: usize = 4;

    fn decode(WireKey(key): &WireKey) -> Self {
        let (mark, rest) = key.split_at(Self::MARK);
        let (offset, rest) = rest.split_first_chunk().unwrap();
        let (len, mut rest) = rest.split_first_chunk().unwrap();
        let mut keys = Vec::new();
        while let Some((long, behind)) = rest.split_first_chunk() {
            let (one, behind) = behind.split_at(u16::from_le_bytes(*long).into());
            keys.push(WireKey(one.to_vec()));
            rest = behind;
        }
        let (offset, len) = (u64::from_le_bytes(*offset), u64::from_le_bytes(*len));
        Self { mark: mark.to_vec(), offset, len, keys }
    }

    fn encode(&self) -> WireKey {
        let mut bytes = self.mark.clone();
        bytes.extend([self.offset, self.len].map(u64::to_le_bytes).iter().flatten());
        for WireKey(key) in &self.keys {
            bytes.extend(u16::try_from(key.len()).unwrap().to_le_bytes());
            bytes.extend(key);
        }
        WireKey(bytes)
    }
}

#[test]
fn a_name_for_several_allocations_leads_to_all_of_them_or_to_nothing() {
    let driver = FakeDriver::new(FakeConfig::devices(2)).unwrap();
    let gpu = driver.gpu(0).unwrap();
    let domain = CudaIpc::new(vec![Arc::new(driver.clone())]);
    let reservation = gpu.reserve(3 * UNIT).unwrap();
    let piece =
        |at| driver.gpu(at % 2).unwrap().allocate_at(&reservation, at * UNIT, UNIT, &[]).unwrap();
    let parts: Vec<Region> = (0..3).map(piece).collect();
    let whole = Region::joined(parts.clone()).unwrap();
    let region = whole.subregion(UNIT - 5, UNIT + 10).unwrap();
    let exported = domain.export(&region).unwrap();
    let import = |key: &WireKey| domain.import(key, None);
    let own = import(&exported.key).unwrap();
    assert_eq!(
        own.region().map(|own| (own.addr(), own.len())),
        Some((region.addr(), region.len()))
    );
    // Names that were tampered with.
    let named = Several::decode(&exported.key);
    assert_eq!((named.keys.len(), named.offset), (3, (UNIT - 5) as u64));
    let changes: [fn(&mut Several); 7] = [
        |name| name.keys.clear(),
        |name| name.len = u64::MAX,
        |name| name.offset = u64::MAX,
        |name| name.offset += 2 * (UNIT as u64),
        |name| name.keys.swap(0, 1),
        |name| name.keys[1] = WireKey(vec![7; 30]),
        |name| name.keys[1].0[12] ^= 0x55,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut changed = named.clone();
        change(&mut changed);
        let why = import(&changed.encode()).map(drop);
        assert!(why.is_err(), "change {number}");
    }
    // A name within a name is none.
    let nested = Several { keys: vec![exported.key.clone()], ..named };
    assert!(import(&nested.encode()).is_err());
    let key = exported.key.clone();
    drop((own, exported));
    assert!(
        import(&key).is_err_and(|why| !why.to_string().is_empty())
            || import(&key).unwrap().region().is_none()
    );
    drop((region, whole, parts));
    assert!(import(&key).is_err());
}
