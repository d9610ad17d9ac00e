//! The key by which a region of shared memory is mapped, as another rank has sent it.
#![no_main]

use arbitrary::Arbitrary;
use carrack_transports::contract::{Domain, Exported, Identity, PeerId, Transport, WireKey};
use carrack_transports::mem::Region;
use carrack_transports::shm::{Geometry, Shm};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};

const LEN: usize = 5000;
/// In a key: the process. Another one's descriptors are left alone here.
const PROCESS: usize = 1;

struct Fixture {
    domain: Arc<dyn Domain>,
    region: Region,
    exported: Exported,
}

fn fixture() -> Option<&'static Fixture> {
    static FIXTURE: OnceLock<Option<Fixture>> = OnceLock::new();
    let make = || {
        let shm = Shm::new(Geometry { slots: 8, chunks: 1, chunk_size: 4096 });
        let identity = Identity { me: PeerId(0), ranks: 1, secret: [0; 16] };
        let domain = shm.open(&shm.devices().ok()?.remove(0), identity).ok()?;
        let region = Region::shared(LEN).ok()?;
        let exported = domain.export(&region).ok()?;
        Some(Fixture { domain, region, exported })
    };
    FIXTURE.get_or_init(make).as_ref()
}

#[derive(Arbitrary, Debug)]
enum Key {
    /// The right key with some words changed.
    Near(Vec<(u8, u64)>),
    /// Bytes of any length, and no process.
    Any(Vec<u8>),
}

fuzz_target!(|key: Key| {
    let Some(Fixture { domain, region, exported }) = fixture() else { return };
    let mut bytes = exported.key.0.clone();
    match key {
        Key::Near(changes) => {
            let count = bytes.len() / 8;
            for (at, word) in changes {
                let at = usize::from(at) % count;
                if at != PROCESS {
                    bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
                }
            }
        }
        Key::Any(mut any) => {
            any.iter_mut().skip(8 * PROCESS).take(8).for_each(|byte| *byte = 0xff);
            bytes = any;
        }
    }
    let Ok(imported) = domain.import(&WireKey(bytes.clone()), None) else { return };
    let Some(mapped) = imported.region() else { return };
    assert_eq!(bytes, exported.key.0, "another key leads to the region");
    assert!(mapped.len() == LEN && region.whole().write(&[7; LEN]).is_ok());
    assert_eq!(mapped.whole().to_vec().ok(), Some(vec![7; LEN]));
});
