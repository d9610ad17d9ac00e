//! The path to each peer, and why each other was refused.

use crate::api::Runtime;
use crate::datapath::{Port, WRITTEN};
use crate::error::{PostError, WaitError};
use crate::names::Rank;
use crate::peer::route::{Linked, candidates};
use crate::protocol::select::choose;
pub use crate::protocol::select::{PathVerdict, Verdict};
use crate::staging::BLOCK;
use carrack_transports::contract::Caps;
use carrack_transports::gpu::{CopierState, Gpu, copier};
use carrack_transports::mem::{GpuUuid, MemKind, PacketSource};
use std::time::{Duration, Instant};

/// Time after which a missing address is looked up again: its arrival wakes no sleeping thread.
const AGAIN: Duration = Duration::from_millis(5);

/// Time, at most, for which a peer's answer to a new link is waited for. A link without it does not
/// know if the kernel copies.
const ANSWER: Duration = Duration::from_millis(500);

/// The paths to one peer from one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerPaths {
    /// The peer.
    pub rank: Rank,
    /// The device's number.
    pub device: u32,
    /// Each transport's verdict. Paths are chosen for a pair of devices; the kinds of memory
    /// differ only in the way of their bytes onto the path.
    pub paths: Vec<PathVerdict>,
    /// The way of messages from each kind of memory, if there is a path.
    pub kinds: Vec<KindPath>,
    /// The reason why no connection is there: the peer has not started, or is gone, or this process
    /// lacks a descriptor.
    pub trouble: Option<String>,
}

/// The way of messages from one kind of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindPath {
    /// The memory that is sent from: `host`, `pinned`, `device 0 (name)` and so on.
    pub memory: String,
    /// The way: `copied into the ring up to 208 B, …`,
    /// `copied into pinned host memory by the GPU's engine …`.
    pub way: String,
    /// The reason why the way is not the direct one.
    pub why: Option<String>,
    /// The GPU whose memory it is.
    pub gpu: Option<GpuUuid>,
    /// The state of that GPU's resident copier, where messages to this peer may go by one. No copy
    /// is made here, so [`CopierState::Wanted`] leaves open if there can be one.
    pub copier: Option<CopierState>,
}

impl KindPath {
    /// Returns an entry for memory that is no GPU's, or of an unknown kind.
    fn of_no_gpu(memory: &str, way: String, why: Option<String>) -> Self {
        Self { memory: memory.into(), way, why, gpu: None, copier: None }
    }
}

impl PeerPaths {
    /// Returns the chosen transport.
    pub fn chosen(&self) -> Option<&'static str> {
        self.paths.iter().find(|path| path.verdict == Verdict::Chosen).map(|path| path.transport)
    }
}

impl Runtime {
    /// Returns, for each rank, the chosen path and the reasons against the others, from the
    /// default device. Waits up to `patience` for peers that have not started. Initialises no GPU
    /// driver: it lists the GPUs of those that the program uses.
    pub fn explain(&self, patience: Duration) -> Vec<PeerPaths> {
        let device = &self.0.default_device().0;
        (0..self.size()).map(|rank| self.explain_peer(device, Rank(rank), patience)).collect()
    }

    fn explain_peer(&self, device: &Port, rank: Rank, patience: Duration) -> PeerPaths {
        let mut explained = PeerPaths {
            rank,
            device: device.index,
            paths: Vec::new(),
            kinds: Vec::new(),
            trouble: None,
        };
        let found = std::cell::RefCell::new(None);
        let look = || {
            let looked: Result<_, PostError> = candidates(&self.0, device, rank);
            let there = !matches!(looked, Ok(None));
            *found.borrow_mut() = Some(looked);
            there
        };
        let begun = Instant::now();
        let waited = loop {
            let left = patience.saturating_sub(begun.elapsed());
            match self.0.wait_keeping(&look, Some(left.min(AGAIN))) {
                Err(WaitError::TimedOut(_)) if left > AGAIN => {}
                Err(WaitError::TimedOut(_)) => break Err(WaitError::TimedOut(patience)),
                other => break other,
            }
        };
        match found.into_inner() {
            Some(Ok(Some((reaches, _)))) => {
                let (chosen, paths) = choose(&reaches);
                explained.paths = paths;
                if let Some(lane) = chosen.and_then(|at| device.lanes.get(at)) {
                    let left = patience.saturating_sub(begun.elapsed()).min(ANSWER);
                    let is_up = || self.linked(device, rank).is_some_and(|it| it.link.is_up());
                    if self.0.wait_keeping(&is_up, Some(left)).is_err() {
                        let lacks = device.known_route(rank).and_then(|route| route.lacks());
                        explained.trouble = lacks.or_else(|| lane.device.shortage());
                    }
                    explained.kinds = self.explain_kinds(device, rank, lane.transport, &lane.caps);
                }
            }
            Some(Err(error)) => explained.trouble = Some(error.to_string()),
            _ => {
                let why = match waited {
                    Err(WaitError::Progress(why)) => why.to_string(),
                    _ => {
                        format!("it has had {patience:?}; see that it calls Runtime::start")
                    }
                };
                explained.trouble = Some(format!("{rank} has not published an address: {why}"));
            }
        }
        explained
    }

    /// Returns the link to a rank; makes it if there is none.
    fn linked<'a>(&self, device: &'a Port, rank: Rank) -> Option<&'a Linked> {
        let route = device.route(rank)?;
        match route.linked() {
            Some(linked) => Some(linked),
            None => route.link(&self.0, device).ok().flatten(),
        }
    }

    /// Describes the way of messages that are too long for a packet.
    fn explain_large(&self, device: &Port, rank: Rank) -> String {
        match self.linked(device, rank) {
            None => "offered beyond".into(),
            Some(linked) if linked.caps.remote_memory => {
                let (least, chunk) = (WRITTEN >> 10, linked.caps.chunk >> 10);
                let over = match linked.link.nics() {
                    1 => String::new(),
                    nics => format!(", over {nics} NICs in turn"),
                };
                format!(
                    "offered beyond, from {least} KiB on written by the NIC, and from {chunk} KiB \
                    on in chunks of that size{over}"
                )
            }
            Some(linked) if linked.caps.windows => {
                let least = WRITTEN >> 10;
                format!("offered beyond, from {least} KiB on written to where it is received")
            }
            Some(linked) => match linked.why_parts() {
                None => "offered and copied by the kernel beyond".into(),
                Some(why) => format!(
                    "offered and sent packet by packet beyond (the kernel does not copy: {why})"
                ),
            },
        }
    }

    /// Returns the reason why GPU memory goes through host memory, if it does.
    fn why_not_direct(
        &self,
        (rank, transport): (Rank, &str),
        direct: bool,
        maps: bool,
        gpu: &dyn Gpu,
        nic: Option<&Result<String, String>>,
    ) -> Option<String> {
        let sends = match nic {
            Some(Ok(_)) => return None,
            Some(Err(why)) => Some(format!("the NIC does not reach it: {why}")),
            None => (!direct).then(|| format!("{transport} sends host memory only")),
        };
        let mapped = match maps {
            // Reasons that attempts have shown: here and now, and at the last use of the peer's
            // memory.
            true => {
                let exports = self.0.try_export(gpu).err();
                let exports = exports.map(|why| format!("memory of it cannot be exported: {why}"));
                let imports = self.0.unmapped.of(rank);
                let imports = imports.map(|why| format!("memory of {rank} was not mapped: {why}"));
                let all: Vec<_> = exports.into_iter().chain(imports).collect();
                (!all.is_empty()).then(|| all.join("; "))
            }
            false => Some(match &self.0.maps_nothing {
                Some(why) => format!("nothing is mapped ({})", why.reason),
                None => format!("nothing is mapped over {transport}"),
            }),
        };
        let all: Vec<_> = sends.into_iter().chain(mapped).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Returns the way in which the NIC of a transport reaches a GPU's memory, if it has a NIC.
    fn reaches_gpu(&self, transport: &str, gpu: &dyn Gpu) -> Option<Result<String, String>> {
        let (_, domain) = self.0.domains.iter().find(|(name, _)| *name == transport)?;
        domain.reaches_gpu(gpu)
    }

    fn explain_kinds(
        &self,
        device: &Port,
        rank: Rank,
        transport: &str,
        caps: &Caps,
    ) -> Vec<KindPath> {
        let packet = device.host_pool.packet_size().min(caps.am_copied);
        let large = self.explain_large(device, rank);
        let inline = caps.am_inline.min(packet);
        let host =
            format!("in place up to {inline} B, through one packet up to {packet} B, {large}");
        let mut kinds = vec![
            KindPath::of_no_gpu("host", host.clone(), None),
            KindPath::of_no_gpu("pinned", host, None),
        ];
        let route = device.known_route(rank);
        let maps =
            route.and_then(|route| route.linked()).is_some_and(|linked| self.0.may_map(linked));
        for driver in self.gpu_drivers() {
            match driver.devices_in_use() {
                Err(error) => {
                    let why = format!("{}: {error}", driver.name());
                    kinds.push(KindPath::of_no_gpu("device", "none".into(), Some(why)));
                }
                Ok(gpus) => {
                    for gpu in gpus {
                        let info = gpu.info();
                        let kind = MemKind::Device(info.uuid);
                        let direct = caps.takes_am(kind, 1);
                        let small = if direct {
                            format!("read by the GPU's engine up to {packet} B")
                        } else {
                            format!(
                                "copied into pinned host memory by the GPU's engine up to {packet} \
                                B"
                            )
                        };
                        let staged = format!(
                            "{small}; beyond, and into such memory, through blocks of {} KiB of \
                            pinned host memory, which the engine \
                             fills or empties while others are on their way; puts, gets and atomic \
                             operations by their owner, so too",
                            BLOCK >> 10
                        );
                        let nic = self.reaches_gpu(transport, &*gpu);
                        let way = if let Some(Ok(how)) = &nic {
                            format!(
                                "by the NIC, which reaches it {how}: messages from {} KiB on, \
                                puts and gets; atomic operations by \
                                 their owner; shorter messages: {staged}",
                                WRITTEN >> 10
                            )
                        } else if maps {
                            format!(
                                "offered, and fetched by the receiver's copy engine through {}, \
                                by which it is put and got, too, pieces \
                                 of a batch {}; atomic operations by their owner; what cannot be \
                                 exported or mapped, and active messages up to {packet} B: \
                                 {staged}",
                                self.0.maps().map_or("", |(name, _)| name),
                                gpu.how_pieces_go()
                            )
                        } else {
                            staged
                        };
                        let copier =
                            maps.then(|| gpu.copier()).filter(|state| *state != CopierState::Off);
                        let way = way + &copier.as_ref().map(by_copier).unwrap_or_default();
                        let why = self.why_not_direct(
                            (rank, transport),
                            direct,
                            maps,
                            &*gpu,
                            nic.as_ref(),
                        );
                        kinds.push(KindPath {
                            memory: format!("device {} ({})", info.ordinal, info.name),
                            way,
                            why,
                            gpu: Some(info.uuid),
                            copier,
                        });
                    }
                }
            }
        }
        kinds
    }
}

/// Describes the messages that a kernel copies instead of the copy engine.
fn by_copier(state: &CopierState) -> String {
    let most = copier::MOST >> 10;
    match state {
        CopierState::Off => String::new(),
        CopierState::Wanted => {
            format!(
                "; copies between GPUs up to {most} KiB by a resident copier, when the first one \
                finds that there can be one"
            )
        }
        CopierState::On { launches, copies } => format!(
            "; copies between GPUs up to {most} KiB by a resident copier (kernels launched: \
            {launches}, copies: {copies})"
        ),
        CopierState::Refused(why) => format!("; no resident copier: {why}"),
    }
}
