//! A peer that never says anything costs a rank less than 100 bytes, in jobs of up to 4096 ranks.
//! `cargo bench --bench growth` draws the curve.

use crate::support::alone::is_alone;
use crate::support::growth::{SIZES, each, held, print};
use carrack::settings::TransportChoice;

#[test]
fn a_silent_peer_costs_less_than_a_hundred_bytes() {
    // What other tests allocate would be counted.
    if !is_alone(module_path!(), "a_silent_peer_costs_less_than_a_hundred_bytes") {
        return;
    }
    for (name, transport) in
        [("loopback", TransportChoice::Loopback), ("shm", TransportChoice::Shm)]
    {
        // What is allocated once for the whole process is not counted.
        held(transport, SIZES[0]);
        let rows = SIZES.map(|size| held(transport, size));
        print(name, &rows);
        assert!(each(&rows) < 100.0, "{name}: {rows:?}");
        // It can be told at all: a table of all ranks there is.
        assert!(each(&rows) >= 1.0, "{name}: nothing was measured: {rows:?}");
    }
}
