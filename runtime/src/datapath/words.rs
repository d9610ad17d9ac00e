//! Atomic operations on words in memory of GPUs.
//!
//! The coherence owner of such a word is its rank's progress, by the GPU's copy engine. The engine
//! copies the word into pinned host memory, the CPU changes it there, and the engine copies it
//! back. Requests that arrive meanwhile wait for the next round. One round does all waiting
//! requests in order, so that many requests for one word do not take a round each. No other agent
//! may do atomic operations on the word, not even the program's kernels.

use super::carrier::Carrier;
use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use crate::protocol::wire::{Control, TransferVerdict};
use crate::staging::{Direction, Staging, StagingBlock, WORD};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, CopyError, MemMut, MemRef, RegionSlice, Transfer};
use std::collections::{HashMap, VecDeque};

/// The change of a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Add(u64),
    Swap { expected: u64, new: u64 },
}

impl Change {
    fn of(self, held: u64) -> u64 {
        match self {
            Self::Add(value) => held.wrapping_add(value),
            Self::Swap { expected, new } if held == expected => new,
            Self::Swap { .. } => held,
        }
    }
}

/// An operation, and the rank that gets the previous value of the word.
pub(crate) struct WordRequest {
    pub(crate) from: Rank,
    pub(crate) token: u64,
    /// The index of the device that received it.
    pub(crate) device: u32,
    pub(crate) change: Change,
}

/// An operation that has finished.
type WordAnswer = (WordRequest, TransferVerdict);

/// A word with requests.
struct Word {
    place: RegionSlice,
    /// Requests for the next round.
    waiting: Vec<WordRequest>,
    round: Option<Round>,
}

/// The round of an engine. The copy is declared before its block: the drop of a transfer waits.
enum Round {
    /// The word is on its way to the host.
    Coming(Transfer, StagingBlock),
    /// The word is on its way back. These requests end when it is there, each with the previous
    /// value.
    Going(Transfer, StagingBlock, Vec<(WordRequest, u64)>),
}

/// The words of a runtime's regions that are being changed.
pub(crate) struct Words(Waiting<WordTable>);

#[derive(Default)]
struct WordTable {
    /// All words, by their addresses.
    all: HashMap<usize, Word>,
    /// Words whose round is in flight: at most the number of blocks.
    busy: Vec<usize>,
    /// Words that wait for a round.
    turn: VecDeque<usize>,
}

impl Words {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Words))
    }

    /// Adds a request for a word.
    fn ask(&self, place: RegionSlice, request: WordRequest) {
        let mut state = self.0.lock();
        let WordTable { all, turn, .. } = &mut *state;
        let address = address(&place);
        let word = all.entry(address).or_insert_with(|| {
            turn.push_back(address);
            Word { place, waiting: Vec::new(), round: None }
        });
        word.waiting.push(request);
        self.0.set_count(state.all.len());
    }

    /// Returns `true` if there is no request.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Ends the rounds that are done, and begins others.
    fn step(&self, staging: &Staging) -> Vec<WordAnswer> {
        let Some(mut state) = self.0.try_lock() else { return Vec::new() };
        let WordTable { all, busy, turn } = &mut *state;
        let mut answers = Vec::new();
        busy.retain(|address| {
            let Some(word) = all.get_mut(address) else { return false };
            word.step(&mut answers);
            if word.round.is_none() {
                if word.waiting.is_empty() {
                    all.remove(address);
                } else {
                    // The word goes behind the other words.
                    turn.push_back(*address);
                }
                return false;
            }
            true
        });
        while let Some(address) = turn.pop_front() {
            let Some(word) = all.get_mut(&address) else { continue };
            if !word.begin(staging, &mut answers) {
                // A word of another GPU may get a block the next time.
                turn.push_back(address);
                break;
            }
            if word.round.is_some() {
                busy.push(address);
            } else {
                all.remove(&address);
            }
        }
        self.0.set_count(all.len());
        answers
    }
}

/// Returns the address of a word, as a key. The CPU does not access it.
fn address(place: &RegionSlice) -> usize {
    place.region().addr() + place.offset()
}

impl Word {
    /// Lets the engine fetch the word. Returns `true` unless there was no block.
    fn begin(&mut self, staging: &Staging, answers: &mut Vec<WordAnswer>) -> bool {
        let Some(gpu) = self.place.region().gpu() else {
            answers
                .extend(self.waiting.drain(..).map(|request| (request, TransferVerdict::Failed)));
            return true;
        };
        let Some(block) = staging.take(gpu, Direction::Word, false) else { return false };
        match Transfer::start(block.first(WORD), Buffer::Region(self.place.clone())) {
            Ok(transfer) => self.round = Some(Round::Coming(transfer, block)),
            Err(refused) => self.give_up(&refused.cause, answers),
        }
        true
    }

    /// Polls the engine.
    fn step(&mut self, answers: &mut Vec<WordAnswer>) {
        self.round = match self.round.take() {
            Some(Round::Coming(mut transfer, block)) => match transfer.poll() {
                None => Some(Round::Coming(transfer, block)),
                Some(Ok(())) => self.change(block, answers),
                Some(Err(why)) => {
                    self.give_up(&why, answers);
                    None
                }
            },
            Some(Round::Going(mut transfer, block, found)) => match transfer.poll() {
                None => Some(Round::Going(transfer, block, found)),
                Some(outcome) => {
                    let verdict = |held| {
                        if outcome.is_ok() {
                            TransferVerdict::Held(held)
                        } else {
                            TransferVerdict::Failed
                        }
                    };
                    answers
                        .extend(found.into_iter().map(|(request, held)| (request, verdict(held))));
                    None
                }
            },
            None => None,
        };
    }

    /// Does all requests on the word, which is here now. Lets the engine copy it back if it has
    /// changed.
    fn change(&mut self, block: StagingBlock, answers: &mut Vec<WordAnswer>) -> Option<Round> {
        let was = match read(&block) {
            Ok(was) => was,
            Err(why) => {
                self.give_up(&why, answers);
                return None;
            }
        };
        let mut now = was;
        let found = self.waiting.drain(..).map(|request| {
            let held = now;
            now = request.change.of(held);
            (request, held)
        });
        let found: Vec<_> = found.collect();
        if now == was {
            answers.extend(
                found.into_iter().map(|(request, held)| (request, TransferVerdict::Held(held))),
            );
            return None;
        }
        let begun = write(&block, now).and_then(|()| {
            let target = Buffer::Region(self.place.clone());
            Transfer::start(target, block.first(WORD)).map_err(|refused| refused.cause)
        });
        match begun {
            Ok(transfer) => Some(Round::Going(transfer, block, found)),
            Err(why) => {
                self.waiting.splice(0..0, found.into_iter().map(|(request, _)| request));
                self.give_up(&why, answers);
                None
            }
        }
    }

    fn give_up(&mut self, why: &CopyError, answers: &mut Vec<WordAnswer>) {
        tracing::warn!(%why, "atomic operations on a word of a GPU could not be done");
        answers.extend(self.waiting.drain(..).map(|request| (request, TransferVerdict::Failed)));
    }
}

fn read(block: &StagingBlock) -> Result<u64, CopyError> {
    let mut bytes = [0; WORD];
    copy_now(MemMut::host(&mut bytes), block.first(WORD).view())?;
    Ok(u64::from_le_bytes(bytes))
}

fn write(block: &StagingBlock, word: u64) -> Result<(), CopyError> {
    match block.first(WORD).view_mut() {
        Some(room) => copy_now(room, MemRef::host(&word.to_le_bytes())),
        None => Ok(()),
    }
}

impl Carrier {
    /// Begins a peer's atomic operation on a word of GPU memory.
    ///
    /// # Errors
    /// Its address is no multiple of its size.
    pub(crate) fn change_on_gpu(
        &self,
        place: RegionSlice,
        request: WordRequest,
    ) -> Result<(), TransferVerdict> {
        if !address(&place).is_multiple_of(WORD) {
            return Err(TransferVerdict::Word);
        }
        self.words.ask(place, request);
        Ok(())
    }

    /// Moves on the words of GPUs that have requests. Returns `true` if a request has ended.
    #[cold]
    pub(crate) fn move_words(&self) -> bool {
        let answers = self.words.step(&self.staging);
        if answers.is_empty() {
            return false;
        }
        let devices = self.devices().clone();
        for (WordRequest { from, token, device, .. }, verdict) in answers {
            if let Some(device) = devices.get(device as usize) {
                device.0.control(self, from, Control::Fin { name: token, verdict });
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::gpu::{Flavour, Gpu};

    fn request(token: u64, change: Change) -> WordRequest {
        WordRequest { from: Rank(1), token, device: 0, change }
    }

    #[test]
    fn a_round_does_all_that_waits_in_order_and_a_busy_word_leaves_others_their_turn() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let region = driver.gpu(0).unwrap().allocate(800, Flavour::Plain).unwrap();
        region.whole().write(&[0; 800]).unwrap();
        let (words, staging) = (Words::new(&Chores::default()), Staging::default());
        let word = |at| region.slice(8 * at, 8).unwrap();
        let copies = driver.counters().copies;
        for token in 0..10 {
            words.ask(word(0), request(token, Change::Add(5)));
        }
        words.ask(word(0), request(10, Change::Swap { expected: 50, new: 7 }));
        words.ask(word(0), request(11, Change::Swap { expected: 50, new: 8 }));
        let mut answers = Vec::new();
        while !words.is_empty() {
            answers.extend(words.step(&staging));
        }
        let held: Vec<_> =
            answers.iter().map(|(request, verdict)| (request.token, *verdict)).collect();
        let mut want: Vec<_> =
            (0..10).map(|token| (token, TransferVerdict::Held(5 * token))).collect();
        want.extend([(10, TransferVerdict::Held(50)), (11, TransferVerdict::Held(7))]);
        assert_eq!(held, want);
        assert_eq!(driver.counters().copies - copies, 2, "one round");
        // More words than there are rounds at a time, and one that is never left alone.
        let mut others = 99;
        for at in 1..100 {
            words.ask(word(at), request(at as u64, Change::Add(at as u64)));
        }
        for token in 1000.. {
            words.ask(word(0), request(token, Change::Add(1)));
            others -=
                words.step(&staging).iter().filter(|(request, _)| request.token < 1000).count();
            if others == 0 {
                break;
            }
        }
        while !words.is_empty() {
            words.step(&staging);
        }
        for at in 1..100_u64 {
            assert_eq!(word(at as usize).to_vec().unwrap(), at.to_le_bytes());
        }
    }

    #[test]
    fn an_engine_that_fails_fails_its_askers_and_none_after_them() {
        use carrack_simulators::gpu::{FailAt, Which};
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let region = driver.gpu(0).unwrap().allocate(8, Flavour::Plain).unwrap();
        region.whole().write(&[0; 8]).unwrap();
        let (words, staging) = (Words::new(&Chores::default()), Staging::default());
        for at in [FailAt::Submit, FailAt::Event] {
            // Both copies: to the host, and back.
            for nth in [1, 2] {
                driver.faults().fail_copies(at, Which::Nth(nth), 700);
                for token in 0..3 {
                    words.ask(region.whole(), request(token, Change::Add(1)));
                }
                let mut answers = Vec::new();
                while !words.is_empty() {
                    answers.extend(words.step(&staging));
                }
                assert_eq!(answers.len(), 3, "{at:?} {nth}");
                assert!(answers.iter().all(|(_, verdict)| *verdict == TransferVerdict::Failed));
            }
        }
        words.ask(region.whole(), request(9, Change::Add(3)));
        while !words.is_empty() {
            words.step(&staging);
        }
        assert_eq!(region.whole().to_vec().unwrap(), 3_u64.to_le_bytes());
    }
}
