//! A port of an RDMA device, opened for a rank.

use super::address::{Fabric, Host, ip_of};
use super::choice;
use super::device::RdmaDevice;
use super::options::Options;
use super::port::{Wish, choose_gid};
use super::queue_pairs::Port;
use super::sys::bindings::{IBV_ATOMIC_NONE, IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_device_attr};
use super::sys::{AsyncEvent, Context, GidKind, ProtectionDomain, Verbs, VerbsError};
use super::thread_domains::ThreadDomains;
use super::transfers::{self, Registrations};
use super::wishes::Wishes;
use crate::contract::{Caps, Device, Domain, Exposed, Identity, Unavailable};
use crate::gpu::Gpu;
use crate::mem::{PacketSource, Region, SmallBytes};
use crate::shm::handshake::Place;
use std::sync::{Arc, Mutex, PoisonError};

/// Events that are remembered for devices that have not looked so far.
const REMEMBERED: usize = 1024;

/// What the devices of a domain share.
pub(super) struct Shared {
    pub(super) name: &'static str,
    pub(super) context: Arc<Context>,
    pub(super) protection: Arc<ProtectionDomain>,
    pub(super) thread_domains: ThreadDomains,
    pub(super) registrations: Registrations,
    pub(super) port: Port,
    pub(super) options: Options,
    pub(super) identity: Identity,
    /// The kernel's boot.
    pub(super) boot: [u8; 16],
    /// Whether the GID is an IP address at which this machine can be called.
    pub(super) is_routed: bool,
    told: Mutex<Vec<AsyncEvent>>,
}

impl Shared {
    /// Takes in what the NIC has told since.
    pub(super) fn hear(&self) {
        loop {
            match self.context.async_event() {
                Ok(Some(event)) => {
                    let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
                    if told.len() < REMEMBERED {
                        told.push(event);
                    }
                }
                Ok(None) => return,
                Err(error) => return tracing::warn!(%error, "the NIC's events cannot be read"),
            }
        }
    }

    /// Why a peer's NIC has not answered, as far as this side can tell.
    #[cold]
    pub(super) fn why_no_answer(&self) -> String {
        let (device, port) = (self.context.name(), self.port.number);
        match self.context.port_attr(port).map(|attr| attr.state) {
            Ok(IBV_PORT_ACTIVE) => {
                "its NIC does not answer (retries exceeded): its process, its node or the network is gone"
                    .into()
            }
            Ok(state) => format!(
                "its NIC does not answer (retries exceeded): port {port} of {device}, this rank's own, is {}; see `rdma link`",
                self.context.verbs().port_state_name(state)
            ),
            Err(error) => {
                format!("its NIC does not answer (retries exceeded), nor does this rank's: {error}")
            }
        }
    }

    /// What it has told after the first `known`.
    pub(super) fn told_since(&self, known: usize) -> Vec<AsyncEvent> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.get(known..).map(<[_]>::to_vec).unwrap_or_default()
    }
}

/// See the [module](self).
pub(super) struct RdmaDomain {
    shared: Arc<Shared>,
    caps: Caps,
}

impl RdmaDomain {
    pub(super) fn open(
        (verbs, name, is_simulated): (&Arc<Verbs>, &'static str, bool),
        device: &str,
        options: Options,
        identity: Identity,
    ) -> Result<Self, Unavailable> {
        let unavailable = |why: String| Unavailable::new(name, why);
        options.check().map_err(unavailable)?;
        let failed = |error: VerbsError| unavailable(error.to_string());
        let wish = match &options.device {
            Some(names) => choice::named(names, options.place).map_err(unavailable)?,
            None => Wish { device: device.to_owned(), port: None },
        };
        let context = Context::open(verbs, &wish.device).map_err(failed)?;
        let (port, kind) = port(&context, &wish, &options).map_err(unavailable)?;
        let options = Options { send_depth: options.send_depth.min(port.most_requests), ..options };
        let port = if is_simulated { Port { fabric: Fabric::Simulated, ..port } } else { port };
        let protection = ProtectionDomain::alloc(&context).map_err(failed)?;
        let (wishes, why_not) = Wishes::of(&options, &context.extended_attr().map_err(failed)?.odp_caps);
        if let Some(why) = why_not {
            tracing::warn!(device = %context.name(), "{why}");
        }
        let is_link_local = Host::of(ip_of(port.gid)).is_link_local;
        let is_routed = kind == GidKind::RoceV2 && !is_link_local;
        let place = Place::here().map_err(unavailable)?;
        let caps = Caps {
            am_inline: SmallBytes::MAX,
            am_copied: options.packet_size,
            am_owned: 0,
            am_from_device: false,
            am_to_device: false,
            remote_memory: true,
            orders_on_events: false,
        };
        let shared = Shared {
            name,
            context,
            registrations: Registrations::new(protection.clone(), wishes),
            protection,
            thread_domains: ThreadDomains::new(options.thread_domains),
            port,
            options,
            identity,
            boot: place.boot,
            is_routed,
            told: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared), caps })
    }
}

/// The port that is wished for, or the first that is active, and its GID.
fn port(context: &Arc<Context>, wish: &Wish, options: &Options) -> Result<(Port, GidKind), String> {
    let told = |error: VerbsError| error.to_string();
    let attr = context.device_attr().map_err(told)?;
    let most = attr.phys_port_cnt;
    let numbers = match wish.port {
        Some(number) if number <= most => number..=number,
        Some(number) => {
            return Err(format!("{} has {most} ports, and none of number {number}", context.name()));
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
        let port = Port {
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
                "{} has queue pairs of {} requests of {} pieces, and receives of {}; no fewer than 16, 2 and 2 will do",
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

/// Whether a device does atomic operations, as a responder and as a requester.
fn atomics(attr: &ibv_device_attr) -> Result<(), String> {
    if attr.atomic_cap == IBV_ATOMIC_NONE {
        return Err("the NIC does no atomic operations (its atomic_cap is IBV_ATOMIC_NONE)".into());
    }
    // Both directions: its queue pair is also joined to those of others, and to itself.
    match attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom) {
        ..1 => Err("the NIC's queue pairs have no room for atomic operations (max_qp_rd_atom is 0)".into()),
        _ => Ok(()),
    }
}

impl Domain for RdmaDomain {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn look_after(&self) {
        self.shared.registrations.look_after();
    }

    fn expose_words(&self, region: &Region) -> Result<Box<dyn Exposed>, String> {
        let device = self.shared.context.name();
        self.shared.port.atomics.clone().map_err(|why| format!("{device}: {why}"))?;
        transfers::expose_words(&self.shared.registrations, region).map_err(|why| format!("{device}: {why}"))
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
            return Err(unavailable(format!("packets of {room} bytes have no room for messages of {most}")));
        }
        RdmaDevice::open(self.shared.clone(), packets).map(|device| -> Arc<dyn Device> { device })
    }
}
