//! The invariants (design 2) that several entities or their histories show, each as one predicate under its id; what an entity shows by
//! itself is in [`Machine::violations`](crate::Machine::violations). Property tests and simulations check them after every transition; in
//! production each is a counter that must stay 0.

use crate::allocation::{Allocation, Phase};
use crate::billing_account::BillingAccount;
pub use crate::history::{HistoryEntry, Invariant};
use crate::id::{AllocationId, EntityKind, NodeId};
use crate::ledger::Posting;
use crate::money::MicroAmount;
use crate::node::Node;
use crate::tenant;
use crate::terminal_session::TerminalSession;
use std::collections::{BTreeMap, BTreeSet};

/// I1: an acknowledged transition is never lost, an unacknowledged one applied at most once. Given what was acknowledged and
/// what a fresh read finds, by version.
#[must_use]
pub fn i1_nothing_acknowledged_is_lost(acknowledged: &[i64], found: i64) -> bool {
    let distinct: BTreeSet<_> = acknowledged.iter().collect();
    distinct.len() == acknowledged.len() && acknowledged.iter().all(|version| *version <= found)
}

/// I2: a GPU is held by at most one allocation, and a node is schedulable only with the clean-up proof of its last tenant.
#[must_use]
pub fn i2_a_gpu_has_one_tenant(
    nodes: &BTreeMap<NodeId, Node>,
    allocations: &BTreeMap<AllocationId, Allocation>,
) -> bool {
    nodes.values().all(Node::has_one_tenant_on_each_gpu) && each_allocation_holds_its_gpus(nodes, allocations)
}

/// I2, between the two: an allocation that has GPUs has a hold on them at its node.
#[must_use]
pub fn each_allocation_holds_its_gpus(
    nodes: &BTreeMap<NodeId, Node>,
    allocations: &BTreeMap<AllocationId, Allocation>,
) -> bool {
    let believed_is_held = |allocation: &Allocation| match (&allocation.phase, allocation.placement()) {
        (Phase::Provisioning { .. } | Phase::Active { .. }, Some((node_id, placed))) => nodes
            .get(&node_id)
            .and_then(|node| node.tenancy.holds.get(&allocation.id))
            .is_some_and(|hold| hold.placed.devices == placed.devices),
        (
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. },
            _,
        ) => true,
    };
    allocations.values().all(believed_is_held)
}

/// I3: the sum of an account's entries is its balance, at every posting; none is missing, and no time is charged twice. The form of a
/// posting ensures that it sums to zero. Given all of the account's postings, in their order.
#[must_use]
pub fn i3_the_balance_is_the_sum_of_its_entries(account: &BillingAccount, postings: &[Posting]) -> bool {
    let (mut sum, mut starts) = (MicroAmount::ZERO, BTreeSet::new());
    let adds_up = (1..).zip(postings).all(|(number, posting): (i64, _)| {
        sum = sum.plus(posting.effect());
        let charged = posting.usage.zip(posting.charged_from());
        let first = charged.is_none_or(|(usage, from)| starts.insert((usage.allocation_id, from)));
        posting.number == number && posting.balance == sum && posting.amount > MicroAmount::ZERO && first
    });
    let count = i64::try_from(postings.len()).unwrap_or(i64::MAX);
    adds_up && account.postings == count && account.balance == sum
}

/// I4: a token is consumed at most once. Given how many enrollments each token bought.
#[must_use]
pub fn i4_a_token_is_consumed_once<T: Ord>(enrollments: &BTreeMap<T, u32>) -> bool {
    enrollments.values().all(|count| *count <= 1)
}

/// I5: a task's effect happens at most once for each attempt. Given how often each (task, attempt) took effect on the machine.
#[must_use]
pub fn i5_a_task_takes_effect_once<T: Ord>(effects: &BTreeMap<(T, u32), u32>) -> bool {
    effects.values().all(|count| *count <= 1)
}

/// I7: what people do, or service accounts for them, is audited in the transaction that does it.
#[must_use]
pub fn i7_actions_of_people_are_audited(kind: EntityKind, step: &HistoryEntry) -> bool {
    let by_people = ["user:", "service-account:"].iter().any(|prefix| step.actor.starts_with(prefix));
    // It reserves a slot for an entity that is created, and audited, in the next commit.
    let slots = [tenant::CommandName::ExpectAccount, tenant::CommandName::ExpectTerminal];
    let prepares = kind == EntityKind::Tenant && slots.iter().any(|slot| step.command == slot.into_str());
    !by_people || prepares || step.audited != Some(false)
}

/// I4, for terminals: each admitted connection spent a token of its own. Given how many connections each token admitted.
#[must_use]
pub fn i4_terminal_token_admits_one_connection<T: Ord>(session: &TerminalSession, let_in: &BTreeMap<T, u32>) -> bool {
    i4_a_token_is_consumed_once(let_in) && session.spent_each_token_once()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i1_detects_a_loss_and_a_duplicate_version() {
        assert!(i1_nothing_acknowledged_is_lost(&[], 0));
        assert!(i1_nothing_acknowledged_is_lost(&[1, 2, 3], 3));
        assert!(i1_nothing_acknowledged_is_lost(&[1, 3], 4), "what was not acknowledged may be there");
        assert!(!i1_nothing_acknowledged_is_lost(&[1, 2, 3], 2));
        assert!(!i1_nothing_acknowledged_is_lost(&[1, 2, 2], 3));
    }

    #[test]
    fn i7_detects_an_unaudited_action() {
        let step = |actor: &str, audited| HistoryEntry {
            version: 1,
            command: "retire".to_owned(),
            actor: actor.to_owned(),
            to_state: "retired".to_owned(),
            refused: false,
            audited,
        };
        let holds = |step: &HistoryEntry| i7_actions_of_people_are_audited(EntityKind::Node, step);
        assert!(holds(&step("user:ann", Some(true))));
        assert!(holds(&step("user:ann", None)), "what is too old to be looked for is not judged");
        assert!(holds(&step("system:timers", Some(false))));
        assert!(!holds(&step("user:ann", Some(false))));
        assert!(!holds(&step("service-account:7", Some(false))));
        let place = HistoryEntry { command: "expect_account".to_owned(), ..step("user:ann", Some(false)) };
        assert!(i7_actions_of_people_are_audited(EntityKind::Tenant, &place) && !holds(&place));
    }

    #[test]
    fn i4_and_i5_detect_duplicates() {
        assert!(i4_a_token_is_consumed_once(&BTreeMap::from([("a", 1), ("b", 0)])));
        assert!(!i4_a_token_is_consumed_once(&BTreeMap::from([("a", 2)])));
        assert!(i5_a_task_takes_effect_once(&BTreeMap::from([(("a", 1), 1), (("a", 2), 1)])));
        assert!(!i5_a_task_takes_effect_once(&BTreeMap::from([(("a", 1), 2)])));
    }
}
