//! Survey of this machine's RDMA devices: made once, before one of them is chosen, and for
//! reports.

use super::address::{Fabric, ip_of};
use super::port::choose_gid;
use super::sys::bindings::{IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_port_attr};
use super::sys::{Context, GidEntry, GidKind, Verbs, VerbsError};
use std::fmt;
use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::Arc;

/// Vendor id of Soft-RoCE.
pub(super) const SOFT_ROCE: u32 = 0xff_ffff;

/// Vendor id of the kernel's software iWARP.
const SOFT_IWARP: u32 = 0x62_6d74;

/// A device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seen {
    pub(super) name: String,
    /// The simulator's name, if the device is simulated.
    pub(super) simulated: Option<&'static str>,
    /// NUMA node of the device, if the kernel says.
    pub(super) numa: Option<u32>,
    pub(super) ports: Vec<SeenPort>,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SeenPort {
    pub(super) number: u8,
    pub(super) is_active: bool,
    /// State of the port, in libibverbs's words.
    pub(super) state: String,
    pub(super) fabric: Fabric,
    /// Rate in 10⁶ bits a second, without the line's coding; 0 if unknown.
    pub(super) rate: u32,
    /// Usable GIDs, in the order of their indices.
    pub(super) gids: Vec<GidEntry>,
}

impl Seen {
    /// Queries a device. `is_simulated`: it belongs to the NIC that this crate simulates.
    ///
    /// # Errors
    /// It cannot be opened, or does not answer.
    pub(super) fn ask(
        verbs: &Arc<Verbs>,
        name: &str,
        is_simulated: bool,
    ) -> Result<Self, VerbsError> {
        let context = Context::open(verbs, name)?;
        let attr = context.device_attr()?;
        let port = |number| {
            let facts = context.port_attr(number)?;
            let fabric = match u32::from(facts.link_layer) == IBV_LINK_LAYER_ETHERNET {
                _ if is_simulated => Fabric::Simulated,
                true => Fabric::Ethernet,
                false => Fabric::InfiniBand,
            };
            Ok(SeenPort {
                number,
                is_active: facts.state == IBV_PORT_ACTIVE,
                state: verbs.port_state_name(facts.state).to_string(),
                fabric,
                rate: rate(&facts),
                gids: context.gids(number)?,
            })
        };
        let simulated = match attr.vendor_id {
            _ if is_simulated => Some("a simulated NIC"),
            SOFT_ROCE => Some("simulated by the kernel (Soft-RoCE)"),
            SOFT_IWARP => Some("simulated by the kernel (software iWARP)"),
            _ => None,
        };
        Ok(Self {
            name: name.to_owned(),
            simulated,
            numa: context.sysfs().and_then(|path| numa_node(&path)),
            ports: (1..=attr.phys_port_cnt).map(port).collect::<Result<_, _>>()?,
        })
    }

    /// Returns its first port that can send messages.
    pub(super) fn best_port(&self) -> Option<&SeenPort> {
        self.ports.iter().find(|port| port.is_active && !port.gids.is_empty())
    }
}

/// Returns the NUMA node that the kernel has a device on. The kernel says -1 for none.
fn numa_node(sysfs: &Path) -> Option<u32> {
    fs::read_to_string(sysfs.join("device/numa_node")).ok()?.trim().parse().ok()
}

/// Returns the rate, from the codes of the InfiniBand specification and the kernel's beyond it.
fn rate(facts: &ibv_port_attr) -> u32 {
    let lanes = match facts.active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let extended = Some(facts.active_speed_ex).filter(|&speed| speed != 0);
    let lane = match extended.unwrap_or(facts.active_speed.into()) {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        256 => 200_000,
        _ => 0,
    };
    lanes * lane
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.simulated.unwrap_or("an RDMA device"))?;
        if let Some(node) = self.numa {
            write!(f, " at NUMA node {node}")?;
        }
        self.ports.iter().try_for_each(|port| write!(f, ", {port}"))
    }
}

impl fmt::Display for SeenPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, state, rate, gids, .. } = self;
        write!(f, "port {number} {state}, ")?;
        match self.fabric {
            Fabric::InfiniBand => write!(f, "InfiniBand")?,
            Fabric::Ethernet => write!(f, "Ethernet")?,
            Fabric::Simulated => write!(f, "a network of this machine")?,
        }
        if *rate > 0 {
            write!(f, ", {} Gb/s", f64::from(*rate) / 1000.0)?;
        }
        let chosen = choose_gid(gids, None).ok();
        for entry in gids {
            let GidEntry { index, gid, kind, .. } = entry;
            write!(f, ", GID {} ", index.0)?;
            match kind {
                GidKind::Infiniband => write!(f, "{}", Ipv6Addr::from(*gid))?,
                GidKind::RoceV1 => write!(f, "{} (RoCE v1)", ip_of(*gid))?,
                GidKind::RoceV2 => write!(f, "{} (RoCE v2)", ip_of(*gid))?,
            }
            if gids.len() > 1 && chosen.as_ref() == Some(entry) {
                f.write_str(" [the one that is used unless CARRACK_VERBS_GID says otherwise]")?;
            }
        }
        if gids.is_empty() {
            f.write_str(", no GID")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_a_lane_times_the_lanes() {
        let facts = |width, speed| ibv_port_attr {
            active_width: width,
            active_speed: speed,
            ..Default::default()
        };
        assert_eq!(rate(&facts(2, 32)), 100_000);
        assert_eq!(rate(&facts(1, 1)), 2_500);
        assert_eq!(rate(&facts(2, 3)), 0, "a code without a meaning");
        let newer = ibv_port_attr { active_speed_ex: 256, ..facts(2, 0) };
        assert_eq!(rate(&newer), 800_000);
    }
}
