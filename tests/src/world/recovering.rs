//! Recoveries by hand: in order, or wrong in whatever way a test wants.

use super::client::{Answer, answer_to};
use super::hand::{HandAgent, Showing, anonymous};
use ed25519_dalek::SigningKey;
use rcgen::KeyPair;
use uuid::Uuid;
use wire::Token;
use wire::bundle::BootstrapBundle;
use wire::enroll::RecoverRequest;

/// Everything that an agent shows to come back to its identity.
#[derive(Clone)]
pub struct Recovering {
    pub bundle: BootstrapBundle,
    pub token: Token,
    pub key: SigningKey,
    pub generation: u64,
    pub csr_pem: String,
    pub boot_id: Uuid,
}

impl Recovering {
    /// As this agent would, from its first generation, for a fresh certificate key.
    #[must_use]
    pub fn of(agent: &HandAgent) -> (Self, KeyPair) {
        let (showing, key) = Showing::honest(&agent.bundle, 0);
        let recovering = Self {
            bundle: agent.bundle.clone(),
            token: agent.bundle.enrollment_token.clone(),
            key: agent.recovery.clone(),
            generation: 1,
            csr_pem: showing.csr_pem,
            boot_id: agent.boot_id,
        };
        (recovering, key)
    }

    fn url(&self) -> String {
        format!("{}/internal/v1/nodes/{}/recover", self.bundle.api_url, self.bundle.node_id)
    }

    /// A request that is signed, with a nonce of its own.
    pub async fn request(&self) -> RecoverRequest {
        let asked = anonymous(&self.bundle).get(format!("{}/nonce", self.url()));
        let nonce = answer_to(asked).await.expect("a nonce is given").ok();
        let mut request = RecoverRequest {
            enrollment_token: self.token.clone(),
            identity_generation: self.generation,
            nonce: nonce["nonce"].as_str().expect("a nonce is text").to_owned(),
            csr_pem: self.csr_pem.clone(),
            nonce_signature: Vec::new(),
            boot_id: self.boot_id,
            agent_version: "0.0.0-hand".to_owned(),
            protocol: wire::PROTOCOL,
            verifier_set_version: 0,
        };
        request.sign(self.bundle.node_id, &self.key);
        request
    }

    pub async fn send(&self, request: &RecoverRequest) -> Answer {
        let asked = anonymous(&self.bundle).post(self.url()).json(request);
        answer_to(asked).await.unwrap_or_else(|error| panic!("no answer to a recovery: {error:?}"))
    }

    pub async fn go(&self) -> Answer {
        self.send(&self.request().await).await
    }
}
