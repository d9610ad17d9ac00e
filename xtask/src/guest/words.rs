//! Messages of a guest to xtask, in lines: its progress, and its orders for the host.

use super::plan::Node;

/// Message of /init.
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

/// Order that a command may write as a line to `RDMA_GUEST_HOST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Kill that guest's QEMU, as if its power were cut. Its missing status is no failure.
    Kill(Node),
    /// Stop that guest's QEMU: a machine that is there and silent.
    Stop(Node),
    /// Let that guest's QEMU go on.
    Continue(Node),
    /// Excuse that guest, which is about to end itself without a status.
    Lose(Node),
}

impl Order {
    /// # Errors
    /// The fault of the line, and the orders that there are.
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
        order.ok_or_else(|| {
            format!("{line:?} is no order: kill, stop, continue or lose, and the number of a node")
        })
    }
}

#[cfg(test)]
mod tests {
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
}
