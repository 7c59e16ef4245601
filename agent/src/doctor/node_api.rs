//! The control plane, as the agent reaches it: TLS with the node's certificate, and the clock. No request of the node API is made, since each
//! of them changes something.

use super::variable;
use crate::config::{AgentConfig, Flags};
use crate::identity::IdentityStore;
use crate::node_api_client::{NodeApiClient, NodeApiError};
use crate::server_clock::ServerClock;
use chrono::{DateTime, TimeDelta, Utc};
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::diagnosis::DiagnosticFinding;

/// As the control plane warns of its members' clocks. `Date` is in whole seconds.
const MAX_OFFSET: TimeDelta = TimeDelta::seconds(2);
const PRECISION: TimeDelta = TimeDelta::seconds(1);

pub(super) async fn examine(flags: Arc<Flags>) -> Vec<DiagnosticFinding> {
    let Ok(config) = AgentConfig::peek(&flags, variable) else {
        return vec![DiagnosticFinding::warning("not asked: the settings are incomplete", "correct them first")];
    };
    let clock = ServerClock::peek(&config.state_dir, config.node_id);
    let identity = IdentityStore::new(&config).peek().ok().flatten();
    let identity = identity.filter(|identity| identity.is_in_force(clock.now()));
    let client = match &identity {
        Some(identity) => NodeApiClient::with_identity(&config, identity, &clock),
        None => NodeApiClient::anonymous(&config, &clock),
    };
    let client = match client {
        Ok(client) => client,
        Err(error) => {
            return vec![DiagnosticFinding::error(crate::chain(&error), "install the bootstrap bundle again")];
        }
    };
    let sent = Instant::now();
    let answered = client.server_time().await;
    let shown =
        if identity.is_some() { "the node's certificate" } else { "no certificate, since the node is not enrolled" };
    match answered {
        Ok(time) => {
            let mut findings = vec![DiagnosticFinding::ok(format!("{} answers; shown was {shown}", config.api_url))];
            findings.extend(time.map(|time| judge_clock(time, Utc::now(), sent.elapsed())));
            findings
        }
        Err(error) => vec![judge_error(&config.api_url, &error)],
    }
}

fn judge_error(url: &str, error: &NodeApiError) -> DiagnosticFinding {
    let summary = format!("{url}: {}", crate::chain(error));
    let action = match error {
        NodeApiError::Untrusted(_) => {
            "compare SVC_CA_BUNDLE_FINGERPRINT with the control plane's; install the current bootstrap bundle"
        }
        NodeApiError::CertificateTime { .. } => {
            "set this machine's clock by a time service (chrony or systemd-timesyncd), if it is wrong; otherwise replace the control \
             plane's certificate"
        }
        NodeApiError::CertificateRefused(_) => {
            "ask an administrator whether the node was removed, and to reissue its enrollment otherwise"
        }
        NodeApiError::Unreachable(_) | NodeApiError::Refused { .. } | NodeApiError::Unreadable { .. } => {
            "check SVC_API_URL, the name server, the firewall and the proxies between; `gpuaas doctor` looks at the other side"
        }
    };
    DiagnosticFinding::error(summary, action)
}

/// `server` was read at some time in the round trip.
fn judge_clock(server: DateTime<Utc>, local: DateTime<Utc>, round_trip: Duration) -> DiagnosticFinding {
    let within = TimeDelta::from_std(round_trip).unwrap_or_default() + PRECISION;
    let ahead = local - server;
    let seconds = ahead.as_seconds_f64();
    if ahead.abs() - within > MAX_OFFSET {
        let direction = if seconds > 0.0 { "ahead of" } else { "behind" };
        return DiagnosticFinding::error(
            format!("this machine's clock is {:.0} s {direction} that of the control plane", seconds.abs()),
            "run a time service (chrony or systemd-timesyncd); the agent goes by the control plane's time meanwhile, other programs do not",
        );
    }
    DiagnosticFinding::ok(format!(
        "this machine's clock is {seconds:+.0} s off that of the control plane (± {:.1} s)",
        within.as_seconds_f64()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::diagnosis::DiagnosticLevel;

    #[test]
    fn clock_that_is_certainly_off_is_an_error() {
        let server = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        let judge = |seconds, round_trip| {
            judge_clock(server, server + TimeDelta::seconds(seconds), Duration::from_secs(round_trip))
        };
        assert_eq!(judge(3, 0).level, DiagnosticLevel::Ok, "the header has whole seconds");
        assert!(judge(60, 0).summary.contains("60 s ahead of"));
        assert!(judge(-60, 0).summary.contains("60 s behind"));
        assert_eq!(judge(60, 59).level, DiagnosticLevel::Ok, "a slow answer proves nothing");
    }
}
