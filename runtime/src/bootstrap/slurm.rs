//! Slurm without PMI: the variables of a task of `srun` are the invitation.
//!
//! Rank 0 is on the first node of the step. Its port is made from the numbers of job and step, so
//! that all ranks know it and steps of one node differ. The user's `CARRACK_JOB_SECRET` is the key,
//! as with [torchrun's variables](super::tcp).

#![forbid(unsafe_code)]

use super::error::BootstrapError;
use super::exchange::Seat;
use super::tcp::{Invitation, JobKey, variables};
use crate::settings::Settings;

/// The name in errors.
pub(super) const SLURM: &str = "Slurm";

/// The variable with the number of ranks, which only tasks of `srun` have.
pub(super) const SIZE: &str = "SLURM_STEP_NUM_TASKS";
const RANK: &str = "SLURM_PROCID";
const PLACE: &str = "SLURM_LOCALID";
const NODE: &str = "SLURM_NODEID";
const NODES: &str = "SLURM_STEP_NUM_NODES";
const LIST: &str = "SLURM_STEP_NODELIST";
const JOB: &str = "SLURM_JOB_ID";
const STEP: &str = "SLURM_STEP_ID";
const RESTARTS: &str = "SLURM_RESTART_COUNT";

/// The ports of steps, below those that the kernel chooses.
const FIRST_PORT: u32 = 10_000;
const PORTS: u32 = 20_000;

/// Returns the invitation in the variables of a task.
pub(super) fn invitation(
    variable: impl Fn(&str) -> Option<String>,
    settings: &Settings,
) -> Result<Invitation, BootstrapError> {
    let failed = |why| BootstrapError::Exchange { launcher: SLURM, why };
    let told = |name: &str, problem: String| failed(format!("{name} {problem}"));
    let text = |name: &str| variable(name).ok_or_else(|| told(name, "is not set".into()));
    let number = |name: &str| {
        let text = text(name)?;
        text.parse::<u32>().map_err(|_| told(name, format!("is {text:?}, which is not a number")))
    };
    let (rank, size, place_on_node) = (number(RANK)?, number(SIZE)?, number(PLACE)?);
    if let Some(why) = (Seat { rank, size, place_on_node }).fault() {
        return Err(failed(why));
    }
    let node = number(NODE)?;
    if rank == 0 && node != 0 {
        let problem = format!("is {node} at rank 0, which must be on the first node of the step");
        return Err(told(NODE, problem));
    }
    // All ranks of one node need no name, and no other machine reaches them.
    let host = if variable(NODES).is_some_and(|nodes| nodes == "1") {
        "127.0.0.1".into()
    } else {
        let list = text(LIST)?;
        first_host(&list)
            .ok_or_else(|| told(LIST, format!("is {list:?}, which is not a list of nodes")))?
    };
    let (job, step) = (number(JOB)?, number(STEP)?);
    let port = variables::chosen_port(settings).unwrap_or_else(|| port_of(job, step));
    let invitation = Invitation {
        rank,
        size,
        place_on_node,
        hosts: vec![host],
        port,
        key: JobKey::without_secret(port, Some(&format!("slurm {job}.{step}"))),
        restart: number(RESTARTS).unwrap_or(0),
        patience: variables::patience(settings),
    };
    invitation.with_users_secret(variable(variables::SECRET), settings)
}

/// Returns the port of a step. Steps of a job follow each other, and jobs are far apart.
fn port_of(job: u32, step: u32) -> u16 {
    let spread = job.wrapping_mul(7919).wrapping_add(step) % PORTS;
    u16::try_from(FIRST_PORT + spread).unwrap_or(u16::MAX)
}

/// Returns the first host of Slurm's list of nodes: of `n[08-11,20],m1` it is `n08`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ',', ']']).unwrap_or(rest.len());
        host += &rest[..end];
        match rest[end..].strip_prefix('[') {
            Some(ranges) => {
                let (ranges, more) = ranges.split_once(']')?;
                let first = ranges.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                host += first;
                rest = more;
            }
            None if rest[end..].starts_with(']') => return None,
            None => break,
        }
    }
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    (!host.is_empty() && host.bytes().all(is_name)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, first) in [
            ("n[0-1,5]", "n0"),
            ("n0", "n0"),
            ("a01-b,c[001-010]", "a01-b"),
            ("c[001-010],a01-b", "c001"),
            ("c[7,9-11].cluster.example", "c7.cluster.example"),
            ("rack[2-3]node[08-11]", "rack2node08"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for broken in ["", ",n1", "n[", "n[]", "n[a-b]", "n]1", "n[-1]", "n[1", "a b", "ä[1-2]"] {
            assert_eq!(first_host(broken), None, "{broken}");
        }
    }

    proptest! {
        #[test]
        fn any_list_has_a_first_host_or_none(list in "[a-c0-9\\[\\],ä-]{0,20}") {
            if let Some(host) = first_host(&list) {
                prop_assert!(!host.is_empty() && !host.contains(['[', ']', ',']));
            }
        }
    }

    fn read(changes: &[(&str, &str)], settings: &[(&str, &str)]) -> Result<Invitation, String> {
        let all = [
            (RANK, "3"),
            (SIZE, "4"),
            (PLACE, "1"),
            (NODE, "1"),
            (NODES, "2"),
            (LIST, "n[0-1]"),
            (JOB, "3"),
            (STEP, "0"),
        ];
        let variable = |wanted: &str| {
            let found = changes.iter().chain(&all).find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned()).filter(|value| value != "unset")
        };
        let settings = Settings::from_vars(settings.iter().copied()).unwrap();
        invitation(variable, &settings).map_err(|error| error.to_string())
    }

    #[test]
    fn a_task_is_invited_to_the_first_node() {
        let task = read(&[], &[]).unwrap();
        assert_eq!((task.rank, task.size, task.place_on_node), (3, 4, 1));
        assert_eq!(task.to_string(), format!("n0:{}", port_of(3, 0)));
        let other_step = read(&[(STEP, "1")], &[]).unwrap();
        assert!(other_step.port != task.port && other_step.key != task.key);
        let on_one_node = read(&[(NODES, "1"), (LIST, "unset")], &[("CARRACK_PORT", "7000")]);
        assert_eq!(on_one_node.unwrap().to_string(), "127.0.0.1:7000");
        let secret = [(variables::SECRET, "sixteen bytes...")];
        assert_eq!(read(&secret, &[]).unwrap().key, JobKey::of_secret(b"sixteen bytes..."));
    }

    #[test]
    fn a_job_without_a_secret_is_refused_where_one_is_required() {
        let required = [("CARRACK_REQUIRE_SECRET", "1")];
        let error = read(&[], &required).unwrap_err();
        assert!(error.contains("CARRACK_REQUIRE_SECRET"), "{error}");
        assert!(read(&[(variables::SECRET, "sixteen bytes...")], &required).is_ok());
    }

    #[test]
    fn a_wrong_variable_is_named() {
        for (name, value) in [
            (RANK, "unset"),
            (RANK, "-1"),
            (PLACE, "one"),
            (LIST, "n["),
            (LIST, "unset"),
            (JOB, "unset"),
            (STEP, "4294967296"),
        ] {
            let error = read(&[(name, value)], &[]).unwrap_err();
            assert!(error.contains(name) && error.contains("Slurm"), "{name}={value}: {error}");
        }
        let error = read(&[(RANK, "4")], &[]).unwrap_err();
        assert!(error.contains("4, not below the size 4"), "{error}");
        let error = read(&[(RANK, "0")], &[]).unwrap_err();
        assert!(error.contains("SLURM_NODEID") && error.contains("first node"), "{error}");
    }

    #[test]
    fn steps_of_neighbouring_jobs_have_different_ports() {
        let steps = (1000..1050).flat_map(|job| (0..50).map(move |step| port_of(job, step)));
        assert_eq!(steps.collect::<BTreeSet<_>>().len(), 2500);
        assert!((10_000..30_000).contains(&port_of(u32::MAX, u32::MAX)));
    }
}
