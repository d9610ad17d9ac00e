//! What one thread copies from one buffer into one other: nothing that copies by the CPU is quicker.

use std::path::PathBuf;

use super::cores::Cores;
use super::row::Row;
use super::side::{self, Figure, Prepared, Role, Setting, Side, Variant, limit, tune};
use crate::child;
use crate::error::TaskError;

const AS_IT_COMES: &[Variant] = &[Variant { name: "", env: &[] }];

/// `mpi_bench memcpy`, which is no MPI at all.
#[derive(Debug)]
pub(super) struct Memcpy {
    pub(super) bench: PathBuf,
    pub(super) cores: Cores,
    pub(super) seconds: f64,
}

impl Memcpy {
    fn run(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        let mut command = Cores::pin(self.cores.first(1).unwrap_or_default(), &self.bench);
        command.args(["memcpy", &row.size.to_string(), &setting.iterations.to_string()]);
        let heard = child::hear(&mut command, limit(self.seconds))?;
        side::read_line("mpi_bench", &heard.unless_failed(&command)?, row)
    }
}

impl Side for Memcpy {
    fn name(&self) -> &'static str {
        "memcpy"
    }

    fn version(&self) -> String {
        "memcpy by one thread".into()
    }

    fn role(&self) -> Role {
        Role::Yardstick
    }

    fn prepare(&self, row: &Row) -> Result<Prepared, TaskError> {
        if row.is_a_copy() {
            tune(row, self.seconds, AS_IT_COMES, |setting| self.run(row, setting))
        } else {
            Ok(Prepared::Cannot("it is no matter of one copy".into()))
        }
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        self.run(row, setting)
    }
}
