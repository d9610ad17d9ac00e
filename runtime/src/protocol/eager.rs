//! How one message is to be submitted.

use carrack_transports::contract::Caps;
use carrack_transports::mem::MemKind;

/// What to do with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    /// Submit it: the link copies its bytes within the call.
    Copy,
    /// Submit its buffer: the link reads it where it is, and gives it back later.
    HandOver,
    /// Copy it into a host packet first, by the engine of its GPU; then submit that.
    Stage,
    /// It is too long for one piece: offer it.
    Offer,
    /// It is too long for one piece, and has to be copied into host memory first.
    StageAndOffer,
}

/// Decides. `packet` is what a packet holds, which bounds what the other side can take in.
#[inline]
pub(crate) fn plan(kind: MemKind, len: usize, caps: &Caps, packet: usize) -> Plan {
    if len > packet.min(caps.am_copied) {
        return if kind.is_host() { Plan::Offer } else { Plan::StageAndOffer };
    }
    match kind {
        MemKind::Host | MemKind::Pinned => Plan::Copy,
        _ if caps.takes_am(kind, len) => Plan::HandOver,
        _ => Plan::Stage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_transports::mem::GpuUuid;

    const CAPS: Caps = Caps {
        am_inline: 40,
        am_copied: 1000,
        am_owned: 1000,
        am_from_device: true,
        am_to_device: false,
        orders_on_events: false,
    };

    #[test]
    fn host_memory_is_copied_and_device_memory_never_is() {
        let device = MemKind::Device(GpuUuid([1; 16]));
        assert_eq!(plan(MemKind::Host, 8, &CAPS, 512), Plan::Copy);
        assert_eq!(plan(MemKind::Pinned, 512, &CAPS, 512), Plan::Copy);
        assert_eq!(plan(device, 8, &CAPS, 512), Plan::HandOver);
        let shm = Caps { am_owned: 0, am_from_device: false, ..CAPS };
        assert_eq!(plan(device, 8, &shm, 512), Plan::Stage);
        assert_eq!(plan(MemKind::Unknown, 8, &shm, 512), Plan::Stage, "and staging will refuse it");
    }

    #[test]
    fn what_fits_is_bounded_by_the_packet_and_by_the_link() {
        assert_eq!(plan(MemKind::Host, 513, &CAPS, 512), Plan::Offer);
        assert_eq!(plan(MemKind::Device(GpuUuid([1; 16])), 513, &CAPS, 512), Plan::StageAndOffer);
        assert_eq!(plan(MemKind::Host, 1001, &CAPS, 8192), Plan::Offer);
    }
}
