//! The distribution of work: ranks without work steal some, and all ranks detect the end together.
//!
//! Everything arrives in one queue, told apart by its tag:
//!
//! ```text
//! STEAL  thief → victim       give me nodes
//! NODES  victim → thief       the older half of its nodes, or nothing
//! TOKEN  rank → next rank     Safra's token: round the ring, to detect the end
//! END    rank 0 → the others  the end
//! ```
//!
//! Safra's algorithm (Dijkstra, EWD 998, 1987) detects the end. It does not suffice that every rank
//! was seen without work: work may have been in flight past the observer. So each rank counts the
//! messages with work that it has sent, less those that it has received. A rank is black from the
//! receipt of work until it passes the token on. The token waits at a rank that has work, and then
//! takes along the rank's count and colour.
//!
//! All work is done if the token returns white to a white and idle rank 0, and the counts add up to
//! zero. Otherwise the token goes round again. STEAL, and NODES without nodes, bring no work, so
//! they do not count.

use crate::Result;
use crate::search::{Node, ROOT, hash};
use carrack::{CompQueue, Rank, RemoteComp, Runtime, Status, Tag, WaitError};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

const STEAL: Tag = Tag(1);
const NODES: Tag = Tag(2);
const TOKEN: Tag = Tag(3);
const END: Tag = Tag(4);

/// Nodes between two looks at the queue. A thief waits for about as long, some microseconds.
const TURN: usize = 32;
/// Shortest and longest pause of a refused rank before it asks again. The pause doubles with each
/// refusal, so that ranks without work leave the cores to those that have some.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

pub(crate) struct Worker<'a> {
    runtime: &'a Runtime,
    inbox: CompQueue,
    name: RemoteComp,
    /// New nodes come and go at the back; thieves get those at the front, nearest to the root.
    nodes: VecDeque<Node>,
    tries: u64,
    asked: bool,
    ask_again: Instant,
    pause: Duration,
    /// Count and colour (`true`: black) of the token, while it is here.
    token: Option<(i64, bool)>,
    sent_less_got: i64,
    black: bool,
    ended: bool,
    pub(crate) visited: u64,
    pub(crate) steals: u64,
}

impl<'a> Worker<'a> {
    /// Creates the worker of this rank. Collective over all ranks. Rank 0 has the root, and the
    /// token, which is black at first so that it goes round.
    pub(crate) fn new(runtime: &'a Runtime) -> Result<Self> {
        let first = runtime.rank() == Rank(0);
        // Each rank can send a STEAL and the answer to this rank's; the token and END come on
        // top.
        let inbox = CompQueue::new(2 * runtime.size() as usize + 2);
        let name = runtime.register_comp(&inbox)?;
        runtime.barrier()?;
        Ok(Self {
            runtime,
            inbox,
            name,
            nodes: first.then_some(ROOT).into_iter().collect(),
            tries: 0,
            asked: false,
            ask_again: Instant::now(),
            pause: PAUSE.0,
            token: first.then_some((0, true)),
            sent_less_got: 0,
            black: false,
            ended: false,
            visited: 0,
            steals: 0,
        })
    }

    /// Works and steals until no rank has work.
    pub(crate) fn run(&mut self) -> Result<()> {
        while !self.ended {
            for _ in 0..TURN {
                let Some(node) = self.nodes.pop_back() else { break };
                self.visited += 1;
                self.nodes.extend(node.children());
            }
            if self.nodes.is_empty() {
                self.be_idle()?;
            }
            self.runtime.progress()?;
            while let Some(message) = self.inbox.pop() {
                self.read(&message.ok()?)?;
            }
        }
        Ok(())
    }

    fn be_idle(&mut self) -> Result<()> {
        if let Some((count, black)) = self.token.take() {
            self.pass_on(count + self.sent_less_got, black || self.black)?;
        }
        let (me, size) = (u64::from(self.runtime.rank().0), u64::from(self.runtime.size()));
        if !self.asked && size > 1 && Instant::now() >= self.ask_again {
            // A random rank other than this one, by the hash of a number that never repeats.
            self.tries += 1;
            let victim = (me + 1 + hash(me << 32 ^ self.tries) % (size - 1)) % size;
            self.send(Rank(victim as u32), &[], STEAL)?;
            self.asked = true;
        }
        match self.runtime.wait_for(self.pause, || self.ended || !self.inbox.is_empty()) {
            Ok(()) | Err(WaitError::TimedOut(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&mut self, message: &Status) -> Result<()> {
        let mut numbers = message.bytes().unwrap_or_default().as_chunks().0.iter().copied();
        match message.tag {
            STEAL => {
                let most = self.runtime.max_eager() / size_of::<u64>();
                let given: Vec<u8> = self
                    .nodes
                    .drain(..(self.nodes.len() / 2).min(most))
                    .flat_map(|node| node.0.to_le_bytes())
                    .collect();
                self.sent_less_got += i64::from(!given.is_empty());
                self.send(message.rank, &given, NODES)?;
            }
            NODES if message.size == 0 => {
                self.asked = false;
                self.ask_again = Instant::now() + self.pause;
                self.pause = PAUSE.1.min(2 * self.pause);
            }
            NODES => {
                self.asked = false;
                self.pause = PAUSE.0;
                self.sent_less_got -= 1;
                self.black = true;
                self.steals += 1;
                self.nodes.extend(numbers.map(|number| Node(u64::from_le_bytes(number))));
            }
            TOKEN => {
                let mut number = || numbers.next().map(i64::from_le_bytes).ok_or("half a token");
                self.token = Some((number()?, number()? != 0));
            }
            _ => self.ended = true,
        }
        Ok(())
    }

    /// Passes the token on, or ends the search if rank 0 finds all work done.
    fn pass_on(&mut self, count: i64, black: bool) -> Result<()> {
        let (me, size) = (self.runtime.rank().0, self.runtime.size());
        if me == 0 && count == 0 && !black {
            self.ended = true;
            return (1..size).try_for_each(|rank| self.send(Rank(rank), &[], END));
        }
        let (count, black) = if me == 0 { (0, false) } else { (count, black) };
        self.black = false;
        let token = [count.to_le_bytes(), i64::from(black).to_le_bytes()].concat();
        self.send(Rank((me + 1) % size), &token, TOKEN)
    }

    fn send(&self, to: Rank, bytes: &[u8], what: Tag) -> Result<()> {
        // A rank has a few messages in flight at most. If there is no room, the backlog keeps
        // them.
        self.runtime.post_am(to, bytes, self.name).tag(what).submit()?;
        Ok(())
    }
}
