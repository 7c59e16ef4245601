//! What must always hold (design 2), each as one predicate under its id. Property tests and simulations check them after every
//! step; in production each is a counter that must stay 0.

use crate::allocation::{Allocation, Phase};
use crate::billing_account::{BillingAccount, Depletion};
use crate::id::{AllocationId, Kind, NodeId};
use crate::ledger::Posting;
use crate::machine::{Machine, Timestamp};
use crate::money::Micro;
use crate::node::{HoldPhase, Life, Node};
use crate::payment::{self, Payment, Refund};
use crate::processor_event::ProcessorEvent;
use crate::service_account::ServiceAccount;
use crate::terminal_session::{SPENT, TerminalSession};
use std::collections::{BTreeMap, BTreeSet};

/// I1: an acknowledged transition is never lost, an unacknowledged one applied at most once. Given what was acknowledged and
/// what a fresh read finds, by version.
#[must_use]
pub fn i1_nothing_acknowledged_is_lost(acknowledged: &[i64], found: i64) -> bool {
    let distinct: BTreeSet<_> = acknowledged.iter().collect();
    distinct.len() == acknowledged.len() && acknowledged.iter().all(|version| *version <= found)
}

/// I2, within a node: no GPU is in two holds.
#[must_use]
pub fn each_gpu_is_held_once(node: &Node) -> bool {
    let held: Vec<_> =
        node.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| device.uuid.as_str()).collect();
    let distinct: BTreeSet<_> = held.iter().collect();
    distinct.len() == held.len()
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
        && each_believed_place_is_held(nodes, allocations)
}

/// I2, between the two: who believes to have GPUs has them held.
#[must_use]
pub fn each_believed_place_is_held(
    nodes: &BTreeMap<NodeId, Node>,
    allocations: &BTreeMap<AllocationId, Allocation>,
) -> bool {
    let believed_is_held = |allocation: &Allocation| match (&allocation.phase, allocation.place()) {
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

/// I3: the sum of an account's entries is its balance, at every posting; none is missing, and no while is charged twice. That a posting
/// sums to zero, its form sees to. Given all of the account's postings, in their order.
#[must_use]
pub fn i3_the_balance_is_the_sum_of_its_entries(account: &BillingAccount, postings: &[Posting]) -> bool {
    let (mut sum, mut starts) = (Micro::ZERO, BTreeSet::new());
    let adds_up = (1..).zip(postings).all(|(number, posting): (i64, _)| {
        sum = sum.plus(posting.effect());
        let charged = posting.usage.zip(posting.charged_from());
        let first = charged.is_none_or(|(usage, from)| starts.insert((usage.allocation_id, from)));
        posting.number == number && posting.balance == sum && posting.amount > Micro::ZERO && first
    });
    let count = i64::try_from(postings.len()).unwrap_or(i64::MAX);
    adds_up && account.postings == count && account.balance == sum
}

/// I3, of what runs: until the next charge no more can accrue than the balance covers, whatever policies, prices and clocks do within a window.
/// What runs in a grace, or after it, has an end of its own instead.
#[must_use]
pub fn i3_what_accrues_is_covered(account: &BillingAccount) -> bool {
    account.is_covered_until_the_next_charge()
}

/// Is this account on its way somewhere?
#[must_use]
pub const fn account_is_transient(account: &BillingAccount) -> bool {
    matches!(account.depletion, Some(Depletion { is_over: false, .. }))
}

/// Is this payment, or something that goes back of it, on its way somewhere?
#[must_use]
pub fn payment_is_transient(payment: &Payment) -> bool {
    match payment.phase {
        payment::Phase::Created { .. } | payment::Phase::Open { .. } | payment::Phase::Paid { .. } => true,
        payment::Phase::Deposited { .. } | payment::Phase::Refused { .. } => !payment.is_settled(),
        payment::Phase::Canceled { .. } | payment::Phase::Expired { .. } => false,
    }
}

/// Is something still to follow from what the processor said?
#[must_use]
pub const fn processor_event_is_transient(event: &ProcessorEvent) -> bool {
    event.is_open()
}

/// I3, of payments: no more is given back on request than was paid, and beside what was taken at the processor nothing is left of it.
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
pub struct Recorded {
    pub version: i64,
    pub command: String,
    /// As the audit log names an actor.
    pub actor: String,
    pub to_state: String,
    /// It keeps that the command was refused.
    pub refused: bool,
    /// Whether the commit wrote an audit row; `None` where that was not looked for.
    pub audited: Option<bool>,
}

/// I6: a node that is being removed, or is gone, has nothing left and gets nothing. Given its last transitions, in their order.
#[must_use]
pub fn i6_a_removed_node_gets_nothing(node: &Node, recorded: &[Recorded]) -> bool {
    if !node.life.is_gone() {
        return true;
    }
    let gone = ["removing", "removed"];
    let itself = format!("node:{}", node.id);
    let since = recorded.iter().skip_while(|step| !gone.contains(&step.to_state.as_str()));
    let got_something = since.filter(|step| !step.refused).any(|step| step.actor == itself);
    node.identity.token.is_none() && node.identity.certificates.is_empty() && node.holds.is_empty() && !got_something
}

/// I6: a deleted service account has no key that would be known again.
#[must_use]
pub fn i6_a_deleted_account_has_no_keys(account: &ServiceAccount) -> bool {
    account.state() != "deleted" || account.keys.is_empty()
}

/// I7: what people do, or programs in their name, is audited in the transaction that does it.
#[must_use]
pub fn i7_what_people_do_is_audited(kind: Kind, step: &Recorded) -> bool {
    let by_people = ["user:", "service-account:"].iter().any(|prefix| step.actor.starts_with(prefix));
    // It sets a place aside for what is made, and audited, in the next commit.
    let prepares = kind == Kind::Tenant && ["expect_account", "expect_terminal"].contains(&step.command.as_str());
    !by_people || prepares || step.audited != Some(false)
}

/// I8: a transient state has a deadline with a reason that an operator can read.
#[must_use]
pub fn i8_what_is_transient_has_an_end<M: Machine>(entity: &M, transient: bool) -> bool {
    match entity.deadline() {
        Some(deadline) => !deadline.reason.is_empty() && deadline.at < Timestamp::MAX_UTC,
        None => !transient,
    }
}

/// Is this allocation on its way somewhere?
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

/// I4, for terminals: each connection that was let in spent a token of its own. Given how many connections each token let in.
#[must_use]
pub fn a_terminal_token_lets_one_in<T: Ord>(session: &TerminalSession, let_in: &BTreeMap<T, u32>) -> bool {
    let distinct: BTreeSet<_> = session.spent.iter().collect();
    let remembered = usize::try_from(session.attachments).unwrap_or(usize::MAX).min(SPENT);
    i4_a_token_is_consumed_once(let_in) && distinct.len() == session.spent.len() && distinct.len() == remembered
}

/// I4, as far as a stored session shows it: what it has let in is what it has spent, and what is spent is not offered again.
#[must_use]
pub fn a_spent_terminal_token_is_gone(session: &TerminalSession) -> bool {
    let nothing_more = BTreeMap::<u8, u32>::new();
    let offered = session.token.as_ref().is_some_and(|token| session.spent.contains(&token.sha256));
    a_terminal_token_lets_one_in(session, &nothing_more) && !offered
}

/// Is this session on its way somewhere? Whatever it does, it has an end.
#[must_use]
pub const fn terminal_session_is_transient(session: &TerminalSession) -> bool {
    session.closed().is_none()
}

/// Is this node on its way somewhere?
#[must_use]
pub const fn node_is_transient(node: &Node) -> bool {
    match node.life {
        Life::BootstrapIssued { .. } | Life::Enrolling { .. } | Life::Draining { .. } | Life::Removing { .. } => true,
        Life::Registered | Life::Active | Life::Offline | Life::Quarantined { .. } | Life::Retired | Life::Removed => {
            false
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i1_finds_a_loss_and_a_version_that_was_given_twice() {
        assert!(i1_nothing_acknowledged_is_lost(&[], 0));
        assert!(i1_nothing_acknowledged_is_lost(&[1, 2, 3], 3));
        assert!(i1_nothing_acknowledged_is_lost(&[1, 3], 4), "what was not acknowledged may be there");
        assert!(!i1_nothing_acknowledged_is_lost(&[1, 2, 3], 2));
        assert!(!i1_nothing_acknowledged_is_lost(&[1, 2, 2], 3));
    }

    #[test]
    fn i7_finds_what_somebody_did_unseen() {
        let step = |actor: &str, audited| Recorded {
            version: 1,
            command: "retire".to_owned(),
            actor: actor.to_owned(),
            to_state: "retired".to_owned(),
            refused: false,
            audited,
        };
        let holds = |step: &Recorded| i7_what_people_do_is_audited(Kind::Node, step);
        assert!(holds(&step("user:ann", Some(true))));
        assert!(holds(&step("user:ann", None)), "what is too old to be looked for is not judged");
        assert!(holds(&step("system:timers", Some(false))));
        assert!(!holds(&step("user:ann", Some(false))));
        assert!(!holds(&step("service-account:7", Some(false))));
        let place = Recorded { command: "expect_account".to_owned(), ..step("user:ann", Some(false)) };
        assert!(i7_what_people_do_is_audited(Kind::Tenant, &place) && !holds(&place));
    }

    #[test]
    fn i4_and_i5_find_what_happened_twice() {
        assert!(i4_a_token_is_consumed_once(&BTreeMap::from([("a", 1), ("b", 0)])));
        assert!(!i4_a_token_is_consumed_once(&BTreeMap::from([("a", 2)])));
        assert!(i5_a_task_takes_effect_once(&BTreeMap::from([(("a", 1), 1), (("a", 2), 1)])));
        assert!(!i5_a_task_takes_effect_once(&BTreeMap::from([(("a", 1), 2)])));
    }
}
