//! The services outside that the settings name: the identity provider, the payment processor, the mail server, the bare-metal provider and
//! the log store. Nothing is changed at any of them.

use crate::config::installed_settings::InstalledSettings;
use edge::auth::jwks::{Jwks, JwksError, JwksSettings};
use std::sync::Arc;
use std::time::Duration;
use telemetry::diagnosis::DiagnosticFinding;

/// No payment has this id at any processor.
const NO_PAYMENT: &str = "pi_gpuaas_doctor";
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

fn read(path: Option<&std::path::PathBuf>) -> Option<String> {
    std::fs::read_to_string(path?).ok()
}

pub(super) async fn identity_provider(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(issuer) = settings.get("SVC_OIDC_ISSUER") else {
        return vec![DiagnosticFinding::error("SVC_OIDC_ISSUER is not set", "set it; see The identity provider")];
    };
    let keys = match provider_keys(&settings, &issuer) {
        Ok(jwks) => jwks.refresh().await.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    vec![judge_keys(&issuer, keys)]
}

/// The keys of the identity provider, not fetched yet.
///
/// # Errors
/// Where the issuer or its authorities cannot be used.
pub(super) fn provider_keys(settings: &InstalledSettings, issuer: &str) -> Result<Jwks, JwksError> {
    let authorities_pem = read(settings.outside_services().identity.ca.as_ref());
    Jwks::new(JwksSettings { authorities_pem, timeout: REQUEST_TIMEOUT, ..JwksSettings::new(issuer) })
}

fn judge_keys(issuer: &str, keys: Result<usize, String>) -> DiagnosticFinding {
    match keys {
        Ok(count) => DiagnosticFinding::ok(format!("{issuer} publishes {count} keys")),
        Err(why) => DiagnosticFinding::error(
            format!("the identity provider's keys cannot be read: {why}"),
            "SVC_OIDC_ISSUER must be the issuer exactly as the discovery document names it; check it, SVC_OIDC_CA_PATH and the network. \
             Without keys no user is admitted",
        ),
    }
}

pub(super) async fn payment_processor(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(config) = settings.outside_services().payments else {
        return vec![not_configured("payment processor", "SVC_PAYMENTS_SECRET_KEY")];
    };
    let asked = match config.open() {
        Ok(payments) => payments.processor.payment(NO_PAYMENT).await.map(drop).map_err(|error| error.to_string()),
        Err(error) => Err(format!("{error:#}")),
    };
    vec![judge_answer(
        "the payment processor",
        &config.api_base,
        asked,
        "check SVC_PAYMENTS_SECRET_KEY, SVC_PAYMENTS_API_BASE and SVC_PAYMENTS_CA_PATH, and the processor's status page",
    )]
}

pub(super) async fn mail_server(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(config) = settings.outside_services().mail else {
        return vec![not_configured("mail server", "SVC_SMTP_URL")];
    };
    let asked = match config.open() {
        Ok(mailer) => mailer.check_connection().await.map_err(|error| error.to_string()),
        Err(error) => Err(format!("{error:#}")),
    };
    let action = "check host, port, user and password in SVC_SMTP_URL, and SVC_NOTIFICATION_CA_PATH; notifications wait until it answers";
    vec![judge_answer("the mail server", &config.from, asked, action)]
}

pub(super) async fn bare_metal_provider(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(config) = settings.outside_services().maas else {
        return vec![not_configured("bare-metal provider", "MAAS_API_BASE_URL")];
    };
    let asked = match config.open() {
        Ok(maas) => maas.user().await.map(drop).map_err(|error| error.to_string()),
        Err(error) => Err(format!("{error:#}")),
    };
    let at = settings.get("MAAS_API_BASE_URL").unwrap_or_default();
    vec![judge_answer(
        "the bare-metal provider",
        &at,
        asked,
        "check MAAS_API_BASE_URL, MAAS_API_TOKEN and MAAS_API_CA_PATH",
    )]
}

/// It is sent a batch without a stream, of which it stores nothing.
pub(super) async fn log_store(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(config) = settings.outside_services().log_store else {
        return vec![not_configured("log store", "SVC_LOG_STORE_URL")];
    };
    let asked = match config.open() {
        Ok(store) => store.check().await,
        Err(error) => Err(format!("{error:#}")),
    };
    let action =
        "check SVC_LOG_STORE_URL, SVC_LOG_STORE_CA_PATH, its tenant and its credentials, and that the store runs";
    vec![judge_answer("the log store", &config.url, asked, action)]
}

pub(super) async fn alertmanager(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(config) = settings.outside_services().alertmanager else {
        return vec![not_configured("Alertmanager", "SVC_ALERTMANAGER_URL")];
    };
    let asked = match config.open() {
        Ok(alertmanager) => alertmanager.alerts().await.map(drop).map_err(|error| error.to_string()),
        Err(error) => Err(format!("{error:#}")),
    };
    let action =
        "check SVC_ALERTMANAGER_URL, SVC_ALERTMANAGER_CA_PATH, its tenant and its credentials, and that it runs";
    vec![judge_answer("the Alertmanager", &config.url, asked, action)]
}

fn not_configured(what: &str, variable: &str) -> DiagnosticFinding {
    DiagnosticFinding::ok(format!("no {what} is configured ({variable})"))
}

/// The service runs without them, and retries.
fn judge_answer(what: &str, at: &str, asked: Result<(), String>, action: &str) -> DiagnosticFinding {
    match asked {
        Ok(()) => DiagnosticFinding::ok(format!("{what} answers ({at})")),
        Err(why) => DiagnosticFinding::error(format!("{what} ({at}) does not answer as it should: {why}"), action),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::diagnosis::DiagnosticLevel;

    #[test]
    fn provider_without_keys_is_an_error_that_names_the_setting() {
        assert_eq!(judge_keys("https://idp.example", Ok(2)).level, DiagnosticLevel::Ok);
        let foreign = judge_keys("https://idp.example", Err("the discovery document is of issuer x".to_owned()));
        assert_eq!(foreign.level, DiagnosticLevel::Error);
        assert!(foreign.action.unwrap().contains("SVC_OIDC_ISSUER"));
    }

    #[test]
    fn service_that_does_not_answer_is_named_with_its_address() {
        let down = judge_answer("the mail server", "mail.example", Err("refused".to_owned()), "check SVC_SMTP_URL");
        assert_eq!(
            down,
            DiagnosticFinding::error(
                "the mail server (mail.example) does not answer as it should: refused",
                "check SVC_SMTP_URL"
            )
        );
    }
}
