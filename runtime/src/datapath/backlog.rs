//! The operations that wait in backlogs: each is copied, offered or submitted at its turn.

use super::carrier::Carrier;
use super::port::Port;
use crate::error::OpError;
use crate::op::{OnLink, OpContext};
use crate::peer::backlog::{Parked, Stage};
use crate::peer::route::Linked;
use crate::protocol::eager::{Plan, plan};
use crate::protocol::header::Message;
use crate::staging::{BLOCK, Direction};
use carrack_transports::contract::{Op, OpToken, Submit, SubmitError};
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Buffer, MemKind, PacketSource, Transfer};

/// The result of one step.
pub(crate) enum BacklogStep {
    /// The operation still waits for its turn or for room.
    Waits,
    /// The operation waits for an event of the user. Or no more offers may be in flight, and it
    /// waits for the end of operations with this peer. Either may need further messages of the
    /// runtime.
    Held,
    /// The operation has ended.
    Ended(Result<(), OpError>),
    /// The link has it now.
    HandedOver,
}

impl BacklogStep {
    /// Returns the state of an operation that could not be offered: it waits for room on the link,
    /// or for the end of other offers.
    fn until_offered(may_offer: bool) -> Self {
        if may_offer { Self::Waits } else { Self::Held }
    }
}

impl Parked {
    /// Continues the operation as far as possible now.
    pub(crate) fn step(
        &mut self,
        carrier: &Carrier,
        device: &Port,
        linked: &Linked,
    ) -> BacklogStep {
        loop {
            let stage = std::mem::replace(&mut self.stage, Stage::Ended(Buffer::Empty));
            let (stage, waits) = match stage {
                Stage::After(event, buffer) => match event.query() {
                    Ok(false) => (Stage::After(event, buffer), Some(BacklogStep::Held)),
                    Ok(true) => (Stage::Ready(buffer), None),
                    Err(error) => {
                        self.stage = Stage::Ended(buffer);
                        return BacklogStep::Ended(Err(OpError::Event(error)));
                    }
                },
                Stage::Ready(buffer) => match self.begin(buffer, carrier, device, linked) {
                    Ok(next) => next,
                    Err(step) => return step,
                },
                Stage::Staging(mut transfer, block) => match transfer.poll() {
                    None => (Stage::Staging(transfer, block), Some(BacklogStep::Waits)),
                    Some(outcome) => {
                        let buffer = transfer.into_buffers().1;
                        match outcome {
                            Ok(()) => (Stage::Staged(block, buffer), None),
                            Err(error) => {
                                self.stage = Stage::Ended(buffer);
                                return BacklogStep::Ended(Err(OpError::Copy(error)));
                            }
                        }
                    }
                },
                Stage::Staged(block, mut buffer) => {
                    if self.has_to_offer(device) {
                        match self.offer(device, linked, &mut buffer, true) {
                            Ok(step) => {
                                self.stage = Stage::Ended(buffer);
                                return step;
                            }
                            Err(waits) => {
                                self.stage = Stage::Staged(block, buffer);
                                return waits;
                            }
                        }
                    }
                    let copy = block.first(buffer.len());
                    let op = Op::AmCopied { header: self.header, bytes: copy.view() };
                    match linked.link.submit(op) {
                        Ok(Submit::Busy(_)) => {
                            (Stage::Staged(block, buffer), Some(BacklogStep::Waits))
                        }
                        done => {
                            self.stage = Stage::Ended(buffer);
                            return self.submitted(done);
                        }
                    }
                }
                Stage::Ended(buffer) => {
                    self.stage = Stage::Ended(buffer);
                    return BacklogStep::Ended(Ok(()));
                }
            };
            self.stage = stage;
            if let Some(waits) = waits {
                return waits;
            }
        }
    }

    /// Begins an operation whose turn has come.
    fn begin(
        &mut self,
        mut buffer: Buffer,
        carrier: &Carrier,
        device: &Port,
        linked: &Linked,
    ) -> Result<(Stage, Option<BacklogStep>), BacklogStep> {
        if let Some(required) = self.required.filter(|path| *path != linked.transport) {
            self.stage = Stage::Ended(buffer);
            let error = linked.wrong_path(self.op.rank, required);
            return Err(BacklogStep::Ended(Err(OpError::of_post(error, self.op.rank))));
        }
        let (kind, len, packet) = (buffer.kind(), buffer.len(), device.host_pool.packet_size());
        let maps = (Message::is_send(self.header) || len > packet) && carrier.may_map(linked);
        let mut planned = plan(kind, len, &linked.caps, packet, maps);
        if planned == Plan::Map {
            match device.offer_mapped(carrier, linked, self.header, self.context(), &mut buffer) {
                Some(Ok(Submit::Busy(_))) => {
                    let may_offer = !device.transfers.is_full();
                    return Ok((Stage::Ready(buffer), Some(BacklogStep::until_offered(may_offer))));
                }
                Some(Ok(_)) => return Err(BacklogStep::HandedOver),
                Some(Err(error)) => {
                    self.stage = Stage::Ended(buffer);
                    return Err(BacklogStep::Ended(Err(OpError::of_submit(&error, self.op.rank))));
                }
                None => planned = plan(kind, len, &linked.caps, packet, false),
            }
        }
        match planned {
            Plan::Copy | Plan::HandOver if self.has_to_offer(device) => {
                self.offer_now(buffer, device, linked, true)
            }
            Plan::Copy => {
                let op = Op::AmCopied { header: self.header, bytes: buffer.view() };
                match linked.link.submit(op) {
                    Ok(Submit::Busy(_)) => Ok((Stage::Ready(buffer), Some(BacklogStep::Waits))),
                    done => {
                        self.stage = Stage::Ended(buffer);
                        Err(self.submitted(done))
                    }
                }
            }
            Plan::HandOver => {
                let Ok(token) = device.outstanding.insert(OnLink::of(self.context())) else {
                    return Ok((Stage::Ready(buffer), Some(BacklogStep::Waits)));
                };
                let op =
                    Op::AmOwned { header: self.header, buffer: &mut buffer, token: OpToken(token) };
                match linked.link.submit(op) {
                    Ok(Submit::Posted) => Err(BacklogStep::HandedOver),
                    other => {
                        device.outstanding.take(token);
                        match other {
                            Ok(Submit::Busy(_)) => {
                                Ok((Stage::Ready(buffer), Some(BacklogStep::Waits)))
                            }
                            done => {
                                self.stage = Stage::Ended(buffer);
                                Err(self.submitted(done))
                            }
                        }
                    }
                }
            }
            Plan::Stage | Plan::Map if len <= BLOCK => self.copy_first(buffer, carrier),
            Plan::Offer | Plan::Stage | Plan::Map => self.offer_now(buffer, device, linked, false),
            Plan::Refuse => {
                let refused = check_kinds(MemKind::Host, kind);
                self.stage = Stage::Ended(buffer);
                Err(BacklogStep::Ended(refused.map_err(OpError::Copy)))
            }
        }
    }

    /// Returns `true` if its receiver keeps too many messages to take it whole.
    fn has_to_offer(&self, device: &Port) -> bool {
        Message::decode(self.header).is_ok_and(|message| !message.is_of_runtime())
            && device.offers_all(self.op.rank)
    }

    /// Starts the copy into a block.
    fn copy_first(
        &mut self,
        mut buffer: Buffer,
        carrier: &Carrier,
    ) -> Result<(Stage, Option<BacklogStep>), BacklogStep> {
        let (kind, len) = (buffer.view().place().kind(), buffer.len());
        let refused = match buffer.view().place().gpu().cloned() {
            // Each peer may take one: the operations behind it wait.
            Some(gpu) => match carrier.staging.take(&gpu, Direction::Out, true) {
                Some(block) => match Transfer::start(block.first(len), buffer) {
                    Ok(transfer) => return Ok((Stage::Staging(transfer, block), None)),
                    Err(refused) => {
                        buffer = refused.src;
                        Err(refused.cause)
                    }
                },
                None => return Ok((Stage::Ready(buffer), Some(BacklogStep::Waits))),
            },
            None => check_kinds(MemKind::Host, kind),
        };
        self.stage = Stage::Ended(buffer);
        Err(BacklogStep::Ended(refused.map_err(OpError::Copy)))
    }

    fn offer_now(
        &mut self,
        mut buffer: Buffer,
        device: &Port,
        linked: &Linked,
        is_held: bool,
    ) -> Result<(Stage, Option<BacklogStep>), BacklogStep> {
        match self.offer(device, linked, &mut buffer, is_held) {
            Ok(step) => {
                self.stage = Stage::Ended(buffer);
                Err(step)
            }
            Err(waits) => Ok((Stage::Ready(buffer), Some(waits))),
        }
    }

    /// Offers a message. The error tells the obstacle.
    fn offer(
        &self,
        device: &Port,
        linked: &Linked,
        bytes: &mut Buffer,
        is_held: bool,
    ) -> Result<BacklogStep, BacklogStep> {
        if !device.transfers.may_offer(self.header, is_held) {
            return Err(BacklogStep::until_offered(false));
        }
        match device.transfers.offer(linked, self.header, self.context(), bytes, None) {
            Ok(Submit::Busy(_)) => Err(BacklogStep::until_offered(true)),
            Ok(_) => Ok(BacklogStep::HandedOver),
            Err(error) => Ok(BacklogStep::Ended(Err(OpError::of_submit(&error, self.op.rank)))),
        }
    }

    /// Returns the context of the operation, for a link or another owner of its buffer.
    fn context(&self) -> OpContext {
        OpContext { comp: self.op.comp.clone(), ..self.op }
    }

    fn submitted(&self, submitted: Result<Submit, SubmitError>) -> BacklogStep {
        match submitted {
            Ok(_) => BacklogStep::Ended(Ok(())),
            Err(error) => BacklogStep::Ended(Err(OpError::of_submit(&error, self.op.rank))),
        }
    }
}
