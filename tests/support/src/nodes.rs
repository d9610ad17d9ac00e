//! Two nodes of this machine: network namespaces with a switch between them, which delays, loses,
//! doubles and reorders frames. Not every kernel has netem.

#![expect(unsafe_code, reason = "rustix cannot make a TAP")]

use crate::rng;
use children::ADDRESSES;
use parking_lot::Mutex;
use rand::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Treatment of frames.
#[derive(Clone, Copy, Default, Debug)]
pub struct Weather {
    pub delay: Duration,
    /// Further delay at most, by which frames overtake each other.
    pub jitter: Duration,
    /// Shares of the frames.
    pub lost: f64,
    pub doubled: f64,
    /// Nodes whose frames vanish.
    pub cut: [bool; 2],
}

const SOON: Duration = Duration::from_secs(20);

pub struct Nodes {
    nodes: children::Nodes,
    weather: Arc<Mutex<Weather>>,
    has_ended: Arc<AtomicBool>,
    switch: Option<JoinHandle<()>>,
}

impl Nodes {
    /// Makes them, unless this machine permits none: then it prints why the test is skipped.
    pub fn make(test: &str) -> Option<Self> {
        Self::try_make().inspect_err(|why| println!("skipped: {test}: {why}")).ok()
    }

    fn try_make() -> Result<Self, Box<dyn Error>> {
        let nodes = children::Nodes::make()?;
        let mut taps = Vec::new();
        for node in 0..2 {
            let (tap, card) = tap().map_err(|error| format!("/dev/net/tun: {error}"))?;
            let words = format!("link set {card} netns {} name eth0", nodes.holder(node));
            children::read(Command::new("ip").args(words.split(' ')), SOON)?;
            nodes.set_up(node)?;
            taps.push(tap);
        }
        let (weather, has_ended) = <(Arc<Mutex<Weather>>, Arc<AtomicBool>)>::default();
        let (now, until) = (weather.clone(), has_ended.clone());
        let switch = Some(std::thread::spawn(move || switch(&taps, &now, &until)));
        Ok(Self { nodes, weather, has_ended, switch })
    }

    /// Returns the words before a program that runs on a node.
    pub fn wrapper(&self, node: u32) -> Vec<String> {
        self.nodes.wrapper(node as usize)
    }

    /// Writes a program that takes the place of ssh, for launchers.
    pub fn agent(&self, folder: &Path) -> PathBuf {
        self.nodes.agent(folder).unwrap()
    }

    /// Listens on a port of a node.
    pub fn listener(&self, node: usize, port: u16) -> TcpListener {
        let space = File::open(format!("/proc/{}/ns/net", self.nodes.holder(node))).unwrap();
        let listen = move || {
            // This thread only; its sockets stay where they were made.
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(space.as_fd(), kind).unwrap();
            TcpListener::bind((ADDRESSES[node], port)).unwrap()
        };
        std::thread::spawn(listen).join().unwrap()
    }

    pub fn have(&self, weather: Weather) {
        *self.weather.lock() = weather;
    }

    /// Cuts what leaves these nodes.
    pub fn cut(&self, cut: [bool; 2]) {
        self.weather.lock().cut = cut;
    }

    /// Sets the network card of a node `up` or `down`, which its kernel sees.
    pub fn card(&self, node: usize, state: &str) {
        self.nodes.ip(node, &format!("link set eth0 {state}")).unwrap();
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        let _ = self.switch.take().map(JoinHandle::join);
    }
}

/// Makes a network card whose frames this process carries, and returns the card's name too.
fn tap() -> io::Result<(File, String)> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun")?;
    // SAFETY: all zero is a value of the structure, which has integers and unions of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"carrack%d") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request reads and writes the structure.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let name = request.ifr_name.iter().take_while(|byte| **byte != 0);
    Ok((file, name.map(|byte| char::from(byte.to_ne_bytes()[0])).collect()))
}

/// Carries frames until `has_ended`.
fn switch(taps: &[File], weather: &Mutex<Weather>, has_ended: &AtomicBool) {
    let mut rng = rng();
    let mut later = BinaryHeap::new();
    let mut number = 0_u64;
    let mut frame = vec![0; 70_000];
    while !has_ended.load(Ordering::Relaxed) {
        let longest = Duration::from_millis(20);
        let due =
            later.peek().map(|Reverse((due, ..)): &Reverse<(Instant, u64, usize, Vec<u8>)>| {
                due.saturating_duration_since(Instant::now())
            });
        let wait = Timespec::try_from(due.unwrap_or(longest).min(longest)).unwrap();
        let mut polled: Vec<_> = taps.iter().map(|tap| PollFd::new(tap, PollFlags::IN)).collect();
        let _ = poll(&mut polled, Some(&wait));
        let now = *weather.lock();
        for (from, mut tap) in taps.iter().enumerate() {
            for _ in 0..64 {
                // An error also where the card is down.
                let Ok(len) = tap.read(&mut frame) else { break };
                let copies = 1 + usize::from(rng.random_bool(now.doubled));
                for _ in 0..copies {
                    if now.cut[from] || rng.random_bool(now.lost) {
                        continue;
                    }
                    let due = Instant::now() + now.delay + now.jitter.mul_f64(rng.random());
                    number += 1;
                    later.push(Reverse((due, number, 1 - from, frame[..len].to_vec())));
                }
            }
        }
        while later.peek().is_some_and(|Reverse((due, ..))| *due <= Instant::now()) {
            let Some(Reverse((_, _, to, frame))) = later.pop() else { break };
            // One for which there is no room is lost, as in any switch.
            let _ = (&taps[to]).write(&frame);
        }
    }
}
