//! Claim of a GPU, which tells whether another process of this machine has a copier on it.
//!
//! A GPU gives the whole of itself to its processes in turn, and a resident kernel takes its
//! process's turn to the end. So if two processes share a GPU, neither has a copier.
//!
//! A process that wants one listens under a name made from the GPU's, in the abstract namespace.
//! It does so from the first copy of any length that it gives the GPU, or the first wait that it
//! gives a stream there. A process that finds the name taken connects to it, and has no copier; the
//! process that accepts the connection gives its own up. Not seen are processes that want no
//! copier, that live in another network namespace, or that have given the GPU no work through the
//! library.

use crate::mem::GpuUuid;
use crate::net::is_shortage;
use crate::net::packets::{Channel, ConnectError, Listener};
use rustix::io::Errno;
use std::fmt::Display;
use std::time::Duration;

/// Attempts, a millisecond apart, for a name that is taken but has no listener. Between the two
/// calls of a claim there are microseconds, unless the other process is not scheduled.
const LOOKS: u32 = 1000;

/// A process's claim on a GPU.
#[derive(Debug)]
pub struct GpuClaim(Listener);

impl GpuClaim {
    /// Claims a GPU.
    ///
    /// # Errors
    /// Another process has claimed it, and gives its claim up now; or the system has no socket.
    pub fn of(gpu: GpuUuid) -> Result<Self, String> {
        Self::pausing(gpu, || std::thread::sleep(Duration::from_millis(1)))
    }

    /// Claims a GPU as [`of`](Self::of) does, with another pause between two attempts.
    fn pausing(gpu: GpuUuid, mut pause: impl FnMut()) -> Result<Self, String> {
        let name = name(gpu);
        let unknown =
            |why: &dyn Display| format!("whether the GPU is shared cannot be found out: {why}");
        let mut last = shared(0);
        for _ in 0..LOOKS {
            match Listener::bind(name.as_bytes()) {
                Ok(listener) => return Ok(Self(listener)),
                Err(Errno::ADDRINUSE) => {}
                Err(error) if is_shortage(error) => {
                    last = unknown(&error);
                    pause();
                    continue;
                }
                Err(error) => return Err(unknown(&error)),
            }
            match Channel::connect(name.as_bytes()) {
                Ok(other) => return Err(shared(other.peer().map_or(0, |other| other.pid))),
                // This user's processes could not reach a claim under that name.
                Err(error @ ConnectError::OtherUser(_)) => return Err(unknown(&error)),
                // The owner of the name is about to listen: it would miss this connection, and
                // have a copier all the same. Or it gives the name up.
                Err(ConnectError::System(Errno::CONNREFUSED)) => last = shared(0),
                Err(ConnectError::System(error)) if is_shortage(error) => last = unknown(&error),
                Err(_) => return Err(shared(0)),
            }
            pause();
        }
        Err(last)
    }

    /// Checks that no other process of this user has wanted a copier on this GPU. Costs a system
    /// call.
    ///
    /// # Errors
    /// Another process wants one, or has wanted one; its pid is in the text.
    pub fn check(&self) -> Result<(), String> {
        match self.0.accept() {
            Ok(Some(other)) => Err(shared(other.peer().map_or(0, |other| other.pid))),
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

fn name(gpu: GpuUuid) -> String {
    format!("carrack-copier/{}/{gpu}", rustix::process::geteuid().as_raw())
}

/// Returns the reason why there is no copier on a GPU that another process wants one on. `pid`: 0
/// if unknown, as for a process in another namespace.
pub fn shared(pid: i32) -> String {
    let who = if pid == 0 { "another process".to_owned() } else { format!("process {pid}") };
    format!(
        "{who} wants a copier on this GPU, too: a GPU that ranks share has none (give each rank a \
        GPU of its own, by \
         CUDA_VISIBLE_DEVICES)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
    };
    use std::os::fd::OwnedFd;

    /// Returns a process's socket that is bound and does not listen yet.
    fn bound(gpu: GpuUuid) -> OwnedFd {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&socket, &SocketAddrUnix::new_abstract_name(name(gpu).as_bytes()).unwrap()).unwrap();
        socket
    }

    fn gpu(number: u8) -> GpuUuid {
        let [a, b, c, d] = std::process::id().to_le_bytes();
        GpuUuid([a, b, c, d, number, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    }

    #[test]
    fn of_two_who_claim_a_gpu_neither_has_it() {
        let first = GpuClaim::of(gpu(1)).unwrap();
        assert_eq!(first.check(), Ok(()));
        let own = format!("process {}", std::process::id());
        let why = GpuClaim::of(gpu(1)).unwrap_err();
        assert!(why.contains(&own) && why.contains("CUDA_VISIBLE_DEVICES"), "{why}");
        let why = first.check().unwrap_err();
        assert!(why.contains(&own), "{why}");
    }

    #[test]
    fn claims_on_two_gpus_are_two_and_end_with_their_holders() {
        let (first, second) = (GpuClaim::of(gpu(2)).unwrap(), GpuClaim::of(gpu(3)).unwrap());
        assert_eq!((first.check(), second.check()), (Ok(()), Ok(())));
        drop(first);
        assert_eq!(GpuClaim::of(gpu(2)).unwrap().check(), Ok(()));
    }
    #[test]
    fn who_has_the_name_and_does_not_listen_yet_is_knocked_for_when_it_does() {
        let first = bound(gpu(4));
        let mut pauses = 0;
        let second = GpuClaim::pausing(gpu(4), || {
            pauses += 1;
            listen(&first, 1).unwrap();
        });
        let own = format!("process {}", std::process::id());
        assert!(second.unwrap_err().contains(&own));
        assert_eq!(pauses, 1);
        rustix::net::accept(&first).expect("the knock");
    }

    #[test]
    fn who_gives_the_name_up_before_it_listens_leaves_it_to_the_next() {
        let mut first = Some(bound(gpu(5)));
        assert_eq!(GpuClaim::pausing(gpu(5), || first = None).unwrap().check(), Ok(()));
    }

    /// Runs a function as another user, if this user may become another.
    fn as_another_user<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
        let nobody = rustix::process::Uid::from_raw(65534);
        // For this thread alone.
        let become_nobody = || rustix::thread::set_thread_res_uid(None, nobody, None).is_ok();
        std::thread::scope(|scope| scope.spawn(|| become_nobody().then(act)).join().unwrap())
    }

    #[test]
    fn a_process_of_another_user_that_knocks_does_not_cost_the_claim() {
        let first = GpuClaim::of(gpu(7)).unwrap();
        let name = name(gpu(7));
        let Some(knocked) = as_another_user(|| Channel::connect(name.as_bytes())) else {
            return println!("not tested: this user cannot become another");
        };
        assert!(matches!(knocked, Err(ConnectError::OtherUser(_))), "{knocked:?}");
        assert_eq!(first.check(), Ok(()));
        Channel::connect(name.as_bytes()).unwrap();
        assert!(first.check().is_err(), "one of this user is heard behind it");
    }

    #[test]
    fn a_name_that_a_process_of_another_user_has_taken_is_no_claim_and_is_told_so() {
        let name = name(gpu(8));
        let Some(taken) = as_another_user(|| Listener::bind(name.as_bytes()).unwrap()) else {
            return println!("not tested: this user cannot become another");
        };
        let why = GpuClaim::of(gpu(8)).unwrap_err();
        assert!(why.contains("of user 65534"), "{why}");
        drop(taken);
        assert!(GpuClaim::of(gpu(8)).is_ok());
    }

    #[test]
    fn who_never_listens_has_the_name_and_is_not_waited_for_for_ever() {
        let _first = bound(gpu(6));
        let mut pauses = 0;
        assert!(
            GpuClaim::pausing(gpu(6), || pauses += 1).unwrap_err().contains("CUDA_VISIBLE_DEVICES")
        );
        assert_eq!(pauses, LOOKS);
    }
}
