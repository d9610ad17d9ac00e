//! The command line of QEMU for one guest.
//!
//! Pure emulation (TCG): a virtual machine in a virtual machine is often not to be had, and where
//! it is, kernels fail in it. The old `pc` machine comes up two seconds earlier than `q35`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::plan::{Node, Plan, Wiring};

/// How much longer than its run a guest may live, should xtask not end it.
const SLACK: Duration = Duration::from_secs(20);

/// What a guest is booted from and with.
pub(super) struct Parts {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) modules: PathBuf,
    /// The guest's own folder: the scripts, and what it says.
    pub(super) folder: PathBuf,
}

/// Files in the guest's folder: what the command says, /init says to xtask, and the command says to
/// xtask. Ports of the guest have these names.
pub(super) const OUTPUT: &str = "stdout";
pub(super) const ERRORS: &str = "stderr";
pub(super) const STATUS: &str = "status";
pub(super) const ORDERS: &str = "host";

/// And what the guest's kernel says, and QEMU.
pub(super) const CONSOLE: &str = "console";
pub(super) const LOG: &str = "log";

/// In the folder above: the socket that joins the network cards of two guests.
pub(super) const NETWORK: &str = "../network";

/// Boots a guest; it is killed when the thread that has started it ends.
pub(super) fn command(node: Node, plan: &Plan, parts: &Parts, left: Duration) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    // Names without a folder stand for files in it, so that no name is longer than a socket's may
    // be.
    command.args(arguments(node, plan, parts, left)).current_dir(&parts.folder);
    command
}

fn arguments(node: Node, plan: &Plan, parts: &Parts, left: Duration) -> Vec<OsString> {
    let mut line = Line::default();
    line.words(
        "-machine pc -accel tcg,thread=multi -cpu max -nodefaults -no-user-config -display none \
        -no-reboot",
    );
    line.words(&format!("-smp {} -m {}", plan.processors, plan.memory));
    line.path("-kernel", &parts.kernel).path("-initrd", &parts.initramfs);
    // Not by the processor's cycle counter: the emulated one is this machine's, which goes on while
    // a virtual machine is paused, and to calibrate it fails where the processors are busy. A guest
    // whose clock is ten times too fast takes everybody for silent.
    let kernel = "console=ttyS0 quiet maxcpus=1 panic=-1 oops=panic clocksource=hpet no_timer_check mitigations=off nowatchdog \
                  rcupdate.rcu_cpu_stall_suppress=1 audit=0 net.ifnames=0";
    line.option("-append", format!("{kernel} guest.limit={}", (left + SLACK).as_secs()));
    line.option("-serial", format!("file:{CONSOLE}"));
    line.words("-object rng-random,id=rng,filename=/dev/urandom -device virtio-rng-pci,rng=rng");
    line.words("-device virtio-serial-pci,max_ports=8");
    for name in [OUTPUT, ERRORS, STATUS, ORDERS] {
        line.option("-chardev", format!("file,id={name},path={name}"));
        line.option("-device", format!("virtserialport,chardev={name},name={name}"));
    }
    line.share("root", Path::new("/"), true);
    line.share("job", &parts.folder, true);
    line.share("modules", &parts.modules, true);
    for (tag, folder) in shares(plan) {
        line.share(&tag, folder, false);
    }
    if plan.wiring == Wiring::TwoGuests {
        let server = if node == Node(0) { "on" } else { "off" };
        line.option(
            "-netdev",
            format!("stream,id=card,server={server},addr.type=unix,addr.path={NETWORK}"),
        );
        let address = format!("52:54:00:77:00:{:02x}", node.0 + 1);
        line.option(
            "-device",
            format!("virtio-net-pci,netdev=card,mac={address},host_mtu=9000,romfile="),
        );
    }
    line.0
}

/// The folders that the guest may write to, with what /init knows them by.
pub(super) fn shares(plan: &Plan) -> impl Iterator<Item = (String, &Path)> {
    plan.writable
        .iter()
        .enumerate()
        .map(|(number, folder)| (format!("writable{number}"), folder.as_path()))
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn words(&mut self, words: &str) {
        self.0.extend(words.split_whitespace().map(OsString::from));
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.0.extend([name.into(), value.into()]);
        self
    }

    fn path(&mut self, name: &str, path: &Path) -> &mut Self {
        self.option(name, path)
    }

    /// A folder, by 9p.
    fn share(&mut self, tag: &str, folder: &Path, read_only: bool) {
        // In a list of options, a comma is written twice.
        let folder = folder.to_string_lossy().replace(',', ",,");
        let only = if read_only { "on" } else { "off" };
        self.option(
            "-fsdev",
            format!(
                "local,id={tag},path={folder},security_model=none,readonly={only},multidevs=remap"
            ),
        );
        self.option("-device", format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(node: Node, plan: &Plan) -> String {
        let parts = Parts {
            kernel: "/k/vmlinux".into(),
            initramfs: "/r/initramfs".into(),
            modules: "/k/a,b".into(),
            folder: "/r/0".into(),
        };
        let arguments = arguments(node, plan, &parts, Duration::from_secs(100));
        let words: Vec<_> = arguments.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn one_guest_has_no_card_and_reads_only_what_it_may() {
        let mut plan = Plan::new(vec!["true".into()], "/".into());
        plan.writable.push("/results".into());
        (plan.processors, plan.memory) = (2, 512);
        let line = line(Node(0), &plan);
        assert!(line.contains("-smp 2 -m 512") && line.contains("guest.limit=120"), "{line}");
        assert!(line.contains("path=/,security_model=none,readonly=on"), "{line}");
        assert!(line.contains("id=modules,path=/k/a,,b,"), "{line}");
        assert!(
            line.contains("id=writable0,path=/results,security_model=none,readonly=off"),
            "{line}"
        );
        assert!(!line.contains("netdev"), "{line}");
    }

    #[test]
    fn of_two_guests_one_listens_and_the_other_connects_with_another_address() {
        let mut plan = Plan::new(vec!["true".into()], "/".into());
        plan.wiring = Wiring::TwoGuests;
        let lines = [line(Node(0), &plan), line(Node(1), &plan)];
        assert!(
            lines[0].contains("server=on") && lines[0].contains("mac=52:54:00:77:00:01"),
            "{}",
            lines[0]
        );
        assert!(
            lines[1].contains("server=off") && lines[1].contains("mac=52:54:00:77:00:02"),
            "{}",
            lines[1]
        );
    }

    #[test]
    fn a_guest_dies_with_whoever_started_it() {
        let plan = Plan::new(vec!["true".into()], "/".into());
        let parts = Parts {
            kernel: "k".into(),
            initramfs: "i".into(),
            modules: "m".into(),
            folder: "/r/0".into(),
        };
        let command = command(Node(0), &plan, &parts, Duration::ZERO);
        assert_eq!(command.get_program(), "setpriv");
        assert_eq!(
            command.get_args().take(3).collect::<Vec<_>>(),
            ["--pdeathsig", "KILL", "qemu-system-x86_64"]
        );
        assert_eq!(command.get_current_dir(), Some(Path::new("/r/0")));
    }
}
