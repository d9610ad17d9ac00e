//! The words with which a connection begins, before anything of a job is said on it.
//!
//! Whoever listens speaks first, with a *challenge*; whoever came says who it is and what for (a
//! *call*), with a proof; the answer is a *welcome* with a proof of its own, or a refusal in words.
//! Proofs cover the challenge and all that was said, so what was overheard once opens nothing. What
//! follows is neither hidden nor sealed: the network is trusted to carry it.
//!
//! All begin with the same eight bytes and a version, whatever follows in other versions.

#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr};

use super::key::{JobKey, Nonce, is_same};

/// How each side begins.
const MAGIC: [u8; 8] = *b"carrack\n";

/// The version of greetings and frames. Both sides must have the same.
pub const VERSION: u32 = 1;

/// Bytes of a beginning, of a challenge, of a call, and of what follows a welcome's first byte.
const PREFIX: usize = 12;
/// Bytes of a challenge.
pub const CHALLENGE: usize = PREFIX + 16;
/// Bytes of a call.
pub const CALL: usize = PREFIX + 1 + 4 * 3 + 2 + 16 + 16 + 32;
/// Bytes of a welcome behind its first.
pub const WELCOME: usize = 4 + 16 + 4 + 16 + 2 + 32;

/// The longest refusal, in bytes; a longer one is cut.
const MAX_REFUSAL: usize = 1024;

/// The first byte of an answer.
const IS_WELCOME: u8 = 1;
const IS_REFUSAL: u8 = 2;

/// Why bytes are no greeting of this job's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stranger {
    /// They are not Carrack's.
    Other,
    /// They are of another version.
    Version(u32),
    /// Their proof is of another secret.
    Secret,
    /// They make no sense.
    Nonsense,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// To be told one's place, by rank 0.
    Join,
    /// To be linked to the rank above.
    Attach,
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What for.
    pub errand: Errand,
    /// The caller's rank.
    pub rank: u32,
    /// The ranks that it takes the job to have.
    pub size: u32,
    /// Its place in the tree, once it knows.
    pub place: u32,
    /// The port at which it listens to those below it.
    pub port: u16,
    /// The job's salt, once it knows.
    pub salt: Nonce,
    /// Drawn for this connection.
    pub nonce: Nonce,
}

/// Where a rank is, as others may reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Its rank.
    pub rank: u32,
    /// Its address as rank 0 sees it. A loopback address means the machine of rank 0.
    pub ip: IpAddr,
    /// The port at which it listens.
    pub port: u16,
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The caller's place.
    pub place: u32,
    /// The job's salt.
    pub salt: Nonce,
    /// Who is above it, if that is not the one who says so.
    pub above: Option<Seat>,
}

/// A challenge, as bytes.
pub fn challenge(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), nonce].concat()
}

/// The nonce in a challenge.
///
/// # Errors
///
/// [`Stranger::Other`] or [`Stranger::Version`].
pub fn read_challenge(bytes: &[u8; CHALLENGE]) -> Result<Nonce, Stranger> {
    check_beginning(bytes)?;
    bytes.last_chunk().copied().ok_or(Stranger::Nonsense)
}

/// Checks as much of a beginning as is there: a stranger is known by its first byte.
///
/// # Errors
///
/// [`Stranger::Other`] or [`Stranger::Version`].
pub fn check_beginning(bytes: &[u8]) -> Result<(), Stranger> {
    let len = bytes.len().min(MAGIC.len());
    if bytes[..len] != MAGIC[..len] {
        return Err(Stranger::Other);
    }
    match bytes[len..].first_chunk().map(|version| u32::from_le_bytes(*version)) {
        Some(version) if version != VERSION => Err(Stranger::Version(version)),
        _ => Ok(()),
    }
}

impl Call {
    /// The call as bytes, as the answer to a challenge.
    pub fn encode(&self, key: &JobKey, challenge: &Nonce) -> Vec<u8> {
        let errand = match self.errand {
            Errand::Join => 0,
            Errand::Attach => 1,
        };
        let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &[errand]].concat();
        for number in [self.rank, self.size, self.place] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(self.salt);
        bytes.extend(self.nonce);
        let proof = key.proof(b"call\0", &[challenge, &bytes]);
        bytes.extend(proof);
        bytes
    }

    /// Reads a call that answers this challenge.
    ///
    /// # Errors
    ///
    /// [`Stranger`].
    pub fn decode(bytes: &[u8; CALL], key: &JobKey, challenge: &Nonce) -> Result<Self, Stranger> {
        check_beginning(bytes)?;
        let (said, proof) = bytes.split_last_chunk().ok_or(Stranger::Nonsense)?;
        if !is_same(&key.proof(b"call\0", &[challenge, said]), proof) {
            return Err(Stranger::Secret);
        }
        let mut fields = Fields(&said[PREFIX..]);
        let errand = match fields.take()? {
            [0] => Errand::Join,
            [1] => Errand::Attach,
            _ => return Err(Stranger::Nonsense),
        };
        Ok(Self {
            errand,
            rank: fields.number()?,
            size: fields.number()?,
            place: fields.number()?,
            port: u16::from_le_bytes(fields.take()?),
            salt: fields.take()?,
            nonce: fields.take()?,
        })
    }
}

impl Welcome {
    /// The welcome as bytes, for whoever called with this nonce.
    pub fn encode(&self, key: &JobKey, caller: &Nonce) -> Vec<u8> {
        let nobody = Seat { rank: u32::MAX, ip: Ipv6Addr::UNSPECIFIED.into(), port: 0 };
        let above = self.above.unwrap_or(nobody);
        let ip = match above.ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut bytes = vec![IS_WELCOME];
        bytes.extend(self.place.to_le_bytes());
        bytes.extend(self.salt);
        bytes.extend(above.rank.to_le_bytes());
        bytes.extend(ip.octets());
        bytes.extend(above.port.to_le_bytes());
        let proof = key.proof(b"welcome\0", &[caller, &bytes[1..]]);
        bytes.extend(proof);
        bytes
    }

    /// Reads what follows a welcome's first byte.
    ///
    /// # Errors
    ///
    /// [`Stranger::Secret`] or [`Stranger::Nonsense`].
    pub fn decode(bytes: &[u8; WELCOME], key: &JobKey, caller: &Nonce) -> Result<Self, Stranger> {
        let (said, proof) = bytes.split_last_chunk().ok_or(Stranger::Nonsense)?;
        if !is_same(&key.proof(b"welcome\0", &[caller, said]), proof) {
            return Err(Stranger::Secret);
        }
        let mut fields = Fields(said);
        let (place, salt, rank) = (fields.number()?, fields.take()?, fields.number()?);
        let ip = IpAddr::V6(Ipv6Addr::from(fields.take()?)).to_canonical();
        let port = u16::from_le_bytes(fields.take()?);
        let above = (rank != u32::MAX).then_some(Seat { rank, ip, port });
        Ok(Self { place, salt, above })
    }
}

/// A refusal as bytes.
pub fn refusal(why: &str) -> Vec<u8> {
    let end =
        (0..=MAX_REFUSAL.min(why.len())).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0);
    let len = u16::try_from(end).unwrap_or(0).to_le_bytes();
    [&[IS_REFUSAL], &len[..], &why.as_bytes()[..end]].concat()
}

/// What the first byte of an answer says that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A welcome.
    Welcome,
    /// The length of a refusal, in two bytes, then its words.
    Refusal,
}

/// Reads the first byte of an answer.
///
/// # Errors
///
/// [`Stranger::Nonsense`].
pub fn read_answer(first: u8) -> Result<Answer, Stranger> {
    match first {
        IS_WELCOME => Ok(Answer::Welcome),
        IS_REFUSAL => Ok(Answer::Refusal),
        _ => Err(Stranger::Nonsense),
    }
}

/// The words of a refusal, fit to be shown: it is not proven who speaks.
pub fn words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_REFUSAL).collect()
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Stranger> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Stranger::Nonsense)?;
        self.0 = rest;
        Ok(*head)
    }

    fn number(&mut self) -> Result<u32, Stranger> {
        self.take().map(u32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> JobKey {
        JobKey::of_secret(b"a secret for tests")
    }

    fn seat() -> impl Strategy<Value = Option<Seat>> {
        let ip = prop_oneof![
            any::<[u8; 4]>().prop_map(IpAddr::from),
            any::<[u8; 16]>().prop_map(IpAddr::from)
        ];
        let seat = (0..u32::MAX, ip, any::<u16>());
        proptest::option::of(seat.prop_map(|(rank, ip, port)| Seat {
            rank,
            ip: ip.to_canonical(),
            port,
        }))
    }

    fn call() -> impl Strategy<Value = Call> {
        let errand = prop_oneof![Just(Errand::Join), Just(Errand::Attach)];
        (errand, any::<[u32; 3]>(), any::<u16>(), any::<Nonce>(), any::<Nonce>()).prop_map(
            |(errand, [rank, size, place], port, salt, nonce)| Call {
                errand,
                rank,
                size,
                place,
                port,
                salt,
                nonce,
            },
        )
    }

    proptest! {
        #[test]
        fn a_call_comes_back_and_one_changed_bit_is_noticed(
            call in call(), nonce: Nonce, at in 0..CALL, bit in 0..8_u32,
        ) {
            let mut bytes: [u8; CALL] = call.encode(&key(), &nonce).try_into().unwrap();
            prop_assert_eq!(Call::decode(&bytes, &key(), &nonce), Ok(call));
            bytes[at] ^= 1 << bit;
            prop_assert!(Call::decode(&bytes, &key(), &nonce).is_err());
        }

        #[test]
        fn a_call_that_was_overheard_opens_nothing(call in call(), nonce: Nonce, next: Nonce) {
            prop_assume!(nonce != next);
            let bytes: [u8; CALL] = call.encode(&key(), &nonce).try_into().unwrap();
            prop_assert_eq!(Call::decode(&bytes, &key(), &next), Err(Stranger::Secret));
            let other = JobKey::of_secret(b"another secret, too");
            prop_assert_eq!(Call::decode(&bytes, &other, &nonce), Err(Stranger::Secret));
        }

        #[test]
        fn a_welcome_comes_back_and_one_changed_bit_is_noticed(
            place: u32, salt: Nonce, above in seat(), nonce: Nonce, at in 1..=WELCOME, bit in 0..8_u32,
        ) {
            let welcome = Welcome { place, salt, above };
            let mut bytes = welcome.encode(&key(), &nonce);
            prop_assert_eq!(read_answer(bytes[0]), Ok(Answer::Welcome));
            let decode = |bytes: &[u8]| Welcome::decode(bytes[1..].try_into().unwrap(), &key(), &nonce);
            prop_assert_eq!(decode(&bytes), Ok(welcome));
            bytes[at] ^= 1 << bit;
            prop_assert!(decode(&bytes).is_err());
        }

        #[test]
        fn garbage_is_a_stranger_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), CALL)) {
            let call: &[u8; CALL] = bytes[..].try_into().unwrap();
            prop_assert!(Call::decode(call, &key(), &[0; 16]).is_err());
            let _ = (check_beginning(&bytes), read_answer(bytes[0]), words(&bytes));
        }
    }

    #[test]
    fn a_stranger_is_known_by_its_first_bytes() {
        assert_eq!(check_beginning(b"G"), Err(Stranger::Other));
        assert_eq!(check_beginning(b"carrack\n"), Ok(()));
        assert_eq!(check_beginning(b"carrack\n\x02\0\0\0"), Err(Stranger::Version(2)));
        let challenge: [u8; CHALLENGE] = challenge(&[5; 16]).try_into().unwrap();
        assert_eq!(read_challenge(&challenge), Ok([5; 16]));
    }

    #[test]
    fn a_refusal_is_cut_between_characters_and_shown_without_control_characters() {
        let bytes = refusal(&"ä".repeat(MAX_REFUSAL));
        assert_eq!(words(&bytes[3..]), "ä".repeat(MAX_REFUSAL / 2));
        assert_eq!(words(b"a\x1b[2Jb"), "a [2Jb");
    }
}
