//! How users' memory is registered with a NIC, and what becomes of registrations that end, over
//! simulated NICs of which each rank has one.
//!
//! | module | one idea |
//! |---|---|
//! | `registering` | pages on demand, writes in any order, thread domains: where the NIC has them, and where not |
//! | `ending` | registrations that end in the midst of puts and gets |
//! | `again` | what a NIC asks for a second time, because the answer was lost |
//! | `strangers` | names of regions of another job, of a rank that started again, of one that is gone |

mod again;
mod ending;
mod registering;
mod strangers;

use crate::support::{Job, OverSimulatedNic, built, connect, unstarted};
use carrack::Runtime;
use carrack::settings::SettingsBuilder;
use carrack::transports::verbs::Options;
use carrack_simulators::nic::{Config, SimulatedNic};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// NICs on a network that nobody else is on.
fn nics(configs: impl IntoIterator<Item = Config>) -> Vec<Arc<SimulatedNic>> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let fabric = format!("memory {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let nic =
        |config| SimulatedNic::new(Config { fabric: Some(fabric.clone()), ..config }).unwrap();
    configs.into_iter().map(|config| Arc::new(nic(config))).collect()
}

/// A rank for each NIC, whose links are up.
fn ranks(nics: &[Arc<SimulatedNic>], options: &Options) -> Vec<Runtime> {
    let settings = built(settings());
    let options = Options { packet_size: settings.packet_size(), ..options.clone() };
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

/// What is lost is asked for again after a millisecond (4.096 µs times 2 to the power of 8).
fn soon_again() -> Options {
    Options { timeout: 8, retries: 7, ..Options::default() }
}
