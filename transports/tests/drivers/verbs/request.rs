//! Work requests.

use carrack_transports::verbs::sys::bindings::*;
use carrack_transports::verbs::sys::{PostFailure, QueuePair, SharedReceiveQueue};

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
        self.wr.wr.atomic =
            ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey };
        self
    }

    pub fn id(mut self, id: u64) -> Self {
        self.wr.wr_id = id;
        self
    }

    /// Adds an immediate value, which is turned into network order.
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

/// Posts a list. On failure, returns the number of requests that were taken, and the reason.
pub fn post_all(qp: &QueuePair, requests: &[Request]) -> Result<(), (usize, i32)> {
    let mut own = requests.to_vec();
    let first = own.as_mut_ptr();
    for at in 0..own.len() {
        // SAFETY: places of the vector, which is not changed otherwise while the list is used.
        unsafe {
            (*first.add(at)).wr.sg_list = (&raw mut (*first.add(at)).pieces).cast();
            let next = if at + 1 < requests.len() {
                &raw mut (*first.add(at + 1)).wr
            } else {
                std::ptr::null_mut()
            };
            (*first.add(at)).wr.next = next;
        }
    }
    // SAFETY: tests keep their buffers until the queue pairs are gone, or the work has ended.
    unsafe { qp.post_send(&raw mut (*first).wr) }.map_err(|PostFailure { errno, bad_wr }| {
        // A device that refuses all requests because of the queue pair's state may name none; the
        // kernel's soft one does not.
        let taken =
            bad_wr.addr().checked_sub(first.addr()).map_or(0, |ahead| ahead / size_of::<Request>());
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
