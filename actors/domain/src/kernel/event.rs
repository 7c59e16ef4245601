//! Domain events. Each is one variant and one row of [`Event::row`].
//!
//! An event's `data` holds identifiers, the old and new state and a reason code, and nothing that a stranger on the bus must not read
//! (specification, *Events*). The consequence of an event is a function, [`Event::reaction`]: the worker that receives the event sends the
//! command that the function returns, under the event's id, so that a second delivery has no effect.

mod stream;

pub use crate::hardware::GpuDevice;
pub use stream::Stream;

use crate::hardware::Placement;
use crate::holder::Holder;
use crate::id::{
    AllocationId, AnnouncementId, BillingAccountId, EntityKind, EntityRef, KeySetId, NodeId, PaymentId, PolicyId,
    PolicyValueId, ProcessorEventId, RefundId, SkuId, TerminalSessionId,
};
use crate::key_purpose::KeySetPurpose;
use crate::money::Currency;
use crate::policy;
use crate::recording::RecordingTerms;
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};

/// A fact, past tense.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
pub enum Event {
    // Published by the allocation's saga.
    AllocationRequested {
        allocation_id: AllocationId,
    },
    ProvisioningStarted {
        allocation_id: AllocationId,
        node_id: NodeId,
        deadline_at: Timestamp,
    },
    AllocationActive {
        allocation_id: AllocationId,
        node_id: NodeId,
    },
    ProvisioningFailed {
        allocation_id: AllocationId,
        node_id: Option<NodeId>,
        reason: String,
    },
    ReservationUnwanted {
        allocation_id: AllocationId,
        node_id: NodeId,
    },
    ReleaseRequested {
        allocation_id: AllocationId,
        node_id: NodeId,
        attempt: u32,
        deadline_at: Timestamp,
    },
    ReleaseFailed {
        allocation_id: AllocationId,
        node_id: NodeId,
        attempt: u32,
        reason: String,
    },
    ReleaseExhausted {
        allocation_id: AllocationId,
        node_id: NodeId,
        attempt: u32,
    },
    ReleaseForced {
        allocation_id: AllocationId,
        node_id: NodeId,
    },
    AllocationReleased {
        allocation_id: AllocationId,
        user_id: String,
        node_id: Option<NodeId>,
        reason: String,
    },

    /// The SSH keys of the allocation differ from those that its node knows.
    LoginsChanged {
        allocation_id: AllocationId,
        node_id: NodeId,
        revision: u64,
    },
    /// The allocation's terminal sessions are to be closed.
    TerminalsUnwanted {
        allocation_id: AllocationId,
        user_id: String,
    },

    /// The node's certificates were revoked: every terminal session on it is closed.
    TerminalsCutOff {
        node_id: NodeId,
    },

    /// All that is known of the time in which it was used: its start and its end. Only that time may be billed.
    UsageChanged {
        allocation_id: AllocationId,
        holder: Holder,
        from: Option<Timestamp>,
        until: Option<Timestamp>,
    },

    // Published by the billing account.
    /// The balance has fallen below the threshold.
    BalanceLow {
        account_id: BillingAccountId,
        holder: Holder,
    },
    /// The balance does not cover the next window: unless money comes in, what runs is released then.
    BalanceDepleted {
        account_id: BillingAccountId,
        holder: Holder,
        release_at: Timestamp,
    },
    /// The grace period has ended.
    AllocationUncovered {
        account_id: BillingAccountId,
        allocation_id: AllocationId,
    },
    /// The account asks for the allocation's state.
    AllocationMetered {
        account_id: BillingAccountId,
        allocation_id: AllocationId,
        is_running: bool,
    },

    /// The payment was credited to the account.
    PaymentDeposited {
        payment_id: PaymentId,
        account_id: BillingAccountId,
        /// A resent answer, because the payment did not receive the first one. It is no news for other consumers.
        #[serde(default)]
        is_again: bool,
    },
    /// The payment cannot be credited: the account is in another currency.
    DepositRefused {
        payment_id: PaymentId,
        account_id: BillingAccountId,
        reason: String,
        #[serde(default)]
        is_again: bool,
    },
    /// The amount that is debited for the payer's refund; where the refund is refused, nothing.
    RefundTaken {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        amount_minor: i64,
    },
    RefundRefused {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        reason: String,
        #[serde(default)]
        is_again: bool,
    },
    /// A refund that the processor did not pay is credited again.
    RefundGivenBack {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        #[serde(default)]
        is_again: bool,
    },
    /// A reversal at the processor is posted; `is_undone`: and so is its undoing.
    ReversalPosted {
        payment_id: PaymentId,
        reversal_id: String,
        account_id: BillingAccountId,
        is_undone: bool,
        #[serde(default)]
        is_again: bool,
    },

    // Published by the payment.
    /// It was created, and it is not known whether the processor has it.
    PaymentOpeningDue {
        payment_id: PaymentId,
    },
    /// Its state at the processor is to be read; `is_over`: the time to pay has ended, it is to be canceled.
    PaymentCheckDue {
        payment_id: PaymentId,
        processor_id: String,
        is_over: bool,
    },
    /// The processor has the money.
    PaymentPaid {
        payment_id: PaymentId,
        holder: Holder,
        currency: Currency,
        amount_minor: i64,
    },
    /// Its payer wants money back.
    RefundRequested {
        payment_id: PaymentId,
        refund_id: RefundId,
        holder: Holder,
        amount_minor: i64,
        is_exact: bool,
    },
    /// It was debited from the account, and the processor is to pay it.
    RefundDue {
        payment_id: PaymentId,
        refund_id: RefundId,
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
    },
    /// The processor did not pay it.
    RefundFailed {
        payment_id: PaymentId,
        refund_id: RefundId,
        holder: Holder,
        amount_minor: i64,
    },
    /// The processor has paid it.
    RefundSucceeded {
        payment_id: PaymentId,
        refund_id: RefundId,
    },
    /// Money was taken back at the processor without a request from here.
    PaymentReversed {
        payment_id: PaymentId,
        holder: Holder,
        reversal_id: String,
        is_dispute: bool,
        amount_minor: i64,
    },
    /// Such money came back.
    ReversalUndone {
        payment_id: PaymentId,
        holder: Holder,
        reversal_id: String,
        is_dispute: bool,
        amount_minor: i64,
    },

    /// An event of the payment processor is not processed yet.
    ProcessorEventDue {
        processor_event_id: ProcessorEventId,
    },

    // Published by the node.
    NodeStateChanged {
        node_id: NodeId,
        from: Option<String>,
        to: String,
        reason: String,
    },
    DevicesReserved {
        node_id: NodeId,
        allocation_id: AllocationId,
        placed: Placement,
    },
    TenantReady {
        node_id: NodeId,
        allocation_id: AllocationId,
    },
    TenantFailed {
        node_id: NodeId,
        allocation_id: AllocationId,
        reason: String,
    },
    TenantGone {
        node_id: NodeId,
        allocation_id: AllocationId,
        attempt: u32,
    },
    TenantRemains {
        node_id: NodeId,
        allocation_id: AllocationId,
        attempt: u32,
        reason: String,
        /// What is left and where, or why the agent could not check; empty in events of earlier releases.
        #[serde(default)]
        detail: String,
    },

    /// A critical fault of the machine, detected at this time.
    TenantFaulted {
        node_id: NodeId,
        allocation_id: AllocationId,
        at: Timestamp,
        reason: String,
    },

    /// The agent has written the SSH keys that may log in.
    LoginsWritten {
        node_id: NodeId,
        allocation_id: AllocationId,
        revision: u64,
    },
    /// The agent could not start the session.
    TerminalFailed {
        session_id: TerminalSessionId,
        node_id: NodeId,
        reason: String,
    },

    // Published by the terminal session.
    TerminalOpened {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        node_id: NodeId,
        ends_at: Timestamp,
        /// Until when the agent may start it.
        begin_until: Timestamp,
        /// Absent in events of the previous release.
        #[serde(default)]
        recording: RecordingTerms,
    },
    TerminalClosed {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        node_id: NodeId,
        reason: String,
    },

    // Published by the tenant.
    AllocationCounted {
        allocation_id: AllocationId,
        /// The revision of the tenant's keys.
        #[serde(default)]
        logins_revision: u64,
    },
    /// The SSH keys of the allocation are to be resolved again.
    LoginsStale {
        allocation_id: AllocationId,
        user_id: String,
    },

    // Published by the catalog.
    SkuStateChanged {
        sku_id: SkuId,
        from: Option<String>,
        to: String,
    },

    // An administrator has written or revoked a value: every process's cached policy is stale.
    PolicyWritten {
        policy_id: PolicyId,
        value_id: PolicyValueId,
        policy: policy::PolicyKey,
        effective_at: Timestamp,
    },

    // An operator has rotated keys: every process's cached keys are stale.
    TrustChanged {
        set_id: KeySetId,
        purpose: KeySetPurpose,
        version: u64,
    },

    // An operator's announcement to all connected clients.
    Announced {
        announcement_id: AnnouncementId,
    },
}

impl Event {
    /// The subject that notifies every process of a key rotation.
    pub const TRUST_CHANGED: &'static str = "node.trust_changed";

    /// Type and stream of every event: the row to review when one is added.
    #[must_use]
    pub const fn row(&self) -> (&'static str, Stream) {
        use Stream::{Billing, Nodes, Notifications, Policy, Provisioning, Terminals};
        match self {
            Self::AllocationRequested { .. } => ("provisioning.requested", Provisioning),
            Self::ProvisioningStarted { .. } => ("provisioning.started", Provisioning),
            Self::AllocationActive { .. } => ("provisioning.active", Provisioning),
            Self::ProvisioningFailed { .. } => ("provisioning.failed", Provisioning),
            Self::ReservationUnwanted { .. } => ("provisioning.reservation_unwanted", Provisioning),
            Self::ReleaseRequested { .. } => ("provisioning.release_requested", Provisioning),
            Self::ReleaseFailed { .. } => ("provisioning.release_failed", Provisioning),
            Self::ReleaseExhausted { .. } => ("provisioning.release_exhausted", Provisioning),
            Self::ReleaseForced { .. } => ("provisioning.release_forced", Provisioning),
            Self::AllocationReleased { .. } => ("provisioning.released", Provisioning),
            Self::LoginsChanged { .. } => ("provisioning.logins_changed", Provisioning),
            Self::LoginsStale { .. } => ("provisioning.logins_stale", Provisioning),
            Self::TerminalsUnwanted { .. } => ("terminal.unwanted", Terminals),
            Self::TerminalsCutOff { .. } => ("terminal.cut_off", Terminals),
            Self::UsageChanged { .. } => ("billing.usage_changed", Billing),
            Self::BalanceLow { .. } => ("billing.balance_low", Billing),
            Self::BalanceDepleted { .. } => ("billing.balance_depleted", Billing),
            Self::AllocationUncovered { .. } => ("billing.allocation_uncovered", Billing),
            Self::AllocationMetered { .. } => ("billing.allocation_metered", Billing),
            Self::PaymentDeposited { .. } => ("billing.payment_deposited", Billing),
            Self::DepositRefused { .. } => ("billing.deposit_refused", Billing),
            Self::RefundTaken { .. } => ("billing.refund_taken", Billing),
            Self::RefundRefused { .. } => ("billing.refund_refused", Billing),
            Self::RefundGivenBack { .. } => ("billing.refund_given_back", Billing),
            Self::ReversalPosted { .. } => ("billing.reversal_posted", Billing),
            Self::PaymentOpeningDue { .. } => ("billing.payment_opening_due", Billing),
            Self::PaymentCheckDue { .. } => ("billing.payment_check_due", Billing),
            Self::PaymentPaid { .. } => ("billing.payment_paid", Billing),
            Self::RefundRequested { .. } => ("billing.refund_requested", Billing),
            Self::RefundDue { .. } => ("billing.refund_due", Billing),
            Self::RefundFailed { .. } => ("billing.refund_failed", Billing),
            Self::RefundSucceeded { .. } => ("billing.refund_succeeded", Billing),
            Self::PaymentReversed { .. } => ("billing.payment_reversed", Billing),
            Self::ReversalUndone { .. } => ("billing.reversal_undone", Billing),
            Self::ProcessorEventDue { .. } => ("billing.processor_event_due", Billing),
            Self::TenantFaulted { .. } => ("node.tenant_faulted", Nodes),
            Self::NodeStateChanged { .. } => ("node.state_changed", Nodes),
            Self::DevicesReserved { .. } => ("node.devices_reserved", Nodes),
            Self::TenantReady { .. } => ("node.tenant_ready", Nodes),
            Self::TenantFailed { .. } => ("node.tenant_failed", Nodes),
            Self::TenantGone { .. } => ("node.tenant_gone", Nodes),
            Self::TenantRemains { .. } => ("node.tenant_remains", Nodes),
            Self::LoginsWritten { .. } => ("node.logins_written", Nodes),
            Self::TerminalFailed { .. } => ("terminal.failed", Terminals),
            Self::TerminalOpened { .. } => ("terminal.opened", Terminals),
            Self::TerminalClosed { .. } => ("terminal.closed", Terminals),
            Self::AllocationCounted { .. } => ("provisioning.counted", Provisioning),
            Self::SkuStateChanged { .. } => ("sku.state_changed", Nodes),
            // The subject ends in the key, so that a consumer can subscribe to one key.
            Self::PolicyWritten { policy, .. } => (policy.invalidation(), Policy),
            Self::TrustChanged { .. } => (Self::TRUST_CHANGED, Nodes),
            Self::Announced { .. } => ("notification.announced", Notifications),
        }
    }

    /// The CloudEvents `type`, which is the NATS subject too.
    #[must_use]
    pub const fn subject(&self) -> &'static str {
        self.row().0
    }

    /// The entity that it is about: the CloudEvents `subject`.
    #[must_use]
    pub const fn about(&self) -> EntityRef {
        match self {
            Self::AllocationRequested { allocation_id }
            | Self::ProvisioningStarted { allocation_id, .. }
            | Self::AllocationActive { allocation_id, .. }
            | Self::ProvisioningFailed { allocation_id, .. }
            | Self::ReservationUnwanted { allocation_id, .. }
            | Self::ReleaseRequested { allocation_id, .. }
            | Self::ReleaseFailed { allocation_id, .. }
            | Self::ReleaseExhausted { allocation_id, .. }
            | Self::ReleaseForced { allocation_id, .. }
            | Self::AllocationReleased { allocation_id, .. }
            | Self::LoginsChanged { allocation_id, .. }
            | Self::LoginsStale { allocation_id, .. }
            | Self::TerminalsUnwanted { allocation_id, .. }
            | Self::UsageChanged { allocation_id, .. }
            | Self::AllocationUncovered { allocation_id, .. }
            | Self::AllocationMetered { allocation_id, .. }
            | Self::AllocationCounted { allocation_id, .. } => {
                EntityRef { kind: EntityKind::Allocation, id: allocation_id.0 }
            }
            Self::BalanceLow { account_id, .. } | Self::BalanceDepleted { account_id, .. } => {
                EntityRef { kind: EntityKind::BillingAccount, id: account_id.0 }
            }
            Self::PaymentDeposited { payment_id, .. }
            | Self::DepositRefused { payment_id, .. }
            | Self::RefundTaken { payment_id, .. }
            | Self::RefundRefused { payment_id, .. }
            | Self::RefundGivenBack { payment_id, .. }
            | Self::ReversalPosted { payment_id, .. }
            | Self::PaymentOpeningDue { payment_id }
            | Self::PaymentCheckDue { payment_id, .. }
            | Self::PaymentPaid { payment_id, .. }
            | Self::RefundRequested { payment_id, .. }
            | Self::RefundDue { payment_id, .. }
            | Self::RefundFailed { payment_id, .. }
            | Self::RefundSucceeded { payment_id, .. }
            | Self::PaymentReversed { payment_id, .. }
            | Self::ReversalUndone { payment_id, .. } => EntityRef { kind: EntityKind::Payment, id: payment_id.0 },
            Self::ProcessorEventDue { processor_event_id } => {
                EntityRef { kind: EntityKind::ProcessorEvent, id: processor_event_id.0 }
            }
            Self::NodeStateChanged { node_id, .. }
            | Self::TenantFaulted { node_id, .. }
            | Self::DevicesReserved { node_id, .. }
            | Self::TenantReady { node_id, .. }
            | Self::TenantFailed { node_id, .. }
            | Self::TenantGone { node_id, .. }
            | Self::TenantRemains { node_id, .. }
            | Self::TerminalsCutOff { node_id }
            | Self::LoginsWritten { node_id, .. } => EntityRef { kind: EntityKind::Node, id: node_id.0 },
            Self::TerminalFailed { session_id, .. }
            | Self::TerminalOpened { session_id, .. }
            | Self::TerminalClosed { session_id, .. } => {
                EntityRef { kind: EntityKind::TerminalSession, id: session_id.0 }
            }
            Self::SkuStateChanged { sku_id, .. } => EntityRef { kind: EntityKind::Sku, id: sku_id.0 },
            Self::PolicyWritten { policy_id, .. } => EntityRef { kind: EntityKind::Policy, id: policy_id.0 },
            Self::TrustChanged { set_id, .. } => EntityRef { kind: EntityKind::KeySet, id: set_id.0 },
            Self::Announced { announcement_id } => EntityRef { kind: EntityKind::Announcement, id: announcement_id.0 },
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
