//! Recovery requests of a fake agent: valid, or invalid in any field.

use super::client::{ApiResponse, send_request};
use super::fake_agent::{FakeAgent, anonymous};
use ed25519_dalek::SigningKey;
use rcgen::KeyPair;
use test_host::simulated_machine::{AGENT_VERSION, CertificateRequest};
use uuid::Uuid;
use wire::SecretToken;
use wire::bundle::BootstrapBundle;
use wire::enroll::RecoverRequest;

/// What an agent sends to recover its identity.
#[derive(Clone)]
pub struct RecoveryAttempt {
    pub bundle: BootstrapBundle,
    pub token: SecretToken,
    pub key: SigningKey,
    pub generation: u64,
    pub csr_pem: String,
    pub boot_id: Uuid,
}

impl RecoveryAttempt {
    /// A valid attempt of this agent, from its first generation, for a new certificate key.
    #[must_use]
    pub fn of(agent: &FakeAgent) -> (Self, KeyPair) {
        let CertificateRequest { key, csr_pem } = CertificateRequest::generate();
        let attempt = Self {
            bundle: agent.bundle.clone(),
            token: agent.bundle.enrollment_token.clone(),
            key: agent.recovery.clone(),
            generation: 1,
            csr_pem,
            boot_id: agent.boot_id,
        };
        (attempt, key)
    }

    fn url(&self) -> String {
        format!("{}/internal/v1/nodes/{}/recover", self.bundle.api_url, self.bundle.node_id)
    }

    /// A signed request with a new nonce.
    pub async fn request(&self) -> RecoverRequest {
        let asked = anonymous(&self.bundle).get(format!("{}/nonce", self.url()));
        let nonce = send_request(asked).await.expect("a nonce is given").ok();
        let mut request = RecoverRequest {
            enrollment_token: self.token.clone(),
            identity_generation: self.generation,
            nonce: nonce["nonce"].as_str().expect("a nonce is text").to_owned(),
            csr_pem: self.csr_pem.clone(),
            nonce_signature: Vec::new(),
            boot_id: self.boot_id,
            agent_version: AGENT_VERSION.to_owned(),
            protocol: wire::PROTOCOL,
            verifier_set_version: 0,
        };
        request.sign(self.bundle.node_id, &self.key);
        request
    }

    pub async fn send(&self, request: &RecoverRequest) -> ApiResponse {
        let asked = anonymous(&self.bundle).post(self.url()).json(request);
        send_request(asked).await.unwrap_or_else(|error| panic!("no answer to a recovery: {error:?}"))
    }

    pub async fn execute(&self) -> ApiResponse {
        self.send(&self.request().await).await
    }
}
