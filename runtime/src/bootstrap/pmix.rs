//! PMIx: the exchange of Open MPI's PRRTE and Slurm's `--mpi=pmix`, by the launcher's own libpmix.
//!
//! The library is opened, not linked. Structures and numbers are those of the PMIx standard 2 to 5,
//! whose libraries all have the name `libpmix.so.2` and speak with each other's servers.
//!
//! A process that ends without `PMIx_Finalize` has failed for PRRTE, which then ends all ranks. A
//! library that is finalized cannot be initialised again, as an MPI library of the same process
//! would do. So it is finalized when the bootstrap is dropped.

#![expect(unsafe_code, reason = "libpmix is opened, and called by C's rules")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;

use carrack_transports::dynamic;
use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};

use super::error::BootstrapError;
use super::exchange::{Exchange, Seat};
use super::source::variable;
use crate::settings::Settings;

/// The variable with the name of the job, and that with the rank.
pub(super) const NAMESPACE: &str = "PMIX_NAMESPACE";
const RANK: &str = "PMIX_RANK";

/// The name in errors.
pub(super) const PMIX: &str = "PMIx";

const LIBRARY: &str = "libpmix.so.2";

/// The longest card, in bytes.
const LONGEST: usize = 64 * 1024;

const KEY: &[u8] = b"carrack.card";

/// Types of a [`Value`].
const BOOL: u16 = 1;
const INT: u16 = 6;
const UINT16: u16 = 13;
const UINT32: u16 = 14;
const BYTE_OBJECT: u16 = 27;

/// `PMIX_GLOBAL`: all ranks of the job.
const GLOBAL: u8 = 3;
/// `PMIX_RANK_WILDCARD`: the job instead of one rank.
const ALL: u32 = u32::MAX - 1;

/// `pmix_proc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Proc {
    namespace: [u8; 256],
    rank: u32,
}

/// `pmix_byte_object_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ByteObject {
    bytes: *mut c_void,
    size: usize,
}

#[repr(C)]
union Data {
    flag: u8,
    int: c_int,
    uint16: u16,
    uint32: u32,
    bytes: ByteObject,
    /// The longest member of the standard's union.
    words: [u64; 3],
}

/// `pmix_value_t`.
#[repr(C)]
struct Value {
    kind: u16,
    data: Data,
}

/// `pmix_info_t`.
#[repr(C)]
struct Info {
    key: [u8; 512],
    flags: u32,
    value: Value,
}

// On a machine with words of 64 bits, as the headers of PMIx 2 to 5 have them.
const _: () = assert!(size_of::<Proc>() == 260 && size_of::<Value>() == 32);
const _: () = assert!(size_of::<Info>() == 552);

type Init = unsafe extern "C" fn(*mut Proc, *const Info, usize) -> c_int;
type Finalize = unsafe extern "C" fn(*const Info, usize) -> c_int;
type PmixPut = unsafe extern "C" fn(u8, *const u8, *mut Value) -> c_int;
type Commit = unsafe extern "C" fn() -> c_int;
type Fence = unsafe extern "C" fn(*const Proc, usize, *const Info, usize) -> c_int;
type PmixGet =
    unsafe extern "C" fn(*const Proc, *const u8, *const Info, usize, *mut *mut Value) -> c_int;
type PmixErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// The functions of an open library, which stays open: its threads run in it.
struct Functions {
    init: Init,
    finalize: Finalize,
    put: PmixPut,
    commit: Commit,
    fence: Fence,
    get: PmixGet,
    error_string: PmixErrorString,
}

impl Functions {
    /// Opens the first library that is there.
    fn open(settings: &Settings) -> Result<Self, String> {
        let mut tried = Vec::new();
        for name in places(settings.pmix(), variable) {
            match Self::open_named(&name) {
                Ok(functions) => return Ok(functions),
                Err(why) => tried.push(why),
            }
        }
        Err(format!(
            "libpmix cannot be opened: {}; CARRACK_PMIX names its file, or start the job with PMI \
            (`srun --mpi=pmi2`)",
            tried.join("; ")
        ))
    }

    fn open_named(name: &str) -> Result<Self, String> {
        // SAFETY: loading runs the library's initialisers; libpmix's are meant to be run in any
        // program.
        let library = unsafe { dynamic::open(name, RTLD_NOW | RTLD_LOCAL) };
        let library = ManuallyDrop::new(library?);
        // SAFETY: the types are those of the PMIx standard for functions of these names.
        unsafe {
            Ok(Self {
                init: *library.get(b"PMIx_Init\0").map_err(dynamic::reason)?,
                finalize: *library.get(b"PMIx_Finalize\0").map_err(dynamic::reason)?,
                put: *library.get(b"PMIx_Put\0").map_err(dynamic::reason)?,
                commit: *library.get(b"PMIx_Commit\0").map_err(dynamic::reason)?,
                fence: *library.get(b"PMIx_Fence\0").map_err(dynamic::reason)?,
                get: *library.get(b"PMIx_Get\0").map_err(dynamic::reason)?,
                error_string: *library.get(b"PMIx_Error_string\0").map_err(dynamic::reason)?,
            })
        }
    }

    /// Returns an error unless the code is that of success.
    fn check(&self, call: &str, code: c_int) -> Result<(), BootstrapError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: any code is allowed; the answer is a constant of the library, or null.
        let words = unsafe {
            let words = (self.error_string)(code);
            (!words.is_null()).then(|| CStr::from_ptr(words).to_string_lossy().into_owned())
        };
        Err(failed(format!("{call} failed: {} ({code})", words.unwrap_or_default())))
    }

    /// Returns what is known under a key, if it has that type.
    fn get(&self, of: &Proc, key: &[u8], kind: u16) -> Result<&Value, BootstrapError> {
        let name = String::from_utf8_lossy(key).into_owned();
        let (key, mut found) = (text::<512>(key), std::ptr::null_mut());
        // SAFETY: process and key are valid and end with a zero; the place for the answer is ours.
        let code = unsafe { (self.get)(of, key.as_ptr(), std::ptr::null(), 0, &raw mut found) };
        self.check(&format!("PMIx_Get of {name}"), code)?;
        // SAFETY: on success the library gives a value, or null. It is never freed, since the
        // functions for that differ between versions, and a rank asks for a few only.
        match unsafe { found.as_ref() } {
            Some(value) if value.kind == kind => Ok(value),
            Some(value) => {
                Err(failed(format!("its {name} has type {}, and not {kind}", value.kind)))
            }
            None => Err(failed(format!("it has no {name}"))),
        }
    }
}

/// Returns the places where the library may be, in the order in which they are tried.
fn places(setting: &str, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    if setting != "auto" {
        return vec![setting.to_owned()];
    }
    // By its name the loader also finds one that is loaded already.
    let mut places = vec![LIBRARY.to_owned()];
    let paths = variable("LD_LIBRARY_PATH").unwrap_or_default();
    let libraries = variable("OMPI_LIBDIR_LOC").into_iter();
    let folders = paths.split(':').map(str::to_owned).chain(libraries);
    let open_mpis = folders.filter(|folder| !folder.is_empty()).map(|folder| {
        Path::new(&folder).join("openmpi").join(LIBRARY).to_string_lossy().into_owned()
    });
    places.extend(open_mpis);
    places
}

/// A session with a PMIx server.
pub(super) struct Pmix {
    functions: Functions,
    me: Proc,
    seat: Seat,
    /// Seconds for which the ranks wait for each other.
    patience: c_int,
}

/// Greets the server of the environment.
pub(super) fn connect(settings: &Settings) -> Result<Box<dyn Exchange>, BootstrapError> {
    let functions = Functions::open(settings).map_err(failed)?;
    let mut me = Proc { namespace: [0; 256], rank: 0 };
    // SAFETY: the place for the answer is ours, and no options are given.
    let code = unsafe { (functions.init)(&raw mut me, std::ptr::null(), 0) };
    functions.check("PMIx_Init", code)?;
    let job = CStr::from_bytes_until_nul(&me.namespace).unwrap_or_default().to_string_lossy();
    let told = [NAMESPACE, RANK].map(|name| variable(name).unwrap_or_default());
    if [&*job, &me.rank.to_string()] != told {
        // A library without a server may start a job of one.
        let [namespace, rank] = told;
        return Err(failed(format!(
            "libpmix has found rank {} of {job}, and not rank {rank} of {namespace}",
            me.rank
        )));
    }
    let all = Proc { rank: ALL, ..me };
    let size = functions.get(&all, b"pmix.job.size", UINT32)?;
    // SAFETY: a value of type UINT32 has this member.
    let (rank, size) = (me.rank, unsafe { size.data.uint32 });
    let place = functions.get(&me, b"pmix.lrank", UINT16).ok();
    // SAFETY: a value of type UINT16 has this member.
    let place = place.map(|place| unsafe { place.data.uint16 });
    let seat = Seat { rank, size, place_on_node: place.map_or(rank, u32::from) };
    if let Some(why) = seat.fault() {
        return Err(failed(why));
    }
    let patience = c_int::try_from(settings.bootstrap_timeout()).unwrap_or(c_int::MAX);
    Ok(Box::new(Pmix { functions, me, seat, patience }))
}

impl Exchange for Pmix {
    fn seat(&self) -> Seat {
        self.seat
    }

    fn share(&mut self, card: Option<&[u8]>) -> Result<Vec<u8>, BootstrapError> {
        let functions = &self.functions;
        if let Some(card) = card {
            let mut card = card.to_vec();
            let bytes = ByteObject { bytes: card.as_mut_ptr().cast(), size: card.len() };
            let mut value = Value { kind: BYTE_OBJECT, data: Data { bytes } };
            let key = text::<512>(KEY);
            // SAFETY: the key ends with a zero, and the value's bytes live until the call returns,
            // which copies them.
            let code = unsafe { (functions.put)(GLOBAL, key.as_ptr(), &raw mut value) };
            functions.check("PMIx_Put", code)?;
            // SAFETY: a call without arguments.
            functions.check("PMIx_Commit", unsafe { (functions.commit)() })?;
        }
        let option = |key: &[u8], kind, data| {
            let (key, value) = (text(key), Value { kind, data });
            Info { key, flags: 0, value }
        };
        let options = [
            // The values of all ranks come with the fence.
            option(b"pmix.collect", BOOL, Data { flag: 1 }),
            option(b"pmix.timeout", INT, Data { int: self.patience }),
        ];
        // SAFETY: no processes means all of the job; the options are as long as is said.
        let code =
            unsafe { (functions.fence)(std::ptr::null(), 0, options.as_ptr(), options.len()) };
        functions.check("PMIx_Fence", code)?;
        let value = functions.get(&Proc { rank: 0, ..self.me }, KEY, BYTE_OBJECT)?;
        // SAFETY: a value of type BYTE_OBJECT has this member.
        let ByteObject { bytes, size } = unsafe { value.data.bytes };
        if bytes.is_null() || size > LONGEST {
            return Err(failed(format!("what rank 0 has put has {size} bytes")));
        }
        // SAFETY: the library says that `size` bytes are there, and never frees them.
        Ok(unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), size) }.to_vec())
    }

    fn end(&mut self) {
        // SAFETY: no options are given. The rank ends whatever the library says.
        let _ = unsafe { (self.functions.finalize)(std::ptr::null(), 0) };
    }
}

impl fmt::Debug for Pmix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pmix").field("seat", &self.seat).finish_non_exhaustive()
    }
}

/// Returns a text that zeros follow.
fn text<const LEN: usize>(from: &[u8]) -> [u8; LEN] {
    let mut from = from.iter().copied();
    // The last byte stays zero.
    std::array::from_fn(|at| if at + 1 < LEN { from.next().unwrap_or(0) } else { 0 })
}

pub(super) fn failed(why: String) -> BootstrapError {
    BootstrapError::Exchange { launcher: PMIX, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for_where_open_mpi_hides_it_unless_it_is_named() {
        let variable = |name: &str| match name {
            "LD_LIBRARY_PATH" => Some("/opt/a/lib::/opt/b".to_owned()),
            "OMPI_LIBDIR_LOC" => Some("/opt/ompi/lib".to_owned()),
            _ => None,
        };
        let expected = [
            "libpmix.so.2",
            "/opt/a/lib/openmpi/libpmix.so.2",
            "/opt/b/openmpi/libpmix.so.2",
            "/opt/ompi/lib/openmpi/libpmix.so.2",
        ];
        assert_eq!(places("auto", variable), expected);
        assert_eq!(places("auto", |_| None), ["libpmix.so.2"]);
        assert_eq!(places("/opt/own.so", variable), ["/opt/own.so"]);
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_one_is_named() {
        for (name, words) in [("libpmix.none", "libpmix.none"), ("libc.so.6", "PMIx_Init")] {
            let settings = Settings::builder().pmix(name).build().unwrap();
            let error = Functions::open(&settings).err().unwrap();
            assert!(error.contains(words) && error.contains("CARRACK_PMIX"), "{error}");
        }
    }

    #[test]
    fn a_text_ends_with_a_zero_even_if_it_is_cut() {
        assert_eq!(text::<4>(b"ab"), *b"ab\0\0");
        assert_eq!(text::<4>(b"abcdef"), *b"abc\0");
    }
}
