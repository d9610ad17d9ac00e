//! A peer that knows the secret and breaks the protocol over a simulated NIC of its own, and
//! strangers at the TCP port that do not know it. Their own connection ends, with an error that
//! names their rank. Other ranks notice nothing, and nothing panics or hangs.

mod support;

#[path = "verbs_hostile/attacker.rs"]
mod attacker;
#[path = "verbs_faults/ground.rs"]
#[allow(dead_code, reason = "shared with the suite of faults, which uses more of it")]
mod ground;
#[path = "verbs_hostile/messages.rs"]
mod messages;
#[path = "verbs_hostile/strangers.rs"]
mod strangers;
