//! An entry of the SKU catalog: what a kind of machine consists of, where it may stand and what it costs (decisions 3, *SKU*).
//!
//! `draft → active → deprecated → inactive`, and back to active from either. Nodes and allocations refer to active entries alone.

use crate::audit::{Audit, AuditAction};
use crate::authz::Action;
use crate::event::Event;
use crate::id::{EntityRef, Kind, SkuId};
use crate::machine::{self, Command as _, Ctx, Deadline, Keys, Machine, Step, Timestamp};
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
        let audit = sku.audit(AuditAction::SkusCreate, json!({ "name": sku.spec.name }));
        sku.clone().said(None, "created by an administrator").audit(audit)
    }

    fn revise(&self, price: Option<Price>, allowed_regions: Option<Vec<String>>, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        if let Some(price) = price.filter(|price| Some(price) != self.price()) {
            next.prices.push(PriceVersion { price, from: ctx.now });
        }
        next.spec.allowed_regions = allowed_regions.unwrap_or(next.spec.allowed_regions);
        let audit = self.audit(
            AuditAction::SkusUpdate,
            json!({ "old_price": self.price(), "new_price": next.price(), "regions": next.spec.allowed_regions }),
        );
        let reply = Box::new(next.clone());
        Step::to(next, reply, "revised by an administrator").audit(audit)
    }

    fn activate(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match self.status {
            Status::Active => Ok(Step::stay(Box::new(self.clone()))),
            Status::Draft | Status::Deprecated | Status::Inactive => {
                Ok(self.changed(Status::Active, AuditAction::SkusActivate, reason, ctx))
            }
        }
    }

    fn deactivate(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match self.status {
            Status::Inactive => Ok(Step::stay(Box::new(self.clone()))),
            Status::Active | Status::Deprecated => {
                Ok(self.changed(Status::Inactive, AuditAction::SkusDeactivate, reason, ctx))
            }
            Status::Draft => Err(Rejection::WrongStatus {
                status: self.status.name().to_owned(),
                command: Command::Deactivate { reason: String::new() }.name().to_owned(),
            }),
        }
    }

    fn changed(&self, to: Status, action: AuditAction, reason: &str, ctx: &Ctx<'_>) -> Step<Self> {
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

    fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> Audit {
        Audit::new(action, EntityRef { kind: Kind::Sku, id: self.id.0 }, metadata)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::policy::PolicyBook;
    use std::fmt::Write as _;
    use uuid::Uuid;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(second, 0).unwrap()
    }

    fn decide(state: Option<&Sku>, command: Command, now: i64) -> Result<Step<Sku>, Rejection> {
        let (policy, by) = (PolicyBook::default(), Principal::system("test"));
        let id = Uuid::from_u128(1);
        Sku::decide(
            state,
            command,
            &Ctx {
                now: at(now),
                policy: &policy,
                by: &by,
                correlation_id: "c",
                trace: crate::machine::Trace::default(),
                seed: 7,
                id,
                version: 1,
            },
        )
    }

    fn create() -> Command {
        let spec = Spec {
            name: "h100x4".into(),
            gpu_vendor: "nvidia".into(),
            gpu_model: "H100".into(),
            gpu_memory_mib: 80_000,
            gpu_count: 4,
            cpu_model: "x".into(),
            cpu_cores: 64,
            memory_mib: 512_000,
            storage_gib: 4_000,
            interconnect: None,
            allowed_regions: vec!["eu".into()],
        };
        Command::Create { spec: Box::new(spec), price: Price::new("EUR", 100).unwrap() }
    }

    fn sku(status: Status) -> Sku {
        Sku { status, ..decide(None, create(), 0).unwrap().next.unwrap() }
    }

    fn dearer() -> Command {
        Command::Revise { price: Some(Price::new("EUR", 200).unwrap()), allowed_regions: None }
    }

    #[test]
    fn every_command_in_every_status_does_what_was_reviewed() {
        let reason = || "r".to_owned();
        let mut table = String::new();
        for status in [Status::Draft, Status::Active, Status::Deprecated, Status::Inactive] {
            let commands = [
                create(),
                dearer(),
                Command::Activate { reason: reason() },
                Command::Deactivate { reason: reason() },
                Command::Tick,
            ];
            for command in commands {
                let name = command.name();
                let outcome = match decide(Some(&sku(status)), command, 1) {
                    Err(rejection) => format!("refused: {rejection}"),
                    Ok(Step { next: None, .. }) => "stays".to_owned(),
                    Ok(Step { next: Some(next), events, audit, .. }) => {
                        let kept = serde_json::to_string(&next).unwrap();
                        assert_eq!(serde_json::from_str::<Sku>(&kept).unwrap(), next);
                        let said: Vec<_> = events.iter().map(Event::subject).collect();
                        format!("-> {} | {} | audit {}", next.state(), said.join(", "), audit[0].action.as_str())
                    }
                };
                writeln!(table, "{} {name}: {outcome}", status.name()).unwrap();
            }
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn what_does_not_exist_can_only_be_created() {
        assert_eq!(decide(None, dearer(), 0).err(), Some(Rejection::NotFound));
        assert_eq!(decide(None, Command::Tick, 0).err(), Some(Rejection::NotFound));
        let created = decide(None, create(), 0).unwrap().next.unwrap();
        assert_eq!((created.state(), created.keys().unique_name.as_deref()), ("draft", Some("h100x4")));
    }

    #[test]
    fn a_new_price_is_a_new_version_and_the_same_price_is_none() {
        let revised = decide(Some(&sku(Status::Active)), dearer(), 5).unwrap().next.unwrap();
        let versions: Vec<_> =
            revised.prices.iter().map(|version| (version.price.amount_minor_per_gpu_hour, version.from)).collect();
        assert_eq!(versions, [(100, at(0)), (200, at(5))]);
        let again = decide(Some(&revised), dearer(), 9).unwrap().next.unwrap();
        assert_eq!(again.prices, revised.prices);
    }

    #[test]
    fn every_approval_is_kept_with_who_gave_it() {
        let active =
            decide(Some(&sku(Status::Draft)), Command::Activate { reason: "r".into() }, 3).unwrap().next.unwrap();
        let approval = active.approvals.last().unwrap();
        assert_eq!((approval.actor.as_str(), approval.at), ("system:test", at(3)));
    }
}
