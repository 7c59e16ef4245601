//! Restarts of a part of the running cluster by operators: an entity's actor, or a worker of a member.
//!
//! Processes have no persistent state, and a parked entity cannot decide. So a requested restart is decided and audited here, in a commit
//! of its own, before it is executed (I7).

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::Action;
use crate::explanation::Explanation;
use crate::id::{EntityKind, EntityRef, MemberId};
use crate::state_machine::{self, Machine, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt;

/// A part that can be restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "part", rename_all = "snake_case")]
pub enum RuntimePart {
    /// An entity's actor, at its owner.
    Entity { entity: EntityRef },
    /// A row of one member's supervision tree.
    Worker { member: MemberId, worker: String },
}

/// Its name: no two parts have the same.
impl fmt::Display for RuntimePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entity { entity } => write!(f, "entity/{entity}"),
            Self::Worker { member, worker } => write!(f, "worker/{member}/{worker}"),
        }
    }
}

/// The restarts of a part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartRecord {
    pub part: RuntimePart,
    pub restarts: u32,
    pub last: RestartEntry,
}

/// Who restarted it, when and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartEntry {
    /// As the audit log names an actor.
    pub by: String,
    pub at: Timestamp,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Restart { what: RuntimePart, reason: Option<String> },
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::Restart { .. } => Action::OperateRuntime,
            Self::Tick => Action::Advance,
        }
    }
}

/// The restart is committed: it may be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("this is the record of another part")]
    AnotherPart,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            // The record's id is derived from the part's name.
            rejection @ Self::AnotherPart => Explanation::unexpected(&rejection),
        }
    }
}

impl Machine for RestartRecord {
    const KIND: EntityKind = EntityKind::Runtime;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Command::Restart { what, reason } = command else { return Ok(Transition::stay(Reply)) };
        if state.is_some_and(|it| it.part != what) {
            return Err(Rejection::AnotherPart);
        }
        let audit = audit(&what, reason.as_deref(), ctx);
        let why = format!("{what} is to be restarted");
        let restarts = state.map_or(0, |it| it.restarts).saturating_add(1);
        let last = RestartEntry { by: ctx.by.to_string(), at: ctx.now, reason };
        Ok(Transition::to(Self { part: what, restarts, last }, Reply, why).audit(audit))
    }

    fn state(&self) -> &'static str {
        "restarted"
    }
}

/// The record is about the entity itself, where the part is one, so that it is found under the entity.
fn audit(part: &RuntimePart, reason: Option<&str>, ctx: &TransitionContext<'_>) -> AuditRecord {
    let (target, metadata) = match part {
        RuntimePart::Entity { entity } => (*entity, json!({ "reason": reason })),
        RuntimePart::Worker { member, worker } => {
            let record = EntityRef { kind: EntityKind::Runtime, id: ctx.id };
            (record, json!({ "member": member, "worker": worker, "reason": reason }))
        }
    };
    AuditRecord::new(AuditAction::RuntimeRestart, target, metadata)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::policy::PolicyBook;
    use uuid::Uuid;

    const RECORD: Uuid = Uuid::from_u128(9);

    fn decide(state: Option<&RestartRecord>, command: Command) -> Result<Transition<RestartRecord>, Rejection> {
        let (policy, by) = (PolicyBook::default(), Principal::system("an operator"));
        let ctx = TransitionContext {
            id: RECORD,
            version: 0,
            ..TransitionContext::in_test(Timestamp::UNIX_EPOCH, &policy, &by)
        };
        RestartRecord::decide(state, command, &ctx)
    }

    fn restart(what: &RuntimePart) -> Command {
        Command::Restart { what: what.clone(), reason: Some("it hangs".to_owned()) }
    }

    fn parts() -> [RuntimePart; 2] {
        let entity = EntityRef { kind: EntityKind::Node, id: Uuid::from_u128(1) };
        let member = MemberId(Uuid::from_u128(2));
        [RuntimePart::Entity { entity }, RuntimePart::Worker { member, worker: "timers".to_owned() }]
    }

    #[test]
    fn each_restart_is_counted_and_audited_with_its_reason() {
        for part in parts() {
            let first = decide(None, restart(&part)).unwrap();
            let audited = &first.audit[0];
            assert_eq!((first.audit.len(), audited.action), (1, AuditAction::RuntimeRestart));
            assert_eq!(audited.metadata["reason"], "it hangs");
            let again = decide(first.next.as_ref(), restart(&part)).unwrap();
            assert_eq!((again.next.unwrap().restarts, again.audit.len()), (2, 1));
        }
    }

    #[test]
    fn the_audit_row_is_about_the_entity_or_names_the_worker() {
        let [entity, worker] = parts().map(|part| decide(None, restart(&part)).unwrap().audit.remove(0));
        assert_eq!(entity.target, EntityRef { kind: EntityKind::Node, id: Uuid::from_u128(1) });
        assert_eq!(worker.target, EntityRef { kind: EntityKind::Runtime, id: RECORD });
        assert_eq!(worker.metadata["worker"], "timers");
        assert_eq!(worker.metadata["member"], Uuid::from_u128(2).to_string());
    }

    #[test]
    fn one_record_is_of_one_part() {
        let [one, other] = parts();
        assert_ne!(one.to_string(), other.to_string());
        let stored = decide(None, restart(&one)).unwrap().next.unwrap();
        assert_eq!(decide(Some(&stored), restart(&other)).err(), Some(Rejection::AnotherPart));
        let written = serde_json::to_string(&stored).unwrap();
        assert_eq!(serde_json::from_str::<RestartRecord>(&written).unwrap(), stored);
        assert!(decide(Some(&stored), Command::Tick).unwrap().next.is_none());
    }
}
