//! Rank 3: an attacker with a queue pair and a TCP connection, which follows no protocol.

#![expect(unsafe_code, reason = "requests of its own making are posted")]

use crate::support::LIMIT;
use crate::support::nics::{Fixture, PACKET, fabric_of, nic};
use carrack::transports::contract::{Identity, PeerId};
use carrack_simulators::nic::{Config, SimulatedNic};
use carrack_transports::internals::verbs::{
    QueuePairEnd, RdmaAddress, SetupChannel, SetupMessage, SetupReceived, greeting,
};
use carrack_transports::net::greeting::{Failure, Progress};
use carrack_transports::net::key::DeviceKey;
use carrack_transports::net::proof::{Claim, Role};
use carrack_transports::verbs::port::choose_gid;
use carrack_transports::verbs::sys::bindings::{
    self as ibv, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_attr, ibv_send_wr, ibv_sge, ibv_wc,
};
use carrack_transports::verbs::sys::{
    AccessFlags, CompletionQueue, Context, MemoryRegion, ProtectionDomain, QueuePair,
    QueuePairSpec, SharedReceiveQueue,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const SECRET: [u8; 16] = [9; 16];
pub(crate) const ME: PeerId = PeerId(3);
pub(crate) const PATIENCE: Duration = Duration::from_secs(LIMIT.as_secs() / 2);

/// The attacker's equipment.
pub(crate) struct Attacker {
    pub(crate) channel: SetupChannel,
    pair: Arc<QueuePair>,
    queue: Arc<CompletionQueue>,
    region: MemoryRegion,
    memory: Box<[u8]>,
    /// The victim's end, when it has let this one in.
    pub(crate) theirs: QueuePairEnd,
    pub(crate) key: DeviceKey,
    pub(crate) mine: QueuePairEnd,
    gid_index: u8,
    _receives: Arc<SharedReceiveQueue>,
    _nic: Arc<SimulatedNic>,
}

/// Returns the address of a rank's TCP port.
pub(crate) fn door(fixture: &Fixture, rank: usize) -> std::net::SocketAddr {
    let address = RdmaAddress::decode(&fixture.sides[rank].device.address()).unwrap();
    address.hosts[0].at(address.tcp_port, 0)
}

/// Returns the next answer to a pending connection, while all ranks make progress.
#[track_caller]
pub(crate) fn answer(fixture: &mut Fixture, channel: &mut SetupChannel) -> SetupReceived {
    let start = Instant::now();
    loop {
        match channel.receive() {
            SetupReceived::Nothing => fixture.step(),
            other => return other,
        }
        assert!(start.elapsed() < PATIENCE, "no answer");
    }
}

/// Rings at a rank's door.
pub(crate) fn knock(fixture: &Fixture, rank: usize) -> SetupChannel {
    SetupChannel::dial(door(fixture, rank)).unwrap()
}

/// Goes through a greeting with a rank, to its end.
pub(crate) fn greet(
    fixture: &mut Fixture,
    channel: &mut SetupChannel,
    role: Role,
    (me, secret): (PeerId, [u8; 16]),
    device: DeviceKey,
) -> Result<Claim, Failure> {
    let mut greeting = greeting(role, &Identity { me, ranks: 4, secret }, device).unwrap();
    let start = Instant::now();
    loop {
        if let Progress::Proven(claim) = greeting.advance(channel)? {
            return Ok(claim);
        }
        fixture.step();
        assert!(start.elapsed() < PATIENCE, "no answer");
    }
}

impl Attacker {
    /// Opens equipment, and a connection to rank 0 that is not let in so far.
    pub(crate) fn at_the_door(fixture: &mut Fixture) -> Self {
        let nic = nic(Config::default(), &fabric_of(fixture));
        let context = Context::open(&nic.verbs(), "sim0").unwrap();
        let domain = ProtectionDomain::alloc(&context).unwrap();
        let queue = CompletionQueue::create(&context, 1024, None).unwrap();
        let receives = SharedReceiveQueue::create(&domain, 16, 1).unwrap();
        let spec = QueuePairSpec {
            send_cq: &queue,
            recv_cq: &queue,
            srq: Some(&receives),
            send_depth: 512,
            recv_depth: 0,
            send_sge: 1,
            recv_sge: 0,
            inline: 0,
        };
        let pair = QueuePair::create(&domain, &spec).unwrap();
        let mut memory = vec![0x5a; 4 * PACKET].into_boxed_slice();
        // SAFETY: the memory stays where it is, and goes after the registration.
        let region = unsafe {
            domain.register(
                memory.as_mut_ptr(),
                memory.len(),
                AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            )
        };
        let region = region.unwrap();
        let gid = choose_gid(&context.gids(1).unwrap(), None).unwrap();
        let mine = QueuePairEnd {
            gid: gid.gid,
            word_addr: region.addr() as u64,
            word_key: region.rkey(),
            queue_pair: pair.number(),
            first_psn: 5,
            packet_size: PACKET as u32,
            window: 4,
            lid: 0,
            mtu: 5,
            reads: 1,
        };
        let channel = knock(fixture, 0);
        let key = DeviceKey::fresh().unwrap();
        let theirs = QueuePairEnd::default();
        let gid_index = gid.index.0;
        Self {
            channel,
            pair,
            queue,
            region,
            memory,
            theirs,
            key,
            mine,
            gid_index,
            _receives: receives,
            _nic: nic,
        }
    }

    /// Proves that it is a rank's device, and introduces its end.
    pub(crate) fn say_hello(&mut self, fixture: &mut Fixture, from: PeerId) {
        let who = (from, SECRET);
        greet(fixture, &mut self.channel, Role::Dialer, who, self.key).unwrap();
        self.channel.send(&SetupMessage::Hello(self.mine)).unwrap();
    }

    /// Lets itself be let in.
    #[track_caller]
    pub(crate) fn enter(fixture: &mut Fixture) -> Self {
        let mut me = Self::at_the_door(fixture);
        me.say_hello(fixture, ME);
        me.is_let_in(fixture);
        me
    }

    #[track_caller]
    pub(crate) fn is_let_in(&mut self, fixture: &mut Fixture) {
        match answer(fixture, &mut self.channel) {
            SetupReceived::Message(SetupMessage::Welcome(end)) => self.theirs = end,
            other => panic!("{other:?}"),
        }
        self.join();
        self.channel.send(&SetupMessage::Ready).unwrap();
    }

    fn join(&self) {
        let access = ibv::IBV_ACCESS_REMOTE_WRITE;
        let mut attr = ibv_qp_attr {
            qp_state: ibv::IBV_QPS_INIT,
            port_num: 1,
            qp_access_flags: access,
            ..Default::default()
        };
        let mask = ibv::IBV_QP_STATE
            | ibv::IBV_QP_PKEY_INDEX
            | ibv::IBV_QP_PORT
            | ibv::IBV_QP_ACCESS_FLAGS;
        self.pair.modify(&mut attr, mask).unwrap();
        let grh = ibv_global_route {
            dgid: ibv_gid { raw: self.theirs.gid },
            flow_label: 0,
            sgid_index: self.gid_index,
            hop_limit: 64,
            traffic_class: 0,
        };
        let ah_attr = ibv_ah_attr {
            grh,
            dlid: 0,
            sl: 0,
            src_path_bits: 0,
            static_rate: 0,
            is_global: 1,
            port_num: 1,
        };
        let mut attr = ibv_qp_attr {
            qp_state: ibv::IBV_QPS_RTR,
            path_mtu: 5,
            dest_qp_num: self.theirs.queue_pair,
            rq_psn: self.theirs.first_psn,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ah_attr,
            ..Default::default()
        };
        let mask = ibv::IBV_QP_STATE
            | ibv::IBV_QP_AV
            | ibv::IBV_QP_PATH_MTU
            | ibv::IBV_QP_DEST_QPN
            | ibv::IBV_QP_RQ_PSN
            | ibv::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv::IBV_QP_MIN_RNR_TIMER;
        self.pair.modify(&mut attr, mask).unwrap();
        let mut attr = ibv_qp_attr {
            qp_state: ibv::IBV_QPS_RTS,
            sq_psn: 5,
            timeout: 14,
            retry_cnt: 6,
            rnr_retry: 7,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let mask = ibv::IBV_QP_STATE
            | ibv::IBV_QP_SQ_PSN
            | ibv::IBV_QP_TIMEOUT
            | ibv::IBV_QP_RETRY_CNT
            | ibv::IBV_QP_RNR_RETRY
            | ibv::IBV_QP_MAX_QP_RD_ATOMIC;
        self.pair.modify(&mut attr, mask).unwrap();
    }

    /// Posts a request of `len` bytes of its memory.
    fn post(&mut self, len: usize, opcode: u32, change: impl FnOnce(&mut ibv_send_wr)) {
        let mut part = ibv_sge {
            addr: self.region.addr() as u64,
            length: len as u32,
            lkey: self.region.lkey(),
        };
        let mut request = ibv_send_wr {
            sg_list: &raw mut part,
            num_sge: i32::from(len > 0),
            opcode,
            send_flags: ibv::IBV_SEND_SIGNALED,
            ..Default::default()
        };
        change(&mut request);
        // SAFETY: its memory lives as long as `self`, which alone writes it, between requests.
        unsafe { self.pair.post_send(&mut request) }.unwrap();
    }

    pub(crate) fn send(&mut self, len: usize) {
        self.post(len, ibv::IBV_WR_SEND, |_| {});
    }

    pub(crate) fn send_with_immediate(&mut self, len: usize, word: u32) {
        self.post(len, ibv::IBV_WR_SEND_WITH_IMM, |request| request.anon_1.imm_data = word.to_be());
    }

    /// Sends words, an immediate in front.
    pub(crate) fn send_words(&mut self, words: &[u64], immediate: u32) {
        for (place, word) in self.memory.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        self.send_with_immediate(8 * words.len(), immediate);
    }

    /// Writes a number to an address of the victim's.
    pub(crate) fn write(
        &mut self,
        value: u64,
        len: usize,
        addr: u64,
        key: u32,
        immediate: Option<u32>,
    ) {
        self.memory[..8].copy_from_slice(&value.to_le_bytes());
        let opcode = if immediate.is_some() {
            ibv::IBV_WR_RDMA_WRITE_WITH_IMM
        } else {
            ibv::IBV_WR_RDMA_WRITE
        };
        self.post(len, opcode, |request| {
            (request.wr.rdma.remote_addr, request.wr.rdma.rkey) = (addr, key);
            request.anon_1.imm_data = immediate.unwrap_or(0).to_be();
        });
    }

    /// Writes into the word that is its own to write.
    pub(crate) fn credit(&mut self, value: u64) {
        self.write(value, 8, self.theirs.word_addr, self.theirs.word_key, None);
    }

    pub(crate) fn read(&mut self, len: usize, addr: u64, key: u32) {
        self.post(len, ibv::IBV_WR_RDMA_READ, |request| {
            (request.wr.rdma.remote_addr, request.wr.rdma.rkey) = (addr, key);
        });
    }

    /// Returns the status of its next request.
    #[track_caller]
    pub(crate) fn status(&mut self, fixture: &mut Fixture) -> u32 {
        self.status_while(|| fixture.step())
    }

    /// Returns the status of its next request, and calls `others` while it waits.
    #[track_caller]
    pub(crate) fn status_while(&mut self, mut others: impl FnMut()) -> u32 {
        let start = Instant::now();
        loop {
            let mut space = [ibv_wc::default()];
            if let [completion] = self.queue.poll(&mut space).unwrap() {
                return completion.status;
            }
            others();
            assert!(start.elapsed() < PATIENCE, "its request does not end");
        }
    }
}
