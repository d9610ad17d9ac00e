//! Peers that have mapped a buffer, while it grows and shrinks.

use super::{STRIPE, buffer, check, fill};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{
    Gpus, Kind, PATIENCE, Went, completed, filled, get, heard, holds, put, receive, registered,
    send, told,
};
use crate::support::ranks::{Ranks, Role};
use crate::support::words::are_all;
use carrack::alloc::{GrowableBuffer, GrowableError};
use carrack::region::Mr;
use carrack::{OpError, PeerState, Piece, Rank, RemoteKey, Runtime, Tag};
use rustix::process::Signal;
use std::time::Duration;

/// Bytes that a peer puts into each stripe, and bytes before them.
const LEN: usize = 100_003;
const GUARD: usize = 4093;
const STRIPES: usize = 5;

/// gpu.md, VMM rule 5.
#[test]
fn a_peer_goes_on_putting_into_what_it_has_mapped_while_the_buffer_grows() {
    let _watchdog = Watchdog::over("grows");
    Ranks::start("growable_buffer::grows", 2, &[]).succeed();
}

pub(crate) fn grows(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    if role.rank == 0 {
        owner_of_what_grows(role, &gpus, &runtime);
    } else {
        putter(role, &gpus, &runtime);
    }
    role.meet("over", &runtime, 0..2);
}

/// Registers the place for a peer's bytes in a stripe, and tells of it.
fn lends(
    role: &Role,
    runtime: &Runtime,
    buffer: &GrowableBuffer,
    turn: usize,
    stripe: usize,
) -> Mr {
    let piece = buffer.pieces(stripe * STRIPE, STRIPE).unwrap().remove(0);
    piece.whole().write(&vec![0xee; STRIPE]).unwrap();
    registered(role, runtime, &format!("stripe {turn}"), &piece.subregion(GUARD, LEN).unwrap())
}

/// Checks the peer's bytes, and that the bytes around them are unchanged.
fn check_lent(buffer: &GrowableBuffer, stripe: usize, salt: u64) {
    let piece = buffer.pieces(stripe * STRIPE, STRIPE).unwrap().remove(0);
    check(&piece.subregion(GUARD, LEN).unwrap(), salt);
    let bytes = piece.whole().to_vec().unwrap();
    let around = [&bytes[..GUARD], &bytes[GUARD + LEN..]];
    assert!(are_all(&around, 0xee), "around what was put into stripe {stripe}");
}

fn owner_of_what_grows(role: &Role, gpus: &Gpus, runtime: &Runtime) {
    let mut buffer = buffer(gpus, STRIPES);
    let (addr, mut mrs, mut rounds) = (buffer.addr(), Vec::new(), 0);
    for stripe in 0..STRIPES {
        buffer.grow_to(stripe * STRIPE + 1).unwrap();
        mrs.push(lends(role, runtime, &buffer, stripe, stripe));
        // Rounds that began after it had grown.
        for _ in 0..3 {
            heard(role, runtime, &format!("round {rounds}"), 1);
            rounds += 1;
        }
    }
    role.says("enough");
    let salts = role.told("salts", 1);
    for (stripe, salt) in
        salts.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).enumerate()
    {
        check_lent(&buffer, stripe, salt);
    }
    assert_eq!((salts.len(), buffer.addr(), buffer.len()), (8 * STRIPES, addr, STRIPES * STRIPE));

    // It does not shrink under a registration.
    let why = buffer.shrink_to(2 * STRIPE).unwrap_err();
    assert!(
        matches!(
            &why,
            GrowableError::InUse { used, processes, .. }
                if *used == STRIPES * STRIPE && processes.is_empty()
        ),
        "{why}"
    );
    // Nor while a peer has it mapped, which makes no progress now.
    mrs.truncate(2);
    let why = buffer.shrink_to(2 * STRIPE).unwrap_err();
    let GrowableError::InUse { used, processes, .. } = &why else { panic!("{why}") };
    assert_eq!((*used, processes.len()), (STRIPES * STRIPE, 1), "{why}");
    assert!(
        why.to_string().contains("have them mapped") && processes[0] != std::process::id(),
        "{why}"
    );
    assert_eq!(buffer.len(), STRIPES * STRIPE);
    role.says("go on");
    shrink(runtime, &mut buffer, 2 * STRIPE);
    // What comes there now is another allocation, under another name.
    buffer.grow_to(STRIPES * STRIPE).unwrap();
    let again = lends(role, runtime, &buffer, STRIPES, STRIPES - 1);
    runtime.barrier().unwrap();
    heard(role, runtime, "put again", 1);
    check_lent(&buffer, STRIPES - 1, 77);
    for (stripe, salt) in [(0, 1000), (1, 1001)] {
        check_lent(&buffer, stripe, salt);
    }
    drop((mrs, again));
    shrink(runtime, &mut buffer, 0);
    runtime.barrier().unwrap();
}

/// Shrinks the buffer as soon as peers have released it. Peers that only make progress, in a
/// barrier for instance, do so at once.
pub(crate) fn shrink(runtime: &Runtime, buffer: &mut GrowableBuffer, len: usize) {
    loop {
        match buffer.shrink_to(len) {
            Ok(()) => return,
            Err(GrowableError::InUse { .. }) => assert!(runtime.progress().is_ok()),
            Err(other) => panic!("{other}"),
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn putter(role: &Role, gpus: &Gpus, runtime: &Runtime) {
    let sources = [Kind::Plain(0), Kind::Host, Kind::Plain(1)];
    let mut known: Vec<(RemoteKey, u64)> = Vec::new();
    let mut round = 0_u64;
    while known.len() < STRIPES || !role.has_said("enough", 0) {
        if role.has_said(&format!("stripe {}", known.len()), 0) {
            known.push((told(role, &format!("stripe {}", known.len()), 0), 0));
        }
        for (at, (rmr, salt)) in known.iter_mut().enumerate() {
            *salt = round * 10 + at as u64;
            let source = sources[(round as usize + at) % sources.len()];
            assert_eq!(put(runtime, || source.full(gpus, LEN, *salt), rmr, 0), Went::Mapped);
            if round.is_multiple_of(5) {
                let (went, buffer) = get(runtime, || source.empty(gpus, LEN), rmr, 0);
                assert_eq!(went, Went::Mapped);
                holds(&buffer, LEN, *salt);
            }
        }
        if !known.is_empty() {
            role.says(&format!("round {round}"));
            round += 1;
        }
    }
    let salts: Vec<u8> = known.iter().flat_map(|(_, salt)| salt.to_le_bytes()).collect();
    role.tells("salts", &salts);
    // It stands still meanwhile.
    role.told("go on", 0);
    for (at, (rmr, _)) in known.iter().enumerate().take(2) {
        put(runtime, || Kind::Plain(0).full(gpus, LEN, 1000 + at as u64), rmr, 0);
    }
    // A rank that keeps the remote key of freed memory keeps the mapping.
    let old = known[STRIPES - 1].0.to_bytes();
    drop(known);
    runtime.barrier().unwrap();
    // The old name is stale, the new one is good.
    let old = RemoteKey::from_bytes(&old).unwrap();
    let stale = completed(runtime, |done| {
        runtime.post_put(Rank(0), filled(LEN, 1), &old, 0).comp(done).submit()
    });
    assert!(matches!(stale.unwrap().ok(), Err(OpError::Stale(Rank(0)))));
    let new = told(role, &format!("stripe {STRIPES}"), 0);
    assert_eq!(put(runtime, || Kind::Plain(0).full(gpus, LEN, 77), &new, 0), Went::Mapped);
    drop(new);
    role.says("put again");
    runtime.barrier().unwrap();
}

/// gpu.md, VMM rules 2 and 5.
#[test]
fn a_longer_name_of_what_has_grown_leads_to_all_of_it_and_the_shorter_one_stays_good() {
    let _watchdog = Watchdog::over("longer");
    Ranks::start("growable_buffer::longer", 2, &[]).succeed();
}

pub(crate) fn longer(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    // Of the last GPU alone: a region is one GPU's.
    let one = &gpus.all[gpus.all.len() - 1..];
    let mut buffer = GrowableBuffer::reserve(one, STRIPES * STRIPE).stripe(STRIPE).build().unwrap();
    let lengths = [STRIPE, 3 * STRIPE, STRIPES * STRIPE];
    if role.rank == 0 {
        let mut mrs = Vec::new();
        for len in lengths {
            buffer.grow_to(len).unwrap();
            buffer.region(0, len).unwrap().whole().write(&vec![0xee; len]).unwrap();
            mrs.push(registered(
                role,
                &runtime,
                &format!("{len} bytes"),
                &buffer.region(GUARD, len - 2 * GUARD).unwrap(),
            ));
            heard(role, &runtime, &format!("put {len}"), 1);
            let bytes = buffer.region(0, len).unwrap().whole().to_vec().unwrap();
            let (before, rest) = bytes.split_at(GUARD);
            let (put, behind) = rest.split_at(len - 2 * GUARD);
            assert!(put == filled(put.len(), len as u64), "{len} bytes");
            assert!(are_all(&[before, behind], 0xee));
        }
        role.says("all seen");
        heard(role, &runtime, "put by the shorter ones", 1);
        for (len, salt) in [(3 * STRIPE, 8), (STRIPE, 9)] {
            let written = buffer.region(len - GUARD - 1000, 1000).unwrap();
            check(&written, salt);
        }
        // The peer stands still, and has all of it mapped.
        drop(mrs);
        let why = buffer.shrink_to(0).unwrap_err();
        let GrowableError::InUse { used, processes, .. } = &why else { panic!("{why}") };
        assert_eq!((*used, processes.len()), (STRIPES * STRIPE, 1), "{why}");
        role.says("go on");
        shrink(&runtime, &mut buffer, 0);
    } else {
        let mut names = Vec::new();
        for len in lengths {
            let rmr = told(role, &format!("{len} bytes"), 0);
            let full = || Kind::Plain(0).full(&gpus, len - 2 * GUARD, len as u64);
            assert_eq!(put(&runtime, full, &rmr, 0), Went::Mapped);
            let (went, back) = get(&runtime, || Kind::Host.empty(&gpus, len - 2 * GUARD), &rmr, 0);
            assert_eq!(went, Went::Mapped);
            holds(&back, len - 2 * GUARD, len as u64);
            names.push(rmr);
            role.says(&format!("put {len}"));
        }
        heard(role, &runtime, "all seen", 0);
        for (rmr, salt) in [(&names[1], 8), (&names[0], 9)] {
            let source = || Kind::Plain(1).full(&gpus, 1000, salt);
            assert_eq!(put(&runtime, source, rmr, rmr.len() - 1000), Went::Mapped);
        }
        role.says("put by the shorter ones");
        role.told("go on", 0);
        drop(names);
    }
    runtime.barrier().unwrap();
}

#[test]
fn what_messages_were_sent_from_is_given_back_once_the_receiver_has_released_it() {
    let _watchdog = Watchdog::over("messages");
    Ranks::start("growable_buffer::messages", 2, &[]).succeed();
}

pub(crate) fn messages(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let mut buffer = buffer(&gpus, 4);
    for turn in 0..3_u64 {
        buffer.grow_to(4 * STRIPE).unwrap();
        for (at, piece) in buffer.pieces(0, buffer.len()).unwrap().iter().enumerate() {
            let (tag, salt) = (Tag(at as u64), turn * 100 + at as u64);
            let part = piece.slice(5, STRIPE - 100).unwrap();
            if role.rank == 0 {
                part.write(&filled(part.len(), salt)).unwrap();
                send(&runtime, Rank(1), part, tag).unwrap().ok().unwrap();
            } else {
                piece.whole().write(&vec![0xee; STRIPE]).unwrap();
                let status = receive(&runtime, Rank(0), part, tag).unwrap().ok().unwrap();
                holds(&status.buffer, STRIPE - 100, salt);
                let bytes = piece.whole().to_vec().unwrap();
                assert!(are_all(&[&bytes[..5], &bytes[STRIPE - 95..]], 0xee));
            }
        }
        shrink(&runtime, &mut buffer, STRIPE);
        assert_eq!(buffer.len(), STRIPE);
        runtime.barrier().unwrap();
    }
    // A range over several stripes goes by one operation, as a batch of its pieces.
    buffer.grow_to(4 * STRIPE).unwrap();
    let pieces = buffer.pieces(STRIPE - 50, 2 * STRIPE).unwrap();
    let mut at = 0;
    if role.rank == 0 {
        let rmr = told(role, "room", 1);
        let mut batch = Vec::new();
        for (salt, piece) in pieces.iter().enumerate() {
            fill(piece, salt as u64);
            batch.push(Piece { local: piece, range: 0..piece.len(), rmr: &rmr, offset: at as u64 });
            at += piece.len();
        }
        completed(&runtime, |done| runtime.post_put_batch(Rank(1), &batch).comp(done).submit())
            .unwrap()
            .ok()
            .unwrap();
        role.says("put");
    } else {
        let room = gpus.plain(2 * STRIPE);
        let _mr = registered(role, &runtime, "room", &room);
        heard(role, &runtime, "put", 0);
        for (salt, piece) in pieces.iter().enumerate() {
            check(&room.subregion(at, piece.len()).unwrap(), salt as u64);
            at += piece.len();
        }
    }
    drop(pieces);
    shrink(&runtime, &mut buffer, 0);
    runtime.barrier().unwrap();
    role.meet("over", &runtime, 0..2);
}

/// gpu.md, life and death rule 1.
#[test]
fn a_peer_that_is_killed_holds_nothing_of_the_buffer() {
    let _watchdog = Watchdog::over("killed");
    let mut ranks = Ranks::start("growable_buffer::killed", 2, &[]);
    assert!(ranks.hears("mapped", 1));
    ranks.signal(Rank(1), Signal::KILL);
    ranks.succeed_except(Rank(1));
}

pub(crate) fn killed(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    if role.rank == 1 {
        let rmr = told(role, "stripe 0", 0);
        assert_eq!(put(&runtime, || Kind::Plain(0).full(&gpus, LEN, 3), &rmr, 0), Went::Mapped);
        runtime.barrier().unwrap();
        role.says("mapped");
        loop {
            put(&runtime, || Kind::Plain(0).full(&gpus, LEN, 3), &rmr, 0);
        }
    }
    let mut buffer = buffer(&gpus, 3);
    buffer.grow_to(2 * STRIPE).unwrap();
    let mr = lends(role, &runtime, &buffer, 0, 1);
    // Each has heard of the other.
    runtime.barrier().unwrap();
    let is_down = || matches!(runtime.peer_state(Rank(1)), PeerState::Down(_));
    runtime.wait_for(PATIENCE, is_down).expect("it is noticed");
    buffer.grow_to(3 * STRIPE).unwrap();
    check_lent(&buffer, 1, 3);
    drop(mr);
    shrink(&runtime, &mut buffer, 0);
    buffer.grow_to(3 * STRIPE).unwrap();
    let again = buffer.pieces(STRIPE, 100).unwrap().remove(0);
    fill(&again, 5);
    check(&again, 5);
}
