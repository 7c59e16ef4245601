//! The keys of the control plane: made once for the cluster, sealed at rest, the same in every replica.

use anyhow::Context;
use chrono::{TimeDelta, Utc};
use ed25519_dalek::SigningKey;
use edge::identity::TrustDomain;
use edge::node_api::nonce::Nonces;
use edge::node_ca::NodeCa;
use edge::services::Trust;
use edge::tls::tickets::SharedTickets;
use persistence::Secrets;
use persistence::audit::AuditKey;
use persistence::envelope::KeyRing;
use rand::Rng;
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use serde_json::json;
use std::sync::Arc;
use wire::keys::{KeyStatus, VerifierKey};
use wire::{PublicKey, VerifierSet};

/// A node CA lasts ten years; its certificates a day. It is replaced by rotation, not by waiting.
const CA_LIFE: TimeDelta = TimeDelta::days(3650);

/// Reads the cluster's keys, or makes them where this is its first process.
///
/// # Errors
/// Where the key ring does not open what is sealed, or a key is damaged.
pub async fn load(
    secrets: &Secrets,
    domain: TrustDomain,
    configured_verifiers: &[String],
    api_ca_pem: String,
    at_rest: Arc<KeyRing>,
) -> anyhow::Result<Trust> {
    let node_ca = node_ca(secrets, domain.clone()).await?;
    let task_signer = signing_key(secrets, "task_signing/active").await?;
    let active = PublicKey::from(&task_signer);
    let task_key_id = active.key_id();
    let keys = vec![VerifierKey::new(active, KeyStatus::Active)];
    let verifier_set = VerifierSet::sign(0, keys, &[(&task_key_id, &task_signer)])?;
    let bootstrap_verifier_keys =
        if configured_verifiers.is_empty() { vec![verifier_set.to_env_value()] } else { configured_verifiers.to_vec() };
    VerifierSet::from_env_value(&bootstrap_verifier_keys.join(","))
        .context("NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS is not a list of Ed25519 public keys")?;
    let nonces = Nonces::new(&secrets.get_or_create("recovery_nonces", || (random(32), json!({}))).await?.value)?;
    Ok(Trust {
        nonces,
        domain,
        node_ca,
        task_signer,
        task_key_id,
        verifier_set,
        bootstrap_verifier_keys,
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

/// Of which the keys are made that seal terminals between two replicas.
///
/// # Errors
/// As [`load`].
pub async fn terminal_relay(secrets: &Secrets) -> anyhow::Result<SecretSlice<u8>> {
    Ok(secrets.get_or_create("terminal_relay", || (random(32), json!({}))).await?.value)
}

/// What signs the access tokens of service accounts.
///
/// # Errors
/// As [`load`].
pub async fn service_token_signer(secrets: &Secrets) -> anyhow::Result<SigningKey> {
    signing_key(secrets, "service_token_signing/active").await
}

async fn node_ca(secrets: &Secrets, domain: TrustDomain) -> anyhow::Result<NodeCa> {
    let now = Utc::now();
    let fresh = NodeCa::create(domain.clone(), now, now + CA_LIFE)?;
    let secret = secrets
        .get_or_create("node_ca", || {
            let key = fresh.key_pem.expose_secret().as_bytes().to_vec();
            (SecretSlice::from(key), json!({ "certificate_pem": fresh.ca.certificate_pem() }))
        })
        .await?;
    let certificate = secret.public["certificate_pem"].as_str().context("the node CA has no certificate")?;
    let key = std::str::from_utf8(secret.value.expose_secret()).context("the node CA's key is no PEM text")?;
    Ok(NodeCa::load(domain, certificate, &SecretString::from(key.to_owned()))?)
}

/// The authorities that node certificates are verified against, PEM.
///
/// # Errors
/// As [`load`]; where no member has made them yet.
pub async fn node_authorities(secrets: &Secrets) -> anyhow::Result<String> {
    let secret = secrets.get("node_ca").await?.context("there is no node CA yet: the first member makes it")?;
    let certificate = secret.public["certificate_pem"].as_str().context("the node CA has no certificate")?;
    Ok(certificate.to_owned())
}

async fn signing_key(secrets: &Secrets, name: &str) -> anyhow::Result<SigningKey> {
    let secret = secrets.get_or_create(name, || (random(32), json!({}))).await?;
    let seed: &[u8; 32] =
        secret.value.expose_secret().try_into().with_context(|| format!("the key {name} has a wrong length"))?;
    Ok(SigningKey::from_bytes(seed))
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

fn random(bytes: usize) -> SecretSlice<u8> {
    let mut secret = vec![0; bytes];
    rand::rng().fill_bytes(&mut secret);
    SecretSlice::from(secret)
}
