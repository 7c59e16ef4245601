//! The certificate chain of this process's listeners, and its key.

use super::services::read_text;
use anyhow::Context;
use chrono::{DateTime, Utc};
use edge::tls::chain_end;
use std::path::Path;

/// A chain, PEM, and the key of its leaf.
#[derive(Clone)]
pub struct ListenerCertificate {
    pub chain_pem: String,
    pub key_pem: String,
    /// When the first of its certificates ends.
    pub end: DateTime<Utc>,
}

impl ListenerCertificate {
    /// # Errors
    /// Where a file cannot be read, or the chain is none.
    pub async fn read(chain: &Path, key: &Path) -> anyhow::Result<Self> {
        let chain_pem = read_text(chain).await?;
        let end = chain_end(&chain_pem).with_context(|| format!("{} cannot be used", chain.display()))?;
        Ok(Self { chain_pem, key_pem: read_text(key).await?, end })
    }
}
