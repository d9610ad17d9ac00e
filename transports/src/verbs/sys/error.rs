//! Errors of libibverbs, with the remedy.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io;

/// A call of libibverbs that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerbsError {
    /// The call, by C's name.
    pub call: &'static str,
    /// The device that it was about, when that is known: `mlx5_0`.
    pub device: Option<Box<str>>,
    /// The port that it was about, when that is known; ports count from 1.
    pub port: Option<u8>,
    /// The system's number for the reason (`errno`); 0 when the call gave none.
    pub errno: i32,
    /// Advice on what to check and change; empty if unknown.
    pub remedy: Cow<'static, str>,
}

impl VerbsError {
    /// Returns an error with the standing remedy for this call and code.
    #[cold]
    pub fn new(call: &'static str, errno: i32) -> Self {
        Self::because(call, errno, remedy(call, errno))
    }

    /// Returns an error with a remedy of its own.
    #[cold]
    pub fn because(call: &'static str, errno: i32, remedy: impl Into<Cow<'static, str>>) -> Self {
        Self { call, device: None, port: None, errno, remedy: remedy.into() }
    }

    /// Adds the device.
    #[must_use]
    pub fn of(mut self, device: &str) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Adds the port.
    #[must_use]
    pub fn at_port(mut self, port: u8) -> Self {
        self.port = Some(port);
        self
    }

    /// Returns `true` if the library, device or kernel lacks the call, so that another way may
    /// work.
    pub fn is_unsupported(&self) -> bool {
        [libc::ENOSYS, libc::EOPNOTSUPP, libc::EPROTONOSUPPORT].contains(&self.errno)
    }
}

impl std::error::Error for VerbsError {}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.call)?;
        if let Some(device) = &self.device {
            write!(f, " on {device}")?;
        }
        if let Some(port) = self.port {
            write!(f, ", port {port}")?;
        }
        match self.errno {
            0 => f.write_str(": failed, and gave no reason")?,
            errno => write!(f, ": {}", io::Error::from_raw_os_error(errno))?,
        }
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

/// The call that lists devices.
const DEVICE_LIST: &str = "ibv_get_device_list";

/// Descriptors of the library while it lists devices, at most.
const DESCRIPTORS: usize = 8;

/// Returns the error of a machine without RDMA devices, whatever its library answers.
pub(super) fn no_device() -> VerbsError {
    // Without a free descriptor the library skips devices in its list.
    let spare: Result<Vec<_>, _> = (0..DESCRIPTORS).map(|_| File::open("/dev/null")).collect();
    if let Err(error) = spare
        && let Some(errno @ (libc::EMFILE | libc::ENFILE)) = error.raw_os_error()
    {
        return VerbsError::new(DEVICE_LIST, errno);
    }
    VerbsError::because(
        DEVICE_LIST,
        libc::ENODEV,
        "this machine shows no RDMA device: look at `rdma link` and `ls /sys/class/infiniband`; \
        the device's driver \
         and ib_uverbs have to be loaded, and a container has to be given /dev/infiniband",
    )
}

/// Logs a failed release in `Drop`. A device that is gone has released everything.
pub(super) fn released(what: &'static str, outcome: Result<(), VerbsError>) {
    if let Err(error) = outcome
        && error.errno != libc::ENODEV
        && error.errno != libc::EIO
    {
        tracing::warn!(%error, what, "libibverbs did not release it");
    }
}

/// Returns the remedy for a failed call with this code.
fn remedy(call: &str, errno: i32) -> Cow<'static, str> {
    let registers = call.contains("reg_mr") || call.contains("dmabuf");
    let creates =
        call.starts_with("ibv_create") || call.starts_with("ibv_alloc") || call == "ibv_resize_cq";
    match errno {
        libc::ENOMEM | libc::EAGAIN if registers || creates => locked_memory(registers),
        libc::EMFILE | libc::ENFILE => {
            "too many descriptors are open: raise `ulimit -n`, or LimitNOFILE of the service".into()
        }
        libc::EPERM | libc::EACCES if call == "ibv_open_device" => {
            "this user may not open the device's file in /dev/infiniband: look at its \
            permissions; a container has to \
             be given /dev/infiniband"
                .into()
        }
        libc::ENOENT if call == "ibv_open_device" => {
            "the device has no file in /dev/infiniband: load ib_uverbs; a container has to be \
            given /dev/infiniband"
                .into()
        }
        libc::EPERM if registers => locked_memory(true),
        libc::EFAULT | libc::EINVAL if call.ends_with("dmabuf_mr") => {
            "the range lies outside the dma-buf, or the device cannot reach its memory".into()
        }
        _ if is_missing(errno) && call.ends_with("dmabuf_mr") => {
            "memory of a dma-buf can be registered with kernel 5.12 or newer, and only by some \
            devices; for GPUs the \
             module nvidia-peermem is the other way"
                .into()
        }
        libc::EFAULT if registers => {
            "a part of the range is not mapped, may not be written, or is memory of a GPU that \
            only a dma-buf or \
             nvidia-peermem can register"
                .into()
        }
        libc::EINVAL if registers => {
            "the range is empty or longer than the device takes, or remote writes were asked for \
            without local ones"
                .into()
        }
        libc::EINVAL if creates => {
            "more was asked for than the device grants: compare with its limits (`ibv_devinfo \
            -v`)"
                .into()
        }
        libc::EINVAL if call == "ibv_modify_qp" => {
            "the queue pair is not in the state that this step begins in, or an attribute is out \
            of range (GID index, \
             MTU, P_Key)"
                .into()
        }
        libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH
            if call == "ibv_modify_qp" || call == "ibv_create_ah" =>
        {
            "the peer's network address did not answer: is there a route between the two ports' \
            networks, and is the GID \
             index that of the right network?"
                .into()
        }
        libc::EBUSY => "something still uses it".into(),
        libc::EIO | libc::ENODEV => "the device is gone or in a fatal state: look at \
            `dmesg`"
            .into(),
        _ if is_missing(errno) => "the kernel, or the device's driver, has no such call: a newer \
            one may"
            .into(),
        _ => Cow::Borrowed(""),
    }
}

fn is_missing(errno: i32) -> bool {
    [libc::ENOSYS, libc::EOPNOTSUPP, libc::EPROTONOSUPPORT].contains(&errno)
}

/// Names the limit on locked memory, which RDMA meets first, with its present value.
fn locked_memory(registers: bool) -> Cow<'static, str> {
    let now = match rustix::process::getrlimit(rustix::process::Resource::Memlock).current {
        Some(bytes) => format!("{} KiB", bytes / 1024),
        None => "unlimited".to_owned(),
    };
    let why = if registers {
        "the memory cannot be locked"
    } else {
        "the device has no room for another one, or its queues cannot be locked in memory"
    };
    format!(
        "{why}: `ulimit -l` is {now} here; raise it in /etc/security/limits.conf (memlock), or by \
        LimitMEMLOCK of the \
         service that starts the job"
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_call_device_port_reason_and_remedy() {
        let error =
            VerbsError::new("ibv_modify_qp", libc::ETIMEDOUT).of("mlx5_0").at_port(1).to_string();
        assert!(
            error.starts_with("ibv_modify_qp on mlx5_0, port 1: Connection timed out"),
            "{error}"
        );
        assert!(error.contains("; the peer's network address did not answer"), "{error}");
    }

    #[test]
    fn memory_that_cannot_be_locked_names_the_limit_as_it_is_and_where_to_raise_it() {
        for call in [
            "ibv_reg_mr",
            "ibv_reg_mr_iova2",
            "ibv_reg_dmabuf_mr",
            "ibv_create_qp",
            "ibv_create_cq",
        ] {
            let error = VerbsError::new(call, libc::ENOMEM).to_string();
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit
                .map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes / 1024));
            assert!(error.contains(&format!("`ulimit -l` is {limit}")), "{error}");
            assert!(error.contains("/etc/security/limits.conf"), "{error}");
        }
        let elsewhere = VerbsError::new("ibv_get_cq_event", libc::ENOMEM).to_string();
        assert!(!elsewhere.contains("ulimit"), "{elsewhere}");
    }

    #[test]
    fn each_reason_that_a_machine_can_cure_has_a_remedy() {
        for (call, errno, word) in [
            ("ibv_open_device", libc::EMFILE, "ulimit -n"),
            ("ibv_open_device", libc::EACCES, "/dev/infiniband"),
            ("ibv_open_device", libc::ENOENT, "ib_uverbs"),
            ("ibv_reg_mr", libc::EFAULT, "nvidia-peermem"),
            ("ibv_reg_mr", libc::EINVAL, "without local ones"),
            ("ibv_reg_dmabuf_mr", libc::EOPNOTSUPP, "5.12"),
            ("ibv_create_qp", libc::EINVAL, "ibv_devinfo -v"),
            ("ibv_modify_qp", libc::EINVAL, "GID index"),
            ("ibv_create_ah", libc::EHOSTUNREACH, "route"),
            ("ibv_destroy_cq", libc::EBUSY, "still uses it"),
            ("ibv_query_port", libc::EIO, "dmesg"),
            ("ibv_resize_cq", libc::ENOSYS, "newer"),
        ] {
            let error = VerbsError::new(call, errno).to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_call_that_gives_no_reason_is_said_to_have_given_none() {
        let error = VerbsError::new("ibv_create_qp", 0).to_string();
        assert_eq!(error, "ibv_create_qp: failed, and gave no reason");
    }
}
