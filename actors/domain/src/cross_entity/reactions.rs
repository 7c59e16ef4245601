//! What follows from each event, on one page: the command of the choreography between the state machines, and the notifications.

use crate::account_holder::Holder;
use crate::allocation;
use crate::billing_account;
use crate::event::Event;
use crate::id::{
    AllocationId, BrowserSessionId, NodeId, PaymentId, ProcessorEventId, RolloutId, TerminalSessionId, UserId,
};
use crate::node;
use crate::notification::{Audience, Notification, NotificationDetails};
use crate::payment::{self, ProcessorCall};
use crate::rollout;
use crate::rollout_outcome::RolloutOutcome;
use crate::tenant;
use crate::terminal_session;

/// The command that follows from an event: a fact for another entity, or the call that finds it out.
#[derive(Clone, Debug, PartialEq)]
pub enum Reaction {
    /// No command follows: the event is for observers.
    Nothing,
    /// The provisioning worker counts the allocation against its tenant's quota and finds a node that reserves the devices.
    Place(AllocationId),
    Node(NodeId, node::Fact),
    Allocation(AllocationId, allocation::Fact),
    Terminal(TerminalSessionId, terminal_session::Fact),
    Billing {
        holder: Holder,
        fact: billing_account::Fact,
    },
    Payment(PaymentId, payment::Fact),
    /// The payments worker calls the payment processor, and sends the result to the payment.
    CallProcessor(ProcessorCall),
    /// The payments worker reads the payment processor's event, and sends it to the payment that it is about.
    ApplyProcessorEvent(ProcessorEventId),
    /// The provisioning worker reads the user's keys and resolves which of them open the allocation.
    ResolveSshKeys {
        allocation_id: AllocationId,
        user_id: UserId,
    },
    /// The provisioning worker reads which keys open the allocation and sends them to its node.
    SendSshKeys {
        allocation_id: AllocationId,
        node_id: NodeId,
    },
    /// The provisioning worker reads the state of the node's machine at the bare-metal provider, and has it do what is next.
    DriveMachine(NodeId),
    /// The provisioning worker closes the terminal sessions of the user's allocation.
    CloseTerminals {
        allocation_id: AllocationId,
        user_id: UserId,
    },
    /// The provisioning worker closes the terminal sessions that were opened by the user's browser session.
    CloseBrowserTerminals {
        browser_session_id: BrowserSessionId,
        user_id: UserId,
    },
    /// The provisioning worker closes the terminal sessions of the node.
    CloseNodeTerminals {
        node_id: NodeId,
    },
    Tenant {
        user_id: UserId,
        fact: tenant::Fact,
    },
    Rollout(RolloutId, rollout::Fact),
    /// The provisioning worker reads the next nodes of the rollout's selector and sends them to it.
    FindRolloutNodes(RolloutId),
}

/// What follows from an event.
#[derive(Clone, Debug, PartialEq)]
pub struct Consequences {
    pub reaction: Reaction,
    /// Empty where the row of the event says [`NotificationScope::None`](crate::event::NotificationScope::None).
    pub notifications: Vec<Notification>,
}

impl Consequences {
    /// The event is for observers.
    const NONE: Self = Self { reaction: Reaction::Nothing, notifications: Vec::new() };

    const fn command(reaction: Reaction) -> Self {
        Self { reaction, notifications: Vec::new() }
    }

    fn notify(mut self, audience: Audience, data: NotificationDetails) -> Self {
        self.notifications.push(Notification { audience, data });
        self
    }

    fn notify_renter(self, allocation_id: AllocationId, data: NotificationDetails) -> Self {
        let data = NotificationDetails { allocation_id: Some(allocation_id), ..data };
        self.notify(Audience::Renter(allocation_id), data)
    }

    /// A resent event is for the payment alone: the holder was notified the first time.
    fn notify_payment_holder(self, payment_id: PaymentId, is_resent: bool, data: NotificationDetails) -> Self {
        let data = NotificationDetails { payment_id: Some(payment_id), ..data };
        if is_resent { self } else { self.notify(Audience::PaymentHolder(payment_id), data) }
    }
}

impl Event {
    /// The command that follows from the event, and its recipient.
    #[must_use]
    pub fn reaction(&self) -> Reaction {
        self.consequences().reaction
    }

    #[must_use]
    pub fn notifications(&self) -> Vec<Notification> {
        self.consequences().notifications
    }

    /// What follows from the event: the arm to write when one is added.
    #[must_use]
    pub fn consequences(&self) -> Consequences {
        use NotificationDetails as Details;
        use allocation::Fact as ToAllocation;
        use billing_account::Fact as ToAccount;
        use node::Fact as ToNode;
        use payment::Fact as ToPayment;
        let none = Consequences::NONE;
        let command = Consequences::command;
        let to_node = |node_id, fact| command(Reaction::Node(node_id, fact));
        let to_allocation = |allocation_id, fact| command(Reaction::Allocation(allocation_id, fact));
        let to_account = |holder, fact| command(Reaction::Billing { holder, fact });
        let to_rollout = |rollout_id, node_id, outcome| {
            command(Reaction::Rollout(rollout_id, rollout::Fact::NodeEnded { node_id, outcome }))
        };
        let to_payment = |payment_id, fact| command(Reaction::Payment(payment_id, fact));
        match self.clone() {
            // Published by the allocation's saga.
            Self::AllocationRequested { allocation_id } => {
                command(Reaction::Place(allocation_id)).notify_renter(allocation_id, Details::in_state("requested"))
            }
            Self::ProvisioningStarted { allocation_id, node_id, deadline_at } => {
                to_node(node_id, ToNode::Provision { allocation_id, deadline_at })
                    .notify_renter(allocation_id, Details::in_state("provisioning"))
            }
            Self::AllocationActive { allocation_id, node_id } => {
                none.notify_renter(allocation_id, Details { node_id: Some(node_id), ..Details::in_state("active") })
            }
            Self::ProvisioningFailed { allocation_id, reason, .. } => {
                none.notify_renter(allocation_id, Details { reason: Some(reason), ..Details::default() })
            }
            Self::ReservationUnwanted { allocation_id, node_id } => {
                to_node(node_id, ToNode::Unreserve { allocation_id })
            }
            Self::ReleaseRequested { allocation_id, node_id, attempt, deadline_at } => {
                to_node(node_id, ToNode::Clean { allocation_id, attempt, deadline_at })
                    .notify_renter(allocation_id, Details::in_state("releasing"))
            }
            Self::ReleaseFailed { allocation_id, node_id, attempt, reason } => {
                let state = Details::in_state("release_failed");
                let data = Details { attempt: Some(attempt), reason: Some(reason), ..state };
                to_node(node_id, ToNode::MarkReleaseFailed { allocation_id, attempt })
                    .notify_renter(allocation_id, data)
            }
            Self::ReleaseExhausted { allocation_id, node_id, attempt } => {
                let data = Details {
                    allocation_id: Some(allocation_id),
                    node_id: Some(node_id),
                    attempt: Some(attempt),
                    ..Details::default()
                };
                to_node(node_id, ToNode::Fence { allocation_id, attempt }).notify(Audience::Operators, data)
            }
            Self::ReleaseForced { allocation_id, node_id } => to_node(node_id, ToNode::Abandon { allocation_id }),
            Self::AllocationReleased { allocation_id, user_id, reason, .. } => {
                let data = Details { reason: Some(reason), ..Details::in_state("released") };
                let fact = tenant::Fact::Forget { allocation_id };
                command(Reaction::Tenant { user_id, fact }).notify_renter(allocation_id, data)
            }
            Self::LoginsChanged { allocation_id, node_id, .. } => {
                command(Reaction::SendSshKeys { allocation_id, node_id })
            }
            Self::TerminalsUnwanted { allocation_id, user_id } => {
                command(Reaction::CloseTerminals { allocation_id, user_id })
            }
            Self::TerminalsCutOff { node_id } => command(Reaction::CloseNodeTerminals { node_id }),
            Self::UsageChanged { allocation_id, holder, from, until } => {
                to_account(holder, ToAccount::Usage { allocation_id, from, until })
            }

            // Published by the billing account.
            Self::BalanceLow { account_id, holder } => {
                let data = Details { account_id: Some(account_id), ..Details::default() };
                none.notify(Audience::Holder(holder), data)
            }
            Self::BalanceDepleted { account_id, holder, release_at } => {
                let data = Details { account_id: Some(account_id), release_at: Some(release_at), ..Details::default() };
                none.notify(Audience::Holder(holder), data)
            }
            Self::AllocationUncovered { allocation_id, .. } => to_allocation(allocation_id, ToAllocation::Uncover),
            Self::AllocationMetered { allocation_id, is_running, .. } => {
                to_allocation(allocation_id, ToAllocation::StillMetered { is_running })
            }
            Self::PaymentDeposited { payment_id, account_id, is_again } => {
                let data = Details { account_id: Some(account_id), ..Details::in_state("deposited") };
                to_payment(payment_id, ToPayment::Deposited).notify_payment_holder(payment_id, is_again, data)
            }
            Self::DepositRefused { payment_id, account_id, reason, is_again } => {
                let state = Details::in_state("refused");
                let data = Details { account_id: Some(account_id), reason: Some(reason.clone()), ..state };
                to_payment(payment_id, ToPayment::DepositRefused { why: reason })
                    .notify_payment_holder(payment_id, is_again, data)
            }
            Self::RefundTaken { payment_id, refund_id, amount_minor, .. } => {
                to_payment(payment_id, ToPayment::RefundTaken { refund_id, amount_minor })
            }
            Self::RefundRefused { payment_id, refund_id, account_id, reason, is_again } => {
                let state = Details::in_state("refused");
                let data = Details { account_id: Some(account_id), refund_id: Some(refund_id), ..state };
                to_payment(payment_id, ToPayment::RefundRefused { refund_id, why: reason })
                    .notify_payment_holder(payment_id, is_again, data)
            }
            Self::RefundGivenBack { payment_id, refund_id, account_id, is_again } => {
                let state = Details::in_state("returned");
                let data = Details { account_id: Some(account_id), refund_id: Some(refund_id), ..state };
                to_payment(payment_id, ToPayment::GivenBack { refund_id })
                    .notify_payment_holder(payment_id, is_again, data)
            }
            Self::ReversalPosted { payment_id, reversal_id, account_id, is_undone, is_again } => {
                let state = Details::in_state(if is_undone { "reversal_undone" } else { "reversed" });
                let data = Details { account_id: Some(account_id), ..state };
                to_payment(payment_id, ToPayment::ReversalPosted { reversal_id, is_undone })
                    .notify_payment_holder(payment_id, is_again, data)
            }

            // Published by the payment, and about events of the payment processor.
            Self::PaymentOpeningDue { payment_id } => {
                command(Reaction::CallProcessor(ProcessorCall::Open { payment_id }))
            }
            Self::PaymentCheckDue { payment_id, processor_id, is_over } => {
                command(Reaction::CallProcessor(ProcessorCall::Check { payment_id, processor_id, is_over }))
            }
            Self::PaymentPaid { payment_id, holder, currency, amount_minor } => {
                let deposit = ToAccount::Deposit { payment_id, holder: holder.clone(), currency, amount_minor };
                to_account(holder, deposit)
            }
            Self::RefundRequested { payment_id, refund_id, holder, amount_minor, is_exact } => {
                to_account(holder, ToAccount::TakeRefund { refund_id, payment_id, amount_minor, is_exact })
            }
            Self::RefundDue { payment_id, refund_id, processor_id, amount_minor, currency } => {
                let call = ProcessorCall::Refund { payment_id, refund_id, processor_id, amount_minor, currency };
                command(Reaction::CallProcessor(call))
            }
            Self::RefundFailed { payment_id, refund_id, holder, amount_minor } => {
                to_account(holder, ToAccount::GiveBackRefund { refund_id, payment_id, amount_minor })
            }
            Self::RefundSucceeded { payment_id, refund_id } => {
                let data = Details { refund_id: Some(refund_id), ..Details::in_state("succeeded") };
                none.notify_payment_holder(payment_id, false, data)
            }
            Self::PaymentReversed { payment_id, holder, reversal_id, is_dispute, amount_minor } => {
                to_account(holder, ToAccount::Reverse { reversal_id, payment_id, is_dispute, amount_minor })
            }
            Self::ReversalUndone { payment_id, holder, reversal_id, is_dispute, amount_minor } => {
                to_account(holder, ToAccount::UndoReversal { reversal_id, payment_id, is_dispute, amount_minor })
            }
            Self::ProcessorEventDue { processor_event_id } => {
                command(Reaction::ApplyProcessorEvent(processor_event_id))
            }

            // Published by the node.
            Self::NodeStateChanged { node_id, from, to, reason } => {
                let data = Details { node_id: Some(node_id), ..Details::in_state(&to) };
                // The reason is for operators: a tenant learns the consequence from the allocation.
                let all = Details { from_state: from, reason: Some(reason), ..data.clone() };
                none.notify(Audience::Operators, all).notify(Audience::NodeRenters(node_id), data)
            }
            Self::AgentUpdated { rollout_id: None, .. } => none,
            Self::AgentUpdated { node_id, rollout_id: Some(rollout_id), .. } => {
                to_rollout(rollout_id, node_id, RolloutOutcome::Updated)
            }
            Self::AgentUpdateFailed { node_id, digest: _, reason, rollout_id } => {
                let outcome = RolloutOutcome::of_failure(&reason);
                let follows = rollout_id.map_or(none, |rollout_id| to_rollout(rollout_id, node_id, outcome));
                let data = Details { node_id: Some(node_id), reason: Some(reason), ..Details::default() };
                follows.notify(Audience::Operators, data)
            }
            Self::RolloutNodeEnded { node_id, rollout_id, outcome } => to_rollout(rollout_id, node_id, outcome),
            Self::RolloutNodeSoaked { node_id, rollout_id, fault } => {
                command(Reaction::Rollout(rollout_id, rollout::Fact::NodeSoaked { node_id, fault }))
            }
            Self::DevicesReserved { node_id, allocation_id, placed } => {
                to_allocation(allocation_id, ToAllocation::Reserved { node_id, placed })
            }
            Self::TenantReady { node_id, allocation_id } => {
                to_allocation(allocation_id, ToAllocation::Provisioned { node_id })
            }
            Self::TenantFailed { node_id, allocation_id, reason } => {
                to_allocation(allocation_id, ToAllocation::ProvisionFailed { node_id, reason })
            }
            Self::TenantGone { node_id, allocation_id, attempt } => {
                to_allocation(allocation_id, ToAllocation::Cleaned { node_id, attempt })
            }
            Self::TenantRemains { node_id, allocation_id, attempt, reason, detail } => {
                to_allocation(allocation_id, ToAllocation::CleanupFailed { node_id, attempt, reason, detail })
            }
            Self::TenantFaulted { node_id, allocation_id, at, reason } => {
                let data = Details { node_id: Some(node_id), reason: Some(reason.clone()), ..Details::default() };
                to_allocation(allocation_id, ToAllocation::Faulted { node_id, at, reason })
                    .notify_renter(allocation_id, data)
            }
            Self::MachineDue { node_id } => command(Reaction::DriveMachine(node_id)),
            Self::EvacuationBegun { node_id, allocation_id, release_at, reason } => {
                let data = Details { node_id: Some(node_id), reason: Some(reason), ..Details::default() };
                none.notify_renter(allocation_id, Details { release_at: Some(release_at), ..data })
            }
            Self::EvacuationEnded { node_id, allocation_id } => {
                none.notify_renter(allocation_id, Details { node_id: Some(node_id), ..Details::default() })
            }
            Self::EvacuationDue { node_id, allocation_id, reason } => {
                to_allocation(allocation_id, ToAllocation::Evacuate { node_id, reason })
            }
            Self::LoginsWritten { node_id, allocation_id, revision } => {
                to_allocation(allocation_id, ToAllocation::LoginsWritten { node_id, revision })
            }
            Self::TerminalFailed { session_id, node_id, reason } => {
                let fact = terminal_session::Fact::Fail { node_id, code: reason };
                command(Reaction::Terminal(session_id, fact))
            }

            // Published by the terminal session.
            Self::TerminalOpened { session_id, allocation_id, node_id, ends_at, begin_until, recording } => {
                let data = Details {
                    session_id: Some(session_id),
                    allocation_id: Some(allocation_id),
                    ..Details::in_state("opened")
                };
                to_node(node_id, ToNode::OpenTerminal { session_id, allocation_id, ends_at, begin_until, recording })
                    .notify(Audience::SessionUser(session_id), data)
            }
            Self::BrowserSessionEnded { browser_session_id, user_id, reason } => {
                let data = Details {
                    browser_session_id: Some(browser_session_id),
                    reason: Some(reason),
                    ..Details::in_state("ended")
                };
                command(Reaction::CloseBrowserTerminals { browser_session_id, user_id: user_id.clone() })
                    .notify(Audience::User(user_id), data)
            }
            Self::TerminalClosed { session_id, allocation_id, node_id, reason } => {
                let data = Details {
                    session_id: Some(session_id),
                    allocation_id: Some(allocation_id),
                    reason: Some(reason),
                    ..Details::in_state("closed")
                };
                to_node(node_id, ToNode::ForgetTerminal { session_id, allocation_id })
                    .notify(Audience::SessionUser(session_id), data)
            }

            // Published by the tenant.
            Self::AllocationCounted { allocation_id, logins_revision } => {
                to_allocation(allocation_id, ToAllocation::StillCounted { logins_revision })
            }
            Self::LoginsStale { allocation_id, user_id } => {
                command(Reaction::ResolveSshKeys { allocation_id, user_id })
            }

            // Published by the rollout.
            Self::RolloutNodesDue { rollout_id } => command(Reaction::FindRolloutNodes(rollout_id)),
            Self::RolloutUpdateDue { rollout_id, node_id, digest, soaks, includes_held } => {
                to_node(node_id, ToNode::UpdateForRollout { rollout_id, digest, soaks, includes_held })
            }
            Self::RolloutCheckDue { rollout_id, node_id } => to_node(node_id, ToNode::CheckForRollout { rollout_id }),
            Self::RolloutStopped { rollout_id, node_id, reason } => {
                let state = Details::in_state("stopped");
                let data = Details { node_id: Some(node_id), reason: Some(reason), ..state };
                none.notify(Audience::Operators, Details { rollout_id: Some(rollout_id), ..data })
            }
            Self::RolloutCompleted { rollout_id } => {
                let data = Details { rollout_id: Some(rollout_id), ..Details::in_state("completed") };
                none.notify(Audience::Operators, data)
            }
            Self::RolloutStarted { .. }
            | Self::RolloutPaused { .. }
            | Self::RolloutResumed { .. }
            | Self::RolloutAborted { .. } => none,

            // Published by administrators and operators.
            Self::SkuStateChanged { .. }
            | Self::PolicyWritten { .. }
            | Self::HealthRulesWritten { .. }
            | Self::SkuHardwareExpected { .. }
            | Self::SkuMinimumsWritten { .. }
            | Self::TrustChanged { .. } => none,
            Self::Announced { announcement_id } => {
                let data = Details { announcement_id: Some(announcement_id), ..Details::default() };
                none.notify(Audience::AllClients(announcement_id), data)
            }
        }
    }
}
