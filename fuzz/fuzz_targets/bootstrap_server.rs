//! The launcher's table and fence, with ranks that send anything in any order.
#![no_main]

use arbitrary::Arbitrary;
use carrack::bootstrap::protocol::Frame;
use carrack::bootstrap::server::Server;
use carrack::bootstrap::{Departure, JobId};
use libfuzzer_sys::fuzz_target;

const RANKS: u32 = 4;

#[derive(Arbitrary, Debug)]
enum Step {
    Bytes(Vec<u8>),
    Put { key: u8, value: u8 },
    Get { key: u8 },
    Fence { number: u8 },
    Finished,
    Dies,
}

fuzz_target!(|steps: Vec<(u8, Step)>| {
    let mut server = Server::new(JobId::from_bytes([7; 16]), RANKS);
    for (rank, step) in steps {
        // One more than there are.
        let rank = u32::from(rank) % (RANKS + 1);
        let key = |key: u8| format!("key{}", key % 4);
        let outgoing = match step {
            Step::Bytes(bytes) => server.receive(rank, &bytes),
            Step::Put { key: k, value } => {
                server.handle(rank, Frame::Put { key: key(k), value: vec![value] })
            }
            Step::Get { key: k } => server.handle(rank, Frame::Get { key: key(k) }),
            Step::Fence { number } => {
                server.handle(rank, Frame::Fence { number: u64::from(number) })
            }
            Step::Finished => server.handle(rank, Frame::Finished),
            Step::Dies => server.departed(rank, Departure::Disconnected),
        };
        for (to, frame) in outgoing {
            assert!(to < RANKS);
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }
});
