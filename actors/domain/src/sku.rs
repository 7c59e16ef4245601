//! An entry of the SKU catalog: what a kind of machine consists of, where it may stand and what it costs (decisions 3, *SKU*).
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
//! Nodes are registered for active entries alone. A deprecated one can still be rented while its nodes last, and is not shown to
//! those who look for something to rent. Every change of status needs two people's approval (`approval.rs`).

mod approval;
#[cfg(test)]
mod tests;

use crate::audit::{Audit, AuditAction};
use crate::authz::{Action, PlatformRole};
use crate::event::Event;
use crate::id::{EntityRef, Kind, SkuId};
use crate::machine::{self, Ctx, Deadline, Keys, Machine, Step, Timestamp};
use crate::money::Price;
use crate::node::Promise;
use serde::{Deserialize, Serialize};
use serde_json::json;

pub use approval::{Approve, InUse, Seen};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sku {
    pub id: SkuId,
    pub spec: Spec,
    pub status: Status,
    /// Every price that it ever had, oldest first; the last one counts for new allocations.
    pub prices: Vec<PriceVersion>,
    /// Those that led to its status: none of a draft, else two.
    pub approvals: Vec<Approval>,
    /// The change that waits for a second approval.
    #[serde(default)]
    pub pending: Option<Pending>,
    pub created_at: Timestamp,
}

/// What the entry promises.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
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
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriceVersion {
    pub price: Price,
    pub from: Timestamp,
}

/// One person's yes to a change of status, in one of the two roles that it needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    pub change: Change,
    pub role: PlatformRole,
    /// The subject who gave it.
    pub user_id: String,
    pub at: Timestamp,
    pub reason: String,
    /// Of a SKU in use that is to be deactivated: who is affected, and the way back.
    pub impact_review: Option<String>,
    pub rollback_plan: Option<String>,
    /// Who referred to the SKU then.
    pub in_use: InUse,
}

/// A change that one person wants. Another has until then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub first: Approval,
    pub until: Timestamp,
}

/// What two people decide on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Activate,
    Deprecate,
    Deactivate,
}

impl Change {
    pub const ALL: [Self; 3] = [Self::Activate, Self::Deprecate, Self::Deactivate];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Activate => "activate",
            Self::Deprecate => "deprecate",
            Self::Deactivate => "deactivate",
        }
    }

    /// The status that it leads to.
    #[must_use]
    pub const fn to(self) -> Status {
        match self {
            Self::Activate => Status::Active,
            Self::Deprecate => Status::Deprecated,
            Self::Deactivate => Status::Inactive,
        }
    }

    /// Where it may begin.
    const fn may_follow(self, status: Status) -> bool {
        match self {
            Self::Activate => matches!(status, Status::Draft | Status::Deprecated | Status::Inactive),
            Self::Deprecate => matches!(status, Status::Active),
            Self::Deactivate => matches!(status, Status::Active | Status::Deprecated),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Draft,
    Active,
    Deprecated,
    Inactive,
}

impl Status {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Active => "active",
            Self::Deprecated => "deprecated",
            Self::Inactive => "inactive",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Create {
        spec: Box<Spec>,
        price: Price,
    },
    Revise {
        price: Option<Price>,
        allowed_regions: Option<Vec<String>>,
    },
    /// One approval of a change of status.
    Approve(Box<Approve>),
    Tick,
}

impl machine::Command for Command {
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
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such SKU")]
    NotFound,
    #[error("the SKU exists already")]
    Exists,
    #[error("a SKU in status {status} cannot {command}")]
    WrongStatus { status: String, command: String },
    /// The approver does not hold the role that they name, or neither of the two.
    #[error("the approver does not hold {}", role.map_or("either role", PlatformRole::name))]
    RoleNotHeld { role: Option<PlatformRole> },
    /// A SKU in use is deactivated with this text alone.
    #[error("the SKU is in use, and {field} is missing")]
    ReviewMissing { field: String },
    /// The SKU is not at the version beside which the world was looked at.
    #[error("the SKU has changed since it was looked at")]
    Moved,
}

impl Machine for Sku {
    const KIND: Kind = Kind::Sku;
    type Command = Command;
    type Reply = Box<Self>;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match (state, command) {
            (None, Command::Create { spec, price }) => Ok(Self::create(*spec, price, ctx)),
            (Some(_), Command::Create { .. }) => Err(Rejection::Exists),
            (None, _) => Err(Rejection::NotFound),
            (Some(sku), Command::Revise { price, allowed_regions }) => Ok(sku.revise(price, allowed_regions, ctx)),
            (Some(sku), Command::Approve(approve)) => sku.approve(*approve, ctx),
            (Some(sku), Command::Tick) => Ok(sku.expire(ctx)),
        }
    }

    fn state(&self) -> &'static str {
        self.status.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        self.pending.as_ref().map(Pending::deadline)
    }

    fn keys(&self) -> Keys {
        Keys { owner: None, sku: None, unique_name: Some(self.spec.name.clone()) }
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl Sku {
    /// What a new allocation pays.
    #[must_use]
    pub fn price(&self) -> Option<&Price> {
        self.prices.last().map(|version| &version.price)
    }

    /// What a node of this SKU must live up to.
    #[must_use]
    pub fn promise(&self) -> Promise {
        Promise {
            sku_id: self.id,
            name: self.spec.name.clone(),
            gpu_model: self.spec.gpu_model.clone(),
            gpu_memory_mib: self.spec.gpu_memory_mib,
            gpu_count: self.spec.gpu_count,
            allowed_regions: self.spec.allowed_regions.clone(),
        }
    }

    fn create(spec: Spec, price: Price, ctx: &Ctx<'_>) -> Step<Self> {
        let sku = Self {
            id: SkuId(ctx.id),
            spec,
            status: Status::Draft,
            prices: vec![PriceVersion { price, from: ctx.now }],
            approvals: Vec::new(),
            pending: None,
            created_at: ctx.now,
        };
        let audit = sku.audit(AuditAction::SkusCreate, json!({ "name": sku.spec.name }));
        sku.clone().said(None, "created by an administrator").audit(audit)
    }

    fn revise(&self, price: Option<Price>, allowed_regions: Option<Vec<String>>, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        if let Some(price) = price.filter(|price| Some(price) != self.price()) {
            next.prices.push(PriceVersion { price, from: ctx.now });
        }
        next.spec.allowed_regions = allowed_regions.unwrap_or(next.spec.allowed_regions);
        // Who approved, approved of what there was.
        let differs = next != *self;
        let withdrawn = if differs { next.pending.take() } else { None };
        let audit = self.audit(
            AuditAction::SkusUpdate,
            json!({
                "old_price": self.price(), "new_price": next.price(), "regions": next.spec.allowed_regions,
                "withdrawn": withdrawn.map(|pending| pending.first),
            }),
        );
        let reply = Box::new(next.clone());
        Step::to(next, reply, "revised by an administrator").audit(audit)
    }

    fn said(self, from: Option<String>, why: &str) -> Step<Self> {
        let event = Event::SkuStateChanged { sku_id: self.id, from, to: self.status.name().to_owned() };
        let reply = Box::new(self.clone());
        Step::to(self, reply, why).event(event)
    }

    fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> Audit {
        Audit::new(action, EntityRef { kind: Kind::Sku, id: self.id.0 }, metadata)
    }
}
