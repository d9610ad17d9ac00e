//! The variables of torchrun and of Carrack.

#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

use carrack_transports::stderr;

use super::key::{JobKey, LEAST_SECRET};
use crate::bootstrap::MAX_JOB;
use crate::bootstrap::error::BootstrapError;
use crate::settings::Settings;

/// The rank of this process.
pub const RANK: &str = "RANK";
/// The number of ranks.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// The number of this process among those of its node; the default is `RANK`.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of the job's processes on its node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// The machine of rank 0, by name or address.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// A port of that machine, which the agent's own store listens on.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// The secret of the job.
pub const SECRET: &str = "CARRACK_JOB_SECRET";
/// Torchrun's name of the job.
pub const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Number of restarts by torchrun.
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";

/// Distance from the agent's port to rank 0's. It exceeds the numbers by which jobs on one machine
/// usually differ. From the usual 29500 it leads below the ports that the kernel chooses.
pub const PORT_OFFSET: u16 = 1000;

/// The first port that needs no privileges.
const FIRST_PORT: u16 = 1024;

/// The rank of this process, and the addresses of rank 0.
#[derive(Clone, Debug)]
pub struct Invitation {
    /// The rank of this process.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// The number of this process among those of its node, from 0.
    pub place_on_node: u32,
    /// The machine of rank 0, by names or addresses, which are tried in turn.
    pub hosts: Vec<String>,
    /// The port on which rank 0 listens.
    pub port: u16,
    /// Key of the job.
    pub key: JobKey,
    /// Number of restarts of the job.
    pub restart: u32,
    /// Time for which the ranks wait for each other.
    pub patience: Duration,
}

impl fmt::Display for Invitation {
    /// Writes the addresses of rank 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with_port = |host: &String| match host.contains(':') {
            true => format!("[{host}]:{}", self.port),
            false => format!("{host}:{}", self.port),
        };
        f.write_str(&self.hosts.iter().map(with_port).collect::<Vec<_>>().join(", "))
    }
}

/// Returns the port for an agent's port: [`PORT_OFFSET`] above it, and beyond 65535 counted on from
/// 1024.
pub fn port_for_master(master: u16) -> u16 {
    master.checked_add(PORT_OFFSET).unwrap_or_else(|| {
        // It is at most PORT_OFFSET beyond, so there is room.
        master.wrapping_add(PORT_OFFSET) + FIRST_PORT
    })
}

impl Invitation {
    /// Returns the invitation in these variables, or `None` without `RANK` and `WORLD_SIZE`.
    pub(super) fn read(
        variable: impl Fn(&str) -> Option<String>,
        settings: &Settings,
    ) -> Result<Option<Self>, BootstrapError> {
        let (rank, size) = match (variable(RANK), variable(WORLD_SIZE)) {
            (None, None) => return Ok(None),
            (Some(rank), Some(size)) => (number(RANK, &rank)?, number(WORLD_SIZE, &size)?),
            (None, Some(_)) => return Err(missing(RANK, WORLD_SIZE)),
            (Some(_), None) => return Err(missing(WORLD_SIZE, RANK)),
        };
        if !(1..=MAX_JOB).contains(&size) {
            return Err(wrong(WORLD_SIZE, format!("is {size}, not in 1..={MAX_JOB}")));
        }
        if rank >= size {
            return Err(wrong(RANK, format!("is {rank}, not below WORLD_SIZE={size}")));
        }
        let place_on_node = place_on_node(&variable, rank, size)?;
        let host = variable(MASTER_ADDR).ok_or_else(|| missing(MASTER_ADDR, RANK))?;
        let host = host.trim().trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() {
            return Err(wrong(MASTER_ADDR, "is empty".into()));
        }
        let master = variable(MASTER_PORT).ok_or_else(|| missing(MASTER_PORT, RANK))?;
        let master = match u16::try_from(number(MASTER_PORT, &master)?) {
            Ok(port) if port > 0 => port,
            _ => return Err(wrong(MASTER_PORT, format!("is {master:?}, which is no port"))),
        };
        let port = chosen_port(settings).unwrap_or_else(|| port_for_master(master));
        let restart = variable(RESTARTS).and_then(|text| text.parse().ok()).unwrap_or(0);
        let unkeyed = Self {
            rank,
            size,
            place_on_node,
            hosts: vec![host],
            port,
            key: JobKey::without_secret(master, variable(RUN_ID).as_deref()),
            restart,
            patience: patience(settings),
        };
        unkeyed.with_users_secret(variable(SECRET), settings).map(Some)
    }

    /// Takes the key from the user's secret. Without one the key stays, and rank 0 warns, once for
    /// the job.
    pub(in crate::bootstrap) fn with_users_secret(
        mut self,
        secret: Option<String>,
        settings: &Settings,
    ) -> Result<Self, BootstrapError> {
        match secret {
            Some(secret) if secret.len() < LEAST_SECRET => {
                let problem =
                    format!("has {} bytes; it needs at least {LEAST_SECRET}", secret.len());
                return Err(wrong(SECRET, problem));
            }
            Some(secret) => self.key = JobKey::of_secret(secret.as_bytes()),
            None if self.size > 1 && settings.require_secret() => {
                return Err(BootstrapError::NoSecret);
            }
            None if self.size > 1 && self.rank == 0 => {
                let warning = format!(
                    "no CARRACK_JOB_SECRET: any process that reaches port {} can join the job; \
                    set it to the same {LEAST_SECRET} bytes or more on all ranks",
                    self.port
                );
                // The warning also goes to stderr, because few programs show their log.
                stderr::say(format_args!("{warning}"));
                tracing::warn!("{warning}");
            }
            None => {}
        }
        Ok(self)
    }
}

/// Returns the port that the user has chosen for rank 0.
pub(in crate::bootstrap) fn chosen_port(settings: &Settings) -> Option<u16> {
    u16::try_from(settings.port()).ok().filter(|port| *port > 0)
}

/// Returns the time for which the ranks wait for each other.
pub(in crate::bootstrap) fn patience(settings: &Settings) -> Duration {
    Duration::from_secs(settings.bootstrap_timeout() as u64)
}

/// Returns the place in `LOCAL_RANK`. A launcher other than torchrun need not set it, unless it
/// sets `LOCAL_WORLD_SIZE`.
fn place_on_node(
    variable: &impl Fn(&str) -> Option<String>,
    rank: u32,
    size: u32,
) -> Result<u32, BootstrapError> {
    let count =
        variable(LOCAL_WORLD_SIZE).map(|count| number(LOCAL_WORLD_SIZE, &count)).transpose()?;
    if let Some(count) = count
        && !(1..=size).contains(&count)
    {
        return Err(wrong(
            LOCAL_WORLD_SIZE,
            format!("is {count}, not in 1..={size}, which is WORLD_SIZE"),
        ));
    }
    let place = match (variable(LOCAL_RANK), count) {
        (Some(place), _) => number(LOCAL_RANK, &place)?,
        (None, Some(_)) => return Err(missing(LOCAL_RANK, LOCAL_WORLD_SIZE)),
        (None, None) => return Ok(rank),
    };
    let (limit, whose) = count.map_or((size, WORLD_SIZE), |count| (count, LOCAL_WORLD_SIZE));
    if place >= limit {
        return Err(wrong(LOCAL_RANK, format!("is {place}, not below {whose}={limit}")));
    }
    Ok(place)
}

fn missing(name: &'static str, given: &str) -> BootstrapError {
    wrong(name, format!("is not set, although {given} is"))
}

fn wrong(name: &'static str, problem: String) -> BootstrapError {
    BootstrapError::Environment { name, problem }
}

fn number(name: &'static str, text: &str) -> Result<u32, BootstrapError> {
    match text.parse() {
        Ok(number) if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(number),
        _ => Err(wrong(name, format!("is {text:?}, which is not a number"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(&str, &str); 4] =
        [(RANK, "1"), (WORLD_SIZE, "2"), (MASTER_ADDR, "node7"), (MASTER_PORT, "29500")];

    fn read(changes: &[(&str, Option<&str>)]) -> Result<Option<Invitation>, BootstrapError> {
        let settings = changes.iter().filter(|(name, _)| *name == "CARRACK_PORT");
        let settings = settings.filter_map(|(name, value)| Some((*name, (*value)?)));
        let settings = Settings::from_vars(settings).unwrap();
        let variable = |wanted: &str| match changes.iter().find(|(name, _)| *name == wanted) {
            Some((_, value)) => value.map(str::to_owned),
            None => {
                ALL.iter().find(|(name, _)| *name == wanted).map(|(_, value)| (*value).to_owned())
            }
        };
        Invitation::read(variable, &settings)
    }

    #[test]
    fn torchruns_variables_are_an_invitation() {
        let invitation = read(&[]).unwrap().unwrap();
        assert_eq!(
            (invitation.rank, invitation.size, invitation.to_string().as_str()),
            (1, 2, "node7:30500")
        );
        assert_eq!(invitation.key, JobKey::without_secret(29500, None));
        assert_eq!(invitation.patience, Duration::from_secs(300));
        assert!(read(&[(RANK, None), (WORLD_SIZE, None)]).unwrap().is_none());
        let of_run = read(&[(RUN_ID, Some("x"))]).unwrap().unwrap();
        assert_ne!(of_run.key, invitation.key);
        for host in ["fe80::1", "[fe80::1]"] {
            assert_eq!(
                read(&[(MASTER_ADDR, Some(host))]).unwrap().unwrap().to_string(),
                "[fe80::1]:30500"
            );
        }
    }

    #[test]
    fn our_port_follows_from_the_agents_and_never_needs_privileges() {
        for (master, ours) in
            [(29500, 30500), (1, 1001), (64535, 65535), (64536, 1024), (65535, 2023)]
        {
            assert_eq!(port_for_master(master), ours, "{master}");
        }
        assert_eq!(read(&[("CARRACK_PORT", Some("7000"))]).unwrap().unwrap().port, 7000);
    }

    #[test]
    fn what_is_missing_or_wrong_is_an_error_that_names_the_variable() {
        let cases = [
            (RANK, None),
            (WORLD_SIZE, None),
            (MASTER_ADDR, None),
            (MASTER_PORT, None),
            (RANK, Some("2")),
            (RANK, Some("-1")),
            (RANK, Some("+1")),
            (RANK, Some("one")),
            (WORLD_SIZE, Some("0")),
            (WORLD_SIZE, Some("16385")),
            (LOCAL_RANK, Some("2")),
            (LOCAL_RANK, Some("-1")),
            (LOCAL_RANK, Some("")),
            (LOCAL_WORLD_SIZE, Some("0")),
            (LOCAL_WORLD_SIZE, Some("3")),
            (LOCAL_WORLD_SIZE, Some("all")),
            (MASTER_ADDR, Some(" ")),
            (MASTER_PORT, Some("0")),
            (MASTER_PORT, Some("65536")),
            (MASTER_PORT, Some("http")),
            (SECRET, Some("fifteen bytes..")),
        ];
        for (name, value) in cases {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(
                matches!(&error, BootstrapError::Environment { name: named, .. } if *named == name),
                "{name}={value:?}: {error}"
            );
            assert!(!error.to_string().contains("carrack run"), "{error}");
        }
    }

    #[test]
    fn the_place_on_the_node_is_what_local_rank_says_and_else_the_rank() {
        let place =
            |changes: &[(&str, Option<&str>)]| read(changes).map(|job| job.unwrap().place_on_node);
        let (rank_6_of_9, local) =
            ([(RANK, Some("6")), (WORLD_SIZE, Some("9"))], (LOCAL_RANK, Some("2")));
        let count = |text| (LOCAL_WORLD_SIZE, Some(text));
        let with = |others: &[_]| place(&[&rank_6_of_9, others].concat());
        assert_eq!(with(&[]).unwrap(), 6);
        assert_eq!(with(&[local]).unwrap(), 2);
        assert_eq!(with(&[local, count("3")]).unwrap(), 2);
        let error = |others: &[_]| with(others).unwrap_err().to_string();
        let too_many = error(&[local, count("2")]);
        assert!(too_many.contains("LOCAL_RANK is 2, not below LOCAL_WORLD_SIZE=2"), "{too_many}");
        let alone = error(&[count("3")]);
        assert!(alone.contains("LOCAL_RANK is not set, although LOCAL_WORLD_SIZE is"), "{alone}");
    }

    #[test]
    fn a_secret_is_the_key_whatever_the_rest_says() {
        let secret = Some("sixteen bytes...");
        let one = read(&[(SECRET, secret)]).unwrap().unwrap();
        let other = read(&[(SECRET, secret), (MASTER_PORT, Some("1")), (RUN_ID, Some("x"))])
            .unwrap()
            .unwrap();
        assert_eq!(one.key, other.key);
        assert!(!format!("{one:?}").contains("sixteen"), "{one:?}");
    }
}
