//! A line of a PMI server.
#![no_main]

use carrack::bootstrap::pmi::Reply;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|line: &[u8]| {
    if let Ok(reply) = Reply::parse(line) {
        assert!(reply.get("cmd").is_some(), "an answer has a command");
        assert!(reply.is_success() || reply.get("rc").is_some_and(|rc| rc != "0"));
    }
});
