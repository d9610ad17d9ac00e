//! Calls of libibverbs that fail, with each reason, at the start, when a connection is made, and in
//! the midst of traffic.

use crate::support::Watchdog;
use crate::support::nics::{Fixture, Side, fabric, identity, nic, options};
use carrack::transports::contract::{Armed, DownCause, SubmitError};
use carrack_simulators::nic::{Call, Config, Which};
use std::io;

const REASONS: [i32; 6] =
    [libc::ENOMEM, libc::EIO, libc::EINVAL, libc::EAGAIN, libc::EPERM, libc::EMFILE];

/// Returns libibverbs' name of a call.
fn name(call: Call) -> &'static str {
    match call {
        Call::GetDeviceList => "ibv_get_device_list",
        Call::OpenDevice => "ibv_open_device",
        Call::QueryDevice => "ibv_query_device",
        Call::QueryPort => "ibv_query_port",
        Call::QueryGid => "ibv_query_gid",
        Call::AllocPd => "ibv_alloc_pd",
        Call::RegMr => "ibv_reg_mr",
        Call::CreateCompChannel => "ibv_create_comp_channel",
        Call::CreateCq => "ibv_create_cq",
        Call::CreateSrq => "ibv_create_srq",
        Call::PostSrqRecv => "receive queue takes no receive",
        other => panic!("{other:?} is not called at the start"),
    }
}

#[test]
fn whatever_fails_at_the_start_is_an_error_that_names_call_and_reason() {
    let _watchdog = Watchdog::over("the start");
    let nic = nic(Config::default(), &fabric());
    let open = || Side::open(nic.clone(), options(), identity(0, 2)).map(drop);
    open().unwrap();
    for call in [
        Call::GetDeviceList,
        Call::OpenDevice,
        Call::QueryDevice,
        Call::QueryPort,
        Call::QueryGid,
        Call::AllocPd,
        Call::RegMr,
        Call::CreateCompChannel,
        Call::CreateCq,
        Call::CreateSrq,
        Call::PostSrqRecv,
    ] {
        for errno in REASONS {
            nic.faults().fail_call(call, Which::All, errno);
            match open() {
                Err(error) => {
                    let (text, reason) =
                        (error.to_string(), io::Error::from_raw_os_error(errno).to_string());
                    assert!(
                        text.contains(name(call)) && text.contains(&reason),
                        "{call:?} {errno}: {text}"
                    );
                }
                // Room for receives that comes later is no error.
                Ok(()) => assert_eq!((call, errno), (Call::PostSrqRecv, libc::ENOMEM)),
            }
            nic.faults().heal_call(call);
        }
        // The first, the second and so on: nothing panics, nothing is left behind, and afterwards
        // it goes.
        for nth in 1..=4 {
            nic.faults().fail_call(call, Which::Nth(nth), libc::EIO);
            let _ = open();
            nic.faults().heal_call(call);
        }
        open().unwrap();
    }
}

#[test]
fn memory_that_may_not_be_locked_is_an_error_of_the_start_that_names_the_limit() {
    let _watchdog = Watchdog::over("memlock");
    let nic = nic(Config::default(), &fabric());
    // The table of headers is registered first, then the packets.
    for nth in [1, 2] {
        nic.faults().fail_call(Call::RegMr, Which::Nth(nth), libc::ENOMEM);
        let opened = Side::open(nic.clone(), options(), identity(0, 2));
        if nth == 1 {
            let text = opened.map(drop).unwrap_err().to_string();
            for word in ["ibv_reg_mr", "sim0", "ulimit -l"] {
                assert!(text.contains(word), "no {word} in: {text}");
            }
        }
        nic.faults().heal_call(Call::RegMr);
    }
}

#[test]
#[ignore = "full: a quarter of a minute; every call in turn"]
fn a_connection_that_cannot_be_made_is_an_error_that_names_call_and_reason_and_may_be_tried_again()
{
    let _watchdog = Watchdog::over("making connections");
    let mut fixture = Fixture::default();
    for (caller, called) in [(0, 1), (1, 0)] {
        for (call, text) in [
            (Call::CreateQp, "ibv_create_qp"),
            (Call::ModifyQp, "ibv_modify_qp"),
            (Call::RegMr, "ibv_reg_mr"),
        ] {
            for errno in REASONS {
                for nth in [Which::All, Which::Nth(1), Which::Nth(2)] {
                    fixture.end_in_order(0, 1);
                    let reason = io::Error::from_raw_os_error(errno).to_string();
                    fixture.sides[0].faults().fail_call(call, nth, errno);
                    let what = format!("{call:?} {nth:?} {errno}, {caller} calls");
                    let made = fixture.connect(caller, called);
                    match &made {
                        Err(SubmitError::Lacking(why)) if caller == 0 => {
                            assert!(why.contains(text) && why.contains(&reason), "{what}: {why}");
                        }
                        Ok(()) => {
                            let ended = |fixture: &Fixture| {
                                fixture.ways[&(caller, called)].down.is_some()
                                    || fixture.has_arrived(caller, called)
                            };
                            fixture.talk_until(&what, ended);
                            if let Some(cause) = &fixture.ways[&(caller, called)].down {
                                let told = cause.to_string();
                                assert!(
                                    told.contains(text) && told.contains(&reason),
                                    "{what}: {told}"
                                );
                            }
                        }
                        other => panic!("{what}: {other:?}"),
                    }
                    fixture.sides[0].faults().heal_call(call);
                    if made.is_ok() && fixture.ways[&(caller, called)].down.is_none() {
                        continue;
                    }
                    fixture.settle();
                    fixture.connect_again(caller, called);
                    fixture.all_go_on(3);
                }
            }
        }
    }
}

#[test]
fn a_queue_that_is_full_for_a_moment_loses_nothing() {
    let _watchdog = Watchdog::over("queues that are full");
    let mut fixture = Fixture::default();
    for round in 0..40 {
        for (side, call) in [(0, Call::PostSend), (1, Call::PostSrqRecv)] {
            // Also within a list of requests, of which the first ones were posted.
            fixture.sides[side].faults().fail_call(call, Which::Nth(1 + round % 20), libc::ENOMEM);
        }
        fixture.all_go_on(20);
    }
    fixture.sides[0].faults().fail_call(Call::PostSend, Which::All, libc::ENOMEM);
    for _ in 0..50 {
        fixture.talk();
    }
    fixture.sides[0].faults().heal_call(Call::PostSend);
    fixture.all_go_on(50);
}

#[test]
fn a_queue_pair_that_takes_no_request_ends_its_connection_alone() {
    let _watchdog = Watchdog::over("refused requests");
    let mut fixture = Fixture::default();
    for errno in [libc::EIO, libc::EINVAL, libc::EPERM] {
        // Messages and, now and then, a credit.
        for nth in 1..=40 {
            fixture.sides[0].faults().fail_call(Call::PostSend, Which::Nth(nth), errno);
            let what = format!("request {nth} is refused with {errno}");
            let peer = fixture.who_has_lost(&what, 0);
            let cause = fixture.only_these_end(&what, 0, peer).to_string();
            assert!(cause.contains(&io::Error::from_raw_os_error(errno).to_string()), "{cause}");
            fixture.connect_again(0, peer);
            fixture.all_go_on(3);
        }
    }
}

/// Checks that a rank can use its device no more. It is told why for each peer, and the peers hear
/// of its end, and go on among themselves.
#[track_caller]
fn rank_0_is_lost(fixture: &mut Fixture, what: &str, word: &str) {
    fixture.talk_until(what, |fixture| {
        [(0, 1), (0, 2), (1, 0), (2, 0)].iter().all(|pair| fixture.ways[pair].down.is_some())
    });
    for peer in [1, 2] {
        let cause = fixture.ways[&(0, peer)].down.as_ref().unwrap();
        assert!(matches!(cause, DownCause::Lacking(_)), "{cause:?}");
        let text = cause.to_string();
        assert!(text.contains(word) && text.contains("sim0"), "{what}: {text}");
    }
    fixture.all_go_on(20);
    let again = fixture.connect(0, 1);
    assert!(
        matches!(
            &again,
            Err(SubmitError::Down { cause: DownCause::Lacking(why), .. }) if why.contains(word)
        ),
        "{again:?}"
    );
    // Who calls such a rank is told, too.
    fixture.connect(1, 0).unwrap();
    fixture.talk_until("it is refused", |fixture| fixture.ways[&(1, 0)].down.is_some());
    let cause = fixture.ways[&(1, 0)].down.clone().unwrap();
    assert!(matches!(&cause, DownCause::Refused(why) if why.contains("sim0")), "{cause:?}");
    fixture.all_go_on(20);
}

#[test]
fn a_completion_queue_that_cannot_be_read_or_has_overrun_ends_the_device_with_its_reason() {
    let _watchdog = Watchdog::over("completion queues");
    for nth in [1, 7, 100] {
        let mut fixture = Fixture::default();
        fixture.sides[0].faults().fail_call(Call::PollCq, Which::Nth(nth), libc::EIO);
        rank_0_is_lost(&mut fixture, "polling", "ibv_poll_cq");
        let mut fixture = Fixture::default();
        fixture.sides[0].faults().overrun(Which::Nth(nth));
        rank_0_is_lost(&mut fixture, "overrun", "IBV_EVENT_CQ_ERR");
    }
}

#[test]
fn a_receive_queue_that_takes_no_receives_ends_the_device_with_its_reason() {
    let _watchdog = Watchdog::over("receive queues");
    let mut fixture = Fixture::default();
    fixture.sides[0].faults().fail_call(Call::PostSrqRecv, Which::Nth(9), libc::EIO);
    rank_0_is_lost(&mut fixture, "receives", "takes no receive");
}

#[test]
fn a_device_that_cannot_wake_anybody_is_not_slept_on() {
    let _watchdog = Watchdog::over("notifications");
    let mut fixture = Fixture::default();
    fixture.sides[0].faults().fail_call(Call::ReqNotifyCq, Which::All, libc::EIO);
    assert!(matches!(fixture.sides[0].device.arm(), Armed::Ready));
    fixture.all_go_on(10);
}
