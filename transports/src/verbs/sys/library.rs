//! Opening of libraries of rdma-core.

use super::error::VerbsError;
use crate::dynamic;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::env;
use std::ffi::c_void;

/// Name of the library for the loader, and for every device's own library. `libibverbs.so` is
/// installed for builds only.
pub(super) const VERBS: &str = "libibverbs.so.1";

/// Opens a library.
pub(super) fn open(name: &str) -> Result<Library, VerbsError> {
    // SAFETY: loading runs the library's initialisers; rdma-core's are meant to be run in any
    // program, and touch no device before it is asked for any.
    unsafe { dynamic::open(name, RTLD_NOW | RTLD_LOCAL) }.map_err(|why| {
        let remedy = format!(
            "looked for {name}: {why}; it comes with rdma-core (Debian, Ubuntu: libibverbs1 and \
            ibverbs-providers; Red \
             Hat: libibverbs)"
        );
        VerbsError::because("dlopen", libc::ELIBACC, remedy)
    })
}

/// Finds a symbol of a library, or of one that the user preloads (`LD_PRELOAD`) in its place, as a
/// linked program would. Of several versions it is the default one, with which a program would be
/// linked.
pub(super) fn find(library: &Library, symbol: &str) -> Option<*mut c_void> {
    let preloaded = env::var_os("LD_PRELOAD").and_then(|_| dynamic::find(&Library::this(), symbol));
    preloaded.or_else(|| dynamic::find(library, symbol))
}

/// Returns the file that a library came from, by one of its symbols.
pub(super) fn place(library: &Library, symbol: &str) -> Option<String> {
    dynamic::place(find(library, symbol)?)
}

#[cfg(test)]
mod tests {
    use super::super::table::{Functions, Verbs};

    #[test]
    fn a_library_that_is_not_there_is_named_with_the_loaders_words_and_its_package() {
        let error =
            Verbs::open_named("libibverbs.so.none").expect_err("there is none of this name");
        assert_eq!((error.call, error.errno), ("dlopen", libc::ELIBACC));
        let error = error.to_string();
        assert!(
            error.contains("looked for libibverbs.so.none: libibverbs.so.none: cannot open"),
            "{error}"
        );
        assert!(error.contains("libibverbs1"), "{error}");
    }

    /// Both versions of changed functions are still exported. The older ones take other
    /// structures.
    #[test]
    #[cfg(target_env = "gnu")]
    fn of_a_function_with_two_versions_the_newer_is_found() {
        let Ok(library) = super::open(super::VERBS) else {
            return eprintln!("skipped: there is no {}", super::VERBS);
        };
        let verbs = std::mem::ManuallyDrop::new(library);
        let found = super::find(&verbs, "ibv_create_qp").expect("every libibverbs has it");
        let version = |version: &std::ffi::CStr| {
            // SAFETY: opening an open library again gives the same handle; of the symbol only the
            // address is taken.
            unsafe {
                let handle =
                    libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
                libc::dlvsym(handle, c"ibv_create_qp".as_ptr(), version.as_ptr())
            }
        };
        assert_eq!(version(c"IBVERBS_1.1"), found);
        assert_ne!(version(c"IBVERBS_1.0"), found);
    }

    #[test]
    fn a_library_that_is_another_one_lacks_everything() {
        let verbs = Verbs::open_named("libc.so.6").expect("every program here has it");
        assert_eq!(verbs.functions().missing(), Functions::default().missing());
        assert_eq!(verbs.name(), "libc.so.6");
    }
}
