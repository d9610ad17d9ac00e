//! `carrack explain` in processes whose driver is the mock's library. Two that want a copier on
//! one GPU find each other by their claims, as with a real driver. Other tests have the driver
//! refuse.

use crate::support::explained::{Told, assert_shared, carrack, explain, text, told};
use crate::support::mock;
use std::process::Output;
use std::sync::OnceLock;

/// Returns the folder with a library of the name under which drivers are looked for, whose GPUs no
/// other run of this program has.
fn folder() -> &'static str {
    static FOLDER: OnceLock<String> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // From 3 on, the mock serves processes that the test cannot reach into.
        let define = format!("-DCOPIER={}", 3 + std::process::id());
        let library = mock::library("explain-claims", &define);
        let folder = library.parent().unwrap();
        std::fs::rename(&library, folder.join("libcuda.so.1")).unwrap();
        folder.to_str().unwrap().to_owned()
    })
}

const ASKED: (&str, &str) = ("CARRACK_GPU_COPIER", "1");

/// Runs ranks on the GPU of this number, or on those that `first` says. Tests of this program have
/// GPUs of their own.
fn on(gpu: &str, ranks: u32, first: &str, args: &[&str], vars: &[(&str, &str)]) -> Output {
    let driver = [("LD_LIBRARY_PATH", folder()), ("CARRACK_GPU", "cuda"), ("MOCK_GPU", gpu)];
    explain(ranks, first, args, &[&driver, vars].concat())
}

const JSON: &[&str] = &["--all", "--json"];

#[test]
fn ranks_that_share_a_gpu_have_no_copier_and_tell_who_wants_one_too() {
    for ranks in [2, 2, 2, 3, 5] {
        assert_shared(&told(&on("1", ranks, "", JSON, &[ASKED])), ranks.into());
    }
    let said = text(&on("1", 2, "", &["--all"], &[ASKED]));
    assert_eq!(said.matches("; no resident copier: process ").count(), 2, "{said}");
}

#[test]
fn ranks_with_a_gpu_each_have_one_each() {
    let told = told(&on("", 3, "MOCK_GPU=1$CARRACK_RANK;", JSON, &[ASKED]));
    assert_eq!(told.len(), 6, "{told:#?}");
    let is_on = |told: &Told| told.state.as_deref() == Some("on") && told.refused.is_none();
    assert!(
        told.iter().all(|told| is_on(told) && !told.why.contains("trying the copier")),
        "{told:#?}"
    );
}

#[test]
fn of_three_ranks_two_share_a_gpu_and_the_third_has_a_copier() {
    for alone in 0..3 {
        let first = format!("[ $CARRACK_RANK = {alone} ] && MOCK_GPU=21;");
        for Told { rank, state, .. } in told(&on("20", 3, &first, JSON, &[ASKED])) {
            assert_eq!(
                state.as_deref(),
                Some(if rank == alone { "on" } else { "refused" }),
                "rank {rank}"
            );
        }
    }
}

#[test]
fn the_only_rank_that_asks_on_a_shared_gpu_has_a_copier_and_the_others_do_not_wait() {
    for asks in 0..2 {
        let first = format!("[ $CARRACK_RANK = {asks} ] && export CARRACK_GPU_COPIER=1;");
        for Told { rank, state, .. } in told(&on("3", 2, &first, JSON, &[])) {
            assert_eq!(state.as_deref(), (rank == asks).then_some("on"), "rank {rank}");
        }
    }
}

#[test]
fn what_the_driver_refuses_is_the_copiers_reason() {
    for (order, hint) in
        [("no jit", "UNSUPPORTED_PTX_VERSION"), ("exclusive", "nvidia-smi -c DEFAULT")]
    {
        // On one GPU, a rank would also find the claim of the other, whose kernel is being loaded.
        let told =
            told(&on("", 2, "MOCK_GPU=5$CARRACK_RANK;", JSON, &[ASKED, ("MOCK_ORDER", order)]));
        assert_eq!(told.len(), 2);
        for Told { state, refused, way, why, .. } in told {
            assert_eq!(state.as_deref(), Some("refused"), "{order}");
            assert!(refused.unwrap().contains(hint) && way.contains(hint), "{order}: {way}");
            assert!(!why.contains("trying the copier"), "{order}: {why}");
        }
    }
}

#[test]
fn a_gpu_that_has_no_memory_or_fails_to_copy_is_told_of_and_the_view_is_whole() {
    let each = "MOCK_GPU=3$CARRACK_RANK;";
    for (order, state, hints) in [
        ("no memory", "wanted", ["trying the copier: allocating memory: ", "OUT_OF_MEMORY"]),
        ("no copies", "on", ["trying the copier: a put: ", "700"]),
    ] {
        let vars = [ASKED, ("MOCK_ORDER", order)];
        let told = told(&on("", 2, each, JSON, &vars));
        assert_eq!(told.len(), 2, "{order}");
        for told in told {
            assert_eq!(told.state.as_deref(), Some(state), "{order}");
            assert!(hints.iter().all(|hint| told.why.contains(hint)), "{order}: {}", told.why);
        }
        let said = text(&on("", 2, each, &[], &vars));
        assert!(
            said.contains("rank 0 to rank 1, device 0: shm") && said.contains(hints[0]),
            "{order}: {said}"
        );
    }
}

#[test]
fn a_gpu_is_used_only_where_the_copier_was_asked_for() {
    // Where nothing is mapped, nothing else is done with the GPU.
    let used = |asked| {
        let vars =
            [("CARRACK_GPU_COPIER", asked), ("CARRACK_GPU_IPC", "off"), ("MOCK_ORDER", "tell")];
        let output = on("", 2, "MOCK_GPU=4$CARRACK_RANK;", &["--all"], &vars);
        text(&output);
        let complaints = String::from_utf8(output.stderr).unwrap();
        ["mock: 0 contexts", "mock: 1 contexts"].map(|what| complaints.matches(what).count())
    };
    assert_eq!((used("0"), used("1")), ([2, 0], [0, 2]));
}

#[test]
fn a_driver_that_is_a_stub_is_told_of_and_the_copier_changes_nothing() {
    let library = mock::library("explain-stub", "-DSTUB");
    let folder = library.parent().unwrap();
    std::fs::rename(&library, folder.join("libcuda.so.1")).unwrap();
    let vars = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("CARRACK_GPU", "auto"), ASKED];
    let said = text(&carrack(&["explain"], &vars));
    assert!(
        said.contains("rank 0 to rank 1, device 0: shm")
            && said.contains("from device memory: none"),
        "{said}"
    );
    assert!(
        said.contains("is the CUDA toolkit's stub") && !said.contains("resident copier"),
        "{said}"
    );
}
