//! Registration of users' host memory: with its pages locked, or on demand; with its writes in
//! order, or not.
//!
//! Memory of the device's own (receives, bounce buffers, credits) is always locked and ordered. It
//! is small and used all the time, and credit words are read without a completion.

use super::options::VerbsOptions;
use super::sys::AccessFlags;
use super::sys::bindings::{
    IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_ATOMIC, IBV_ODP_SUPPORT_READ, IBV_ODP_SUPPORT_WRITE,
    ibv_odp_caps,
};
use crate::mem::MemKind;

/// The wished-for flags that the device supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Wishes {
    on_demand: bool,
    /// Set if that includes memory whose words are changed.
    on_demand_words: bool,
    relaxed: bool,
}

impl Wishes {
    /// Returns the options that a device with these abilities supports. The text is the reason why
    /// one is missing.
    pub(super) fn of(options: &VerbsOptions, odp: &ibv_odp_caps) -> (Self, Option<&'static str>) {
        let reliable = odp.per_transport_caps.rc_odp_caps;
        let moves = IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_WRITE;
        let has = odp.general_caps & u64::from(IBV_ODP_SUPPORT) != 0 && reliable & moves == moves;
        let on_demand = options.on_demand && has;
        let wishes = Self {
            on_demand,
            on_demand_words: on_demand && reliable & IBV_ODP_SUPPORT_ATOMIC != 0,
            relaxed: options.relaxed,
        };
        let why = "the NIC has no on-demand paging of what reliable connections read and write \
            (odp_caps of ibv_query_device_ex): memory that is registered is locked, \
            CARRACK_VERBS_ODP notwithstanding";
        (wishes, (options.on_demand && !has).then_some(why))
    }

    /// Returns `true` if memory for such access may be written out of order. Words may not: a
    /// change must not be overtaken by the next.
    pub(super) fn relaxes(self, access: AccessFlags) -> bool {
        self.relaxed && !access.contains(AccessFlags::REMOTE_ATOMIC)
    }

    /// Returns the flags with which memory for such access is registered.
    pub(super) fn access(self, access: AccessFlags, kind: MemKind) -> AccessFlags {
        let has_words = access.contains(AccessFlags::REMOTE_ATOMIC);
        // Pinned memory is locked anyway, and the kernel cannot page in what a GPU's driver has
        // given out.
        let on_demand =
            kind == MemKind::Host && if has_words { self.on_demand_words } else { self.on_demand };
        let flag = |is_set, flag| if is_set { flag } else { AccessFlags::LOCAL_READ };
        access
            | flag(on_demand, AccessFlags::ON_DEMAND)
            | flag(self.relaxes(access), AccessFlags::RELAXED_ORDERING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: AccessFlags = AccessFlags::REMOTE_WRITE;
    const WORDS: AccessFlags = AccessFlags::REMOTE_ATOMIC;

    fn caps(general: u32, reliable: u32) -> ibv_odp_caps {
        let mut caps = ibv_odp_caps { general_caps: general.into(), ..Default::default() };
        caps.per_transport_caps.rc_odp_caps = reliable;
        caps
    }

    #[test]
    fn on_demand_is_what_the_device_has_and_else_there_is_a_reason() {
        let wanted = VerbsOptions { on_demand: true, ..VerbsOptions::default() };
        let moves = IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_WRITE;
        for (general, reliable, memory, words) in [
            (0, u32::MAX, false, false),
            (1, 0, false, false),
            (1, IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_ATOMIC, false, false),
            (1, moves, true, false),
            (1, moves | IBV_ODP_SUPPORT_ATOMIC, true, true),
        ] {
            let (wishes, why) = Wishes::of(&wanted, &caps(general, reliable));
            assert_eq!(why.is_none(), memory, "{reliable:#x}");
            let asks = |access, kind| wishes.access(access, kind).contains(AccessFlags::ON_DEMAND);
            assert_eq!((asks(SHOWN, MemKind::Host), asks(WORDS, MemKind::Host)), (memory, words));
            assert!(!asks(SHOWN, MemKind::Pinned));
            let (unasked, why) = Wishes::of(&VerbsOptions::default(), &caps(general, reliable));
            assert_eq!((unasked, why), (Wishes::default(), None));
            assert_eq!(unasked.access(SHOWN, MemKind::Host), SHOWN);
        }
    }

    #[test]
    fn writes_are_out_of_order_where_no_words_are() {
        let wanted = VerbsOptions { relaxed: true, ..VerbsOptions::default() };
        let (wishes, why) = Wishes::of(&wanted, &caps(0, 0));
        let asks =
            |access| wishes.access(access, MemKind::Host).contains(AccessFlags::RELAXED_ORDERING);
        assert_eq!(
            (asks(SHOWN), asks(AccessFlags::LOCAL_WRITE), asks(SHOWN | WORDS), why),
            (true, true, false, None)
        );
    }
}
