//! Greeting messages of the TCP bootstrap, from any process that connects.
#![no_main]

use carrack::bootstrap::tcp::JobKey;
use carrack::bootstrap::tcp::greeting::{
    CALL, CHALLENGE, Call, WELCOME, Welcome, check_beginning, read_answer, read_challenge, words,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let key = JobKey::of_secret(b"what nobody knows");
    let _ = (check_beginning(bytes), words(bytes));
    if let Some(challenge) = bytes.first_chunk::<CHALLENGE>() {
        let _ = read_challenge(challenge);
    }
    if let Some(call) = bytes.first_chunk::<CALL>() {
        assert!(Call::decode(call, &key, &[7; 16]).is_err(), "the secret is guessed");
    }
    if let Some(welcome) = bytes.first_chunk::<WELCOME>() {
        assert!(Welcome::decode(welcome, &key, &[7; 16]).is_err(), "the secret is guessed");
    }
    if let Some(first) = bytes.first() {
        let _ = read_answer(*first);
    }
});
