//! What happened, for the rest of the system to hear. One variant and one row of [`Event::row`] each.
//!
//! An event's `data` holds identifiers, the old and new state and a reason code, and nothing that a stranger on the bus must
//! not read (specification, *Events*). The consequence of an event is a function, [`Event::reaction`]: the worker that hears it
//! asks the command that it names, under the event's id, so that hearing it twice does nothing twice.

mod reaction;
mod stream;

pub use reaction::Reaction;
pub use stream::Stream;

use crate::allocation::Placed;
use crate::billing_account::Holder;
use crate::id::{
    AllocationId, AnnouncementId, BillingAccountId, EntityRef, KeySetId, Kind, NodeId, PaymentId, PolicyId,
    PolicyValueId, ProcessorEventId, RefundId, SkuId, TerminalSessionId,
};
use crate::key_set::Purpose;
use crate::machine::Timestamp;
use crate::money::Currency;
use crate::policy;
use crate::recording::Terms;
use serde::{Deserialize, Serialize};

/// A GPU as the node's driver names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    pub index: u32,
    pub uuid: String,
}

/// A fact, past tense.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
pub enum Event {
    // The allocation's saga speaks.
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

    /// Who may log in is another than its node was told.
    LoginsChanged {
        allocation_id: AllocationId,
        node_id: NodeId,
        revision: u64,
    },
    /// Its terminal sessions are over.
    TerminalsUnwanted {
        allocation_id: AllocationId,
        user_id: String,
    },

    /// The node's certificates were revoked: every terminal session on it is over.
    TerminalsCutOff {
        node_id: NodeId,
    },

    /// All that is known of when it was used: from when on, and until when. It may be billed for that while alone.
    UsageChanged {
        allocation_id: AllocationId,
        holder: Holder,
        from: Option<Timestamp>,
        until: Option<Timestamp>,
    },

    // The billing account speaks.
    /// The balance has fallen below the threshold.
    BalanceLow {
        account_id: BillingAccountId,
        holder: Holder,
    },
    /// The next window is not covered: unless money comes in, what runs is released then.
    BalanceDepleted {
        account_id: BillingAccountId,
        holder: Holder,
        release_at: Timestamp,
    },
    /// The grace is over.
    AllocationUncovered {
        account_id: BillingAccountId,
        allocation_id: AllocationId,
    },
    /// The account asks how it stands.
    AllocationMetered {
        account_id: BillingAccountId,
        allocation_id: AllocationId,
        is_running: bool,
    },

    /// What was paid is there.
    PaymentDeposited {
        payment_id: PaymentId,
        account_id: BillingAccountId,
        /// Its payment had not heard the answer. For everybody else it is no news.
        #[serde(default)]
        is_again: bool,
    },
    /// What was paid cannot be there: the account is in another currency.
    DepositRefused {
        payment_id: PaymentId,
        account_id: BillingAccountId,
        reason: String,
        #[serde(default)]
        is_again: bool,
    },
    /// So much is set aside for the payer; where it is refused, nothing.
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
    /// What the processor did not pay is there again.
    RefundGivenBack {
        payment_id: PaymentId,
        refund_id: RefundId,
        account_id: BillingAccountId,
        #[serde(default)]
        is_again: bool,
    },
    /// What was done at the processor is posted; `is_undone`: and that it is undone.
    ReversalPosted {
        payment_id: PaymentId,
        reversal_id: String,
        account_id: BillingAccountId,
        is_undone: bool,
        #[serde(default)]
        is_again: bool,
    },

    // The payment speaks.
    /// It was created, and nobody has said that the processor has it.
    PaymentOpeningDue {
        payment_id: PaymentId,
    },
    /// How it stands at the processor is to be looked at; `is_over`: nobody waits for it any more.
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
    /// It was taken from the account, and the processor is to pay it.
    RefundDue {
        payment_id: PaymentId,
        refund_id: RefundId,
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
    },
    /// The processor did not.
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
    /// Something was taken back at the processor that was not asked here.
    PaymentReversed {
        payment_id: PaymentId,
        holder: Holder,
        reversal_id: String,
        is_dispute: bool,
        amount_minor: i64,
    },
    /// And is there again.
    ReversalUndone {
        payment_id: PaymentId,
        holder: Holder,
        reversal_id: String,
        is_dispute: bool,
        amount_minor: i64,
    },

    /// The payment processor said something that nobody has heeded.
    ProcessorEventDue {
        processor_event_id: ProcessorEventId,
    },

    // The node speaks.
    NodeStateChanged {
        node_id: NodeId,
        from: Option<String>,
        to: String,
        reason: String,
    },
    DevicesReserved {
        node_id: NodeId,
        allocation_id: AllocationId,
        placed: Placed,
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
        /// What is left and where, or why the agent could not look; empty in events of earlier releases.
        #[serde(default)]
        detail: String,
    },

    /// A critical fault of the machine, noticed then.
    TenantFaulted {
        node_id: NodeId,
        allocation_id: AllocationId,
        at: Timestamp,
        reason: String,
    },

    /// The agent has written who may log in.
    LoginsWritten {
        node_id: NodeId,
        allocation_id: AllocationId,
        revision: u64,
    },
    /// The agent could not begin the session.
    TerminalFailed {
        session_id: TerminalSessionId,
        node_id: NodeId,
        reason: String,
    },

    // The terminal session speaks.
    TerminalOpened {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        node_id: NodeId,
        ends_at: Timestamp,
        /// From then on nobody waits for it.
        begin_until: Timestamp,
        /// Absent from the release before.
        #[serde(default)]
        recording: Terms,
    },
    TerminalClosed {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        node_id: NodeId,
        reason: String,
    },

    // The tenant speaks.
    AllocationCounted {
        allocation_id: AllocationId,
        /// Of the tenant's keys.
        #[serde(default)]
        logins_revision: u64,
    },
    /// Who may log in to the allocation is to be looked at again.
    LoginsStale {
        allocation_id: AllocationId,
        user_id: String,
    },

    // The catalog speaks.
    SkuStateChanged {
        sku_id: SkuId,
        from: Option<String>,
        to: String,
    },

    // An administrator has set a value or taken one back: what every process remembers of the policy is old.
    PolicyWritten {
        policy_id: PolicyId,
        value_id: PolicyValueId,
        policy: policy::Key,
        effective_at: Timestamp,
    },

    // An operator has rotated keys: what every process remembers of them is old.
    TrustChanged {
        set_id: KeySetId,
        purpose: Purpose,
        version: u64,
    },

    // An operator speaks to everybody.
    Announced {
        announcement_id: AnnouncementId,
    },
}

impl Event {
    /// The subject on which every process hears that keys were rotated.
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
            // Its subject ends in the key, so that whoever cares for one key hears of that one.
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

    /// Whom it is about: the CloudEvents `subject`.
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
                EntityRef { kind: Kind::Allocation, id: allocation_id.0 }
            }
            Self::BalanceLow { account_id, .. } | Self::BalanceDepleted { account_id, .. } => {
                EntityRef { kind: Kind::BillingAccount, id: account_id.0 }
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
            | Self::ReversalUndone { payment_id, .. } => EntityRef { kind: Kind::Payment, id: payment_id.0 },
            Self::ProcessorEventDue { processor_event_id } => {
                EntityRef { kind: Kind::ProcessorEvent, id: processor_event_id.0 }
            }
            Self::NodeStateChanged { node_id, .. }
            | Self::TenantFaulted { node_id, .. }
            | Self::DevicesReserved { node_id, .. }
            | Self::TenantReady { node_id, .. }
            | Self::TenantFailed { node_id, .. }
            | Self::TenantGone { node_id, .. }
            | Self::TenantRemains { node_id, .. }
            | Self::TerminalsCutOff { node_id }
            | Self::LoginsWritten { node_id, .. } => EntityRef { kind: Kind::Node, id: node_id.0 },
            Self::TerminalFailed { session_id, .. }
            | Self::TerminalOpened { session_id, .. }
            | Self::TerminalClosed { session_id, .. } => EntityRef { kind: Kind::TerminalSession, id: session_id.0 },
            Self::SkuStateChanged { sku_id, .. } => EntityRef { kind: Kind::Sku, id: sku_id.0 },
            Self::PolicyWritten { policy_id, .. } => EntityRef { kind: Kind::Policy, id: policy_id.0 },
            Self::TrustChanged { set_id, .. } => EntityRef { kind: Kind::KeySet, id: set_id.0 },
            Self::Announced { announcement_id } => EntityRef { kind: Kind::Announcement, id: announcement_id.0 },
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
