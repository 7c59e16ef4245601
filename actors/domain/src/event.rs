//! What happened, for the rest of the system to hear. One variant and one row of [`Event::row`] each.
//!
//! An event's `data` holds identifiers, the old and new state and a reason code, and nothing that a stranger on the bus must
//! not read (specification, *Events*). The consequence of an event is a function, [`Event::reaction`]: the worker that hears it
//! asks the command that it names, under the event's id, so that hearing it twice does nothing twice.

use crate::allocation::{self, Placed};
use crate::billing_account::{self, Holder};
use crate::id::{
    AllocationId, AnnouncementId, BillingAccountId, EntityRef, KeySetId, Kind, NodeId, PaymentId, PolicyId,
    PolicyValueId, ProcessorEventId, RefundId, SkuId, TerminalSessionId,
};
use crate::key_set::Purpose;
use crate::machine::Timestamp;
use crate::money::Currency;
use crate::node;
use crate::payment::{self, Errand};
use crate::policy;
use crate::recording::Terms;
use crate::terminal_session;
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
    /// What was paid cannot be: the account is in another currency.
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

/// A JetStream stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    Provisioning,
    Nodes,
    Policy,
    Terminals,
    Billing,
    Notifications,
}

impl Stream {
    pub const ALL: [Self; 6] =
        [Self::Provisioning, Self::Nodes, Self::Policy, Self::Terminals, Self::Billing, Self::Notifications];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Provisioning => "PROVISIONING",
            Self::Nodes => "NODES",
            Self::Policy => "POLICY",
            Self::Terminals => "TERMINALS",
            Self::Billing => "BILLING",
            Self::Notifications => "NOTIFICATIONS",
        }
    }

    /// The subjects that the stream keeps.
    #[must_use]
    pub const fn subjects(self) -> &'static [&'static str] {
        match self {
            Self::Provisioning => &["provisioning.>"],
            Self::Nodes => &["node.>", "sku.>"],
            Self::Policy => &["policy.>"],
            Self::Terminals => &["terminal.>"],
            Self::Billing => &["billing.>"],
            Self::Notifications => &["notification.>"],
        }
    }
}

/// What follows from an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Reaction {
    /// Nobody has to act: the event is for those who watch.
    Nothing,
    /// The provisioning worker counts the allocation against its tenant's quota and finds a node that reserves the devices.
    Place(AllocationId),
    Node(NodeId, node::Command),
    Allocation(AllocationId, allocation::Command),
    Terminal(TerminalSessionId, terminal_session::Command),
    Billing {
        holder: Holder,
        command: billing_account::Command,
    },
    Payment(PaymentId, payment::Command),
    /// The payments worker asks the payment processor, and tells the payment what it said.
    AskProcessor(Errand),
    /// The payments worker reads what the payment processor said, and tells the payment that it concerns.
    HeedProcessor(ProcessorEventId),
    /// The provisioning worker reads the user's keys and says which of them open the allocation.
    ResolveLogins {
        allocation_id: AllocationId,
        user_id: String,
    },
    /// The provisioning worker reads which keys open the allocation and tells its node.
    TellLogins {
        allocation_id: AllocationId,
        node_id: NodeId,
    },
    /// The provisioning worker closes the terminal sessions of the user's allocation.
    CloseTerminals {
        allocation_id: AllocationId,
        user_id: String,
    },
    /// The provisioning worker closes the terminal sessions of the node.
    CutTerminals {
        node_id: NodeId,
    },
    Tenant {
        user_id: String,
        command: crate::tenant::Command,
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

    /// What follows: the whole choreography between the machines, on one page.
    #[must_use]
    pub fn reaction(&self) -> Reaction {
        use allocation::Command as ToAllocation;
        use billing_account::Command as ToAccount;
        use node::Command as ToNode;
        use payment::Command as ToPayment;
        match self.clone() {
            Self::AllocationRequested { allocation_id } => Reaction::Place(allocation_id),
            Self::DevicesReserved { node_id, allocation_id, placed } => {
                Reaction::Allocation(allocation_id, ToAllocation::Reserved { node_id, placed })
            }
            Self::ProvisioningStarted { allocation_id, node_id, deadline_at } => {
                Reaction::Node(node_id, ToNode::Provision { allocation_id, deadline_at })
            }
            Self::TenantReady { node_id, allocation_id } => {
                Reaction::Allocation(allocation_id, ToAllocation::Provisioned { node_id })
            }
            Self::TenantFailed { node_id, allocation_id, reason } => {
                Reaction::Allocation(allocation_id, ToAllocation::ProvisionFailed { node_id, reason })
            }
            Self::ReservationUnwanted { allocation_id, node_id } => {
                Reaction::Node(node_id, ToNode::Unreserve { allocation_id })
            }
            Self::ReleaseRequested { allocation_id, node_id, attempt, deadline_at } => {
                Reaction::Node(node_id, ToNode::Clean { allocation_id, attempt, deadline_at })
            }
            Self::TenantGone { node_id, allocation_id, attempt } => {
                Reaction::Allocation(allocation_id, ToAllocation::Cleaned { node_id, attempt })
            }
            Self::TenantRemains { node_id, allocation_id, attempt, reason } => {
                Reaction::Allocation(allocation_id, ToAllocation::CleanupFailed { node_id, attempt, reason })
            }
            Self::ReleaseFailed { allocation_id, node_id, attempt, .. } => {
                Reaction::Node(node_id, ToNode::MarkReleaseFailed { allocation_id, attempt })
            }
            Self::ReleaseExhausted { allocation_id, node_id, attempt } => {
                Reaction::Node(node_id, ToNode::Fence { allocation_id, attempt })
            }
            Self::ReleaseForced { allocation_id, node_id } => {
                Reaction::Node(node_id, ToNode::Abandon { allocation_id })
            }
            Self::AllocationReleased { allocation_id, user_id, .. } => {
                Reaction::Tenant { user_id, command: crate::tenant::Command::Forget { allocation_id } }
            }
            Self::AllocationCounted { allocation_id, logins_revision } => {
                Reaction::Allocation(allocation_id, ToAllocation::StillCounted { logins_revision })
            }
            Self::LoginsStale { allocation_id, user_id } => Reaction::ResolveLogins { allocation_id, user_id },
            Self::LoginsChanged { allocation_id, node_id, .. } => Reaction::TellLogins { allocation_id, node_id },
            Self::LoginsWritten { node_id, allocation_id, revision } => {
                Reaction::Allocation(allocation_id, ToAllocation::LoginsWritten { node_id, revision })
            }
            Self::TerminalOpened { session_id, allocation_id, node_id, ends_at, begin_until, recording } => {
                let open = ToNode::OpenTerminal { session_id, allocation_id, ends_at, begin_until, recording };
                Reaction::Node(node_id, open)
            }
            Self::TerminalFailed { session_id, node_id, reason } => {
                Reaction::Terminal(session_id, terminal_session::Command::Fail { node_id, code: reason })
            }
            Self::TerminalClosed { session_id, allocation_id, node_id, .. } => {
                Reaction::Node(node_id, ToNode::ForgetTerminal { session_id, allocation_id })
            }
            Self::TerminalsUnwanted { allocation_id, user_id } => Reaction::CloseTerminals { allocation_id, user_id },
            Self::TerminalsCutOff { node_id } => Reaction::CutTerminals { node_id },
            Self::UsageChanged { allocation_id, holder, from, until } => {
                Reaction::Billing { holder, command: billing_account::Command::Usage { allocation_id, from, until } }
            }
            Self::AllocationUncovered { allocation_id, .. } => {
                Reaction::Allocation(allocation_id, ToAllocation::Uncover)
            }
            Self::AllocationMetered { allocation_id, is_running, .. } => {
                Reaction::Allocation(allocation_id, ToAllocation::StillMetered { is_running })
            }
            Self::TenantFaulted { node_id, allocation_id, at, reason } => {
                Reaction::Allocation(allocation_id, ToAllocation::Faulted { node_id, at, reason })
            }
            Self::PaymentDeposited { payment_id, .. } => Reaction::Payment(payment_id, ToPayment::Deposited),
            Self::DepositRefused { payment_id, reason, .. } => {
                Reaction::Payment(payment_id, ToPayment::DepositRefused { why: reason })
            }
            Self::RefundTaken { payment_id, refund_id, amount_minor, .. } => {
                Reaction::Payment(payment_id, ToPayment::RefundTaken { refund_id, amount_minor })
            }
            Self::RefundRefused { payment_id, refund_id, reason, .. } => {
                Reaction::Payment(payment_id, ToPayment::RefundRefused { refund_id, why: reason })
            }
            Self::RefundGivenBack { payment_id, refund_id, .. } => {
                Reaction::Payment(payment_id, ToPayment::GivenBack { refund_id })
            }
            Self::ReversalPosted { payment_id, reversal_id, is_undone, .. } => {
                Reaction::Payment(payment_id, ToPayment::ReversalPosted { reversal_id, is_undone })
            }
            Self::PaymentOpeningDue { payment_id } => Reaction::AskProcessor(Errand::Open { payment_id }),
            Self::PaymentCheckDue { payment_id, processor_id, is_over } => {
                Reaction::AskProcessor(Errand::Check { payment_id, processor_id, is_over })
            }
            Self::RefundDue { payment_id, refund_id, processor_id, amount_minor, currency } => {
                let errand = Errand::Refund { payment_id, refund_id, processor_id, amount_minor, currency };
                Reaction::AskProcessor(errand)
            }
            Self::ProcessorEventDue { processor_event_id } => Reaction::HeedProcessor(processor_event_id),
            Self::PaymentPaid { payment_id, holder, currency, amount_minor } => {
                let command = ToAccount::Deposit { payment_id, holder: holder.clone(), currency, amount_minor };
                Reaction::Billing { holder, command }
            }
            Self::RefundRequested { payment_id, refund_id, holder, amount_minor, is_exact } => {
                let command = ToAccount::TakeRefund { refund_id, payment_id, amount_minor, is_exact };
                Reaction::Billing { holder, command }
            }
            Self::RefundFailed { payment_id, refund_id, holder, amount_minor } => {
                let command = ToAccount::GiveBackRefund { refund_id, payment_id, amount_minor };
                Reaction::Billing { holder, command }
            }
            Self::PaymentReversed { payment_id, holder, reversal_id, is_dispute, amount_minor } => {
                let command = ToAccount::Reverse { reversal_id, payment_id, is_dispute, amount_minor };
                Reaction::Billing { holder, command }
            }
            Self::ReversalUndone { payment_id, holder, reversal_id, is_dispute, amount_minor } => {
                let command = ToAccount::UndoReversal { reversal_id, payment_id, is_dispute, amount_minor };
                Reaction::Billing { holder, command }
            }
            Self::BalanceLow { .. }
            | Self::BalanceDepleted { .. }
            | Self::AllocationActive { .. }
            | Self::ProvisioningFailed { .. }
            | Self::NodeStateChanged { .. }
            | Self::SkuStateChanged { .. }
            | Self::PolicyWritten { .. }
            | Self::TrustChanged { .. }
            | Self::RefundSucceeded { .. }
            | Self::Announced { .. } => Reaction::Nothing,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::machine::Command as _;
    use crate::recording::Mode;
    use std::collections::BTreeSet;
    use std::fmt::Write as _;
    use uuid::Uuid;

    /// One of each variant, the options filled.
    pub(crate) fn every_event() -> Vec<Event> {
        let allocation_id = AllocationId(Uuid::from_u128(1));
        let node_id = NodeId(Uuid::from_u128(2));
        let deadline_at = Timestamp::UNIX_EPOCH;
        let text = || "x".to_owned();
        let session_id = TerminalSessionId(Uuid::from_u128(6));
        let account_id = BillingAccountId(Uuid::from_u128(7));
        let holder = || Holder::Org(text());
        let (payment_id, refund_id) = (PaymentId(Uuid::from_u128(8)), RefundId(Uuid::from_u128(9)));
        let euro = || Currency::parse("EUR").unwrap();
        let placed = Placed {
            devices: vec![Device { index: 0, uuid: text() }],
            host: text(),
            port: 22,
            user_name: text(),
            region_code: text(),
            host_fingerprint: None,
        };
        vec![
            Event::AllocationRequested { allocation_id },
            Event::ProvisioningStarted { allocation_id, node_id, deadline_at },
            Event::AllocationActive { allocation_id, node_id },
            Event::ProvisioningFailed { allocation_id, node_id: Some(node_id), reason: text() },
            Event::ReservationUnwanted { allocation_id, node_id },
            Event::ReleaseRequested { allocation_id, node_id, attempt: 1, deadline_at },
            Event::ReleaseFailed { allocation_id, node_id, attempt: 1, reason: text() },
            Event::ReleaseExhausted { allocation_id, node_id, attempt: 1 },
            Event::ReleaseForced { allocation_id, node_id },
            Event::AllocationReleased { allocation_id, user_id: text(), node_id: Some(node_id), reason: text() },
            Event::NodeStateChanged { node_id, from: Some(text()), to: text(), reason: text() },
            Event::DevicesReserved { node_id, allocation_id, placed },
            Event::TenantReady { node_id, allocation_id },
            Event::TenantFailed { node_id, allocation_id, reason: text() },
            Event::TenantGone { node_id, allocation_id, attempt: 1 },
            Event::TenantRemains { node_id, allocation_id, attempt: 1, reason: text() },
            Event::SkuStateChanged { sku_id: SkuId(Uuid::from_u128(3)), from: Some(text()), to: text() },
            Event::AllocationCounted { allocation_id, logins_revision: 1 },
            Event::PolicyWritten {
                policy_id: PolicyId(Uuid::from_u128(4)),
                value_id: PolicyValueId(Uuid::from_u128(5)),
                policy: policy::Key::RateLimitApi,
                effective_at: deadline_at,
            },
            Event::TrustChanged { set_id: KeySetId(Uuid::from_u128(6)), purpose: Purpose::NodeCa, version: 1 },
            Event::TerminalsUnwanted { allocation_id, user_id: text() },
            Event::TerminalFailed { session_id, node_id, reason: text() },
            Event::TerminalOpened {
                session_id,
                allocation_id,
                node_id,
                ends_at: deadline_at,
                begin_until: deadline_at,
                recording: Terms { mode: Mode::Strict, most_bytes: 1 },
            },
            Event::TerminalClosed { session_id, allocation_id, node_id, reason: text() },
            Event::UsageChanged { allocation_id, holder: holder(), from: Some(deadline_at), until: Some(deadline_at) },
            Event::BalanceLow { account_id, holder: holder() },
            Event::BalanceDepleted { account_id, holder: holder(), release_at: deadline_at },
            Event::AllocationUncovered { account_id, allocation_id },
            Event::AllocationMetered { account_id, allocation_id, is_running: true },
            Event::TenantFaulted { node_id, allocation_id, at: deadline_at, reason: text() },
            Event::LoginsStale { allocation_id, user_id: text() },
            Event::LoginsChanged { allocation_id, node_id, revision: 1 },
            Event::LoginsWritten { node_id, allocation_id, revision: 1 },
            Event::PaymentDeposited { payment_id, account_id, is_again: false },
            Event::RefundTaken { payment_id, refund_id, account_id, amount_minor: 1 },
            Event::RefundRefused { payment_id, refund_id, account_id, reason: text(), is_again: false },
            Event::RefundGivenBack { payment_id, refund_id, account_id, is_again: false },
            Event::ReversalPosted { payment_id, reversal_id: text(), account_id, is_undone: true, is_again: false },
            Event::PaymentOpeningDue { payment_id },
            Event::PaymentCheckDue { payment_id, processor_id: text(), is_over: true },
            Event::PaymentPaid { payment_id, holder: holder(), currency: euro(), amount_minor: 1 },
            Event::RefundRequested { payment_id, refund_id, holder: holder(), amount_minor: 1, is_exact: true },
            Event::RefundDue { payment_id, refund_id, processor_id: text(), amount_minor: 1, currency: euro() },
            Event::RefundFailed { payment_id, refund_id, holder: holder(), amount_minor: 1 },
            Event::PaymentReversed {
                payment_id,
                holder: holder(),
                reversal_id: text(),
                is_dispute: true,
                amount_minor: 1,
            },
            Event::ReversalUndone {
                payment_id,
                holder: holder(),
                reversal_id: text(),
                is_dispute: false,
                amount_minor: 1,
            },
            Event::Announced { announcement_id: AnnouncementId(Uuid::from_u128(8)) },
            Event::ProcessorEventDue { processor_event_id: ProcessorEventId(Uuid::from_u128(10)) },
            Event::RefundSucceeded { payment_id, refund_id },
            Event::TerminalsCutOff { node_id },
            Event::DepositRefused { payment_id, account_id, reason: text(), is_again: false },
        ]
    }

    /// The place of each variant in [`every_event`]: what is added here must be added there.
    const fn place(event: &Event) -> usize {
        match event {
            Event::AllocationRequested { .. } => 0,
            Event::ProvisioningStarted { .. } => 1,
            Event::AllocationActive { .. } => 2,
            Event::ProvisioningFailed { .. } => 3,
            Event::ReservationUnwanted { .. } => 4,
            Event::ReleaseRequested { .. } => 5,
            Event::ReleaseFailed { .. } => 6,
            Event::ReleaseExhausted { .. } => 7,
            Event::ReleaseForced { .. } => 8,
            Event::AllocationReleased { .. } => 9,
            Event::NodeStateChanged { .. } => 10,
            Event::DevicesReserved { .. } => 11,
            Event::TenantReady { .. } => 12,
            Event::TenantFailed { .. } => 13,
            Event::TenantGone { .. } => 14,
            Event::TenantRemains { .. } => 15,
            Event::SkuStateChanged { .. } => 16,
            Event::AllocationCounted { .. } => 17,
            Event::PolicyWritten { .. } => 18,
            Event::TrustChanged { .. } => 19,
            Event::TerminalsUnwanted { .. } => 20,
            Event::TerminalFailed { .. } => 21,
            Event::TerminalOpened { .. } => 22,
            Event::TerminalClosed { .. } => 23,
            Event::UsageChanged { .. } => 24,
            Event::BalanceLow { .. } => 25,
            Event::BalanceDepleted { .. } => 26,
            Event::AllocationUncovered { .. } => 27,
            Event::AllocationMetered { .. } => 28,
            Event::TenantFaulted { .. } => 29,
            Event::LoginsStale { .. } => 30,
            Event::LoginsChanged { .. } => 31,
            Event::LoginsWritten { .. } => 32,
            Event::PaymentDeposited { .. } => 33,
            Event::RefundTaken { .. } => 34,
            Event::RefundRefused { .. } => 35,
            Event::RefundGivenBack { .. } => 36,
            Event::ReversalPosted { .. } => 37,
            Event::PaymentOpeningDue { .. } => 38,
            Event::PaymentCheckDue { .. } => 39,
            Event::PaymentPaid { .. } => 40,
            Event::RefundRequested { .. } => 41,
            Event::RefundDue { .. } => 42,
            Event::RefundFailed { .. } => 43,
            Event::PaymentReversed { .. } => 44,
            Event::ReversalUndone { .. } => 45,
            Event::Announced { .. } => 46,
            Event::ProcessorEventDue { .. } => 47,
            Event::RefundSucceeded { .. } => 48,
            Event::TerminalsCutOff { .. } => 49,
            Event::DepositRefused { .. } => 50,
        }
    }

    fn keys_of(value: &serde_json::Value, keys: &mut BTreeSet<String>) {
        match value {
            serde_json::Value::Object(fields) => {
                for (key, value) in fields {
                    keys.insert(key.clone());
                    keys_of(value, keys);
                }
            }
            serde_json::Value::Array(items) => items.iter().for_each(|item| keys_of(item, keys)),
            serde_json::Value::Null
            | serde_json::Value::Bool(_)
            | serde_json::Value::Number(_)
            | serde_json::Value::String(_) => {}
        }
    }

    #[test]
    fn the_event_table_is_as_reviewed() {
        let mut table = String::new();
        for event in every_event() {
            let json = serde_json::to_value(&event).unwrap();
            let follows = match event.reaction() {
                Reaction::Nothing => "nothing".to_owned(),
                Reaction::Place(_) => "place".to_owned(),
                Reaction::Node(_, command) => format!("node {}", command.name()),
                Reaction::Allocation(_, command) => format!("allocation {}", command.name()),
                Reaction::Tenant { command, .. } => format!("tenant {}", command.name()),
                Reaction::Terminal(_, command) => format!("terminal session {}", command.name()),
                Reaction::Billing { command, .. } => format!("billing account {}", command.name()),
                Reaction::Payment(_, command) => format!("payment {}", command.name()),
                Reaction::AskProcessor(errand) => format!("processor {}", errand.name()),
                Reaction::HeedProcessor(_) => "heed the processor".to_owned(),
                Reaction::ResolveLogins { .. } => "resolve logins".to_owned(),
                Reaction::TellLogins { .. } => "tell logins".to_owned(),
                Reaction::CloseTerminals { .. } => "close terminals".to_owned(),
                Reaction::CutTerminals { .. } => "cut terminals".to_owned(),
            };
            let fact = json["fact"].as_str().unwrap();
            let (subject, stream) = event.row();
            writeln!(table, "{fact}: {subject} in {}, about {} -> {follows}", stream.name(), event.about().kind)
                .unwrap();
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn every_variant_is_in_the_table_and_has_its_own_subject() {
        let events = every_event();
        let places: Vec<_> = events.iter().map(place).collect();
        assert_eq!(places, (0..events.len()).collect::<Vec<_>>());
        let subjects: BTreeSet<_> = events.iter().map(Event::subject).collect();
        assert_eq!(subjects.len(), events.len());
    }

    #[test]
    fn every_subject_is_kept_by_its_own_stream_alone() {
        let keeps = |stream: &Stream, subject: &str| {
            stream.subjects().iter().any(|pattern| subject.starts_with(pattern.trim_end_matches('>')))
        };
        for event in every_event() {
            let kept: Vec<_> = Stream::ALL.into_iter().filter(|stream| keeps(stream, event.subject())).collect();
            assert_eq!(kept, [event.row().1], "{}", event.subject());
        }
    }

    #[test]
    fn no_event_has_a_field_that_could_hold_a_secret() {
        for event in every_event() {
            let mut keys = BTreeSet::new();
            keys_of(&serde_json::to_value(&event).unwrap(), &mut keys);
            for key in keys {
                let lower = key.to_lowercase();
                let suspect = ["secret", "token", "key", "password"].into_iter().find(|word| lower.contains(word));
                assert_eq!(suspect, None, "{} says {key}", event.subject());
            }
        }
    }

    #[test]
    fn an_event_decodes_to_itself() {
        for event in every_event() {
            let kept = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Event>(&kept).unwrap(), event);
        }
    }
}
