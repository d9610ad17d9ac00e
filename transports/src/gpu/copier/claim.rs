//! Whether another process of this machine has a copier on the same GPU.
//!
//! A GPU gives its processes the whole of it in turn, and a resident kernel takes its process's turn to the end: so where two
//! processes share a GPU neither has a copier. Each that wants one listens under a name made from the GPU's, in the abstract
//! namespace. Who finds the name taken knocks, and has none; who is knocked for gives its own up. What does not want a copier is
//! not seen, nor what lives in another network namespace.

use crate::fd_channel::{Channel, Listener};
use crate::mem::GpuUuid;
use rustix::io::Errno;

/// A process's claim on a GPU.
#[derive(Debug)]
pub(crate) struct Claim(Listener);

impl Claim {
    /// Claims a GPU.
    ///
    /// # Errors
    /// Another process has claimed it, which gives its claim up now; or the system has no socket.
    pub(crate) fn of(gpu: GpuUuid) -> Result<Self, String> {
        let name = format!("carrack-copier/{}/{gpu}", rustix::process::getuid().as_raw());
        match Listener::bind(name.as_bytes()) {
            Ok(listener) => Ok(Self(listener)),
            Err(Errno::ADDRINUSE) => {
                let other = Channel::connect(name.as_bytes()).and_then(|channel| channel.peer());
                Err(shared(other.map_or(0, |other| other.pid)))
            }
            Err(why) => Err(format!("whether the GPU is shared cannot be found out: {why}")),
        }
    }

    /// Whether nobody else has wanted a copier on this GPU. A system call.
    ///
    /// # Errors
    /// Somebody has, or has been there: who.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.0.accept() {
            Ok(Some(other)) => Err(shared(other.peer().map_or(0, |other| other.pid))),
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

fn shared(pid: i32) -> String {
    format!(
        "process {pid} wants a copier on this GPU, too: a GPU that ranks share has none (give each rank a GPU of its own, by \
         CUDA_VISIBLE_DEVICES)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8) -> GpuUuid {
        let [a, b, c, d] = std::process::id().to_le_bytes();
        GpuUuid([a, b, c, d, number, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    }

    #[test]
    fn of_two_who_claim_a_gpu_neither_has_it() {
        let first = Claim::of(gpu(1)).unwrap();
        assert_eq!(first.check(), Ok(()));
        let own = format!("process {}", std::process::id());
        let why = Claim::of(gpu(1)).unwrap_err();
        assert!(why.contains(&own) && why.contains("CUDA_VISIBLE_DEVICES"), "{why}");
        let why = first.check().unwrap_err();
        assert!(why.contains(&own), "{why}");
    }

    #[test]
    fn claims_on_two_gpus_are_two_and_end_with_their_holders() {
        let (first, second) = (Claim::of(gpu(2)).unwrap(), Claim::of(gpu(3)).unwrap());
        assert_eq!((first.check(), second.check()), (Ok(()), Ok(())));
        drop(first);
        assert_eq!(Claim::of(gpu(2)).unwrap().check(), Ok(()));
    }
}
