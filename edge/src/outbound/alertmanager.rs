//! The client of an Alertmanager: the alerts that it holds, by its API v2.

use crate::outbound::http_client::{client_builder, error_chain, is_tls_failure, is_web_page, read_bounded_body};
use crate::outbound::service_access::{ServiceAccess, ServiceAccessError};
use chrono::{DateTime, Utc};
use reqwest::{Client, StatusCode, Url};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;
use thiserror::Error;
use wire::address::{AddressError, ServiceUrl};

/// The path of the list, below the address of the Alertmanager.
const ALERTS_PATH: &str = "/api/v2/alerts";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// An alert has about 1 KB.
const ANSWER_BYTES: usize = 8 << 20;

/// Why the client could not be built.
#[derive(Debug, Error)]
pub enum AlertmanagerSettingsError {
    #[error("{0}")]
    Address(AddressError),
    #[error(transparent)]
    Access(#[from] ServiceAccessError),
    #[error("the client for the Alertmanager cannot be made: {0}")]
    Client(String),
}

/// Why the alerts could not be read.
#[derive(Debug, Error)]
pub enum AlertmanagerError {
    #[error("the Alertmanager does not answer: {0}")]
    Failed(String),
    #[error(
        "the Alertmanager refuses this service ({0}); correct SVC_ALERTMANAGER_TENANT, SVC_ALERTMANAGER_USER with its password, or \
         SVC_ALERTMANAGER_TOKEN"
    )]
    Unauthorized(StatusCode),
    #[error("there is no Alertmanager at the address: {0}; correct SVC_ALERTMANAGER_URL or SVC_ALERTMANAGER_CA_PATH")]
    WrongAddress(String),
    #[error("the Alertmanager answered {0}")]
    Refused(StatusCode),
    #[error("the answer of the Alertmanager is no list of alerts: {0}")]
    Unreadable(String),
}

/// An Alertmanager. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Alertmanager {
    alerts: Url,
    client: Client,
}

/// An alert that fires, also one that is silent.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HeldAlert {
    /// The same for the same labels.
    pub fingerprint: String,
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    pub starts_at: DateTime<Utc>,
    pub status: HeldAlertStatus,
}

/// By what an alert is kept silent.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HeldAlertStatus {
    pub silenced_by: Vec<String>,
    pub inhibited_by: Vec<String>,
}

impl Alertmanager {
    /// `base` is its address, without the path of the API; `authorities_pem` are trusted beside the system's.
    ///
    /// # Errors
    /// Where the address is none of a service or has the path of the API, the access cannot be carried, or the authorities cannot be read.
    pub fn new(
        base: &str,
        authorities_pem: Option<&str>,
        access: &ServiceAccess,
    ) -> Result<Self, AlertmanagerSettingsError> {
        let base = ServiceUrl::parse(base).map_err(AlertmanagerSettingsError::Address)?;
        if base.as_str().contains("/api/") || base.as_str().ends_with("/api") {
            let why = "has the path of the API, which is added to it; leave /api out";
            return Err(AlertmanagerSettingsError::Address(base.refuse(why)));
        }
        let alerts = Url::parse(&format!("{}{ALERTS_PATH}", base.as_str()));
        let alerts = alerts.map_err(|error| AlertmanagerSettingsError::Client(error.to_string()))?;
        let client = client_builder(authorities_pem).map_err(AlertmanagerSettingsError::Client)?;
        let client =
            client.timeout(REQUEST_TIMEOUT).connect_timeout(CONNECT_TIMEOUT).default_headers(access.headers()?);
        let client = client.build().map_err(|error| AlertmanagerSettingsError::Client(error.to_string()))?;
        Ok(Self { alerts, client })
    }

    /// All alerts that it holds, in its own order.
    ///
    /// # Errors
    /// Where it does not answer in time, refuses, or answers with something else or with more than 8 MiB.
    pub async fn alerts(&self) -> Result<Vec<HeldAlert>, AlertmanagerError> {
        let response = self.client.get(self.alerts.clone()).send().await;
        let response = response.map_err(|error| match is_tls_failure(&error) {
            true => AlertmanagerError::WrongAddress(error_chain(error)),
            false => AlertmanagerError::Failed(error_chain(error)),
        })?;
        let (status, is_page) = (response.status(), is_web_page(response.headers()));
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(AlertmanagerError::Unauthorized(status)),
            status if status.is_success() && is_page => {
                return Err(AlertmanagerError::WrongAddress("it answers with a web page".to_owned()));
            }
            status if status.is_redirection() || status == StatusCode::NOT_FOUND => {
                return Err(AlertmanagerError::WrongAddress(format!("it answered {status}")));
            }
            status if !status.is_success() => return Err(AlertmanagerError::Refused(status)),
            _ => {}
        }
        let body = read_bounded_body(response, ANSWER_BYTES).await.map_err(AlertmanagerError::Unreadable)?;
        strict_json::from_slice(&body).map_err(|error| AlertmanagerError::Unreadable(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wiremock::{Mock, MockServer, ResponseTemplate, matchers::method};

    fn client(base: &str) -> Result<Alertmanager, AlertmanagerSettingsError> {
        crate::testing::install_crypto();
        Alertmanager::new(base, None, &ServiceAccess::default())
    }

    #[test]
    fn address_is_https_or_local_and_has_neither_the_api_path_nor_a_password() {
        for good in ["https://alerts.example", "https://alerts.example/alertmanager/", "http://127.0.0.1:9093"] {
            client(good).unwrap();
        }
        for (address, named) in [
            ("http://alerts.example", "https"),
            ("alerts.example:9093", "https"),
            ("", "https"),
            ("https://alerts.example/api/v2", "leave /api out"),
            ("https://alerts.example/?tenant=a", "query"),
            ("https://ops:secret@alerts.example", "password"),
        ] {
            let error = client(address).unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains("secret"), "{address}: {error}");
        }
    }

    #[tokio::test]
    async fn refusal_wrong_address_and_outage_name_different_steps() {
        let page = ResponseTemplate::new(200).set_body_raw("<html>", "text/html");
        for (answer, named) in [
            (ResponseTemplate::new(401).set_body_string("no org id"), "SVC_ALERTMANAGER_TENANT"),
            (ResponseTemplate::new(403), "SVC_ALERTMANAGER_TOKEN"),
            (ResponseTemplate::new(404), "SVC_ALERTMANAGER_URL"),
            (ResponseTemplate::new(302), "SVC_ALERTMANAGER_URL"),
            (page, "SVC_ALERTMANAGER_URL"),
            (ResponseTemplate::new(503), "answered 503"),
        ] {
            let server = MockServer::start().await;
            Mock::given(method("GET")).respond_with(answer).mount(&server).await;
            let error = client(&server.uri()).unwrap().alerts().await.unwrap_err().to_string();
            assert!(error.contains(named), "{named}: {error}");
        }
    }
}
