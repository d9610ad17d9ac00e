//! The command line of QEMU for one guest.
//!
//! QEMU emulates the processor (TCG). Nested virtualization is often not available, and kernels
//! fail in it where it is. The old `pc` machine boots two seconds faster than `q35`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::plan::{Node, Plan, Wiring};

/// Time after the limit of its run at which a guest ends by itself, if xtask does not end it.
const SLACK: Duration = Duration::from_secs(20);

/// Files that a guest is booted with.
pub(super) struct Parts {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) modules: PathBuf,
    /// The guest's own folder: its scripts and its output.
    pub(super) folder: PathBuf,
}

/// Files in the guest's folder for the ports of the same names. They take the command's outputs,
/// and messages of /init and of the command to xtask.
pub(super) const OUTPUT: &str = "stdout";
pub(super) const ERRORS: &str = "stderr";
pub(super) const STATUS: &str = "status";
pub(super) const ORDERS: &str = "host";

/// Files in the guest's folder for the output of the guest's kernel, and of QEMU.
pub(super) const CONSOLE: &str = "console";
pub(super) const LOG: &str = "log";

/// Socket that joins the network cards of two guests, in the folder above the guests' folders.
pub(super) const NETWORK: &str = "../network";

/// Returns the command that boots a guest, which is killed when the thread that started it ends.
pub(super) fn command(node: Node, plan: &Plan, parts: &Parts, left: Duration) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    // Names are relative to this folder, since the path of a socket must be short.
    command.args(arguments(node, plan, parts, left)).current_dir(&parts.folder);
    command
}

fn arguments(node: Node, plan: &Plan, parts: &Parts, left: Duration) -> Vec<OsString> {
    let mut line = CommandLine::default();
    line.words(
        "-machine pc -accel tcg,thread=multi -cpu max -nodefaults -no-user-config -display none \
        -no-reboot",
    );
    line.words(&format!("-smp {} -m {}", plan.processors, plan.memory));
    line.option("-kernel", &parts.kernel);
    line.option("-initrd", &parts.initramfs);
    // The clock source is not the processor's cycle counter. The emulated counter is this
    // machine's, which goes on while a virtual machine is paused, and its calibration fails on
    // busy processors. To a guest whose clock is ten times too fast, every peer is silent.
    //
    // A kernel whose processor is stuck for two minutes, twice the threshold, says where and ends.
    let kernel = "console=ttyS0 quiet maxcpus=1 panic=-1 oops=panic clocksource=hpet \
        no_timer_check mitigations=off nmi_watchdog=0 watchdog_thresh=60 softlockup_panic=1 \
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
        let stream = format!("stream,id=card,server={server},addr.type=unix,addr.path={NETWORK}");
        line.option("-netdev", stream);
        let address = format!("52:54:00:77:00:{:02x}", node.0 + 1);
        let card = format!("virtio-net-pci,netdev=card,mac={address},host_mtu=9000,romfile=");
        line.option("-device", card);
    }
    line.0
}

/// Returns the folders that the guest may write to, with their tags for /init.
pub(super) fn shares(plan: &Plan) -> impl Iterator<Item = (String, &Path)> {
    plan.writable
        .iter()
        .enumerate()
        .map(|(number, folder)| (format!("writable{number}"), folder.as_path()))
}

#[derive(Default)]
struct CommandLine(Vec<OsString>);

impl CommandLine {
    fn words(&mut self, words: &str) {
        self.0.extend(words.split_whitespace().map(OsString::from));
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.extend([name.into(), value.into()]);
    }

    /// Shares a folder by 9p.
    fn share(&mut self, tag: &str, folder: &Path, read_only: bool) {
        // QEMU reads a double comma in a list of options as one comma.
        let folder = folder.to_string_lossy().replace(',', ",,");
        let access = if read_only { "readonly=on" } else { "readonly=off" };
        let local = format!("local,id={tag},path={folder},security_model=none,{access}");
        self.option("-fsdev", local + ",multidevs=remap");
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
    fn a_guest_dies_with_the_process_that_started_it() {
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
