//! The client of an Alertmanager: the alerts that it holds, by its API v2.

use crate::outbound::http_client::{client_builder, error_chain, is_secure, read_bounded_body};
use chrono::{DateTime, Utc};
use reqwest::{Client, Url};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;
use thiserror::Error;

/// The path of the list, below the address of the Alertmanager.
const ALERTS_PATH: &str = "/api/v2/alerts";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// An alert has about 1 KB.
const ANSWER_BYTES: usize = 8 << 20;

/// Why the client could not be built.
#[derive(Debug, Error)]
pub enum AlertmanagerSettingsError {
    #[error("{0} is no https address (http only on this machine)")]
    Insecure(String),
    #[error("{0} already has the path of the API, which is added to it; leave /api out")]
    HasApiPath(String),
    #[error("the address has a user or a password, which is not supported; put a proxy in between that adds them")]
    HasPassword,
    #[error("the client for the Alertmanager cannot be made: {0}")]
    Client(String),
}

/// Why the alerts could not be read.
#[derive(Debug, Error)]
pub enum AlertmanagerError {
    #[error("the Alertmanager does not answer: {0}")]
    Failed(String),
    #[error("the Alertmanager answered {0}")]
    Refused(reqwest::StatusCode),
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
    /// Where the address is not on HTTPS, has the path of the API or a password, or the authorities cannot be read.
    pub fn new(base: &str, authorities_pem: Option<&str>) -> Result<Self, AlertmanagerSettingsError> {
        let base = base.trim_end_matches('/');
        let alerts = Url::parse(&format!("{base}{ALERTS_PATH}")).ok();
        if alerts.as_ref().is_some_and(|url| !url.username().is_empty() || url.password().is_some()) {
            return Err(AlertmanagerSettingsError::HasPassword);
        }
        let shown = || base.chars().take(200).collect();
        let alerts = alerts.filter(|_| is_secure(base)).ok_or_else(|| AlertmanagerSettingsError::Insecure(shown()))?;
        if alerts.path().matches("/api").count() > 1 || alerts.query().is_some() || alerts.fragment().is_some() {
            return Err(AlertmanagerSettingsError::HasApiPath(shown()));
        }
        let client = client_builder(authorities_pem).map_err(AlertmanagerSettingsError::Client)?;
        let client = client.timeout(REQUEST_TIMEOUT).connect_timeout(CONNECT_TIMEOUT).build();
        let client = client.map_err(|error| AlertmanagerSettingsError::Client(error.to_string()))?;
        Ok(Self { alerts, client })
    }

    /// All alerts that it holds, in its own order.
    ///
    /// # Errors
    /// Where it does not answer in time, refuses, or answers with something else or with more than 8 MiB.
    pub async fn alerts(&self) -> Result<Vec<HeldAlert>, AlertmanagerError> {
        let response = self.client.get(self.alerts.clone()).send().await;
        let response = response.map_err(|error| AlertmanagerError::Failed(error_chain(error)))?;
        if !response.status().is_success() {
            return Err(AlertmanagerError::Refused(response.status()));
        }
        let body = read_bounded_body(response, ANSWER_BYTES).await.map_err(AlertmanagerError::Unreadable)?;
        serde_json::from_slice(&body).map_err(|error| AlertmanagerError::Unreadable(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_https_or_local_and_has_neither_the_api_path_nor_a_password() {
        for good in ["https://alerts.example", "https://alerts.example/alertmanager/", "http://127.0.0.1:9093"] {
            Alertmanager::new(good, None).unwrap();
        }
        for (address, named) in [
            ("http://alerts.example", "https"),
            ("alerts.example:9093", "https"),
            ("", "https"),
            ("https://alerts.example/api/v2", "leave /api out"),
            ("https://alerts.example/?tenant=a", "leave /api out"),
            ("https://ops:secret@alerts.example", "password"),
        ] {
            let error = Alertmanager::new(address, None).unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains("secret"), "{address}: {error}");
        }
    }
}
