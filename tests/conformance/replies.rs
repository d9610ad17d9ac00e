//! Replies that handlers post to the senders of their messages. Each is accepted, however small the
//! backlog. A sender that floods its server with requests is told to wait.

use crate::support::over_each_transport;
use crate::support::*;
use carrack::buffer::Region;
use carrack::settings::SettingsBuilder;
use carrack::{
    Buffer, Completion, Counter, Handler, Matching, OpError, PostError, ProgressError, Rank,
    RemoteComp, Runtime, Status, Tag,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

over_each_transport!(
    every_reply_is_accepted_and_the_server_keeps_few,
    ranks_that_flood_each_other_get_every_reply,
    a_reply_to_a_message_that_was_received_is_accepted_too,
    a_message_of_a_handler_that_is_no_reply_has_no_place_in_a_full_backlog,
    a_reply_to_a_message_that_came_before_its_receive_is_accepted_too,
    a_reply_to_a_put_is_accepted_too,
    what_an_operation_without_a_message_is_told_late_is_no_message_to_reply_to,
    a_late_status_of_any_rank_is_told_in_a_handler,
    a_client_goes_on_in_the_end_though_its_server_posts_all_the_time,
);

const BACKLOG: usize = 4;
const BATCH: usize = 16;
/// Operations that may wait at a server: more than the messages of any link here.
const FEW: usize = 600;
const REQUESTS: RemoteComp = RemoteComp::named("requests");
const REPLIES: RemoteComp = RemoteComp::named("replies");

fn tiny<J: Job>() -> SettingsBuilder {
    J::settings()
        .setting("shm_slots", 8)
        .setting("tcp_window", 2048)
        .setting("shm_chunks", 8)
        .backlog(BACKLOG)
        .poll_batch(BATCH)
}

/// Replies to each message of the handler, and counts those that were refused.
fn replying(runtime: &Runtime) -> (Handler, Arc<AtomicU64>) {
    let refused = Arc::new(AtomicU64::new(0));
    let count = refused.clone();
    let handler = runtime.handler(move |runtime, status| {
        let bytes = status.bytes().unwrap().to_vec();
        let mut reply = runtime.post_am(status.rank, bytes, REPLIES).tag(status.tag);
        count.fetch_add(u64::from(reply.submit().is_err()), Ordering::Relaxed);
    });
    (handler, refused)
}

/// Counts the replies, whose bytes are those of their requests.
fn counting(runtime: &Runtime) -> Arc<AtomicU64> {
    let counter = Arc::new(AtomicU64::new(0));
    let counted = counter.clone();
    let check = Handler::new(move |status| {
        assert_eq!(status.bytes().unwrap(), request(status.tag.0));
        counted.fetch_add(1, Ordering::Relaxed);
    });
    runtime.register_comp_named("replies", &check).unwrap();
    counter
}

/// Returns a request: most are short, some are of a packet, and a few are fetched.
fn request(number: u64) -> Vec<u8> {
    let size = match number % 40 {
        0 => 20_000,
        at if at % 8 == 0 => 3000,
        at => at as usize,
    };
    pattern(number, size)
}

/// Submits a request. Returns `false` if there is no room for it.
fn submit(from: &Runtime, to: Rank, number: u64) -> bool {
    match from.post_am(to, request(number), REQUESTS).tag(Tag(number)).submit() {
        Ok(()) => true,
        Err(PostError::BacklogFull { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

fn every_reply_is_accepted_and_the_server_keeps_few<J: Job>() {
    let ranks = J::pair_with(tiny::<J>());
    let [client, server] = &ranks;
    let (handler, refused) = replying(server);
    server.register_comp_named("requests", &handler).unwrap();
    let replies = counting(client);
    // The client posts twice the messages that it takes in, until it is told to wait.
    let (mut sent, mut most, mut rounds) = (0, 0, 0);
    while rounds < 500 {
        rounds += usize::from(most > BACKLOG);
        for _ in 0..2 * BATCH {
            sent += usize::from(submit(client, Rank(1), 1 + sent as u64 % 7));
        }
        (0..4).for_each(|_| _ = server.progress().unwrap());
        most = most.max(server.pending().operations.len());
        client.progress().unwrap();
        if J::IS_RDMA {
            nics_go_on();
        }
    }
    until(&ranks, || replies.load(Ordering::Relaxed) == sent as u64);
    settle(&ranks);
    assert_eq!(
        (replies.load(Ordering::Relaxed), refused.load(Ordering::Relaxed)),
        (sent as u64, 0)
    );
    // The word to wait stands behind the replies that the link holds.
    assert!(most < FEW, "{most} replies waited of {sent}");
}

fn ranks_that_flood_each_other_get_every_reply<J: Job>() {
    const COUNT: u64 = 3000;
    let ranks = J::pair_with(tiny::<J>());
    let served = ranks.each_ref().map(|rank| {
        let (handler, refused) = replying(rank);
        rank.register_comp_named("requests", &handler).unwrap();
        (handler, refused, counting(rank))
    });
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (at, rank) in ranks.iter().enumerate() {
            let (replies, done) = (&served[at].2, &done);
            scope.spawn(move || {
                let (peer, mut sent) = (Rank(1 - at as u32), 0);
                let mut is_done = false;
                while done.load(Ordering::Relaxed) < 2 {
                    while sent < COUNT && submit(rank, peer, sent) {
                        sent += 1;
                    }
                    rank.progress().unwrap();
                    if !is_done && replies.load(Ordering::Relaxed) == COUNT {
                        is_done = true;
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    settle(&ranks);
    for (_, refused, replies) in &served {
        assert_eq!((refused.load(Ordering::Relaxed), replies.load(Ordering::Relaxed)), (0, COUNT));
    }
    for rank in &ranks {
        assert!(rank.pending().operations.is_empty(), "{}", rank.pending());
        assert_eq!(rank.unexpected_bytes(), 0);
    }
}

fn a_reply_to_a_message_that_was_received_is_accepted_too<J: Job>() {
    const COUNT: u64 = 400;
    let ranks = J::pair_with(tiny::<J>());
    let [client, server] = &ranks;
    let (handler, refused) = replying(server);
    let replies = counting(client);
    for at in 0..COUNT {
        let room = Buffer::Vec(vec![0; request(at).len()]);
        server.post_recv(Rank(0), room, Tag(at)).comp(&handler).submit().unwrap();
    }
    let mut sent = 0;
    while sent < COUNT {
        match client.post_send(Rank(1), request(sent), Tag(sent)).submit() {
            Ok(()) => sent += 1,
            Err(_) => _ = client.progress().unwrap(),
        }
        (0..8).for_each(|_| _ = server.progress().unwrap());
    }
    until(&ranks, || replies.load(Ordering::Relaxed) == COUNT);
    settle(&ranks);
    assert_eq!((replies.load(Ordering::Relaxed), refused.load(Ordering::Relaxed)), (COUNT, 0));
}

fn a_message_of_a_handler_that_is_no_reply_has_no_place_in_a_full_backlog<J: Job>() {
    let ranks = J::ranks_with(3, tiny::<J>());
    connect(&ranks);
    let taken = Counter::new();
    ranks[2].register_comp_named("replies", &taken).unwrap();
    let (passed, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counts = (passed.clone(), refused.clone());
    let pass_on = ranks[1].handler(move |runtime, status| {
        let outcome = runtime.post_am(Rank(2), &[0; 8], REPLIES).tag(status.tag).submit();
        let count = if outcome.is_ok() { &counts.0 } else { &counts.1 };
        count.fetch_add(1, Ordering::Relaxed);
    });
    ranks[1].register_comp_named("requests", &pass_on).unwrap();
    for at in 0..100_000 {
        while !submit(&ranks[0], Rank(1), 1 + at % 7) {
            ranks[0].progress().unwrap();
            ranks[1].progress().unwrap();
        }
        if refused.load(Ordering::Relaxed) > 0 {
            break;
        }
    }
    assert!(refused.load(Ordering::Relaxed) > 0, "room for everything");
    assert!(ranks[1].pending().operations.len() <= BACKLOG);
    until(&ranks, || taken.get() == passed.load(Ordering::Relaxed));
    settle(&ranks);
}

fn a_reply_to_a_message_that_came_before_its_receive_is_accepted_too<J: Job>() {
    const COUNT: u64 = 400;
    let ranks = J::pair_with(tiny::<J>());
    let [client, server] = &ranks;
    let (handler, refused) = replying(server);
    let replies = counting(client);
    for at in 0..COUNT {
        sent(&ranks, || client.post_send(Rank(1), request(at), Tag(at)).try_submit());
    }
    let has_come = |at| server.probe(Rank(0), Tag(at)).look().unwrap().is_some();
    until(&ranks, || (0..COUNT).all(has_come));
    for at in 0..COUNT {
        let room = Buffer::Vec(vec![0; request(at).len()]);
        server.post_recv(Rank(0), room, Tag(at)).comp(&handler).submit().unwrap();
    }
    // The replies find no room, since the client takes nothing in.
    (0..100).for_each(|_| _ = server.progress().unwrap());
    assert_eq!(refused.load(Ordering::Relaxed), 0);
    until(&ranks, || replies.load(Ordering::Relaxed) == COUNT);
    settle(&ranks);
    assert_eq!((replies.load(Ordering::Relaxed), refused.load(Ordering::Relaxed)), (COUNT, 0));
}

fn a_reply_to_a_put_is_accepted_too<J: Job>() {
    const COUNT: u64 = 100;
    let ranks = J::pair_with(tiny::<J>());
    let [client, server] = &ranks;
    let refused = Arc::new(AtomicU64::new(0));
    let count = refused.clone();
    let handler = server.handler(move |runtime, status| {
        let bytes = request(status.tag.0);
        let reply = runtime.post_am(status.rank, bytes, REPLIES).tag(status.tag).submit();
        count.fetch_add(u64::from(reply.is_err()), Ordering::Relaxed);
    });
    let told = server.register_comp(&handler).unwrap();
    let region = Region::host(32 << 10);
    let mr = server.register_memory(&region).unwrap();
    let key = mr.remote_key();
    let replies = counting(client);
    // The client takes nothing in while it has room for a further put.
    for at in 0..COUNT {
        let put = || {
            let put = client.post_put(Rank(1), vec![7; 32 << 10], &key, 0);
            put.remote_comp(told).tag(Tag(at)).submit()
        };
        while put().is_err() {
            client.progress().unwrap();
        }
        (0..8).for_each(|_| _ = server.progress().unwrap());
    }
    until(&ranks, || replies.load(Ordering::Relaxed) == COUNT);
    settle(&ranks);
    assert_eq!((replies.load(Ordering::Relaxed), refused.load(Ordering::Relaxed)), (COUNT, 0));
}

/// Refuses the first status once, and then does something.
struct Hesitant<F> {
    has_refused: AtomicBool,
    then: F,
}

impl<F: Fn(Status) + Send + Sync> Completion for Hesitant<F> {
    fn signal(&self, status: Status) -> Result<(), Status> {
        if !self.has_refused.swap(true, Ordering::Relaxed) {
            return Err(status);
        }
        (self.then)(status);
        Ok(())
    }
}

/// Lets a receive end by its deadline. Its object refuses the status once.
fn ends_late<R: Send + 'static>(
    runtime: &Runtime,
    from: Rank,
    look: impl Fn(&Runtime) -> R + Send + Sync + 'static,
) -> R {
    let seen = Arc::new(Mutex::new(None));
    let (sees, own) = (seen.clone(), runtime.clone());
    let then = move |status: Status| {
        assert!(matches!(status.error.as_deref(), Some(OpError::TimedOut(_))), "{status:?}");
        *sees.lock() = Some(look(&own));
    };
    let object: Arc<dyn Completion> =
        Arc::new(Hesitant { has_refused: AtomicBool::new(false), then });
    // A thread that loses its core posts too late.
    let post = || {
        let recv = runtime.post_recv(from, vec![0; 8], Tag(1)).matching(Matching::TagOnly);
        recv.comp(&object).deadline(Duration::from_millis(1)).submit()
    };
    while let Err(error) = post() {
        assert!(matches!(error, PostError::TimedOut(_)), "{error}");
    }
    loop {
        // It reports that the object has no room.
        let _ = runtime.progress();
        if let Some(seen) = seen.lock().take() {
            return seen;
        }
    }
}

fn what_an_operation_without_a_message_is_told_late_is_no_message_to_reply_to<J: Job>() {
    let ranks = J::pair_with(tiny::<J>());
    let taken = Counter::new();
    ranks[0].register_comp_named("replies", &taken).unwrap();
    // Posts until the queues and the backlog are full.
    let fill = |runtime: &Runtime| {
        let post = || runtime.post_am(Rank(0), &[0; 8], REPLIES).submit();
        (0..1000).take_while(|_| post().is_ok()).count() as u64
    };
    let before = fill(&ranks[1]);
    let more = ends_late(&ranks[1], Rank(0), fill);
    assert!(before < 1000 && more < 1000, "{before} and {more} were accepted");
    until(&ranks, || taken.get() == before + more);
    settle(&ranks);
}

fn a_late_status_of_any_rank_is_told_in_a_handler<J: Job>() {
    let ranks = J::pair_with(tiny::<J>());
    let outcome = ends_late(&ranks[1], Rank::ANY, Runtime::progress);
    assert!(matches!(outcome, Err(ProgressError::InHandler)), "{outcome:?}");
    settle(&ranks);
}

fn a_client_goes_on_in_the_end_though_its_server_posts_all_the_time<J: Job>() {
    // A bound that no link takes over at once.
    let bound = 1000;
    let ranks = J::pair_with(tiny::<J>().backlog(bound));
    let [client, server] = &ranks;
    let (handler, refused) = replying(server);
    server.register_comp_named("requests", &handler).unwrap();
    let replies = counting(client);
    let taken = Counter::new();
    let others = client.register_comp(&taken).unwrap();
    let post = || server.post_am(Rank(0), &[0; 8], others).submit().is_ok();
    let turn = || {
        let posted = std::iter::repeat_with(post).take_while(|posted| *posted).count() as u64;
        ranks.iter().for_each(|rank| _ = rank.progress().unwrap());
        posted
    };
    let (mut sent, mut posted) = (0, 0);
    let (mut is_off, mut goes_on) = (false, false);
    for _ in 0..20_000 {
        posted += turn();
        let goes = submit(client, Rank(1), 1);
        sent += u64::from(goes);
        goes_on = goes && is_off;
        if goes_on {
            break;
        }
        // Its backlog is empty, so only a word of the server's refuses it.
        is_off |= !goes && client.pending().operations.is_empty();
    }
    until(&ranks, || replies.load(Ordering::Relaxed) == sent && taken.get() == posted);
    settle(&ranks);
    assert_eq!(refused.load(Ordering::Relaxed), 0);
    assert!(goes_on || !is_off, "refused for ever, for replies that have long been sent");
}
