//! `carrack explain` with resident copiers: each rank has one make a copy, and reports the result.
//! The tests run on simulated GPUs, and on real ones with `TEST_GPU=cuda`. Ranks that share a GPU
//! need real ones, or the mock of `explain_claims`.

use crate::support::Watchdog;
use crate::support::explained::{Told, assert_shared, carrack, explain, text, told};
use crate::support::gpus::{TestDriver, are_real};
use carrack::transports::gpu::copier::MOST;

fn driver() -> (&'static str, &'static str) {
    ("CARRACK_GPU", if are_real() { "cuda" } else { "fake" })
}

const ASKED: (&str, &str) = ("CARRACK_GPU_COPIER", "1");

/// Returns `true` if there are `gpus` GPUs, so that each rank can have its own.
fn are_there(gpus: usize) -> bool {
    let there = !are_real() || TestDriver::new().gpus.len() >= gpus;
    if !there {
        println!("skipped: each of {gpus} ranks needs a GPU of its own");
    }
    there
}

#[test]
fn ranks_with_a_gpu_each_have_had_a_copy_by_their_copiers() {
    let _watchdog = Watchdog::over("own GPUs");
    if !are_there(2) {
        return;
    }
    let told = told(&explain(2, "", &["--all", "--json"], &[driver(), ASKED]));
    assert!(told.len() >= 4, "{told:#?}");
    for Told { rank, gpu, state, refused, way, why, .. } in &told {
        let own = *gpu as u64 == *rank;
        assert_eq!(state.as_deref(), Some(if own { "on" } else { "wanted" }), "{told:#?}");
        assert_eq!(*refused, None, "{told:#?}");
        assert!(!why.contains("trying the copier"), "{why}");
        let most = format!("copies between GPUs up to {} KiB by a resident copier", MOST >> 10);
        let (_, rest) = way.split_once(&most).unwrap_or_else(|| panic!("{way}"));
        if !own {
            assert!(rest.starts_with(", when the first one finds"), "{way}");
            continue;
        }
        // It was launched twice at least: before the ranks met, and behind that.
        let counts: Vec<u64> = rest
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse().ok())
            .collect();
        assert!(matches!(counts[..], [launches, copies] if launches >= 2 && copies >= 1), "{rest}");
    }
}

#[test]
fn people_are_told_in_words() {
    let _watchdog = Watchdog::over("words");
    if !are_there(2) {
        return;
    }
    let said = text(&explain(2, "", &["--all"], &[driver(), ASKED]));
    let rows = |what: &str| said.lines().filter(|line| line.contains(what)).count();
    assert_eq!(rows("by a resident copier (kernels launched: "), 2, "{said}");
    assert_eq!(rows("no resident copier"), 0, "{said}");
    // Without a launcher, rank 0's view alone.
    let view = text(&carrack(&["explain"], &[driver(), ASKED]));
    assert_eq!(view.matches("by a resident copier (kernels launched: ").count(), 1, "{view}");
}

#[test]
fn without_having_been_asked_for_no_copier_is_spoken_of() {
    let _watchdog = Watchdog::over("unasked");
    for asked in [None, Some(("CARRACK_GPU_COPIER", "0"))] {
        let vars: Vec<_> = [driver()].into_iter().chain(asked).collect();
        let told = told(&explain(2, "", &["--all", "--json"], &vars));
        assert!(!told.is_empty() && told.iter().all(|told| told.state.is_none()), "{told:#?}");
        assert!(told.iter().all(|told| !told.way.contains("resident copier")), "{told:#?}");
    }
}

#[test]
fn ranks_of_which_some_only_ask_do_not_wait_for_each_other_in_vain() {
    let _watchdog = Watchdog::over("some");
    if !are_there(3) {
        return;
    }
    for asks in 0..3 {
        let first = format!("[ $CARRACK_RANK = {asks} ] && export CARRACK_GPU_COPIER=1;");
        let told = told(&explain(
            3,
            &first,
            &["--all", "--json"],
            &[driver(), ("CARRACK_FAKE_GPUS", "3")],
        ));
        for Told { rank, gpu, state, .. } in &told {
            let wanted = match *rank {
                rank if rank != asks => None,
                rank if rank == *gpu as u64 => Some("on"),
                _ => Some("wanted"),
            };
            assert_eq!(state.as_deref(), wanted, "{told:#?}");
        }
    }
}

#[test]
fn ranks_that_share_a_gpu_have_no_copier_and_tell_who_wants_one_too() {
    let _watchdog = Watchdog::over("shared");
    if !are_real() {
        println!("skipped: no process claims simulated GPUs");
        return;
    }
    // One GPU, of those that the test may use.
    let mask = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let one = mask.split(',').next().map(str::trim).filter(|one| !one.is_empty()).unwrap_or("0");
    let vars = [driver(), ASKED, ("CUDA_VISIBLE_DEVICES", one)];
    assert_shared(&told(&explain(2, "", &["--all", "--json"], &vars)), 2);
    let said = text(&explain(2, "", &["--all"], &vars));
    assert_eq!(said.matches("; no resident copier: process ").count(), 2, "{said}");
    assert_shared(&told(&explain(3, "", &["--all", "--json"], &vars)), 3);
}

#[test]
fn where_there_is_no_gpu_the_view_says_why_and_the_copier_changes_nothing() {
    let _watchdog = Watchdog::over("no GPU");
    let views = |asked: &str| {
        text(&explain(
            2,
            "",
            &["--all", "--json"],
            &[("CARRACK_GPU", "none"), ("CARRACK_GPU_COPIER", asked)],
        ))
    };
    let with = views("1");
    assert!(with.contains("CARRACK_GPU=none"), "{with}");
    assert_eq!(with, views("0"));
}
