//! The addresses of a port.

use super::super::bindings::{
    IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, ibv_gid, ibv_gid_entry,
    ibv_gid_type,
};
use super::super::error::VerbsError;
use super::context::Context;
use std::fs;
use std::path::Path;

/// Index of an address in its port's table, by which queue pairs name it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GidIndex(pub u8);

/// Kind of an address, which decides the format of packets.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// Ethernet, in frames of RoCE's own.
    RoceV1,
    /// Ethernet, in UDP datagrams: these are routed.
    RoceV2,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GidEntry {
    /// Index in the table.
    pub index: GidIndex,
    /// The address, in the network's order; one of IPv4 has 10 zeros and two bytes `ff` in front.
    pub gid: [u8; 16],
    /// Kind of the address.
    pub kind: GidKind,
    /// The kernel's number of the network interface that it belongs to; 0 for none.
    pub ifindex: u32,
}

impl Context {
    /// Returns the addresses of a port; ports count from 1. Left out are empty places of its
    /// table, and places beyond 255, which no queue pair can name.
    ///
    /// # Errors
    /// There is no such port, or the device does not answer.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        let attr = self.port_attr(port)?;
        let ethernet = u32::from(attr.link_layer) == IBV_LINK_LAYER_ETHERNET;
        match self.gid_table() {
            Ok(entries) => {
                let ours = entries.iter().filter(|entry| entry.port_num == u32::from(port));
                Ok(ours.filter_map(|entry| decode(entry, ethernet)).collect())
            }
            Err(error) if error.is_unsupported() => {
                self.gids_one_by_one(port, attr.gid_tbl_len, ethernet)
            }
            Err(error) => Err(error.at_port(port)),
        }
    }

    /// Returns the addresses of all ports, by one call.
    fn gid_table(&self) -> Result<Vec<ibv_gid_entry>, VerbsError> {
        let ports = self.device_attr()?.phys_port_cnt;
        let lengths = (1..=ports).map(|port| self.port_attr(port).map(|attr| attr.gid_tbl_len));
        let room: i32 = lengths.sum::<Result<_, _>>()?;
        let mut entries = vec![ibv_gid_entry::default(); usize::try_from(room).unwrap_or_default()];
        let (size, verbs) = (size_of::<ibv_gid_entry>(), self.verbs());
        // SAFETY: the context is open, and the room has the stated number of entries, each of the
        // stated length.
        let count = unsafe {
            verbs.query_gid_table(self.as_raw(), entries.as_mut_ptr(), entries.len(), 0, size)
        };
        entries.truncate(count.map_err(|error| self.name_in(error))?);
        Ok(entries)
    }

    /// Returns the addresses by older calls, and their kinds from the kernel's files.
    fn gids_one_by_one(
        &self,
        port: u8,
        len: i32,
        ethernet: bool,
    ) -> Result<Vec<GidEntry>, VerbsError> {
        let attributes = self.sysfs().map(|path| path.join(format!("ports/{port}/gid_attrs")));
        let mut found = Vec::new();
        for index in 0..u8::try_from(len).unwrap_or(u8::MAX) {
            let mut gid = ibv_gid::default();
            // SAFETY: the context is open, and the place for the answer ours.
            unsafe { self.verbs().query_gid(self.as_raw(), port, index.into(), &raw mut gid) }
                .map_err(|error| self.name_in(error).at_port(port))?;
            // SAFETY: both members are 16 bytes, any of which are valid.
            let gid = unsafe { gid.raw };
            if is_empty(gid) {
                continue;
            }
            let attributes = attributes.as_deref();
            let kind = attributes.and_then(|path| kind_by_sysfs(path, index, ethernet));
            found.push(GidEntry {
                index: GidIndex(index),
                gid,
                kind: kind.unwrap_or(if ethernet { GidKind::RoceV1 } else { GidKind::Infiniband }),
                ifindex: attributes.and_then(|path| ifindex_by_sysfs(path, index)).unwrap_or(0),
            });
        }
        Ok(found)
    }
}

/// Converts an entry of the table.
fn decode(entry: &ibv_gid_entry, ethernet: bool) -> Option<GidEntry> {
    // SAFETY: both members are 16 bytes, any of which are valid.
    let gid = unsafe { entry.gid.raw };
    let index = GidIndex(u8::try_from(entry.gid_index).ok()?);
    let kind = kind_of(entry.gid_type, ethernet);
    (!is_empty(gid)).then_some(GidEntry { index, gid, kind, ifindex: entry.ndev_ifindex })
}

/// Returns the kind of an address. Old kernels report InfiniBand also for RoCE v1, on Ethernet
/// ports.
fn kind_of(gid_type: ibv_gid_type, ethernet: bool) -> GidKind {
    match gid_type {
        IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        _ if ethernet => GidKind::RoceV1,
        _ => GidKind::Infiniband,
    }
}

/// Returns `true` if the place is empty, or has only the prefix of a port without an address.
fn is_empty(gid: [u8; 16]) -> bool {
    gid == [0; 16] || (gid[..8] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0] && gid[8..] == [0; 8])
}

fn kind_by_sysfs(attributes: &Path, index: u8, ethernet: bool) -> Option<GidKind> {
    let text = fs::read_to_string(attributes.join(format!("types/{index}"))).ok()?;
    let kind = if text.trim() == "RoCE v2" { IBV_GID_TYPE_ROCE_V2 } else { 0 };
    Some(kind_of(kind, ethernet))
}

fn ifindex_by_sysfs(attributes: &Path, index: u8) -> Option<u32> {
    let name = fs::read_to_string(attributes.join(format!("ndevs/{index}"))).ok()?;
    fs::read_to_string(Path::new("/sys/class/net").join(name.trim()).join("ifindex"))
        .ok()?
        .trim()
        .parse()
        .ok()
}
