//! The `CARRACK_*` variables that were found.

use std::collections::BTreeMap;

use super::error::SettingFault;
use super::table::{RESERVED, VARIABLES};

const PREFIX: &str = "CARRACK_";

/// Least similarity (Jaro-Winkler, 0 to 1) at which a known variable is offered for an unknown one.
/// At 0.75 a slip or a plural is caught, and two names that share only a few letters are not.
const LIKE_ENOUGH: f64 = 0.75;

/// Variables that begin with `CARRACK_` and that no setting has taken yet.
#[derive(Debug, Default)]
pub(super) struct Variables {
    left: BTreeMap<String, String>,
}

impl Variables {
    /// Returns the variables of this process. A name or value that is not Unicode gets U+FFFD in
    /// it, which is in no variable's name and no number. It is then reported as any other
    /// misspelling.
    pub(super) fn of_this_process() -> Self {
        std::env::vars_os()
            .map(|(name, value)| {
                (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
            })
            .collect()
    }

    /// Takes the value of a variable, which then counts as known.
    pub(super) fn take(&mut self, variable: &str) -> Option<String> {
        self.left.remove(variable)
    }

    /// Returns the variables that no setting has taken, without those that other programs read.
    pub(super) fn unknown(self) -> impl Iterator<Item = SettingFault> {
        self.left
            .into_keys()
            .filter(|found| RESERVED.iter().all(|reserved| reserved.variable != found))
            .map(|found| SettingFault::Unknown { nearest: nearest(&found), variable: found })
    }
}

impl FromIterator<(String, String)> for Variables {
    /// Collects variables; of two with one name the last one holds.
    fn from_iter<I: IntoIterator<Item = (String, String)>>(vars: I) -> Self {
        Self { left: vars.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect() }
    }
}

/// Returns the known variable most like `found`, if one is like enough.
fn nearest(found: &str) -> Option<&'static str> {
    // The prefix is common to all, and would make any two alike.
    let found = found.trim_start_matches(PREFIX).to_ascii_uppercase();
    VARIABLES
        .iter()
        .copied()
        .chain(RESERVED.iter().map(|reserved| reserved.variable))
        .map(|known| (strsim::jaro_winkler(&found, known.trim_start_matches(PREFIX)), known))
        .filter(|(likeness, _)| *likeness >= LIKE_ENOUGH)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        ] {
            assert_eq!(nearest(found), Some(meant), "{found}");
        }
    }

    #[test]
    fn a_variable_that_is_like_no_other_is_met_with_none() {
        for found in ["CARRACK_XYZZY", "CARRACK_", "CARRACK_HOME_WIDTH"] {
            assert_eq!(nearest(found), None, "{found}");
        }
    }

    #[test]
    fn variables_of_other_programs_are_not_looked_at() {
        let variables: Variables =
            [("PATH", "/bin"), ("XCARRACK_RANK", "1"), ("carrack_rank", "1")]
                .map(|(n, v)| (n.into(), v.into()))
                .into_iter()
                .collect();
        assert_eq!(variables.unknown().count(), 0);
    }
}
