//! The settings as a whole: each setting's edges, precedence, and the errors that a user sees.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::transports::settings::form::Count;

mod document;

fn from(variable: &str, value: &str) -> Result<Settings, SettingsError> {
    Settings::from_vars([(variable, value)])
}

/// Returns the variables of all settings, in the table's order.
fn variables() -> Vec<&'static str> {
    Settings::defaults().describe().iter().map(|line| line.variable).collect()
}

/// Returns the one fault of settings that must have exactly one.
#[track_caller]
fn fault_of(result: Result<Settings, SettingsError>) -> SettingFault {
    let error = result.expect_err("the settings are wrong");
    assert_eq!(error.faults().len(), 1, "{error}");
    error.faults()[0].clone()
}

#[test]
fn without_variables_every_setting_is_its_default_and_says_so() {
    let settings = Settings::from_vars::<String, String>([]).unwrap();
    assert_eq!(settings, Settings::defaults());
    assert_eq!(settings.transports(), TransportChoice::USUAL);
    assert_eq!(settings.packet_size(), 8192);
    assert_eq!(settings.packets_max(), 1024);
    let shm = settings.of_transports().shm();
    assert_eq!((shm.shm_slots(), shm.shm_chunks()), (256, 32));
    assert_eq!(settings.backlog(), 1024);
    assert_eq!(settings.spin(), Duration::from_micros(50));
    assert_eq!(settings.gpu(), GpuChoice::Auto);
    assert!(!settings.gpu_copier());
    assert_eq!(settings.fake_gpus(), 2);
    assert_eq!(settings.poll_batch(), 32);
    assert!(settings.describe().iter().all(|line| line.origin == Origin::Default));
}

#[test]
fn every_default_is_one_that_its_form_accepts_and_reads_back() {
    for default in Settings::defaults().describe() {
        let settings = from(default.variable, &default.value).unwrap_or_else(|why| panic!("{why}"));
        let again = settings.describe().into_iter().find(|line| line.name == default.name).unwrap();
        assert_eq!(again.value, default.value, "{}", default.name);
    }
}

#[test]
fn every_number_accepts_both_edges_of_its_range_and_refuses_what_lies_beyond() {
    // (variable, below, least, most, above)
    for (variable, below, least, most, above) in [
        ("CARRACK_PACKET_SIZE", Some("128"), "256", "65536", "131072"),
        ("CARRACK_PACKETS_MAX", Some("15"), "16", "1048576", "1048577"),
        ("CARRACK_SHM_SLOTS", Some("4"), "8", "65536", "131072"),
        ("CARRACK_SHM_CHUNKS", Some("0"), "1", "64", "65"),
        ("CARRACK_BACKLOG", Some("0"), "1", "1048576", "1048577"),
        ("CARRACK_SPIN_US", None, "0", "1000000", "1000001"),
        ("CARRACK_FAKE_GPUS", Some("0"), "1", "16", "17"),
        ("CARRACK_POLL_BATCH", Some("0"), "1", "1024", "1025"),
    ] {
        for edge in [least, most] {
            let settings = from(variable, edge).unwrap_or_else(|error| panic!("{error}"));
            let line =
                settings.describe().into_iter().find(|line| line.variable == variable).unwrap();
            assert_eq!(
                (line.value.as_str(), line.origin),
                (edge, Origin::Environment(line.variable))
            );
        }
        for beyond in below.into_iter().chain([above, "99999999999999999999999999"]) {
            let fault = fault_of(from(variable, beyond));
            let message = fault.to_string();
            // 26 digits are too many even to be read as a size; as a count they are out of range.
            let readable = beyond.len() < 20 || variable != "CARRACK_PACKET_SIZE";
            assert_eq!(matches!(fault, SettingFault::OutOfRange { .. }), readable, "{message}");
            assert!(message.contains(&format!("from {least} to {most}")), "{message}");
        }
        for malformed in ["", "many", "-1", "1.5"] {
            let fault = fault_of(from(variable, malformed));
            assert!(
                matches!(fault, SettingFault::Malformed { .. }),
                "{variable}={malformed}: {fault}"
            );
        }
    }
}

#[test]
fn the_settings_that_are_masks_refuse_what_is_no_power_of_two() {
    for variable in ["CARRACK_PACKET_SIZE", "CARRACK_SHM_SLOTS"] {
        let fault = fault_of(from(variable, "1000"));
        assert!(matches!(fault, SettingFault::OutOfRange { .. }), "{fault}");
        assert!(fault.to_string().contains("a power of two"), "{fault}");
    }
    assert_eq!(from("CARRACK_PACKETS_MAX", "1000").unwrap().packets_max(), 1000);
}

#[test]
fn the_example_in_an_error_is_a_value_that_is_accepted() {
    for variable in variables() {
        let Err(error) = from(variable, "\u{fffd}") else {
            let of_text = [
                "CARRACK_VERBS_DEVICE",
                "CARRACK_PMIX",
                "CARRACK_TCP_INTERFACE",
                "CARRACK_TCP_CONGESTION",
            ];
            assert!(of_text.contains(&variable), "{variable} takes any text");
            continue;
        };
        let SettingFault::Malformed { example, .. } = &error.faults()[0] else { panic!("{error}") };
        assert!(from(variable, example).is_ok(), "{variable}={example}");
    }
}

#[test]
fn an_ill_formed_value_is_met_with_variable_value_form_and_example() {
    let message = from("CARRACK_PACKET_SIZE", "big").unwrap_err().to_string();
    assert_eq!(
        message,
        "CARRACK_PACKET_SIZE=big cannot be read; expected a number of bytes, a power of two, from \
        256 to 65536; \
         K, M and G are units of 1024, for example 4096"
    );
    let message = from("CARRACK_GPU", "rocm").unwrap_err().to_string();
    assert_eq!(
        message,
        "CARRACK_GPU=rocm cannot be read; expected one of auto, none, cuda, fake, for example fake"
    );
}

#[test]
fn a_value_out_of_range_is_met_with_the_range() {
    let message = from("CARRACK_SHM_CHUNKS", "65").unwrap_err().to_string();
    assert_eq!(
        message,
        "CARRACK_SHM_CHUNKS=65 is not allowed; expected a number of chunks, from 1 to 64, for \
        example 8"
    );
}

#[test]
fn an_unknown_variable_is_an_error_that_names_the_nearest_known_one() {
    let message = from("CARRACK_TRANSPROT", "shm").unwrap_err().to_string();
    assert_eq!(
        message,
        "CARRACK_TRANSPROT is not a variable of Carrack; did you mean CARRACK_TRANSPORT?"
    );
    let message = from("CARRACK_XYZZY", "1").unwrap_err().to_string();
    assert!(message.contains("`carrack info`"), "{message}");
}

#[test]
fn an_unknown_variable_is_met_with_the_known_one_that_was_meant() {
    for (found, meant) in [
        ("CARRACK_TRANSPORTS", "CARRACK_TRANSPORT"),
        ("CARRACK_PACKETSIZE", "CARRACK_PACKET_SIZE"),
        ("CARRACK_PACKETS_SIZE", "CARRACK_PACKET_SIZE"),
        ("CARRACK_PACKET_MAX", "CARRACK_PACKETS_MAX"),
        ("CARRACK_PACKET_SIZ", "CARRACK_PACKET_SIZE"),
        ("CARRACK_SHM_SLOT", "CARRACK_SHM_SLOTS"),
        ("CARRACK_SHM_CHUNK", "CARRACK_SHM_CHUNKS"),
        ("CARRACK_BACKLOGS", "CARRACK_BACKLOG"),
        ("CARRACK_SPIN", "CARRACK_SPIN_US"),
        ("CARRACK_GPUS", "CARRACK_GPU"),
        ("CARRACK_FAKE_GPU", "CARRACK_FAKE_GPUS"),
        ("CARRACK_POOL_BATCH", "CARRACK_POLL_BATCH"),
        ("CARRACK_LOGS", "CARRACK_LOG"),
        ("CARRACK_RANKS", "CARRACK_RANK"),
        ("CARRACK_log", "CARRACK_LOG"),
        ("CARRACK_VERBS_DEPHT", "CARRACK_VERBS_DEPTH"),
    ] {
        let fault = fault_of(from(found, "1"));
        assert_eq!(fault, SettingFault::Unknown { name: found.into(), nearest: Some(meant) });
    }
}

#[test]
fn a_variable_that_is_like_no_other_is_met_with_none() {
    for found in ["CARRACK_XYZZY", "CARRACK_", "CARRACK_HOME_WIDTH"] {
        let fault = fault_of(from(found, "1"));
        assert_eq!(fault, SettingFault::Unknown { name: found.into(), nearest: None });
    }
}

#[test]
fn variables_of_other_programs_are_not_looked_at() {
    for found in ["PATH", "XCARRACK_RANK", "carrack_rank"] {
        assert_eq!(from(found, "1"), Ok(Settings::defaults()));
    }
}

/// Returns settings of the program's choices alone.
fn chosen<const N: usize>(all: [(&str, &str); N]) -> Result<Settings, SettingsError> {
    let builder = Settings::builder();
    let builder =
        all.into_iter().fold(builder, |builder, (name, value)| builder.setting(name, value));
    builder.build_from_vars::<String, String>([])
}

#[test]
fn a_setting_of_a_transport_comes_from_the_environment_or_by_name_or_variable_from_the_program() {
    let depth = |settings: Settings| settings.of_transports().verbs().verbs_depth();
    assert_eq!(from("CARRACK_VERBS_DEPTH", "256").map(depth), Ok(256));
    assert_eq!(chosen([("verbs_depth", "256")]).map(depth), Ok(256));
    assert_eq!(chosen([("CARRACK_VERBS_DEPTH", "256")]).map(depth), Ok(256));
    let last = [("verbs_depth", "32"), ("CARRACK_VERBS_DEPTH", "256"), ("verbs_depth", "64")];
    assert_eq!(chosen(last).map(depth), Ok(64));
    let both = Settings::builder().setting("verbs_depth", 64);
    let both = both.build_from_vars([("CARRACK_VERBS_DEPTH", "256")]);
    assert_eq!(both.map(depth), Ok(64), "the program wins");
}

#[test]
fn the_runtimes_own_settings_are_set_by_name_as_well_and_the_last_call_holds() {
    let settings = Settings::builder().packet_size(512).setting("packet_size", "4K").backlog(1);
    let settings = settings.setting("backlog", "none").backlog(16);
    let settings = settings.build_from_vars::<String, String>([]).unwrap();
    assert_eq!((settings.packet_size(), settings.backlog()), (4096, 16));
}

#[test]
fn a_wrong_value_of_a_transports_setting_is_met_with_its_name_the_value_and_what_to_do() {
    let expected = "expected a number of requests, from 16 to 32768, for example 1024";
    let message = |result: Result<Settings, SettingsError>| result.unwrap_err().to_string();
    assert_eq!(
        message(from("CARRACK_VERBS_DEPTH", "8")),
        format!("CARRACK_VERBS_DEPTH=8 is not allowed; {expected}")
    );
    assert_eq!(
        message(chosen([("verbs_depth", "deep")])),
        format!("setting verbs_depth = deep (set by the program) cannot be read; {expected}")
    );
}

#[test]
fn an_unknown_name_in_the_program_is_met_with_the_one_that_was_meant() {
    let message = |name| chosen([(name, "1")]).unwrap_err().to_string();
    assert_eq!(
        message("verbs_dept"),
        "verbs_dept is not a setting of Carrack; did you mean verbs_depth?"
    );
    assert_eq!(
        message("CARRACK_VERBS_DEPT"),
        "CARRACK_VERBS_DEPT is not a variable of Carrack; did you mean CARRACK_VERBS_DEPTH?"
    );
    assert!(message("CARRACK_RANK").contains("is not a variable"), "the launcher's alone");
    assert_eq!(
        message("colour"),
        "colour is not a setting of Carrack; see `carrack info` for those that there are"
    );
}

crate::transports::declare_settings! {
    /// Settings of a transport of the program's own.
    pub struct MyNet {
        /// Requests that a queue holds.
        mynet_depth: usize,
            "CARRACK_MYNET_DEPTH", Count::of("requests", 1, 64), 16;
    }
}

#[test]
fn a_transport_of_the_programs_own_has_settings_as_the_others_have() {
    let depth = |settings: (Settings, MyNet)| settings.1.mynet_depth();
    let build = |builder: SettingsBuilder| builder.build_with::<MyNet>().map(depth);
    assert_eq!(build(Settings::builder()), Ok(16));
    assert_eq!(build(Settings::builder().setting("mynet_depth", 8)), Ok(8));
    let wrong = build(Settings::builder().setting("mynet_depht", 8)).unwrap_err().to_string();
    assert_eq!(wrong, "mynet_depht is not a setting of Carrack; did you mean mynet_depth?");
}

#[test]
fn everything_that_is_wrong_is_reported_at_once() {
    let vars = [
        ("CARRACK_GPU", "rocm"),
        ("CARRACK_PACKET_SIZE", "9000"),
        ("CARRACK_BACK_LOG", "1"),
        ("HOME", "/"),
    ];
    let error = Settings::builder().poll_batch(0).build_from_vars(vars).unwrap_err();
    let message = error.to_string();
    let lines: Vec<&str> = message.lines().collect();
    assert_eq!(lines.len(), 4, "{message}");
    assert!(lines[0].starts_with("CARRACK_PACKET_SIZE=9000 is not allowed"), "{message}");
    assert!(
        lines[1].starts_with("setting poll_batch = 0 (set by the program) is not allowed"),
        "{message}"
    );
    assert!(lines[2].starts_with("CARRACK_GPU=rocm cannot be read"), "{message}");
    assert!(lines[3].ends_with("did you mean CARRACK_BACKLOG?"), "{message}");
}

#[test]
fn the_program_wins_over_the_environment_and_the_environment_over_the_default() {
    let vars = [("CARRACK_BACKLOG", "64"), ("CARRACK_SHM_SLOTS", "16")];
    let settings = Settings::builder().backlog(16).build_from_vars(vars).unwrap();
    let origin =
        |name: &str| settings.describe().into_iter().find(|line| line.name == name).unwrap().origin;
    assert_eq!((settings.backlog(), origin("backlog")), (16, Origin::Builder));
    assert_eq!(
        (settings.of_transports().shm().shm_slots(), origin("shm_slots")),
        (16, Origin::Environment("CARRACK_SHM_SLOTS"))
    );
    assert_eq!(origin("shm_chunks"), Origin::Default);
}

#[test]
fn a_variable_that_the_program_overrules_is_checked_all_the_same() {
    let result = Settings::builder().backlog(16).build_from_vars([("CARRACK_BACKLOG", "none")]);
    assert!(matches!(fault_of(result), SettingFault::Malformed { name: "backlog", .. }));
}

#[test]
fn the_programs_own_values_are_checked_as_the_environments_are() {
    let result = Settings::builder().transports([]).build_from_vars::<String, String>([]);
    assert!(matches!(fault_of(result), SettingFault::Malformed { origin: Origin::Builder, .. }));
    let result =
        Settings::builder().spin(Duration::from_secs(2)).build_from_vars::<String, String>([]);
    assert!(matches!(fault_of(result), SettingFault::OutOfRange { name: "spin", .. }));
}

#[test]
fn transports_keep_the_order_in_which_they_are_preferred() {
    let settings = from("CARRACK_TRANSPORT", "shm, loopback").unwrap();
    assert_eq!(settings.transports(), [TransportChoice::Shm, TransportChoice::Loopback]);
    assert_eq!(from("CARRACK_TRANSPORT", "SHM").unwrap().transports(), [TransportChoice::Shm]);
}

#[test]
fn a_list_of_transports_may_not_be_empty_name_one_twice_or_name_another() {
    for wrong in ["", ",", "shm,", "shm,shm", "udp", "shm loopback"] {
        fault_of(from("CARRACK_TRANSPORT", wrong));
    }
}

#[test]
fn a_packet_size_may_be_written_with_a_unit() {
    for (text, bytes) in [("4096", 4096), ("4K", 4096), ("4KiB", 4096), ("64k", 65536)] {
        assert_eq!(from("CARRACK_PACKET_SIZE", text).unwrap().packet_size(), bytes);
    }
}

#[test]
fn variables_that_are_no_settings_pass() {
    // A program that is started for a trial and does not answer it does its usual work.
    assert!(RESERVED.iter().any(|reserved| reserved.variable == "CARRACK_TRIAL"));
    for reserved in RESERVED {
        assert_eq!(from(reserved.variable, "whatever"), Ok(Settings::defaults()));
    }
}

#[test]
fn a_description_has_one_line_for_each_variable_with_value_form_and_doc() {
    let lines = Settings::defaults().describe();
    for line in &lines {
        assert!(
            line.doc.ends_with('.') && line.doc.trim() == line.doc,
            "{}: {:?}",
            line.name,
            line.doc
        );
        assert!(!line.expected.is_empty() && !line.value.is_empty(), "{}", line.name);
        assert_eq!(
            from(line.variable, &line.value).map(|again| again.describe().len()),
            Ok(lines.len())
        );
    }
    let mut unique: Vec<&str> =
        variables().into_iter().chain(RESERVED.iter().map(|r| r.variable)).collect();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), lines.len() + RESERVED.len(), "a variable is in the tables twice");
}

proptest! {
    #[test]
    fn no_value_of_any_variable_makes_parsing_panic(which in 0..variables().len(), value in ".*") {
        let _ = from(variables()[which], &value).map_err(|error| error.to_string());
    }

    #[test]
    fn no_name_of_a_variable_makes_parsing_panic(
        name in "CARRACK_.*", value in "[0-9kKMGiB,a-z]{0,20}",
    ) {
        let _ = from(&name, &value).map_err(|error| error.to_string());
    }

    #[test]
    fn a_number_is_accepted_exactly_when_it_is_in_range(count in 0_usize..2_000) {
        let accepted = from("CARRACK_POLL_BATCH", &count.to_string()).is_ok();
        prop_assert_eq!(accepted, (1..=1024).contains(&count));
    }

    #[test]
    fn what_is_shown_is_read_back_as_the_same_settings(
        packets in 16_usize..=1 << 20, spin in 0_u64..=1_000_000, power in 3_u32..=16,
        device in "[a-z0-9:,]{0,20}",
    ) {
        let settings = Settings::builder()
            .packets_max(packets)
            .spin(Duration::from_micros(spin))
            .setting("shm_slots", 1_usize << power)
            .setting("verbs_device", device)
            .build_from_vars::<String, String>([])
            .expect("all in range");
        let vars = settings.describe().into_iter().map(|line| (line.variable, line.value));
        let again = Settings::from_vars(vars).expect("all in range");
        prop_assert_eq!(again.packets_max(), settings.packets_max());
        prop_assert_eq!(again.spin(), settings.spin());
        let (again, settings) = (again.of_transports(), settings.of_transports());
        prop_assert_eq!(again.shm().shm_slots(), settings.shm().shm_slots());
        prop_assert_eq!(again.verbs().verbs_device(), settings.verbs().verbs_device());
    }
}
