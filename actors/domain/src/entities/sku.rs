//! An entry of the SKU catalog: the hardware of a kind of machine, its regions and its price (decisions 3, *SKU*).
//!
//! ```text
//! draft ──activate──▶ active ──deprecate──▶ deprecated
//!                      ▲ ▲│                 │ │
//!                      │ └┼────activate─────┘ │
//!                      │  └──deactivate──┐    │deactivate
//!                      │                 ▼    ▼
//!                      └──activate───── inactive
//! ```
//!
//! Nodes are registered for active entries alone. A deprecated one can still be rented while it has nodes, and is not shown in the catalog
//! of offers. Every change of status needs two people's approval (`approval.rs`).

mod approval;
#[cfg(test)]
mod tests;

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::{Action, PlatformRole};
use crate::event::Event;
use crate::explanation::Explanation;
use crate::hardware::{ExpectedHardware, PromisedHardware, SoldMachine};
use crate::id::{EntityKind, EntityRef, SkuId, UserId};
use crate::money::Price;
use crate::state_machine::{self, Deadline, Effect, IndexKeys, Machine, Timestamp, Transition, TransitionContext};
use crate::validation::ValidationMinimums;
use serde::{Deserialize, Serialize};
use serde_json::json;

pub use approval::{ApprovalContext, ApprovalRequest, ReviewText, SkuUsage};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sku {
    pub id: SkuId,
    pub spec: SkuSpec,
    pub status: CatalogStatus,
    /// Its last prices, oldest first; the last one applies to new allocations. The history and the audit log have the earlier ones.
    pub prices: Vec<PriceVersion>,
    /// The approvals of its status: none of a draft, else two.
    pub approvals: Vec<Approval>,
    /// The change that waits for a second approval.
    #[serde(default)]
    pub pending: Option<PendingChange>,
    /// What a validation of its machines has to reach.
    #[serde(default, skip_serializing_if = "ValidationMinimums::is_empty")]
    pub validation: ValidationMinimums,
    pub created_at: Timestamp,
}

/// The hardware that the entry promises.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkuSpec {
    /// Unique in the catalog.
    pub name: String,
    pub gpu_vendor: String,
    pub gpu_model: String,
    pub gpu_memory_mib: u64,
    pub gpu_count: u32,
    pub cpu_model: String,
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
    pub interconnect: Option<String>,
    pub allowed_regions: Vec<String>,
    /// What the inventories of its nodes are compared with, beside their GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_hardware: Option<Box<ExpectedHardware>>,
}

/// The bound of prices in the state: an entry whose price follows the market would grow without end.
const MAX_PRICES: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriceVersion {
    pub price: Price,
    pub from: Timestamp,
}

/// One person's approval of a change of status, in one of the two roles that it needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    pub change: StatusChange,
    pub role: PlatformRole,
    /// The subject who gave it.
    pub user_id: UserId,
    pub at: Timestamp,
    pub reason: String,
    /// For the deactivation of a SKU in use: who is affected, and the way back.
    pub impact_review: Option<String>,
    pub rollback_plan: Option<String>,
    /// The usage of the SKU at that time.
    pub in_use: SkuUsage,
}

/// A change with one approval. The second is possible until `until`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingChange {
    pub first: Approval,
    pub until: Timestamp,
}

/// A change of status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum StatusChange {
    Activate,
    Deprecate,
    Deactivate,
}

impl StatusChange {
    pub const ALL: [Self; 3] = [Self::Activate, Self::Deprecate, Self::Deactivate];

    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// The status that it leads to.
    #[must_use]
    pub const fn to(self) -> CatalogStatus {
        match self {
            Self::Activate => CatalogStatus::Active,
            Self::Deprecate => CatalogStatus::Deprecated,
            Self::Deactivate => CatalogStatus::Inactive,
        }
    }

    /// Whether it is possible in this status.
    const fn may_change_from(self, status: CatalogStatus) -> bool {
        match self {
            Self::Activate => {
                matches!(status, CatalogStatus::Draft | CatalogStatus::Deprecated | CatalogStatus::Inactive)
            }
            Self::Deprecate => matches!(status, CatalogStatus::Active),
            Self::Deactivate => matches!(status, CatalogStatus::Active | CatalogStatus::Deprecated),
        }
    }

    const fn audited_as(self) -> AuditAction {
        match self {
            Self::Activate => AuditAction::SkusActivate,
            Self::Deprecate => AuditAction::SkusDeprecate,
            Self::Deactivate => AuditAction::SkusDeactivate,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum CatalogStatus {
    Draft,
    Active,
    Deprecated,
    Inactive,
}

impl CatalogStatus {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Create {
        spec: Box<SkuSpec>,
        price: Price,
        #[serde(default, skip_serializing_if = "ValidationMinimums::is_empty")]
        validation: ValidationMinimums,
    },
    Revise {
        price: Option<Price>,
        allowed_regions: Option<Vec<String>>,
        /// In place of what was expected; an empty one expects nothing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expected_hardware: Option<Box<ExpectedHardware>>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        validation: Option<ValidationMinimums>,
        /// The version that the change is based on; of another one it is refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_version: Option<i64>,
    },
    /// One approval of a change of status.
    Approve(Box<ApprovalRequest>),
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "create",
            Self::Revise { .. } => "revise",
            Self::Approve(approve) => approve.change.name(),
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Create { .. } | Self::Revise { .. } => Action::ManageSkus,
            Self::Approve(_) => Action::ApproveSkus,
            Self::Tick => Action::Advance,
        }
    }

    fn encoding(&self) -> u16 {
        match self {
            // A member of the release before would ignore the version, and overwrite what the administrator has not seen.
            Self::Revise { if_version: Some(_), .. } => state_machine::VERSIONED_SKU_REVISIONS,
            Self::Revise { if_version: None, .. } | Self::Create { .. } | Self::Approve(_) | Self::Tick => {
                state_machine::FIRST_ENCODING
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such SKU")]
    NotFound,
    #[error("the SKU exists already")]
    Exists,
    #[error("a SKU in status {status} cannot {command}")]
    WrongStatus { status: CatalogStatus, command: StatusChange },
    /// The approver does not hold the role that they name, or neither of the two.
    #[error("the approver does not hold {}", role.map_or("either role", PlatformRole::name))]
    RoleNotHeld { role: Option<PlatformRole> },
    /// The change has the approval of the one role, and waits for a second person in this one.
    #[error("the change waits for a second person in role {}", missing.name())]
    ApprovedBefore { change: StatusChange, missing: PlatformRole },
    /// The deactivation of a SKU in use requires this text.
    #[error("the SKU is in use, and {field} is missing")]
    ReviewMissing { field: ReviewText },
    /// The SKU is not at the version at which the approval's context was read.
    #[error("the SKU has changed since it was looked at")]
    Moved,
    #[error("the SKU is at version {current}, not at the one in If-Match")]
    VersionDiffers { current: i64 },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("SKU"),
            Self::Exists => Explanation::conflict("The SKU exists already."),
            Self::WrongStatus { status, command } => {
                let done = match command {
                    StatusChange::Deprecate => "deprecated; only an active one can be",
                    StatusChange::Deactivate => "deactivated; it was never active",
                    StatusChange::Activate => "changed so",
                };
                Explanation::conflict(format!("A SKU that is {status} cannot be {done}."))
                    .detail("status", status.name())
            }
            Self::RoleNotHeld { role: Some(role) } => Explanation::forbidden(format!(
                "You do not hold the platform role `{role}`; leave `role` out, or ask an \
                 administrator to bind it to you."
            ))
            .detail("field", "role"),
            Self::RoleNotHeld { role: None } => Explanation::forbidden(
                "This needs the platform role `platform_operations` or `inventory_owner`; ask an \
                 administrator to bind it to you.",
            ),
            Self::ApprovedBefore { change, missing } => Explanation::conflict(format!(
                "This approval to {} the SKU is recorded; a second person, in role `{}`, has to approve it.",
                change.name(),
                missing.name()
            ))
            .detail("role", missing.name()),
            Self::ReviewMissing { field } => Explanation::invalid(
                "Nodes or allocations refer to the SKU: say in `impact_review` what its end means for them, and in \
                 `rollback_plan` how it is undone.",
                field.into_str(),
            ),
            Self::VersionDiffers { current } => Explanation::conflict(
                "The SKU has changed since the version in If-Match; read it again and repeat your change on it.",
            )
            .detail("field", "If-Match")
            .detail("current_generation", current),
            Self::Moved => Explanation::temporary("Others decide on the SKU at this moment; ask again."),
        }
    }
}

impl Machine for Sku {
    const KIND: EntityKind = EntityKind::Sku;
    /// Three approvals with two texts each, and the prices.
    const SNAPSHOT_MOST: usize = 192 * 1024;
    type Command = Command;
    type Reply = Box<Self>;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Create { spec, price, validation }) => Ok(Self::create(*spec, price, validation, ctx)),
            (Some(_), Command::Create { .. }) => Err(Rejection::Exists),
            (None, _) => Err(Rejection::NotFound),
            (Some(_), Command::Revise { if_version: Some(version), .. }) if version != ctx.version => {
                Err(Rejection::VersionDiffers { current: ctx.version })
            }
            (Some(sku), Command::Revise { price, allowed_regions, expected_hardware, validation, if_version: _ }) => {
                Ok(sku.revise(price, allowed_regions, expected_hardware, validation, ctx))
            }
            (Some(sku), Command::Approve(approve)) => sku.approve(*approve, ctx),
            (Some(sku), Command::Tick) => Ok(sku.expire(ctx)),
        }
    }

    fn state(&self) -> &'static str {
        self.status.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        self.pending.as_ref().map(PendingChange::deadline)
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: None, sku: None, unique_name: Some(self.spec.name.clone()) }
    }

    fn is_transient(&self) -> bool {
        self.pending.is_some()
    }
}

impl Sku {
    /// The price of a new allocation.
    #[must_use]
    pub fn price(&self) -> Option<&Price> {
        self.prices.last().map(|version| &version.price)
    }

    /// The hardware that a node of this SKU must have.
    #[must_use]
    pub fn promise(&self) -> PromisedHardware {
        PromisedHardware {
            sku_id: self.id,
            name: self.spec.name.clone(),
            gpu_model: self.spec.gpu_model.clone(),
            gpu_memory_mib: self.spec.gpu_memory_mib,
            gpu_count: self.spec.gpu_count,
            allowed_regions: self.spec.allowed_regions.clone(),
            machine: Some(SoldMachine {
                cpu_cores: self.spec.cpu_cores,
                memory_mib: self.spec.memory_mib,
                storage_gib: self.spec.storage_gib,
            }),
        }
    }

    fn create(
        spec: SkuSpec,
        price: Price,
        validation: ValidationMinimums,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let sku = Self {
            id: SkuId(ctx.id),
            spec,
            status: CatalogStatus::Draft,
            prices: vec![PriceVersion { price, from: ctx.now }],
            approvals: Vec::new(),
            pending: None,
            validation,
            created_at: ctx.now,
        };
        let audit = sku.audit(AuditAction::SkusCreate, json!({ "name": sku.spec.name }));
        let step = sku.clone().status_changed(None, "created by an administrator").audit(audit);
        sku.publish_minimums(&ValidationMinimums::default(), step)
    }

    fn revise(
        &self,
        price: Option<Price>,
        allowed_regions: Option<Vec<String>>,
        expected_hardware: Option<Box<ExpectedHardware>>,
        validation: Option<ValidationMinimums>,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        if let Some(price) = price.filter(|price| Some(price) != self.price()) {
            next.prices.push(PriceVersion { price, from: ctx.now });
            let surplus = next.prices.len().saturating_sub(MAX_PRICES);
            next.prices.drain(..surplus);
        }
        next.spec.allowed_regions = allowed_regions.unwrap_or(next.spec.allowed_regions);
        if let Some(expected) = expected_hardware {
            next.spec.expected_hardware = Some(expected).filter(|expected| !expected.is_empty());
        }
        let expects_other_hardware = next.spec.expected_hardware != self.spec.expected_hardware;
        next.validation = validation.unwrap_or(next.validation);
        // An approval covers the entry as it was.
        let differs = next != *self;
        let withdrawn = if differs { next.pending.take() } else { None };
        let audit = self.audit(
            AuditAction::SkusUpdate,
            json!({
                "old_price": self.price(), "new_price": next.price(), "regions": next.spec.allowed_regions,
                "expected_hardware": next.spec.expected_hardware,
                "old_validation": self.validation, "new_validation": next.validation,
                "withdrawn": withdrawn.map(|pending| pending.first),
            }),
        );
        let reply = Box::new(next.clone());
        let step = Transition::to(next.clone(), reply, "revised by an administrator").audit(audit);
        let step = if expects_other_hardware {
            step.event(Event::SkuHardwareExpected { sku_id: self.id }).effect(Effect::ReadPolicy)
        } else {
            step
        };
        next.publish_minimums(&self.validation, step)
    }

    /// Every process reads changed minimums, with which nodes judge their validations.
    fn publish_minimums(&self, before: &ValidationMinimums, step: Transition<Self>) -> Transition<Self> {
        if self.validation == *before {
            return step;
        }
        step.event(Event::SkuMinimumsWritten { sku_id: self.id }).effect(Effect::ReadPolicy)
    }

    fn status_changed(self, from: Option<String>, why: &str) -> Transition<Self> {
        let event = Event::SkuStateChanged { sku_id: self.id, from, to: self.status.name().to_owned() };
        let reply = Box::new(self.clone());
        Transition::to(self, reply, why).event(event)
    }

    fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> AuditRecord {
        AuditRecord::new(action, EntityRef { kind: EntityKind::Sku, id: self.id.0 }, metadata)
    }
}
