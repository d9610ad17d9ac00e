//! Yardsticks of the machine. Host memory: one copy by one thread, which is the least that a CPU's
//! copies can take. GPU memory: one copy by the copy engine, called as the driver has it. TCP:
//! polled sockets. Threads: as many pairs of processes, which share only the machine.

use std::thread;

use super::carrack::Carrack;
use super::cores::Cores;
use super::kit::Setup;
use super::row::{Op, Row, name};
use super::side::{self, AS_IT_COMES, Figure, Out, Role, Setting, Side, limit, tune};
use super::ucx;
use crate::error::TaskError;

/// `mpi_bench memcpy`, which is no MPI at all, `copy_bench` and `tcp_bench`.
#[derive(Debug)]
pub(super) struct Yardstick(pub(super) Setup);

impl Yardstick {
    fn sockets(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        let program = self.0.kit.peers.join("tcp_bench");
        let port = ucx::free_port()?.to_string();
        let [mut client, mut server] = [0, 1].map(|side| self.0.pin(row, side, &program));
        server.args(["server", &port]);
        let test = if row.asleep { "asleep" } else { &name(row.test) };
        client.args([test, &row.size.to_string(), &setting.iterations.to_string()]);
        client.args([children::ADDRESSES[1], &port]);
        let port = port.parse().unwrap_or_default();
        let said = ucx::between(server, client, port, self.0.seconds)?;
        side::read_line("tcp_bench", &said, row)
    }

    /// Measures the threads of a row as processes, on the same cores.
    fn processes(&self, row: &Row) -> Result<Figure, TaskError> {
        let cores = self.0.cores.first(row.cores()).unwrap_or_default();
        let (senders, receivers) = cores.split_at(cores.len() / 2);
        let (alone, carrack) = (Row { threads: 1, ..*row }, Carrack(self.0.clone()));
        let figures: Vec<_> = thread::scope(|scope| {
            let run = |pair: [usize; 2]| {
                let (alone, carrack) = (&alone, &carrack);
                scope.spawn(move || carrack.measure_on(alone, &pair))
            };
            let pairs = senders.iter().zip(receivers).map(|(&from, &to)| run([from, to]));
            let pairs: Vec<_> = pairs.collect();
            pairs.into_iter().filter_map(|pair| pair.join().ok()).collect()
        });
        let figures: Vec<_> = figures.into_iter().collect::<Result<_, _>>()?;
        Ok(Figure::plain(figures.iter().map(|figure| figure.value).sum()))
    }
}

impl Side for Yardstick {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn version(&self) -> String {
        "raw: memcpy by one thread, cuMemcpyDtoDAsync, sockets, or processes for threads".into()
    }

    fn role(&self) -> Role {
        Role::Yardstick
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        if row.is_of_apart_threads() {
            self.processes(row)?;
            return Ok(Setting { variant: &AS_IT_COMES[0], iterations: 0 });
        }
        if row.is_a_copy() || row.tcp {
            tune(row, self.0.seconds, AS_IT_COMES, |setting| self.measure(row, setting))
        } else {
            Out::cannot("it is no matter of one copy")
        }
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        if row.is_of_apart_threads() {
            return self.processes(row);
        }
        if row.tcp {
            return self.sockets(row, setting);
        }
        let title = if row.gpu { "copy_bench" } else { "mpi_bench" };
        let program = self.0.kit.peers.join(title);
        let mut command = Cores::pin(self.0.cores.first(1).unwrap_or_default(), program);
        let what = if row.gpu { &name(row.test) } else { "memcpy" };
        command.args([what, &row.size.to_string(), &setting.iterations.to_string()]);
        // The getter's engine reads over the link, which takes longer than writing.
        command.args((row.gpu && row.op == Op::Get).then_some("pull"));
        side::read_line(title, &children::read(&mut command, limit(self.0.seconds))?, row)
    }
}
