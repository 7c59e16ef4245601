//! Shared fixtures of this crate's tests.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod test_runtime;

use crate::agent_package::AgentPackage;
use crate::app_state::{Addresses, Parts, Trust};
use crate::auth::Authenticator;
use crate::auth::platform_role_metrics::PlatformRoleCounters;
use crate::fleet_telemetry::{FleetDirectory, FleetTelemetry};
use crate::http::long_poll::LongPolls;
use crate::limits::connection_quota::ConnectionQuotas;
use crate::limits::rate_limit::RateLimiter;
use crate::outbound::node_probe::{Probe, ProbeTargets, SystemResolver};
use crate::tls::connections::Connections;
use crate::trust::current_keys::{CurrentKeys, Keys};
use crate::trust::node_certificate::TrustDomain;
use actors::shell_dependencies::Environment;
use axum::response::Response;
use persistence::{Reads, Secrets};
use prometheus::Registry;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use test_host::TestHost;
use tokio_util::sync::CancellationToken;

/// Reads a response's body, which must be JSON.
pub(crate) async fn body_json(response: Response) -> Value {
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    serde_json::from_slice(&bytes).unwrap_or_else(|_| panic!("not JSON: {}", String::from_utf8_lossy(&bytes)))
}

/// The outermost layer of a standalone router.
pub(crate) fn scope_settings(service: crate::http::correlation::Service) -> crate::http::correlation::ScopeSettings {
    let metrics = metrics().for_service(service.name);
    crate::http::correlation::ScopeSettings { service, metrics, sampling: telemetry::Sampling::NEVER }
}

/// Metrics in a registry of their own.
pub(crate) fn metrics() -> crate::http::request_rates::EdgeMetrics {
    crate::http::request_rates::EdgeMetrics::register(&prometheus::Registry::new()).unwrap()
}

/// The terminals of a standalone replica.
pub(crate) fn terminals() -> crate::terminal::Terminals {
    let secret = secrecy::SecretSlice::from(vec![7; 32]);
    crate::terminal::Terminals::register(&prometheus::Registry::new(), None, secret).unwrap()
}

/// No subscribers, and no bus.
pub(crate) fn notifications() -> crate::notifications::Notifications {
    crate::notifications::Notifications::register(&prometheus::Registry::new(), None).unwrap()
}

/// Webhooks to the internet, and no mail server.
pub(crate) fn delivery() -> crate::notifications::delivery::NotificationSender {
    install_crypto();
    let webhooks = crate::notifications::delivery::outbound_webhook::Webhooks::new(
        crate::notifications::delivery::outbound_webhook::WebhookSettings::default(),
    );
    crate::notifications::delivery::NotificationSender {
        webhooks: webhooks.unwrap(),
        mailer: None,
        at_rest: key_ring(),
    }
}

/// A key ring of one key.
pub(crate) fn key_ring() -> std::sync::Arc<persistence::envelope_encryption::KeyRing> {
    let key = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    std::sync::Arc::new(persistence::envelope_encryption::KeyRing::parse(&format!("key a {key}\nactive a\n")).unwrap())
}

/// The one crypto provider, as `main` installs it.
pub(crate) fn install_crypto() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// The certificate of a server at `localhost`, of an authority of its own (PEM).
#[derive(Clone)]
pub(crate) struct LocalhostCertificate {
    pub(crate) chain: String,
    pub(crate) key: String,
    pub(crate) authority: String,
}

impl LocalhostCertificate {
    pub(crate) fn issue() -> Self {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        Self { chain: leaf.pem(), key: key.serialize_pem(), authority: authority.pem() }
    }
}

/// The services of a standalone replica over this host, without a payment processor and without internal tokens.
pub(crate) fn parts(host: &TestHost, reads: Reads, authenticator: Authenticator, trust: Trust) -> Parts {
    let directory = host.directory.clone();
    let fleet = FleetTelemetry::default();
    Parts {
        member: domain::MemberId(uuid::Uuid::from_u128(1)),
        runtime: Arc::new(test_runtime::TestRuntime { reads: reads.clone(), fleet: fleet.clone() }),
        fleet,
        fleet_directory: FleetDirectory::new(reads.clone()),
        delivery: delivery(),
        connection_quotas: ConnectionQuotas::new(directory.clone()),
        limiter: RateLimiter::register(directory.clone(), &Registry::new()).unwrap(),
        directory,
        reads,
        environment: Arc::clone(&host.environment) as Arc<dyn Environment>,
        authenticator: Arc::new(authenticator),
        jwks_refresh_token: None,
        probe: Probe::new(ProbeTargets::default(), Arc::new(SystemResolver), Duration::from_secs(1)),
        polls: LongPolls::default(),
        terminals: terminals(),
        notifications: notifications(),
        connections: Connections::default(),
        metrics: metrics(),
        sampling: telemetry::Sampling::NEVER,
        stats_token: None,
        platform_roles: PlatformRoleCounters::register(&Registry::new()).unwrap(),
        trust,
        addresses: Addresses {
            public_url: "https://api.gpu.example".into(),
            node_url: "https://nodes.gpu.example".into(),
            terminal_url: "wss://api.gpu.example/ws/v1/terminal".into(),
            terminal_origins: Vec::new(),
        },
        payments: None,
        agent_package: AgentPackage::default(),
        log_store: None,
        alertmanager: None,
        console_provider: None,
        maas: None,
        stopping: CancellationToken::new(),
    }
}

pub(crate) fn trust_domain() -> TrustDomain {
    TrustDomain::parse("gpu.example").unwrap()
}

/// Trust in these keys.
pub(crate) fn trust(keys: Keys, secrets: Secrets, api_ca_pem: String) -> Trust {
    Trust {
        domain: trust_domain(),
        keys: CurrentKeys::new(keys),
        secrets,
        bootstrap_verifier_keys: Vec::new(),
        api_ca_pem,
        nonces: crate::trust::recovery_nonce::Nonces::new(&secrecy::SecretSlice::from(vec![9; 32])).unwrap(),
        at_rest: key_ring(),
    }
}
