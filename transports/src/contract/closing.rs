//! The end of several devices.

use super::Device;
use std::time::Duration;

/// Pause between two looks at devices that wait for their peers. The first is [`SHORTEST`], each
/// further one an eighth longer, so the wait takes about an eighth longer than its cause.
const LONGEST: Duration = Duration::from_millis(5);
const SHORTEST: Duration = Duration::from_micros(50);

/// State of a device that closes. The maximum of several is the state of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Closing {
    /// Nothing is left to wait for.
    Over,
    /// Peers have not taken everything yet.
    Waiting,
    /// Bytes have moved since the last look.
    Moving,
}

/// Advances the close of all these devices at the same time, until the last one has nothing to
/// wait for: a peer that takes nothing delays no other's end.
pub fn close_all(devices: &[&dyn Device]) {
    let mut left = devices.to_vec();
    let mut pause = SHORTEST;
    loop {
        let mut of_all = Closing::Over;
        left.retain(|device| {
            let state = device.advance_close();
            of_all = of_all.max(state);
            state != Closing::Over
        });
        match of_all {
            Closing::Over => return,
            Closing::Moving => pause = SHORTEST,
            Closing::Waiting => {
                std::thread::sleep(pause);
                pause = LONGEST.min(pause * 9 / 8);
            }
        }
    }
}
