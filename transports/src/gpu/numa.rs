//! The NUMA node of a device.

use std::path::Path;

/// Linux's directory of PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";

/// Returns the NUMA node of the device at a PCI address (`domain:bus:device.function`, in either
/// case), as Linux knows it.
///
/// # Errors
/// The reason why it is not known, in words: no such device in /sys, or a machine of one node,
/// which says -1.
pub(super) fn of(pci: &str) -> Result<u32, String> {
    read(Path::new(DEVICES), pci)
}

fn read(devices: &Path, pci: &str) -> Result<u32, String> {
    let pci = pci.to_ascii_lowercase();
    // Checked, since the address becomes a part of a path.
    if pci.is_empty()
        || !pci.chars().all(|c| c.is_ascii_hexdigit() || c == ':' || c == '.')
        || pci.contains("..")
    {
        return Err(format!("{pci:?} is no PCI address"));
    }
    let path = devices.join(&pci).join("numa_node");
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let text = text.trim();
    text.parse().map_err(|_| {
        format!("{} says {text}: this machine has no NUMA nodes, or does not tell", path.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_what_the_file_says_and_all_else_has_a_reason() {
        let folder = std::env::temp_dir().join(format!("carrack-numa-{}", std::process::id()));
        for (pci, says) in
            [("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n"), ("0000:3d:00.0", "one")]
        {
            std::fs::create_dir_all(folder.join(pci)).unwrap();
            std::fs::write(folder.join(pci).join("numa_node"), says).unwrap();
        }
        assert_eq!(read(&folder, "0000:3B:00.0"), Ok(1));
        assert!(read(&folder, "0000:3c:00.0").unwrap_err().contains("says -1"));
        assert!(read(&folder, "0000:3d:00.0").unwrap_err().contains("says one"));
        assert!(read(&folder, "0000:3e:00.0").unwrap_err().contains("0000:3e:00.0/numa_node"));
        for odd in ["", "..", "../0000:3b:00.0", "0000:3b:00.0/.."] {
            assert!(read(&folder, odd).unwrap_err().contains("no PCI address"), "{odd}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
