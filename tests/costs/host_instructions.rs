//! Instructions of a short message between two ranks over shared memory.

use crate::profile::counted;
use crate::report::Count;
use crate::support::{Job, OverShm, Watchdog};
use carrack::{Buffer, CompQueue, Counter, Rank, RemoteComp, Runtime, Synchronizer, Tag};
use std::hint::black_box;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

const ROLE: &str = "TEST_HOST_INSTRUCTIONS";

/// Messages that are counted, and those before, which warm up.
const MESSAGES: u64 = 1000;
const WARM_UP: u64 = 300;

/// Counted functions. No two have the same code, which the compiler would merge.
const MEASURED: [&str; 7] = [
    "measured_am",
    "measured_delivery",
    "measured_receive",
    "measured_send",
    "measured_match",
    "measured_fruitless",
    "measured_match_of_4_kib",
];

#[inline(never)]
fn measured_am(rank: &Runtime, name: RemoteComp, number: u64) {
    rank.post_am(Rank(1), &number.to_le_bytes(), name).submit().unwrap();
}

#[inline(never)]
fn measured_delivery(rank: &Runtime, delivered: &Counter) -> u64 {
    drop(rank.progress());
    delivered.get()
}

#[inline(never)]
fn measured_receive(rank: &Runtime, buffer: Vec<u8>, arrived: &Synchronizer) {
    rank.post_recv(Rank(0), buffer, Tag(1)).comp(arrived).submit().unwrap();
}

#[inline(never)]
fn measured_send(rank: &Runtime, number: u64) {
    rank.post_send(Rank(1), &number.to_le_bytes(), Tag(1)).submit().unwrap();
}

#[inline(never)]
fn measured_match(rank: &Runtime, arrived: &Synchronizer) -> bool {
    drop(rank.progress());
    arrived.test()
}

#[inline(never)]
fn measured_match_of_4_kib(rank: &Runtime, arrived: &CompQueue) -> bool {
    drop(rank.progress());
    !arrived.is_empty()
}

#[inline(never)]
fn measured_fruitless(rank: &Runtime) {
    drop(rank.progress());
}

type Task = Box<dyn FnOnce(&Runtime) + Send>;

/// The rank that sends, on a thread of its own: a thread that serves two ranks in turn pays for
/// each change.
struct Sender {
    tasks: SyncSender<(Task, SyncSender<()>)>,
    thread: JoinHandle<()>,
}

impl Sender {
    fn on_its_thread(rank: Runtime) -> Self {
        let (tasks, received) = sync_channel::<(Task, SyncSender<()>)>(0);
        let thread = std::thread::spawn(move || {
            for (task, ended) in received {
                task(&rank);
                ended.send(()).unwrap();
            }
        });
        Self { tasks, thread }
    }

    fn run(&self, task: impl FnOnce(&Runtime) + Send + 'static) {
        let (ended, end) = sync_channel(0);
        self.tasks.send((Box::new(task), ended)).unwrap();
        end.recv().unwrap();
    }

    fn end(self) {
        drop(self.tasks);
        self.thread.join().unwrap();
    }
}

/// Makes progress on both sides. Once nothing is found, the next message is none of a stream.
fn progress_both(sender: &Sender, receiver: &Runtime) {
    sender.run(|rank| drop(rank.progress()));
    drop(receiver.progress());
}

/// Messages that each find their receiver at rest. The buffer of a receive comes back in its
/// status.
#[test]
fn a_rank_in_its_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut ranks = OverShm::ranks(2);
    let receiver = black_box(ranks.pop().unwrap());
    let sender = Sender::on_its_thread(ranks.pop().unwrap());
    let (delivered, arrived) = (Counter::new(), Synchronizer::new(1));
    let name = receiver.register_comp(&delivered).unwrap();
    let (mut buffer, mut large, queue) = (vec![0; 8], vec![0; 4096], CompQueue::new(1));
    for number in 1..=WARM_UP + MESSAGES {
        let is_counted = number > WARM_UP;
        if is_counted {
            progress_both(&sender, &receiver);
            sender.run(move |rank| measured_am(rank, name, number));
            let delivered = measured_delivery(&receiver, &delivered);
            assert_eq!(delivered, number, "one call of progress delivers");
            progress_both(&sender, &receiver);
            measured_receive(&receiver, buffer, &arrived);
            sender.run(move |rank| measured_send(rank, number));
            let is_there = measured_match(&receiver, &arrived);
            assert!(is_there, "one call of progress matches");
            progress_both(&sender, &receiver);
            measured_fruitless(&receiver);
        } else {
            receiver.post_recv(Rank(0), buffer, Tag(1)).comp(&arrived).submit().unwrap();
            sender.run(move |rank| {
                rank.post_am(Rank(1), &number.to_le_bytes(), name).submit().unwrap();
                rank.post_send(Rank(1), &number.to_le_bytes(), Tag(1)).submit().unwrap();
            });
            while delivered.get() < number || !arrived.test() {
                progress_both(&sender, &receiver);
            }
        }
        receiver.post_recv(Rank(0), large, Tag(2)).comp(&queue).submit().unwrap();
        sender.run(move |rank| {
            rank.post_send(Rank(1), &[number as u8; 4096], Tag(2)).submit().unwrap();
        });
        while is_counted && !measured_match_of_4_kib(&receiver, &queue)
            || !is_counted && queue.is_empty()
        {
            drop(receiver.progress());
        }
        let status = queue.pop().unwrap();
        assert_eq!(status.bytes(), Some(&[number as u8; 4096][..]));
        let Buffer::Vec(back) = status.buffer else { panic!("another buffer") };
        large = back;
        let status = arrived.take().unwrap().pop().unwrap();
        assert_eq!(status.bytes(), Some(&number.to_le_bytes()[..]));
        let Buffer::Vec(back) = status.buffer else { panic!("another buffer") };
        buffer = back;
    }
    sender.end();
}

pub(crate) fn counts() -> Vec<Count> {
    let _watchdog = Watchdog::over("instructions of host memory");
    let count = |name: &str| {
        let path = format!("{}::{name}", module_path!());
        let all = counted(&path, "host_instructions::a_rank_in_its_role", ROLE, |_| false);
        (name.replacen("measured", "shm", 1), all / MESSAGES)
    };
    MEASURED.into_iter().map(count).collect()
}
