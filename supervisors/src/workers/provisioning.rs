//! Places an allocation: counts it against its tenant's quota and asks the candidate nodes in order. The node that reserves notifies the
//! allocation in the commit that settles the request; a search without a node is reported to the allocation from here. This worker holds
//! no state that matters: it can stop anywhere, and the event is processed again.

use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use super::placement_index::{FreeGpuIndex, SearchOutcome};
use actors::sharding::{command_id, id_of_name};
use actors::{AskError, CommandKey};
use domain::allocation::{self, Allocation, Phase};
use domain::billing_account::{self, BillingAccount, PlanClaim};
use domain::money::{HourlyRate, MicroAmount, Price};
use domain::node::{self, Node};
use domain::placement::PlacementRequest;
use domain::state_machine::{CommandSort as _, Timestamp};
use domain::tenant::{self, QuotaScopes, Tenant};
use domain::{AllocationId, EntityKind, EntityRef, EventId, NodeId, UserId};
use persistence::StoreError;
use prometheus::{Histogram, HistogramOpts, IntCounter, Registry};
use std::sync::Arc;

/// Places allocations.
pub struct Placer {
    free_gpus: Arc<FreeGpuIndex>,
    placed: IntCounter,
    refused: IntCounter,
    asked: Histogram,
}

impl Placer {
    /// # Errors
    /// Where the metrics are registered already.
    pub fn new(registry: &Registry, free_gpus: Arc<FreeGpuIndex>) -> Result<Self, prometheus::Error> {
        let asked = HistogramOpts::new("provisioning_nodes_asked", "Nodes that were asked for one allocation.")
            .buckets(vec![0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0]);
        let placer = Self {
            free_gpus,
            placed: IntCounter::new("provisioning_placed_total", "Allocations for which a node was found.")?,
            refused: IntCounter::new("provisioning_unplaced_total", "Searches that found no node.")?,
            asked: Histogram::with_opts(asked)?,
        };
        registry.register(Box::new(placer.placed.clone()))?;
        registry.register(Box::new(placer.refused.clone()))?;
        registry.register(Box::new(placer.asked.clone()))?;
        Ok(placer)
    }

    /// The reaction to a request for an allocation.
    pub(super) async fn place(&self, by: &ReactionContext, delivery: &EventDelivery, id: AllocationId) -> Disposition {
        match self.search(by, delivery, id).await {
            Ok(disposition) => disposition,
            Err(SearchBlocked(why)) => Disposition::Later { why },
        }
    }

    async fn search(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        id: AllocationId,
    ) -> Result<Disposition, SearchBlocked> {
        let allocation = match search_status(by, id).await? {
            SearchStatus::Requested(allocation) => allocation,
            SearchStatus::Over { user_id } => return Ok(release_quota(by, delivery, id, &user_id).await),
            SearchStatus::Placed => return Ok(by.settle(delivery).await),
        };
        let send = |fact: allocation::Fact| by.send_command::<Allocation>(delivery, id.0, fact);
        // The account first: whether the first window is covered.
        if let Some(message) = self.unaffordable(by, delivery, &allocation).await? {
            return Ok(send(allocation::Fact::Unaffordable { message }).await);
        }
        if let Some(limit) = self.over_quota(by, delivery, &allocation).await? {
            return Ok(send(allocation::Fact::OverQuota { limit }).await);
        }
        // The allocation may have ended while it was counted: its end may have been processed before its request.
        if let SearchStatus::Over { user_id } = search_status(by, id).await? {
            return Ok(release_quota(by, delivery, id, &user_id).await);
        }
        let wanted = PlacementRequest {
            allocation_id: id,
            sku_id: allocation.asked.sku_id,
            node_id: allocation.asked.node_id,
            region_code: allocation.asked.region_code.as_deref(),
            gpu_count: allocation.asked.gpu_count,
            reimages: allocation.asked.is_reimaged_after(),
        };
        let reserve = |node_id| self.reserve(by, delivery, &allocation, node_id);
        match self.free_gpus.place(&wanted, reserve).await? {
            SearchOutcome::Reserved { reservation, asked } => {
                self.placed.inc();
                self.asked.observe(asked as f64);
                Ok(reservation)
            }
            SearchOutcome::NoRoom { suggestion, asked } => {
                self.refused.inc();
                self.asked.observe(asked as f64);
                Ok(send(allocation::Fact::NoCapacity { suggestion: Some(suggestion) }).await)
            }
        }
    }

    /// The message to the user, where the account does not cover the first window.
    async fn unaffordable(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        allocation: &Allocation,
    ) -> Result<Option<String>, SearchBlocked> {
        let asked = &allocation.asked;
        let (holder, price) = (asked.holder(), asked.price.clone());
        let account = id_of_name(EntityKind::BillingAccount, &holder.to_string());
        let (user_id, gpu_count) = (asked.owner.user_id.clone(), asked.gpu_count);
        let plan = Some(PlanClaim { plan: asked.owner.plan.clone(), seen_at: allocation.requested_at });
        let hold = billing_account::Instruction::Hold {
            holder,
            allocation_id: allocation.id,
            user_id,
            price,
            gpu_count,
            plan,
        };
        match by.directory.ask::<BillingAccount>(&by.permit, account, hold.into(), by.context_for(delivery)).await {
            Ok(_) => Ok(None),
            Err(AskError::Rejected(missing)) => Ok(Some(user_message(&missing, &asked.price, asked.gpu_count))),
            Err(error) => Err(SearchBlocked(error.to_string())),
        }
    }

    /// The quota, where the tenant has reached it.
    async fn over_quota(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        allocation: &Allocation,
    ) -> Result<Option<i64>, SearchBlocked> {
        let asked = &allocation.asked;
        let admit = tenant::Instruction::Admit {
            user_id: asked.owner.user_id.clone(),
            allocation_id: allocation.id,
            scopes: QuotaScopes {
                org_id: asked.owner.org_id.clone(),
                project_id: asked.owner.project_id.clone(),
                plan: asked.owner.plan.clone(),
            },
            logins_revision: allocation.ssh_access().as_of,
        };
        let tenant = id_of_name(EntityKind::Tenant, &asked.owner.user_id);
        match by.directory.ask::<Tenant>(&by.permit, tenant, admit.into(), by.context_for(delivery)).await {
            Ok(_) => Ok(None),
            Err(AskError::Rejected(tenant::Rejection::OverQuota { limit })) => Ok(Some(limit)),
            Err(error) => Err(SearchBlocked(error.to_string())),
        }
    }

    /// Asks a node to reserve devices, in the commit that settles the request. `None` where it refuses.
    async fn reserve(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        allocation: &Allocation,
        node_id: NodeId,
    ) -> Result<Option<Disposition>, SearchBlocked> {
        let logins = allocation.ssh_access();
        let reserve = node::Instruction::Reserve {
            allocation_id: allocation.id,
            gpu_count: allocation.asked.gpu_count,
            keys: logins.keys,
            revision: logins.revision,
            reimages: allocation.asked.is_reimaged_after(),
        };
        let asked = by.context_for(delivery).with_key(reservation_key(delivery.id, node_id, reserve.tag()));
        match by.directory.ask::<Node>(&by.permit, node_id.0, reserve.into(), asked).await {
            Ok(answered) if answered.written => Ok(Some(Disposition::Settled)),
            // An earlier attempt reserved, and the node has notified the allocation.
            Ok(_) | Err(AskError::AlreadyDone) => Ok(Some(by.settle(delivery).await)),
            Err(AskError::Rejected(_)) => Ok(None),
            // The node may have reserved: the next attempt asks it first.
            Err(error) => Err(SearchBlocked(error.to_string())),
        }
    }
}

/// The text for the user.
fn user_message(missing: &billing_account::Rejection, price: &Price, gpu_count: u32) -> String {
    match missing {
        // The account is in the currency of the price, or the rejection is another one.
        billing_account::Rejection::InsufficientBalance { needed, available, .. } => format!(
            "The first {} {}; {} are available. Pay in: `gpuctl billing top-up`",
            first_window(*needed, HourlyRate::of(price, gpu_count)),
            needed.in_currency(&price.currency),
            available.in_currency(&price.currency)
        ),
        billing_account::Rejection::CurrencyDiffers { account, given } => {
            format!(
                "This is priced in {given}, and the account is in {account}; ask for a SKU that is priced in {account}."
            )
        }
        billing_account::Rejection::NotFound
        | billing_account::Rejection::Amount { .. }
        | billing_account::Rejection::Full { .. }
        | billing_account::Rejection::MoreThanCost { .. }
        | billing_account::Rejection::TooLate { .. }
        | billing_account::Rejection::TooManyRefunds
        | billing_account::Rejection::Moved => missing.to_string(),
    }
}

/// The first window, as the time that its cost pays for, and the verb: `minute costs`, `90 s cost`.
fn first_window(cost: MicroAmount, rate: HourlyRate) -> String {
    let paid_until = rate.paid_until(Timestamp::UNIX_EPOCH, cost);
    match paid_until.map(|until| until.timestamp()) {
        Some(60) => "minute costs".to_owned(),
        Some(3600) => "hour costs".to_owned(),
        Some(seconds) if seconds > 0 && seconds % 60 == 0 => format!("{} minutes cost", seconds / 60),
        Some(seconds @ 1..) => format!("{seconds} s cost"),
        Some(_) | None => "window costs".to_owned(),
    }
}

/// The key of this request's reservation at this node. Each node has a key of its own: a reservation of one says nothing about another.
fn reservation_key(event: EventId, node_id: NodeId, command: &str) -> CommandKey {
    let id = command_id(&[b"event", event.0.as_bytes(), command.as_bytes(), node_id.0.as_bytes()]);
    CommandKey { id, ..CommandKey::for_event(event, command) }
}

/// The state of the requested allocation at its placement.
enum SearchStatus {
    Requested(Arc<Allocation>),
    /// It has a node, or is releasing one: an earlier attempt placed it.
    Placed,
    Over {
        user_id: UserId,
    },
}

async fn search_status(by: &ReactionContext, id: AllocationId) -> Result<SearchStatus, SearchBlocked> {
    let allocation = match by.directory.host().committed_state::<Allocation>(id.0) {
        Some((allocation, _)) => allocation,
        None => {
            let snapshot = by.reads.snapshot(EntityRef { kind: EntityKind::Allocation, id: id.0 }).await?;
            let snapshot = snapshot.ok_or_else(|| SearchBlocked("the allocation is not there".to_owned()))?;
            Arc::new(serde_json::from_str(&snapshot.body)?)
        }
    };
    Ok(match &allocation.phase {
        Phase::Requested { .. } => SearchStatus::Requested(allocation),
        Phase::Released { .. } => SearchStatus::Over { user_id: allocation.asked.owner.user_id.clone() },
        Phase::Provisioning { .. } | Phase::Active { .. } | Phase::Releasing { .. } | Phase::ReleaseFailed { .. } => {
            SearchStatus::Placed
        }
    })
}

/// Removes an allocation that has ended from its tenant's quota, where it was counted.
async fn release_quota(
    by: &ReactionContext,
    delivery: &EventDelivery,
    id: AllocationId,
    user_id: &UserId,
) -> Disposition {
    let command = tenant::Instruction::Forget { allocation_id: id };
    by.send_command::<Tenant>(delivery, id_of_name(EntityKind::Tenant, user_id), command).await
}

/// Why the search cannot continue now.
struct SearchBlocked(String);

impl From<StoreError> for SearchBlocked {
    fn from(error: StoreError) -> Self {
        Self(error.to_string())
    }
}

impl From<serde_json::Error> for SearchBlocked {
    fn from(error: serde_json::Error) -> Self {
        Self(format!("the allocation cannot be read: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;

    #[test]
    fn shortfall_names_time_and_amounts_in_the_currency_of_the_price_and_the_way_to_pay() {
        for (price_minor, gpus, seconds, text) in [
            (100, 1, 60, "The first minute costs 0.01666666 EUR; 0.00185891 EUR are available."),
            (250, 8, 3600, "The first hour costs 20.00 EUR; 0.00185891 EUR are available."),
            (250, 1, 300, "The first 5 minutes cost 0.20833333 EUR; 0.00185891 EUR are available."),
            (7, 1, 45, "The first 45 s cost 0.000875 EUR; 0.00185891 EUR are available."),
        ] {
            let price = Price::new("EUR", price_minor).unwrap();
            let window = TimeDelta::seconds(seconds);
            let needed = HourlyRate::of(&price, gpus).over(Timestamp::UNIX_EPOCH, Timestamp::UNIX_EPOCH + window);
            let available = MicroAmount::of(185_891);
            let missing = billing_account::Rejection::InsufficientBalance { needed, available, currency: None };
            let message = user_message(&missing, &price, gpus);
            assert_eq!(message, format!("{text} Pay in: `gpuctl billing top-up`"));
        }
    }
}
