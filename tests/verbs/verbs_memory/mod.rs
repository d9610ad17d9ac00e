//! Registration of users' memory with a NIC, and ended registrations, over simulated NICs, of which
//! each rank has one.
//!
//! | module | one idea |
//! |---|---|
//! | `registering` | pages on demand, relaxed ordering, thread domains: with and without them |
//! | `ending` | registrations that end during puts and gets |
//! | `again` | reads that a NIC repeats, because the answer was lost |
//! | `foreign_keys` | remote keys of another job, of a rank that started again or has ended |

mod again;
mod ending;
mod foreign_keys;
mod registering;

use crate::support::{Job, OverSimulatedNic, built, connect, unstarted};
use carrack::Runtime;
use carrack::settings::SettingsBuilder;
use carrack_simulators::nic::{Config, SimulatedNic};
use carrack_transports::verbs::VerbsOptions;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Creates a NIC for each configuration, on a network of their own.
fn nics(configs: impl IntoIterator<Item = Config>) -> Vec<Arc<SimulatedNic>> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let fabric = format!("memory {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let nic =
        |config| SimulatedNic::new(Config { fabric: Some(fabric.clone()), ..config }).unwrap();
    configs.into_iter().map(|config| Arc::new(nic(config))).collect()
}

/// Starts a rank for each NIC, whose links are up.
fn ranks(nics: &[Arc<SimulatedNic>], options: &VerbsOptions) -> Vec<Runtime> {
    let settings = built(settings());
    let options = VerbsOptions { packet_size: settings.packet_size(), ..options.clone() };
    let ranks = unstarted(u32::try_from(nics.len()).unwrap()).into_iter().zip(nics);
    let start = |(bootstrap, nic): (_, &Arc<SimulatedNic>)| {
        let builder = Runtime::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap));
        builder.transport(Box::new(nic.transport(options.clone()))).start().unwrap()
    };
    let ranks: Vec<_> = ranks.map(start).collect();
    connect(&ranks);
    ranks
}

fn settings() -> SettingsBuilder {
    OverSimulatedNic::settings()
}

/// A NIC loses one of this number of packets. A connection ends when eight tries of a request in a
/// row lose it or its answer: of 3e9 requests that is one; with 10 here, one of 6e5.
const ONE_IN: u32 = 30;

/// Returns options with which a NIC repeats a lost request after a millisecond (4.096 µs times 2
/// to the power of 8).
fn soon_again() -> VerbsOptions {
    VerbsOptions { timeout: 8, retries: 7, ..VerbsOptions::default() }
}
