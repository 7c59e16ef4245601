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

use super::NodeMachine;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

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

/// A machine that the bare-metal provider has ready for a new node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedMachine {
    /// The provider's id.
    pub system_id: String,
    /// The digest that the image shows which is configured at the registration, where it carries one. See [`OrderedImage`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
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
    pub(in crate::entities::node) fn deploying(
        system_id: String,
        image_digest: Option<String>,
        ctx: &TransitionContext<'_>,
    ) -> Self {
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

    pub(in crate::entities::node) fn begin(&mut self, step: ProviderStep, ctx: &TransitionContext<'_>) {
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

    pub(in crate::entities::node) fn next_check(&self, now: Timestamp) -> Option<Timestamp> {
        match self.step {
            ProviderStep::Deploying | ProviderStep::Failing { .. } | ProviderStep::Releasing { .. } => {
                Some(now + (now - self.since).clamp(SHORTEST_PAUSE, LONGEST_PAUSE))
            }
            ProviderStep::Deployed => Some(now + DEPLOYED_PAUSE),
            ProviderStep::Failed { .. } | ProviderStep::Released => None,
        }
    }

    pub(in crate::entities::node) fn deadline(&self) -> Option<Deadline> {
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

impl NodeMachine {
    /// Begins a step of the machine at its provider, where it has one.
    pub(in crate::entities::node) fn begin_step(&mut self, step: ProviderStep, ctx: &TransitionContext<'_>) {
        if let Some(provided) = &mut self.provided {
            provided.begin(step, ctx);
        }
    }

    /// The provider is to release the machine with its disks erased. False where it does not have to.
    pub(in crate::entities::node) fn begin_release(&mut self, then_deploy: bool, ctx: &TransitionContext<'_>) -> bool {
        let Some(provided) = self.provided.as_mut().filter(|it| then_deploy || it.is_held()) else { return false };
        provided.begin(ProviderStep::Releasing { then_deploy }, ctx);
        true
    }

    /// Whether the provider still has to take the machine back.
    pub(in crate::entities::node) fn is_held_at_provider(&self) -> bool {
        self.provided.as_ref().is_some_and(ProvidedMachine::is_held)
    }

    /// Whether the provider has not taken it back in time.
    pub(in crate::entities::node) fn is_release_overdue(&self, now: Timestamp) -> bool {
        self.provided.as_ref().is_some_and(|machine| machine.is_held() && machine.until <= now)
    }
}

/// The text as far as it is stored.
pub(in crate::entities::node) fn bounded_status(text: &str) -> String {
    text.chars().take(MAX_STATUS).collect()
}
