//! A proof is right for one secret, one connection, one side and one claim.

use super::super::header::HEADER;
use super::*;
use proptest::prelude::*;

const PROTOCOL: Protocol = Protocol { tag: *b"test", version: 1, longest: 256 };
const SECRET: &[u8] = b"0123456789abcdef";

fn side(role: Role, secret: &[u8], rank: u32) -> Handshake {
    let claim = Claim { rank: rank.into(), ..Claim::default() };
    Handshake::new(role, PROTOCOL, Key::of(secret), claim).unwrap()
}

fn dialer(secret: &[u8]) -> Handshake {
    side(Role::Dialer, secret, 1)
}

fn listener(secret: &[u8]) -> Handshake {
    side(Role::Listener, secret, 2)
}

fn said(step: Step) -> Vec<u8> {
    let Step::Say(bytes) = step else { panic!("{step:?}") };
    bytes
}

/// All that both sides say, and how it ends for each.
type Outcomes = (Result<Claim, Unproven>, Option<Result<Claim, Unproven>>);

fn converse(mut dialer: Handshake, mut listener: Handshake) -> (Vec<Vec<u8>>, Outcomes) {
    let mut all = vec![dialer.opening(), listener.opening()];
    assert!(matches!(listener.hear(&all[0]), Ok(Step::Wait)));
    all.push(said(dialer.hear(&all[1]).unwrap()));
    match listener.hear(&all[2]) {
        Ok(Step::Proven(Some(reply), claim)) => {
            all.push(reply);
            let end = match dialer.hear(&all[3]) {
                Ok(Step::Proven(None, claim)) => Ok(claim),
                Ok(other) => panic!("{other:?}"),
                Err(why) => Err(why),
            };
            (all, (Ok(claim), Some(end)))
        }
        Ok(other) => panic!("{other:?}"),
        Err(why) => (all, (Err(why), None)),
    }
}

#[test]
fn two_that_hold_the_secret_prove_it_to_each_other() {
    let (_, (of_listener, of_dialer)) = converse(dialer(SECRET), listener(SECRET));
    let (of_listener, of_dialer) = (of_listener.unwrap(), of_dialer.unwrap().unwrap());
    assert_eq!((of_listener.rank.get(), of_dialer.rank.get()), (1, 2));
}

#[test]
fn a_wrong_secret_on_either_side_is_noticed_by_the_other() {
    let (_, (end, _)) = converse(dialer(b"another secret.."), listener(SECRET));
    assert_eq!(end.unwrap_err(), Unproven::Secret);
    // A listener that lets any dialer in cannot prove itself.
    let (mut dialer, listener) = (dialer(SECRET), listener(b"another secret.."));
    dialer.hear(&listener.opening()).unwrap();
    let theirs = dialer.mine;
    assert_eq!(dialer.hear(&listener.proof(&theirs)).unwrap_err(), Unproven::Secret);
}

#[test]
fn the_secret_is_in_nothing_that_is_said() {
    let (said, _) = converse(dialer(SECRET), listener(SECRET));
    assert_eq!(said.len(), 4);
    for message in said {
        assert!(!message.windows(4).any(|part| SECRET.windows(4).any(|known| known == part)));
    }
}

#[test]
fn a_replayed_proof_opens_nothing() {
    let (overheard, _) = converse(dialer(SECRET), listener(SECRET));
    let mut victim = listener(SECRET);
    victim.hear(&overheard[0]).unwrap();
    assert_eq!(victim.hear(&overheard[2]).unwrap_err(), Unproven::Secret);
    let mut victim = dialer(SECRET);
    victim.hear(&overheard[1]).unwrap();
    assert_eq!(victim.hear(&overheard[3]).unwrap_err(), Unproven::Secret);
}

#[test]
fn a_reflected_proof_opens_nothing() {
    // The opening of the victim, sent back to it, and then its proof.
    let mut victim = dialer(SECRET);
    let proof = said(victim.hear(&victim.opening()).unwrap());
    assert_eq!(victim.hear(&proof).unwrap_err(), Unproven::Secret);
    // The proof of a rank that dials the attacker, passed off as the listener's.
    let (mut one, mut other) = (dialer(SECRET), dialer(SECRET));
    let (of_one, of_other) = (one.opening(), other.opening());
    let proof = said(one.hear(&of_other).unwrap());
    other.hear(&of_one).unwrap();
    assert_eq!(other.hear(&proof).unwrap_err(), Unproven::Secret);
}

#[test]
fn a_proof_is_for_one_claim_one_protocol_and_one_version() {
    let (mut honest, mut victim) = (dialer(SECRET), listener(SECRET));
    let mut opening = honest.opening();
    let rank = HEADER + size_of::<Nonce>() + 8;
    opening[rank] ^= 1;
    victim.hear(&opening).unwrap();
    let proof = said(honest.hear(&victim.opening()).unwrap());
    assert_eq!(victim.hear(&proof).unwrap_err(), Unproven::Secret);
    for other in [Protocol { tag: *b"xest", ..PROTOCOL }, Protocol { version: 2, ..PROTOCOL }] {
        let key = Key::of(SECRET);
        let other = Handshake::new(Role::Dialer, other, key, Claim::default()).unwrap();
        assert!(matches!(victim.hear(&other.opening()), Err(Unproven::Wrong(_))));
        let mut victim = listener(SECRET);
        victim.theirs = Some(other.mine);
        let mut proof = other.proof(&victim.mine);
        proof[..HEADER].copy_from_slice(&PROTOCOL.message(PROOF, &[])[..HEADER]);
        assert_eq!(victim.hear(&proof).unwrap_err(), Unproven::Secret);
    }
}

#[test]
fn messages_out_of_turn_are_refused() {
    let honest = dialer(SECRET);
    let proof = honest.proof(&honest.mine);
    assert!(matches!(listener(SECRET).hear(&proof), Err(Unproven::Wrong(_))));
    let mut victim = listener(SECRET);
    victim.hear(&honest.opening()).unwrap();
    assert!(matches!(victim.hear(&honest.opening()), Err(Unproven::Wrong(_))), "twice");
    assert_eq!(victim.hear(&PROTOCOL.bye()).unwrap_err(), Unproven::Bye);
    let refusal = PROTOCOL.refusal("no\n");
    assert_eq!(victim.hear(&refusal).unwrap_err(), Unproven::Refused("no ".into()));
}

#[test]
fn debug_shows_neither_key_nor_nonce() {
    assert_eq!(format!("{:?}", Key::of(SECRET)), "Key(..)");
    assert!(!format!("{:?}", dialer(SECRET)).contains("nonce"));
}

/// RFC 4231, test case 2.
#[test]
fn the_keyed_hash_is_that_of_the_rfc() {
    let hash = Key::of(b"Jefe").0.chain_update(b"what do ya want for nothing?").finalize();
    let hex: String = hash.into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

proptest! {
    #[test]
    fn one_changed_bit_is_noticed(message in 0..4_usize, at in any::<usize>(), bit in 0..8_u32) {
        let (mut dialer, mut listener) = (dialer(SECRET), listener(SECRET));
        let change = |number: usize, bytes: &mut Vec<u8>| {
            let at = at % bytes.len();
            bytes[at] ^= u8::from(number == message) << bit;
        };
        let mut go = || {
            let mut opening = dialer.opening();
            change(0, &mut opening);
            listener.hear(&opening).ok()?;
            let mut opening = listener.opening();
            change(1, &mut opening);
            let Ok(Step::Say(mut proof)) = dialer.hear(&opening) else { return None };
            change(2, &mut proof);
            let Ok(Step::Proven(Some(mut proof), _)) = listener.hear(&proof) else { return None };
            change(3, &mut proof);
            dialer.hear(&proof).ok()
        };
        prop_assert!(go().is_none());
    }

    #[test]
    fn garbage_proves_nothing(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 0..4),
    ) {
        for mut side in [dialer(SECRET), listener(SECRET)] {
            for message in &messages {
                for kind in [OPENING, PROOF] {
                    let framed = PROTOCOL.message(kind, &[message]);
                    prop_assert!(!matches!(side.hear(&framed), Ok(Step::Proven(..))));
                }
                prop_assert!(side.hear(message).is_err());
            }
        }
    }
}
