//! PTX as instructions, limited to those of the kernel.

use std::collections::HashMap;

/// Operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand {
    Register(usize),
    /// `{%a, %b}`.
    Registers(Vec<usize>),
    Number(u64),
    /// `%tid.x`, `%clock`, `%globaltimer`.
    Special(String),
    /// `[%page+256]`.
    Memory(usize, u64),
    /// `[job+8]`, of shared memory, or a name of it without brackets.
    Shared(u64),
    /// `[generation]`: index of the parameter.
    Parameter(usize),
    /// Index of the instruction.
    Label(usize),
}

/// One instruction.
#[derive(Debug)]
pub(super) struct Instruction {
    /// The predicate that guards it, and the value that it has to have.
    pub(super) guard: Option<(usize, bool)>,
    /// `ld`, `relaxed`, `sys`, `global`, `u64`.
    pub(super) words: Vec<String>,
    pub(super) operands: Vec<Operand>,
}

/// A kernel.
#[derive(Debug)]
pub struct Program {
    pub(super) instructions: Vec<Instruction>,
    pub(super) registers: usize,
    /// Bytes of shared memory.
    pub(super) shared: usize,
}

/// Names and their meanings.
#[derive(Default)]
struct Names {
    registers: HashMap<String, usize>,
    parameters: Vec<String>,
    shared: HashMap<String, u64>,
    labels: HashMap<String, usize>,
}

impl Program {
    /// Parses a text with one kernel.
    pub fn of(text: &str) -> Self {
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        let text = lines.collect::<Vec<_>>().join("\n");
        let (head, rest) = text.split_once("\n{\n").expect("a body");
        let (body, _) = rest.rsplit_once("\n}").expect("its end");
        let mut names = Names::default();
        let parameter = |line: &str| {
            line.trim()
                .strip_prefix(".param .u64 ")
                .map(|name| name.trim_end_matches(',').trim().to_owned())
        };
        names.parameters = head.lines().filter_map(parameter).collect();
        // Statements. Their labels are collected first, since branches go forward, too.
        let (mut statements, mut shared) = (Vec::new(), 0);
        for statement in body.split(';') {
            let mut statement = statement.trim();
            while let Some((label, rest)) = statement.split_once(':').filter(|(label, _)| {
                label.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit())
            }) {
                assert!(
                    names.labels.insert(label.to_owned(), statements.len()).is_none(),
                    "{label} twice"
                );
                statement = rest.trim();
            }
            if let Some(words) = statement.strip_prefix(".shared .align 16 .b64 ") {
                let (name, count) = words.trim_end_matches(']').split_once('[').expect("a length");
                names.shared.insert(name.to_owned(), shared);
                shared += 8 * count.parse::<u64>().expect("a length");
            } else if !statement.is_empty() && !statement.starts_with(".reg") {
                statements.push(statement);
            }
        }
        let instructions =
            statements.iter().map(|statement| names.instruction(statement)).collect();
        Self {
            instructions,
            registers: names.registers.len(),
            shared: usize::try_from(shared).expect("some bytes"),
        }
    }
}

impl Names {
    fn instruction(&mut self, statement: &str) -> Instruction {
        let (guard, statement) = match statement.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) =
                    rest.split_once(' ').expect("an instruction behind its predicate");
                let (name, wanted) =
                    name.strip_prefix('!').map_or((name, true), |name| (name, false));
                (Some((self.register(name), wanted)), rest.trim())
            }
            None => (None, statement),
        };
        let (words, operands) = statement.split_once(' ').unwrap_or((statement, ""));
        let words = words.split('.').map(str::to_owned).collect();
        // Commas in braces separate registers, not operands.
        let (mut parts, mut depth, mut part) = (Vec::new(), 0, String::new());
        for letter in operands.chars() {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    parts.push(std::mem::take(&mut part));
                    continue;
                }
                _ => {}
            }
            part.push(letter);
        }
        parts.push(part);
        let operands = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
        Instruction { guard, words, operands: operands.map(|part| self.operand(part)).collect() }
    }

    fn operand(&mut self, text: &str) -> Operand {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        if let Some(inner) = text.strip_prefix('{') {
            let each = inner.trim_end_matches('}').split(',');
            return Operand::Registers(each.map(|name| self.register(name.trim())).collect());
        }
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.trim_end_matches(']');
            let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
            let offset = number(offset).expect("an offset");
            if base.starts_with('%') {
                return Operand::Memory(self.register(base), offset);
            }
            if let Some(at) = self.shared.get(base) {
                return Operand::Shared(at + offset);
            }
            let at = self.parameters.iter().position(|name| name == base);
            return Operand::Parameter(at.unwrap_or_else(|| panic!("what is {base}?")));
        }
        match text {
            "%tid.x" | "%clock" | "%globaltimer" => Operand::Special(text.to_owned()),
            register if register.starts_with('%') => Operand::Register(self.register(register)),
            _ => match (number(text), self.labels.get(text), self.shared.get(text)) {
                (Some(number), ..) => Operand::Number(number),
                (_, Some(label), _) => Operand::Label(*label),
                (_, _, Some(at)) => Operand::Shared(*at),
                _ => panic!("what is {text}?"),
            },
        }
    }

    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }
}
