//! Common parts of the tests of verbs: two devices, buffers with guards around them, connected
//! queue pairs, work requests.
//!
//! Everything goes through the table of functions, so the same tests run on the simulated NIC and
//! on a real libibverbs. `TEST_VERBS` chooses: `simulated` is the default; `NAME,NAME` are two
//! devices of the machine's libibverbs, which may be the same one.

#![expect(unsafe_code, reason = "registrations of memory, and libibverbs by its functions")]
#![allow(unreachable_pub, reason = "a module of a test program")]

mod buffer;
mod connect;
mod request;

pub use buffer::*;
pub use connect::*;
pub use request::*;

use carrack_simulators::nic::{Config, SimulatedNic};
use carrack_transports::verbs::sys::bindings::*;
use carrack_transports::verbs::sys::{
    AccessFlags, CompletionChannel, CompletionQueue, Context, GidEntry, GidKind, ProtectionDomain,
    QueuePair, QueuePairSpec, SharedReceiveQueue, Verbs, VerbsError,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit for anything that has to happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Returns all permissions that memory can be registered with.
pub fn all_access() -> AccessFlags {
    AccessFlags::LOCAL_WRITE
        | AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_ATOMIC
}

/// Two devices, and the NIC if it is a simulated one.
pub struct Bench {
    pub a: Node,
    pub b: Node,
    /// Declared after the nodes, which use it.
    pub nic: Option<SimulatedNic>,
}

impl Bench {
    /// Opens the devices that `TEST_VERBS` names.
    pub fn chosen() -> Self {
        match std::env::var("TEST_VERBS").as_deref() {
            Err(_) | Ok("simulated") => Self::simulated(Config::devices(2)),
            Ok(names) => {
                let (one, other) =
                    names.split_once(',').expect("TEST_VERBS=simulated or TEST_VERBS=NAME,NAME");
                let verbs = Verbs::open().expect("libibverbs");
                Self { a: Node::open(&verbs, one), b: Node::open(&verbs, other), nic: None }
            }
        }
    }

    /// Opens two devices of a simulated NIC of its own.
    pub fn simulated(config: Config) -> Self {
        let nic = SimulatedNic::new(config).expect("a simulated NIC");
        let verbs = nic.verbs();
        Self { a: Node::open(&verbs, "sim0"), b: Node::open(&verbs, "sim1"), nic: Some(nic) }
    }

    pub fn is_simulated(&self) -> bool {
        self.nic.is_some()
    }

    /// Returns the simulated NIC.
    pub fn nic(&self) -> &SimulatedNic {
        self.nic.as_ref().expect("this bench is simulated")
    }

    /// Makes a pair of connected queue pairs, of `a` and of `b`.
    pub fn connect(&self, options: &Options) -> (Arc<QueuePair>, Arc<QueuePair>) {
        let a = self.a.queue_pair(options, None);
        let b = self.b.queue_pair(options, None);
        connect(&self.a, &a, &self.b, &b, options);
        (a, b)
    }
}

/// An open device, with one object of each kind.
pub struct Node {
    pub context: Arc<Context>,
    pub domain: Arc<ProtectionDomain>,
    pub channel: Arc<CompletionChannel>,
    pub cq: Arc<CompletionQueue>,
    pub gid: GidEntry,
    pub port: ibv_port_attr,
}

impl Node {
    pub fn open(verbs: &Arc<Verbs>, name: &str) -> Self {
        let context = Context::open(verbs, name).expect("the device opens");
        let port = context.port_attr(1).expect("its first port");
        let gids = context.gids(1).expect("the port's GIDs");
        let is_v4 = |gid: &&GidEntry| gid.kind == GidKind::RoceV2 && gid.gid.starts_with(&[0; 10]);
        let gid = *gids.iter().find(is_v4).or(gids.first()).expect("a GID");
        let domain = ProtectionDomain::alloc(&context).expect("a domain");
        let channel = CompletionChannel::create(&context).expect("a channel");
        let cq =
            CompletionQueue::create(&context, 256, Some(&channel)).expect("a completion queue");
        Self { context, domain, channel, cq, gid, port }
    }

    pub fn queue_pair(
        &self,
        options: &Options,
        srq: Option<&Arc<SharedReceiveQueue>>,
    ) -> Arc<QueuePair> {
        self.queue_pair_with(options, srq, &self.cq).expect("a queue pair")
    }

    pub fn queue_pair_with(
        &self,
        options: &Options,
        srq: Option<&Arc<SharedReceiveQueue>>,
        cq: &Arc<CompletionQueue>,
    ) -> Result<Arc<QueuePair>, VerbsError> {
        let spec = QueuePairSpec {
            send_cq: cq,
            recv_cq: cq,
            srq,
            send_depth: options.depth,
            recv_depth: if srq.is_some() { 0 } else { options.depth },
            send_sge: 4,
            recv_sge: 4,
            inline: options.inline,
        };
        QueuePair::create(&self.domain, &spec)
    }

    /// Registers memory with all permissions.
    pub fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.domain, len, all_access())
    }

    /// Waits for the next completion, and returns it.
    pub fn completion(&self) -> ibv_wc {
        completion(&self.cq)
    }

    /// Waits for the next completion, which has to be a success.
    pub fn success(&self) -> ibv_wc {
        let found = self.completion();
        assert_eq!(found.status, IBV_WC_SUCCESS, "status of request {}", found.wr_id);
        found
    }

    /// Returns the route to another node.
    pub fn route_to(&self, other: &Self) -> ibv_ah_attr {
        let is_ethernet = u32::from(self.port.link_layer) == IBV_LINK_LAYER_ETHERNET;
        ibv_ah_attr {
            is_global: u8::from(is_ethernet),
            port_num: 1,
            dlid: other.port.lid,
            grh: ibv_global_route {
                dgid: ibv_gid { raw: other.gid.gid },
                sgid_index: self.gid.index.0,
                hop_limit: 64,
                ..ibv_global_route::default()
            },
            ..ibv_ah_attr::default()
        }
    }

    /// Returns the next asynchronous event's kind; `None` when none comes in time.
    pub fn event(&self, within: Duration) -> Option<ibv_event_type> {
        if !readable(self.context.async_fd(), within) {
            return None;
        }
        self.context.async_event().expect("the device answers").map(|event| event.kind)
    }
}

/// Waits for the next completion of a queue, and returns it.
pub fn completion(cq: &CompletionQueue) -> ibv_wc {
    completion_within(cq, PATIENCE).expect("a completion")
}

pub fn completion_within(cq: &CompletionQueue, patience: Duration) -> Option<ibv_wc> {
    let deadline = Instant::now() + patience;
    let mut place = [ibv_wc::default()];
    loop {
        if let [found] = cq.poll(&mut place).expect("the queue can be polled") {
            return Some(*found);
        }
        if Instant::now() > deadline {
            return None;
        }
        std::thread::yield_now();
    }
}

/// Returns `true` if a descriptor becomes readable in time.
pub fn readable(fd: BorrowedFd<'_>, within: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::try_from(within).expect("a time"))).expect("poll") == 1
}

/// Returns the immediate value of a completion, in this machine's byte order.
pub fn immediate(found: &ibv_wc) -> u32 {
    assert_ne!(found.wc_flags & IBV_WC_WITH_IMM, 0, "it has an immediate value");
    // SAFETY: a number, whatever was written to the union.
    u32::from_be(unsafe { found.anon_1.imm_data })
}

/// Arms the queue for the next solicited completion only.
pub fn request_solicited(cq: &CompletionQueue) {
    let raw = cq.as_raw();
    // SAFETY: the queue and its context are there.
    let answer = unsafe { (*(*raw).context).ops.req_notify_cq.expect("req_notify_cq")(raw, 1) };
    assert_eq!(answer, 0);
}

/// Returns the status of a completion that has to be a failure; its other fields mean nothing.
pub fn failure(found: &ibv_wc) -> ibv_wc_status {
    assert_ne!(found.status, IBV_WC_SUCCESS);
    found.status
}
