//! The address that a peer has published in the bootstrap's table.
#![no_main]

use carrack::bootstrap::{Bootstrap, InProcess};
use carrack::{Rank, Runtime, settings::Settings};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|address: &[u8]| {
    let Ok(job) = InProcess::job(2) else { return };
    let Ok([mine, theirs]) = <[InProcess; 2]>::try_from(job) else { return };
    if theirs.put("device/1/0", address).is_err() {
        return;
    }
    let started =
        Runtime::builder().settings(Settings::defaults()).bootstrap(Box::new(mine)).start();
    let Ok(runtime) = started else { return };
    let name = carrack::RemoteComp(1);
    for _ in 0..3 {
        let posted = runtime.post_am(Rank(1), &[7; 8], name).try_submit();
        let _ = posted.map_err(|error| error.to_string());
        let _ = runtime.progress();
    }
    let _ = runtime.explain(std::time::Duration::ZERO);
});
