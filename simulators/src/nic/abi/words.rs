//! Names of numbers. They are the names of the constants, not libibverbs' own words.

use carrack_transports::verbs::sys::bindings::{ibv_event_type, ibv_port_state};
use std::ffi::{CStr, c_char};

const EVENTS: [&CStr; 20] = [
    c"completion queue error",
    c"queue pair: fatal",
    c"queue pair: invalid request",
    c"queue pair: access error",
    c"connection established",
    c"send queue drained",
    c"path migrated",
    c"path migration failed",
    c"device: fatal",
    c"port active",
    c"port down",
    c"LID changed",
    c"table of partition keys changed",
    c"subnet manager changed",
    c"shared receive queue error",
    c"shared receive queue below its limit",
    c"last receive of a queue pair taken",
    c"client to be registered again",
    c"table of GIDs changed",
    c"work queue: fatal",
];

const PORT_STATES: [&CStr; 6] =
    [c"no change", c"down", c"initializing", c"armed", c"active", c"active, deferred"];

fn word(words: &[&'static CStr], number: u32) -> *const c_char {
    words.get(number as usize).copied().unwrap_or(c"unknown").as_ptr()
}

pub(super) unsafe extern "C" fn event_type_str(event: ibv_event_type) -> *const c_char {
    word(&EVENTS, event)
}

pub(super) unsafe extern "C" fn port_state_str(state: ibv_port_state) -> *const c_char {
    word(&PORT_STATES, state)
}
