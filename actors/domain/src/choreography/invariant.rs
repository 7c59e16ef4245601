//! The invariants (design 2), each as one predicate under its id. Property tests and simulations check them after every transition; in
//! production each is a counter that must stay 0.

use crate::allocation::{Allocation, Phase};
use crate::billing_account::{BillingAccount, Depletion};
use crate::id::{AllocationId, EntityKind, NodeId};
use crate::ledger::Posting;
use crate::machine::{Machine, Timestamp};
use crate::money::MicroAmount;
pub use crate::node::each_gpu_is_held_once;
use crate::node::{HoldPhase, Node, Phase as NodePhase};
use crate::payment::{self, Payment, Refund};
use crate::processor_event::ProcessorEvent;
use crate::service_account::ServiceAccount;
use crate::terminal_session::{SPENT_TOKENS, TerminalSession};
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
    let unproven_is_closed = |node: &Node| {
        let unproven = node
            .holds
            .values()
            .any(|hold| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }));
        !unproven || node.gpus_free() == 0
    };
    nodes.values().all(|node| each_gpu_is_held_once(node) && unproven_is_closed(node))
        && each_allocation_holds_its_gpus(nodes, allocations)
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
            .and_then(|node| node.holds.get(&allocation.id))
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

/// Allocations in a grace period, or after it, have a cut-off time of their own instead.
#[must_use]
pub fn i3_accrual_is_covered(account: &BillingAccount) -> bool {
    account.is_covered_until_the_next_charge()
}

/// Is this account in a transient state?
#[must_use]
pub const fn account_is_transient(account: &BillingAccount) -> bool {
    matches!(account.depletion, Some(Depletion { is_over: false, .. }))
}

/// Is this payment, or a refund or reversal of it, in a transient state?
#[must_use]
pub fn payment_is_transient(payment: &Payment) -> bool {
    match payment.phase {
        payment::Phase::Created { .. } | payment::Phase::Open { .. } | payment::Phase::Paid { .. } => true,
        payment::Phase::Deposited { .. } | payment::Phase::Refused { .. } => !payment.is_settled(),
        payment::Phase::Canceled { .. } | payment::Phase::Expired { .. } => false,
    }
}

/// Is this event of the processor still to be processed?
#[must_use]
pub const fn processor_event_is_transient(event: &ProcessorEvent) -> bool {
    event.is_open()
}

/// I3, of payments: refunds on request never exceed what was paid, and together with what was taken back at the processor they leave at
/// least nothing.
#[must_use]
pub fn i3_no_more_is_refunded_than_was_paid(payment: &Payment) -> bool {
    let asked = payment.refunds.values().map(Refund::gone_minor).fold(0, i64::saturating_add);
    asked <= payment.amount_minor && (0..=payment.amount_minor).contains(&payment.left_minor())
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

/// A transition, as the history has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    pub version: i64,
    pub command: String,
    /// As the audit log names an actor.
    pub actor: String,
    pub to_state: String,
    /// It only records that the command was refused.
    pub refused: bool,
    /// Whether the commit wrote an audit row; `None` where that was not checked.
    pub audited: Option<bool>,
}

/// I6: a node that is being removed, or is gone, holds nothing and gets nothing. Given its last transitions, in their order.
#[must_use]
pub fn i6_a_removed_node_gets_nothing(node: &Node, recorded: &[HistoryEntry]) -> bool {
    if !node.life.is_gone() {
        return true;
    }
    let gone = ["removing", "removed"];
    let itself = format!("node:{}", node.id);
    let since = recorded.iter().skip_while(|step| !gone.contains(&step.to_state.as_str()));
    let got_something = since.filter(|step| !step.refused).any(|step| step.actor == itself);
    node.identity.token.is_none() && node.identity.certificates.is_empty() && node.holds.is_empty() && !got_something
}

/// I6: a deleted service account has no key that could still authenticate.
#[must_use]
pub fn i6_a_deleted_account_has_no_keys(account: &ServiceAccount) -> bool {
    account.state() != "deleted" || account.keys.is_empty()
}

/// I7: what people do, or service accounts for them, is audited in the transaction that does it.
#[must_use]
pub fn i7_actions_of_people_are_audited(kind: EntityKind, step: &HistoryEntry) -> bool {
    let by_people = ["user:", "service-account:"].iter().any(|prefix| step.actor.starts_with(prefix));
    // It reserves a slot for an entity that is created, and audited, in the next commit.
    let prepares = kind == EntityKind::Tenant && ["expect_account", "expect_terminal"].contains(&step.command.as_str());
    !by_people || prepares || step.audited != Some(false)
}

/// I8: a transient state has a deadline with a reason that an operator can read.
#[must_use]
pub fn i8_transient_states_have_a_deadline<M: Machine>(entity: &M, transient: bool) -> bool {
    match entity.deadline() {
        Some(deadline) => !deadline.reason.is_empty() && deadline.at < Timestamp::MAX_UTC,
        None => !transient,
    }
}

/// Is this allocation in a transient state?
#[must_use]
pub const fn allocation_is_transient(allocation: &Allocation) -> bool {
    match allocation.phase {
        Phase::Requested { .. }
        | Phase::Provisioning { .. }
        | Phase::Releasing { .. }
        | Phase::ReleaseFailed { .. } => true,
        Phase::Active { .. } | Phase::Released { .. } => false,
    }
}

/// I4, for terminals: each admitted connection spent a token of its own. Given how many connections each token admitted.
#[must_use]
pub fn i4_terminal_token_admits_one_connection<T: Ord>(session: &TerminalSession, let_in: &BTreeMap<T, u32>) -> bool {
    let distinct: BTreeSet<_> = session.spent.iter().collect();
    let remembered = usize::try_from(session.attachments).unwrap_or(usize::MAX).min(SPENT_TOKENS);
    i4_a_token_is_consumed_once(let_in) && distinct.len() == session.spent.len() && distinct.len() == remembered
}

/// I4, as far as a stored session shows it: it has admitted as many connections as tokens were spent, and a spent token is not valid
/// again.
#[must_use]
pub fn i4_spent_terminal_token_is_void(session: &TerminalSession) -> bool {
    let nothing_more = BTreeMap::<u8, u32>::new();
    let offered = session.token.as_ref().is_some_and(|token| session.spent.contains(&token.sha256));
    i4_terminal_token_admits_one_connection(session, &nothing_more) && !offered
}

/// Is this session in a transient state? Every session that is not closed has a deadline.
#[must_use]
pub const fn terminal_session_is_transient(session: &TerminalSession) -> bool {
    session.closed().is_none()
}

/// Is this node in a transient state?
#[must_use]
pub const fn node_is_transient(node: &Node) -> bool {
    match node.life {
        NodePhase::BootstrapIssued { .. }
        | NodePhase::Enrolling { .. }
        | NodePhase::Draining { .. }
        | NodePhase::Removing { .. } => true,
        NodePhase::Registered
        | NodePhase::Active
        | NodePhase::Offline
        | NodePhase::Quarantined { .. }
        | NodePhase::Retired
        | NodePhase::Removed => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
