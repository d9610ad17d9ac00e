//! A port of an RDMA device, opened for a rank.

use super::address::{Fabric, Host, ip_of};
use super::choice;
use super::device::RdmaDevice;
use super::options::VerbsOptions;
use super::port::{Wish, choose_gid};
use super::queue_pairs::RdmaPort;
use super::sys::bindings::{
    IBV_ATOMIC_NONE, IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_device_attr,
};
use super::sys::{AsyncEvent, Context, GidKind, ProtectionDomain, Verbs, VerbsError};
use super::thread_domains::ThreadDomains;
use super::transfers::{self, Registrations};
use super::wishes::Wishes;
use crate::contract::{Caps, Device, Domain, Exposed, Identity, Locality, Unavailable};
use crate::gpu::Gpu;
use crate::mem::{HostAllocator, PacketPool, PacketSource, Region, SmallBytes};
use crate::net::shortage::Shortage;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Number of events kept for devices that have not read them yet. Of more, the last are kept.
const REMEMBERED: usize = 1024;

/// Events of the NIC.
#[derive(Debug)]
struct RecentEvents<T> {
    last: VecDeque<T>,
    /// Number of events before these.
    forgotten: usize,
}

impl<T: Clone> RecentEvents<T> {
    const fn new() -> Self {
        Self { last: VecDeque::new(), forgotten: 0 }
    }

    fn add(&mut self, event: T) {
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
            self.forgotten += 1;
        }
        self.last.push_back(event);
    }

    /// Returns the kept events after the first `known`, and sets `known` to the number of all.
    fn since(&self, known: &mut usize) -> Vec<T> {
        let news = self.last.iter().skip(known.saturating_sub(self.forgotten)).cloned().collect();
        *known = self.forgotten + self.last.len();
        news
    }
}
/// Receives of a further NIC, and packets for them.
const RAIL_RECEIVES: u32 = 8;
const RAIL_PACKETS: usize = 16;

/// State that the devices of a domain share.
pub(super) struct DomainShared {
    pub(super) name: &'static str,
    pub(super) context: Arc<Context>,
    pub(super) protection: Arc<ProtectionDomain>,
    pub(super) thread_domains: ThreadDomains,
    pub(super) registrations: Registrations,
    pub(super) port: RdmaPort,
    pub(super) options: VerbsOptions,
    pub(super) identity: Identity,
    /// Id of the kernel's boot.
    pub(super) boot: [u8; 16],
    /// Set if the GID is an IP address at which this machine can be called.
    pub(super) is_routed: bool,
    pub(super) shortage: Shortage,
    events: Mutex<RecentEvents<AsyncEvent>>,
}

impl fmt::Debug for DomainShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.port.number, self.context.name())
    }
}

impl DomainShared {
    /// Reads the NIC's new events.
    pub(super) fn hear(&self) {
        loop {
            match self.context.async_event() {
                Ok(Some(event)) => {
                    self.events.lock().add(event);
                }
                Ok(None) => return,
                Err(error) => return tracing::warn!(%error, "the NIC's events cannot be read"),
            }
        }
    }

    /// Explains why a peer's NIC has not answered, as far as this side can tell.
    #[cold]
    pub(super) fn why_no_answer(&self) -> String {
        match self.own_trouble() {
            None => {
                "its NIC does not answer (retries exceeded): its process, its node or the network \
                is gone"
                    .into()
            }
            Some(trouble) => format!("its NIC does not answer (retries exceeded): {trouble}"),
        }
    }

    /// Describes a failure of this rank's own port, which may break a connection off instead of
    /// the peer.
    #[cold]
    pub(super) fn own_trouble(&self) -> Option<String> {
        let (device, port) = (self.context.name(), self.port.number);
        match self.context.port_attr(port).map(|attr| attr.state) {
            Ok(IBV_PORT_ACTIVE) => None,
            Ok(state) => {
                let state = self.context.verbs().port_state_name(state);
                Some(format!(
                    "port {port} of {device}, this rank's own, is {state}; see `rdma link`"
                ))
            }
            Err(error) => Some(format!("nor does this rank's own, {device}: {error}")),
        }
    }

    /// Returns the NIC's events after the first `known`, and sets `known` to the number of all.
    pub(super) fn told_since(&self, known: &mut usize) -> Vec<AsyncEvent> {
        self.events.lock().since(known)
    }
}

/// See the [module](self).
pub(super) struct RdmaDomain {
    shared: Arc<DomainShared>,
    /// Further ports for large messages.
    rails: Vec<Arc<DomainShared>>,
    caps: Caps,
}

impl RdmaDomain {
    /// Opens the first of the `devices`, unless the options name others, and further ones up to
    /// the limit of the options.
    pub(super) fn open(
        source: (&Arc<Verbs>, &'static str, bool),
        devices: &[String],
        options: VerbsOptions,
        identity: Identity,
    ) -> Result<Self, Unavailable> {
        let unavailable = |why: String| Unavailable::new(source.1, why);
        options.check().map_err(unavailable)?;
        let wishes = match &options.device {
            Some(names) => choice::named(names, options.place).map_err(unavailable)?,
            None => devices.iter().map(|name| Wish { device: name.clone(), port: None }).collect(),
        };
        let mut wishes = wishes.into_iter().take(options.rails.into());
        let first = wishes.next().ok_or_else(|| {
            unavailable("no RDMA device was found; name one in CARRACK_VERBS_DEVICE".into())
        })?;
        let shared = DomainShared::open(source, &first, options.clone(), identity.clone())?;
        let further = VerbsOptions { receives: RAIL_RECEIVES, ..options.clone() };
        let rail =
            |wish: Wish| match DomainShared::open(source, &wish, further.clone(), identity.clone())
            {
                Ok(shared) => Some(Arc::new(shared)),
                Err(why) => {
                    tracing::warn!(device = wish.device, %why, "one NIC less for large messages");
                    None
                }
            };
        let rails = wishes.filter_map(rail).collect();
        let caps = Caps {
            am_inline: SmallBytes::MAX,
            am_copied: options.packet_size,
            am_owned: 0,
            am_from_device: false,
            remote_memory: true,
            windows: true,
            polls_kernel: false,
            chunk: options.chunk,
            locality: Locality::Network,
        };
        Ok(Self { shared: Arc::new(shared), rails, caps })
    }
}

impl DomainShared {
    /// Opens a port.
    fn open(
        (verbs, name, is_simulated): (&Arc<Verbs>, &'static str, bool),
        wish: &Wish,
        options: VerbsOptions,
        identity: Identity,
    ) -> Result<Self, Unavailable> {
        let unavailable = |why: String| Unavailable::new(name, why);
        let failed = |error: VerbsError| unavailable(error.to_string());
        let context = Context::open(verbs, &wish.device).map_err(failed)?;
        let vendor = context.device_attr().map_err(failed)?.vendor_id;
        options.check_for(&wish.device, vendor).map_err(unavailable)?;
        let (port, kind) = port(&context, wish, &options).map_err(unavailable)?;
        let options =
            VerbsOptions { send_depth: options.send_depth.min(port.most_requests), ..options };
        let port = if is_simulated { RdmaPort { fabric: Fabric::Simulated, ..port } } else { port };
        let protection = ProtectionDomain::alloc(&context).map_err(failed)?;
        let (wishes, why_not) =
            Wishes::of(&options, &context.extended_attr().map_err(failed)?.odp_caps);
        if let Some(why) = why_not {
            tracing::warn!(device = %context.name(), "{why}");
        }
        let is_link_local = Host::of(ip_of(port.gid)).is_link_local;
        let is_routed = kind == GidKind::RoceV2 && !is_link_local;
        Ok(Self {
            name,
            context,
            registrations: Registrations::new(protection.clone(), wishes),
            protection,
            thread_domains: ThreadDomains::new(options.thread_domains),
            port,
            options,
            identity,
            boot: crate::net::boot_id().map_err(unavailable)?,
            is_routed,
            shortage: Shortage::default(),
            events: Mutex::new(RecentEvents::new()),
        })
    }
}

/// Returns the port that is asked for, or the first active one, with its GID.
fn port(
    context: &Arc<Context>,
    wish: &Wish,
    options: &VerbsOptions,
) -> Result<(RdmaPort, GidKind), String> {
    let told = |error: VerbsError| error.to_string();
    let attr = context.device_attr().map_err(told)?;
    let most = attr.phys_port_cnt;
    let numbers = match wish.port {
        Some(number) if number <= most => number..=number,
        Some(number) => {
            return Err(format!(
                "{} has {most} ports, and none of number {number}",
                context.name()
            ));
        }
        None => 1..=most,
    };
    let mut down = String::new();
    for number in numbers {
        let facts = context.port_attr(number).map_err(told)?;
        if facts.state != IBV_PORT_ACTIVE {
            let state = context.verbs().port_state_name(facts.state);
            down += &format!("port {number} of {} is {state}; ", context.name());
            continue;
        }
        let is_ethernet = u32::from(facts.link_layer) == IBV_LINK_LAYER_ETHERNET;
        let gids = context.gids(number).map_err(told)?;
        let gid = choose_gid(&gids, options.gid_index)
            .map_err(|why| format!("port {number} of {}: {why}", context.name()))?;
        let byte = |value: i32| u8::try_from(value.max(0)).unwrap_or(u8::MAX);
        let count = |value: i32| u32::try_from(value.max(0)).unwrap_or(0);
        let port = RdmaPort {
            number,
            fabric: if is_ethernet { Fabric::Ethernet } else { Fabric::InfiniBand },
            lid: facts.lid,
            mtu: u8::try_from(facts.active_mtu).unwrap_or(1),
            gid: gid.gid,
            gid_index: gid.index.0,
            interface: gid.ifindex,
            reads: (byte(attr.max_qp_rd_atom), byte(attr.max_qp_init_rd_atom)),
            atomics: atomics(&attr),
            most_completions: count(attr.max_cqe),
            most_receives: count(attr.max_srq_wr),
            most_queue_pairs: count(attr.max_qp),
            most_requests: count(attr.max_qp_wr),
        };
        if attr.max_sge < 2 || attr.max_srq_sge < 2 || attr.max_qp_wr < 16 {
            return Err(format!(
                "{} has queue pairs of {} requests of {} pieces, and receives of {}; no fewer than \
                16, 2 and 2 will do",
                context.name(),
                attr.max_qp_wr,
                attr.max_sge,
                attr.max_srq_sge
            ));
        }
        return Ok((port, gid.kind));
    }
    Err(format!("no port is active: {down}see `ip link` and `rdma link`"))
}

/// Checks that a device does atomic operations, as a responder and as a requester.
fn atomics(attr: &ibv_device_attr) -> Result<(), String> {
    if attr.atomic_cap == IBV_ATOMIC_NONE {
        return Err("the NIC does no atomic operations (its atomic_cap is IBV_ATOMIC_NONE)".into());
    }
    // Both directions: its queue pair is also joined to others, and to itself.
    match attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom) {
        ..1 => {
            Err("the NIC's queue pairs have no room for atomic operations (max_qp_rd_atom is 0)"
                .into())
        }
        _ => Ok(()),
    }
}

impl Domain for RdmaDomain {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn look_after(&self) {
        std::iter::once(&self.shared)
            .chain(&self.rails)
            .for_each(|one| one.registrations.look_after());
    }

    fn expose_words(&self, region: &Region) -> Result<Box<dyn Exposed>, String> {
        let device = self.shared.context.name();
        self.shared.port.atomics.clone().map_err(|why| format!("{device}: {why}"))?;
        transfers::expose_words(&self.shared.registrations, region)
            .map_err(|why| format!("{device}: {why}"))
    }

    fn reaches_gpu(&self, gpu: &dyn Gpu) -> Option<Result<String, String>> {
        Some(self.shared.registrations.gpus.explain(gpu))
    }

    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        let unavailable = |why: String| Unavailable::new(self.shared.name, why);
        if !packets.kind().is_host() {
            return Err(unavailable(format!(
                "it receives into host packets, not into {} memory",
                packets.kind()
            )));
        }
        if packets.packet_size() < self.shared.options.packet_size {
            let (room, most) = (packets.packet_size(), self.shared.options.packet_size);
            return Err(unavailable(format!(
                "packets of {room} bytes have no room for messages of {most}"
            )));
        }
        let mut rails = Vec::new();
        for shared in &self.rails {
            // Only the end of a connection is received there.
            let packets =
                PacketPool::new(Arc::new(HostAllocator), shared.options.packet_size, RAIL_PACKETS);
            rails.push(RdmaDevice::open(shared.clone(), Arc::new(packets), Vec::new())?);
        }
        RdmaDevice::open(self.shared.clone(), packets, rails)
            .map(|device| -> Arc<dyn Device> { device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_is_told_once_and_of_too_many_the_last() {
        let (mut told, mut early, mut late) = (RecentEvents::new(), 0, 0);
        told.add(0);
        assert_eq!((told.since(&mut early), told.since(&mut early)), (vec![0], vec![]));
        (1..5).for_each(|event| told.add(event));
        assert_eq!(told.since(&mut early), [1, 2, 3, 4]);
        (5..3 * REMEMBERED).for_each(|event| told.add(event));
        let last: Vec<_> = (2 * REMEMBERED..3 * REMEMBERED).collect();
        assert_eq!((told.since(&mut early), told.since(&mut late)), (last.clone(), last));
        told.add(7);
        assert_eq!((told.since(&mut early), told.since(&mut late)), (vec![7], vec![7]));
    }
}
