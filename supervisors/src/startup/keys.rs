//! The second stage: the keys with which this process signs, certifies and admits nodes.

use super::storage::StorageStage;
use crate::config::Config;
use anyhow::Context;
use edge::trust::keys_in_force::{Keys, KeysInForce};
use edge::trust::node_certificate::TrustDomain;

/// The keys in force, and whose identities they certify.
pub struct KeyStage {
    pub domain: TrustDomain,
    pub in_force: KeysInForce,
}

impl KeyStage {
    /// # Errors
    /// Where the keys cannot be read.
    pub async fn read(config: &Config, storage: &StorageStage) -> anyhow::Result<Self> {
        let domain = config.trust_domain.clone();
        let keys = Keys::read(&storage.secrets, &storage.reads, &domain).await.context("the keys cannot be read")?;
        Ok(Self { domain, in_force: KeysInForce::new(keys) })
    }
}
