//! Names of numbers. They are the names of the constants, not libibverbs' own words.

use carrack_transports::verbs::sys::bindings::{ibv_event_type, ibv_port_state, ibv_wc_status};
use std::ffi::{CStr, c_char};

const STATUSES: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local queue pair operation error",
    c"local end-to-end context operation error",
    c"local protection error",
    c"work request flushed",
    c"memory window bind error",
    c"bad response",
    c"local access error",
    c"remote invalid request",
    c"remote access error",
    c"remote operation error",
    c"retries exceeded",
    c"receiver-not-ready retries exceeded",
    c"local reliable-datagram-domain violation",
    c"remote invalid read request",
    c"remote abort",
    c"invalid end-to-end context number",
    c"invalid end-to-end context state",
    c"fatal error",
    c"response timed out",
    c"general error",
    c"tag matching error",
    c"tag matching rendezvous incomplete",
];

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

pub(super) unsafe extern "C" fn wc_status_str(status: ibv_wc_status) -> *const c_char {
    word(&STATUSES, status)
}

pub(super) unsafe extern "C" fn event_type_str(event: ibv_event_type) -> *const c_char {
    word(&EVENTS, event)
}

pub(super) unsafe extern "C" fn port_state_str(state: ibv_port_state) -> *const c_char {
    word(&PORT_STATES, state)
}
