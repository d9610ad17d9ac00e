//! The mapping of other ranks' regions, by the remote keys that these have sent.

use super::carrier::Carrier;
use crate::names::Rank;
use crate::region::RemoteKey;
use carrack_transports::contract::{Domain, Imported, WireKey};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::MapError;
use std::sync::Arc;

impl Carrier {
    /// Returns the memory of a remote key and its transport, or the reason why it cannot be mapped.
    /// It is mapped at the first use, for the engines of the device `near`.
    #[inline]
    pub(crate) fn mapped<'k>(
        &self,
        key: &'k RemoteKey,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<&'k (&'static str, Imported), &'k str> {
        let known = match key.mapped() {
            Some(known) => known,
            None => self.map_first(key, near)?,
        };
        known.as_ref().map_err(String::as_str)
    }

    #[cold]
    fn map_first<'k>(
        &self,
        key: &'k RemoteKey,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<&'k Result<(&'static str, Imported), String>, &'k str> {
        match self.map(key, near) {
            // The next operation tries again.
            Err(MapError::Lacking(_)) => {
                Err("this process lacks a descriptor or memory for mapping it now")
            }
            imported => Ok(key.set_mapped(imported.map_err(|why| why.to_string()))),
        }
    }

    fn map(
        &self,
        key: &RemoteKey,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<(&'static str, Imported), MapError> {
        if !key.is_of(self.job) {
            return Err("it is of another job".into());
        }
        let mut reasons = Vec::new();
        for (transport, domain) in &self.domains {
            let Some(wire) = key.key_of(transport) else {
                reasons.push(format!("{transport}: its owner could not export it"));
                continue;
            };
            match self.import(&**domain, key.owner(), wire, near) {
                Ok(imported) => return Ok((transport, imported)),
                Err(lacking @ MapError::Lacking(_)) => return Err(lacking),
                Err(why) => reasons.push(format!("{transport}: {why}")),
            }
        }
        let why = reasons.join("; ");
        // The owner's answer decides whether the NIC or the owner's progress reaches it.
        tracing::info!(owner = key.owner().0, why, "a remote region is not mapped here");
        Err(MapError::Refused(why))
    }

    /// Maps a peer's region. A region that the peer has withdrawn may block it. Memory that was
    /// freed and allocated again there has the same address, which a driver opens once at a time.
    pub(crate) fn import(
        &self,
        domain: &dyn Domain,
        owner: Rank,
        key: &WireKey,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<Imported, MapError> {
        let imported = domain.import(key, near).or_else(|_| {
            self.look_after_domains();
            domain.import(key, near)
        });
        if let Err(MapError::Refused(why)) = &imported
            && domain.maps_gpu_memory()
        {
            self.unmapped.note(owner, why);
        }
        imported
    }
}
