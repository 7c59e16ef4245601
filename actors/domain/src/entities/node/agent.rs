//! The agent of a node: its contact, its versions, and the rollouts that update it.

mod rollouts;

use super::outcome;
use crate::audit::{AuditAction, AuditRecord};
use crate::id::AllocationId;
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeSet;
use uuid::Uuid;

pub use rollouts::{NodeRollout, NodeSoak, rollout_term};

/// The part of a node that knows its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agent {
    pub contact: Option<AgentContact>,
    /// The last rollouts that have ordered an update of the agent, oldest first.
    pub rollouts: Vec<NodeRollout>,
}

/// The last contact, and the agent's versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentContact {
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
    /// Not every contact is written: this lags by up to a third of policy `node.offline_after_seconds`.
    pub last_seen_at: Timestamp,
    /// When the node becomes offline without another contact.
    pub silent_at: Timestamp,
    /// The names of the task types that the agent supports, as it reports. Where it reports none, its protocol determines them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_types: Option<BTreeSet<String>>,
    /// Of the package that the agent is of, as it reports; `None` where no package installed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package_digest: Option<PackageDigest>,
    /// Of the agent's process, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<Uuid>,
    /// `None` in what an earlier release has stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_heartbeat: Option<LastHeartbeat>,
}

/// The last heartbeat of the agent, or its enrollment where it has sent none since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastHeartbeat {
    /// Not every heartbeat is written: this lags by up to a third of policy `node.offline_after_seconds`.
    pub at: Timestamp,
    /// From here on the agent has certainly sent none for as long as `node.offline_after_seconds`, in which it was in contact.
    pub overdue_at: Timestamp,
}

/// The kind of a contact. Both show that the agent runs; only a heartbeat shows that it monitors its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContactKind {
    Heartbeat,
    Poll,
}

impl AgentContact {
    /// The contact of an agent at its enrollment or recovery, which says no more.
    pub(super) fn new(boot_id: &str, agent_version: &str, protocol: u16, now: Timestamp) -> Self {
        Self {
            boot_id: boot_id.to_owned(),
            agent_version: agent_version.to_owned(),
            protocol,
            last_seen_at: now,
            silent_at: now,
            task_types: None,
            package_digest: None,
            session: None,
            last_heartbeat: None,
        }
    }

    /// Whether the agent supports tasks of this type: as it reports, or else as agents of its protocol do.
    #[must_use]
    pub fn supports(&self, task_type: TaskType) -> bool {
        match &self.task_types {
            Some(names) => names.contains(task_type.name()),
            None => task_type.since().is_some_and(|since| since <= self.protocol),
        }
    }
}

impl Agent {
    /// The last contact, where the agent has been silent for longer than policy `node.offline_after_seconds`, whatever the node's state.
    #[must_use]
    pub fn silent_since(&self, now: Timestamp) -> Option<Timestamp> {
        self.contact.as_ref().filter(|seen| now >= seen.silent_at).map(|seen| seen.last_seen_at)
    }

    /// True where it has never been in contact too.
    pub(super) fn is_silent(&self, now: Timestamp) -> bool {
        self.contact.as_ref().is_none_or(|seen| seen.silent_at <= now)
    }

    /// The last heartbeat of an agent that has polled for tasks for longer than policy `node.offline_after_seconds` after it: its monitoring
    /// hangs, and faults of the machine are unknown.
    #[must_use]
    pub fn unmonitored_since(&self) -> Option<Timestamp> {
        let seen = self.contact.as_ref()?;
        seen.last_heartbeat.filter(|heartbeat| seen.last_seen_at >= heartbeat.overdue_at).map(|heartbeat| heartbeat.at)
    }

    /// The same, in a sentence for an operator.
    pub(super) fn unmonitored(&self) -> Option<String> {
        let since = self.unmonitored_since()?.format("%Y-%m-%dT%H:%M:%SZ");
        Some(format!(
            "its agent polls and has sent no heartbeat since {since}: its monitoring hangs; look for a file system that does not answer, then restart the agent"
        ))
    }

    /// Since when an operator has to look at a machine that is not monitored.
    pub(super) fn monitoring_deadline(&self) -> Option<Deadline> {
        let overdue_at = self.contact.as_ref()?.last_heartbeat?.overdue_at;
        Some(Deadline::new(overdue_at, self.unmonitored()?))
    }

    /// Why a task of this type waits, in a sentence for an operator, where the agent of the last contact does not support it.
    #[must_use]
    pub fn lacks_task_type(&self, task_type: TaskType) -> Option<String> {
        let seen = self.contact.as_ref().filter(|seen| !seen.supports(task_type))?;
        let (version, protocol) = (&seen.agent_version, seen.protocol);
        Some(format!("the agent (version {version}, protocol {protocol}) has no task {task_type}: upgrade it"))
    }

    pub(super) fn boot_id(&self) -> Option<&str> {
        self.contact.as_ref().map(|seen| seen.boot_id.as_str())
    }

    /// The audit record of a machine that reports another boot than before. Its allocations stay: their files, logins and devices survive
    /// a restart, their processes do not.
    pub(super) fn restarted<'a>(
        &self,
        boot_id: &str,
        allocations: impl Iterator<Item = &'a AllocationId>,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditRecord> {
        let was = self.boot_id().filter(|was| *was != boot_id)?;
        let allocations: Vec<_> = allocations.collect();
        let metadata = json!({ "old_boot_id": was, "new_boot_id": boot_id, "allocations": allocations });
        Some(outcome::audit(AuditAction::NodesRestart, metadata, ctx))
    }

    /// Records a contact, unless the last recorded one is recent and from the same agent. Its times are set here.
    pub(super) fn record_contact(
        &mut self,
        contact: AgentContact,
        kind: ContactKind,
        is_offline: bool,
        ctx: &TransitionContext<'_>,
    ) {
        let offline_after = ctx.policy.seconds(PolicyKey::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let lag = offline_after / 3;
        let is_recent = |at: Timestamp| at <= ctx.now && ctx.now < at + lag;
        let recent = self.contact.as_ref().is_some_and(|seen| {
            let is_the_same = AgentContact {
                last_seen_at: seen.last_seen_at,
                silent_at: seen.silent_at,
                last_heartbeat: seen.last_heartbeat,
                ..contact.clone()
            } == *seen;
            let shows_nothing_new = match kind {
                ContactKind::Heartbeat => seen.last_heartbeat.is_some_and(|heartbeat| is_recent(heartbeat.at)),
                // The first poll that shows a heartbeat to be overdue.
                ContactKind::Poll => seen.last_heartbeat.is_some_and(|heartbeat| {
                    ctx.now < heartbeat.overdue_at || seen.last_seen_at >= heartbeat.overdue_at
                }),
            };
            is_the_same && shows_nothing_new && is_recent(seen.last_seen_at)
        });
        // The contact of an offline node is recorded at once, or its next tick would find it silent again.
        if !recent || is_offline {
            let heartbeat_at = |at: Timestamp| LastHeartbeat { at, overdue_at: at + offline_after + lag };
            let last_heartbeat = match (kind, &self.contact) {
                (ContactKind::Heartbeat, _) | (ContactKind::Poll, None) => heartbeat_at(ctx.now),
                (ContactKind::Poll, Some(seen)) => {
                    // An earlier release has stored when the agent was last seen alone: no heartbeat is known since.
                    let known = seen.last_heartbeat.unwrap_or_else(|| heartbeat_at(seen.last_seen_at));
                    // None was expected while it was silent, or the control plane down.
                    let was_silent = ctx.now >= seen.silent_at;
                    let overdue_at = if was_silent { heartbeat_at(ctx.now).overdue_at } else { known.overdue_at };
                    LastHeartbeat { overdue_at, ..known }
                }
            };
            let (last_seen_at, silent_at) = (ctx.now, ctx.now + offline_after);
            self.contact =
                Some(AgentContact { last_seen_at, silent_at, last_heartbeat: Some(last_heartbeat), ..contact });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decided_at, seen, start};
    use super::*;

    #[test]
    fn contact_is_recorded_where_the_last_one_is_old_and_the_agent_is_silent_after_its_time() {
        let mut agent = Agent::default();
        assert!(agent.is_silent(start()) && agent.silent_since(start()).is_none(), "it was never in contact");
        let mut heartbeat_at = |now| {
            decided_at(now, |ctx| agent.record_contact(*seen("boot-1"), ContactKind::Heartbeat, false, ctx));
            let contact = agent.contact.clone().unwrap();
            (contact.last_seen_at, contact.silent_at)
        };
        let (_, silent_at) = heartbeat_at(start());
        let soon = start() + chrono::TimeDelta::seconds(1);
        assert_eq!(heartbeat_at(soon), (start(), silent_at), "a recent one is not written again");
        let late = silent_at - chrono::TimeDelta::seconds(1);
        let (last_seen_at, silent_at) = heartbeat_at(late);
        assert_eq!(last_seen_at, late);
        assert_eq!((agent.is_silent(late), agent.silent_since(silent_at)), (false, Some(late)));
    }
}
