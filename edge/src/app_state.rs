//! The dependencies of the handlers: the actors, the store, and the keys.

pub(crate) mod read_model;
pub mod rollout_nodes;
pub mod runtime_interface;

use crate::agent_package::AgentPackage;
use crate::app_state::runtime_interface::Runtime;
use crate::auth::Authenticator;
use crate::auth::internal_route_auth::InternalToken;
use crate::auth::openid_provider::OpenIdProvider;
use crate::auth::platform_role_metrics::PlatformRoleCounters;
use crate::auth::signed_tokens::node_log::{GATEWAY_PATH, NodeLogTokens};
use crate::fleet_telemetry::{self, FleetDirectory, FleetReport, FleetTelemetry};
use crate::http::correlation::{ScopeSettings, Service};
use crate::http::error::{ApiError, Code};
use crate::http::long_poll::LongPolls;
use crate::http::request_rates::EdgeMetrics;
use crate::http::websocket;
use crate::limits::connection_quota::ConnectionQuotas;
use crate::limits::rate_limit::RateLimiter;
use crate::notifications::Notifications;
use crate::notifications::delivery::NotificationSender;
use crate::outbound::alertmanager::Alertmanager;
use crate::outbound::log_store::LogStore;
use crate::outbound::maas::Maas;
use crate::outbound::node_probe::Probe;
use crate::payment_processor::Processor;
use crate::payment_processor::signature::WebhookSecrets;
use crate::terminal::Terminals;
use crate::tls::connections::Connections;
use crate::trust::current_keys::CurrentKeys;
use crate::trust::node_certificate::TrustDomain;
use crate::trust::recovery_nonce::Nonces;
use actors::Directory;
use actors::shell_dependencies::Environment;
use axum::extract::FromRef;
use axum::http::HeaderMap;
use chrono::TimeDelta;
use domain::MemberId;
use domain::money::Currency;
use domain::policy::{PolicyKey, Scopes};
use persistence::envelope_encryption::KeyRing;
use persistence::{Reads, Secrets, StoreError};
use std::sync::Arc;
use telemetry::Sampling;

/// Shared by all requests; cheap to clone.
#[derive(Clone)]
pub struct AppState(Arc<Parts>);

/// See [`AppState`].
pub struct Parts {
    /// This process, as a member of the cluster.
    pub member: MemberId,
    pub directory: Directory,
    pub reads: Reads,
    pub environment: Arc<dyn Environment>,
    pub runtime: Arc<dyn Runtime>,
    pub authenticator: Arc<Authenticator>,
    pub limiter: RateLimiter,
    /// Opens the forced refresh of the provider's keys; without it that route is not there.
    pub jwks_refresh_token: Option<InternalToken>,
    pub probe: Probe,
    pub polls: LongPolls,
    /// The ends of terminal sessions that are in this process.
    pub terminals: Terminals,
    /// The subscribers of notifications on this replica.
    pub notifications: Notifications,
    /// Sends webhooks and e-mails.
    pub delivery: NotificationSender,
    /// The quotas of long-lived connections.
    pub connection_quotas: ConnectionQuotas,
    pub connections: Connections,
    pub metrics: EdgeMetrics,
    /// How many of the traces that begin here are sampled.
    pub sampling: Sampling,
    pub trust: Trust,
    /// Lets the operator's tools read this process's stats; without it there is no such route.
    pub stats_token: Option<InternalToken>,
    pub platform_roles: PlatformRoleCounters,
    pub addresses: Addresses,
    /// The payment processor; `None` where none is configured.
    pub payments: Option<Payments>,
    /// The agent's package, as far as it is configured.
    pub agent_package: AgentPackage,
    /// Stores the logs of nodes; `None` where none is configured.
    pub log_store: Option<LogStore>,
    /// Holds the alerts of the monitoring; `None` where none is configured.
    pub alertmanager: Option<Alertmanager>,
    /// The identity provider, as it logs people in to the web console; `None` where that is not configured.
    pub console_provider: Option<Arc<OpenIdProvider>>,
    /// The bare-metal provider; `None` where none is configured.
    pub maas: Option<Arc<Maas>>,
    /// The load of the nodes whose heartbeats this process receives.
    pub fleet: FleetTelemetry,
    /// SKU and region of all nodes.
    pub fleet_directory: FleetDirectory,
    /// Cancelled when this process stops: long waits end then.
    pub stopping: tokio_util::sync::CancellationToken,
}

/// The keys that this process issues and signs with.
pub struct Trust {
    pub domain: TrustDomain,
    /// Signs tasks, certifies nodes and verifies node certificates; replaced when keys are rotated.
    pub keys: CurrentKeys,
    /// Stores the private keys that are made.
    pub secrets: Secrets,
    /// The first keys of a bundle, where they are configured; else the active one.
    pub bootstrap_verifier_keys: Vec<String>,
    /// The authority by which agents trust the API's certificate, PEM.
    pub api_ca_pem: String,
    /// Makes and verifies the nonces of recoveries.
    pub nonces: Nonces,
    /// Seals the parts of a request that must not be readable at rest.
    pub at_rest: Arc<KeyRing>,
}

/// Where the control plane is reached.
pub struct Addresses {
    pub public_url: String,
    pub node_url: String,
    /// Where users' terminals connect; `wss://`.
    pub terminal_url: String,
    /// Origins that may open terminals, besides that of the public URL.
    pub terminal_origins: Vec<String>,
}

/// The payment processor, and the settings for its users' browsers.
pub struct Payments {
    pub processor: Arc<dyn Processor>,
    /// The secrets that verify webhooks.
    pub webhook_secrets: WebhookSecrets,
    /// In which accounts are opened by their first payment.
    pub currency: Currency,
    /// The settings of our own payment page, where it is used.
    pub page: Option<PaymentPage>,
}

/// What a browser needs to pay on our page.
#[derive(Clone, Debug)]
pub struct PaymentPage {
    /// Names this service's account at the processor; no secret.
    pub publishable_key: String,
    /// The processor's script.
    pub script_url: String,
    /// The origin that the script connects to.
    pub api_origin: String,
}

impl Addresses {
    /// Refuses a WebSocket that a page of a foreign origin opens.
    pub(crate) fn check_origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        websocket::check_origin(&self.public_url, &self.terminal_origins, headers)
    }
}

impl Trust {
    /// The verifier keys of a bundle.
    #[must_use]
    pub fn bundled_verifier_keys(&self) -> String {
        if self.bootstrap_verifier_keys.is_empty() {
            self.keys.load().task.bundled()
        } else {
            self.bootstrap_verifier_keys.join(",")
        }
    }
}

impl AppState {
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }
}

impl Parts {
    /// The settings of the outermost layer of a router.
    #[must_use]
    pub fn scope_settings(&self, service: Service) -> ScopeSettings {
        ScopeSettings { service, metrics: self.metrics.for_service(service.name), sampling: self.sampling }
    }

    /// Issues and verifies the tokens with which nodes push their logs.
    #[must_use]
    pub fn node_log_tokens(&self) -> NodeLogTokens {
        let gateway = format!("{}{GATEWAY_PATH}", self.addresses.node_url.trim_end_matches('/'));
        NodeLogTokens::new(&self.addresses.public_url, &gateway, self.trust.keys.clone())
    }

    /// The load of all nodes by SKU and region, from the memory of the members.
    ///
    /// # Errors
    /// [`StoreError`], where the nodes must be read and cannot be.
    pub async fn fleet_report(&self) -> Result<FleetReport, StoreError> {
        let now = self.environment.now();
        let nodes = self.fleet_directory.nodes(now).await?;
        let samples = self.runtime.fleet().await;
        // The state machine of a node asks for a heartbeat in each third of this time.
        let silent_after = self.environment.policy().int(PolicyKey::NodeOfflineAfter, &Scopes::global(), now);
        Ok(fleet_telemetry::report(&nodes, &samples, now, TimeDelta::seconds(silent_after)))
    }

    /// # Errors
    /// `service_unavailable` where no login to the web console is configured.
    pub fn console_provider(&self) -> Result<&OpenIdProvider, ApiError> {
        self.console_provider.as_deref().ok_or_else(|| {
            let message = "No login to the web console is configured; the operator sets SVC_OIDC_CONSOLE_CLIENT_ID (see the book, \
                           operator/console-login.md).";
            ApiError::new(Code::ServiceUnavailable, message).expected()
        })
    }

    /// # Errors
    /// `service_unavailable` where no payment processor is configured.
    pub fn payments(&self) -> Result<&Payments, ApiError> {
        self.payments.as_ref().ok_or_else(|| {
            let message = "No payment processor is configured; the operator sets SVC_PAYMENTS_SECRET_KEY and \
                           SVC_PAYMENTS_WEBHOOK_SECRETS (see the book, operator/payments.md).";
            ApiError::new(Code::ServiceUnavailable, message).expected()
        })
    }
}

impl std::ops::Deref for AppState {
    type Target = Parts;
    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl FromRef<AppState> for Arc<Authenticator> {
    fn from_ref(app: &AppState) -> Self {
        Self::clone(&app.authenticator)
    }
}

impl FromRef<AppState> for CurrentKeys {
    fn from_ref(app: &AppState) -> Self {
        app.trust.keys.clone()
    }
}

impl FromRef<AppState> for TrustDomain {
    fn from_ref(app: &AppState) -> Self {
        app.trust.domain.clone()
    }
}
