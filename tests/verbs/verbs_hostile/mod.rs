//! A peer that knows the secret and breaks the protocol over a simulated NIC of its own, and
//! processes at the TCP port that do not know it. Their own connection ends, with an error that
//! names their rank. Other ranks notice nothing, and nothing panics or hangs.

mod attacker;
mod handshakes;
mod messages;
