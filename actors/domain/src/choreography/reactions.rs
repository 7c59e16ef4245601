//! The reaction to each event: the choreography between the state machines, on one page.

use crate::allocation;
use crate::billing_account;
use crate::event::Event;
use crate::holder::Holder;
use crate::id::{AllocationId, NodeId, PaymentId, ProcessorEventId, TerminalSessionId};
use crate::node;
use crate::payment::{self, ProcessorCall};
use crate::terminal_session;

/// The command that follows from an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Reaction {
    /// No command follows: the event is for observers.
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
    /// The payments worker calls the payment processor, and sends the result to the payment.
    CallProcessor(ProcessorCall),
    /// The payments worker reads the payment processor's event, and sends it to the payment that it is about.
    ApplyProcessorEvent(ProcessorEventId),
    /// The provisioning worker reads the user's keys and resolves which of them open the allocation.
    ResolveSshKeys {
        allocation_id: AllocationId,
        user_id: String,
    },
    /// The provisioning worker reads which keys open the allocation and sends them to its node.
    SendSshKeys {
        allocation_id: AllocationId,
        node_id: NodeId,
    },
    /// The provisioning worker closes the terminal sessions of the user's allocation.
    CloseTerminals {
        allocation_id: AllocationId,
        user_id: String,
    },
    /// The provisioning worker closes the terminal sessions of the node.
    CloseNodeTerminals {
        node_id: NodeId,
    },
    Tenant {
        user_id: String,
        command: crate::tenant::Command,
    },
}

impl Event {
    /// The command that follows from the event, and its recipient.
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
            Self::TenantRemains { node_id, allocation_id, attempt, reason, detail } => {
                Reaction::Allocation(allocation_id, ToAllocation::CleanupFailed { node_id, attempt, reason, detail })
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
            Self::LoginsStale { allocation_id, user_id } => Reaction::ResolveSshKeys { allocation_id, user_id },
            Self::LoginsChanged { allocation_id, node_id, .. } => Reaction::SendSshKeys { allocation_id, node_id },
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
            Self::TerminalsCutOff { node_id } => Reaction::CloseNodeTerminals { node_id },
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
            Self::PaymentOpeningDue { payment_id } => Reaction::CallProcessor(ProcessorCall::Open { payment_id }),
            Self::PaymentCheckDue { payment_id, processor_id, is_over } => {
                Reaction::CallProcessor(ProcessorCall::Check { payment_id, processor_id, is_over })
            }
            Self::RefundDue { payment_id, refund_id, processor_id, amount_minor, currency } => {
                let call = ProcessorCall::Refund { payment_id, refund_id, processor_id, amount_minor, currency };
                Reaction::CallProcessor(call)
            }
            Self::ProcessorEventDue { processor_event_id } => Reaction::ApplyProcessorEvent(processor_event_id),
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
