//! Plan of a run in a guest, and the guest's scripts for it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{TaskError, not_built};
use crate::workspace::{BUILD, Workspace};

/// Number of a guest of a run, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Node(pub(crate) u8);

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Places of the two RDMA devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wiring {
    /// Both in one guest, and in one network namespace of it.
    OneGuest,
    /// Both in one guest, each in a namespace of its own; the command runs outside of both.
    Namespaces,
    /// One in each of two guests.
    TwoGuests,
}

impl Wiring {
    pub(super) fn nodes(self) -> impl Iterator<Item = Node> + Clone {
        (0..if self == Self::TwoGuests { 2 } else { 1 }).map(Node)
    }

    const fn set_up(self) -> &'static str {
        match self {
            Self::OneGuest => include_str!("../../guest/one"),
            Self::Namespaces => include_str!("../../guest/namespaces"),
            Self::TwoGuests => include_str!("../../guest/two"),
        }
    }
}

/// A command and the guests that it runs in.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The program and its arguments. In two guests, both run it at the same time.
    pub(crate) command: Vec<OsString>,
    /// Working directory of the command.
    pub(crate) folder: PathBuf,
    pub(crate) environment: Vec<(OsString, OsString)>,
    pub(crate) wiring: Wiring,
    /// Virtual processors of each guest.
    pub(crate) processors: u8,
    /// Memory of each guest in MiB.
    pub(crate) memory: u32,
    /// Limit of the whole run, the boot included.
    pub(crate) limit: Duration,
    /// Folders of this machine that the guests may write to.
    pub(crate) writable: Vec<PathBuf>,
    /// Files of modules that are loaded in addition, or instead of the kernel's own.
    pub(crate) modules: Vec<PathBuf>,
}

impl Plan {
    /// Returns a plan for one guest with two devices, and defaults that suit most commands.
    pub(crate) fn new(command: Vec<OsString>, folder: PathBuf) -> Self {
        Self {
            command,
            folder,
            environment: Vec::new(),
            wiring: Wiring::OneGuest,
            processors: 1,
            memory: 1024,
            limit: Duration::from_secs(300),
            writable: Vec::new(),
            modules: Vec::new(),
        }
    }

    /// Builds the test target `name` of any package, and returns a plan that runs it as Cargo does.
    pub(crate) fn of_test(
        workspace: &Workspace,
        name: &str,
        arguments: &[OsString],
    ) -> Result<Self, TaskError> {
        let mut cargo = workspace.cargo("test --no-run --workspace --test");
        let mut built = Workspace::built(cargo.arg(name), BUILD)?.into_iter();
        let test = built.find(|built| built.target.name == name && built.target.kind == ["test"]);
        let test = test.ok_or_else(|| not_built(format!("the test program {name}")))?;
        let folder = test.manifest_path.parent().unwrap_or(&workspace.root).to_owned();
        let command = [&[test.executable.into()], arguments].concat();
        let environment = vec![("CARGO_MANIFEST_DIR".into(), folder.clone().into())];
        Ok(Self { environment, ..Self::new(command, folder) })
    }

    /// Returns the script that makes the devices. Its failure is the guest's, not the command's.
    pub(super) fn setup_script(&self, node: Node, more_modules: &[PathBuf]) -> Vec<u8> {
        let mut script = Script::default();
        self.addresses(node, &mut script);
        for module in more_modules {
            let module = quoted(module.as_os_str());
            script.line(&[
                b"for needed in $(modinfo -F depends ",
                &module,
                b" | tr , ' '); do modprobe \"$needed\"; done",
            ]);
            script.line(&[b"insmod ", &module]);
        }
        script.line(&[self.wiring.set_up().as_bytes()]);
        if self.processors > 1 {
            // The other processors start last. The lines above make the kernel patch its code. An
            // emulated processor that runs this code at that time may crash (QEMU up to 10.0 at
            // least).
            script.line(&[
                b"for cpu in /sys/devices/system/cpu/cpu[1-9]*/online; do echo 1 >\"$cpu\"; done",
            ]);
        }
        script.0
    }

    /// Returns the script that executes the command.
    pub(super) fn command_script(&self, node: Node) -> Vec<u8> {
        let mut script = Script::default();
        script.line(&[b"ulimit -l unlimited; ulimit -c 0"]);
        script.line(&[b"cd ", &quoted(self.folder.as_os_str()), b" || exit 125"]);
        for (name, value) in &self.environment {
            script.export(name, value);
        }
        // Set after the user's variables, which may have a PATH.
        script.line(&[b"export PATH=\"$PATH:/usr/sbin:/sbin:/usr/bin:/bin\""]);
        self.addresses(node, &mut script);
        let words: Vec<u8> =
            self.command.iter().flat_map(|word| [b" ".to_vec(), quoted(word)].concat()).collect();
        script.line(&[b"exec", &words]);
        script.0
    }

    /// Adds the variables that tell a command its own address and that of the other end.
    fn addresses(&self, node: Node, script: &mut Script) {
        let (own, other) =
            if node == Node(0) { ("10.77.0.1", "10.77.0.2") } else { ("10.77.0.2", "10.77.0.1") };
        let two = self.wiring == Wiring::TwoGuests;
        for (name, value) in [
            ("NODES", if two { "2" } else { "1" }),
            ("NODE", &node.to_string()),
            ("ADDRESS", own),
            ("PEER", other),
            ("DEVICE", "rxe0"),
            ("PEER_DEVICE", if two { "rxe0" } else { "rxe1" }),
            ("HOST", "/dev/guest-host"),
        ] {
            script.export(OsStr::new(&format!("RDMA_GUEST_{name}")), OsStr::new(value));
        }
    }
}

/// Shell script.
#[derive(Default)]
struct Script(Vec<u8>);

impl Script {
    fn line(&mut self, parts: &[&[u8]]) {
        self.0.extend(parts.concat());
        self.0.push(b'\n');
    }

    fn export(&mut self, name: &OsStr, value: &OsStr) {
        self.line(&[b"export ", name.as_bytes(), b"=", &quoted(value)]);
    }
}

/// Quotes a word, so that the shell takes it literally. A word of a command has no zero byte.
fn quoted(word: &OsStr) -> Vec<u8> {
    shlex::bytes::try_quote(word.as_bytes()).unwrap_or_default().into_owned()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn plan(words: &[&str]) -> Plan {
        Plan::new(words.iter().map(OsString::from).collect(), "/".into())
    }

    fn shell(script: Vec<u8>) -> String {
        let output = Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn the_shell_gives_the_command_its_words_and_its_environment_as_they_were() {
        let odd = "two  words, $HOME `pwd` it's \"so\" \\ \n*";
        let mut plan =
            plan(&["sh", "-c", r#"printf '%s|%s|%s' "$1" "$ODD" "$RDMA_GUEST_PEER""#, "sh", odd]);
        plan.environment.push(("ODD".into(), odd.into()));
        let out = shell(plan.command_script(Node(0)));
        assert_eq!(out, format!("{odd}|{odd}|10.77.0.2"));
    }

    #[test]
    fn each_of_two_nodes_knows_itself_and_the_other() {
        let mut plan = plan(&[
            "sh",
            "-c",
            "echo $RDMA_GUEST_NODES $RDMA_GUEST_NODE $RDMA_GUEST_ADDRESS $RDMA_GUEST_PEER \
            $RDMA_GUEST_PEER_DEVICE",
        ]);
        assert_eq!(shell(plan.command_script(Node(0))), "1 0 10.77.0.1 10.77.0.2 rxe1\n");
        plan.wiring = Wiring::TwoGuests;
        assert_eq!(plan.wiring.nodes().collect::<Vec<_>>(), [Node(0), Node(1)]);
        assert_eq!(shell(plan.command_script(Node(0))), "2 0 10.77.0.1 10.77.0.2 rxe0\n");
        assert_eq!(shell(plan.command_script(Node(1))), "2 1 10.77.0.2 10.77.0.1 rxe0\n");
    }

    #[test]
    fn a_second_processor_and_more_modules_come_with_the_set_up() {
        let mut plan = plan(&["true"]);
        let script = |plan: &Plan| {
            String::from_utf8(plan.setup_script(Node(0), &["/m/siw.ko".into()])).unwrap()
        };
        assert!(script(&plan).contains("insmod /m/siw.ko") && !script(&plan).contains("/online"));
        plan.processors = 2;
        assert!(script(&plan).contains("/online"));
    }
}
