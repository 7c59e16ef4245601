//! What the handlers are given: the actors to ask, the store to read, and the keys to sign with.

use crate::auth::Authenticator;
use crate::auth::internal::InternalToken;
use crate::figures::Figures;
use crate::identity::TrustDomain;
use crate::node_api::nonce::Nonces;
use crate::node_ca::NodeCa;
use crate::platform_roles::PlatformRoleCounters;
use crate::polls::Polls;
use crate::probe::Probe;
use crate::rate_limit::RateLimiter;
use crate::runtime::Runtime;
use crate::terminal::Terminals;
use crate::tls::connections::Connections;
use actors::Directory;
use actors::ports::World;
use axum::extract::FromRef;
use ed25519_dalek::SigningKey;
use persistence::Reads;
use persistence::envelope::KeyRing;
use std::sync::Arc;
use telemetry::Sampling;

/// Shared by all requests; cheap to clone.
#[derive(Clone)]
pub struct Services(Arc<Parts>);

/// See [`Services`].
pub struct Parts {
    pub directory: Directory,
    pub reads: Reads,
    pub world: Arc<dyn World>,
    pub runtime: Arc<dyn Runtime>,
    pub authenticator: Arc<Authenticator>,
    pub limiter: RateLimiter,
    /// Opens the forced refresh of the provider's keys; without it that route is not there.
    pub jwks_refresh_token: Option<InternalToken>,
    pub probe: Probe,
    pub polls: Polls,
    /// The ends of terminal sessions that are in this process.
    pub terminals: Terminals,
    pub connections: Connections,
    pub figures: Figures,
    /// How many of the traces that begin here are sampled.
    pub sampling: Sampling,
    pub trust: Trust,
    /// Lets the operator's tools read this process's stats; without it there is no such route.
    pub stats_token: Option<InternalToken>,
    pub platform_roles: PlatformRoleCounters,
    pub addresses: Addresses,
    /// The agent's package, as bundles name it.
    pub package: wire::bundle::Package,
    /// Cancelled when this process ends: what waits long answers then.
    pub stopping: tokio_util::sync::CancellationToken,
}

/// The keys that this process issues and signs with.
pub struct Trust {
    pub domain: TrustDomain,
    pub node_ca: NodeCa,
    /// Signs tasks.
    pub task_signer: SigningKey,
    pub task_key_id: String,
    /// The verifier set in force, version 0 unless keys were rotated.
    pub verifier_set: wire::VerifierSet,
    /// As they stand in a bundle: the configured first keys, else the active one.
    pub bootstrap_verifier_keys: Vec<String>,
    /// By what agents trust the API's certificate, PEM.
    pub api_ca_pem: String,
    /// Makes the nonces of recoveries, and knows them again.
    pub nonces: Nonces,
    /// Seals what is kept of a request and must not be readable at rest.
    pub at_rest: Arc<KeyRing>,
}

/// Where the control plane is reached.
pub struct Addresses {
    pub public_url: String,
    pub node_url: String,
    /// Where users' terminals connect; `wss://`.
    pub terminal_url: String,
    /// Whose pages may open terminals, beside those of the public URL.
    pub terminal_origins: Vec<String>,
}

impl Services {
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }
}

impl std::ops::Deref for Services {
    type Target = Parts;
    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl FromRef<Services> for Arc<Authenticator> {
    fn from_ref(services: &Services) -> Self {
        Self::clone(&services.authenticator)
    }
}

impl FromRef<Services> for TrustDomain {
    fn from_ref(services: &Services) -> Self {
        services.trust.domain.clone()
    }
}
