//! Attacks of an authenticated peer over its queue pair.

use super::attacker::{Attacker, ME, PATIENCE};
use crate::support::Watchdog;
use crate::support::nics::{Fixture, PACKET, submit};
use carrack::transports::contract::{Armed, DownCause, Link, Submit, SubmitError};
use carrack_transports::internals::verbs::{RdmaAddress, SetupMessage};
use carrack_transports::verbs::sys::bindings::{IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR};
use std::sync::Arc;

#[track_caller]
fn is_protocol(cause: &DownCause, word: &str) {
    assert!(matches!(cause, DownCause::Protocol(why) if why.contains(word)), "{cause:?}");
}

#[test]
fn messages_too_short_for_a_header_or_longer_than_a_packet_end_their_connection_alone() {
    let _watchdog = Watchdog::over("lengths");
    let mut fixture = Fixture::default();
    // More often than there are receives: each is used again.
    for round in 0..4 {
        for len in [0, 1, 8, 15] {
            let mut attacker = Attacker::enter(&mut fixture);
            attacker.send(len);
            is_protocol(
                &fixture.reports_the_attacker(&format!("{len} bytes")),
                "too short for a header",
            );
        }
        for len in [16 + PACKET + 1, 3 * PACKET] {
            let mut attacker = Attacker::enter(&mut fixture);
            attacker.send(len);
            is_protocol(
                &fixture.reports_the_attacker(&format!("{len} bytes")),
                "longer than a packet",
            );
        }
        // Good ones, which are not the last word.
        let mut attacker = Attacker::enter(&mut fixture);
        for len in [16, 56, 57, 16 + PACKET] {
            attacker.send(len);
        }
        attacker.send(round);
        is_protocol(&fixture.reports_the_attacker("the last is wrong"), "too short");
    }
}

#[test]
fn a_rank_that_has_slept_is_told_what_was_wrong_and_not_only_that_its_queue_pair_has_failed() {
    let _watchdog = Watchdog::over("the NIC's event comes first");
    let mut fixture = Fixture::default();
    let mut attacker = Attacker::enter(&mut fixture);
    let device = fixture.sides[0].device.clone();
    while matches!(device.arm(), Armed::Ready) {
        fixture.step();
    }
    // Completion and event come while rank 0 sleeps; events are the first that it looks at then.
    attacker.send(16 + PACKET + 1);
    assert_eq!(attacker.status_while(std::thread::yield_now), IBV_WC_REM_INV_REQ_ERR);
    device.disarm(true);
    is_protocol(&fixture.reports_the_attacker("asleep"), "longer than a packet");
}

#[test]
fn immediates_that_mean_nothing_end_their_connection_alone() {
    let _watchdog = Watchdog::over("immediates");
    let mut fixture = Fixture::default();
    for word in [0, 3, 77, u32::MAX, 1 << 24] {
        for len in [0, 16, 100] {
            let mut attacker = Attacker::enter(&mut fixture);
            attacker.send_with_immediate(len, word);
            is_protocol(
                &fixture.reports_the_attacker(&format!("immediate {word}")),
                &format!("it said {word}"),
            );
        }
        let mut attacker = Attacker::enter(&mut fixture);
        let End { addr, key } = own_word(&attacker);
        attacker.write(0, 8, addr, key, Some(word));
        fixture.reports_the_attacker(&format!("a write with immediate {word}"));
    }
    // What it says with a write did not come as a message.
    let mut attacker = Attacker::enter(&mut fixture);
    let End { addr, key } = own_word(&attacker);
    attacker.write(0, 8, addr, key, Some(TOGETHER));
    is_protocol(&fixture.reports_the_attacker("messages in a write"), "it said 2");
    // A farewell with baggage is one all the same.
    let mut attacker = Attacker::enter(&mut fixture);
    attacker.send_with_immediate(1000, 1);
    assert_eq!(fixture.reports_the_attacker("bye"), DownCause::Closed);
}

/// Said in front of messages that go together.
const TOGETHER: u32 = 2;

#[test]
fn messages_that_go_together_and_are_none_end_their_connection_alone() {
    let _watchdog = Watchdog::over("together");
    let mut fixture = Fixture::default();
    // Whose bytes are counted wrongly; and which say to be longer than they are, or than short ones
    // can be.
    for (bytes, word) in [
        (&[8, 0][..], "said to be 8"),
        (&[24, 1, 0, 0, 0], "said to be 24"),
        (&[8, 0, 1], "cut off"),
        (&[24, 0, 5, 5, 8], "cut off"),
        (&[32, 0, 5, 5, 41, 0], "longer than a short one"),
        (&[32, 0, 5, 5, u64::MAX, 0], "longer than a short one"),
        (&[56, 0, 5, 5, 0, 5, 5, 9, 0], "cut off"),
    ] {
        let mut attacker = Attacker::enter(&mut fixture);
        attacker.send_words(bytes, TOGETHER);
        is_protocol(&fixture.reports_the_attacker(&format!("{bytes:?}")), word);
    }
    for len in [0, 15] {
        let mut attacker = Attacker::enter(&mut fixture);
        attacker.send_with_immediate(len, TOGETHER);
        is_protocol(&fixture.reports_the_attacker(&format!("{len} bytes")), "too short");
    }
    fixture.all_go_on(10);
}

struct End {
    addr: u64,
    key: u32,
}

fn own_word(attacker: &Attacker) -> End {
    End { addr: attacker.theirs.word_addr, key: attacker.theirs.word_key }
}

#[test]
fn a_peer_reaches_no_memory_but_the_word_that_it_was_given() {
    let _watchdog = Watchdog::over("memory");
    let mut fixture = Fixture::default();
    let secret = vec![7_u8; 64];
    let elsewhere = secret.as_ptr() as u64;
    let first = Attacker::enter(&mut fixture);
    let End { addr, key } = own_word(&first);
    drop(first);
    fixture.reports_the_attacker("it goes");
    for (what, at, with, len) in [
        ("behind its word", 16, 0, 8),
        ("across its end", 8, 0, 16),
        ("before it", -8, 0, 8),
        ("more than it", 0, 0, 4096),
        ("with another key", 0, 1, 8),
        ("with another key", 0, -1, 8),
        ("with another key", 0, 0x100, 8),
    ] {
        for reads in [false, true] {
            let mut attacker = Attacker::enter(&mut fixture);
            let End { addr, key } = own_word(&attacker);
            let (at, with) = (addr.wrapping_add_signed(at), key.wrapping_add_signed(with));
            match reads {
                false => attacker.write(u64::MAX, len, at, with, None),
                true => attacker.read(len, at, with),
            }
            let status = attacker.status(&mut fixture);
            assert!(
                [IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR].contains(&status),
                "{what}, reads {reads}: {status}"
            );
            fixture.reports_the_attacker(what);
        }
    }
    // The word of a connection that has ended, and memory that was never registered.
    for (at, with) in [(addr, key), (elsewhere, key)] {
        let mut attacker = Attacker::enter(&mut fixture);
        attacker.write(u64::MAX, 8, at, with, None);
        assert_eq!(attacker.status(&mut fixture), IBV_WC_REM_ACCESS_ERR);
        fixture.reports_the_attacker("memory of others");
    }
    assert_eq!(secret, [7; 64]);
    // Its own it may not read, either.
    let mut attacker = Attacker::enter(&mut fixture);
    let End { addr, key } = own_word(&attacker);
    attacker.read(8, addr, key);
    assert_eq!(attacker.status(&mut fixture), IBV_WC_REM_ACCESS_ERR);
    fixture.reports_the_attacker("it reads");
}

/// Returns rank 0's link to the attacker, over the connection that there is.
fn link_to(fixture: &Fixture, attacker: &Attacker) -> Arc<dyn Link> {
    let own = RdmaAddress::decode(&fixture.sides[0].device.address()).unwrap();
    let address = RdmaAddress { key: attacker.key, ..own }.encode();
    fixture.sides[0].device.connect(&address, ME).unwrap()
}

/// Sends until the window is full, or it is refused.
fn send_all(fixture: &mut Fixture, link: &Arc<dyn Link>) -> Result<usize, SubmitError> {
    let start = std::time::Instant::now();
    while !link.is_up() {
        fixture.step();
        assert!(start.elapsed() < PATIENCE);
    }
    for sent in 0.. {
        if submit(link, [sent, 0], b"12345678")? != Submit::Done {
            return Ok(sent as usize);
        }
    }
    unreachable!()
}

#[test]
fn credits_that_cannot_be_end_their_connection_alone() {
    let _watchdog = Watchdog::over("credits");
    let mut fixture = Fixture::default();
    for credits in [vec![5], vec![u64::MAX], vec![1 << 32], vec![4, 9], vec![3, 2], vec![3, 0]] {
        let mut attacker = Attacker::enter(&mut fixture);
        let link = link_to(&fixture, &attacker);
        assert_eq!(send_all(&mut fixture, &link), Ok(4), "its window");
        let mut last = Ok(0);
        for &credit in &credits {
            attacker.credit(credit);
            assert_eq!(attacker.status(&mut fixture), 0);
            last = send_all(&mut fixture, &link);
        }
        let refused = matches!(
            &last,
            Err(SubmitError::Down { peer: ME, cause: DownCause::Protocol(why) })
                if why.contains("messages")
        );
        assert!(refused, "{credits:?}: {last:?}");
        is_protocol(&fixture.reports_the_attacker(&format!("credits {credits:?}")), "taken in");
    }
}

#[test]
fn a_peer_that_takes_nothing_in_holds_up_no_other() {
    let _watchdog = Watchdog::over("a peer that takes nothing");
    let mut fixture = Fixture::default();
    let mut attacker = Attacker::enter(&mut fixture);
    let link = link_to(&fixture, &attacker);
    assert_eq!(send_all(&mut fixture, &link), Ok(4));
    // It has no receive posted: these stay on their way.
    fixture.all_go_on(300);
    attacker.send(3);
    is_protocol(&fixture.reports_the_attacker("at last"), "too short");
}

#[test]
fn a_flood_that_heeds_no_window_costs_the_others_nothing_but_time() {
    let _watchdog = Watchdog::over("a flood");
    let mut fixture = Fixture::default();
    let mut attacker = Attacker::enter(&mut fixture);
    for _ in 0..500 {
        attacker.send(16 + 100);
    }
    fixture.all_go_on(100);
    fixture.talk_until("the flood", |fixture| fixture.of_the_fourth.len() == 500);
    fixture.of_the_fourth.clear();
    drop(attacker);
    fixture.reports_the_attacker("it goes");
}

#[test]
fn words_out_of_turn_over_tcp_end_their_connection_alone() {
    let _watchdog = Watchdog::over("out of turn");
    let mut fixture = Fixture::default();
    let end = Default::default();
    for message in [
        SetupMessage::Ready,
        SetupMessage::Crossed,
        SetupMessage::Welcome(end),
        SetupMessage::Hello(end),
    ] {
        let mut attacker = Attacker::enter(&mut fixture);
        fixture.all_go_on(1);
        attacker.channel.send(&message).unwrap();
        is_protocol(&fixture.reports_the_attacker(&format!("{message:?}")), "out of turn");
    }
    let mut attacker = Attacker::enter(&mut fixture);
    attacker.channel.send(&SetupMessage::Refusal("no".into())).unwrap();
    let cause = fixture.reports_the_attacker("refusal");
    assert!(
        matches!(&cause, DownCause::Gone(why) if why.contains("given the connection up")),
        "{cause}"
    );
    let mut attacker = Attacker::enter(&mut fixture);
    attacker.channel.send(&SetupMessage::Bye).unwrap();
    assert_eq!(fixture.reports_the_attacker("bye"), DownCause::Closed);
}
