//! Shared fixtures of this crate's tests.

pub(crate) mod postgres;

use axum::response::Response;
use serde_json::Value;

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
pub(crate) fn metrics() -> crate::http::metrics::EdgeMetrics {
    crate::http::metrics::EdgeMetrics::register(&prometheus::Registry::new()).unwrap()
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
    let webhooks = crate::notifications::delivery::webhook::Webhooks::new(
        crate::notifications::delivery::webhook::WebhookSettings::default(),
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
