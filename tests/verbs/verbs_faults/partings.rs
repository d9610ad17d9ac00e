//! Queue pairs that fail while they are taking a message in.

use crate::support::Watchdog;
use crate::support::nics::{Fixture, options};
use carrack_simulators::nic::{Config, Limits};
use carrack_transports::verbs::VerbsOptions;

/// Number of receives: small, so that a lost one is missed.
const RECEIVES: u32 = 8;

fn few() -> VerbsOptions {
    VerbsOptions { receives: RECEIVES, ..options() }
}

#[test]
fn the_receive_of_a_message_that_is_broken_off_is_not_lost() {
    let _watchdog = Watchdog::over("half a message");
    let mut fixture = Fixture::with(&Config::default(), &few());
    for _ in 0..2 * RECEIVES {
        let held = [0, 1].map(|side| fixture.sides[side].faults().hold_last_receives());
        fixture.end_in_silence(0, 1);
        drop(held);
        fixture.connect_again(0, 1);
        fixture.all_go_on(5);
    }
}

#[test]
fn a_nic_that_never_tells_of_the_last_receive_holds_up_nothing() {
    let _watchdog = Watchdog::over("silent ends");
    let limits = Limits { queue_pairs: 3, ..Limits::default() };
    let mut fixture = Fixture::with(&Config { limits, ..Config::default() }, &few());
    for side in &fixture.sides {
        side.faults().leave_out_last_receives(true);
    }
    for _ in 0..2 * RECEIVES {
        fixture.end_in_order(0, 1);
        fixture.connect_again(0, 1);
        fixture.all_go_on(5);
    }
    fixture.close_and_expect_everything(0);
}

#[test]
fn a_device_closes_while_receives_of_broken_messages_are_out() {
    let _watchdog = Watchdog::over("closed over half a message");
    let mut fixture = Fixture::with(&Config::default(), &few());
    let held = [0, 1, 2].map(|side| fixture.sides[side].faults().hold_last_receives());
    fixture.close_and_expect_everything(0);
    drop(held);
    fixture.the_others_go_on(0, 100);
}
