//! The registration of a region, with the coherence owner of its words.

use super::table::NicAgent;
use super::{Mr, Region, Regions};
use crate::error::RegisterError;
use crate::local::Local;
use carrack_transports::mem::{MemKind, RawError};
use std::sync::Arc;

/// The coherence owner of the words of a region, which carries out their atomic operations. Each
/// word has one, for all ranks. Operations of two would not be atomic with respect to each other,
/// and some would be lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum AtomicAgent {
    /// The rank that has the memory. Its CPUs do the operations, or those of its machine where
    /// they are mapped; for words of a GPU its copy engine. Where the memory is not mapped, the
    /// owner has to make progress.
    #[default]
    Owner,
    /// The owner's NIC, for all accesses. Those of ranks on its node and of the owner itself go
    /// through the NIC as well. The owner's CPU takes part only to tell each rank the place of the
    /// memory once.
    ///
    /// Host memory only. Plain reads see a word before or after an operation. Any other write (a
    /// put, a store, [`Region::fetch_add`]) may lose an operation in flight.
    Nic,
}

/// A registration to be made: see [`Runtime::registration`](crate::Runtime::registration).
#[must_use = "nothing is registered until `register`"]
pub struct Registration<'a> {
    local: &'a Local,
    regions: &'a Arc<Regions>,
    region: &'a Region,
    atomics: AtomicAgent,
}

impl<'a> Registration<'a> {
    pub(crate) fn new(local: &'a Local, regions: &'a Arc<Regions>, region: &'a Region) -> Self {
        Self { local, regions, region, atomics: AtomicAgent::Owner }
    }

    /// Sets the coherence owner of the region's words; the default is the region's owner.
    pub fn atomics(mut self, agent: AtomicAgent) -> Self {
        self.atomics = agent;
        self
    }

    /// Registers it.
    ///
    /// # Errors
    /// There are too many already, or it is managed memory. [`RegisterError::NoAtomics`]: no NIC of
    /// this rank's can be the agent, and why. [`RegisterError::OtherAgent`]: a part of it is
    /// registered already, and its words have another agent.
    pub fn register(self) -> Result<Mr, RegisterError> {
        let Self { local, regions, region, atomics } = self;
        if let MemKind::Managed(_) = region.kind() {
            return Err(RawError::Managed { addr: region.addr() }.into());
        }
        let agent = match atomics {
            AtomicAgent::Owner => None,
            AtomicAgent::Nic => Some(expose_words(local, region)?),
        };
        let (index, generation, keys) = regions.insert(region.clone(), agent.clone())?;
        let mut mr = Mr {
            region: region.clone(),
            index,
            generation,
            keys,
            refused: Vec::new(),
            regions: regions.clone(),
            job: local.job,
            rank: local.rank,
            nic: agent.map(|agent| agent.transport),
        };
        for (transport, domain) in &local.domains {
            match domain.export(region) {
                Ok(exported) => mr.keys.add(transport, exported),
                Err(why) => mr.refused.push((transport, why.to_string())),
            }
        }
        Ok(mr)
    }
}

/// Finds the first NIC that can be the coherence owner.
fn expose_words(local: &Local, region: &Region) -> Result<NicAgent, RegisterError> {
    let mut reasons = Vec::new();
    for (transport, domain) in local.domains.iter().filter(|(_, domain)| domain.carries_messages())
    {
        match domain.expose_words(region) {
            Ok(exposed) => return Ok(NicAgent { transport, exposed: Arc::from(exposed) }),
            Err(why) => reasons.push(format!("{transport}: {why}")),
        }
    }
    reasons
        .extend(local.unavailable.iter().map(|why| format!("{}: {}", why.transport, why.reason)));
    Err(RegisterError::NoAtomics(reasons.join("; ")))
}
