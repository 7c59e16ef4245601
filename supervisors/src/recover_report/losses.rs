//! What is lost, judged from what the streams, the nodes and the payment processor have and the restored database has not.

use chrono::{DateTime, Utc};
use domain::money::{Currency, MicroAmount};
use domain::{Event, Shard};
use persistence::queries::LastCommit;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// A published event, with the position of its commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedEvent {
    pub shard: Shard,
    pub epoch: i64,
    pub seq: i64,
    pub at: DateTime<Utc>,
    pub event: Event,
}

/// A tenant that a node has recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantOnNode {
    /// The folder of the node.
    pub node: String,
    pub allocation_id: Uuid,
    pub at: DateTime<Utc>,
}

/// A payment that the processor has the money of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorsMoney {
    pub processor_id: String,
    pub payment_id: Option<Uuid>,
    pub amount_minor: i64,
    pub currency: String,
}

/// What a loss is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// A node has a tenant, and the database has no allocation for it that runs.
    TenantWithoutAllocation,
    /// The database has an allocation that runs, and its tenant is gone.
    AllocationWithoutTenant,
    /// Money moved at the processor or in an account, and the database has no posting of it.
    MoneyWithoutPosting,
    /// An enrollment token was used, and the database takes it for unused.
    TokenSpent,
}

impl LossKind {
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::TenantWithoutAllocation => "tenants without allocation",
            Self::AllocationWithoutTenant => "allocations without tenant",
            Self::MoneyWithoutPosting => "money without posting",
            Self::TokenSpent => "tokens spent",
        }
    }

    #[must_use]
    pub const fn next_step(self) -> &'static str {
        match self {
            Self::TenantWithoutAllocation => {
                "take the node out of rent (`gpuctl nodes quarantine`), end what runs there, and validate it (`gpuctl nodes validate`)"
            }
            Self::AllocationWithoutTenant => {
                "release it (`gpuctl allocations release`), and credit what was charged since"
            }
            Self::MoneyWithoutPosting => {
                "wait for the reconciliation with the processor; what it does not know, adjust by hand (`gpuctl billing adjust`)"
            }
            Self::TokenSpent => {
                "issue another one (`gpuctl nodes reissue`): the node has a certificate that is unknown here"
            }
        }
    }
}

/// One loss.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Loss {
    pub kind: LossKind,
    /// `allocation/…`, `payment/…`, `node/…`, or the processor's id.
    pub subject: String,
    /// `events`, `nodes` or `processor`.
    pub source: &'static str,
    pub detail: String,
}

/// The events that the database does not have: those of later commits than its last one. The events of a commit follow its transition, and
/// have its time.
#[must_use]
pub fn lost_events(
    published: Vec<PublishedEvent>,
    ends: &BTreeMap<Shard, LastCommit>,
    is_before: impl Fn(i64) -> bool,
) -> Vec<PublishedEvent> {
    let is_lost = |it: &PublishedEvent| {
        let Some(end) = ends.get(&it.shard) else { return true };
        let is_of_last = it.epoch == end.epoch && it.at.timestamp_micros() == end.at.timestamp_micros();
        (it.epoch, it.seq) > (end.epoch, end.seq) && !is_of_last
    };
    let mut lost: Vec<_> = published.into_iter().filter(|it| is_before(it.epoch) && is_lost(it)).collect();
    // Of several shards: by time; of one shard: in the order of its commits.
    lost.sort_by_key(|it| (it.at, it.epoch, it.seq));
    lost
}

/// The entities whose states in the database decide.
#[must_use]
pub fn entities_of(lost: &[PublishedEvent], tenants: &[TenantOnNode], money: &[ProcessorsMoney]) -> BTreeSet<Uuid> {
    let of_events = lost.iter().flat_map(|it| [Some(it.event.about().id), allocation_of(&it.event)]).flatten();
    let of_nodes = tenants.iter().map(|it| it.allocation_id);
    let of_money = money.iter().filter_map(|it| it.payment_id);
    of_events.chain(of_nodes).chain(of_money).collect()
}

/// The losses, by kind and subject. `states` has the entities that the database has.
#[must_use]
pub fn losses(
    lost: &[PublishedEvent],
    tenants: &[TenantOnNode],
    money: &[ProcessorsMoney],
    states: &BTreeMap<Uuid, String>,
) -> Vec<Loss> {
    let mut found = BTreeMap::new();
    let mut add = |kind: LossKind, subject: String, source, detail: String| {
        found.entry((kind, subject.clone())).or_insert(Loss { kind, subject, source, detail });
    };
    let state = |id: Uuid| states.get(&id).map(String::as_str);
    let shown =
        |id: Uuid| state(id).map_or("the database lacks it".to_owned(), |it| format!("the database has it as {it}"));
    let runs = |id: Uuid| matches!(state(id), Some("provisioning" | "active" | "releasing" | "release_failed"));

    for (allocation, presence) in presences(lost) {
        let subject = format!("allocation/{allocation}");
        match presence {
            Presence::On(node) if !runs(allocation) => {
                let detail = format!("on node {node}; {}", shown(allocation));
                add(LossKind::TenantWithoutAllocation, subject, "events", detail);
            }
            Presence::Gone if state(allocation) == Some("active") => {
                add(LossKind::AllocationWithoutTenant, subject, "events", shown(allocation));
            }
            Presence::On(_) | Presence::Gone => {}
        }
    }
    for tenant in tenants.iter().filter(|tenant| !runs(tenant.allocation_id)) {
        let detail = format!("on {} since {}; {}", tenant.node, tenant.at.to_rfc3339(), shown(tenant.allocation_id));
        add(LossKind::TenantWithoutAllocation, format!("allocation/{}", tenant.allocation_id), "nodes", detail);
    }
    let is_posted = |id: Uuid| matches!(state(id), Some("deposited" | "refused"));
    for it in lost {
        let (id, what, needs_posting) = match &it.event {
            Event::PaymentPaid { payment_id, amount_minor, currency, .. } => (
                payment_id.0,
                format!("{} were paid", MicroAmount::of_minor(*amount_minor).unwrap_or_default().in_currency(currency)),
                !is_posted(payment_id.0),
            ),
            Event::PaymentDeposited { payment_id, .. } => {
                (payment_id.0, "it was deposited".to_owned(), !is_posted(payment_id.0))
            }
            Event::RefundTaken { payment_id, amount_minor, .. } => {
                (payment_id.0, format!("a refund of {amount_minor} minor units was debited"), true)
            }
            Event::RefundSucceeded { payment_id, refund_id } => {
                (payment_id.0, format!("the processor has paid refund {}", refund_id.0), true)
            }
            Event::ReversalPosted { payment_id, reversal_id, .. } => {
                (payment_id.0, format!("reversal {reversal_id} was posted"), true)
            }
            Event::NodeStateChanged { node_id, from: Some(from), .. } if from == "bootstrap-issued" => {
                if matches!(state(node_id.0), None | Some("registered" | "bootstrap-issued")) {
                    add(LossKind::TokenSpent, format!("node/{}", node_id.0), "events", shown(node_id.0));
                }
                continue;
            }
            _ => continue,
        };
        if needs_posting {
            add(LossKind::MoneyWithoutPosting, format!("payment/{id}"), "events", format!("{what}; {}", shown(id)));
        }
    }
    for it in money.iter().filter(|it| !it.payment_id.is_some_and(is_posted)) {
        let subject = it.payment_id.map_or_else(|| it.processor_id.clone(), |id| format!("payment/{id}"));
        let known = it.payment_id.map_or_else(|| "it names no payment of ours".to_owned(), shown);
        let amount = Currency::parse(&it.currency).ok().zip(MicroAmount::of_minor(it.amount_minor)).map_or_else(
            || format!("{} minor units of {}", it.amount_minor, it.currency),
            |(currency, amount)| amount.in_currency(&currency),
        );
        let detail = format!("{}: {amount}; {known}", it.processor_id);
        add(LossKind::MoneyWithoutPosting, subject, "processor", detail);
    }
    found.into_values().collect()
}

/// Where a tenant is after the lost time.
enum Presence {
    On(Uuid),
    Gone,
}

/// By the last event of each allocation that says it.
fn presences(lost: &[PublishedEvent]) -> BTreeMap<Uuid, Presence> {
    let mut last = BTreeMap::new();
    for it in lost {
        let seen = match &it.event {
            Event::TenantReady { allocation_id, node_id } | Event::AllocationActive { allocation_id, node_id } => {
                (allocation_id.0, Presence::On(node_id.0))
            }
            Event::TenantGone { allocation_id, .. } | Event::AllocationReleased { allocation_id, .. } => {
                (allocation_id.0, Presence::Gone)
            }
            _ => continue,
        };
        last.insert(seen.0, seen.1);
    }
    last
}

/// The allocation that an event of another entity names.
fn allocation_of(event: &Event) -> Option<Uuid> {
    match event {
        Event::TenantReady { allocation_id, .. } | Event::TenantGone { allocation_id, .. } => Some(allocation_id.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;
    use domain::{AllocationId, BillingAccountId, NodeId, PaymentId};

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
    }

    fn published(epoch: i64, seq: i64, event: Event) -> PublishedEvent {
        PublishedEvent { shard: Shard(7), epoch, seq, at: at(seq), event }
    }

    fn ready(allocation: u128) -> Event {
        Event::TenantReady { node_id: NodeId(id(9)), allocation_id: AllocationId(id(allocation)) }
    }

    #[test]
    fn events_after_the_last_commit_of_their_shard_are_lost_and_those_of_that_commit_are_not() {
        let end = LastCommit { epoch: 2, seq: 10, at: at(10) };
        let ends = BTreeMap::from([(Shard(7), end)]);
        let mut of_last = published(2, 12, ready(1));
        of_last.at = at(10);
        let events = vec![published(2, 9, ready(2)), of_last, published(2, 14, ready(3)), published(3, 1, ready(4))];
        let lost = lost_events(events.clone(), &ends, |_| true);
        let ids: Vec<_> = lost.iter().filter_map(|it| allocation_of(&it.event)).collect();
        assert_eq!(ids, [id(4), id(3)], "by time");
        // The next incarnation's are not of the lost time.
        let lost = lost_events(events.clone(), &ends, |epoch| epoch < 3);
        assert_eq!(lost.len(), 1);
        // A shard without a commit has lost all.
        assert_eq!(lost_events(events, &BTreeMap::new(), |_| true).len(), 4);
    }

    #[test]
    fn losses_name_tenants_money_and_tokens_that_the_database_lacks() {
        let gone = Event::AllocationReleased {
            allocation_id: AllocationId(id(2)),
            user_id: domain::UserId("u".to_owned()),
            node_id: None,
            reason: "released".to_owned(),
        };
        let paid = Event::PaymentDeposited {
            payment_id: PaymentId(id(5)),
            account_id: BillingAccountId(id(6)),
            is_again: false,
        };
        let enrolled = Event::NodeStateChanged {
            node_id: NodeId(id(9)),
            from: Some("bootstrap-issued".to_owned()),
            to: "enrolling".to_owned(),
            reason: "enrolled".to_owned(),
        };
        let lost: Vec<_> = [ready(1), ready(2), gone, ready(3), paid, enrolled]
            .into_iter()
            .zip(1..)
            .map(|(event, seq)| published(1, seq, event))
            .collect();
        let states = BTreeMap::from([
            (id(2), "active".to_owned()),
            (id(3), "active".to_owned()),
            (id(8), "deposited".to_owned()),
            (id(9), "bootstrap-issued".to_owned()),
        ]);
        let tenants =
            [1, 3, 4].map(|number| TenantOnNode { node: "a".to_owned(), allocation_id: id(number), at: at(1) });
        let money = [Some(id(8)), None].map(|payment_id| ProcessorsMoney {
            processor_id: "pi_1".to_owned(),
            payment_id,
            amount_minor: 500,
            currency: "USD".to_owned(),
        });
        let found = losses(&lost, &tenants, &money, &states);
        let named: Vec<_> = found.iter().map(|loss| (loss.kind, loss.subject.as_str(), loss.source)).collect();
        let (one, two, four, five, nine) = (id(1), id(2), id(4), id(5), id(9));
        assert_eq!(
            named,
            [
                (LossKind::TenantWithoutAllocation, format!("allocation/{one}").as_str(), "events"),
                (LossKind::TenantWithoutAllocation, format!("allocation/{four}").as_str(), "nodes"),
                (LossKind::AllocationWithoutTenant, format!("allocation/{two}").as_str(), "events"),
                (LossKind::MoneyWithoutPosting, format!("payment/{five}").as_str(), "events"),
                (LossKind::MoneyWithoutPosting, "pi_1", "processor"),
                (LossKind::TokenSpent, format!("node/{nine}").as_str(), "events"),
            ]
        );
    }
}
