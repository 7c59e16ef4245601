//! The service itself: whether it answers on its operators' address that it is ready, and whether its unit does what it was enabled for.

use super::LOCAL;
use crate::config::OPERATIONS_LISTEN;
use crate::config::installed_settings::InstalledSettings;
use crate::exit_status::{CONFIGURATION, UNAVAILABLE};
use reqwest::{Client, StatusCode, redirect};
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use telemetry::diagnosis::DiagnosticFinding;
use telemetry::diagnosis::unit::{UnitState, is_booted_by_systemd};
use tokio::process::Command;

const UNIT: &str = "gpuaas.service";
/// `EXIT_CREDENTIALS` of `systemd.exec(5)`: a file of `LoadCredential=` is not there.
const NO_CREDENTIALS: u8 = 243;
const JOURNAL: &str = "`journalctl -u gpuaas` says why";
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
            false => Ok(None),
        }
    });
    vec![match unit {
        Ok(unit) => judge(address, &answer, unit.as_ref()),
        Err(why) => judge_without_systemd(address, &answer, &why),
    }]
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

/// `None` where there is no such unit. The error says why systemd does not answer.
async fn unit_state() -> Result<Option<UnitState>, String> {
    let mut command = Command::new("systemctl");
    command.args(UnitState::arguments(UNIT)).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(LOCAL, command.output()).await {
        Ok(output) => output.map_err(|error| format!("systemctl cannot be run: {error}"))?,
        Err(_) => return Err(format!("systemctl did not end within {} s", LOCAL.as_secs())),
    };
    match output.status.success() {
        true => Ok(UnitState::parse(&String::from_utf8_lossy(&output.stdout))),
        false => Err(format!("systemctl: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// What answers is judged by its answer alone.
fn judge_without_systemd(address: SocketAddr, answer: &ServiceAnswer, why: &str) -> DiagnosticFinding {
    match answer {
        ServiceAnswer::Silent(silence) => DiagnosticFinding::error(
            format!("nothing answers at {address} ({silence}), and the state of {UNIT} is not known: {why}"),
            "run this command as root; where it is, look at `journalctl -b -p warning`, then reboot the machine",
        ),
        ServiceAnswer::Ready | ServiceAnswer::NotReady(_) | ServiceAnswer::Foreign(_) => judge(address, answer, None),
    }
}

fn judge(address: SocketAddr, answer: &ServiceAnswer, unit: Option<&UnitState>) -> DiagnosticFinding {
    const LOOK: &str = "look at `journalctl -u gpuaas` and at the other findings";
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
            DiagnosticFinding::error(format!("the service at {address} runs and is not ready: {why}"), LOOK)
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
    let UnitState { active, result, status, is_enabled, .. } = unit;
    match active.as_str() {
        "failed" => DiagnosticFinding::error(
            format!("{UNIT} has failed: {result}, exit status {status}"),
            format!("{}; then: systemctl restart {UNIT}", remedy(unit)),
        ),
        _ if unit.is_restarting() => DiagnosticFinding::error(
            format!("{UNIT} ends and is started again: {result}, exit status {status}"),
            remedy(unit),
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

/// What an operator does about an exit status of the service ([`crate::exit_status`]).
fn remedy(unit: &UnitState) -> &'static str {
    match unit.exit_status().and_then(|status| status.parse().ok()) {
        Some(CONFIGURATION) => "correct what the other findings name, or what `journalctl -u gpuaas` says",
        Some(UNAVAILABLE) => "the database cannot be reached: the findings of `postgres` say why",
        Some(NO_CREDENTIALS) => {
            "put the files kek, tls.pem and tls.key, or those of the unit's LoadCredential=, in their places"
        }
        Some(_) | None => JOURNAL,
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
    fn exit_status_of_a_failed_unit_says_what_to_do() {
        let address: SocketAddr = "127.0.0.1:9464".parse().unwrap();
        let silent = ServiceAnswer::Silent("connection refused".to_owned());
        for (result, status, named) in [
            ("exit-code", "78", "the other findings"),
            ("exit-code", "69", "postgres"),
            ("exit-code", "243", "kek, tls.pem and tls.key"),
            ("exit-code", "1", "journalctl"),
            ("signal", "78", "journalctl -u gpuaas` says why"),
        ] {
            for (active, sub) in [("failed", "failed"), ("activating", "auto-restart")] {
                let text = |text: &str| text.to_owned();
                let unit = UnitState { result: text(result), status: text(status), ..unit(active, sub, true) };
                let found = judge(address, &silent, Some(&unit));
                let action = found.action.clone().unwrap_or_default();
                assert!(found.level == Error && action.contains(named), "{result} {status}: {found:?}");
            }
        }
    }

    #[test]
    fn service_that_is_silent_beside_a_systemd_that_hangs_is_an_error() {
        let address: SocketAddr = "127.0.0.1:9464".parse().unwrap();
        let hangs = "systemctl did not end within 5 s";
        let silent = ServiceAnswer::Silent("connection refused".to_owned());
        let found = judge_without_systemd(address, &silent, hangs);
        assert!(found.level == Error && found.summary.contains(hangs), "{found:?}");
        assert_eq!(judge_without_systemd(address, &ServiceAnswer::Ready, hangs).level, Ok);
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
}
