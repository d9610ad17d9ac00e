//! Options of queue pairs and paths.

use super::VerbsSettings;
use super::survey::SOFT_ROCE;
use crate::settings::Declared;

/// Attributes and paths of queue pairs. The numbers are those of the InfiniBand specification, as
/// `ibv_modify_qp` takes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Device and port, as `mlx5_0` or `mlx5_0:2`, or several, separated by commas, of which each
    /// rank of a node takes another one. Without this, the rank takes the fastest device with an
    /// active port. Among equals it takes the nearest to its CPUs, and then each rank of the node
    /// takes another one.
    pub device: Option<String>,
    /// Local rank, from 0: the ranks of a node share out devices by it.
    pub place: u32,
    /// Maximum number of NICs that large messages are spread over, 1 to 16. They are NICs that are
    /// named, or that are equally fast and near.
    pub rails: u8,
    /// Index of the port's GID. Without it, the GID is chosen by its type and address family.
    pub gid_index: Option<u8>,
    /// Traffic class of RoCE and of InfiniBand's global routes, 0 to 255.
    pub traffic_class: u8,
    /// Service level, 0 to 15.
    pub service_level: u8,
    /// Hop limit of global routes.
    pub hop_limit: u8,
    /// Time after which a request is sent again: 4.096 µs × 2^this, 1 to 31. The value 18 is a
    /// second, and the minimum for Soft-RoCE, which may carry out a repeated request twice.
    pub timeout: u8,
    /// Number of retries, 0 to 7. Soft-RoCE takes 7 for "for ever", and would never notice a peer
    /// that has gone.
    pub retries: u8,
    /// Time for which a sender waits if the receiver has no buffer posted, in the specification's
    /// code: 12 is 0.64 ms.
    pub rnr_timer: u8,
    /// Requests that a queue pair holds.
    pub send_depth: u32,
    /// Receives that a device posts: at most half of its packets.
    pub receives: u32,
    /// Largest message in bytes; the same on all ranks.
    pub packet_size: usize,
    /// Bytes of a large message that are registered at a time.
    pub chunk: usize,
    /// Set if users' host memory is registered without locking its pages, where the device can
    /// page on demand.
    pub on_demand: bool,
    /// Set if the device may write users' host memory out of order, completions excepted.
    pub relaxed: bool,
    /// Maximum number of queue pairs with a thread domain of their own, where the device has such.
    pub thread_domains: u32,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self::of(&VerbsSettings::defaults(), 8 << 10, 0)
    }
}

impl VerbsOptions {
    /// Takes the options from the settings, for packets of `packet_size` bytes and the rank at this
    /// place on its node.
    pub fn of(settings: &VerbsSettings, packet_size: usize, place: u32) -> Self {
        // The forms of the settings have the ranges.
        let byte = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let device = settings.verbs_device();
        Self {
            device: (!device.eq_ignore_ascii_case("auto")).then(|| device.to_owned()),
            place,
            rails: byte(settings.verbs_rails()),
            gid_index: settings.verbs_gid().map(byte),
            traffic_class: byte(settings.verbs_traffic_class()),
            service_level: byte(settings.verbs_service_level()),
            hop_limit: byte(settings.verbs_hop_limit()),
            timeout: byte(settings.verbs_timeout()),
            retries: byte(settings.verbs_retries()),
            rnr_timer: 12,
            send_depth: count(settings.verbs_depth()),
            receives: count(settings.verbs_receives()),
            packet_size,
            chunk: settings.verbs_chunk(),
            on_demand: settings.verbs_odp(),
            relaxed: settings.verbs_relaxed_ordering(),
            thread_domains: count(settings.verbs_thread_domains()),
        }
    }

    /// Checks that the numbers are allowed by the specification.
    ///
    /// # Errors
    /// The first that is not allowed, in words.
    pub fn check(&self) -> Result<(), String> {
        let limits = [
            ("number of rails", u32::from(self.rails), 1, 16),
            ("service level", u32::from(self.service_level), 0, 15),
            ("time-out", u32::from(self.timeout), 1, 31),
            ("number of retries", u32::from(self.retries), 0, 7),
            ("RNR timer", u32::from(self.rnr_timer), 0, 31),
            ("send depth", self.send_depth, 16, 1 << 15),
            ("number of receives", self.receives, 8, 1 << 15),
        ];
        for (what, value, least, most) in limits {
            if !(least..=most).contains(&value) {
                return Err(format!("a {what} of {value} is not between {least} and {most}"));
            }
        }
        Ok(())
    }

    /// Checks the options for a device of that vendor. Soft-RoCE carries a request out twice if it
    /// is sent again while the answer is in flight. It must have no reason to: the time-out has to
    /// be longer than any answer takes without a loss.
    pub(super) fn check_for(&self, device: &str, vendor: u32) -> Result<(), String> {
        let Self { timeout, .. } = self;
        match vendor {
            SOFT_ROCE if *timeout < LEAST_OF_SOFT_ROCE => Err(format!(
                "{device} is Soft-RoCE, which may deliver a message twice when its time-out runs \
                out, and one of {timeout} is short: \
                 set CARRACK_VERBS_TIMEOUT to {LEAST_OF_SOFT_ROCE} or more (docs/testing.md)"
            )),
            _ => Ok(()),
        }
    }
}

/// A second, within which even a busy machine answers.
const LEAST_OF_SOFT_ROCE: u8 = 18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_queue_pair_takes_are_named() {
        VerbsOptions::default().check().unwrap();
        let off = VerbsOptions { timeout: 0, ..VerbsOptions::default() };
        assert_eq!(off.check().unwrap_err(), "a time-out of 0 is not between 1 and 31");
        assert!(VerbsOptions { service_level: 16, ..VerbsOptions::default() }.check().is_err());
    }

    #[test]
    fn soft_roce_is_given_a_second_and_no_other_device_is_asked_for_it() {
        let short = VerbsOptions { timeout: 14, ..VerbsOptions::default() };
        let why = short.check_for("rxe0", SOFT_ROCE).unwrap_err();
        assert!(
            why.starts_with("rxe0 is Soft-RoCE") && why.contains("CARRACK_VERBS_TIMEOUT to 18"),
            "{why}"
        );
        short.check_for("mlx5_0", 0x2c9).unwrap();
        VerbsOptions::default().check_for("rxe0", SOFT_ROCE).unwrap();
    }
}
