//! The rental: its commits in their order, from a user's request to the proven clean-up, and what follows from each.
//!
//! Four entities take part: the allocation, which leads; the node, which holds the GPUs; the tenant, which counts allocations against the
//! quota; and the billing account, which holds money and meters the use. A row of [`COMMITS`] is one commit: it changes one entity, and
//! stores the events of the change in the outbox, in one transaction of Postgres. From an event follows the command of a later row.
//!
//! ```text
//!  user ──1 request──▶ allocation ──▶ placement ──2 hold──▶ account, ──3 admit──▶ tenant, ──4 reserve──▶ node
//!  node ──▶ 5 reserved: allocation ──▶ 6 provision: node ──▶ task ──▶ agent ──7 report──▶ node
//!  node ──▶ 8 provisioned: allocation (active) ──▶ 9 usage: account
//!
//!  user ──10 release──▶ allocation ──▶ 11 clean: node ──▶ task ──▶ agent ──13 report──▶ node
//!                                  └──▶ 12 usage: account
//!  node ──▶ 14 cleaned: allocation (released) ──▶ 15 forget: tenant
//! ```
//!
//! # When an owner dies between two commits
//!
//! The first of the two is durable with its events, the second has not happened. What remains at that point is the row's `after_crash`. The
//! rental goes on in one of four ways, the fastest first; each is bounded by the next:
//!
//! 1. The event was published to NATS: any member that consumes it sends the command. The command waits for an owner: after 3 s without a
//!    heartbeat another member takes the shard of the dead one.
//! 2. The event was not published, or its consumer died too: its row is in the outbox. The owner of the shard polls the outbox for events
//!    that are older than 3 s, and sends the command.
//! 3. The event is lost: the entity that waits resends it after 10 s, then in doubling pauses of at most 1 h ([`ResendTimer`]).
//! 4. No answer comes: the allocation leaves its state at the row's `deadline`.
//!
//! The command has the event's id. So a second delivery, or a command whose reply was lost, commits nothing twice. The commit of the command
//! deletes the event's row.
//!
//! # Why the placement asks
//!
//! Commits 2, 3 and 4 are not reactions: the provisioning worker processes the event of commit 1, sends these commands and waits for each
//! answer, because an answer decides what is next. A node that refuses commits nothing, and the next candidate is asked; as events, a search
//! over many nodes would be two commits for each. A worker that dies leaves the event unsettled, and the next one begins again with commit 2;
//! what was committed before answers a repetition without a change. Commit 4 settles the event. A search without a result ends with a fact
//! for the allocation: `unaffordable`, `over_quota` or `no_capacity`.
//!
//! [`ResendTimer`]: crate::resend_timer::ResendTimer

use super::{Consequences, EventConsequences, Reaction, on};
use crate::allocation::Fact as ToAllocation;
use crate::billing_account::Instruction as ToAccount;
use crate::event::Event;
use crate::id::{AllocationId, EntityKind, NodeId};
use crate::node::Instruction as ToNode;
use crate::notification::{Audience, NotificationDetails as Details};
use crate::policy::PolicyKey;
use crate::tenant::Instruction as ToTenant;

/// One commit of a rental.
#[derive(Clone, Copy, Debug)]
pub struct RentalCommit {
    pub half: RentalHalf,
    pub sender: RentalSender,
    /// The kind of the entity that decides.
    pub entity: EntityKind,
    pub command: &'static str,
    /// The events that it publishes, with what follows from each.
    pub events: &'static [EventConsequences],
    /// The deadline of the allocation's state after this commit; `None` where the state has none.
    pub deadline: Option<RentalDeadline>,
    /// What a crash of the owner after this commit leaves, and how the rental goes on.
    pub after_crash: &'static str,
}

/// A half of a rental. Each begins with a request of its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RentalHalf {
    Rent,
    Release,
}

/// Who sends the command of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RentalSender {
    User,
    /// The provisioning worker, while it processes the event of the first commit.
    Placement,
    /// It follows from an event of an earlier commit.
    Reaction,
    /// The node's agent, with the result of its task.
    Agent,
}

/// A limit of the time in a state of the allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RentalDeadline {
    /// The policy that sets it, in seconds since the state was entered.
    pub policy: PolicyKey,
    /// What the allocation does once it has passed.
    pub outcome: &'static str,
}

const UNTIL_PLACED: Option<RentalDeadline> = Some(RentalDeadline {
    policy: PolicyKey::AllocationProvisioningTimeout,
    outcome: "the allocation is released as `insufficient_capacity`; a request with `queue_seconds` waits for those instead",
});

const UNTIL_SET_UP: Option<RentalDeadline> = Some(RentalDeadline {
    policy: PolicyKey::AllocationProvisioningTimeout,
    outcome: "the allocation fails as `provisioning_timeout`, and its tenant is cleaned up from commit 11 on, unbilled",
});

const UNTIL_CLEANED: Option<RentalDeadline> = Some(RentalDeadline {
    policy: PolicyKey::AllocationReleaseTimeout,
    outcome: "the attempt counts as failed (`release_failed`); the next one begins after a pause, and after the last the node is fenced \
              until an operator acts",
});

/// The start of the use, or its end too.
const USAGE_CHANGED: EventConsequences = on!("billing.usage_changed", UsageChanged { allocation_id, holder, from, until } =>
    Consequences::command(Reaction::Billing { holder, instruction: ToAccount::MeterUsage { allocation_id, from, until } }));

/// The commits of a rental without failures, in their order. Commits 11 and 12 do not wait for each other.
pub const COMMITS: [RentalCommit; 15] = [
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::User,
        entity: EntityKind::Allocation,
        command: "request",
        events: &[on!("provisioning.requested", AllocationRequested { allocation_id } =>
            Consequences::command(Reaction::Place(allocation_id))
                .notify_renter(allocation_id, Details::in_state("requested")))],
        deadline: UNTIL_PLACED,
        after_crash: "The allocation is `requested`, and nothing is held for it. A repetition of the request with its `Idempotency-Key` finds \
                      it. The next worker that processes the event begins the placement.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Placement,
        entity: EntityKind::BillingAccount,
        command: "hold",
        events: &[],
        deadline: UNTIL_PLACED,
        after_crash: "The account holds the cost of the first window. The event of commit 1 is not settled: the placement begins again, and \
                      the hold is confirmed. If the allocation ends without a node, its `billing.usage_changed` returns the money; the account \
                      asks for it with `billing.allocation_metered`.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Placement,
        entity: EntityKind::Tenant,
        command: "admit",
        events: &[],
        deadline: UNTIL_PLACED,
        after_crash: "The allocation counts against its user's quota, and money is held. The event of commit 1 is not settled: the placement \
                      begins again. If the allocation ends without a node, commit 15 follows; the tenant asks for it with \
                      `provisioning.counted`.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Placement,
        entity: EntityKind::Node,
        command: "reserve",
        events: &[on!("node.devices_reserved", DevicesReserved { node_id, allocation_id, placed } =>
            to_allocation(allocation_id, ToAllocation::Reserved { node_id, placed }))],
        deadline: UNTIL_PLACED,
        after_crash: "The node holds the GPUs, and the allocation does not know it: it is `requested` still. The event of commit 1 is settled \
                      by this commit, so no other node is asked. The event of this commit leads to commit 5; the node resends it. If the \
                      allocation has ended meanwhile, cancelled or at its deadline, it answers `provisioning.reservation_unwanted`, and the \
                      node frees the GPUs.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Reaction,
        entity: EntityKind::Allocation,
        command: "reserved",
        events: &[on!("provisioning.started", ProvisioningStarted { allocation_id, node_id, deadline_at } =>
            to_node(node_id, ToNode::Provision { allocation_id, deadline_at })
                .notify_renter(allocation_id, Details::in_state("provisioning")))],
        deadline: UNTIL_SET_UP,
        after_crash: "The allocation is `provisioning`, and its node has no task for it. The event leads to commit 6; the allocation resends it.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Reaction,
        entity: EntityKind::Node,
        command: "provision",
        events: &[],
        deadline: UNTIL_SET_UP,
        after_crash: "The node's state has the task. The agent polls the node's next owner and gets it; its journal knows whether it has done it.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Agent,
        entity: EntityKind::Node,
        command: "report",
        events: &[on!("node.tenant_ready", TenantReady { node_id, allocation_id } =>
            to_allocation(allocation_id, ToAllocation::Provisioned { node_id }))],
        deadline: UNTIL_SET_UP,
        after_crash: "The tenant is set up, and the allocation does not know it. The event leads to commit 8. The allocation resends \
                      `provisioning.started`, which the node answers with this event. At the deadline the tenant is cleaned up.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Reaction,
        entity: EntityKind::Allocation,
        command: "provisioned",
        events: &[
            on!("provisioning.active", AllocationActive { allocation_id, node_id } =>
            Consequences::NONE.notify_renter(
                allocation_id,
                Details { node_id: Some(node_id), ..Details::in_state("active") },
            )),
            USAGE_CHANGED,
        ],
        deadline: None,
        after_crash: "The user has the GPUs, and the meter does not run. The event leads to commit 9 with the time at which the use began, so \
                      that it is billed from there; the account asks for it.",
    },
    RentalCommit {
        half: RentalHalf::Rent,
        sender: RentalSender::Reaction,
        entity: EntityKind::BillingAccount,
        command: "usage",
        events: &[],
        deadline: None,
        after_crash: "Nothing is outstanding. The account charges each window at its end.",
    },
    RentalCommit {
        half: RentalHalf::Release,
        sender: RentalSender::User,
        entity: EntityKind::Allocation,
        command: "release",
        events: &[
            on!("provisioning.release_requested", ReleaseRequested { allocation_id, node_id, attempt, deadline_at } =>
                to_node(node_id, ToNode::Clean { allocation_id, attempt, deadline_at })
                    .notify_renter(allocation_id, Details::in_state("releasing"))),
            on!("terminal.unwanted", TerminalsUnwanted { allocation_id, user_id } =>
                Consequences::command(Reaction::CloseTerminals { allocation_id, user_id })),
            USAGE_CHANGED,
        ],
        deadline: UNTIL_CLEANED,
        after_crash: "The allocation is `releasing`, and its tenant is still on the machine. A repetition of the request changes nothing. The \
                      first event leads to commit 11, and the allocation resends it; `billing.usage_changed` leads to commit 12, and the \
                      account asks for it. The use is billed up to this commit, whenever that arrives.",
    },
    RentalCommit {
        half: RentalHalf::Release,
        sender: RentalSender::Reaction,
        entity: EntityKind::Node,
        command: "clean",
        events: &[],
        deadline: UNTIL_CLEANED,
        after_crash: "The node's state has the task. The agent polls the node's next owner and gets it.",
    },
    RentalCommit {
        half: RentalHalf::Release,
        sender: RentalSender::Reaction,
        entity: EntityKind::BillingAccount,
        command: "usage",
        events: &[],
        deadline: UNTIL_CLEANED,
        after_crash: "The meter has ended with the last charge, and nothing is held of the money. The clean-up goes on.",
    },
    RentalCommit {
        half: RentalHalf::Release,
        sender: RentalSender::Agent,
        entity: EntityKind::Node,
        command: "report",
        events: &[on!("node.tenant_gone", TenantGone { node_id, allocation_id, attempt } =>
            to_allocation(allocation_id, ToAllocation::Cleaned { node_id, attempt }))],
        deadline: UNTIL_CLEANED,
        after_crash: "The clean-up is proved, and the GPUs are free for others. The event leads to commit 14. The allocation resends \
                      `provisioning.release_requested`, which a node without the tenant answers with this event.",
    },
    RentalCommit {
        half: RentalHalf::Release,
        sender: RentalSender::Reaction,
        entity: EntityKind::Allocation,
        command: "cleaned",
        events: &[on!("provisioning.released", AllocationReleased { allocation_id, user_id, reason, .. } =>
            Consequences::command(Reaction::Tenant { user_id, instruction: ToTenant::Forget { allocation_id } })
                .notify_renter(allocation_id, Details { reason: Some(reason), ..Details::in_state("released") }))],
        deadline: None,
        after_crash: "The allocation is `released`, and still counts against the quota. The event leads to commit 15; the tenant asks for it.",
    },
    RentalCommit {
        half: RentalHalf::Release,
        sender: RentalSender::Reaction,
        entity: EntityKind::Tenant,
        command: "forget",
        events: &[],
        deadline: None,
        after_crash: "Nothing: the rental is over.",
    },
];

/// An event of a rental that is not in [`COMMITS`]: a failure, an early end, or a message that was lost.
#[derive(Clone, Copy, Debug)]
pub struct RentalException {
    pub when: &'static str,
    pub event: EventConsequences,
}

impl RentalException {
    const fn new(when: &'static str, event: EventConsequences) -> Self {
        Self { when, event }
    }
}

/// What else may happen in a rental.
pub const EXCEPTIONS: [RentalException; 14] = [
    RentalException::new(
        "A node holds GPUs that the allocation does not want: it has ended, or has another node.",
        on!("provisioning.reservation_unwanted", ReservationUnwanted { allocation_id, node_id } =>
            to_node(node_id, ToNode::Unreserve { allocation_id })),
    ),
    RentalException::new(
        "The agent could not set the tenant up, or its machine has a critical fault. The allocation orders the clean-up (commit 11).",
        on!("node.tenant_failed", TenantFailed { node_id, allocation_id, reason } =>
            to_allocation(allocation_id, ToAllocation::ProvisionFailed { node_id, reason })),
    ),
    RentalException::new(
        "The allocation has failed, with a node or without one.",
        on!("provisioning.failed", ProvisioningFailed { allocation_id, reason, .. } =>
            Consequences::NONE.notify_renter(allocation_id, Details { reason: Some(reason), ..Details::default() })),
    ),
    RentalException::new(
        "The agent could not prove the clean-up. The allocation is `release_failed`, and tries again (commit 11).",
        on!("node.tenant_remains", TenantRemains { node_id, allocation_id, attempt, reason, detail } =>
            to_allocation(allocation_id, ToAllocation::CleanupFailed { node_id, attempt, reason, detail })),
    ),
    RentalException::new(
        "A clean-up attempt has failed, or has passed its deadline. The node takes no new allocation until the clean-up is proved.",
        on!("provisioning.release_failed", ReleaseFailed { allocation_id, node_id, attempt, reason } =>
        to_node(node_id, ToNode::MarkReleaseFailed { allocation_id, attempt }).notify_renter(
            allocation_id,
            Details { attempt: Some(attempt), reason: Some(reason), ..Details::in_state("release_failed") },
        )),
    ),
    RentalException::new(
        "The last attempt has failed. The node is fenced, and an operator retries the release or forces it.",
        on!("provisioning.release_exhausted", ReleaseExhausted { allocation_id, node_id, attempt } =>
        to_node(node_id, ToNode::Fence { allocation_id, attempt }).notify(
            Audience::Operators,
            Details {
                allocation_id: Some(allocation_id),
                node_id: Some(node_id),
                attempt: Some(attempt),
                ..Details::default()
            },
        )),
    ),
    RentalException::new(
        "An administrator has released it without a proof. The node goes on with the clean-up.",
        on!("provisioning.release_forced", ReleaseForced { allocation_id, node_id } =>
            to_node(node_id, ToNode::Abandon { allocation_id })),
    ),
    RentalException::new(
        "The machine has a critical fault. The user is billed up to it; before `active` the allocation fails.",
        on!("node.tenant_faulted", TenantFaulted { node_id, allocation_id, at, reason } => {
            let data = Details { node_id: Some(node_id), reason: Some(reason.clone()), ..Details::default() };
            to_allocation(allocation_id, ToAllocation::Faulted { node_id, at, reason }).notify_renter(allocation_id, data)
        }),
    ),
    RentalException::new(
        "A finding asks the user to leave a GPU or the machine.",
        on!("node.evacuation_begun", EvacuationBegun { node_id, allocation_id, release_at, reason } =>
        Consequences::NONE.notify_renter(
            allocation_id,
            Details {
                node_id: Some(node_id),
                reason: Some(reason),
                release_at: Some(release_at),
                ..Details::default()
            },
        )),
    ),
    RentalException::new(
        "The finding is over before the user had to leave.",
        on!("node.evacuation_ended", EvacuationEnded { node_id, allocation_id } =>
            Consequences::NONE.notify_renter(allocation_id, Details { node_id: Some(node_id), ..Details::default() })),
    ),
    RentalException::new(
        "The time to leave has ended. The allocation is released (as by commit 10).",
        on!("node.evacuation_due", EvacuationDue { node_id, allocation_id, reason } =>
            to_allocation(allocation_id, ToAllocation::EvacuationDue { node_id, reason })),
    ),
    RentalException::new(
        "No money is left, and the grace period has ended. The allocation is released (as by commit 10).",
        on!("billing.allocation_uncovered", AllocationUncovered { allocation_id, .. } =>
            to_allocation(allocation_id, ToAllocation::Uncovered)),
    ),
    RentalException::new(
        "The account has a meter whose allocation may have ended. The allocation answers with `billing.usage_changed` (commits 9 and 12).",
        on!("billing.allocation_metered", AllocationMetered { allocation_id, is_running, .. } =>
            to_allocation(allocation_id, ToAllocation::StillMetered { is_running })),
    ),
    RentalException::new(
        "The tenant counts an allocation that may have ended. The allocation answers with `provisioning.released` (commit 15).",
        on!("provisioning.counted", AllocationCounted { allocation_id, logins_revision } =>
            to_allocation(allocation_id, ToAllocation::StillCounted { logins_revision })),
    ),
];

/// The events of the tables, each with what follows from it.
pub fn events() -> impl Iterator<Item = &'static EventConsequences> {
    const ROWS: &[RentalCommit] = &COMMITS;
    const EXCEPTIONAL: &[RentalException] = &EXCEPTIONS;
    ROWS.iter().flat_map(|commit| commit.events).chain(EXCEPTIONAL.iter().map(|exception| &exception.event))
}

/// What follows from an event of a rental.
pub(in crate::cross_entity) fn consequences(event: &Event) -> Consequences {
    events().find_map(|row| row.of(event)).unwrap_or(Consequences::NONE)
}

const fn to_node(node_id: NodeId, instruction: ToNode) -> Consequences {
    Consequences::command(Reaction::Node(node_id, instruction))
}

const fn to_allocation(allocation_id: AllocationId, fact: ToAllocation) -> Consequences {
    Consequences::command(Reaction::Allocation(allocation_id, fact))
}

#[cfg(test)]
mod tests;
