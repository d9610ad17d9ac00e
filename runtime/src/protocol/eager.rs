//! The plan of one message: copied, lent, packed or offered.

use carrack_transports::contract::Caps;
use carrack_transports::mem::MemKind;
use carrack_transports::mem::copy::check_kinds;

/// The way in which a message is submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    /// Submit it: the link copies its bytes within the call.
    Copy,
    /// Submit its buffer: the link reads it where it is, and gives it back later.
    HandOver,
    /// Copy it into a host packet first, by the engine of its GPU; then submit that.
    Stage,
    /// Offer it; the receiver's copy engine fetches it from the GPU.
    Map,
    /// Offer it, since it is too long for one piece.
    Offer,
    /// Refuse it: it is too long for one piece, and no copy reaches its kind of memory.
    Refuse,
}

/// Decides the way of a message. `packet` is the size of a packet, which bounds the messages that
/// the other side can take in. `maps`: the other side can map this memory, and one copy from GPU to
/// GPU may replace the way through host memory.
#[inline]
pub(crate) fn plan(kind: MemKind, len: usize, caps: &Caps, packet: usize, maps: bool) -> Plan {
    if maps && len > 0 && matches!(kind, MemKind::Device(_)) {
        return Plan::Map;
    }
    if len > packet.min(caps.am_copied) {
        return if check_kinds(MemKind::Host, kind).is_ok() { Plan::Offer } else { Plan::Refuse };
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
        remote_memory: false,
        windows: false,
        polls_kernel: false,
        chunk: usize::MAX,
        locality: carrack_transports::contract::Locality::Network,
    };

    #[test]
    fn host_memory_is_copied_and_device_memory_never_is() {
        let device = MemKind::Device(GpuUuid([1; 16]));
        assert_eq!(plan(MemKind::Host, 8, &CAPS, 512, false), Plan::Copy);
        assert_eq!(plan(MemKind::Pinned, 512, &CAPS, 512, false), Plan::Copy);
        assert_eq!(plan(device, 8, &CAPS, 512, false), Plan::HandOver);
        let shm = Caps { am_owned: 0, am_from_device: false, ..CAPS };
        assert_eq!(plan(device, 8, &shm, 512, false), Plan::Stage);
        assert_eq!(
            plan(MemKind::Unknown, 8, &shm, 512, false),
            Plan::Stage,
            "and staging will refuse it"
        );
    }

    #[test]
    fn device_memory_that_can_be_mapped_is_and_nothing_else() {
        let device = MemKind::Device(GpuUuid([1; 16]));
        assert_eq!(plan(device, 1, &CAPS, 512, true), Plan::Map);
        assert_eq!(plan(device, 1 << 30, &CAPS, 512, true), Plan::Map);
        assert_eq!(plan(device, 0, &CAPS, 512, true), Plan::HandOver);
        assert_eq!(plan(MemKind::Host, 8, &CAPS, 512, true), Plan::Copy);
        assert_eq!(plan(MemKind::Managed(GpuUuid([1; 16])), 8, &CAPS, 512, true), Plan::HandOver);
    }

    #[test]
    fn what_fits_is_bounded_by_the_packet_and_by_the_link() {
        assert_eq!(plan(MemKind::Host, 513, &CAPS, 512, false), Plan::Offer);
        assert_eq!(plan(MemKind::Device(GpuUuid([1; 16])), 513, &CAPS, 512, false), Plan::Offer);
        assert_eq!(plan(MemKind::Managed(GpuUuid([1; 16])), 513, &CAPS, 512, true), Plan::Refuse);
        assert_eq!(plan(MemKind::Unknown, 513, &CAPS, 512, true), Plan::Refuse);
        assert_eq!(plan(MemKind::Host, 1001, &CAPS, 8192, false), Plan::Offer);
    }
}
