//! The state of a systemd unit, as `systemctl show` prints it (`org.freedesktop.systemd1(5)`).

use std::collections::BTreeMap;
use std::path::Path;

/// Whether systemd has booted this machine (`sd_booted(3)`).
#[must_use]
pub fn is_booted_by_systemd() -> bool {
    Path::new("/run/systemd/system").exists()
}

/// A unit that systemd has loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitState {
    /// `ActiveState`: active, reloading, inactive, failed, activating or deactivating.
    pub active: String,
    /// `SubState`, such as running or auto-restart.
    pub sub: String,
    /// Whether it is started with the machine.
    pub is_enabled: bool,
    /// `Result`: success, or why it has ended, such as exit-code, signal or watchdog.
    pub result: String,
    /// `ExecMainStatus`: its exit status, or the number of the signal.
    pub status: String,
}

impl UnitState {
    /// The arguments with which `systemctl` prints the unit for [`parse`](Self::parse).
    #[must_use]
    pub const fn arguments(unit: &str) -> [&str; 3] {
        ["show", unit, "--property=LoadState,ActiveState,SubState,UnitFileState,Result,ExecMainStatus"]
    }

    /// `None` where systemd has no such unit.
    #[must_use]
    pub fn parse(shown: &str) -> Option<Self> {
        let properties: BTreeMap<_, _> = shown.lines().filter_map(|line| line.split_once('=')).collect();
        let property = |name: &str| properties.get(name).copied().unwrap_or_default().to_owned();
        (property("LoadState") == "loaded").then(|| Self {
            active: property("ActiveState"),
            sub: property("SubState"),
            is_enabled: property("UnitFileState").starts_with("enabled"),
            result: property("Result"),
            status: property("ExecMainStatus"),
        })
    }

    /// Whether it has ended and is about to be started again.
    #[must_use]
    pub fn is_restarting(&self) -> bool {
        self.active == "activating" && self.sub == "auto-restart"
    }

    /// The exit status of its program, where that ended by itself.
    #[must_use]
    pub fn exit_status(&self) -> Option<&str> {
        (self.result == "exit-code").then_some(&self.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_that_systemd_does_not_know_is_none() {
        assert_eq!(UnitState::parse("LoadState=not-found\nActiveState=inactive\n"), None);
        assert_eq!(UnitState::parse(""), None);
    }

    #[test]
    fn unit_that_ended_by_itself_has_an_exit_status_and_a_killed_one_has_none() {
        let shown = "Result=exit-code\nExecMainStatus=78\nLoadState=loaded\nActiveState=failed\nSubState=failed\nUnitFileState=enabled-runtime\n";
        let failed = UnitState::parse(shown).unwrap_or_default();
        let text = |text: &str| text.to_owned();
        let expected = UnitState {
            active: text("failed"),
            sub: text("failed"),
            is_enabled: true,
            result: text("exit-code"),
            status: text("78"),
        };
        assert_eq!(failed, expected);
        assert_eq!((failed.exit_status(), failed.is_restarting()), (Some("78"), false));
        let killed = UnitState {
            result: text("signal"),
            status: text("9"),
            active: text("activating"),
            sub: text("auto-restart"),
            ..failed
        };
        assert_eq!((killed.exit_status(), killed.is_restarting()), (None, true));
    }
}
