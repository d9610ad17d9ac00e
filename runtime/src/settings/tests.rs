//! The settings as a whole: each setting's edges, precedence, and the errors that a user sees.

use std::time::Duration;

use proptest::prelude::*;

use super::table::{VARIABLES, defaults_that_their_form_refuses};
use super::*;

fn from(variable: &str, value: &str) -> Result<Settings, SettingsError> {
    Settings::from_vars([(variable, value)])
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
    let transports = [TransportChoice::Loopback, TransportChoice::Shm, TransportChoice::Verbs];
    assert_eq!(settings.transports(), transports);
    assert_eq!(settings.packet_size(), 8192);
    assert_eq!(settings.packets_max(), 1024);
    assert_eq!(settings.shm_slots(), 256);
    assert_eq!(settings.shm_chunks(), 32);
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
    assert_eq!(defaults_that_their_form_refuses(), [""; 0]);
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
    for variable in VARIABLES {
        let Err(error) = from(variable, "\u{fffd}") else {
            assert_eq!(*variable, "CARRACK_VERBS_DEVICE", "it takes any text");
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
    assert!(lines[1].starts_with("CARRACK_GPU=rocm cannot be read"), "{message}");
    assert!(
        lines[2].starts_with("setting poll_batch = 0 (set by the program) is not allowed"),
        "{message}"
    );
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
        (settings.shm_slots(), origin("shm_slots")),
        (16, Origin::Environment("CARRACK_SHM_SLOTS"))
    );
    assert_eq!((settings.shm_chunks(), origin("shm_chunks")), (32, Origin::Default));
}

#[test]
fn a_variable_that_the_program_overrules_is_checked_all_the_same() {
    let result = Settings::builder().backlog(16).build_from_vars([("CARRACK_BACKLOG", "none")]);
    assert!(matches!(fault_of(result), SettingFault::Malformed { name: "backlog", .. }));
}

#[test]
fn the_programs_own_values_are_checked_as_the_environments_are() {
    let result = Settings::builder().transports([]).build_from_vars::<String, String>([]);
    assert!(matches!(fault_of(result), SettingFault::OutOfRange { origin: Origin::Builder, .. }));
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
    for wrong in ["", ",", "shm,", "shm,shm", "tcp", "shm loopback"] {
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
fn the_launchers_variables_pass() {
    for reserved in RESERVED {
        assert_eq!(from(reserved.variable, "whatever"), Ok(Settings::defaults()));
    }
}

#[test]
fn a_description_has_one_line_for_each_variable_with_value_form_and_doc() {
    let lines = Settings::defaults().describe();
    assert_eq!(lines.iter().map(|line| line.variable).collect::<Vec<_>>(), VARIABLES);
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
        VARIABLES.iter().copied().chain(RESERVED.iter().map(|r| r.variable)).collect();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), VARIABLES.len() + RESERVED.len(), "a variable is in the tables twice");
}

proptest! {
    #[test]
    fn no_value_of_any_variable_makes_parsing_panic(which in 0..VARIABLES.len(), value in ".*") {
        let _ = from(VARIABLES[which], &value).map_err(|error| error.to_string());
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
            .shm_slots(1_usize << power)
            .verbs_device(device)
            .build_from_vars::<String, String>([])
            .expect("all in range");
        let vars = settings.describe().into_iter().map(|line| (line.variable, line.value));
        let again = Settings::from_vars(vars).expect("all in range");
        prop_assert_eq!(again.packets_max(), settings.packets_max());
        prop_assert_eq!(again.spin(), settings.spin());
        prop_assert_eq!(again.shm_slots(), settings.shm_slots());
        prop_assert_eq!(again.verbs_device(), settings.verbs_device());
    }
}
