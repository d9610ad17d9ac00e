//! Handles, which name an allocation to another process.

use crate::mem::{AllocId, GpuUuid};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

/// Form of a handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HandleForm {
    /// Plain bytes, as in legacy CUDA IPC.
    Bytes,
    /// A file descriptor, as in VMM. It travels by `SCM_RIGHTS` (gpu.md, VMM rule 4).
    Fd,
    /// A memory pool's file descriptor, and bytes that name a pointer of the pool. The memory ends
    /// with its owner: an access after the owner's death costs the survivor its context (error
    /// 226, seen on driver 580 over NVLink). Memory of the two forms above stays while it is open.
    Pool,
    /// Plain bytes that another node can open, if the machines share an NVLink fabric.
    Fabric,
}

impl HandleForm {
    /// All forms, in the order in which they are tried within a node.
    pub const ALL: [Self; 4] = [Self::Bytes, Self::Fd, Self::Pool, Self::Fabric];

    const fn bit(self) -> u8 {
        match self {
            Self::Bytes => 1,
            Self::Fd => 2,
            Self::Pool => 4,
            Self::Fabric => 8,
        }
    }
}

/// A set of forms.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Forms(u8);

impl Forms {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns this set, with `form` added if `there` is set.
    #[must_use]
    pub const fn with(self, form: HandleForm, there: bool) -> Self {
        if there { Self(self.0 | form.bit()) } else { self }
    }

    /// Returns `true` if a form is in the set.
    pub const fn contains(self, form: HandleForm) -> bool {
        self.0 & form.bit() != 0
    }

    /// Returns the form to try first, if there is one.
    pub fn first(self) -> Option<HandleForm> {
        HandleForm::ALL.into_iter().find(|form| self.contains(*form))
    }
}

/// Name of an allocation for another process, with all that it needs before it opens it.
#[derive(Debug)]
pub struct Handle {
    /// The device that owns the memory.
    pub gpu: GpuUuid,
    /// The allocation's identity at the exporter.
    pub id: AllocId,
    /// Length of the whole allocation in bytes: the opening covers all of it.
    pub len: usize,
    /// Offset of the exported region in it.
    pub offset: usize,
    /// Key for the driver's opening call.
    pub key: HandleKey,
}

/// Key by which a driver opens an allocation.
#[derive(Debug)]
pub enum HandleKey {
    /// Bytes of legacy CUDA IPC.
    Bytes([u8; 64]),
    /// File descriptor of the memory.
    Fd(OwnedFd),
    /// File descriptor of a memory pool, and the bytes that name a pointer of it.
    Pool(OwnedFd, [u8; 64]),
    /// Bytes that another node of the NVLink fabric can open.
    Fabric([u8; 64]),
}

/// A handle on the wire.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    form: U64,
    id: U64,
    len: U64,
    offset: U64,
    gpu: [u8; 16],
    /// Zero where a descriptor is the key.
    key: [u8; 64],
}

impl Handle {
    /// Bytes of a handle on the wire, without its descriptor.
    pub const WIRE: usize = size_of::<Wire>();

    /// Returns its form.
    pub fn form(&self) -> HandleForm {
        match self.key {
            HandleKey::Bytes(_) => HandleForm::Bytes,
            HandleKey::Fd(_) => HandleForm::Fd,
            HandleKey::Pool(..) => HandleForm::Pool,
            HandleKey::Fabric(_) => HandleForm::Fabric,
        }
    }

    /// Returns the descriptor that has to travel with the bytes.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.key {
            HandleKey::Fd(fd) | HandleKey::Pool(fd, _) => Some(fd.as_fd()),
            HandleKey::Bytes(_) | HandleKey::Fabric(_) => None,
        }
    }

    /// Encodes the handle as bytes: little-endian form, device, identity, length, offset, key.
    pub fn encode(&self) -> [u8; Self::WIRE] {
        let key = match &self.key {
            HandleKey::Bytes(key) | HandleKey::Pool(_, key) | HandleKey::Fabric(key) => *key,
            HandleKey::Fd(_) => [0; 64],
        };
        let (form, id) = (u64::from(self.form().bit()).into(), self.id.0.into());
        let (len, offset) = ((self.len as u64).into(), (self.offset as u64).into());
        transmute!(Wire { form, id, len, offset, gpu: self.gpu.0, key })
    }

    /// Encodes the handle for a region at another offset of the allocation.
    pub fn encode_at(&self, offset: usize) -> [u8; Self::WIRE] {
        let wire: Wire = transmute!(self.encode());
        transmute!(Wire { offset: (offset as u64).into(), ..wire })
    }

    /// Returns such bytes for the whole allocation.
    pub fn whole(bytes: [u8; Self::WIRE]) -> [u8; Self::WIRE] {
        let wire: Wire = transmute!(bytes);
        transmute!(Wire { offset: 0.into(), ..wire })
    }

    /// Returns the offset of the exported region in such bytes.
    pub fn offset_of(bytes: &[u8; Self::WIRE]) -> usize {
        let wire: &Wire = transmute_ref!(bytes);
        usize::try_from(wire.offset.get()).unwrap_or(usize::MAX)
    }

    /// Decodes a handle from such bytes and the descriptor that came with them. Returns `None` if
    /// they are no handle. Bytes come from another process: the driver checks their lengths
    /// against the memory itself.
    pub fn decode(bytes: &[u8; Self::WIRE], fd: Option<OwnedFd>) -> Option<Self> {
        let Wire { form, id, len, offset, gpu, key } = transmute_ref!(bytes);
        let (id, gpu) = (AllocId(id.get()), GpuUuid(*gpu));
        let (len, offset) = (usize::try_from(len.get()).ok()?, usize::try_from(offset.get()).ok()?);
        let form = form.get();
        let form = HandleForm::ALL.into_iter().find(|known| u64::from(known.bit()) == form)?;
        let key = match (form, fd) {
            (HandleForm::Bytes, None) => HandleKey::Bytes(*key),
            (HandleForm::Fabric, None) => HandleKey::Fabric(*key),
            (HandleForm::Fd, Some(fd)) => HandleKey::Fd(fd),
            (HandleForm::Pool, Some(fd)) => HandleKey::Pool(fd, *key),
            _ => return None,
        };
        (len > 0 && offset < len).then_some(Self { gpu, id, len, offset, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(key: HandleKey) -> Handle {
        Handle { gpu: GpuUuid([3; 16]), id: AllocId(u64::MAX - 7), len: 1 << 40, offset: 77, key }
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_handle_of_every_form_survives_the_wire() {
        let keys: [fn() -> HandleKey; 4] = [
            || HandleKey::Bytes([1; 64]),
            || HandleKey::Fd(null()),
            || HandleKey::Pool(null(), [2; 64]),
            || HandleKey::Fabric([9; 64]),
        ];
        for (make, form) in keys.into_iter().zip(HandleForm::ALL) {
            let sent = handle(make());
            let fd = sent.fd().map(|_| null());
            let come = Handle::decode(&sent.encode(), fd).unwrap();
            assert_eq!(come.form(), form);
            assert_eq!(come.encode(), sent.encode());
            assert_eq!(
                (Handle::offset_of(&sent.encode()), Handle::offset_of(&sent.encode_at(99))),
                (77, 99)
            );
            assert_eq!(Handle { offset: 99, ..sent }.encode(), handle(make()).encode_at(99));
            let sent = handle(make());
            assert_eq!(
                (come.gpu, come.id, come.len, come.offset),
                (sent.gpu, sent.id, sent.len, sent.offset)
            );
        }
    }

    #[test]
    fn bytes_that_are_no_handle_are_refused() {
        let good = handle(HandleKey::Bytes([1; 64])).encode();
        assert!(
            Handle::decode(&good, Some(null())).is_none(),
            "a descriptor that nothing asked for"
        );
        assert!(
            Handle::decode(&handle(HandleKey::Fd(null())).encode(), None).is_none(),
            "none that was needed"
        );
        assert!(Handle::decode(&[0; Handle::WIRE], None).is_none(), "no form");
        let wrong = |change: fn(&mut Handle)| {
            let mut handle = handle(HandleKey::Bytes([1; 64]));
            change(&mut handle);
            Handle::decode(&handle.encode(), None).is_none()
        };
        assert!(wrong(|handle| handle.len = 0));
        assert!(wrong(|handle| handle.offset = handle.len));
    }

    #[test]
    fn a_set_of_forms_holds_what_was_put_in() {
        let forms = Forms::NONE.with(HandleForm::Pool, true).with(HandleForm::Fd, false);
        assert!(forms.contains(HandleForm::Pool) && !forms.contains(HandleForm::Fd));
        assert_eq!((forms.first(), Forms::NONE.first()), (Some(HandleForm::Pool), None));
    }
}
