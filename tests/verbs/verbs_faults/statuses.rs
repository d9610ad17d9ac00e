//! Requests and receives that fail, with each status, early and late in a connection's life.

use crate::support::Watchdog;
use crate::support::nics::Fixture;
use carrack::transports::contract::DownCause;
use carrack_simulators::nic::Which;
use carrack_transports::verbs::sys::bindings::{
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_TM_RNDV_INCOMPLETE,
};

/// All that are none of success.
const STATUSES: std::ops::RangeInclusive<u32> = IBV_WC_LOC_LEN_ERR..=IBV_WC_TM_RNDV_INCOMPLETE;

#[test]
fn a_request_that_fails_ends_its_connection_and_no_other_and_a_new_one_is_as_good() {
    let _watchdog = Watchdog::over("statuses of requests");
    let mut fixture = Fixture::default();
    for status in STATUSES {
        for nth in [1, 2, 5, 60] {
            let what = format!("status {status} of request {nth}");
            fixture.sides[0].faults().fail_sends(Which::Nth(nth), status);
            let peer = fixture.who_has_lost(&what, 0);
            let cause = fixture.only_these_end(&what, 0, peer);
            match status {
                IBV_WC_RETRY_EXC_ERR | IBV_WC_RNR_RETRY_EXC_ERR => {
                    assert!(
                        matches!(&cause, DownCause::Gone(why) if why.contains("exceeded")),
                        "{cause}"
                    );
                }
                IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR => {
                    assert!(matches!(cause, DownCause::Protocol(_)), "{cause}");
                }
                IBV_WC_LOC_PROT_ERR => assert!(matches!(cause, DownCause::Lacking(_)), "{cause}"),
                _ => {}
            }
            fixture.connect_again(0, peer);
            fixture.all_go_on(3);
        }
    }
}

#[test]
fn a_receive_that_fails_ends_its_connection_and_no_other_and_its_place_is_used_again() {
    let _watchdog = Watchdog::over("statuses of receives");
    let mut fixture = Fixture::default();
    // More often than there are receives: none may be lost.
    for status in STATUSES {
        for nth in [1, 3, 40] {
            let what = format!("status {status} of receive {nth}");
            fixture.sides[0].faults().fail_receives(Which::Nth(nth), status);
            let peer = fixture.who_has_lost(&what, 0);
            fixture.only_these_end(&what, 0, peer);
            fixture.connect_again(peer, 0);
            fixture.all_go_on(3);
        }
    }
}

#[test]
fn all_requests_of_a_rank_fail_and_the_others_go_on() {
    let _watchdog = Watchdog::over("all requests");
    let mut fixture = Fixture::default();
    fixture.sides[0].faults().fail_sends(Which::All, IBV_WC_RETRY_EXC_ERR);
    fixture.talk_until("both ends", |fixture| {
        [(0, 1), (0, 2), (1, 0), (2, 0)].iter().all(|pair| fixture.ways[pair].down.is_some())
    });
    fixture.all_go_on(20);
    fixture.sides[0].faults().heal_work();
    fixture.connect_again(0, 1);
    fixture.connect_again(2, 0);
    fixture.all_go_on(20);
}

#[test]
fn links_that_go_while_the_peer_sends_leave_no_receive_behind() {
    let _watchdog = Watchdog::over("links that go");
    let mut fixture = Fixture::default();
    // Each time some receives were used by messages that no link takes any more. Lost receives
    // would add up.
    for _ in 0..60 {
        for _ in 0..12 {
            fixture.talk();
        }
        fixture.release(0, 1);
        fixture.connect_again(0, 1);
        fixture.all_go_on(1);
    }
    fixture.all_go_on(200);
}
