//! Packets that come late, in another order than they were posted, or not at all.

use crate::support::nics::{Fixture, options};
use crate::support::{Watchdog, nics_go_on};
use carrack::transports::contract::{Armed, DownCause, Event, PeerId, SubmitError};
use carrack_simulators::nic::{Config, Visibility};
use std::time::Duration;

#[test]
fn completions_that_come_late_hold_up_and_lose_nothing() {
    let _watchdog = Watchdog::over("late completions");
    let mut fixture = Fixture::default();
    fixture.sides[0].faults().delay_completions(Duration::from_millis(3));
    fixture.sides[1].faults().delay_completions(Duration::from_micros(50));
    fixture.all_go_on(300);
    fixture.sides[0].faults().delay_completions(Duration::ZERO);
    fixture.all_go_on(300);
}

#[test]
fn completions_that_do_not_come_for_a_while_come_all_in_the_end() {
    let _watchdog = Watchdog::over("held completions");
    let mut fixture = Fixture::default();
    for _ in 0..10 {
        let held = fixture.sides[0].faults().hold_completions();
        for _ in 0..300 {
            fixture.talk();
        }
        drop(held);
        fixture.all_go_on(30);
    }
}

#[test]
fn queue_pairs_that_overtake_each_other_keep_each_one_s_order() {
    let _watchdog = Watchdog::over("scattered queue pairs");
    let mut fixture = Fixture::default();
    for side in &fixture.sides {
        side.faults().scatter_queue_pairs(Duration::from_micros(300));
    }
    fixture.all_go_on(500);
    // A link that goes and comes while the other queue pairs are late.
    for _ in 0..10 {
        fixture.release(0, 1);
        fixture.connect_again(0, 1);
        fixture.all_go_on(5);
    }
}

#[test]
fn a_queue_pair_that_stands_still_holds_up_no_other() {
    let _watchdog = Watchdog::over("a queue pair stands still");
    let mut fixture = Fixture::default();
    // The numbers of queue pairs are handed out in turn; one of these is that to rank 1 or 2.
    for number in 2..4 {
        let held = fixture.sides[0].faults().hold_queue_pair(0, number);
        fixture.the_others_go_on(0, 50);
        drop(held);
        fixture.all_go_on(50);
    }
}

#[test]
fn what_is_written_to_gpus_late_is_nothing_to_messages_of_the_host() {
    let _watchdog = Watchdog::over("late visibility");
    for visibility in [Visibility::WithCompletion, Visibility::WithRead] {
        let mut fixture = Fixture::default();
        for side in &fixture.sides {
            side.faults().write_visibility(visibility, true);
        }
        fixture.all_go_on(300);
    }
}

#[test]
#[ignore = "full: half a minute; time-outs run out"]
fn a_port_that_goes_down_ends_its_connections_and_is_named_and_they_can_be_made_again() {
    let _watchdog = Watchdog::over("a port goes down");
    let mut fixture = Fixture::default();
    for _ in 0..3 {
        assert!(fixture.sides[0].nic.set_port(0, 1, false));
        fixture.talk_until("the port's end", |fixture| {
            [(0, 1), (0, 2), (1, 0), (2, 0)].iter().all(|pair| fixture.ways[pair].down.is_some())
        });
        let causes = [1, 2].map(|peer| fixture.ways[&(0, peer)].down.clone().unwrap().to_string());
        assert!(causes.iter().all(|cause| cause.contains("port 1 of sim0")), "{causes:?}");
        fixture.all_go_on(20);
        assert!(fixture.sides[0].nic.set_port(0, 1, true));
        fixture.connect_again(0, 1);
        fixture.connect_again(2, 0);
        fixture.all_go_on(20);
    }
}

#[test]
fn a_rank_whose_port_is_down_is_told_so_also_where_its_peers_notice_first() {
    let _watchdog = Watchdog::over("peers notice first");
    let mut fixture = Fixture::default();
    let held = fixture.sides[0].faults().hold_completions();
    assert!(fixture.sides[0].nic.set_port(0, 1, false));
    fixture.talk_until("its peers have given up", |fixture| {
        [(1, 0), (2, 0)].iter().all(|pair| fixture.ways[pair].down.is_some())
    });
    // Has it look at what they say before it looks at its own completions.
    let device = fixture.sides[0].device.clone();
    if let Armed::Wait(_) = device.arm() {
        device.disarm(true);
    }
    fixture.step();
    drop(held);
    fixture.talk_until("its end", |fixture| {
        [(0, 1), (0, 2)].iter().all(|pair| fixture.ways[pair].down.is_some())
    });
    for peer in [1, 2] {
        let cause = fixture.ways[&(0, peer)].down.as_ref().unwrap().to_string();
        assert!(
            cause.contains("given the connection up") && cause.contains("port 1 of sim0"),
            "{cause}"
        );
    }
}

#[test]
fn a_sender_without_credits_is_told_that_its_peer_is_gone_though_nothing_is_in_flight() {
    let _watchdog = Watchdog::over("no credits");
    let mut fixture = Fixture::default();
    fixture.settle();
    fixture.fill(2, 0);
    assert!(fixture.sides[0].nic.set_port(0, 1, false));
    // Rank 0 does not poll any more.
    let told = loop {
        if let Some(event) = fixture.sides[2].poll().pop() {
            break event;
        }
        nics_go_on();
    };
    assert!(matches!(told, Event::PeerDown { peer: PeerId(0), .. }), "{told:?}");
}

#[test]
fn a_device_that_is_taken_out_is_an_error_with_its_name_for_all_of_its_peers_and_later() {
    let _watchdog = Watchdog::over("a device is taken out");
    let mut fixture = Fixture::default();
    assert!(fixture.sides[0].nic.remove(0));
    fixture.talk_until("the device's end", |fixture| {
        [(0, 1), (0, 2), (1, 0), (2, 0)].iter().all(|pair| fixture.ways[pair].down.is_some())
    });
    for peer in [1, 2] {
        let cause = fixture.ways[&(0, peer)].down.clone().unwrap();
        assert!(
            cause.to_string().contains("sim0") || matches!(cause, DownCause::Gone(_)),
            "{cause:?}"
        );
    }
    fixture.all_go_on(50);
    fixture.talk_until("the event", |fixture| {
        let address = fixture.sides[1].device.address();
        let again = fixture.sides[0].device.connect(&address, PeerId(1));
        matches!(
            &again,
            Err(SubmitError::Down { cause: DownCause::Lacking(why), .. }) if why.contains("sim0")
        )
    });
    // Closing does not wait for what cannot come.
    fixture.sides[0].device.close();
    fixture.all_go_on(50);
}

#[test]
fn a_device_closes_in_order_while_its_nic_dawdles() {
    let _watchdog = Watchdog::over("closing late");
    let mut fixture = Fixture::with(&Config::default(), &options());
    fixture.sides[0].faults().delay_completions(Duration::from_millis(5));
    for _ in 0..20 {
        fixture.talk();
    }
    fixture.close_and_expect_everything(0);
}
