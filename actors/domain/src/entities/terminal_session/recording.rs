//! The recording of the session: who may read it, and its terms. The recording itself is stored elsewhere.

use super::{RecordingState, Rejection, Reply, TerminalSession};
use crate::audit::AuditAction;
use crate::recording::RecordingTerms;
use crate::state_machine::{Effect, Transition, TransitionContext};
use serde_json::json;

impl TerminalSession {
    /// True where its recording may be uploaded and read.
    #[must_use]
    pub fn has_recording(&self) -> bool {
        self.tape == RecordingState::Used
    }

    /// Policies apply to open sessions as well: their connections are notified.
    pub(super) fn apply_recording_policy(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let wanted = RecordingTerms::from_policy(ctx.policy, &self.scopes(), ctx.now);
        if self.closed().is_some() || wanted == self.recording {
            return Transition::stay(Reply::Session { session: Box::new(self.clone()) });
        }
        let audit = self.audit(
            AuditAction::TerminalsChangeRecording,
            &json!({ "old_recording": self.recording, "new_recording": wanted }),
        );
        let tape = if wanted.is_on() { RecordingState::Used } else { self.tape };
        let next = Self { recording: wanted, tape, ..self.clone() };
        let reply = Reply::Session { session: Box::new(next.clone()) };
        Transition::to(next, reply, format!("recording: {}", wanted.mode.name()))
            .audit(audit)
            .effect(Effect::WakeTerminal(self.id))
    }

    /// Its owner and administrators may read it; for others it does not exist. The read is committed before the recording is sent.
    pub(super) fn read_recording(&self, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let may = ctx.by.is_user(&self.owner.user_id) || ctx.by.is_admin();
        if !may || !self.has_recording() {
            return Err(Rejection::NotFound);
        }
        let audit = self.audit(AuditAction::TerminalsReadRecording, &json!({}));
        Ok(Transition::to(self.clone(), Reply::Done, "its recording is read").audit(audit))
    }

    pub(super) fn forget_recording(&self) -> Transition<Self> {
        if !self.has_recording() || self.closed().is_none() {
            return Transition::stay(Reply::Done);
        }
        let audit = self.audit(AuditAction::TerminalsForgetRecording, &json!({}));
        let next = Self { tape: RecordingState::Forgotten, ..self.clone() };
        Transition::to(next, Reply::Done, "its recording is past its retention").audit(audit)
    }
}
