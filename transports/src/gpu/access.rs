//! Rights of devices on memory at chosen addresses.

use crate::mem::GpuUuid;

/// Rights of a device on memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rights {
    /// Read access: the device's kernels, and the program's copies in its context, may read. Their
    /// writes are refused, or cost the context: see
    /// [`Gpu::keeps_from_writing`](super::Gpu::keeps_from_writing). The library's copies between
    /// memory of devices name the owner's context where the device itself may not write, and
    /// succeed. From host memory the owner's engine writes.
    Read,
    /// Kernels and copies read and write.
    ReadWrite,
}

/// A device, and its rights.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Access {
    /// Id of the device.
    pub gpu: GpuUuid,
    /// Rights of the device.
    pub rights: Rights,
}

impl Access {
    /// Returns read and write access for a device.
    pub fn read_write(gpu: GpuUuid) -> Self {
        Self { gpu, rights: Rights::ReadWrite }
    }

    /// Returns read-only access for a device.
    pub fn read(gpu: GpuUuid) -> Self {
        Self { gpu, rights: Rights::Read }
    }

    /// Returns each device's access to memory of `owner`, which reads and writes it, the owner
    /// first and each once.
    ///
    /// # Errors
    /// A device that is named with different rights, in words.
    pub fn of_each(owner: GpuUuid, access: &[Self]) -> Result<Vec<Self>, String> {
        let mut each = vec![Self::read_write(owner)];
        for one in access {
            match each.iter().find(|other| other.gpu == one.gpu) {
                Some(other) if other.rights == one.rights => {}
                Some(_) if one.gpu == owner => {
                    return Err(format!(
                        "{owner} has the memory, and is to read only: leave it out"
                    ));
                }
                Some(_) => {
                    return Err(format!(
                        "{} is named with different rights: name it once",
                        one.gpu
                    ));
                }
                None => each.push(*one),
            }
        }
        Ok(each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_is_named_once_and_the_owner_reads_and_writes() {
        let [own, one, two] = [1, 2, 3].map(|byte| GpuUuid([byte; 16]));
        let (write, read) = (Access::read_write, Access::read);
        assert_eq!(Access::of_each(own, &[]), Ok(vec![write(own)]));
        let all = [read(two), write(own), write(one), read(two)];
        assert_eq!(Access::of_each(own, &all), Ok(vec![write(own), read(two), write(one)]));
        assert!(
            Access::of_each(own, &[write(one), read(one)])
                .unwrap_err()
                .contains("different rights")
        );
        assert!(Access::of_each(own, &[read(own)]).unwrap_err().contains("leave it out"));
    }
}
