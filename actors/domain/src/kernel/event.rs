//! Domain events. Each is one row of the table in this file, and one arm of [`Event::consequences`].
//!
//! An event's `data` holds identifiers, the old and new state and a reason code, and nothing that a stranger on the bus must not read
//! (specification, *Events*). What follows from an event is a function, [`Event::consequences`]: the worker that receives the event sends the
//! command that the function returns, under the event's id, so that a second delivery has no effect.

mod stream;

pub use crate::hardware::GpuDevice;
pub use stream::Stream;

use crate::account_holder::Holder;
use crate::hardware::Placement;
use crate::id::{
    AllocationId, AnnouncementId, BillingAccountId, BrowserSessionId, EntityKind, EntityRef, HealthRulesId, KeySetId,
    NodeId, PaymentId, PolicyId, PolicyValueId, ProcessorEventId, RefundId, RolloutId, SkuId, TerminalSessionId,
    UserId,
};
use crate::key_purpose::KeySetPurpose;
use crate::money::Currency;
use crate::package_digest::PackageDigest;
use crate::policy::PolicyKey;
use crate::reason_code;
use crate::recording::RecordingTerms;
use crate::rollout_outcome::RolloutOutcome;
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};

/// Who is notified of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotificationScope {
    /// No user: the event is an intermediate step, or a message between parts of the system.
    None,
    /// Connected clients.
    Live,
    /// Connected clients, webhooks and e-mail addresses.
    Delivered,
}

/// What the table says of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRow {
    /// The CloudEvents `type`, which is the NATS subject too. A subject that ends in `>` stands for all those that begin so.
    pub subject: &'static str,
    /// The stream that stores it.
    pub stream: Stream,
    pub notification: NotificationScope,
}

impl EventRow {
    const fn new(subject: &'static str, stream: Stream, notification: NotificationScope) -> Self {
        Self { subject, stream, notification }
    }
}

/// A row: `Variant: subject in stream, about the entity of that kind with that id, notification of its audience { fields }`.
macro_rules! events {
    ($(
        $(#[$doc:meta])*
        $variant:ident: $subject:tt in $stream:ident, about $kind:ident($id:ident), notification $notification:ident {
            $($(#[$attribute:meta])* $field:ident: $type:ty,)+
        }
    )+) => {
        /// A fact, past tense.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(tag = "fact", rename_all = "snake_case")]
        pub enum Event {
            $($(#[$doc])* $variant { $($(#[$attribute])* $field: $type,)+ },)+
        }

        impl Event {
            /// The table.
            pub const ROWS: &[EventRow] =
                &[$(EventRow::new($subject, Stream::$stream, NotificationScope::$notification)),+];

            #[must_use]
            pub const fn row(&self) -> EventRow {
                match self {
                    $(Self::$variant { .. } => {
                        EventRow::new($subject, Stream::$stream, NotificationScope::$notification)
                    })+
                }
            }

            /// The entity that it is about: the CloudEvents `subject`.
            #[must_use]
            pub const fn about(&self) -> EntityRef {
                match self {
                    $(Self::$variant { $id, .. } => EntityRef { kind: EntityKind::$kind, id: $id.0 },)+
                }
            }

            /// One event of each row, with all options set.
            #[cfg(test)]
            pub(crate) fn samples() -> Vec<Self> {
                vec![$(Self::$variant { $($field: tests::Sample::sample()),+ }),+]
            }
        }
    };
}

events! {
    // Published by the allocation's saga.
    AllocationRequested: "provisioning.requested" in Provisioning, about Allocation(allocation_id), notification Live {
        allocation_id: AllocationId,
    }
    ProvisioningStarted: "provisioning.started" in Provisioning, about Allocation(allocation_id), notification Live {
        allocation_id: AllocationId,
        node_id: NodeId,
        deadline_at: Timestamp,
    }
    AllocationActive: "provisioning.active" in Provisioning, about Allocation(allocation_id), notification Delivered {
        allocation_id: AllocationId,
        node_id: NodeId,
    }
    ProvisioningFailed: "provisioning.failed" in Provisioning, about Allocation(allocation_id), notification Delivered {
        allocation_id: AllocationId,
        node_id: Option<NodeId>,
        reason: String,
    }
    ReservationUnwanted: "provisioning.reservation_unwanted" in Provisioning, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        node_id: NodeId,
    }
    ReleaseRequested: "provisioning.release_requested" in Provisioning, about Allocation(allocation_id), notification Live {
        allocation_id: AllocationId,
        node_id: NodeId,
        attempt: u32,
        deadline_at: Timestamp,
    }
    ReleaseFailed: "provisioning.release_failed" in Provisioning, about Allocation(allocation_id), notification Delivered {
        allocation_id: AllocationId,
        node_id: NodeId,
        attempt: u32,
        reason: String,
    }
    ReleaseExhausted: "provisioning.release_exhausted" in Provisioning, about Allocation(allocation_id), notification Delivered {
        allocation_id: AllocationId,
        node_id: NodeId,
        attempt: u32,
    }
    ReleaseForced: "provisioning.release_forced" in Provisioning, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        node_id: NodeId,
    }
    AllocationReleased: "provisioning.released" in Provisioning, about Allocation(allocation_id), notification Delivered {
        allocation_id: AllocationId,
        user_id: UserId,
        node_id: Option<NodeId>,
        reason: String,
    }

    /// The SSH keys of the allocation differ from those that its node knows.
    LoginsChanged: "provisioning.logins_changed" in Provisioning, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        node_id: NodeId,
        revision: u64,
    }
    /// The allocation's terminal sessions are to be closed.
    TerminalsUnwanted: "terminal.unwanted" in Terminals, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        user_id: UserId,
    }

    /// The node's certificates were revoked: every terminal session on it is closed.
    TerminalsCutOff: "terminal.cut_off" in Terminals, about Node(node_id), notification None {
        node_id: NodeId,
    }

    /// All that is known of the time in which it was used: its start and its end. Only that time may be billed.
    UsageChanged: "billing.usage_changed" in Billing, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        holder: Holder,
        from: Option<Timestamp>,
        until: Option<Timestamp>,
    }

    // Published by the billing account.
    /// The balance has fallen below the threshold.
    BalanceLow: "billing.balance_low" in Billing, about BillingAccount(account_id), notification Delivered {
        account_id: BillingAccountId,
        holder: Holder,
    }
    /// The balance does not cover the next window: unless money comes in, what runs is released then.
    BalanceDepleted: "billing.balance_depleted" in Billing, about BillingAccount(account_id), notification Delivered {
        account_id: BillingAccountId,
        holder: Holder,
        release_at: Timestamp,
    }
    /// The grace period has ended.
    AllocationUncovered: "billing.allocation_uncovered" in Billing, about Allocation(allocation_id), notification None {
        account_id: BillingAccountId,
        allocation_id: AllocationId,
    }
    /// The account asks for the allocation's state.
    AllocationMetered: "billing.allocation_metered" in Billing, about Allocation(allocation_id), notification None {
        account_id: BillingAccountId,
        allocation_id: AllocationId,
        is_running: bool,
    }

    /// The payment was credited to the account.
    PaymentDeposited: "billing.payment_deposited" in Billing, about Payment(payment_id), notification Delivered {
        payment_id: PaymentId,
        account_id: BillingAccountId,
        /// A resent answer, because the payment did not receive the first one. It is no news for other consumers.
        #[serde(default)]
        is_again: bool,
    }
    /// The payment cannot be credited: the account is in another currency.
    DepositRefused: "billing.deposit_refused" in Billing, about Payment(payment_id), notification Delivered {
        payment_id: PaymentId,
        account_id: BillingAccountId,
        reason: String,
        #[serde(default)]
        is_again: bool,
    }
    /// The amount that is debited for the payer's refund; where the refund is refused, nothing.
    RefundTaken: "billing.refund_taken" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        amount_minor: i64,
    }
    RefundRefused: "billing.refund_refused" in Billing, about Payment(payment_id), notification Delivered {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        reason: String,
        #[serde(default)]
        is_again: bool,
    }
    /// A refund that the processor did not pay is credited again.
    RefundGivenBack: "billing.refund_given_back" in Billing, about Payment(payment_id), notification Delivered {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        #[serde(default)]
        is_again: bool,
    }
    /// A reversal at the processor is posted; `is_undone`: and so is its undoing.
    ReversalPosted: "billing.reversal_posted" in Billing, about Payment(payment_id), notification Delivered {
        payment_id: PaymentId,
        reversal_id: String,
        account_id: BillingAccountId,
        is_undone: bool,
        #[serde(default)]
        is_again: bool,
    }

    // Published by the payment.
    /// It was created, and it is not known whether the processor has it.
    PaymentOpeningDue: "billing.payment_opening_due" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
    }
    /// Its state at the processor is to be read; `is_over`: the time to pay has ended, it is to be canceled.
    PaymentCheckDue: "billing.payment_check_due" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        processor_id: String,
        is_over: bool,
    }
    /// The processor has the money.
    PaymentPaid: "billing.payment_paid" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        holder: Holder,
        currency: Currency,
        amount_minor: i64,
    }
    /// Its payer wants money back.
    RefundRequested: "billing.refund_requested" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        refund_id: RefundId,
        holder: Holder,
        amount_minor: i64,
        is_exact: bool,
    }
    /// It was debited from the account, and the processor is to pay it.
    RefundDue: "billing.refund_due" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        refund_id: RefundId,
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
    }
    /// The processor did not pay it.
    RefundFailed: "billing.refund_failed" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        refund_id: RefundId,
        holder: Holder,
        amount_minor: i64,
    }
    /// The processor has paid it.
    RefundSucceeded: "billing.refund_succeeded" in Billing, about Payment(payment_id), notification Delivered {
        payment_id: PaymentId,
        refund_id: RefundId,
    }
    /// Money was taken back at the processor without a request from here.
    PaymentReversed: "billing.payment_reversed" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        holder: Holder,
        reversal_id: String,
        is_dispute: bool,
        amount_minor: i64,
    }
    /// Such money came back.
    ReversalUndone: "billing.reversal_undone" in Billing, about Payment(payment_id), notification None {
        payment_id: PaymentId,
        holder: Holder,
        reversal_id: String,
        is_dispute: bool,
        amount_minor: i64,
    }

    /// An event of the payment processor is not processed yet.
    ProcessorEventDue: "billing.processor_event_due" in Billing, about ProcessorEvent(processor_event_id), notification None {
        processor_event_id: ProcessorEventId,
    }

    // Published by the node.
    NodeStateChanged: "node.state_changed" in Nodes, about Node(node_id), notification Delivered {
        node_id: NodeId,
        from: Option<String>,
        to: String,
        reason: String,
    }
    AgentUpdated: "node.agent_updated" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        digest: PackageDigest,
        /// The rollout that ordered it; absent where an administrator did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rollout_id: Option<RolloutId>,
    }
    /// It was refused or rolled back: the previous version is in use.
    AgentUpdateFailed: "node.agent_update_failed" in Nodes, about Node(node_id), notification Delivered {
        node_id: NodeId,
        digest: PackageDigest,
        reason: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rollout_id: Option<RolloutId>,
    }
    /// To its rollout: how the node's part ended, where no other event says it.
    RolloutNodeEnded: "node.rollout_node_ended" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        rollout_id: RolloutId,
        outcome: RolloutOutcome,
    }
    /// To its rollout: what the node has shown in the soak after its update, a fault or that it is in order.
    RolloutNodeSoaked: "node.rollout_node_soaked" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        rollout_id: RolloutId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<String>,
    }
    DevicesReserved: "node.devices_reserved" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
        placed: Placement,
    }
    TenantReady: "node.tenant_ready" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
    }
    TenantFailed: "node.tenant_failed" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
        reason: String,
    }
    TenantGone: "node.tenant_gone" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
        attempt: u32,
    }
    TenantRemains: "node.tenant_remains" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
        attempt: u32,
        reason: String,
        /// What is left and where, or why the agent could not check; empty in events of earlier releases.
        #[serde(default)]
        detail: String,
    }

    /// A critical fault of the machine, detected at this time.
    TenantFaulted: "node.tenant_faulted" in Nodes, about Node(node_id), notification Delivered {
        node_id: NodeId,
        allocation_id: AllocationId,
        at: Timestamp,
        reason: String,
    }

    /// The bare-metal provider has something outstanding for the node's machine.
    MachineDue: "node.machine_due" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
    }
    /// A finding about the machine, or about a GPU of the allocation, asks its tenant to leave.
    EvacuationBegun: "node.evacuation_begun" in Nodes, about Node(node_id), notification Delivered {
        node_id: NodeId,
        allocation_id: AllocationId,
        release_at: Timestamp,
        reason: String,
    }
    /// What asked the tenant to leave is over before the deadline.
    EvacuationEnded: "node.evacuation_ended" in Nodes, about Node(node_id), notification Delivered {
        node_id: NodeId,
        allocation_id: AllocationId,
    }
    /// The deadline has passed: the allocation is to be released.
    EvacuationDue: "node.evacuation_due" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
        reason: String,
    }

    /// The agent has written the SSH keys that may log in.
    LoginsWritten: "node.logins_written" in Nodes, about Node(node_id), notification None {
        node_id: NodeId,
        allocation_id: AllocationId,
        revision: u64,
    }
    /// The agent could not start the session.
    TerminalFailed: "terminal.failed" in Terminals, about TerminalSession(session_id), notification None {
        session_id: TerminalSessionId,
        node_id: NodeId,
        reason: String,
    }

    // Published by the terminal session.
    TerminalOpened: "terminal.opened" in Terminals, about TerminalSession(session_id), notification Delivered {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        node_id: NodeId,
        ends_at: Timestamp,
        /// Until when the agent may start it.
        begin_until: Timestamp,
        /// Absent in events of the previous release.
        #[serde(default)]
        recording: RecordingTerms,
    }
    TerminalClosed: "terminal.closed" in Terminals, about TerminalSession(session_id), notification Delivered {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        node_id: NodeId,
        reason: String,
    }

    // Published by the browser session.
    /// Its terminals and connections end with it.
    BrowserSessionEnded: "terminal.browser_session_ended" in Terminals, about BrowserSession(browser_session_id), notification Live {
        browser_session_id: BrowserSessionId,
        user_id: UserId,
        reason: String,
    }

    // Published by the tenant.
    AllocationCounted: "provisioning.counted" in Provisioning, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        /// The revision of the tenant's keys.
        #[serde(default)]
        logins_revision: u64,
    }
    /// The SSH keys of the allocation are to be resolved again.
    LoginsStale: "provisioning.logins_stale" in Provisioning, about Allocation(allocation_id), notification None {
        allocation_id: AllocationId,
        user_id: UserId,
    }

    // Published by the catalog.
    SkuStateChanged: "sku.state_changed" in Nodes, about Sku(sku_id), notification None {
        sku_id: SkuId,
        from: Option<String>,
        to: String,
    }

    // An administrator has written or revoked a value: every process's cached policy is stale.
    PolicyWritten: "policy.invalidate.>" in Policy, about Policy(policy_id), notification None {
        policy_id: PolicyId,
        value_id: PolicyValueId,
        policy: PolicyKey,
        effective_at: Timestamp,
    }

    // An administrator has changed the overrides of health findings, which every process caches with the policy.
    HealthRulesWritten: "policy.invalidate.health_rules" in Policy, about HealthRules(rules_id), notification None {
        rules_id: HealthRulesId,
    }

    // An administrator expects other hardware of a SKU's machines, which every process caches with the policy.
    SkuHardwareExpected: "policy.invalidate.sku_hardware" in Policy, about Sku(sku_id), notification None {
        sku_id: SkuId,
    }

    // Published by the rollout. The subjects are the node's, so that the streams of a running cluster store them.
    RolloutStarted: "node.rollout_started" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
        digest: PackageDigest,
    }
    /// It needs more nodes of its selector.
    RolloutNodesDue: "node.rollout_nodes_due" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
    }
    /// The node's agent is to be updated.
    RolloutUpdateDue: "node.rollout_update_due" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
        node_id: NodeId,
        digest: PackageDigest,
        /// The rollout watches the node after its update.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        soaks: bool,
        /// Also while a fault holds the node in quarantine.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        includes_held: bool,
    }
    /// The soak is over: the node is asked whether it is in order.
    RolloutCheckDue: "node.rollout_check_due" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
        node_id: NodeId,
    }
    RolloutPaused: "node.rollout_paused" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
    }
    RolloutResumed: "node.rollout_resumed" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
    }
    /// The update of this node failed or was rolled back, or the node is not in order after it; no other one begins until an administrator resumes the rollout.
    RolloutStopped: "node.rollout_stopped" in Nodes, about Rollout(rollout_id), notification Delivered {
        rollout_id: RolloutId,
        node_id: NodeId,
        reason: String,
    }
    RolloutCompleted: "node.rollout_completed" in Nodes, about Rollout(rollout_id), notification Delivered {
        rollout_id: RolloutId,
    }
    RolloutAborted: "node.rollout_aborted" in Nodes, about Rollout(rollout_id), notification None {
        rollout_id: RolloutId,
    }

    // An administrator has changed what a SKU wants of a validation, which every process caches with the policy.
    SkuMinimumsWritten: "policy.invalidate.sku_minimums" in Policy, about Sku(sku_id), notification None {
        sku_id: SkuId,
    }

    // An operator has rotated keys: every process's cached keys are stale.
    TrustChanged: TRUST_CHANGED in Nodes, about KeySet(set_id), notification None {
        set_id: KeySetId,
        purpose: KeySetPurpose,
        version: u64,
    }

    // An operator's announcement to all connected clients.
    Announced: "notification.announced" in Notifications, about Announcement(announcement_id), notification Live {
        announcement_id: AnnouncementId,
    }
}

const TRUST_CHANGED: &str = "node.trust_changed";

impl Event {
    /// Whether its reason, where it has one, is a code. Codes that no agent reports are rows of [`reason_code::ALL`].
    ///
    /// The refusals of deposits and refunds carry the sentence that the payment shows to its payer.
    pub(crate) fn has_valid_reason(&self) -> bool {
        if let Self::NodeStateChanged { reason, .. }
        | Self::TenantFaulted { reason, .. }
        | Self::EvacuationBegun { reason, .. }
        | Self::EvacuationDue { reason, .. }
        | Self::TerminalClosed { reason, .. }
        | Self::BrowserSessionEnded { reason, .. } = self
        {
            return reason_code::is_listed(reason);
        }
        if let Self::ProvisioningFailed { reason, .. }
        | Self::ReleaseFailed { reason, .. }
        | Self::AllocationReleased { reason, .. }
        | Self::AgentUpdateFailed { reason, .. }
        | Self::TenantFailed { reason, .. }
        | Self::TenantRemains { reason, .. }
        | Self::TerminalFailed { reason, .. }
        | Self::RolloutStopped { reason, .. }
        | Self::RolloutNodeEnded { outcome: RolloutOutcome::Failed { reason }, .. }
        | Self::RolloutNodeSoaked { fault: Some(reason), .. } = self
        {
            return reason_code::is_code(reason);
        }
        true
    }

    /// The subject that notifies every process of a key rotation.
    pub const TRUST_CHANGED: &'static str = TRUST_CHANGED;

    /// The CloudEvents `type`, which is the NATS subject too.
    #[must_use]
    pub const fn subject(&self) -> &'static str {
        // It ends in the key, so that a consumer can subscribe to one key.
        if let Self::PolicyWritten { policy, .. } = self { policy.invalidation() } else { self.row().subject }
    }
}

#[cfg(test)]
pub(crate) mod tests;
