//! The service itself: whether it answers on its operators' address that it is ready, and whether its unit does what it was enabled for.

use super::LOCAL;
use crate::as_the_service::is_booted_by_systemd;
use crate::config::OPERATIONS_LISTEN;
use crate::config::installed_settings::InstalledSettings;
use reqwest::{Client, StatusCode, redirect};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use telemetry::diagnosis::DiagnosticFinding;
use tokio::process::Command;

const UNIT: &str = "gpuaas.service";
const PROPERTIES: &str = "--property=LoadState,ActiveState,SubState,UnitFileState,Result,ExecMainStatus";
/// An answer of `readyz` has a few checks.
const MOST_BYTES: usize = 64 * 1024;

/// What the operators' address answers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ServiceAnswer {
    Ready,
    /// The checks that fail.
    NotReady(String),
    /// An answer that is none of this service's.
    Foreign(String),
    /// Why there is no answer.
    Silent(String),
}

/// The service's unit, where systemd has loaded it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct UnitState {
    active: String,
    sub: String,
    is_enabled: bool,
    /// Why it has failed, and its exit status.
    result: String,
    status: String,
}

pub(super) async fn examine(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let address = match settings.operations_address() {
        Ok(address) => address,
        Err(why) => {
            let action =
                format!("set {} to an address with a port, such as {}", OPERATIONS_LISTEN.0, OPERATIONS_LISTEN.1);
            return vec![DiagnosticFinding::error(why, action)];
        }
    };
    let (answer, unit) = tokio::join!(ask(address), async {
        // With other settings than the unit's it is another service that is looked at.
        match settings.is_of_the_unit() && is_booted_by_systemd() {
            true => unit_state().await,
            false => None,
        }
    });
    vec![judge(address, &answer, unit.as_ref())]
}

async fn ask(address: SocketAddr) -> ServiceAnswer {
    match readiness(address).await {
        Ok(answer) => answer,
        Err(error) => ServiceAnswer::Silent(format!("{:#}", anyhow::Error::from(error.without_url()))),
    }
}

async fn readiness(address: SocketAddr) -> Result<ServiceAnswer, reqwest::Error> {
    let client = Client::builder().redirect(redirect::Policy::none()).timeout(LOCAL).no_proxy().build()?;
    let mut response = client.get(format!("http://{address}/api/v1/readyz")).send().await?;
    let (status, mut body) = (response.status(), Vec::new());
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() > MOST_BYTES {
            break;
        }
    }
    Ok(read(status, &strict_json::from_slice(&body).unwrap_or_default()))
}

fn read(status: StatusCode, body: &Value) -> ServiceAnswer {
    let error = &body["error"];
    match status {
        StatusCode::OK if body["ready"] == true => ServiceAnswer::Ready,
        StatusCode::SERVICE_UNAVAILABLE if error.is_object() => {
            let checks = error["details"]["checks"].as_object();
            let failing = checks.into_iter().flatten().filter(|(_, check)| *check != "ok");
            let failing: Vec<_> =
                failing.map(|(name, check)| format!("{name}: {}", check.as_str().unwrap_or_default())).collect();
            let message = || error["message"].as_str().unwrap_or_default().to_owned();
            ServiceAnswer::NotReady(if failing.is_empty() { message() } else { failing.join(", ") })
        }
        _ => ServiceAnswer::Foreign(status.to_string()),
    }
}

/// `None` where there is no such unit, or systemd does not answer.
async fn unit_state() -> Option<UnitState> {
    let mut command = Command::new("systemctl");
    command.args(["show", UNIT, PROPERTIES]).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LOCAL, command.output()).await.ok()?.ok()?;
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(shown: &str) -> Option<UnitState> {
    let properties: BTreeMap<_, _> = shown.lines().filter_map(|line| line.split_once('=')).collect();
    let property = |name: &str| properties.get(name).copied().unwrap_or_default().to_owned();
    (property("LoadState") == "loaded").then(|| UnitState {
        active: property("ActiveState"),
        sub: property("SubState"),
        is_enabled: property("UnitFileState").starts_with("enabled"),
        result: property("Result"),
        status: property("ExecMainStatus"),
    })
}

fn judge(address: SocketAddr, answer: &ServiceAnswer, unit: Option<&UnitState>) -> DiagnosticFinding {
    const JOURNAL: &str = "look at `journalctl -u gpuaas` and at the other findings";
    let state = unit.map_or("", |unit| unit.active.as_str());
    match answer {
        ServiceAnswer::Ready if matches!(state, "inactive" | "failed") => DiagnosticFinding::warning(
            format!("the service at {address} is ready, and it is not that of {UNIT}, which is {state}"),
            format!("end the other process, and start the unit: systemctl restart {UNIT}"),
        ),
        ServiceAnswer::Ready => DiagnosticFinding::ok(format!("the service at {address} is ready")),
        ServiceAnswer::NotReady(why) if matches!(state, "activating" | "deactivating") => DiagnosticFinding::warning(
            format!("{UNIT} is {state}, and not ready: {why}"),
            "run this command again in a minute",
        ),
        ServiceAnswer::NotReady(why) => {
            DiagnosticFinding::error(format!("the service at {address} runs and is not ready: {why}"), JOURNAL)
        }
        ServiceAnswer::Foreign(status) => DiagnosticFinding::error(
            format!("{address} answers readyz with {status}, which this service does not"),
            format!("stop the program that has this port, or set {} to another address", OPERATIONS_LISTEN.0),
        ),
        ServiceAnswer::Silent(why) => match unit {
            Some(unit) => judge_silent_unit(address, why, unit),
            None => DiagnosticFinding::ok(format!("the service does not run here (no answer at {address})")),
        },
    }
}

fn judge_silent_unit(address: SocketAddr, why: &str, unit: &UnitState) -> DiagnosticFinding {
    let UnitState { active, sub, is_enabled, result, status } = unit;
    match active.as_str() {
        "failed" => DiagnosticFinding::error(
            format!("{UNIT} has failed: {result}, exit status {status}"),
            format!("`journalctl -u gpuaas` says why; correct it, then: systemctl restart {UNIT}"),
        ),
        "activating" if sub == "auto-restart" => DiagnosticFinding::error(
            format!("{UNIT} ends and is started again: {result}, exit status {status}"),
            "`journalctl -u gpuaas` says why",
        ),
        "activating" | "deactivating" | "reloading" => {
            DiagnosticFinding::warning(format!("{UNIT} is {active}"), "run this command again in a minute")
        }
        "active" => DiagnosticFinding::error(
            format!("{UNIT} runs, and nothing answers at {address}: {why}"),
            format!(
                "where {} was changed since its start, restart the unit; otherwise look at `journalctl -u gpuaas`",
                OPERATIONS_LISTEN.0
            ),
        ),
        _ if *is_enabled => DiagnosticFinding::warning(
            format!("{UNIT} is enabled and does not run"),
            format!("systemctl start {UNIT}, or systemctl disable {UNIT} where this machine is to have no replica"),
        ),
        _ => DiagnosticFinding::ok(format!("{UNIT} is not enabled and does not run")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use telemetry::diagnosis::DiagnosticLevel::{Error, Ok, Warning};

    fn unit(active: &str, sub: &str, is_enabled: bool) -> UnitState {
        let text = |text: &str| text.to_owned();
        UnitState { active: text(active), sub: text(sub), is_enabled, result: text("exit-code"), status: text("78") }
    }

    #[test]
    fn service_that_is_dead_or_not_ready_is_no_ok() {
        let address: SocketAddr = "127.0.0.1:9464".parse().unwrap();
        let silent = || ServiceAnswer::Silent("connection refused".to_owned());
        let not_ready = || ServiceAnswer::NotReady("nats: disconnected".to_owned());
        for (answer, unit, level, named) in [
            (ServiceAnswer::Ready, None, Ok, "is ready"),
            (ServiceAnswer::Ready, Some(unit("active", "running", true)), Ok, "is ready"),
            (ServiceAnswer::Ready, Some(unit("failed", "failed", true)), Warning, "not that of gpuaas.service"),
            (not_ready(), None, Error, "nats: disconnected"),
            (not_ready(), Some(unit("active", "running", true)), Error, "nats: disconnected"),
            (not_ready(), Some(unit("activating", "start", true)), Warning, "nats: disconnected"),
            (ServiceAnswer::Foreign("404 Not Found".to_owned()), None, Error, "404"),
            (silent(), None, Ok, "does not run here"),
            (silent(), Some(unit("inactive", "dead", false)), Ok, "not enabled"),
            (silent(), Some(unit("inactive", "dead", true)), Warning, "enabled and does not run"),
            (silent(), Some(unit("failed", "failed", true)), Error, "exit status 78"),
            (silent(), Some(unit("failed", "failed", false)), Error, "exit status 78"),
            (silent(), Some(unit("activating", "auto-restart", true)), Error, "started again"),
            (silent(), Some(unit("activating", "start", true)), Warning, "activating"),
            (silent(), Some(unit("active", "running", true)), Error, "connection refused"),
        ] {
            let found = judge(address, &answer, unit.as_ref());
            assert!(found.level == level && found.summary.contains(named), "{answer:?} {unit:?}: {found:?}");
        }
    }

    #[test]
    fn answer_of_readyz_is_read_with_the_checks_that_fail() {
        assert_eq!(read(StatusCode::OK, &json!({ "ready": true })), ServiceAnswer::Ready);
        let checks =
            json!({ "error": { "message": "m", "details": { "checks": { "nats": "down", "postgres": "ok" } } } });
        let unavailable = |body| read(StatusCode::SERVICE_UNAVAILABLE, &body);
        assert_eq!(unavailable(checks), ServiceAnswer::NotReady("nats: down".to_owned()));
        let stopping = json!({ "error": { "message": "This process is stopping." } });
        assert_eq!(unavailable(stopping), ServiceAnswer::NotReady("This process is stopping.".to_owned()));
        assert!(matches!(unavailable(Value::Null), ServiceAnswer::Foreign(_)), "a proxy's answer");
        assert!(matches!(read(StatusCode::OK, &Value::Null), ServiceAnswer::Foreign(_)));
    }

    #[test]
    fn unit_that_systemd_does_not_know_is_none() {
        assert_eq!(parse("LoadState=not-found\nActiveState=inactive\n"), None);
        assert_eq!(parse(""), None);
        let shown = "Result=exit-code\nExecMainStatus=78\nLoadState=loaded\nActiveState=failed\nSubState=failed\nUnitFileState=enabled-runtime\n";
        assert_eq!(parse(shown), Some(unit("failed", "failed", true)));
    }
}
