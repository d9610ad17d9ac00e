//! Lines, mappings, and whole exchanges with servers that are played here.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::thread;

use proptest::prelude::*;

use super::*;

#[test]
fn lines_of_real_servers_are_read_whatever_the_order_of_their_fields() {
    let read = |line: &str| Reply::parse(line.as_bytes()).unwrap();
    let hydra = read("cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2");
    assert!(hydra.is_success() && hydra.get("pmi_version") == Some("1"));
    let mapping = read("cmd=get_result rc=0 value=(vector,(0,2,2))");
    assert_eq!(mapping.get("value"), Some("(vector,(0,2,2))"));
    let slurm = read("rc=0 cmd=barrier_out\r\n");
    assert!(slurm.is_success() && slurm.get("cmd") == Some("barrier_out"));
    let hydra_4 = read("cmd=get_result rc=-1 msg=key_a_not_found value=unknown");
    assert!(!hydra_4.is_success());
    let value = read("cmd=get_result rc=0 found value=a=b value=c");
    assert_eq!(value.get("value"), Some("a=b"), "of the first, what follows the first sign");
}

proptest! {
    #[test]
    fn any_line_is_read_or_refused(line: Vec<u8>) {
        if let Ok(reply) = Reply::parse(&line) {
            prop_assert!(reply.get("cmd").is_some());
        }
    }

    #[test]
    fn fields_are_found_in_any_order(
        mut fields in prop::collection::btree_map("[a-z_]{1,8}", "[!-~]{0,20}", 0..8)
            .prop_map(|fields| fields.into_iter().collect::<Vec<_>>())
            .prop_shuffle(),
        at: prop::sample::Index,
    ) {
        fields.retain(|(name, _)| name != "cmd");
        let words = fields.iter().map(|(name, value)| format!("{name}={value}"));
        let mut words: Vec<_> = words.collect();
        words.insert(at.index(words.len() + 1), "cmd=get_result".into());
        let reply = Reply::parse(words.join(" ").as_bytes()).unwrap();
        for (name, value) in &fields {
            prop_assert_eq!(reply.get(name), Some(value.as_str()));
        }
    }

    #[test]
    fn any_mapping_gives_a_place_or_none(
        mapping in "\\(vector(,\\([0-9,]{0,12}\\)){0,4}\\)",
        rank in 0..MAX,
    ) {
        prop_assert!(place_on_node(&mapping, rank).is_none_or(|place| place <= rank));
    }
}

const MAX: u32 = crate::bootstrap::MAX_JOB;

#[test]
fn places_are_counted_by_the_mapping_and_its_blocks_are_repeated() {
    let places =
        |mapping: &str| (0..6).map(|rank| place_on_node(mapping, rank)).collect::<Option<Vec<_>>>();
    assert_eq!(places("(vector,(0,2,3))").unwrap(), [0, 1, 2, 0, 1, 2]);
    assert_eq!(places("(vector,(0,1,1))").unwrap(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(places("(vector,(0,2,1))").unwrap(), [0, 0, 1, 1, 2, 2]);
    assert_eq!(places("(vector,(0,1,2),(1,1,1))").unwrap(), [0, 1, 0, 2, 3, 1]);
    for broken in ["", "(vector)", "(vector,(0,2,0))", "(vector,(0,0,2))", "(vector,(0,2))"] {
        assert_eq!(places(broken), None, "{broken}");
    }
}

/// Makes a session with a server that gives these answers, one to each line that it gets.
/// Afterwards the server hangs up, or stays silent if the last answer is empty.
fn session(answers: Vec<Vec<u8>>) -> Pmi {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        for answer in answers {
            let _ = lines.next();
            if answer.is_empty() {
                // Until the rank has gone.
                return drop(lines.next());
            }
            let _ = theirs.write_all(&answer);
        }
    });
    Pmi {
        socket: ours.into(),
        unread: Vec::new(),
        seat: Seat { rank: 1, size: 2, place_on_node: 1 },
        table: "k".into(),
        deadline: Instant::now() + Duration::from_millis(300),
    }
}

#[test]
fn a_bad_server_is_an_error_that_says_so() {
    let long = [b'x'; LONGEST + 5000].to_vec();
    for (answer, words) in [
        (&b"\x00\xff\xfe\n"[..], "not UTF-8"),
        (b"hello\n", "no field `cmd`"),
        (b"cmd=put_result rc=0\n", "answered with `put_result`, and not `barrier_out`"),
        (b"cmd=barrier_out rc=1\n", "refused `cmd=barrier_in` (rc=1)"),
        (b"cmd=barr", "hung up"),
        (b"", "not answered in time"),
        (&long, "over 8192 bytes"),
    ] {
        let error = session(vec![answer.to_vec()]).share(None).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn what_rank_0_has_put_is_checked() {
    let get = |value: &str| format!("cmd=get_result value={value} rc=0\n").into_bytes();
    let shared = |values: &[&str]| {
        let values = values.iter().map(|value| get(value));
        session([b"cmd=barrier_out\n".to_vec()].into_iter().chain(values).collect()).share(None)
    };
    assert_eq!(shared(&["2", "00fF", "10"]).unwrap(), [0, 255, 16]);
    for values in [&["many"][..], &["65"], &["-1"], &["1", "0"], &["1", "0g"], &["1", "ä"]] {
        let error = shared(values).unwrap_err().to_string();
        assert!(error.contains("another form"), "{values:?}: {error}");
    }
    assert!(shared(&["2", "00"]).unwrap_err().to_string().contains("hung up"));
}

#[test]
fn a_card_goes_out_in_pieces_that_every_server_takes() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let mut to_rank = theirs.try_clone().unwrap();
        let mut put = BTreeMap::new();
        for line in BufReader::new(theirs).lines() {
            let line = line.unwrap();
            assert!(line.len() < 1023, "{line}");
            let request = Reply::parse(line.as_bytes()).unwrap();
            let field = |name| request.get(name).unwrap().to_owned();
            let answer = match request.get("cmd").unwrap() {
                "put" => {
                    put.insert(field("key"), field("value"));
                    "cmd=put_result rc=0".to_owned()
                }
                "barrier_in" => "cmd=barrier_out".into(),
                "get" => format!("cmd=get_result rc=0 value={}", put[&field("key")]),
                other => panic!("{other}"),
            };
            writeln!(to_rank, "{answer}").unwrap();
        }
    });
    let mut zero = Pmi { socket: ours.into(), ..session(vec![]) };
    let card: Vec<u8> = (0..1500).map(|at| (at * 7) as u8).collect();
    assert_eq!(zero.share(Some(&card)).unwrap(), card);
    drop(zero);
    server.join().unwrap();
}
