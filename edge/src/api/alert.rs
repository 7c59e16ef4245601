//! The alerts of the configured Alertmanager, for those who operate the service.

use axum::extract::State;
use axum::{Extension, Json};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;
use utoipa::ToSchema;

use super::cached_read::CachedRead;
use super::request_context::AdminRequest;
use crate::app_state::AppState;
use crate::http::error::{ApiError, Code};
use crate::outbound::alertmanager::{AlertmanagerError, HeldAlert};

/// How many alerts are listed.
const MAX_ALERTS: usize = 500;
/// How long a list is cached. The tabs of all operators read it, and each replica asks the Alertmanager at most this often.
const CACHE_TTL: Duration = Duration::from_secs(5);

/// The alerts at one moment.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct Alerts {
    /// When they were read.
    at: DateTime<Utc>,
    /// False where no Alertmanager is configured: whether something is wrong is unknown then.
    is_configured: bool,
    /// Those that are not silent first, of these the critical ones, then those that have fired the longest. At most 500.
    items: Vec<Alert>,
    /// How many there are.
    total: u64,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct Alert {
    /// The Alertmanager's fingerprint of the labels.
    id: String,
    name: String,
    /// By the rules of `deploy/alerts`: `critical`, `warning`, or `none` for the watchdog.
    severity: Option<String>,
    state: AlertState,
    /// Since when it has fired.
    since: DateTime<Utc>,
    summary: Option<String>,
    /// The runbook that says what to do.
    runbook_id: Option<String>,
    /// What the alert is about, without its name and severity.
    labels: BTreeMap<String, String>,
}

/// Whether an alert is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum AlertState {
    Firing,
    /// Silent while the alert fires that causes it.
    Inhibited,
    /// Silent by an operator's order.
    Silenced,
}

/// The cached list of this replica.
#[derive(Clone)]
pub(super) struct AlertCache(CachedRead<Alerts, AlertmanagerError>);

impl Default for AlertCache {
    fn default() -> Self {
        Self(CachedRead::with_ttl(CACHE_TTL))
    }
}

/// The alerts that fire, also those that are silent.
///
/// A list is at most 5 s old. Without an Alertmanager (`SVC_ALERTMANAGER_URL`) it is empty, and `is_configured` is false.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The alerts.", body = Alerts)))]
pub(super) async fn list(
    _: AdminRequest,
    State(app): State<AppState>,
    Extension(AlertCache(cached)): Extension<AlertCache>,
) -> Result<Json<Alerts>, ApiError> {
    let alerts = cached.get(read(&app)).await.map_err(|error| {
        let message = "The alerts could not be read from the Alertmanager; look at it, and at SVC_ALERTMANAGER_URL.";
        ApiError::new(Code::UpstreamError, message).because(error)
    })?;
    Ok(Json(alerts))
}

async fn read(app: &AppState) -> Result<Alerts, AlertmanagerError> {
    let at = app.environment.now();
    let held = match &app.alertmanager {
        Some(alertmanager) => alertmanager.alerts().await?,
        None => Vec::new(),
    };
    let total = held.len() as u64;
    let mut items: Vec<Alert> = held.into_iter().map(Alert::of).collect();
    items.sort_by(|one, other| one.order().cmp(&other.order()));
    items.truncate(MAX_ALERTS);
    Ok(Alerts { at, is_configured: app.alertmanager.is_some(), items, total })
}

impl Alert {
    fn of(mut held: HeldAlert) -> Self {
        let state = match held.status {
            status if !status.silenced_by.is_empty() => AlertState::Silenced,
            status if !status.inhibited_by.is_empty() => AlertState::Inhibited,
            _ => AlertState::Firing,
        };
        Self {
            id: held.fingerprint,
            name: held.labels.remove("alertname").unwrap_or_default(),
            severity: held.labels.remove("severity"),
            state,
            since: held.starts_at,
            summary: held.annotations.remove("summary"),
            runbook_id: held.annotations.remove("runbook_id"),
            labels: held.labels,
        }
    }

    fn order(&self) -> (AlertState, u8, DateTime<Utc>, &str) {
        let severity = match self.severity.as_deref() {
            Some("critical") => 0,
            Some("none") => 2,
            _ => 1,
        };
        (self.state, severity, self.since, &self.id)
    }
}
