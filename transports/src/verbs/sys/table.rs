//! The functions of libibverbs: one table, each entry of which may be missing.
//!
//! It holds the exported functions. C's inline functions (posting, polling, thread domains) use
//! the tables that the device's own driver puts into its structures:
//! [`ops`](super::bindings::ibv_context_ops) and
//! [`verbs_context`](super::bindings::verbs_context).

use super::bindings::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_event_type, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_port_state, ibv_qp,
    ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};
use super::error::VerbsError;
use super::library;
use libloading::os::unix::Library;
use parking_lot::Mutex;
use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Once};

macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty = $symbol:literal;)*) => {
        /// Functions that Carrack uses of a libibverbs; `None` if it lacks one.
        #[derive(Clone, Copy, Default)]
        pub struct Functions {
            $(
                #[doc = concat!("`", $symbol, "`.")]
                pub $name: Option<unsafe extern "C" fn($($type),*) -> $answer>,
            )*
        }

        impl Functions {
            /// Looks all of them up.
            fn of(library: &Library) -> Self {
                Self {
                    $($name: library::find(library, $symbol).map(|found| {
                        // SAFETY: a symbol of this name is a function of this signature. The
                        // library keeps what it has once exported, and gives a new interface
                        // another name or version.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($type),*) -> $answer,
                            >(found)
                        }
                    }),)*
                }
            }

            /// Returns the symbols of the missing functions.
            pub fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.is_none() { missing.push($symbol); })*
                missing
            }
        }

        impl Verbs {
            $(
                #[doc = concat!("Calls `", $symbol, "`.")]
                ///
                /// # Errors
                /// The function is missing, or has returned an error.
                ///
                /// # Safety
                /// As the manual page of the function says.
                #[allow(clippy::too_many_arguments, reason = "libibverbs's")]
                pub unsafe fn $name(
                    &self, $($arg: $type),*
                ) -> Result<<$answer as Answer>::Good, VerbsError> {
                    let Some(call) = self.functions.$name else { return Err(self.lacks($symbol)) };
                    // Cleared, since a function may fail without setting `errno`.
                    set_errno(0);
                    // SAFETY: passed on from the caller.
                    let answer = unsafe { call($($arg),*) };
                    answer.good().map_err(|errno| VerbsError::new($symbol, errno))
                }
            )*
        }
    };
}

functions! {
    get_device_list(count: *mut c_int) -> *mut *mut ibv_device = "ibv_get_device_list";
    free_device_list(list: *mut *mut ibv_device) -> () = "ibv_free_device_list";
    get_device_name(device: *mut ibv_device) -> *const c_char = "ibv_get_device_name";
    open_device(device: *mut ibv_device) -> *mut ibv_context = "ibv_open_device";
    close_device(context: *mut ibv_context) -> c_int = "ibv_close_device";

    query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int
        = "ibv_query_device";
    query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int
        = "ibv_query_port";
    query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int
        = "ibv_query_gid";
    query_gid_table(
        context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize, flags: u32,
        entry_size: usize
    ) -> isize = "_ibv_query_gid_table";

    alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = "ibv_alloc_pd";
    dealloc_pd(pd: *mut ibv_pd) -> c_int = "ibv_dealloc_pd";
    reg_mr(pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr
        = "ibv_reg_mr";
    reg_mr_iova2(
        pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: c_uint
    ) -> *mut ibv_mr = "ibv_reg_mr_iova2";
    reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, len: usize, iova: u64, fd: c_int, access: c_int
    ) -> *mut ibv_mr = "ibv_reg_dmabuf_mr";
    dereg_mr(mr: *mut ibv_mr) -> c_int = "ibv_dereg_mr";

    create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel
        = "ibv_create_comp_channel";
    destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int = "ibv_destroy_comp_channel";
    create_cq(
        context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void,
        channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq = "ibv_create_cq";
    resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int = "ibv_resize_cq";
    destroy_cq(cq: *mut ibv_cq) -> c_int = "ibv_destroy_cq";
    get_cq_event(
        channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void
    ) -> c_int = "ibv_get_cq_event";
    ack_cq_events(cq: *mut ibv_cq, count: c_uint) -> () = "ibv_ack_cq_events";

    create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq = "ibv_create_srq";
    modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int = "ibv_modify_srq";
    destroy_srq(srq: *mut ibv_srq) -> c_int = "ibv_destroy_srq";

    create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp = "ibv_create_qp";
    modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int = "ibv_modify_qp";
    query_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr
    ) -> c_int = "ibv_query_qp";
    destroy_qp(qp: *mut ibv_qp) -> c_int = "ibv_destroy_qp";

    get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int
        = "ibv_get_async_event";
    ack_async_event(event: *mut ibv_async_event) -> () = "ibv_ack_async_event";

    fork_init() -> c_int = "ibv_fork_init";

    event_type_str(event: ibv_event_type) -> *const c_char = "ibv_event_type_str";
    port_state_str(state: ibv_port_state) -> *const c_char = "ibv_port_state_str";
}

/// Return value of a function of libibverbs, which tells success from failure.
pub trait Answer {
    /// Type of a successful answer.
    type Good;

    /// Returns the answer, or the code of the failure: an `errno`, or 0 if the function set none.
    ///
    /// # Errors
    /// The function has failed.
    fn good(self) -> Result<Self::Good, i32>;
}

/// Success as 0, failure as the code itself, or as -1 with the code in `errno`: all are recognised.
impl Answer for c_int {
    type Good = ();

    fn good(self) -> Result<(), i32> {
        match self {
            0 => Ok(()),
            -1 => Err(errno()),
            reason => Err(reason.saturating_abs()),
        }
    }
}

/// A count, or the negated code.
impl Answer for isize {
    type Good = usize;

    fn good(self) -> Result<usize, i32> {
        usize::try_from(self).map_err(|_| i32::try_from(self.unsigned_abs()).unwrap_or(libc::EIO))
    }
}

/// Null, with the code in `errno`.
impl<T> Answer for *mut T {
    type Good = Self;

    fn good(self) -> Result<Self, i32> {
        if self.is_null() { Err(errno()) } else { Ok(self) }
    }
}

/// Null, with the code in `errno`.
impl<T> Answer for *const T {
    type Good = Self;

    fn good(self) -> Result<Self, i32> {
        self.cast_mut().good().map(<*mut T>::cast_const)
    }
}

/// Nothing: the function cannot fail.
impl Answer for () {
    type Good = ();

    fn good(self) -> Result<(), i32> {
        Ok(())
    }
}

/// A libibverbs: the machine's, or a simulated one with the same functions.
pub struct Verbs {
    functions: Functions,
    /// Name in reports: the library's file.
    name: Cow<'static, str>,
    /// Library, never closed: its drivers have threads and exit handlers of their own.
    _library: Option<ManuallyDrop<Library>>,
    forks: Once,
}

impl Verbs {
    /// Opens the machine's libibverbs. The first successful call opens it, and it is never closed.
    ///
    /// # Errors
    /// There is none. The text names the library, the loader's reason, and the package that has
    /// it.
    pub fn open() -> Result<Arc<Self>, VerbsError> {
        static OPEN: Mutex<Option<Arc<Verbs>>> = Mutex::new(None);
        let mut open = OPEN.lock();
        if let Some(verbs) = &*open {
            return Ok(Arc::clone(verbs));
        }
        let verbs = Self::open_named(library::VERBS)?;
        *open = Some(Arc::clone(&verbs));
        Ok(verbs)
    }

    /// Opens the libibverbs of this name, as the loader looks for it.
    pub(super) fn open_named(name: &str) -> Result<Arc<Self>, VerbsError> {
        let library = library::open(name)?;
        let functions = Functions::of(&library);
        let name =
            library::place(&library, "ibv_get_device_list").unwrap_or_else(|| name.to_owned());
        Ok(Arc::new(Self {
            functions,
            name: name.into(),
            _library: Some(ManuallyDrop::new(library)),
            forks: Once::new(),
        }))
    }

    /// Makes a libibverbs of these functions, for a simulated NIC. `name` appears in reports and
    /// errors.
    ///
    /// # Safety
    /// The functions do what libibverbs documents for their names, from any thread. They return
    /// structures laid out as in [`bindings`](super::bindings), whose own tables of functions do
    /// so, too. Strings that they return are static.
    pub unsafe fn from_parts(functions: Functions, name: &'static str) -> Arc<Self> {
        Arc::new(Self { functions, name: name.into(), _library: None, forks: Once::new() })
    }

    /// Returns the file that it came from, or the name of a simulated one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its table of functions.
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Keeps registered memory with this process after a fork. Takes effect once. Kernels from
    /// 5.12 on need no call, which libibverbs finds out.
    pub(super) fn survive_forks(&self) {
        self.forks.call_once(|| {
            // SAFETY: may be called at any time; it fails if memory is registered already.
            if let Err(error) = unsafe { self.fork_init() }
                && !error.is_unsupported()
            {
                tracing::warn!(%error, "memory that is registered may be lost to a forked child");
            }
        });
    }

    /// Returns the name of an asynchronous event, in libibverbs's words.
    pub fn event_name(&self, event: ibv_event_type) -> Cow<'static, str> {
        // SAFETY: takes any number.
        words(unsafe { self.event_type_str(event) }, "event", event)
    }

    /// Returns the name of a port's state, in libibverbs's words.
    pub fn port_state_name(&self, state: ibv_port_state) -> Cow<'static, str> {
        // SAFETY: takes any number.
        words(unsafe { self.port_state_str(state) }, "port state", state)
    }

    /// Returns the error for a function that is not in this table.
    #[cold]
    fn lacks(&self, symbol: &'static str) -> VerbsError {
        let remedy = format!("{} has no such function: a newer rdma-core has it", self.name);
        VerbsError::because(symbol, libc::ENOSYS, remedy)
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verbs({}, without {:?})", self.name, self.functions.missing())
    }
}

/// Returns a string of the library's, or the number if it has none.
fn words(answer: Result<*const c_char, VerbsError>, what: &str, number: u32) -> Cow<'static, str> {
    let Ok(text) = answer else { return format!("{what} {number}").into() };
    // SAFETY: libibverbs answers with a constant string, and is never closed. A simulated one has
    // promised static strings.
    let text: &'static CStr = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy()
}

/// Returns the calling thread's `errno`.
pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Sets the calling thread's `errno`.
pub(super) fn set_errno(to: i32) {
    // SAFETY: this thread's errno can always be written.
    unsafe { *libc::__errno_location() = to };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> Arc<Verbs> {
        // SAFETY: no function exists that could break the promise.
        unsafe { Verbs::from_parts(Functions::default(), "an empty table") }
    }

    #[test]
    fn every_missing_function_is_an_error_that_names_it_and_the_library() {
        let verbs = nothing();
        // SAFETY: nothing is called.
        let error =
            unsafe { verbs.get_device_list(std::ptr::null_mut()) }.expect_err("it is not there");
        assert_eq!((error.call, error.errno), ("ibv_get_device_list", libc::ENOSYS));
        assert!(error.to_string().contains("an empty table has no such function"), "{error}");
        let missing = verbs.functions().missing();
        assert!(missing.len() > 30 && missing.contains(&"_ibv_query_gid_table"), "{missing:?}");
    }

    #[test]
    fn names_of_numbers_fall_back_on_the_numbers() {
        let verbs = nothing();
        assert_eq!(verbs.event_name(3), "event 3");
        assert_eq!(verbs.port_state_name(4), "port state 4");
    }

    #[test]
    fn a_failure_is_found_in_each_of_the_ways_that_libibverbs_has() {
        assert_eq!(0.good(), Ok(()));
        assert_eq!(libc::EINVAL.good(), Err(libc::EINVAL));
        assert_eq!((-libc::EINVAL).good(), Err(libc::EINVAL));
        set_errno(libc::EBUSY);
        assert_eq!((-1).good(), Err(libc::EBUSY));
        assert_eq!(std::ptr::null_mut::<u8>().good(), Err(libc::EBUSY));
        assert_eq!(3_isize.good(), Ok(3));
        assert_eq!((-(libc::EOPNOTSUPP as isize)).good(), Err(libc::EOPNOTSUPP));
    }

    unsafe extern "C" fn silent(_: *mut ibv_context) -> *mut ibv_pd {
        std::ptr::null_mut()
    }

    #[test]
    fn a_function_that_gives_no_reason_is_not_taken_at_an_older_one() {
        let functions = Functions { alloc_pd: Some(silent), ..Functions::default() };
        // SAFETY: the one function fails, as it may.
        let verbs = unsafe { Verbs::from_parts(functions, "a table") };
        set_errno(libc::EPERM);
        // SAFETY: it looks at nothing.
        let error = unsafe { verbs.alloc_pd(std::ptr::null_mut()) }.expect_err("it fails");
        assert_eq!(error.errno, 0);
    }

    #[test]
    fn a_table_can_be_shared_among_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Verbs>();
    }
}
