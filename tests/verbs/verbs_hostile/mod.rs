//! A peer that knows the secret and breaks the protocol over a simulated NIC of its own. Processes
//! at the TCP port do not know it. Their own connection ends, with an error that names their rank.
//! Other ranks notice nothing, and nothing panics or hangs.

mod attacker;
mod handshakes;
mod messages;
