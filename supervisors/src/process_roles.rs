//! The roles of a process: which parts of the control plane run in it.

use anyhow::Context;
use std::collections::BTreeSet;
use std::str::FromStr;

/// A role: a part of the control plane that can run in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum ProcessRole {
    /// The public API.
    Api,
    /// The API for node agents, over mutual TLS.
    NodeApi,
    /// Users' terminals.
    TerminalGateway,
    /// Shards and the entities in them.
    Entities,
    /// Charges billing accounts.
    Billing,
    /// Performs the reactions to events.
    Provisioning,
    /// Publishes committed events.
    OutboxRelay,
    /// Notifies users of events.
    NotificationRelay,
    /// Receives the payment processor's webhooks.
    Webhook,
    /// Passes the logs of nodes on to the log store.
    NodeLogGateway,
}

impl ProcessRole {
    pub const ALL: [Self; 10] = [
        Self::Api,
        Self::NodeApi,
        Self::TerminalGateway,
        Self::Entities,
        Self::Billing,
        Self::Provisioning,
        Self::OutboxRelay,
        Self::NotificationRelay,
        Self::Webhook,
        Self::NodeLogGateway,
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

/// The help text of `--roles`.
#[must_use]
pub fn roles_help() -> String {
    format!("All, or any of {}, with commas", ProcessRole::names())
}

impl FromStr for ProcessRole {
    type Err = anyhow::Error;
    fn from_str(name: &str) -> anyhow::Result<Self> {
        Self::ALL
            .into_iter()
            .find(|role| role.name() == name)
            .with_context(|| format!("there is no role {name:?}; the roles are {}, or all", Self::names()))
    }
}

/// `all`, or a list with commas.
///
/// # Errors
/// Where a name is no role.
pub fn parse_roles(text: &str) -> anyhow::Result<BTreeSet<ProcessRole>> {
    if text.trim() == "all" {
        return Ok(ProcessRole::ALL.into());
    }
    text.split(',').map(|name| name.trim().parse()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_role_is_refused_with_the_list_of_roles() {
        assert_eq!(parse_roles("all").unwrap(), ProcessRole::ALL.into());
        assert_eq!(parse_roles("api, node-api").unwrap(), [ProcessRole::Api, ProcessRole::NodeApi].into());
        let error = parse_roles("api,webshop").unwrap_err().to_string();
        assert!(error.contains("webshop") && error.contains("outbox-relay"), "{error}");
    }

    #[test]
    fn every_role_runs_alone() {
        for role in ProcessRole::ALL {
            assert_eq!(parse_roles(role.name()).unwrap(), [role].into());
        }
    }
}
