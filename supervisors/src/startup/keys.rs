//! The second stage: the keys with which this process signs, certifies and admits nodes.

use super::storage::StorageStage;
use crate::config::Config;
use anyhow::Context;
use edge::trust::current_keys::{CurrentKeys, Keys};
use edge::trust::node_certificate::TrustDomain;

/// The current keys, and whose identities they certify.
pub struct KeyStage {
    pub domain: TrustDomain,
    pub current: CurrentKeys,
}

impl KeyStage {
    /// # Errors
    /// Where the keys cannot be read.
    pub async fn read(config: &Config, storage: &StorageStage) -> anyhow::Result<Self> {
        let domain = config.trust_domain.clone();
        let keys = Keys::read(&storage.secrets, &storage.reads, &domain).await.context("the keys cannot be read")?;
        Ok(Self { domain, current: CurrentKeys::new(keys) })
    }
}
