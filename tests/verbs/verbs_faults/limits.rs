//! NICs that have little of something: fewer of it are used, or an error says how many there are.

use crate::support::Watchdog;
use crate::support::nics::{Fixture, Side, fabric, identity, nic, options};
use carrack::transports::contract::SubmitError;
use carrack_simulators::nic::{Config, Limits, LinkLayer};
use carrack_transports::verbs::VerbsOptions;

fn limited(limits: Limits) -> Config {
    Config { limits, ..Config::default() }
}

#[test]
#[ignore = "full: half a minute; every limit in turn"]
fn whatever_a_nic_has_little_of_everything_arrives() {
    let _watchdog = Watchdog::over("little");
    let usual = Limits::default;
    for limits in [
        Limits { inline: 0, ..usual() },
        Limits { inline: 15, ..usual() },
        Limits { inline: 16, ..usual() },
        Limits { inline: 30, ..usual() },
        Limits { shared_receives: 1, ..usual() },
        Limits { shared_receives: 3, ..usual() },
        Limits { work_requests: 16, ..usual() },
        Limits { work_requests: 17, shared_receives: 2, inline: 0, ..usual() },
        Limits { completions: 2 * 130 + 64, ..usual() },
        Limits { pieces: 2, ..usual() },
        Limits { reads: 0, ..usual() },
        Limits { queue_pairs: 2, ..usual() },
        Limits { completion_queues: 1, shared_receive_queues: 1, protection_domains: 1, ..usual() },
    ] {
        println!("{limits:?}");
        Fixture::with(&limited(limits), &options()).all_go_on(300);
    }
}

#[test]
fn ports_of_either_sort_and_packets_of_any_size_carry_everything() {
    let _watchdog = Watchdog::over("ports");
    for link_layer in [LinkLayer::Ethernet, LinkLayer::InfiniBand] {
        for packet in [1 << 10, 60 << 10] {
            for extended in [false, true] {
                let config = Config { link_layer, packet, extended, ..Config::default() };
                Fixture::with(&config, &options()).all_go_on(100);
            }
        }
    }
}

#[test]
fn what_a_nic_has_too_little_of_is_named_with_its_number() {
    let _watchdog = Watchdog::over("too little");
    let usual = Limits::default;
    for (limits, words) in [
        (Limits { pieces: 1, ..usual() }, ["sim0", "of 1 pieces"]),
        (Limits { work_requests: 15, ..usual() }, ["sim0", "of 15 requests"]),
        (Limits { completion_queues: 0, ..usual() }, ["sim0", "ibv_create_cq"]),
        (Limits { shared_receive_queues: 0, ..usual() }, ["sim0", "ibv_create_srq"]),
        (Limits { protection_domains: 0, ..usual() }, ["sim0", "ibv_alloc_pd"]),
        (Limits { memory_regions: 1, ..usual() }, ["sim0", "ibv_reg_mr"]),
    ] {
        let nic = nic(limited(limits), &fabric());
        let text = Side::open(nic, options(), identity(0, 2)).map(drop).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }
}

/// Connects a rank that has little to others, which have enough, in turn. Returns how many there
/// were, and what the rank says then.
fn calls_in_turn(limits: Limits, options: &VerbsOptions) -> (usize, String) {
    let fabric = fabric();
    let first =
        Side::open(nic(limited(limits), &fabric), options.clone(), identity(0, 20)).unwrap();
    let mut links = Vec::new();
    for rank in 1..20 {
        let other =
            Side::open(nic(Config::default(), &fabric), options.clone(), identity(rank, 20))
                .unwrap();
        match first
            .device
            .connect(&other.device.address(), carrack::transports::contract::PeerId(rank))
        {
            Ok(link) => links.push((link, other)),
            Err(SubmitError::Lacking(why)) => return (links.len(), why),
            Err(other) => panic!("{other}"),
        }
    }
    panic!("nothing was lacking");
}

#[test]
fn running_out_of_queue_pairs_says_how_many_there_were() {
    let _watchdog = Watchdog::over("queue pairs");
    let limits = Limits { queue_pairs: 3, ..Limits::default() };
    let (made, why) = calls_in_turn(limits, &options());
    assert_eq!(made, 3);
    assert!(why.contains("has 3 connections, the NIC 3 queue pairs"), "{why}");
}

#[test]
fn a_completion_queue_is_never_promised_more_than_it_holds() {
    let _watchdog = Watchdog::over("completions");
    let limits = Limits { completions: 500, ..Limits::default() };
    let (made, why) = calls_in_turn(limits, &options());
    // 32 receives, and 130 for each connection.
    assert_eq!(made, 3);
    for word in ["4 connections", "500", "CARRACK_VERBS_DEPTH"] {
        assert!(why.contains(word), "no {word} in {why}");
    }
    let shallow = VerbsOptions { send_depth: 16, ..options() };
    assert_eq!(calls_in_turn(Limits { completions: 100, ..Limits::default() }, &shallow).0, 3);
}
