//! An entry of the SKU catalog: what a kind of machine consists of, where it may stand and what it costs (decisions 3, *SKU*).
//!
//! `draft → active → deprecated → inactive`, and back to active from either. Nodes and allocations refer to active entries alone.

use crate::authz::Action;
use crate::event::Event;
use crate::id::{EntityRef, Kind, SkuId};
use crate::machine::{self, Audit, Command as _, Ctx, Deadline, Keys, Machine, Step, Timestamp};
use crate::money::Price;
use crate::node::Promise;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sku {
    pub id: SkuId,
    pub spec: Spec,
    pub status: Status,
    /// Every price that it ever had, oldest first; the last one counts for new allocations.
    pub prices: Vec<PriceVersion>,
    pub approvals: Vec<Approval>,
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

/// One person's yes to a lifecycle change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    pub role: String,
    pub actor: String,
    pub at: Timestamp,
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
    Create { spec: Box<Spec>, price: Price },
    Revise { price: Option<Price>, allowed_regions: Option<Vec<String>> },
    Activate { reason: String },
    Deactivate { reason: String },
    Tick,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "create",
            Self::Revise { .. } => "revise",
            Self::Activate { .. } => "activate",
            Self::Deactivate { .. } => "deactivate",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Create { .. } | Self::Revise { .. } | Self::Activate { .. } | Self::Deactivate { .. } => {
                Action::ManageSkus
            }
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
            (Some(sku), Command::Activate { reason }) => sku.activate(&reason, ctx),
            (Some(sku), Command::Deactivate { reason }) => sku.deactivate(&reason, ctx),
            (Some(sku), Command::Tick) => Ok(Step::stay(Box::new(sku.clone()))),
        }
    }

    fn state(&self) -> &'static str {
        self.status.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        None
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
            created_at: ctx.now,
        };
        let audit = sku.audit("skus.create", json!({ "name": sku.spec.name }));
        sku.clone().said(None, "created by an administrator").audit(audit)
    }

    fn revise(&self, price: Option<Price>, allowed_regions: Option<Vec<String>>, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        if let Some(price) = price.filter(|price| Some(price) != self.price()) {
            next.prices.push(PriceVersion { price, from: ctx.now });
        }
        next.spec.allowed_regions = allowed_regions.unwrap_or(next.spec.allowed_regions);
        let audit = self.audit(
            "skus.update",
            json!({ "old_price": self.price(), "new_price": next.price(), "regions": next.spec.allowed_regions }),
        );
        let reply = Box::new(next.clone());
        Step::to(next, reply, "revised by an administrator").audit(audit)
    }

    fn activate(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match self.status {
            Status::Active => Ok(Step::stay(Box::new(self.clone()))),
            Status::Draft | Status::Deprecated | Status::Inactive => {
                Ok(self.changed(Status::Active, "skus.activate", reason, ctx))
            }
        }
    }

    fn deactivate(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match self.status {
            Status::Inactive => Ok(Step::stay(Box::new(self.clone()))),
            Status::Active | Status::Deprecated => Ok(self.changed(Status::Inactive, "skus.deactivate", reason, ctx)),
            Status::Draft => Err(Rejection::WrongStatus {
                status: self.status.name().to_owned(),
                command: Command::Deactivate { reason: String::new() }.name().to_owned(),
            }),
        }
    }

    fn changed(&self, to: Status, action: &'static str, reason: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        let from = self.status.name().to_owned();
        next.status = to;
        next.approvals.push(Approval { role: "admin".to_owned(), actor: ctx.by.to_string(), at: ctx.now });
        next.said(Some(from), reason).audit(self.audit(action, json!({ "reason": reason })))
    }

    fn said(self, from: Option<String>, why: &str) -> Step<Self> {
        let event = Event::SkuStateChanged { sku_id: self.id, from, to: self.status.name().to_owned() };
        let reply = Box::new(self.clone());
        Step::to(self, reply, why).event(event)
    }

    fn audit(&self, action: &'static str, metadata: serde_json::Value) -> Audit {
        Audit::new(action, EntityRef { kind: Kind::Sku, id: self.id.0 }, metadata)
    }
}
