//! Remote keys of another rank, and operations with them.
#![no_main]

use carrack::settings::{Settings, TransportChoice};
use carrack::{Rank, RemoteKey, Runtime};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

/// Returns two ranks, which the first call starts. The second rank sends nothing by itself.
fn ranks() -> Option<&'static Vec<Runtime>> {
    static RANKS: OnceLock<Option<Vec<Runtime>>> = OnceLock::new();
    let start = || {
        let settings = Settings::builder().transports([TransportChoice::Loopback]);
        Runtime::in_process_with(2, &settings.build_from_vars([("", ""); 0]).ok()?).ok()
    };
    RANKS.get_or_init(start).as_ref()
}

fuzz_target!(|input: (&[u8], u64, u64)| {
    let (bytes, offset, len) = input;
    let Ok(rmr) = RemoteKey::from_bytes(bytes) else { return };
    let again = RemoteKey::from_bytes(&rmr.to_bytes());
    assert_eq!(
        again.map(|again| (again.owner(), again.len(), format!("{again:?}"))),
        Ok((rmr.owner(), rmr.len(), format!("{rmr:?}")))
    );
    if let Some(part) = rmr.slice(offset, len) {
        assert!(part.len() == len && offset.checked_add(len).is_some_and(|end| end <= rmr.len()));
    }
    let Some([zero, _]) = ranks().map(Vec::as_slice) else { return };
    // What can be done at once is copied or refused; what its owner would have to do is none of
    // this target's business.
    let rank = Rank(rmr.owner().0 % 2);
    for bytes in [&[][..], &[1; 100]] {
        let mut put = zero.post_put(rank, bytes, &rmr, offset);
        if rmr.owner() != rank
            || offset.checked_add(bytes.len() as u64).is_none_or(|end| end > rmr.len())
        {
            assert!(put.try_submit().is_err());
        }
    }
});
