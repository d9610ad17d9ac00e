//! A block of threads that carries out a program. Each thread advances alone as far as it can: to
//! a common instruction of its warp, or to a barrier of the block.

#![expect(clippy::disallowed_methods, reason = "loads and stores of lanes")]
#![expect(unsafe_code, reason = "lanes read and write memory by address")]
#![allow(clippy::cast_possible_truncation, reason = "registers of 64 bits hold narrower values")]

use super::text::{Instruction, Operand, Program};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Instant;

const WARP: usize = 32;

/// Address in registers at which shared memory begins: no host memory lies so low.
const SHARED: u64 = 0x100;

/// A block of threads that runs a kernel.
#[derive(Debug)]
pub struct Block<'p> {
    program: &'p Program,
    parameters: Vec<u64>,
    threads: Vec<Thread>,
    shared: Vec<u8>,
    begun: Instant,
    /// Seed of the number of steps that a warp takes in its turn.
    turns: u64,
}

#[derive(Debug)]
struct Thread {
    /// `%tid.x`.
    number: u64,
    at: usize,
    registers: Vec<u64>,
    has_ended: bool,
}

/// Reason why a thread cannot advance alone.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Stop {
    /// A common instruction of the warp: `vote`, `shfl`, `bar.warp.sync`.
    Warp,
    /// A barrier of the block, which opens for that number of threads.
    Block(u64, usize),
    Ended,
}

impl<'p> Block<'p> {
    /// Creates a block of `threads`, a multiple of 32, whose kernel has these parameters.
    pub fn new(program: &'p Program, threads: u64, parameters: &[u64]) -> Self {
        // Registers and shared memory hold arbitrary values when a kernel begins.
        let registers = |thread: u64| {
            (0..program.registers as u64).map(|at| garbage(at ^ thread << 20)).collect()
        };
        let thread =
            |number| Thread { number, at: 0, registers: registers(number), has_ended: false };
        Self {
            program,
            parameters: parameters.to_vec(),
            threads: (0..threads).map(thread).collect(),
            shared: (0..program.shared as u64).map(|at| garbage(at) as u8).collect(),
            begun: Instant::now(),
            turns: garbage(parameters.iter().fold(0, |all, one| all ^ one)),
        }
    }

    /// Runs all threads to their end.
    ///
    /// # Panics
    /// The lanes of a warp part where they do something together, or a barrier never opens.
    ///
    /// # Safety
    /// What the kernel reads and writes at addresses is valid while it runs. Memory that others
    /// reach meanwhile consists of atomic words.
    pub unsafe fn run(&mut self) {
        let warps = self.threads.len() / WARP;
        let mut stops = vec![None; warps];
        while stops.iter().any(|stop| *stop != Some(Stop::Ended)) {
            for (warp, stop) in stops.iter_mut().enumerate().filter(|(_, stop)| stop.is_none()) {
                self.turns = garbage(self.turns);
                if self.turns.is_multiple_of(3) {
                    *stop = self.run_warp(warp, 1 + self.turns / 3 % 24);
                }
            }
            for barrier in stops.clone().into_iter().flatten().filter(|stop| *stop != Stop::Ended) {
                let Stop::Block(_, wanted) = barrier else {
                    panic!("a warp that stays at {barrier:?}")
                };
                let waiting: Vec<usize> =
                    (0..warps).filter(|warp| stops[*warp] == Some(barrier)).collect();
                assert!(waiting.len() * WARP <= wanted, "more threads than a barrier is for");
                if waiting.len() * WARP == wanted {
                    waiting.into_iter().for_each(|warp| {
                        lanes_of(warp).for_each(|lane| self.threads[lane].at += 1);
                        stops[warp] = None;
                    });
                }
            }
            std::thread::yield_now();
        }
    }

    /// Runs until the warp has done `steps` common instructions, or waits at a barrier of the
    /// block.
    fn run_warp(&mut self, warp: usize, steps: u64) -> Option<Stop> {
        for _ in 0..steps {
            let lanes = lanes_of(warp);
            let stops: Vec<Stop> = lanes.clone().map(|thread| self.run_thread(thread)).collect();
            match stops[0] {
                Stop::Warp => {
                    let at = self.threads[lanes.start].at;
                    assert!(
                        stops.iter().all(|stop| *stop == Stop::Warp)
                            && self.threads[lanes.clone()].iter().all(|lane| lane.at == at),
                        "lanes of warp {warp} wait at different instructions"
                    );
                    self.together(warp, &self.program.instructions[at]);
                }
                stop => {
                    assert!(
                        stops.iter().all(|other| *other == stop),
                        "lanes of warp {warp} part: {stops:?}"
                    );
                    return Some(stop);
                }
            }
        }
        None
    }

    fn run_thread(&mut self, thread: usize) -> Stop {
        while !self.threads[thread].has_ended {
            let instruction = &self.program.instructions[self.threads[thread].at];
            let is_meant = |(register, wanted): (usize, bool)| {
                (self.threads[thread].registers[register] != 0) == wanted
            };
            if !instruction.guard.is_none_or(is_meant) {
                self.threads[thread].at += 1;
                continue;
            }
            match &instruction.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["vote" | "shfl", ..] | ["bar", "warp", "sync"] => return Stop::Warp,
                ["bar", "sync"] => {
                    let number =
                        |at: usize| instruction.operands.get(at).map(|one| self.value(thread, one));
                    let threads = number(1).map_or(self.threads.len(), |count| count as usize);
                    return Stop::Block(number(0).expect("which barrier"), threads);
                }
                ["ret"] => self.threads[thread].has_ended = true,
                ["bra", ..] => {
                    let Operand::Label(label) = instruction.operands[0] else {
                        panic!("{instruction:?}")
                    };
                    self.threads[thread].at = label;
                    continue;
                }
                words => self.alone(thread, instruction, words),
            }
            self.threads[thread].at += 1;
        }
        Stop::Ended
    }

    /// Carries out a common instruction of a warp.
    fn together(&mut self, warp: usize, instruction: &Instruction) {
        let lanes = lanes_of(warp);
        let Instruction { words, operands, .. } = instruction;
        let read = |lane: usize, operand: usize| self.value(lane, &operands[operand]);
        let results: Vec<Option<u64>> = match &words.iter().map(String::as_str).collect::<Vec<_>>()
            [..]
        {
            ["bar", ..] => vec![None; WARP],
            ["vote", "sync", "ballot", "b32"] => {
                let bits =
                    lanes.clone().enumerate().map(|(bit, lane)| (read(lane, 1) & 1) << bit).sum();
                vec![Some(bits); WARP]
            }
            ["vote", "sync", "any", "pred"] => {
                vec![Some(u64::from(lanes.clone().any(|lane| read(lane, 1) != 0))); WARP]
            }
            ["shfl", "sync", "idx", "b32"] => {
                let from = |lane| lanes.start + usize::try_from(read(lane, 2) & 31).unwrap();
                lanes.clone().map(|lane| Some(read(from(lane), 1) & 0xffff_ffff)).collect()
            }
            other => panic!("{other:?} is not simulated"),
        };
        for (lane, result) in lanes.zip(results) {
            if let (Some(value), Some(Operand::Register(to))) = (result, operands.first()) {
                self.threads[lane].registers[*to] = value;
            }
            self.threads[lane].at += 1;
        }
    }

    fn value(&self, thread: usize, operand: &Operand) -> u64 {
        let registers = &self.threads[thread].registers;
        match operand {
            Operand::Register(register) => registers[*register],
            Operand::Number(number) => *number,
            Operand::Shared(at) => SHARED + at,
            Operand::Special(name) => match name.as_str() {
                "%tid.x" => self.threads[thread].number,
                "%clock" => u64::from(self.begun.elapsed().subsec_nanos()),
                _ => u64::try_from(self.begun.elapsed().as_nanos()).unwrap(),
            },
            Operand::Registers(pair) => {
                let [low, high] = pair[..] else { panic!("{operand:?}") };
                registers[high] << 32 | registers[low] & 0xffff_ffff
            }
            other => panic!("{other:?} is no value"),
        }
    }

    fn alone(&mut self, thread: usize, instruction: &Instruction, words: &[&str]) {
        let Instruction { operands, .. } = instruction;
        let read = |operand: usize| self.value(thread, &operands[operand]);
        let low = |value: u64| value & 0xffff_ffff;
        let cut = |value: u64| {
            if words.last().is_some_and(|word| word.ends_with("32")) { low(value) } else { value }
        };
        let result = match words {
            ["fence", ..] => {
                fence(Ordering::SeqCst);
                return;
            }
            ["ld", ..] => return self.load(thread, operands, words),
            ["st", ..] => return self.store(thread, operands, words),
            ["mov", "b64"] if matches!(operands[0], Operand::Registers(_)) => {
                let (value, Operand::Registers(pair)) = (read(1), &operands[0]) else {
                    panic!("{instruction:?}")
                };
                let registers = &mut self.threads[thread].registers;
                (registers[pair[0]], registers[pair[1]]) = (low(value), value >> 32);
                return;
            }
            ["mov", _] | ["cvta", ..] => cut(read(1)),
            ["cvt", "u32", "u64"] | ["cvt", "u64", "u32"] => low(read(1)),
            ["shr", _] => cut(read(1)).checked_shr(read(2) as u32).unwrap_or(0),
            ["shl", _] => cut(read(1) << read(2)),
            ["mul", "wide", "u32"] => low(read(1)) * low(read(2)),
            ["mul", "lo", "u32"] => low(read(1).wrapping_mul(read(2))),
            ["add", _] => cut(read(1).wrapping_add(read(2))),
            ["sub", _] => cut(read(1).wrapping_sub(read(2))),
            ["and", _] => cut(read(1) & read(2)),
            ["or", "pred" | "b32"] => cut(read(1) | read(2)),
            ["xor", _] => cut(read(1) ^ read(2)),
            ["not", "b32"] => low(!read(1)),
            ["neg", "s32"] => low(read(1).wrapping_neg()),
            ["max", "u32"] => low(read(1)).max(low(read(2))),
            ["min", "u32"] => low(read(1)).min(low(read(2))),
            ["selp", "u32"] => low(if read(3) != 0 { read(1) } else { read(2) }),
            ["setp", comparison, sort] => u64::from(compares(comparison, sort, read(1), read(2))),
            other => panic!("{other:?} is not simulated"),
        };
        let Operand::Register(to) = operands[0] else { panic!("{instruction:?}") };
        self.threads[thread].registers[to] = result;
    }

    fn load(&mut self, thread: usize, operands: &[Operand], words: &[&str]) {
        let (address, sort) = (self.address(thread, &operands[1]), *words.last().unwrap());
        let values: Vec<u64> = match (&operands[1], &operands[0]) {
            (Operand::Parameter(which), _) => vec![self.parameters[*which]],
            (_, Operand::Registers(all)) => {
                check_vector(address, words, all.len());
                let part = width(sort) as u64;
                (0..all.len() as u64).map(|at| self.fetch(address + part * at, sort)).collect()
            }
            _ => vec![self.fetch(address, sort)],
        };
        let registers = &mut self.threads[thread].registers;
        match &operands[0] {
            Operand::Register(to) => registers[*to] = values[0],
            Operand::Registers(all) => {
                all.iter().zip(values).for_each(|(to, value)| registers[*to] = value)
            }
            other => panic!("{other:?} is no place"),
        }
    }

    fn store(&mut self, thread: usize, operands: &[Operand], words: &[&str]) {
        let (address, sort) = (self.address(thread, &operands[0]), *words.last().unwrap());
        match &operands[1] {
            Operand::Registers(all) => {
                check_vector(address, words, all.len());
                for (at, from) in all.iter().enumerate() {
                    let value = self.threads[thread].registers[*from];
                    self.put(address + (width(sort) * at) as u64, sort, value);
                }
            }
            one => {
                let value = self.value(thread, one);
                self.put(address, sort, value);
            }
        }
    }

    fn address(&self, thread: usize, operand: &Operand) -> u64 {
        match operand {
            Operand::Memory(base, offset) => self.threads[thread].registers[*base] + offset,
            Operand::Shared(at) => SHARED + at,
            Operand::Parameter(_) => 0,
            other => panic!("{other:?} is no address"),
        }
    }

    fn in_shared(&self, address: u64, sort: &str) -> Option<std::ops::Range<usize>> {
        let at = usize::try_from(address.checked_sub(SHARED)?).ok()?;
        let range = at..at + width(sort);
        (at < self.shared.len()).then_some(range)
    }

    fn fetch(&self, address: u64, sort: &str) -> u64 {
        assert!(address.is_multiple_of(width(sort) as u64), "a {sort} at {address:#x}");
        if let Some(range) = self.in_shared(address, sort) {
            let bytes = &self.shared[range];
            return bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        }
        // SAFETY: the kernel reads the board, which is all atomics, or memory that a command
        // names, which stays until it is answered. The address is aligned, as checked above.
        unsafe {
            match sort {
                "u64" => (*(address as *const AtomicU64)).load(Ordering::Relaxed),
                "u32" => (*(address as *const AtomicU32)).load(Ordering::Relaxed).into(),
                _ => (address as *const u8).read_volatile().into(),
            }
        }
    }

    fn put(&mut self, address: u64, sort: &str, value: u64) {
        assert!(address.is_multiple_of(width(sort) as u64), "a {sort} at {address:#x}");
        if let Some(range) = self.in_shared(address, sort) {
            let len = range.len();
            self.shared[range].copy_from_slice(&value.to_le_bytes()[..len]);
            return;
        }
        #[allow(clippy::cast_possible_truncation, reason = "a store has the lower bits")]
        // SAFETY: as for reading; and a command's target has no other user.
        unsafe {
            match sort {
                "u64" => (*(address as *const AtomicU64)).store(value, Ordering::Relaxed),
                "u32" => (*(address as *const AtomicU32)).store(value as u32, Ordering::Relaxed),
                _ => (address as *mut u8).write_volatile(value as u8),
            }
        }
    }
}

fn lanes_of(warp: usize) -> std::ops::Range<usize> {
    WARP * warp..WARP * (warp + 1)
}

/// Returns a meaningless number, always the same.
pub fn garbage(of: u64) -> u64 {
    let mixed = (of ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 29).wrapping_mul(0x94d0_49bb_1331_11eb).rotate_right(31)
}

/// Checks an access of 16 bytes, which has to be aligned to 16.
fn check_vector(address: u64, words: &[&str], count: usize) {
    let is_one = match words {
        [.., "v4", "u32"] => count == 4,
        [.., "v2", "u64"] => count == 2,
        _ => false,
    };
    assert!(is_one && address.is_multiple_of(16), "{words:?} of {count} at {address:#x}");
}

fn width(sort: &str) -> usize {
    match sort {
        "u64" => 8,
        "u32" => 4,
        "u8" => 1,
        other => panic!("{other} is not simulated"),
    }
}

fn compares(comparison: &str, sort: &str, one: u64, other: u64) -> bool {
    #[allow(
        clippy::cast_possible_wrap,
        clippy::cast_possible_truncation,
        reason = "as the instruction has them"
    )]
    let order = match sort {
        "u64" => one.cmp(&other),
        "s64" => (one as i64).cmp(&(other as i64)),
        "s32" => (one as u32 as i32).cmp(&(other as u32 as i32)),
        _ => (one as u32).cmp(&(other as u32)),
    };
    match comparison {
        "eq" => order.is_eq(),
        "ne" => order.is_ne(),
        "lt" => order.is_lt(),
        "gt" => order.is_gt(),
        "ge" => order.is_ge(),
        other => panic!("setp.{other} is not simulated"),
    }
}
