//! What one copy takes: by one thread, which nothing that copies by the CPU is quicker than; of GPU
//! memory by the copy engine, called as the driver has it.

use super::cores::Cores;
use super::kit::Setup;
use super::row::{Op, Row, name};
use super::side::{self, AS_IT_COMES, Figure, Out, Role, Setting, Side, limit, tune};
use crate::child;
use crate::error::TaskError;

/// `mpi_bench memcpy`, which is no MPI at all, and `copy_bench`.
#[derive(Debug)]
pub(super) struct Memcpy(pub(super) Setup);

impl Side for Memcpy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn version(&self) -> String {
        "one copy: memcpy by one thread, or cuMemcpyDtoDAsync".into()
    }

    fn role(&self) -> Role {
        Role::Yardstick
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        if row.is_a_copy() {
            tune(row, self.0.seconds, AS_IT_COMES, |setting| self.measure(row, setting))
        } else {
            Out::cannot("it is no matter of one copy")
        }
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        let title = if row.gpu { "copy_bench" } else { "mpi_bench" };
        let program = self.0.kit.peers.join(title);
        let mut command = Cores::pin(self.0.cores.first(1).unwrap_or_default(), program);
        let what = if row.gpu { &name(row.test) } else { "memcpy" };
        command.args([what, &row.size.to_string(), &setting.iterations.to_string()]);
        // The getter's engine reads over the link, which takes longer than writing.
        command.args((row.gpu && row.op == Op::Get).then_some("pull"));
        side::read_line(title, &child::read(&mut command, limit(self.0.seconds))?, row)
    }
}
