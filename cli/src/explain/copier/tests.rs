use super::*;
use carrack::bootstrap::InProcess;
use carrack::settings::{GpuChoice, Settings, SettingsBuilder};
use carrack_simulators::gpu::{FailAt, FakeConfig, FakeDriver, Which};
use std::time::{Duration, Instant};

fn built(settings: SettingsBuilder) -> Settings {
    settings.build_from_vars(std::iter::empty::<(String, String)>()).unwrap()
}

/// Starts a rank alone, with simulated GPUs of this configuration.
fn with(config: FakeConfig, asked: bool) -> (Runtime, FakeDriver) {
    let driver = FakeDriver::new(config).unwrap();
    let settings = built(Settings::builder().gpu(GpuChoice::None).gpu_copier(asked));
    let builder = Runtime::builder().settings(settings).gpu_driver(Arc::new(driver.clone()));
    (builder.bootstrap(Box::new(InProcess::alone().unwrap())).start().unwrap(), driver)
}

fn tried(runtime: &Runtime) -> Option<Tried> {
    try_out(runtime, &Meeting::of(&runtime.world()))
}

/// Returns the failure of a trial on the first GPU.
fn trouble(runtime: &Runtime, driver: &FakeDriver) -> Option<String> {
    let tried = tried(runtime).unwrap();
    assert_eq!(tried.gpu, driver.gpus()[0].info().uuid);
    tried.trouble
}

#[test]
fn a_copier_that_can_be_had_has_had_a_copy_and_nothing_else_is_left() {
    let (runtime, driver) = with(FakeConfig::devices(2), true);
    assert_eq!(trouble(&runtime, &driver), None);
    let [own, other] = [0, 1].map(|at| driver.gpus()[at].copier());
    assert!(matches!(own, CopierState::On { launches: 2.., copies: 1.. }), "{own:?}");
    assert_eq!(other, CopierState::Wanted, "it is not this rank's turn there");
    drop(runtime);
    // The copier's thread may hold the memory of its last copy a moment longer.
    let begun = Instant::now();
    while driver.counters().frees == 0 && begun.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    let counts = driver.counters();
    assert_eq!((counts.allocs, counts.frees), (1, 1));
}

#[test]
fn without_having_been_asked_for_no_gpu_is_used() {
    let (runtime, driver) = with(FakeConfig::devices(2), false);
    assert_eq!(tried(&runtime), None);
    assert_eq!((driver.counters().allocs, driver.gpus()[0].copier()), (0, CopierState::Off));
}

#[test]
fn without_a_gpu_there_is_nothing_to_try() {
    let (runtime, _) = with(FakeConfig::devices(0), true);
    assert_eq!(tried(&runtime), None);
}

#[test]
fn ranks_take_gpus_in_turn() {
    let settings = Settings::builder().gpu(GpuChoice::Fake).fake_gpus(2).gpu_copier(true);
    let ranks = Runtime::in_process_with(5, &built(settings)).unwrap();
    let ordinals = ranks.iter().map(|rank| own_gpu(rank).unwrap().info().ordinal);
    assert_eq!(ordinals.collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
}

#[test]
fn a_copier_that_is_refused_is_no_trouble_of_the_trials() {
    let (runtime, driver) = with(FakeConfig::default(), true);
    driver.faults().refuse_copiers(true);
    assert_eq!(trouble(&runtime, &driver), None);
    assert!(matches!(driver.gpus()[0].copier(), CopierState::Refused(_)));
}

#[test]
fn that_the_gpu_is_shared_is_the_copiers_reason_and_no_trouble_either() {
    let (runtime, driver) = with(FakeConfig::default(), true);
    driver.faults().share_copiers(Some(4711));
    assert_eq!(trouble(&runtime, &driver), None);
    assert!(
        matches!(driver.gpus()[0].copier(), CopierState::Refused(why) if why.starts_with("process \
            4711 wants"))
    );
}

#[test]
fn a_gpu_without_memory_is_told_of() {
    let (runtime, driver) = with(FakeConfig { memory: 2 << 20, ..FakeConfig::default() }, true);
    let _all = driver.gpus()[0].allocate(2 << 20, Flavour::Plain).unwrap();
    let why = trouble(&runtime, &driver).unwrap();
    assert!(why.starts_with("allocating memory: ") && why.contains("OUT_OF_MEMORY"), "{why}");
    assert_eq!(driver.gpus()[0].copier(), CopierState::Wanted);
}

#[test]
fn a_gpu_that_fails_to_copy_is_told_of_whenever_it_fails() {
    for at in [FailAt::Submit, FailAt::Event] {
        // The first writes what is then put, the third reads it.
        for (nth, what) in [(1, "writing to memory: "), (2, "a put: "), (3, "reading memory: ")] {
            let (runtime, driver) = with(FakeConfig::default(), true);
            // All of them are the engine's, which is at fault.
            driver.faults().refuse_copiers(true);
            driver.faults().fail_copies(at, Which::Nth(nth), 700);
            let why = trouble(&runtime, &driver).unwrap();
            assert!(why.starts_with(what) && why.contains("700"), "{at:?} {nth}: {why}");
        }
    }
}

#[test]
fn a_kernel_that_does_not_begin_is_not_waited_for_for_ever() {
    let (runtime, driver) = with(FakeConfig::default(), true);
    driver.faults().stall_copiers(true);
    let gpu = own_gpu(&runtime).unwrap();
    let trial = Trial::of(&runtime, &gpu, Duration::from_millis(20)).unwrap();
    trial.until_set_up().unwrap();
    let why = trial.until_had_and_launched_anew(1).unwrap_err();
    // Memory is freed when it has ended.
    driver.faults().stall_copiers(false);
    assert_eq!(why, "no kernel has taken a copy for 20ms");
}

#[test]
fn a_copy_that_does_not_end_is_not_waited_for_for_ever() {
    let (runtime, driver) = with(FakeConfig::default(), true);
    let gpu = own_gpu(&runtime).unwrap();
    let trial = Trial::of(&runtime, &gpu, Duration::from_millis(20)).unwrap();
    driver.faults().refuse_copiers(true);
    trial.put().unwrap();
    let held = driver.faults().hold_copies();
    let why = trial.put().unwrap_err();
    drop(held);
    assert!(why.starts_with("the end of a put: the condition was still false after 20ms"), "{why}");
}

#[test]
fn a_kernel_that_is_lost_is_the_copiers_reason_and_the_trials() {
    let (runtime, driver) = with(FakeConfig::default(), true);
    driver.faults().lose_copiers(true);
    let why = trouble(&runtime, &driver).unwrap();
    assert!(why.starts_with("a put: ") && why.contains("719"), "{why}");
    assert!(
        matches!(driver.gpus()[0].copier(), CopierState::Refused(why) if why.contains("without \
            having answered"))
    );
}

#[test]
fn trouble_is_told_of_the_gpu_that_had_it_where_a_copier_is_spoken_of() {
    let [own, other] = [3, 4].map(|first| GpuUuid([first; 16]));
    let row = |gpu, copier, why: Option<&str>| KindPath {
        memory: "device".into(),
        way: "some".into(),
        why: why.map(str::to_owned),
        gpu,
        copier,
    };
    let told = |trouble: Option<&str>, mut row: KindPath| {
        Tried { gpu: own, trouble: trouble.map(str::to_owned) }.tell(&mut row);
        row.why
    };
    let wanted = || Some(CopierState::Wanted);
    assert_eq!(
        told(Some("bad"), row(Some(own), wanted(), None)).unwrap(),
        "trying the copier: bad"
    );
    let both = told(Some("bad"), row(Some(own), wanted(), Some("first")));
    assert_eq!(both.unwrap(), "first; trying the copier: bad");
    for (trouble, row) in [
        (None, row(Some(own), wanted(), None)),
        (Some("bad"), row(Some(other), wanted(), None)),
        (Some("bad"), row(Some(own), None, None)),
        (Some("bad"), row(None, None, None)),
    ] {
        assert_eq!(told(trouble, row), None);
    }
}
