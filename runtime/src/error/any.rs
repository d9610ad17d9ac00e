//! Any error of this crate, as one type.

use super::{
    AwaitError, CollectiveError, GroupError, OpError, PostError, ProgressError, RegisterError,
    RemoteKeyError, ResourceError, StartError, WaitError,
};
use carrack_transports::gpu::GpuError;
use carrack_transports::mem::{AllocError, CopyError};
use carrack_transports::settings::SettingsError;

macro_rules! any_error {
    ($(#[$of_all:meta])* ; $($(#[$of_one:meta])* $name:ident($error:ty),)+) => {
        $(#[$of_all])*
        #[derive(thiserror::Error)]
        #[non_exhaustive]
        pub enum Error {
            $($(#[$of_one])* #[error(transparent)] $name(Box<$error>),)+
            /// An error of the program, of another crate, or of memory that processes share.
            #[error(transparent)]
            Other(Box<dyn std::error::Error + Send + Sync>),
        }

        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$name(Box::new(error))
            }
        })+
    };
}

any_error! {
    /// Any error of this crate, for programs that end with the first one. `main` prints its
    /// sentence. A program's own error is [`Other`](Self::Other): a sentence becomes one by `?`.
    ///
    /// ```
    /// use carrack::prelude::*;
    ///
    /// fn main() -> Result<(), carrack::Error> {
    ///     let runtime = Runtime::start()?;
    ///     runtime.post_send(runtime.rank(), b"hello", Tag(1)).submit()?;
    ///     let status = runtime.post_recv(runtime.rank(), vec![0; 5], Tag(1)).wait()?;
    ///     assert_eq!(status.bytes(), Some(&b"hello"[..]));
    ///     Ok(())
    /// }
    /// ```
    ;
    /// The runtime could not start.
    Start(StartError),
    /// A post was refused.
    Post(PostError),
    /// An operation failed.
    Op(OpError),
    /// Progress needs attention.
    Progress(ProgressError),
    /// A wait ended before its condition was true.
    Wait(WaitError),
    /// A collective operation failed.
    Collective(CollectiveError),
    /// A group could not be made.
    Group(GroupError),
    /// Memory was not registered.
    Register(RegisterError),
    /// Bytes are no remote key.
    RemoteKey(RemoteKeyError),
    /// A resource could not be made.
    Resource(ResourceError),
    /// Memory could not be allocated.
    Alloc(AllocError),
    /// Memory could not be copied.
    Copy(CopyError),
    /// A GPU's driver refused a call.
    Gpu(GpuError),
    /// A setting has no valid value.
    Settings(SettingsError),
}

/// Lets `?` turn errors into [`Error::Other`].
macro_rules! other_error {
    ($($error:ty),+) => {
        $(impl From<$error> for $crate::error::Error {
            fn from(error: $error) -> Self {
                Self::Other(error.into())
            }
        })+
    };
}
pub(crate) use other_error;

other_error!(&str, String, std::io::Error, std::num::ParseIntError);
other_error!(Box<dyn std::error::Error + Send + Sync>);

impl From<AwaitError> for Error {
    fn from(error: AwaitError) -> Self {
        match error {
            AwaitError::Post(error) => error.into(),
            AwaitError::Op(error) => error.into(),
        }
    }
}

impl std::fmt::Debug for Error {
    /// Writes the sentence: `main` prints errors this way.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_program_prints_its_sentence() {
        let error = Error::from(AwaitError::from(PostError::Closed));
        assert_eq!(format!("{error:?}"), PostError::Closed.to_string());
        assert_eq!(format!("{:?}", Error::from("no row")), "no row");
    }
}
