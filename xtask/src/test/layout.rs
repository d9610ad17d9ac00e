//! Our bindings of libibverbs against those of other crates, whose building needs more than Rust
//! and a C compiler.

use super::step::{Context, Outcome};
use crate::apt;

/// Debian packages that their build needs.
const NEEDS: &str = "cmake libclang-dev libibverbs-dev librdmacm-dev pkg-config";

pub(super) fn step(context: &mut Context) -> Outcome {
    apt::see_to(NEEDS)?;
    let mut command = context.workspace.cargo("test --manifest-path transports/layout/Cargo.toml");
    command.env("CARGO_TARGET_DIR", context.workspace.target.join("layout"));
    context.run_tests(&mut command)
}
