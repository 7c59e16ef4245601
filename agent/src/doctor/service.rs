//! The agent's unit: whether it runs, and why it has ended.

use super::ENV_FILE;
use crate::bounded_tool::{Tool, ToolError};
use crate::config::Flags;
use std::path::Path;
use std::time::Duration;
use telemetry::diagnosis::DiagnosticFinding;
use telemetry::diagnosis::unit::{UnitState, is_booted_by_systemd};

const UNIT: &str = "gpuaas-agent.service";
const JOURNAL: &str = "`journalctl -u gpuaas-agent` says why";
/// Less than the limit of the check.
const ANSWERS_WITHIN: Duration = Duration::from_secs(4);

pub(super) fn examine(flags: &Flags) -> Vec<DiagnosticFinding> {
    // With another file than the unit's it is another agent that is looked at.
    let is_of_the_unit = flags.env_file.as_deref().is_none_or(|file| file == Path::new(ENV_FILE));
    let unit = if is_of_the_unit && is_booted_by_systemd() { unit_state() } else { Ok(None) };
    vec![match unit {
        Ok(unit) => judge(unit.as_ref(), flags.env_file.is_some()),
        Err(error) => DiagnosticFinding::error(error.to_string(), super::SYSTEMD),
    }]
}

/// `None` where there is no such unit.
fn unit_state() -> Result<Option<UnitState>, ToolError> {
    Ok(UnitState::parse(&Tool::new("systemctl").args(UnitState::arguments(UNIT)).run(ANSWERS_WITHIN)?))
}

fn judge(unit: Option<&UnitState>, has_settings: bool) -> DiagnosticFinding {
    let Some(unit) = unit else {
        return DiagnosticFinding::ok(format!("there is no {UNIT} with these settings"));
    };
    let UnitState { active, result, status, is_enabled, .. } = unit;
    match active.as_str() {
        "active" => DiagnosticFinding::ok(format!("{UNIT} runs")),
        "failed" => DiagnosticFinding::error(
            format!("{UNIT} has failed: {result}, exit status {status}"),
            format!("{}; then: systemctl restart {UNIT}", remedy(unit)),
        ),
        _ if unit.is_restarting() => DiagnosticFinding::error(
            format!("{UNIT} ends and is started again: {result}, exit status {status}"),
            remedy(unit),
        ),
        "activating" | "deactivating" | "reloading" => DiagnosticFinding::warning(
            format!("{UNIT} is {active}"),
            "run this command again in a minute; until then the other findings say what it may wait for",
        ),
        _ if *is_enabled => DiagnosticFinding::warning(
            format!("{UNIT} is enabled and does not run"),
            format!("systemctl start {UNIT}, or systemctl disable {UNIT} where this machine is to be no node"),
        ),
        _ if has_settings => DiagnosticFinding::warning(
            format!("{UNIT} is not enabled and does not run"),
            format!("systemctl enable --now {UNIT}, where this machine is to be a node"),
        ),
        _ => DiagnosticFinding::ok(format!("{UNIT} is not enabled and does not run")),
    }
}

/// What an operator does about an exit status of the agent ([`crate::daemon::Fatal::exit_code`]).
fn remedy(unit: &UnitState) -> &'static str {
    match unit.exit_status() {
        Some("2") => "correct the settings that the other findings name",
        Some("3" | "5") => "ask an administrator to reissue the node's enrollment: gpuctl nodes script NODE",
        Some("4") => "the node was removed: register this machine as a new node, and install its bootstrap bundle",
        Some("6") => "upgrade the agent: the control plane does not serve its protocol any more",
        Some("7") => "stop the other agent that runs on the state's folder",
        Some(_) | None => JOURNAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::diagnosis::DiagnosticLevel::{Error, Ok, Warning};

    fn unit(active: &str, sub: &str, is_enabled: bool, status: &str) -> UnitState {
        let text = |text: &str| text.to_owned();
        UnitState { active: text(active), sub: text(sub), is_enabled, result: text("exit-code"), status: text(status) }
    }

    #[test]
    fn agent_that_does_not_run_is_no_ok_and_its_exit_status_says_what_to_do() {
        for (unit, has_settings, level, named) in [
            (None, true, Ok, ""),
            (Some(unit("active", "running", true, "0")), true, Ok, ""),
            (Some(unit("inactive", "dead", false, "0")), false, Ok, ""),
            (Some(unit("inactive", "dead", false, "0")), true, Warning, "systemctl enable --now"),
            (Some(unit("inactive", "dead", true, "0")), true, Warning, "systemctl start"),
            (Some(unit("activating", "start", true, "0")), true, Warning, "in a minute"),
            (Some(unit("activating", "auto-restart", true, "1")), true, Error, "journalctl"),
            (Some(unit("activating", "auto-restart", true, "7")), true, Error, "other agent"),
            (
                Some(UnitState { result: "signal".to_owned(), ..unit("failed", "failed", true, "6") }),
                true,
                Error,
                "journalctl",
            ),
            (Some(unit("failed", "failed", true, "2")), true, Error, "settings"),
            (Some(unit("failed", "failed", true, "3")), true, Error, "reissue"),
            (Some(unit("failed", "failed", true, "4")), true, Error, "removed"),
            (Some(unit("failed", "failed", true, "6")), true, Error, "upgrade the agent"),
        ] {
            let found = judge(unit.as_ref(), has_settings);
            let action = found.action.clone().unwrap_or_default();
            assert!(found.level == level && action.contains(named), "{unit:?}: {found:?}");
        }
    }
}
