//! Trials that show if a read-only device is kept from writing, in processes of their own. On
//! mocked drivers: some that keep it, and some that do not.

use crate::mock::{library as mock, open, path};
use carrack_transports::gpu::{Driver, Gpu, GpuError};
use carrack_transports::trial;
use std::sync::Arc;

/// Not a test by itself: the role of a process that was started for a trial.
#[test]
fn answers_in_its_own_process() {
    if std::env::var_os("CARRACK_TRIAL").is_some() {
        trial::answer();
    }
}

fn gpu(kind: u32) -> Arc<dyn Gpu> {
    let program = std::env::current_exe().unwrap();
    trial::by(
        program,
        ["--exact", "cuda_mock::readers::answers_in_its_own_process", "--nocapture"],
    );
    let library = mock(&format!("readers-{kind}"), &format!("-DREADERS={kind}"));
    open(&library).devices().unwrap().remove(0)
}

/// Checks that the GPU is kept from writing. The reader is the memory's own device, since a mock
/// has only one.
fn verdict(gpu: &Arc<dyn Gpu>) -> Result<(), GpuError> {
    gpu.keeps_from_writing(gpu.info().uuid)
}

#[test]
fn a_driver_that_keeps_copies_and_kernels_out_is_believed_for_good() {
    let gpu = gpu(1);
    assert_eq!(verdict(&gpu), Ok(()));
    // The answer is remembered: no further library is built and no process started.
    let library = path("readers-1");
    std::fs::remove_file(library).unwrap();
    assert_eq!(verdict(&gpu), Ok(()));
}

#[test]
fn a_driver_that_lets_either_of_them_write_is_refused_by_the_sort_of_it() {
    for (kind, sort) in [(2, "a copy of its"), (3, "a kernel of its"), (7, "a kernel of its")] {
        let gpu = gpu(kind);
        for _ in 0..2 {
            let why = verdict(&gpu).unwrap_err();
            assert!(
                why.code == 801 && why.hint.contains(&format!("{sort} writes there all the same")),
                "{why}"
            );
        }
    }
}

#[test]
fn an_attempt_that_shows_nothing_is_told_with_its_reason_and_made_again() {
    let cases = [
        (4, "800"),
        (5, "signal: 6"),
        (6, "has not written to memory of its own"),
        (8, "OUT_OF_MEMORY"),
    ];
    for (kind, reason) in cases {
        let why = verdict(&gpu(kind)).unwrap_err();
        assert!(why.code == 801 && why.hint.contains(reason), "{kind}: {why}");
    }
}
