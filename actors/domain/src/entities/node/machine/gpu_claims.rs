//! Claims on GPUs: a UUID belongs to one node in the cluster, which the commit of a second node's claim detects.

use super::NodeMachine;
use crate::id::NodeId;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// Which of its reported GPUs a node claims.
pub(in crate::entities::node) enum GpuClaimScope {
    All,
    /// Those that it has claimed before, and no new ones.
    Known,
    None,
}

/// The claim of a GPU. Its UUID is hexadecimal: case does not distinguish two.
fn gpu_claim(uuid: &str) -> String {
    format!("gpu/{}", uuid.trim().to_ascii_lowercase())
}

impl NodeMachine {
    /// Claims the node's GPUs except those of `holders`: those that it reports, and those that tenants hold although the machine does not
    /// report them at the moment.
    pub(in crate::entities::node) fn claim<'a>(
        &mut self,
        scope: &GpuClaimScope,
        held: impl Iterator<Item = &'a str>,
        holders: &BTreeMap<String, Uuid>,
    ) {
        let is_known = |uuid: &String| self.claimed_gpus.contains(uuid) || self.contested_gpus.contains_key(uuid);
        let all: BTreeSet<String> = self.gpus().map(|gpu| gpu.uuid.clone()).chain(held.map(str::to_owned)).collect();
        let has: BTreeSet<String> = match scope {
            GpuClaimScope::All => all,
            GpuClaimScope::Known => all.into_iter().filter(is_known).collect(),
            GpuClaimScope::None => BTreeSet::new(),
        };
        self.contested_gpus.retain(|uuid, _| has.contains(uuid));
        for uuid in &has {
            if let Some(holder) = holders.get(&gpu_claim(uuid)) {
                self.contested_gpus.insert(uuid.clone(), NodeId(*holder));
            }
        }
        self.claimed_gpus = has.into_iter().filter(|uuid| !self.contested_gpus.contains_key(uuid)).collect();
    }

    /// Drops the known conflicts, so that a release of the quarantine or a reactivation claims the GPUs again.
    pub(in crate::entities::node) fn reclaim_gpus(&mut self) {
        self.contested_gpus.clear();
    }

    /// What the node claims in the cluster: its GPUs, and its machine at the bare-metal provider.
    pub(in crate::entities::node) fn claims(&self) -> BTreeSet<String> {
        let gpus = self.claimed_gpus.iter().map(|uuid| gpu_claim(uuid));
        gpus.chain(self.provided.iter().filter(|it| it.is_held()).map(super::ProvidedMachine::claim)).collect()
    }

    /// Which of the node's GPUs another node has claimed, in a sentence for an operator.
    pub(in crate::entities::node) fn gpu_conflict(&self) -> Option<String> {
        let (uuid, holder) = self.contested_gpus.first_key_value()?;
        Some(format!(
            "GPU {uuid} belongs to node {holder}; remove that node or correct this machine, then release the quarantine."
        ))
    }
}
