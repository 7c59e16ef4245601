//! The bootstrap bundle as this installation hands it out (service specification, "Bootstrap bundle").
//!
//! It is the only source of what a node needs to enroll. The paths in it are those of an installed agent; a machine that keeps its
//! files elsewhere says so by flags of the agent, not by changing the bundle.

use crate::services::Services;
use domain::NodeId;
use secrecy::{ExposeSecret, SecretString};
use wire::Token;
use wire::bundle::{BootstrapBundle, fingerprint};

/// The agent's folder on an installed node.
const AGENT_FOLDER: &str = "/var/lib/gpuaas-agent";

/// The bundle that carries `token`, for the one node that the token was issued to. It is a secret from here on: its answer is not
/// stored (`Cache-Control: no-store`).
#[must_use]
pub fn bootstrap_bundle(services: &Services, node_id: NodeId, token: SecretString) -> BootstrapBundle {
    let at = |name: &str| format!("{AGENT_FOLDER}/{name}");
    let trust = &services.trust;
    BootstrapBundle {
        node_id: node_id.0,
        enrollment_token: Token::new(token.expose_secret()),
        api_url: services.addresses.node_url.clone(),
        task_signing_pubkeys: trust.bootstrap_verifier_keys.join(","),
        ca_bundle_path: at("ca.pem"),
        node_cert_ca_bundle_path: at("node-ca.pem"),
        cert_path: at("node.pem"),
        key_path: at("node.key"),
        ca_bundle_pem: trust.api_ca_pem.clone(),
        ca_bundle_fingerprint: fingerprint(&trust.api_ca_pem),
        // Agents are installed by the operator until packages are published.
        package: None,
    }
}
