//! An operator's announcement to all clients that are connected at that moment, of maintenance for example. It is sent once and cannot be
//! taken back; the entity records who announced what, and when.

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::Action;
use crate::event::Event;
use crate::explanation::Explanation;
use crate::id::{AnnouncementId, EntityKind, EntityRef};
use crate::state_machine::{self, Machine, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The severity of an announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    Info,
    Warning,
    Critical,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    pub id: AnnouncementId,
    pub severity: Severity,
    /// The text, in one line.
    pub message: String,
    /// As the audit log names an actor.
    pub by: String,
    pub at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Announce { severity: Severity, message: String },
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::Announce { .. } => Action::Announce,
            Self::Tick => Action::Advance,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Announce { .. })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Announced { announcement: Box<Announcement> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such announcement")]
    NotFound,
    #[error("it was announced already")]
    Exists,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("announcement"),
            Self::Exists => Explanation::conflict("This was announced already."),
        }
    }
}

impl Machine for Announcement {
    const KIND: EntityKind = EntityKind::Announcement;
    const ENDED_STATES: &'static [&'static str] = &["announced"];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let (severity, message) = match (state, command) {
            (None, Command::Announce { severity, message }) => (severity, message),
            (Some(_), Command::Announce { .. }) => return Err(Rejection::Exists),
            (Some(_), Command::Tick) => return Ok(Transition::stay(Reply::Done)),
            (None, Command::Tick) => return Err(Rejection::NotFound),
        };
        let id = AnnouncementId(ctx.id);
        let metadata = json!({ "severity": severity, "message": message });
        let it = Self { id, severity, message, by: ctx.by.to_string(), at: ctx.now };
        let reply = Reply::Announced { announcement: Box::new(it.clone()) };
        let target = EntityRef { kind: EntityKind::Announcement, id: ctx.id };
        Ok(Transition::to(it, reply, "announced")
            .event(Event::Announced { announcement_id: id })
            .audit(AuditRecord::new(AuditAction::NotificationsBroadcast, target, metadata)))
    }

    fn state(&self) -> &'static str {
        "announced"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::policy::PolicyBook;
    use uuid::Uuid;

    fn decide(state: Option<&Announcement>, command: Command) -> Result<Transition<Announcement>, Rejection> {
        let (policy, by) = (PolicyBook::default(), Principal::system("an operator"));
        let ctx = TransitionContext {
            id: Uuid::from_u128(9),
            version: 0,
            ..TransitionContext::in_test(Timestamp::UNIX_EPOCH, &policy, &by)
        };
        Announcement::decide(state, command, &ctx)
    }

    #[test]
    fn announcement_is_published_once_and_audited_with_its_text() {
        let announce = || Command::Announce { severity: Severity::Warning, message: "Maintenance at noon.".to_owned() };
        let step = decide(None, announce()).unwrap();
        assert_eq!(step.events, [Event::Announced { announcement_id: AnnouncementId(Uuid::from_u128(9)) }]);
        assert_eq!(step.audit[0].action, AuditAction::NotificationsBroadcast);
        assert_eq!(step.audit[0].metadata, json!({ "severity": "warning", "message": "Maintenance at noon." }));
        let published = step.next.unwrap();
        assert_eq!(decide(Some(&published), announce()).unwrap_err(), Rejection::Exists);
        assert!(decide(Some(&published), Command::Tick).unwrap().next.is_none());
        assert_eq!(decide(None, Command::Tick).unwrap_err(), Rejection::NotFound);
    }
}
