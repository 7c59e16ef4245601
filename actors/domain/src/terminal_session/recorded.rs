//! What the session says of its recording. The recording itself lies elsewhere: here is who may have it, and on which terms it is made.

use super::{Rejection, Reply, Tape, TerminalSession};
use crate::audit::AuditAction;
use crate::machine::{Ctx, Effect, Step};
use crate::recording::Terms;
use serde_json::json;

impl TerminalSession {
    /// True where its recording may be taken in and handed out.
    #[must_use]
    pub fn has_recording(&self) -> bool {
        self.tape == Tape::Used
    }

    /// The policies hold for sessions that live as well: those who have an end of it are told.
    pub(super) fn heed_policy(&self, ctx: &Ctx<'_>) -> Step<Self> {
        let wanted = Terms::by_policy(ctx.policy, &self.scopes(), ctx.now);
        if self.closed().is_some() || wanted == self.recording {
            return Step::stay(Reply::Session { session: Box::new(self.clone()) });
        }
        let audit = self.audit(
            AuditAction::TerminalsChangeRecording,
            &json!({ "old_recording": self.recording, "new_recording": wanted }),
        );
        let tape = if wanted.is_on() { Tape::Used } else { self.tape };
        let next = Self { recording: wanted, tape, ..self.clone() };
        let reply = Reply::Session { session: Box::new(next.clone()) };
        Step::to(next, reply, format!("recording: {}", wanted.mode.name()))
            .audit(audit)
            .effect(Effect::WakeTerminal(self.id))
    }

    /// Its owner's, and every administrator's; to others it is not there. That it is read is committed before it is.
    pub(super) fn read_recording(&self, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let may = ctx.by.is_user(&self.owner.user_id) || ctx.by.is_admin();
        if !may || !self.has_recording() {
            return Err(Rejection::NotFound);
        }
        let audit = self.audit(AuditAction::TerminalsReadRecording, &json!({}));
        Ok(Step::to(self.clone(), Reply::Done, "its recording is read").audit(audit))
    }

    pub(super) fn forget_recording(&self) -> Step<Self> {
        if !self.has_recording() || self.closed().is_none() {
            return Step::stay(Reply::Done);
        }
        let audit = self.audit(AuditAction::TerminalsForgetRecording, &json!({}));
        let next = Self { tape: Tape::Forgotten, ..self.clone() };
        Step::to(next, Reply::Done, "its recording is older than it is kept").audit(audit)
    }
}
