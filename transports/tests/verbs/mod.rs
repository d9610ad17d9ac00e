//! What tests of verbs have in common: two devices, buffers with guards around them, connected queue pairs, work requests.
//!
//! Everything goes through the table of functions, so the same tests run on the simulated NIC and on a real libibverbs: which one
//! is chosen by `TEST_VERBS`. `simulated` is the default; `NAME,NAME` are two devices of the machine's libibverbs, which may be
//! the same one.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use carrack_transports::verbs::simulated::{Config, SimulatedNic};
use carrack_transports::verbs::sys::bindings::*;
use carrack_transports::verbs::sys::{
    Access, AddressHandle, CompletionChannel, CompletionQueue, Context, GidEntry, GidKind, MemoryRegion,
    PostFailure, ProtectionDomain, QueuePair, QueuePairKind, QueuePairSpec, SharedReceiveQueue, Verbs,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long something may take that has to happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Everything that memory can be registered for.
pub fn all_access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}

/// Two devices, and the NIC if it is a simulated one.
pub struct Bench {
    pub a: Node,
    pub b: Node,
    /// Declared after the nodes, which are of it.
    pub nic: Option<SimulatedNic>,
}

impl Bench {
    /// What `TEST_VERBS` says.
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

    /// Two devices of a simulated NIC of its own.
    pub fn simulated(config: Config) -> Self {
        let nic = SimulatedNic::new(config).expect("a simulated NIC");
        let verbs = nic.verbs();
        Self { a: Node::open(&verbs, "sim0"), b: Node::open(&verbs, "sim1"), nic: Some(nic) }
    }

    pub fn is_simulated(&self) -> bool {
        self.nic.is_some()
    }

    /// The simulated NIC.
    pub fn nic(&self) -> &SimulatedNic {
        self.nic.as_ref().expect("this bench is simulated")
    }

    /// A pair of connected queue pairs, of `a` and of `b`.
    pub fn connect(&self, options: &Options) -> (Arc<QueuePair>, Arc<QueuePair>) {
        let a = self.a.queue_pair(options, None);
        let b = self.b.queue_pair(options, None);
        connect(&self.a, &a, &self.b, &b, options);
        (a, b)
    }
}

/// A device that is open, with one of each.
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
        let cq = CompletionQueue::create(&context, 256, Some(&channel)).expect("a completion queue");
        Self { context, domain, channel, cq, gid, port }
    }

    pub fn queue_pair(&self, options: &Options, srq: Option<&Arc<SharedReceiveQueue>>) -> Arc<QueuePair> {
        self.queue_pair_with(options, srq, &self.cq).expect("a queue pair")
    }

    pub fn queue_pair_with(
        &self,
        options: &Options,
        srq: Option<&Arc<SharedReceiveQueue>>,
        cq: &Arc<CompletionQueue>,
    ) -> Result<Arc<QueuePair>, carrack_transports::verbs::sys::VerbsError> {
        let spec = QueuePairSpec {
            kind: options.kind,
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

    /// Memory that all may be done with.
    pub fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.domain, len, all_access())
    }

    /// The next completion.
    pub fn completion(&self) -> ibv_wc {
        completion(&self.cq)
    }

    /// The next completion, which has to be a success.
    pub fn success(&self) -> ibv_wc {
        let found = self.completion();
        assert_eq!(found.status, IBV_WC_SUCCESS, "status of request {}", found.wr_id);
        found
    }

    /// The route to another node.
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

    /// How datagrams find another node.
    pub fn address_of(&self, other: &Self) -> AddressHandle {
        AddressHandle::create(&self.domain, &mut self.route_to(other)).expect("an address handle")
    }

    /// The next asynchronous event's kind; `None` when none comes in the time.
    pub fn event(&self, within: Duration) -> Option<ibv_event_type> {
        if !readable(self.context.async_fd(), within) {
            return None;
        }
        self.context.async_event().expect("the device answers").map(|event| event.kind)
    }
}

/// The next completion of a queue.
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

/// Whether a descriptor becomes readable.
pub fn readable(fd: BorrowedFd<'_>, within: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::try_from(within).expect("a time"))).expect("poll") == 1
}

/// How a connection is to be.
#[derive(Clone, Copy)]
pub struct Options {
    pub kind: QueuePairKind,
    pub depth: u32,
    pub inline: u32,
    pub timeout: u8,
    pub retries: u8,
    pub rnr_retries: u8,
    /// What peers may do to it.
    pub access: Access,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            kind: QueuePairKind::Reliable,
            depth: 64,
            inline: 0,
            timeout: 14,
            retries: 6,
            rnr_retries: 7,
            access: all_access(),
        }
    }
}

/// The key of datagrams.
pub const DATAGRAM_KEY: u32 = 0x1234;

/// Connects both sides to each other.
pub fn connect(a: &Node, qa: &QueuePair, b: &Node, qb: &QueuePair, options: &Options) {
    bring_up(qa, &a.route_to(b), qb.number(), a.port.active_mtu, options);
    bring_up(qb, &b.route_to(a), qa.number(), b.port.active_mtu, options);
}

/// Takes a queue pair through all states up to RTS.
pub fn bring_up(qp: &QueuePair, route: &ibv_ah_attr, peer: u32, mtu: ibv_mtu, options: &Options) {
    initialize(qp, options);
    let reliable = options.kind == QueuePairKind::Reliable;
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: mtu,
        dest_qp_num: peer,
        rq_psn: 100,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 12,
        ah_attr: *route,
        ..ibv_qp_attr::default()
    };
    let connect = IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    let mask = IBV_QP_STATE | if reliable { connect } else { 0 };
    qp.modify(&mut attr, mask).expect("RTR");
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: 100,
        timeout: options.timeout,
        retry_cnt: options.retries,
        rnr_retry: options.rnr_retries,
        max_rd_atomic: 16,
        ..ibv_qp_attr::default()
    };
    let start = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    let mask = IBV_QP_STATE | IBV_QP_SQ_PSN | if reliable { start } else { 0 };
    qp.modify(&mut attr, mask).expect("RTS");
}

/// Takes a queue pair to INIT.
pub fn initialize(qp: &QueuePair, options: &Options) {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: 1,
        qkey: DATAGRAM_KEY,
        qp_access_flags: options.access.bits(),
        ..ibv_qp_attr::default()
    };
    let own = if options.kind == QueuePairKind::Reliable { IBV_QP_ACCESS_FLAGS } else { IBV_QP_QKEY };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own;
    qp.modify(&mut attr, mask).expect("INIT");
}

/// Takes a queue pair to a state that needs nothing else.
pub fn go_to(qp: &QueuePair, state: ibv_qp_state) {
    let mut attr = ibv_qp_attr { qp_state: state, ..ibv_qp_attr::default() };
    qp.modify(&mut attr, IBV_QP_STATE).expect("a state");
}

/// Bytes in front of a buffer and behind it, which nobody may write.
const GUARD: usize = 64;
const GUARDED: u8 = 0xa7;

/// Registered memory. What a device may write is never seen through a reference.
pub struct Buffer {
    region: MemoryRegion,
    memory: *mut u8,
    len: usize,
}

impl Buffer {
    pub fn new(domain: &Arc<ProtectionDomain>, len: usize, access: Access) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the length is not zero.
        let memory = unsafe { std::alloc::alloc(layout) };
        assert!(!memory.is_null());
        // SAFETY: just allocated, with room for guards on both sides, which are not registered.
        let region = unsafe {
            memory.write_bytes(GUARDED, layout.size());
            memory.add(GUARD).write_bytes(0, len);
            domain.register(memory.add(GUARD), len, access).expect("a region")
        };
        Self { region, memory, len }
    }

    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len + 2 * GUARD, 4096).expect("a layout")
    }

    pub fn addr(&self) -> u64 {
        self.region.addr() as u64
    }

    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// A part of it as a peer names it.
    pub fn remote(&self, at: usize) -> (u64, u32) {
        (self.addr() + at as u64, self.region.rkey())
    }

    /// A part of it as a piece of a work request.
    pub fn piece(&self, range: Range<usize>) -> ibv_sge {
        let length = u32::try_from(range.len()).expect("a length");
        ibv_sge { addr: self.addr() + range.start as u64, length, lkey: self.lkey() }
    }

    pub fn whole(&self) -> ibv_sge {
        self.piece(0..self.len)
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        for (offset, byte) in bytes.iter().enumerate() {
            // SAFETY: within the buffer, which is this value's.
            unsafe { self.memory.add(GUARD + at + offset).write_volatile(*byte) };
        }
    }

    pub fn read(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= self.len);
        // SAFETY: within the buffer, which is this value's.
        range.map(|at| unsafe { self.memory.add(GUARD + at).read_volatile() }).collect()
    }

    pub fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.read(at..at + 8).try_into().expect("eight bytes"))
    }

    /// Fills it with bytes that depend on the seed and on the place.
    pub fn fill(&self, seed: u8) -> Vec<u8> {
        let bytes = pattern(self.len, seed);
        self.write(0, &bytes);
        bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let layout = Self::layout(self.len);
        let guards = (0..GUARD).chain(GUARD + self.len..layout.size());
        // SAFETY: within the allocation.
        let intact =
            guards.map(|at| unsafe { self.memory.add(at).read_volatile() }).all(|byte| byte == GUARDED);
        if !std::thread::panicking() {
            assert!(intact, "somebody wrote beside a buffer");
        }
        // The memory of a test stays, as long as the region is registered: which ends after this.
    }
}

/// Bytes that depend on the seed and on the place.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((at >> 9) as u8)).collect()
}

/// A send work request that is being made.
#[derive(Clone, Copy)]
pub struct Request {
    pub wr: ibv_send_wr,
    pieces: [ibv_sge; 4],
}

impl Request {
    fn new(opcode: ibv_wr_opcode, pieces: &[ibv_sge]) -> Self {
        let mut own = [ibv_sge::default(); 4];
        own[..pieces.len()].copy_from_slice(pieces);
        let wr = ibv_send_wr {
            wr_id: 0x77,
            num_sge: pieces.len() as i32,
            opcode,
            send_flags: IBV_SEND_SIGNALED,
            ..ibv_send_wr::default()
        };
        Self { wr, pieces: own }
    }

    pub fn send(pieces: &[ibv_sge]) -> Self {
        Self::new(IBV_WR_SEND, pieces)
    }

    pub fn write(pieces: &[ibv_sge], to: (u64, u32)) -> Self {
        Self::new(IBV_WR_RDMA_WRITE, pieces).remote(to)
    }

    pub fn read(pieces: &[ibv_sge], from: (u64, u32)) -> Self {
        Self::new(IBV_WR_RDMA_READ, pieces).remote(from)
    }

    fn remote(mut self, (remote_addr, rkey): (u64, u32)) -> Self {
        self.wr.wr.rdma.remote_addr = remote_addr;
        self.wr.wr.rdma.rkey = rkey;
        self
    }

    pub fn fetch_add(into: ibv_sge, word: (u64, u32), add: u64) -> Self {
        Self::new(IBV_WR_ATOMIC_FETCH_AND_ADD, &[into]).atomic(word, add, 0)
    }

    pub fn compare_swap(into: ibv_sge, word: (u64, u32), compare: u64, swap: u64) -> Self {
        Self::new(IBV_WR_ATOMIC_CMP_AND_SWP, &[into]).atomic(word, compare, swap)
    }

    fn atomic(mut self, (remote_addr, rkey): (u64, u32), compare_add: u64, swap: u64) -> Self {
        self.wr.wr.atomic = ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey };
        self
    }

    /// As a datagram.
    pub fn datagram(mut self, to: &AddressHandle, queue: u32, key: u32) -> Self {
        let ud =
            ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: to.as_raw(), remote_qpn: queue, remote_qkey: key };
        self.wr.wr.ud = ud;
        self
    }

    pub fn id(mut self, id: u64) -> Self {
        self.wr.wr_id = id;
        self
    }

    /// With an immediate value, which is turned into network order.
    pub fn immediate(mut self, value: u32) -> Self {
        self.wr.anon_1.imm_data = value.to_be();
        self.wr.opcode = match self.wr.opcode {
            IBV_WR_RDMA_WRITE => IBV_WR_RDMA_WRITE_WITH_IMM,
            _ => IBV_WR_SEND_WITH_IMM,
        };
        self
    }

    pub fn flag(mut self, flag: u32) -> Self {
        self.wr.send_flags |= flag;
        self
    }

    pub fn unsignalled(mut self) -> Self {
        self.wr.send_flags &= !IBV_SEND_SIGNALED;
        self
    }

    /// Posts it alone, which has to succeed.
    pub fn post(self, qp: &QueuePair) {
        post_all(qp, &[self]).expect("the request is taken");
    }

    /// Posts it alone.
    pub fn try_post(self, qp: &QueuePair) -> Result<(), i32> {
        post_all(qp, &[self]).map_err(|(_, errno)| errno)
    }
}

/// Posts a list. How many were taken when not all were, and why.
pub fn post_all(qp: &QueuePair, requests: &[Request]) -> Result<(), (usize, i32)> {
    let mut own = requests.to_vec();
    let first = own.as_mut_ptr();
    for at in 0..own.len() {
        // SAFETY: places of the vector, which is not changed otherwise while the list is used.
        unsafe {
            (*first.add(at)).wr.sg_list = (&raw mut (*first.add(at)).pieces).cast();
            let next =
                if at + 1 < requests.len() { &raw mut (*first.add(at + 1)).wr } else { std::ptr::null_mut() };
            (*first.add(at)).wr.next = next;
        }
    }
    // SAFETY: tests keep their buffers until the queue pairs are gone, or the work has ended.
    unsafe { qp.post_send(&raw mut (*first).wr) }.map_err(|PostFailure { errno, bad_wr }| {
        let taken = (bad_wr.addr() - first.addr()) / size_of::<Request>();
        (taken, errno)
    })
}

/// Posts a receive.
pub fn post_receive(qp: &QueuePair, id: u64, pieces: &[ibv_sge]) {
    try_post_receive(qp, id, pieces).expect("the receive is taken");
}

pub fn try_post_receive(qp: &QueuePair, id: u64, pieces: &[ibv_sge]) -> Result<(), i32> {
    let mut own = pieces.to_vec();
    let mut wr = receive(id, &mut own);
    // SAFETY: as in `post_all`.
    unsafe { qp.post_recv(&raw mut wr) }.map_err(|failure| failure.errno)
}

/// Posts a receive to a shared queue.
pub fn post_shared(srq: &SharedReceiveQueue, id: u64, pieces: &[ibv_sge]) -> Result<(), i32> {
    let mut own = pieces.to_vec();
    let mut wr = receive(id, &mut own);
    // SAFETY: as in `post_all`.
    unsafe { srq.post(&raw mut wr) }.map_err(|failure| failure.errno)
}

fn receive(id: u64, pieces: &mut [ibv_sge]) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: id,
        next: std::ptr::null_mut(),
        sg_list: pieces.as_mut_ptr(),
        num_sge: pieces.len() as i32,
    }
}

/// The immediate value of a completion, in this machine's order.
pub fn immediate(found: &ibv_wc) -> u32 {
    assert_ne!(found.wc_flags & IBV_WC_WITH_IMM, 0, "it has an immediate value");
    // SAFETY: a number, whatever was written to the union.
    u32::from_be(unsafe { found.anon_1.imm_data })
}

/// Asks to be told of the next solicited completion only.
pub fn request_solicited(cq: &CompletionQueue) {
    let raw = cq.as_raw();
    // SAFETY: the queue and its context are there.
    let answer = unsafe { (*(*raw).context).ops.req_notify_cq.expect("req_notify_cq")(raw, 1) };
    assert_eq!(answer, 0);
}

/// The status of a completion that is expected to be a failure, whose other fields mean nothing.
pub fn failure(found: &ibv_wc) -> ibv_wc_status {
    assert_ne!(found.status, IBV_WC_SUCCESS);
    found.status
}

/// Tries to register an address at which nothing is.
pub fn nowhere(
    domain: &Arc<ProtectionDomain>,
) -> Result<MemoryRegion, carrack_transports::verbs::sys::VerbsError> {
    // SAFETY: nothing is posted that would use it.
    unsafe { domain.register(std::ptr::without_provenance_mut(4096), 4096, all_access()) }
}
