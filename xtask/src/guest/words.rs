//! What a guest says through its ports, as lines in files that QEMU writes: how far it is, and what it wants of the host.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use super::plan::Node;

/// What /init says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The devices are there; the command waits for its turn.
    Ready,
    /// The command has ended with this status.
    Exit(u8),
}

impl Word {
    pub(super) fn read(line: &str) -> Option<Self> {
        match line.split_once(' ') {
            None if line == "ready" => Some(Self::Ready),
            Some(("exit", status)) => status.parse().ok().map(Self::Exit),
            _ => None,
        }
    }
}

/// What a command may order by a line to `RDMA_GUEST_HOST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Kill that guest's QEMU, as if its power were cut. Its missing status is no failure.
    Kill(Node),
    /// Stop that guest's QEMU: a machine that is there and silent.
    Stop(Node),
    /// Let it go on.
    Continue(Node),
    /// That guest is about to end without a status, by its own doing, and that is no failure.
    Lose(Node),
}

impl Order {
    /// # Errors
    /// What is wrong with the line, and what may stand there.
    pub(super) fn read(line: &str) -> Result<Self, String> {
        let order = line.trim().split_once(' ').and_then(|(verb, node)| {
            let node = Node(node.trim().parse().ok().filter(|node| *node < 2)?);
            match verb {
                "kill" => Some(Self::Kill(node)),
                "stop" => Some(Self::Stop(node)),
                "continue" => Some(Self::Continue(node)),
                "lose" => Some(Self::Lose(node)),
                _ => None,
            }
        });
        order.ok_or_else(|| format!("{line:?} is no order: kill, stop, continue or lose, and the number of a node"))
    }
}

/// The end of a file that grows.
pub(super) struct Tail {
    path: PathBuf,
    file: Option<File>,
    begun: Vec<u8>,
}

impl Tail {
    /// Of a file that may not be there yet.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None, begun: Vec::new() }
    }

    /// The lines that have been completed since the last call.
    pub(super) fn lines(&mut self) -> io::Result<Vec<String>> {
        if self.file.is_none() {
            self.file = match File::open(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                other => Some(other?),
            };
        }
        if let Some(file) = &mut self.file {
            file.read_to_end(&mut self.begun)?;
        }
        let Some(end) = self.begun.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        let whole: Vec<u8> = self.begun.drain(..=end).collect();
        Ok(String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    #[test]
    fn a_guest_says_that_it_is_ready_and_how_it_ended() {
        assert_eq!(Word::read("ready"), Some(Word::Ready));
        assert_eq!(Word::read("exit 101"), Some(Word::Exit(101)));
        for noise in ["", "exit", "exit 256", "exit x", "ready 1", "start"] {
            assert_eq!(Word::read(noise), None, "{noise:?}");
        }
    }

    #[test]
    fn an_order_names_what_and_which_node() {
        assert_eq!(Order::read("kill 1"), Ok(Order::Kill(Node(1))));
        assert_eq!(Order::read("stop 0\r"), Ok(Order::Stop(Node(0))));
        assert_eq!(Order::read("continue 0"), Ok(Order::Continue(Node(0))));
        assert_eq!(Order::read("lose 1"), Ok(Order::Lose(Node(1))));
        for wrong in ["", "kill", "kill 2", "kill -1", "kill all", "burn 1"] {
            assert!(Order::read(wrong).unwrap_err().contains("kill, stop"), "{wrong:?}");
        }
    }

    #[test]
    fn lines_of_a_growing_file_come_whole_and_once() {
        let path = std::env::temp_dir().join(format!("xtask-tail-{}", std::process::id()));
        let mut tail = Tail::new(path.clone());
        assert_eq!(tail.lines().unwrap(), [""; 0]);
        let mut file = File::create(&path).unwrap();
        for (written, expected) in [("one\ntw", vec!["one"]), ("", vec![]), ("o\nthree\n", vec!["two", "three"])] {
            file.write_all(written.as_bytes()).unwrap();
            assert_eq!(tail.lines().unwrap(), expected);
        }
        fs::remove_file(path).unwrap();
    }
}
