//! MPI: the ranks of a communicator that the program hands in.
//!
//! The functions are those of the MPI library that the program has loaded. Its ABI says what a
//! handle is. The first of these that fits is the library's, because Open MPI has its own symbols
//! below the standard's ABI, too:
//!
//! | ABI | known by | a handle |
//! |---|---|---|
//! | the standard's | `MPI_Abi_get_version`, 1 or later | a small number, or an address |
//! | Open MPI's | its symbol `ompi_mpi_comm_world` | an address |
//! | MPICH's | neither | an `int` |
//!
//! MPI gives rank 0's card to all ranks, and is not called afterwards: it may end first.

#![expect(unsafe_code, reason = "the program's MPI library is called by C's rules")]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;

use carrack_transports::net::parts::{self, Rest};
use libloading::os::unix::Library;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

use super::error::BootstrapError;
use super::exchange::{self, Exchange, Seat};
use super::launchers;
use super::protocol::SIZE_VARIABLE;
use super::source::variable;
use super::tcp::FromEnvironment;
use super::tcp::variables::WORLD_SIZE;
use crate::settings::{BootstrapChoice, Settings};

/// The bytes in which a card is shared: its length, and then the card.
const ROOM: usize = 4096;

/// The bytes by which a rank presents itself.
#[derive(Clone, Copy, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RankBytes {
    rank: U32,
    /// Count of ranks; 0 if the rank has failed.
    count: U32,
    /// The boot id of its kernel.
    node: [u8; 16],
}

/// A communicator of the MPI library that this process has loaded.
///
/// Its ranks are those of a job of their own, with the same numbers. Each rank that is in several
/// communicators can be in as many jobs at once, unless `CARRACK_PORT` is set.
///
/// With the feature `mpi`, a reference to a communicator of the crate `mpi` is one.
#[derive(Clone, Copy, Debug)]
pub struct MpiComm<'a> {
    raw: usize,
    lent: PhantomData<&'a ()>,
}

impl MpiComm<'_> {
    /// Takes a raw handle: `comm as usize` of an `MPI_Comm`, which is an `int` or a pointer.
    ///
    /// # Safety
    ///
    /// While the value is used, the handle is `MPI_COMM_NULL` or a communicator. Its library is the
    /// one whose functions this process finds by their names. `MPI_Finalize` is not called. Where
    /// the value is [joined](Self::join), the thread level that the program has asked for lets the
    /// thread call MPI. No other thread calls collective functions on that communicator.
    pub const unsafe fn from_raw(raw: usize) -> Self {
        Self { raw, lent: PhantomData }
    }

    /// Joins the job of the communicator's ranks. Each of them must call this, as collective
    /// functions of MPI: in the same order as others on this communicator. Their runtimes also end
    /// in the same order, because rank 0 of a job waits for the end of the others.
    ///
    /// An error of MPI ends the program, unless the communicator's error handler returns.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Mpi`] if there is no such job, and the errors of bootstraps over TCP.
    pub fn join(self, settings: &Settings) -> Result<FromEnvironment, BootstrapError> {
        exchange::meet(failed, self.connect(Some(settings.bootstrap()))?, settings)
    }

    /// Tells the other ranks, which wait for this one to [join](Self::join), that it has failed.
    pub(crate) fn decline(self) {
        // The error that this rank has counts, and not one of MPI.
        let _ = self.connect(None);
    }

    /// Finds this rank's place. A rank without a choice does not join.
    fn connect(self, choice: Option<BootstrapChoice>) -> Result<Box<dyn Exchange>, BootstrapError> {
        let library = Library::this();
        let address = |name: &str| {
            // SAFETY: the symbol is not called or read; its address alone is used.
            let symbol = unsafe { library.get::<*mut c_void>(name) };
            symbol.ok().map(|symbol| symbol.as_raw_ptr().expose_provenance())
        };
        let open_mpi = ["ompi_mpi_comm_world", "ompi_mpi_comm_null", "ompi_mpi_byte"].map(address);
        if abi_version(&library) >= 1 {
            Mpi::<*mut c_void>::connect(&library, self.raw, [0x101, 0x100, 0x247], choice)
        } else if let [Some(world), Some(null), Some(byte)] = open_mpi {
            Mpi::<*mut c_void>::connect(&library, self.raw, [world, null, byte], choice)
        } else {
            let handles = [0x4400_0000, 0x0400_0000, 0x4c00_010d];
            Mpi::<c_int>::connect(&library, self.raw, handles, choice)
        }
    }
}

#[cfg(feature = "mpi")]
impl<'a, C: mpi::topology::Communicator> From<&'a C> for MpiComm<'a> {
    fn from(comm: &'a C) -> Self {
        Self { raw: comm.as_raw().0 as usize, lent: PhantomData }
    }
}

/// Returns the major version of the standard ABI that the library has, or a number below 1.
fn abi_version(library: &Library) -> c_int {
    type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the type is that of MPI 5.0 for a function of this name, which may be called at any
    // time. The places for the answer are ours.
    unsafe {
        match library.get::<Version>("MPI_Abi_get_version") {
            Ok(version) if version(&raw mut major, &raw mut minor) == 0 => major,
            _ => 0,
        }
    }
}

/// A handle of an ABI, as it is passed to functions.
trait Handle: Copy + PartialEq + fmt::Debug + 'static {
    fn of(raw: usize) -> Self;

    /// Returns `true` if the word is a handle, extended with or without its sign.
    fn is_one(raw: usize) -> bool;
}

impl Handle for c_int {
    fn of(raw: usize) -> Self {
        raw as Self
    }

    fn is_one(raw: usize) -> bool {
        [raw as Self as usize, raw as u32 as usize].contains(&raw)
    }
}

impl Handle for *mut c_void {
    fn of(raw: usize) -> Self {
        std::ptr::with_exposed_provenance_mut(raw)
    }

    fn is_one(_: usize) -> bool {
        true
    }
}

type Inquiry = unsafe extern "C" fn(*mut c_int) -> c_int;
type CommInquiry<H> = unsafe extern "C" fn(H, *mut c_int) -> c_int;
type Allgather<H> =
    unsafe extern "C" fn(*const c_void, c_int, H, *mut c_void, c_int, H, H) -> c_int;
type Bcast<H> = unsafe extern "C" fn(*mut c_void, c_int, H, c_int, H) -> c_int;
type MpiErrorString = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;

/// The functions of the library, and a communicator that is not null.
#[derive(Debug)]
struct Mpi<H> {
    rank: CommInquiry<H>,
    size: CommInquiry<H>,
    is_between: CommInquiry<H>,
    allgather: Allgather<H>,
    bcast: Bcast<H>,
    error_string: MpiErrorString,
    comm: usize,
    byte: usize,
    seat: Seat,
}

impl<H: Handle> Mpi<H> {
    /// Finds this rank's place. The handles are those of all ranks, of no communicator, and of the
    /// type of a byte.
    fn connect(
        library: &Library,
        comm: usize,
        [world, null, byte]: [usize; 3],
        choice: Option<BootstrapChoice>,
    ) -> Result<Box<dyn Exchange>, BootstrapError> {
        let seat = Seat { rank: 0, size: 1, place_on_node: 0 };
        // SAFETY: the types are those of the MPI standard for functions of these names.
        let mut mpi = unsafe {
            Self {
                rank: function(library, "MPI_Comm_rank")?,
                size: function(library, "MPI_Comm_size")?,
                is_between: function(library, "MPI_Comm_test_inter")?,
                allgather: function(library, "MPI_Allgather")?,
                bcast: function(library, "MPI_Bcast")?,
                error_string: function(library, "MPI_Error_string")?,
                comm,
                byte,
                seat,
            }
        };
        let ask = |call| {
            let mut answer = 0;
            // SAFETY: the type is the standard's for the four names below. Every thread may call
            // those, the first two at any time, the others between them. The place for the answer
            // is ours.
            let code = unsafe { function::<Inquiry>(library, call)?(&raw mut answer) };
            mpi.check(call, code).map(|()| answer)
        };
        if ask("MPI_Initialized")? == 0 {
            return Err(failed("MPI is not initialised: call MPI_Init_thread first".into()));
        }
        if ask("MPI_Finalized")? != 0 {
            let why = "MPI is finalised: start the runtime before MPI_Finalize";
            return Err(failed(why.into()));
        }
        // The levels of all ABIs below MPI_THREAD_SERIALIZED.
        if ask("MPI_Is_thread_main")? == 0 && matches!(ask("MPI_Query_thread")?, 0 | 1 | 1024) {
            let why = "this thread may not call MPI: call this in the thread that has initialised \
                MPI, or initialise it by MPI_Init_thread with MPI_THREAD_SERIALIZED";
            return Err(failed(why.into()));
        }
        if !H::is_one(comm) {
            return Err(failed(format!(
                "it is {comm:#x}, and no `int` as in MPICH's ABI, which the loaded MPI library \
                has: build the program with that library's mpi.h"
            )));
        }
        if H::of(comm) == H::of(null) {
            let why = "it is MPI_COMM_NULL: this process is not of that communicator";
            return Err(failed(why.into()));
        }
        if mpi.ask("MPI_Comm_test_inter", mpi.is_between, comm)? != 0 {
            let why = "it is an inter-communicator: merge it by MPI_Intercomm_merge first";
            return Err(failed(why.into()));
        }
        let [rank, size] =
            [mpi.ask("MPI_Comm_rank", mpi.rank, comm)?, mpi.ask("MPI_Comm_size", mpi.size, comm)?];
        // Ranks that were started one by one, and merged, each have a world of one.
        if size == 1
            && let Some(choice) = choice
            && mpi.ask("MPI_Comm_size", mpi.size, world)? == 1
        {
            refuse_singletons(choice)?;
        }
        mpi.seat.rank = u32::try_from(rank).unwrap_or(u32::MAX);
        mpi.seat.size = u32::try_from(size).unwrap_or(0);
        if let Some(why) = mpi.seat.fault() {
            return Err(failed(format!("{why}: hand in a smaller communicator")));
        }
        mpi.seat.place_on_node = mpi.present(choice.is_some())?;
        Ok(Box::new(mpi))
    }

    /// Presents this rank, or its failure, to all others. Returns its place on its node.
    fn present(&self, joins: bool) -> Result<u32, BootstrapError> {
        let Seat { rank, size, .. } = self.seat;
        let node = carrack_transports::net::boot_id().unwrap_or_default();
        let mine = rank_bytes(rank, if joins { size } else { 0 }, node);
        let mut all = vec![RankBytes::new_zeroed(); size as usize];
        let (byte, comm) = (H::of(self.byte), H::of(self.comm));
        let len = size_of::<RankBytes>() as c_int;
        let (from, to) = ((&raw const mine).cast(), all.as_mut_ptr().cast());
        // SAFETY: the communicator lives, by the promise of `MpiComm::from_raw`; it has one group,
        // of `size` ranks, and there is room for the bytes of each.
        let code = unsafe { (self.allgather)(from, len, byte, to, len, byte, comm) };
        self.check("MPI_Allgather", code)?;
        review(&all, rank, node).map_err(failed)
    }

    /// Asks for a number of a communicator.
    fn ask(
        &self,
        call: &str,
        function: CommInquiry<H>,
        comm: usize,
    ) -> Result<c_int, BootstrapError> {
        let mut answer = 0;
        // SAFETY: the communicator is that of all ranks, or one that lives by the promise of
        // `MpiComm::from_raw`; the place for the answer is ours.
        self.check(call, unsafe { function(H::of(comm), &raw mut answer) })?;
        Ok(answer)
    }

    /// Returns an error unless the code is that of success.
    fn check(&self, call: &str, code: c_int) -> Result<(), BootstrapError> {
        if code == 0 {
            return Ok(());
        }
        // No ABI has texts of more than 1024 bytes.
        let (mut text, mut len) = ([0_u8; 4096], 0);
        // SAFETY: the code is one of the library's; the places for the answer are ours.
        unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &raw mut len) };
        let text = text.get(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
        Err(failed(format!("{call} failed: {} ({code})", String::from_utf8_lossy(text))))
    }
}

impl<H: Handle> Exchange for Mpi<H> {
    fn seat(&self) -> Seat {
        self.seat
    }

    fn share(&mut self, card: Option<&[u8]>) -> Result<Vec<u8>, BootstrapError> {
        let mut room = Vec::new();
        if let Some(card) = card {
            // Only the words of a failure may be longer.
            parts::push::<U32>(&mut room, &card[..card.len().min(ROOM - size_of::<U32>())]);
        }
        room.resize(ROOM, 0);
        let (byte, comm) = (H::of(self.byte), H::of(self.comm));
        let (bytes, len) = (room.as_mut_ptr().cast(), ROOM as c_int);
        // SAFETY: the communicator lives, by the promise of `MpiComm::from_raw`, and all ranks give
        // the same room.
        self.check("MPI_Bcast", unsafe { (self.bcast)(bytes, len, byte, 0, comm) })?;
        Ok(Rest(&room).part::<U32>().unwrap_or_default().to_vec())
    }

    /// Does nothing: MPI ends by the program's own call.
    fn end(&mut self) {}
}

fn rank_bytes(rank: u32, count: u32, node: [u8; 16]) -> RankBytes {
    RankBytes { rank: rank.into(), count: count.into(), node }
}

/// Returns the place of a rank on its node, or the reason why not all count the same ranks. If one
/// rank gets a reason, all do.
fn review(all: &[RankBytes], rank: u32, node: [u8; 16]) -> Result<u32, String> {
    let size = all.len() as u32;
    let mut place = 0;
    for (at, theirs) in (0..).zip(all) {
        let expected = rank_bytes(at, size, node);
        let (other, count) = (theirs.rank.get(), theirs.count.get());
        if (other, count) != (at, size) {
            if count == 0 {
                return Err(format!("rank {other} has failed: look for its own error"));
            }
            return Err(format!(
                "rank {rank} counts {size} ranks, and in place {at} is rank {other} of {count}: \
                hand in the same communicator on all ranks"
            ));
        }
        place += u32::from(at < rank && *theirs == expected);
    }
    Ok(place)
}

/// Refuses processes that were started as several, and that MPI takes for one: each would be a job
/// of one rank. PMIx has no variable that tells a launcher's only process from one of several.
fn refuse_singletons(choice: BootstrapChoice) -> Result<(), BootstrapError> {
    if choice == BootstrapChoice::Alone {
        return Ok(());
    }
    let several = |(launcher, name): (&'static str, &str)| {
        let size = variable(name).filter(|size| size != "1")?;
        Some((launcher, format!("{name}={size}")))
    };
    let ours = [("carrack run", SIZE_VARIABLE), ("torchrun", WORLD_SIZE)];
    let (launcher, variables) = match launchers::refuse(variable) {
        Err(BootstrapError::OtherLauncher { launcher, variables }) => (launcher, variables),
        _ => match ours.into_iter().find_map(several) {
            Some(found) => found,
            None => return Ok(()),
        },
    };
    Err(failed(format!(
        "MPI_COMM_WORLD has one rank, and {launcher} may have started this process as one of \
        several ({variables}): start the program with the launcher of its own MPI library, or set \
        CARRACK_BOOTSTRAP=alone"
    )))
}

/// Returns a function of the process.
///
/// # Safety
///
/// A function of that name has this type.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, BootstrapError> {
    // SAFETY: by the caller's promise.
    match unsafe { library.get::<F>(name) } {
        Ok(function) => Ok(*function),
        Err(_) => Err(failed(format!(
            "this process has loaded no library with {name}: link an MPI library dynamically, or \
            open it with RTLD_GLOBAL"
        ))),
    }
}

fn failed(why: String) -> BootstrapError {
    BootstrapError::Mpi { why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_mpi_is_told_to_load_it() {
        // SAFETY: no function is found that would take the handle.
        let comm = unsafe { MpiComm::from_raw(0x4400_0000) };
        let error = comm.join(&Settings::defaults()).unwrap_err().to_string();
        assert!(error.contains("MPI_Comm_rank") && error.contains("RTLD_GLOBAL"), "{error}");
    }

    #[test]
    fn ranks_count_each_other_by_node() {
        let (a, b) = ([b'a'; 16], [b'b'; 16]);
        let ranks = [(0, a), (1, b), (2, a), (3, a)];
        let all = ranks.map(|(rank, node)| rank_bytes(rank, 4, node));
        let places = ranks.map(|(rank, node)| review(&all, rank, node).unwrap());
        assert_eq!(places, [0, 0, 1, 2]);
        let why = review(&all[..3], 0, a).unwrap_err();
        assert!(why.contains("counts 3 ranks, and in place 0 is rank 0 of 4"), "{why}");
        let failing = [rank_bytes(0, 2, a), rank_bytes(1, 0, a)];
        assert!(review(&failing, 0, a).unwrap_err().contains("rank 1 has failed"));
    }
}
