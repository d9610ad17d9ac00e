//! Transfers of one rank, whose events the test brings about by itself.

use super::in_flight::{Event, InFlight, Run};
use super::rx::{Means, RxOp};
use super::target::Target;
use crate::Runtime;
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::{Rank, Tag};
use crate::op::OpContext;
use crate::protocol::rndv::{Ask, RndvReceiver, Violation};
use carrack_transports::contract::{DownCause, Payload};
use carrack_transports::mem::Buffer;
use std::time::Duration;

const ME: Rank = Rank(0);

#[test]
fn a_message_with_a_fragment_that_cannot_be_stored_ends_with_its_sender() {
    let ranks = Runtime::in_process(1).unwrap();
    let (core, device) = (&ranks[0].0, &ranks[0].default_device().0);
    // No call posts that; a copy to other host memory does not fail.
    let buffer = Buffer::Bytes(vec![0; 8].into());
    let op = OpContext::of_runtime(ME, Tag(1), 0, None);
    let target = Target::Receive { buffer, op };
    let at = (ME, device.receive(core, (ME, 8, target), Ask::Rts(5)));
    let mut run = Run::new(core, device);
    assert!(run.on(at, Event::Fragment { offset: 0, payload: Payload::Aside(vec![7; 8]) }));
    assert!(matches!(run.violations[..], [(ME, Violation::Broken(_))]), "{:?}", run.violations);
    assert!(run.into_ended().is_empty(), "without its bytes");
    let mut run = Run::new(core, device);
    let gone = OpError::PeerDown { rank: ME, cause: DownCause::Closed };
    assert!(run.on(at, Event::Down(gone)), "it is there when its sender's operations end");
    let (_, status) = run.into_ended().pop().unwrap();
    assert!(matches!(status.error.as_deref(), Some(OpError::PeerDown { .. })), "{status:?}");
    assert_eq!(device.transfers.table.count(), 0);
}

#[test]
fn a_deadline_is_noted_when_its_operation_can_be_found() {
    let ranks = Runtime::in_process(2).unwrap();
    let (core, device) = (&ranks[0].0, &ranks[0].default_device().0);
    let limit = || core.deadlines.limit(Duration::MAX);
    let begin = |peer: Rank| {
        let mut operation = OpContext::of_runtime(peer, Tag(1), 0, None);
        operation.deadline = Deadline::after(Duration::from_secs(1000));
        let (name, target) =
            (device.transfers.now(), Target::Get { buffer: vec![0; 8].into(), op: operation });
        let rx = RxOp::new(peer, target, RndvReceiver::new(name, 8, Ask::Elsewhere), Means::None);
        let mut run = Run::new(core, device);
        run.begin(name, InFlight::Rx(rx), None);
        run.into_ended()
    };
    // One that is not taken shows whether the time was noted first. Another thread would then look
    // for the operation in vain, and the deadline would be forgotten.
    device.transfers.table.fail(Rank(1), &DownCause::Closed);
    assert_eq!((begin(Rank(1)).len(), limit()), (1, Duration::MAX));
    assert!(begin(Rank(0)).is_empty() && limit() <= Duration::from_secs(1000));
}
