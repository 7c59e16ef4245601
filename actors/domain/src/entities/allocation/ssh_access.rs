//! The SSH keys that open an allocation (specification, *SSH key*; decisions 5).
//!
//! The user's default key opens it, or a set of their keys that was chosen for it. Which keys that means depends on what the user has, so
//! it is resolved from the tenant at a revision of the tenant's keys: keys resolved at an earlier revision never replace keys resolved at
//! a later one, however late they arrive. Each change has a revision too, and the node reports which one it has written.

use super::{Allocation, AuthorizedKey, Command, CommandName, Phase, Rejection, Request};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{NodeId, SshKeyId};
use crate::resend_timer::ResendTimer;
use crate::ssh_key;
use crate::state_machine::{AuditedRefusal, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The keys that may log in, and the revision that the node has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshAccess {
    /// The keys that were chosen for this allocation; `None`: the user's default key, whichever that is.
    pub chosen: Option<Vec<SshKeyId>>,
    /// The keys that the choice resolves to.
    pub keys: Vec<AuthorizedKey>,
    /// The revision of the tenant's keys at which it was resolved.
    pub as_of: u64,
    /// Raised with each change of `keys`; 0: as requested.
    pub revision: u64,
    /// The revision that the node has written.
    pub written: u64,
}

impl SshAccess {
    /// Whether the node has not confirmed yet that it has written the keys.
    #[must_use]
    pub const fn are_pending(&self) -> bool {
        self.written < self.revision
    }
}

impl Allocation {
    /// The SSH keys that may log in.
    #[must_use]
    pub fn ssh_access(&self) -> SshAccess {
        self.logins.clone().unwrap_or_else(|| SshAccess {
            chosen: (!self.asked.follows_default).then(|| self.asked.ssh_keys.iter().map(|key| key.id).collect()),
            keys: self.asked.ssh_keys.clone(),
            as_of: self.asked.logins_revision,
            revision: 0,
            written: 0,
        })
    }

    pub(super) fn choose_logins(
        &self,
        chosen: Option<Vec<SshKeyId>>,
        keys: Vec<AuthorizedKey>,
        logins_revision: u64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if !ctx.by.is_admin() && !ctx.by.is_user(&self.asked.owner.user_id) {
            return Err(Rejection::NotFound);
        }
        if !self.admits_logins() {
            return Err(self.wrong_state(CommandName::ChooseLogins));
        }
        let is_there = |id: &SshKeyId| keys.iter().any(|key| key.id == *id);
        if let Some(id) = chosen.iter().flatten().find(|id| !is_there(id)) {
            return Err(Rejection::KeyUnknown { id: *id });
        }
        if !ssh_key::are_within_bound(&keys) {
            return Err(Rejection::KeysTooLong { max: ssh_key::MAX_LOGIN_BYTES });
        }
        let logins = self.ssh_access();
        if logins_revision < logins.as_of {
            return Err(Rejection::KeysMoved);
        }
        if logins.chosen == chosen && logins.keys == keys {
            return Ok(self.stay());
        }
        let metadata = json!({
            "ssh_key_ids": chosen.as_ref().map(|_| keys.iter().map(|key| key.id).collect::<Vec<_>>()),
            "fingerprints": keys.iter().map(|key| key.fingerprint.as_str()).collect::<Vec<_>>(),
            "result": "ok",
        });
        let audit = self.audit(AuditAction::SshKeysChoose, metadata);
        let logins = SshAccess { chosen, ..logins };
        Ok(self.with_ssh_access(logins, keys, logins_revision, "its SSH keys were chosen", ctx).audit(audit))
    }

    pub(super) fn audit_refused_choice(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        let (Command::Request(Request::ChooseLogins { chosen, .. }), false) =
            (command, *rejection == Rejection::KeysMoved)
        else {
            return None;
        };
        let next = Self { refusals: self.refusals.audited(ctx.now)?, ..self.clone() };
        let metadata = json!({ "ssh_key_ids": chosen, "result": "refused", "cause": rejection.to_string() });
        Some(AuditedRefusal { next, audit: self.audit(AuditAction::SshKeysChoose, metadata) })
    }

    pub(super) fn adopt_logins(
        &self,
        chosen: &Option<Vec<SshKeyId>>,
        keys: Vec<AuthorizedKey>,
        logins_revision: u64,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let logins = self.ssh_access();
        if !self.admits_logins() || logins_revision <= logins.as_of {
            return self.stay();
        }
        if logins.chosen != *chosen {
            let stale = Event::LoginsStale { allocation_id: self.id, user_id: self.asked.owner.user_id.clone() };
            return self.unchanged("other SSH keys were chosen meanwhile").event(stale);
        }
        self.with_ssh_access(logins, keys, logins_revision, "its user's keys have changed", ctx)
    }

    fn with_ssh_access(
        &self,
        logins: SshAccess,
        keys: Vec<AuthorizedKey>,
        as_of: u64,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let differ = logins.keys != keys;
        let revision = if differ { logins.revision.saturating_add(1) } else { logins.revision };
        let mut next = self.clone();
        next.logins = Some(SshAccess { keys, as_of, revision, ..logins });
        match self.node_with_tenant().filter(|_| differ) {
            Some(node_id) => {
                next.again = Some(ResendTimer::first(ctx.now));
                next.transition(why).event(Event::LoginsChanged { allocation_id: self.id, node_id, revision })
            }
            None => next.transition(why),
        }
    }

    pub(super) fn logins_written(&self, node_id: NodeId, revision: u64) -> Transition<Self> {
        let logins = self.ssh_access();
        let known = self.node_with_tenant() == Some(node_id) && revision <= logins.revision;
        if !known || revision <= logins.written {
            return self.stay();
        }
        let mut next = self.clone();
        let logins = SshAccess { written: revision, ..logins };
        if matches!(self.phase, Phase::Active { .. }) && !logins.are_pending() {
            next.again = None;
        }
        next.logins = Some(logins);
        next.transition(format!("node {node_id} has applied the SSH keys (revision {revision})"))
    }

    /// The event to resend while the node has not confirmed the keys; `None` where it has written everything.
    pub(super) fn pending_ssh_keys_event(&self) -> Option<Event> {
        let logins = self.ssh_access();
        let node_id = self.node_with_tenant().filter(|_| logins.are_pending())?;
        Some(Event::LoginsChanged { allocation_id: self.id, node_id, revision: logins.revision })
    }

    /// The event to publish where the tenant has newer keys than the allocation.
    pub(super) fn stale_ssh_keys_event(&self, logins_revision: u64) -> Option<Event> {
        let stale = self.admits_logins() && logins_revision > self.ssh_access().as_of;
        stale.then(|| Event::LoginsStale { allocation_id: self.id, user_id: self.asked.owner.user_id.clone() })
    }

    const fn admits_logins(&self) -> bool {
        match self.phase {
            Phase::Requested { .. } | Phase::Provisioning { .. } | Phase::Active { .. } => true,
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => false,
        }
    }

    const fn node_with_tenant(&self) -> Option<NodeId> {
        match self.phase {
            Phase::Provisioning { node_id, .. } | Phase::Active { node_id, .. } => Some(node_id),
            Phase::Requested { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => None,
        }
    }
}
