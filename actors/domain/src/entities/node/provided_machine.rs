//! The machine of a node at its bare-metal provider, and what the provider has to do with it (decisions 4, *MAAS mode*).
//!
//! ```text
//! deploying ──▶ deployed ──▶ releasing ──▶ released
//!     ▲ └──▶ failing ──▶ failed ──┘ │
//!     └──────── {then_deploy} ──────┘
//! ```
//!
//! A worker makes the calls. It reads the machine's status at the provider first, so that a call whose answer or record was lost is not
//! repeated, and reports what follows. What is outstanding is published again, with growing pauses, until it is reported as done.

use super::{HoldAuthor, Node, Phase, Rejection, Reply, StateCode, StateReason};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::TokenId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The pauses between two looks at what the provider has under way.
const SHORTEST_PAUSE: TimeDelta = TimeDelta::seconds(5);
const LONGEST_PAUSE: TimeDelta = TimeDelta::seconds(60);
/// How often a deployed machine is looked for at the provider, which may have released it.
const DEPLOYED_PAUSE: TimeDelta = TimeDelta::hours(1);
/// The bound of a status or an error that is stored.
const MAX_STATUS: usize = 300;

/// A machine at the bare-metal provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvidedMachine {
    /// The provider's id.
    pub system_id: String,
    /// What a system with the image of the last ordered deployment shows; `None` where that image carries no digest. Before the first order,
    /// and where a worker of an earlier release orders it, the digest at the node's registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    pub step: ProviderStep,
    /// When the step began. A report names it, so that a late one is not taken for the present step's.
    pub since: Timestamp,
    /// The step's deadline.
    pub until: Timestamp,
    /// When the worker looks next; `None` where nothing is outstanding.
    pub check_at: Option<Timestamp>,
    /// The provider's last status, or why it could not be asked.
    pub status: Option<String>,
}

/// The image that a deployment is ordered with. The settings may name another one at the next order, and at each member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderedImage {
    /// `None` where it carries no digest.
    pub digest: Option<String>,
}

/// What the provider has to do, or has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum ProviderStep {
    /// Allocate it and deploy it, with a fresh token in its user data.
    Deploying,
    Deployed,
    /// The deployment failed: mark it as broken, so that it is in no pool.
    Failing {
        why: String,
    },
    Failed {
        why: String,
    },
    /// Release it and erase its disks.
    Releasing {
        then_deploy: bool,
    },
    Released,
}

/// What the worker reports of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum ProviderReport {
    /// It is not done yet: the provider's status, or why it could not be asked.
    Waiting {
        status: String,
    },
    Done,
    Failed {
        why: String,
    },
    /// The deployed machine is not the node's any more.
    Lost {
        why: String,
    },
}

impl ProvidedMachine {
    pub(super) fn deploying(system_id: String, image_digest: Option<String>, ctx: &TransitionContext<'_>) -> Self {
        let mut machine = Self {
            system_id,
            image_digest,
            step: ProviderStep::Deploying,
            since: ctx.now,
            until: ctx.now,
            check_at: None,
            status: None,
        };
        machine.begin(ProviderStep::Deploying, ctx);
        machine
    }

    /// The claim by which no two nodes have one machine.
    pub(super) fn claim(&self) -> String {
        format!("machine/{}", self.system_id)
    }

    /// False where the provider has taken it back, or never has to.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        !matches!(self.step, ProviderStep::Released)
    }

    #[must_use]
    pub const fn is_deployed(&self) -> bool {
        matches!(self.step, ProviderStep::Deployed)
    }

    pub(super) fn begin(&mut self, step: ProviderStep, ctx: &TransitionContext<'_>) {
        let seconds = |key| ctx.policy.seconds(key, &Scopes::global(), ctx.now);
        let limit = match step {
            ProviderStep::Deploying => seconds(PolicyKey::MaasDeployTimeout),
            ProviderStep::Deployed
            | ProviderStep::Failing { .. }
            | ProviderStep::Failed { .. }
            | ProviderStep::Releasing { .. }
            | ProviderStep::Released => seconds(PolicyKey::MaasReleaseTimeout),
        };
        (self.step, self.since, self.until, self.status) = (step, ctx.now, ctx.now + limit, None);
        self.check_at = self.next_check(ctx.now);
    }

    fn next_check(&self, now: Timestamp) -> Option<Timestamp> {
        match self.step {
            ProviderStep::Deploying | ProviderStep::Failing { .. } | ProviderStep::Releasing { .. } => {
                Some(now + (now - self.since).clamp(SHORTEST_PAUSE, LONGEST_PAUSE))
            }
            ProviderStep::Deployed => Some(now + DEPLOYED_PAUSE),
            ProviderStep::Failed { .. } | ProviderStep::Released => None,
        }
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        let status = self.status.as_deref().unwrap_or("not asked yet");
        let (system_id, until) = (&self.system_id, self.until);
        match &self.step {
            ProviderStep::Deploying => {
                Some(Deadline::new(until, format!("the provider has not deployed machine {system_id}: {status}")))
            }
            ProviderStep::Failing { .. } => Some(Deadline::new(
                until,
                format!("the provider has not marked machine {system_id} as broken: {status}"),
            )),
            ProviderStep::Releasing { .. } => {
                Some(Deadline::new(until, format!("the provider has not released machine {system_id}: {status}")))
            }
            ProviderStep::Deployed | ProviderStep::Failed { .. } | ProviderStep::Released => None,
        }
    }
}

impl Node {
    pub(super) fn machine_due(&self) -> Event {
        Event::MachineDue { node_id: self.id }
    }

    /// The worker is about to deploy the machine with this image, and with this token in its user data. Older tokens are void: no system of
    /// an earlier order, which may have another image, can enroll.
    pub(super) fn machine_token(
        &self,
        (token_id, token_sha256): (TokenId, [u8; 32]),
        image: Option<OrderedImage>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Some(machine) = self.machine.as_ref().filter(|machine| machine.step == ProviderStep::Deploying) else {
            return Err(self.wrong_state(super::CommandName::IssueToken));
        };
        // It holds for as long as the deployment may take, and then as long as any other.
        let expires_at = machine.until + self.token_ttl(None, ctx);
        let mut next = self.clone();
        next.identity.token =
            Some(super::EnrollmentToken { id: token_id, sha256: token_sha256, expires_at, consumed_at: None });
        next.identity.certificates.clear();
        if let (Some(machine), Some(image)) = (&mut next.machine, image) {
            machine.image_digest = image.digest;
        }
        let event = match self.life {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {
                let message = "The provider deploys the machine with a token; waiting for its agent.";
                Some(next.enter(Phase::BootstrapIssued { until: expires_at }, StateCode::TokenIssued, message, ctx))
            }
            // A reimage: the node stays held until the new system has proved itself.
            Phase::Quarantined { .. } | Phase::Retired if self.reimage.is_some() => None,
            Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => return Err(self.wrong_state(super::CommandName::IssueToken)),
        };
        let audit = self.audit(
            AuditAction::NodesIssueEnrollmentToken,
            json!({
                "token_id": token_id,
                "expires_at": expires_at,
                "system_id": machine.system_id,
                "image_digest": next.machine.as_ref().and_then(|machine| machine.image_digest.as_deref()),
            }),
        );
        let step = Transition::to(next, Reply::TokenIssued { expires_at }, "a token for the machine's user data");
        Ok(event.into_iter().fold(step, Transition::event).audit(audit))
    }

    /// What the worker found of the step that began at `since`.
    pub(super) fn machine_reported(
        &self,
        since: Timestamp,
        report: ProviderReport,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let Some(machine) = self.machine.as_ref().filter(|machine| machine.since == since) else {
            return Transition::stay(Reply::Done);
        };
        match (&machine.step, report) {
            (ProviderStep::Deploying, ProviderReport::Done) => {
                let mut next = self.with_step(ProviderStep::Deployed, ctx);
                next.expect_new_system(ctx);
                Transition::to(next, Reply::Done, "the provider has deployed the machine")
            }
            // An agent that has enrolled proves the deployment, whatever the provider says of it.
            (ProviderStep::Deploying, ProviderReport::Failed { why }) if !self.has_used_its_token() => {
                self.deployment_failed(&why, ctx)
            }
            (ProviderStep::Failing { why }, ProviderReport::Done) => {
                let next = self.with_step(ProviderStep::Failed { why: why.clone() }, ctx);
                Transition::to(next, Reply::Done, "the provider has marked the machine as broken")
            }
            (ProviderStep::Releasing { then_deploy: true }, ProviderReport::Done) => {
                let next = self.with_step(ProviderStep::Deploying, ctx);
                let due = next.machine_due();
                Transition::to(next, Reply::Done, "the provider has erased the machine; it is deployed next").event(due)
            }
            (ProviderStep::Releasing { then_deploy: false }, ProviderReport::Done) => {
                let mut next = self.with_step(ProviderStep::Released, ctx);
                let removed = next.removed_once_released(ctx);
                let step = Transition::to(next, Reply::Done, "the provider has released the machine");
                removed.into_iter().fold(step, Transition::event)
            }
            (ProviderStep::Deployed, ProviderReport::Lost { why }) => self.machine_lost(&why, ctx),
            (_, ProviderReport::Waiting { status } | ProviderReport::Failed { why: status }) => {
                let status = Some(bounded(&status));
                if machine.status == status {
                    return Transition::stay(Reply::Done);
                }
                let mut next = self.clone();
                if let Some(machine) = &mut next.machine {
                    machine.status = status;
                }
                Transition::to(next, Reply::Done, "the provider was asked")
            }
            (
                ProviderStep::Deploying
                | ProviderStep::Deployed
                | ProviderStep::Failing { .. }
                | ProviderStep::Failed { .. }
                | ProviderStep::Releasing { .. }
                | ProviderStep::Released,
                ProviderReport::Done | ProviderReport::Lost { .. },
            ) => Transition::stay(Reply::Done),
        }
    }

    fn deployment_failed(&self, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let why = bounded(why);
        let mut next = self.with_step(ProviderStep::Failing { why: why.clone() }, ctx);
        next.identity.token = None;
        let message = format!(
            "The provider could not deploy the machine: {why}. Repair it there, then order the reimage again, or retire and \
             remove the node."
        );
        let event = if self.reimage.is_some() {
            next.enter_quarantine(StateCode::Reimaging, &message, ctx)
        } else if self.life.has_no_identity() {
            Some(next.enter(Phase::Registered, StateCode::DeploymentFailed, &message, ctx))
        } else {
            next.reason = StateReason::new(StateCode::DeploymentFailed, message);
            None
        };
        let audit = self.audit(AuditAction::NodesFailDeployment, json!({ "cause": why }));
        let due = next.machine_due();
        let step = Transition::to(next, Reply::Done, format!("the deployment failed: {why}")).audit(audit).event(due);
        event.into_iter().fold(step, Transition::event)
    }

    /// The machine was released, or given to another, by others than this service: what runs there is not to be trusted.
    fn machine_lost(&self, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.is_held_by(HoldAuthor::Provider) || self.life.is_gone() {
            return Transition::stay(Reply::Done);
        }
        let message = format!(
            "{} Look at the provider, then order a reimage, retire the node, or release the quarantine.",
            bounded(why)
        );
        let mut next = self.clone();
        let event = next.enter_quarantine(StateCode::MachineLost, &message, ctx);
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "code": StateCode::MachineLost }));
        let step = Transition::to(next, Reply::Done, message).audit(audit);
        event.into_iter().fold(step, Transition::event)
    }

    fn with_step(&self, step: ProviderStep, ctx: &TransitionContext<'_>) -> Self {
        let mut next = self.clone();
        if let Some(machine) = &mut next.machine {
            machine.begin(step, ctx);
        }
        next
    }

    /// The node's machine is to be released with its disks erased, as part of this transition.
    pub(super) fn release_machine(&mut self, then_deploy: bool, ctx: &TransitionContext<'_>) -> Option<Event> {
        let machine = self.machine.as_mut().filter(|machine| then_deploy || machine.is_held())?;
        machine.begin(ProviderStep::Releasing { then_deploy }, ctx);
        Some(self.machine_due())
    }

    /// Whether the provider still has to take the machine back.
    pub(super) fn has_machine(&self) -> bool {
        self.machine.as_ref().is_some_and(ProvidedMachine::is_held)
    }

    fn has_used_its_token(&self) -> bool {
        self.identity.token.as_ref().is_some_and(|token| token.consumed_at.is_some())
    }

    fn removed_once_released(&mut self, ctx: &TransitionContext<'_>) -> Option<Event> {
        let Phase::Removing { until } = self.life else { return None };
        (ctx.now >= until).then(|| self.enter_removed(ctx))
    }

    pub(super) fn enter_removed(&mut self, ctx: &TransitionContext<'_>) -> Event {
        let message = "Removed; the machine can come back as a new node.";
        self.enter(Phase::Removed, StateCode::Removed, message, ctx)
    }

    /// Publishes what is outstanding at the provider again, as part of this transition. A deployment past its deadline has failed.
    pub(super) fn check_machine(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let node = step.next.as_ref().unwrap_or(self);
        let Some(machine) = node.machine.as_ref().filter(|it| it.check_at.is_some_and(|at| at <= ctx.now)) else {
            return step;
        };
        if machine.step == ProviderStep::Deploying && machine.until <= ctx.now && !node.has_used_its_token() {
            let status = machine.status.as_deref().unwrap_or("the provider was not asked");
            let failed = node.deployment_failed(&format!("the machine was not deployed in time ({status})"), ctx);
            return Transition {
                events: step.events.into_iter().chain(failed.events).collect(),
                audit: step.audit.into_iter().chain(failed.audit).collect(),
                effects: step.effects,
                ..failed
            };
        }
        let mut next = node.clone();
        if let Some(machine) = &mut next.machine {
            machine.check_at = machine.next_check(ctx.now);
        }
        let why = if step.next.is_some() { step.why.clone() } else { "the provider is asked again".to_owned() };
        let due = next.machine_due();
        Transition { next: Some(next), why, ..step }.event(due)
    }
}

fn bounded(text: &str) -> String {
    text.chars().take(MAX_STATUS).collect()
}
