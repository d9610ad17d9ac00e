//! Choice of a rank's device. Pure functions.
//!
//! Ranks of a node share its devices out. A rank takes the nearest to its CPUs; of several that
//! are equally near, each rank of the node takes another one. The bootstrap says which ranks share
//! a node, and their order. Ranks with different devices have to reach each other over the
//! network. So only devices that look alike are shared out: of one kind of network, and of one
//! rate.

use super::address::{Fabric, Host, ip_of};
use super::port::{Wish, choose_gid};
use super::survey::{Seen, SeenPort};
use std::cmp::Reverse;
use std::fs;
use std::net::IpAddr;

/// Returns the devices that the user names, in the rank's order: of several, each rank of a node
/// has another one in front.
///
/// # Errors
/// A description of the user's mistake.
pub(super) fn named(text: &str, place: u32) -> Result<Vec<Wish>, String> {
    let mut wishes: Vec<_> =
        text.split(',').map(|name| Wish::read(name.trim())).collect::<Result<_, _>>()?;
    let turn = place as usize % wishes.len().max(1);
    wishes.rotate_left(turn);
    Ok(wishes)
}

/// Returns the devices for a rank's large messages, as indices of `seen`. They are the one that it
/// takes, and those of the same network that are equally fast and near.
pub(super) fn rails(seen: &[Seen], near: &[u32], place: u32) -> Vec<usize> {
    let order = order(seen, near, place);
    let Some(&first) = order.first() else { return order };
    let mut rails: Vec<_> = (0..seen.len()).filter(|&at| is_alike(seen, near, at, first)).collect();
    let turn = rails.iter().position(|&at| at == first).unwrap_or(0);
    rails.rotate_left(turn);
    rails
}

/// Returns the sort key of a device: the least is the best.
fn merit(seen: &Seen, near: &[u32]) -> (bool, bool, Reverse<u32>, bool) {
    let is_far = seen.numa.is_some_and(|node| !near.is_empty() && !near.contains(&node));
    let rate = seen.best_port().map_or(0, |port| port.rate);
    (seen.best_port().is_none(), seen.simulated.is_some(), Reverse(rate), is_far)
}

fn is_alike(seen: &[Seen], near: &[u32], one: usize, other: usize) -> bool {
    let (one, other) = (&seen[one], &seen[other]);
    merit(one, near) == merit(other, near) && network(one) == network(other)
}

/// Returns the order in which a rank prefers these devices, as indices of `seen`. `near` are the
/// NUMA nodes of the CPUs that it may run on.
pub(super) fn order(seen: &[Seen], near: &[u32], place: u32) -> Vec<usize> {
    let mut order: Vec<_> = (0..seen.len()).collect();
    order.sort_by_key(|&at| merit(&seen[at], near));
    let Some(&best) = order.first() else { return order };
    let equals: Vec<_> =
        order.iter().copied().filter(|&at| is_alike(seen, near, at, best)).collect();
    let first = equals[place as usize % equals.len()];
    order.retain(|&at| at != first);
    order.insert(0, first);
    order
}

/// Returns the properties that two devices must share to reach each other, as far as visible here.
fn network(seen: &Seen) -> Option<(Fabric, [u8; 8], bool, bool)> {
    let SeenPort { fabric, gids, .. } = seen.best_port()?;
    let gid = choose_gid(gids, None).ok()?.gid;
    let prefix = gid.first_chunk().copied().filter(|_| *fabric == Fabric::InfiniBand);
    let subnet = prefix.unwrap_or_default();
    let host = Host::of(ip_of(gid));
    Some((*fabric, subnet, host.is_link_local, matches!(host.ip, IpAddr::V4(_))))
}

/// Returns the NUMA nodes of the CPUs that this thread may run on; empty if the kernel does not
/// say.
pub(super) fn nodes_of_this_thread() -> Vec<u32> {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    let Ok(entries) = fs::read_dir("/sys/devices/system/node") else { return Vec::new() };
    let mut nodes: Vec<u32> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            cpus_of(&cpus).any(|cpu| allowed.is_set(cpu)).then_some(number)
        })
        .collect();
    nodes.sort_unstable();
    nodes
}

/// Parses CPUs as the kernel lists them: `0-3,8`. Numbers beyond a CPU set are left out.
fn cpus_of(list: &str) -> impl Iterator<Item = usize> {
    let most = rustix::thread::CpuSet::MAX_CPU - 1;
    list.trim().split(',').flat_map(move |range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<usize>(), last.parse::<usize>()) {
            (Ok(first), Ok(last)) => first..=last.min(most),
            #[expect(clippy::reversed_empty_ranges, reason = "nothing")]
            _ => 1..=0,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::sys::{GidEntry, GidIndex, GidKind};
    use super::*;

    fn device(name: &str, numa: Option<u32>, rate: u32) -> Seen {
        let gid =
            GidEntry { index: GidIndex(0), gid: [9; 16], kind: GidKind::Infiniband, ifindex: 0 };
        let fabric = Fabric::InfiniBand;
        let port = SeenPort {
            number: 1,
            is_active: true,
            state: "up".into(),
            fabric,
            rate,
            gids: vec![gid],
        };
        Seen { name: name.into(), simulated: None, numa, ports: vec![port] }
    }

    fn down(mut device: Seen) -> Seen {
        device.ports[0].is_active = false;
        device
    }

    #[test]
    fn of_several_devices_that_are_named_each_rank_takes_the_next() {
        let taken = |place| named("mlx5_0, mlx5_1:2", place).unwrap().swap_remove(0);
        assert_eq!(taken(0), Wish { device: "mlx5_0".into(), port: None });
        assert_eq!(taken(1), Wish { device: "mlx5_1".into(), port: Some(2) });
        assert_eq!(taken(2), taken(0));
        assert_eq!(named("mlx5_0", 7).unwrap(), [Wish { device: "mlx5_0".into(), port: None }]);
        let all = named("a,b,c", 1).unwrap().into_iter().map(|wish| wish.device);
        assert_eq!(all.collect::<Vec<_>>(), ["b", "c", "a"], "the others are further NICs");
        for wrong in ["", "mlx5_0,", ",", "mlx5_0,mlx5_1:x"] {
            assert!(named(wrong, 0).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_nearest_device_is_taken_and_those_that_are_as_near_in_turn() {
        let all = [
            device("far0", Some(0), 400_000),
            device("near0", Some(1), 400_000),
            device("near1", Some(1), 400_000),
            device("slow", Some(1), 100_000),
        ];
        let first = |near: &[u32], place| all[order(&all, near, place)[0]].name.clone();
        assert_eq!([first(&[1], 0), first(&[1], 1), first(&[1], 2)], ["near0", "near1", "near0"]);
        assert_eq!([first(&[0], 0), first(&[0], 1)], ["far0", "far0"]);
        let of_both = [0, 1, 2, 3].map(|place| first(&[0, 1], place));
        assert_eq!(of_both, ["far0", "near0", "near1", "far0"]);
        assert_eq!(first(&[], 1), "near0", "where the kernel does not tell nodes, all are near");
        let mut places = order(&all, &[1], 1);
        places.sort_unstable();
        assert_eq!(places, [0, 1, 2, 3], "each is there once");
    }

    #[test]
    fn large_messages_go_over_those_that_are_as_fast_and_as_near_the_ranks_own_in_front() {
        let mut elsewhere = device("elsewhere", Some(1), 400_000);
        elsewhere.ports[0].gids[0].gid = [1; 16];
        let all = [
            device("far", Some(0), 400_000),
            device("near0", Some(1), 400_000),
            down(device("down", Some(1), 400_000)),
            device("near1", Some(1), 400_000),
            device("slow", Some(1), 100_000),
            elsewhere,
            device("near2", Some(1), 400_000),
        ];
        let names = |place| {
            rails(&all, &[1], place).into_iter().map(|at| &all[at].name[..]).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["near0", "near1", "near2"]);
        assert_eq!(names(1), ["near1", "near2", "near0"]);
        assert_eq!(rails(&[], &[], 0), Vec::<usize>::new());
        assert_eq!(names(0)[0], all[order(&all, &[1], 0)[0]].name);
    }

    #[test]
    fn what_is_down_simulated_or_of_another_network_is_not_shared_out() {
        let mut soft = device("soft", None, 400_000);
        soft.simulated = Some("simulated");
        let mut elsewhere = device("elsewhere", None, 400_000);
        elsewhere.ports[0].gids[0].gid = [1; 16];
        let all =
            [down(device("down", None, 400_000)), soft, device("up", None, 400_000), elsewhere];
        for place in 0..4 {
            assert_eq!(all[order(&all, &[0], place)[0]].name, "up");
        }
        assert_eq!(order(&[], &[0], 3), Vec::<usize>::new());
        let dead = [down(device("a", None, 0)), down(device("b", None, 0))];
        assert_eq!(
            order(&dead, &[], 0)[0],
            0,
            "something is opened, and says why it cannot be used"
        );
    }

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        assert_eq!(cpus_of("0-2,8\n").collect::<Vec<_>>(), [0, 1, 2, 8]);
        assert_eq!(cpus_of("\n").count() + cpus_of("x-3").count(), 0);
        assert!(cpus_of("0-99999999").count() <= rustix::thread::CpuSet::MAX_CPU);
    }
}
