//! Receivers that answer nonsense, or give back what they never had.

use super::*;

/// A false receiver for the victim's own links.
pub(super) struct FalseReceiver {
    pub(super) listener: Listener,
    pub(super) link: Arc<dyn Link>,
}

impl FalseReceiver {
    pub(super) fn lure(fixture: &Fixture, number: usize) -> Self {
        let name = format!("carrack-false-{}-{number}", std::process::id()).into_bytes();
        let listener = Listener::bind(&name).unwrap();
        let address = ShmAddress { namespace: SocketNamespace::here().unwrap(), name }.encode();
        let link = fixture.victim.connect(&address, ATTACKER).unwrap();
        Self { listener, link }
    }

    /// Takes the victim's hello: its segment, as the receiver sees it.
    pub(super) fn accept(&self, fixture: &mut Fixture) -> (Channel, Arc<Segment>) {
        let mut channel = self.listener.accept().unwrap().unwrap();
        fixture.greet(Role::Listener, ATTACKER, SECRET, &mut channel).unwrap();
        let mut bytes = [0; MAX_MESSAGE];
        let (len, fds) = loop {
            assert!(fixture.poll().is_empty());
            match channel.receive(&mut bytes).unwrap() {
                Received::Message(len, fds) => break (len, fds),
                Received::Nothing => {}
                Received::Closed => panic!("no hello"),
            }
        };
        let HandshakeMessage::Hello { geometry, .. } =
            HandshakeMessage::decode(&bytes[..len]).unwrap()
        else {
            panic!()
        };
        (channel, Segment::open(&fds[0], geometry).unwrap())
    }
}

pub(super) fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
}

pub(super) fn am(link: &Arc<dyn Link>, bytes: &[u8]) -> Result<Submit, SubmitError> {
    link.submit(Op::AmCopied { header: Header([0; 2]), bytes: MemRef::host(bytes) })
}

#[test]
fn a_receiver_that_answers_nonsense_is_reported_and_others_go_on() {
    let _watchdog = Watchdog::over("false receivers");
    let mut rng = rng();
    let mut fixture = Fixture::new();
    let (_page, page) = BellPage::create().unwrap();
    let (wake, small) =
        (eventfd(), memfd(100, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    let unsealed = memfd(4096, SealFlags::empty());
    let welcome = HandshakeMessage::Welcome { bell: 1, fenced: false }.encode();
    let mut answers: Vec<(Vec<u8>, Vec<BorrowedFd<'_>>)> = vec![
        (welcome.clone(), vec![]),
        (welcome.clone(), vec![page.as_fd()]),
        (welcome.clone(), vec![page.as_fd(); 3]),
        (welcome.clone(), vec![wake.as_fd(), page.as_fd()]),
        (welcome.clone(), vec![small.as_fd(), wake.as_fd()]),
        (welcome.clone(), vec![unsealed.as_fd(), wake.as_fd()]),
        (hello().encode(), vec![page.as_fd(), wake.as_fd()]),
        (vec![0; MAX_MESSAGE + 1], vec![]),
    ];
    answers.extend((0..50).map(|_| {
        let len = rng.random_range(1..=MAX_MESSAGE);
        (random(&mut rng, len), vec![])
    }));
    for (number, (bytes, fds)) in answers.iter().enumerate() {
        let receiver = FalseReceiver::lure(&fixture, number);
        let (channel, _segment) = receiver.accept(&mut fixture);
        channel.send(bytes, fds).unwrap();
        fixture.reports_the_attacker(&format!("answer {number}"));
        let sent = am(&receiver.link, b"x");
        assert!(matches!(sent, Err(SubmitError::Down { peer: ATTACKER, .. })), "{sent:?}");
    }
    // One that refuses says why; one that hangs up is gone.
    for (number, refuses) in [(1000, true), (1001, false)] {
        let receiver = FalseReceiver::lure(&fixture, number);
        let (channel, _segment) = receiver.accept(&mut fixture);
        if refuses {
            channel.send(&HandshakeMessage::Refusal("not today".into()).encode(), &[]).unwrap();
        }
        drop(channel);
        fixture.until("a refusal", |event| match event {
            Event::PeerDown { peer: ATTACKER, cause: DownCause::Refused(why) } => {
                refuses && why == "not today"
            }
            Event::PeerDown { peer: ATTACKER, cause: DownCause::Gone(_) } => !refuses,
            other => panic!("{other:?}"),
        });
    }
    fixture.others_go_on();
}

#[test]
fn a_receiver_that_gives_back_what_it_never_had_is_reported_and_others_go_on() {
    let _watchdog = Watchdog::over("credits");
    let mut fixture = Fixture::new();
    let (_page, page) = BellPage::create().unwrap();
    let wake = eventfd();
    for (number, freed) in [1_u64 << 40, u64::MAX, 17].into_iter().enumerate() {
        // A bell that no page has: ringing it must do no harm.
        let receiver = FalseReceiver::lure(&fixture, 2000 + number);
        let (channel, segment) = receiver.accept(&mut fixture);
        let welcome = HandshakeMessage::Welcome { bell: u32::MAX, fenced: true }.encode();
        channel.send(&welcome, &[page.as_fd(), wake.as_fd()]).unwrap();
        fixture.until("a welcome", |event| matches!(event, Event::Connected { peer: ATTACKER }));
        let slots = SegmentSlots::of(segment);
        slots.freed().store(freed, Ordering::Release);
        let mut sent = 0;
        let end = loop {
            match am(&receiver.link, b"12345678") {
                Ok(Submit::Done) => sent += 1,
                other => break other,
            }
            assert!(sent <= 16, "more than the ring holds");
        };
        let told = matches!(
            &end,
            Err(SubmitError::Down { peer: ATTACKER, cause: DownCause::Protocol(_) })
        );
        assert!(told, "{freed}: {end:?}");
        fixture.others_go_on();
    }
    // Chunks that never come back are no reason to give up: the link is busy, for ever.
    let receiver = FalseReceiver::lure(&fixture, 3000);
    let (channel, segment) = receiver.accept(&mut fixture);
    channel
        .send(
            &HandshakeMessage::Welcome { bell: 7, fenced: false }.encode(),
            &[page.as_fd(), wake.as_fd()],
        )
        .unwrap();
    fixture.until("a welcome", |event| matches!(event, Event::Connected { peer: ATTACKER }));
    let mut sent = 0;
    while am(&receiver.link, &[1; 1000]) == Ok(Submit::Done) {
        sent += 1;
    }
    assert_eq!(sent, 4);
    drop(segment);
    fixture.others_go_on();
}
