//! Finds a node for an allocation: counts it against its tenant's quota and asks the fitting nodes in turn. The one that reserves
//! says so itself, in the commit that carries the request out; that there is none, the allocation is told from here. Nothing that
//! matters is held here: it can stop anywhere, and the event is worked on again.

mod fleet;

use super::reactor::{Effect, Heard, Reactor};
use actors::place::{command_id, id_of_name};
use actors::{AskError, CommandKey};
use domain::allocation::{self, Allocation, Phase};
use domain::billing_account::{self, BillingAccount};
use domain::machine::Command as _;
use domain::node::{self, Node};
use domain::placement::{self, Wanted};
use domain::policy::FULL_REIMAGE;
use domain::tenant::{self, AskedScopes, Tenant};
use domain::{AllocationId, EntityRef, EventId, Kind, NodeId};
use fleet::Fleet;
use persistence::StoreError;
use prometheus::{Histogram, HistogramOpts, IntCounter, Registry};
use std::sync::Arc;
use std::time::Instant;

/// Places allocations.
pub struct Placer {
    fleet: Fleet,
    placed: IntCounter,
    refused: IntCounter,
    asked: Histogram,
}

impl Placer {
    /// # Errors
    /// Where the metrics are registered already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let asked = HistogramOpts::new("provisioning_nodes_asked", "Nodes that were asked for one allocation.")
            .buckets(vec![0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0]);
        let placer = Self {
            fleet: Fleet::default(),
            placed: IntCounter::new("provisioning_placed_total", "Allocations for which a node was found.")?,
            refused: IntCounter::new("provisioning_unplaced_total", "Searches that found no node.")?,
            asked: Histogram::with_opts(asked)?,
        };
        registry.register(Box::new(placer.placed.clone()))?;
        registry.register(Box::new(placer.refused.clone()))?;
        registry.register(Box::new(placer.asked.clone()))?;
        Ok(placer)
    }

    /// What follows from a request for an allocation.
    pub(super) async fn place(&self, by: &Reactor, heard: &Heard, id: AllocationId) -> Effect {
        match self.search(by, heard, id).await {
            Ok(effect) => effect,
            Err(Stuck(why)) => Effect::Later { why },
        }
    }

    async fn search(&self, by: &Reactor, heard: &Heard, id: AllocationId) -> Result<Effect, Stuck> {
        let allocation = match read(by, id).await? {
            Standing::Requested(allocation) => allocation,
            Standing::Over { user_id } => return Ok(forget(by, heard, id, &user_id).await),
            Standing::Placed => return Ok(by.settle(heard).await),
        };
        let tell = |command| by.carry_out::<Allocation>(heard, id.0, command);
        if allocation.asked.isolation_model == FULL_REIMAGE {
            return Ok(tell(allocation::Command::NotIsolated).await);
        }
        // Before anybody is asked to do anything: who pays for it?
        if let Some(message) = self.unaffordable(by, heard, &allocation).await? {
            return Ok(tell(allocation::Command::Unaffordable { message }).await);
        }
        if let Some(limit) = self.over_quota(by, heard, &allocation).await? {
            return Ok(tell(allocation::Command::OverQuota { limit }).await);
        }
        // It may have ended while it was being counted: its end may have been heard before its beginning.
        if let Standing::Over { user_id } = read(by, id).await? {
            return Ok(forget(by, heard, id, &user_id).await);
        }
        let wanted = Wanted {
            node_id: allocation.asked.node_id,
            region_code: allocation.asked.region_code.as_deref(),
            gpu_count: allocation.asked.gpu_count,
        };
        let (began, sku) = (Instant::now(), allocation.asked.sku_id);
        let (mut asked, mut since) = (0.0, None);
        let suggestion = loop {
            let look = self.fleet.look(&by.reads, sku, id, since).await?;
            for node_id in placement::order(&look.candidates, &wanted, id.0.as_u128()) {
                asked += 1.0;
                if let Some(effect) = self.reserve(by, heard, &allocation, node_id).await? {
                    self.placed.inc();
                    self.asked.observe(asked);
                    self.fleet.reserved(sku, node_id, id, allocation.asked.gpu_count).await;
                    return Ok(effect);
                }
            }
            if look.at >= began {
                break placement::suggestion(&look.candidates, &wanted);
            }
            // What was seen was old: nobody is turned away for it.
            since = Some(began);
        };
        self.refused.inc();
        self.asked.observe(asked);
        Ok(tell(allocation::Command::NoCapacity { suggestion: Some(suggestion) }).await)
    }

    /// What is missing, where the account does not cover a first window.
    async fn unaffordable(
        &self,
        by: &Reactor,
        heard: &Heard,
        allocation: &Allocation,
    ) -> Result<Option<String>, Stuck> {
        let asked = &allocation.asked;
        let (holder, price) = (asked.holder(), asked.price.clone());
        let account = id_of_name(Kind::BillingAccount, &holder.to_string());
        let (user_id, gpu_count) = (asked.user_id.clone(), asked.gpu_count);
        let hold = billing_account::Command::Hold { holder, allocation_id: allocation.id, user_id, price, gpu_count };
        match by.directory.ask::<BillingAccount>(&by.permit, account, hold, by.asked(heard)).await {
            Ok(_) => Ok(None),
            Err(AskError::Rejected(missing)) => Ok(Some(words_of(&missing, asked.price.currency.as_str()))),
            Err(error) => Err(Stuck(error.to_string())),
        }
    }

    /// The limit, where the tenant has reached it.
    async fn over_quota(&self, by: &Reactor, heard: &Heard, allocation: &Allocation) -> Result<Option<i64>, Stuck> {
        let asked = &allocation.asked;
        let admit = tenant::Command::Admit {
            user_id: asked.user_id.clone(),
            allocation_id: allocation.id,
            scopes: AskedScopes {
                org_id: asked.org_id.clone(),
                project_id: asked.project_id.clone(),
                plan: asked.plan.clone(),
            },
            logins_revision: allocation.logins().as_of,
        };
        let tenant = id_of_name(Kind::Tenant, &asked.user_id);
        match by.directory.ask::<Tenant>(&by.permit, tenant, admit, by.asked(heard)).await {
            Ok(_) => Ok(None),
            Err(AskError::Rejected(tenant::Rejection::OverQuota { limit })) => Ok(Some(limit)),
            Err(error) => Err(Stuck(error.to_string())),
        }
    }

    /// Asks a node to set devices aside, in the commit that carries the request out. `None` where it cannot.
    async fn reserve(
        &self,
        by: &Reactor,
        heard: &Heard,
        allocation: &Allocation,
        node_id: NodeId,
    ) -> Result<Option<Effect>, Stuck> {
        let logins = allocation.logins();
        let reserve = node::Command::Reserve {
            allocation_id: allocation.id,
            gpu_count: allocation.asked.gpu_count,
            keys: logins.keys,
            revision: logins.revision,
        };
        let asked = by.asked(heard).once(reservation(heard.id, node_id, reserve.name()));
        match by.directory.ask::<Node>(&by.permit, node_id.0, reserve, asked).await {
            Ok(answered) if answered.written => Ok(Some(Effect::Settled)),
            // An earlier try got this far, and the node has said so.
            Ok(_) | Err(AskError::AlreadyDone) => Ok(Some(by.settle(heard).await)),
            Err(AskError::Rejected(_)) => Ok(None),
            // It may have reserved: the next try asks it first.
            Err(error) => Err(Stuck(error.to_string())),
        }
    }
}

/// What the user reads of it.
fn words_of(missing: &billing_account::Rejection, currency: &str) -> String {
    match missing {
        billing_account::Rejection::InsufficientBalance { needed, available } => format!(
            "A first window costs {needed} minor units of {currency}, and {available} are available: the balance without what is held \
             and what runs. Pay money in, or ask for less."
        ),
        billing_account::Rejection::CurrencyDiffers { account, given } => {
            format!(
                "This is priced in {given}, and the account is in {account}; ask for a SKU that is priced in {account}."
            )
        }
        billing_account::Rejection::NotFound
        | billing_account::Rejection::Amount { .. }
        | billing_account::Rejection::Full
        | billing_account::Rejection::MoreThanCost { .. }
        | billing_account::Rejection::TooLate { .. }
        | billing_account::Rejection::TooManyRefunds
        | billing_account::Rejection::Moved => missing.to_string(),
    }
}

/// A reservation for this request at this node. Each node has its own: that one has reserved says nothing about another.
fn reservation(event: EventId, node_id: NodeId, command: &str) -> CommandKey {
    let id = command_id(&[b"event", event.0.as_bytes(), command.as_bytes(), node_id.0.as_bytes()]);
    CommandKey { id, ..CommandKey::of_event(event, command) }
}

/// Where the allocation of a request stands when it is worked on.
enum Standing {
    Requested(Arc<Allocation>),
    /// It has a node, or is giving one back: an earlier try got this far.
    Placed,
    Over {
        user_id: String,
    },
}

async fn read(by: &Reactor, id: AllocationId) -> Result<Standing, Stuck> {
    let allocation = match by.directory.host().remembered::<Allocation>(id.0) {
        Some((allocation, _)) => allocation,
        None => {
            let snapshot = by.reads.snapshot(EntityRef { kind: Kind::Allocation, id: id.0 }).await?;
            let snapshot = snapshot.ok_or_else(|| Stuck("the allocation is not there".to_owned()))?;
            Arc::new(serde_json::from_str(&snapshot.body)?)
        }
    };
    Ok(match &allocation.phase {
        Phase::Requested { .. } => Standing::Requested(allocation),
        Phase::Released { .. } => Standing::Over { user_id: allocation.asked.user_id.clone() },
        Phase::Provisioning { .. } | Phase::Active { .. } | Phase::Releasing { .. } | Phase::ReleaseFailed { .. } => {
            Standing::Placed
        }
    })
}

/// Takes an allocation that is over out of its tenant's quota, wherever in between it was counted.
async fn forget(by: &Reactor, heard: &Heard, id: AllocationId, user_id: &str) -> Effect {
    let command = tenant::Command::Forget { allocation_id: id };
    by.carry_out::<Tenant>(heard, id_of_name(Kind::Tenant, user_id), command).await
}

/// The search cannot go on now.
struct Stuck(String);

impl From<StoreError> for Stuck {
    fn from(error: StoreError) -> Self {
        Self(error.to_string())
    }
}

impl From<serde_json::Error> for Stuck {
    fn from(error: serde_json::Error) -> Self {
        Self(format!("the allocation cannot be read: {error}"))
    }
}
