//! The keys of the control plane: created once for the cluster, sealed at rest, the same in every replica.

use anyhow::Context;
use domain::Timestamp;
use ed25519_dalek::SigningKey;
use edge::app_state::Trust;
use edge::tls::tickets::SharedTickets;
use edge::trust::current_keys::CurrentKeys;
use edge::trust::node_certificate::TrustDomain;
use edge::trust::recovery_nonce::Nonces;
use persistence::audit::AuditKey;
use persistence::envelope_encryption::KeyRing;
use persistence::{Secrets, SnapshotSealer};
use rand::Rng;
use secrecy::{ExposeSecret, SecretSlice};
use serde_json::json;
use std::sync::Arc;
use wire::VerifierSet;

/// Assembles the keys and authorities that the edge verifies with and signs with.
///
/// # Errors
/// Where the key ring does not open a sealed value, or a key is damaged.
pub async fn load(
    secrets: &Secrets,
    domain: TrustDomain,
    keys: CurrentKeys,
    configured_verifiers: &[String],
    api_ca_pem: String,
    at_rest: Arc<KeyRing>,
) -> anyhow::Result<Trust> {
    if !configured_verifiers.is_empty() {
        VerifierSet::from_env_value(&configured_verifiers.join(","))
            .context("NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS is not a list of Ed25519 public keys")?;
    }
    let nonces = Nonces::new(&secrets.get_or_create("recovery_nonces", || (random(32), json!({}))).await?.value)?;
    Ok(Trust {
        nonces,
        domain,
        keys,
        secrets: secrets.clone(),
        bootstrap_verifier_keys: configured_verifiers.to_vec(),
        api_ca_pem,
        at_rest,
    })
}

/// The keys of session tickets, so that a connection can be resumed at any replica.
///
/// # Errors
/// As [`load`].
pub async fn tickets(secrets: &Secrets) -> anyhow::Result<SharedTickets> {
    let secret = secrets.get_or_create("tls_tickets", || (random(48), json!({}))).await?;
    Ok(SharedTickets::new(secret.value)?)
}

/// The secret from which the keys are derived that seal terminals between two replicas.
///
/// # Errors
/// As [`load`].
pub async fn terminal_relay(secrets: &Secrets) -> anyhow::Result<SecretSlice<u8>> {
    Ok(secrets.get_or_create("terminal_relay", || (random(32), json!({}))).await?.value)
}

/// The key that signs the heads of the audit log's chains.
///
/// # Errors
/// As [`load`].
pub async fn audit_key(secrets: &Secrets) -> anyhow::Result<AuditKey> {
    let secret = secrets.get_or_create("audit_signing/active", || (random(32), json!({}))).await?;
    let seed: &[u8; 32] = secret.value.expose_secret().try_into().context("the audit key has a wrong length")?;
    Ok(AuditKey::new(SigningKey::from_bytes(seed)))
}

/// The seals that bind stored snapshots to the members that committed them.
///
/// # Errors
/// As [`load`].
pub async fn seals(secrets: &Secrets, accepts_unsealed_until: Option<Timestamp>) -> anyhow::Result<SnapshotSealer> {
    let secret = secrets.get_or_create("snapshot_seal", || (random(32), json!({}))).await?;
    Ok(SnapshotSealer::new(&secret.value, accepts_unsealed_until)?)
}

fn random(bytes: usize) -> SecretSlice<u8> {
    let mut secret = vec![0; bytes];
    rand::rng().fill_bytes(&mut secret);
    SecretSlice::from(secret)
}
