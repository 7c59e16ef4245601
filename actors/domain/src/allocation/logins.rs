//! Who may log in: the keys that open an allocation (specification, *SSH key*; decisions 5).
//!
//! A user's default key opens it, or a set of their keys that was chosen for it. Which keys that comes to depends on what the user has, so
//! it is resolved from the tenant at a revision of the tenant's keys: what was resolved at an earlier one never takes the place of what
//! was resolved at a later one, however late it comes. Each change has a number too, and the node says which one it has written.

use super::{Allocation, AuthorizedKey, Command, Phase, Rejection};
use crate::again::Again;
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{NodeId, SshKeyId};
use crate::machine::{Ctx, Refused, Step};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Who may log in, and how far the node is with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Logins {
    /// The keys that were chosen for this allocation; `None`: the user's default key, whichever that is.
    pub chosen: Option<Vec<SshKeyId>>,
    /// What that comes to.
    pub keys: Vec<AuthorizedKey>,
    /// The revision of the tenant's keys at which it was resolved.
    pub as_of: u64,
    /// Raised with each change of `keys`; 0: as they were asked for.
    pub revision: u64,
    /// The revision that the node has written.
    pub written: u64,
}

impl Logins {
    /// Whether the node has still to be told, or to say that it has written them.
    #[must_use]
    pub const fn are_pending(&self) -> bool {
        self.written < self.revision
    }
}

impl Allocation {
    /// Who may log in.
    #[must_use]
    pub fn logins(&self) -> Logins {
        self.logins.clone().unwrap_or_else(|| Logins {
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
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if !ctx.by.is_admin() && !ctx.by.is_user(&self.asked.user_id) {
            return Err(Rejection::NotFound);
        }
        if !self.may_be_entered() {
            return Err(Rejection::WrongState {
                state: self.phase.name().to_owned(),
                command: "choose_logins".to_owned(),
            });
        }
        let is_there = |id: &SshKeyId| keys.iter().any(|key| key.id == *id);
        if let Some(id) = chosen.iter().flatten().find(|id| !is_there(id)) {
            return Err(Rejection::KeyUnknown { id: *id });
        }
        let logins = self.logins();
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
        let logins = Logins { chosen, ..logins };
        Ok(self.with_logins(logins, keys, logins_revision, "who may log in was chosen", ctx).audit(audit))
    }

    pub(super) fn audit_refused_choice(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &Ctx<'_>,
    ) -> Option<Refused<Self>> {
        let (Command::ChooseLogins { chosen, .. }, false) = (command, *rejection == Rejection::KeysMoved) else {
            return None;
        };
        let next = Self { refusals: self.refusals.audited(ctx.now)?, ..self.clone() };
        let metadata = json!({ "ssh_key_ids": chosen, "result": "refused", "cause": rejection.to_string() });
        Some(Refused { next, audit: self.audit(AuditAction::SshKeysChoose, metadata) })
    }

    pub(super) fn adopt_logins(
        &self,
        chosen: &Option<Vec<SshKeyId>>,
        keys: Vec<AuthorizedKey>,
        logins_revision: u64,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let logins = self.logins();
        if !self.may_be_entered() || logins_revision <= logins.as_of {
            return self.stay();
        }
        if logins.chosen != *chosen {
            let stale = Event::LoginsStale { allocation_id: self.id, user_id: self.asked.user_id.clone() };
            return self.unchanged("other keys were chosen meanwhile").event(stale);
        }
        self.with_logins(logins, keys, logins_revision, "its user's keys have changed", ctx)
    }

    fn with_logins(
        &self,
        logins: Logins,
        keys: Vec<AuthorizedKey>,
        as_of: u64,
        why: &str,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let differ = logins.keys != keys;
        let revision = if differ { logins.revision.saturating_add(1) } else { logins.revision };
        let mut next = self.clone();
        next.logins = Some(Logins { keys, as_of, revision, ..logins });
        match self.node_to_tell().filter(|_| differ) {
            Some(node_id) => {
                next.again = Some(Again::first(ctx.now));
                next.step(why).event(Event::LoginsChanged { allocation_id: self.id, node_id, revision })
            }
            None => next.step(why),
        }
    }

    pub(super) fn logins_written(&self, node_id: NodeId, revision: u64) -> Step<Self> {
        let logins = self.logins();
        let known = self.node_to_tell() == Some(node_id) && revision <= logins.revision;
        if !known || revision <= logins.written {
            return self.stay();
        }
        let mut next = self.clone();
        let logins = Logins { written: revision, ..logins };
        if matches!(self.phase, Phase::Active { .. }) && !logins.are_pending() {
            next.again = None;
        }
        next.logins = Some(logins);
        next.step(format!("node {node_id} has written who may log in (revision {revision})"))
    }

    /// Says again what the node may not have heard; `None` where it has written everything.
    pub(super) fn logins_to_tell(&self) -> Option<Event> {
        let logins = self.logins();
        let node_id = self.node_to_tell().filter(|_| logins.are_pending())?;
        Some(Event::LoginsChanged { allocation_id: self.id, node_id, revision: logins.revision })
    }

    /// Its tenant has other keys than it knows of.
    pub(super) fn stale_logins(&self, logins_revision: u64) -> Option<Event> {
        let stale = self.may_be_entered() && logins_revision > self.logins().as_of;
        stale.then(|| Event::LoginsStale { allocation_id: self.id, user_id: self.asked.user_id.clone() })
    }

    const fn may_be_entered(&self) -> bool {
        match self.phase {
            Phase::Requested { .. } | Phase::Provisioning { .. } | Phase::Active { .. } => true,
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => false,
        }
    }

    const fn node_to_tell(&self) -> Option<NodeId> {
        match self.phase {
            Phase::Provisioning { node_id, .. } | Phase::Active { node_id, .. } => Some(node_id),
            Phase::Requested { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => None,
        }
    }
}
