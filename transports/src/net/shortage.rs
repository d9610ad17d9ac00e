//! A shortage of this process for which connections wait.

use crate::stderr;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// The last shortage of a device, until a connection is made.
#[derive(Debug, Default)]
pub struct Shortage(AtomicI32);

impl Shortage {
    /// Notes a call that failed for a shortage. Logs it, once until the end of the shortage.
    pub fn note(&self, error: Errno) {
        // A full queue or socket of a peer is no shortage of this process.
        if error != Errno::AGAIN && self.0.swap(error.raw_os_error(), Ordering::Relaxed) == 0 {
            tell("connections", &describe(error));
        }
    }

    /// Ends it, since a connection was made.
    pub fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Describes it, if there is one.
    pub fn describe(&self) -> Option<String> {
        let error = self.0.load(Ordering::Relaxed);
        (error != 0).then(|| describe(Errno::from_raw_os_error(error)))
    }
}

/// Tells the user what waits for something that this process lacks. The log gets each report, and
/// stderr the first of the process, because few programs show their log.
pub fn tell(what: &str, why: &str) {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        stderr::say(format_args!("{what} wait until this process has what it lacks: {why}"));
    });
    tracing::warn!(why, "{what} wait until this process has what it lacks");
}

/// Describes a failed call, with the limit that it has met, and the remedy.
pub fn describe(error: Errno) -> String {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    match error {
        Errno::MFILE => format!("{error}: the limit is {limit}, raise it with `ulimit -n`"),
        // All processes of a user together may have as many descriptors in flight as one may have
        // open, unless the user has `CAP_SYS_RESOURCE`. Many ranks that start at once can reach
        // that limit.
        Errno::TOOMANYREFS => format!(
            "{error}: the limit of open files that are in flight between this user's processes is \
            {limit}, raise it with `ulimit -n`"
        ),
        Errno::NFILE => format!("{error}: raise the system's limit, fs.file-max"),
        error => error.to_string(),
    }
}
