//! What follows from each event: the command of the choreography between the state machines, and the notifications. Those of the rental are
//! on its own page, in the order of its commits.

use super::choreography::{Consequences, Reaction, rental};
use crate::allocation;
use crate::billing_account;
use crate::event::Event;
use crate::node;
use crate::notification::{Audience, Notification, NotificationDetails};
use crate::payment::{self, ProcessorCall};
use crate::rollout;
use crate::rollout_outcome::RolloutOutcome;
use crate::terminal_session;

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
        use billing_account::Instruction as ToAccount;
        use node::Instruction as ToNode;
        use payment::Fact as ToPayment;
        let none = Consequences::NONE;
        let command = Consequences::command;
        let to_node = |node_id, instruction| command(Reaction::Node(node_id, instruction));
        let to_allocation = |allocation_id, fact| command(Reaction::Allocation(allocation_id, fact));
        let to_account = |holder, instruction| command(Reaction::Billing { holder, instruction });
        let to_rollout = |rollout_id, node_id, outcome| {
            command(Reaction::Rollout(rollout_id, rollout::Fact::NodeEnded { node_id, outcome }))
        };
        let to_payment = |payment_id, fact| command(Reaction::Payment(payment_id, fact));
        match self.clone() {
            // The rental's page has what follows from its events.
            event @ (Self::AllocationRequested { .. }
            | Self::ProvisioningStarted { .. }
            | Self::AllocationActive { .. }
            | Self::ProvisioningFailed { .. }
            | Self::ReservationUnwanted { .. }
            | Self::ReleaseRequested { .. }
            | Self::ReleaseFailed { .. }
            | Self::ReleaseExhausted { .. }
            | Self::ReleaseForced { .. }
            | Self::AllocationReleased { .. }
            | Self::TerminalsUnwanted { .. }
            | Self::UsageChanged { .. }
            | Self::DevicesReserved { .. }
            | Self::TenantReady { .. }
            | Self::TenantFailed { .. }
            | Self::TenantGone { .. }
            | Self::TenantRemains { .. }
            | Self::TenantFaulted { .. }
            | Self::EvacuationBegun { .. }
            | Self::EvacuationEnded { .. }
            | Self::EvacuationDue { .. }
            | Self::AllocationUncovered { .. }
            | Self::AllocationMetered { .. }
            | Self::AllocationCounted { .. }) => rental::consequences(&event),

            // Published by the allocation: the SSH keys that open it.
            Self::LoginsChanged { allocation_id, node_id, .. } => {
                command(Reaction::SendSshKeys { allocation_id, node_id })
            }
            Self::TerminalsCutOff { node_id } => command(Reaction::CloseNodeTerminals { node_id }),

            // Published by the billing account.
            Self::BalanceLow { account_id, holder } => {
                let data = Details { account_id: Some(account_id), ..Details::default() };
                none.notify(Audience::Holder(holder), data)
            }
            Self::BalanceDepleted { account_id, holder, release_at } => {
                let data = Details { account_id: Some(account_id), release_at: Some(release_at), ..Details::default() };
                none.notify(Audience::Holder(holder), data)
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
            Self::MachineDue { node_id } => command(Reaction::DriveMachine(node_id)),
            Self::LoginsWritten { node_id, allocation_id, revision } => {
                to_allocation(allocation_id, ToAllocation::LoginsWritten { node_id, revision })
            }
            Self::TerminalFailed { session_id, node_id, reason } => {
                let fail = terminal_session::Instruction::Fail { node_id, code: reason };
                command(Reaction::Terminal(session_id, fail))
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
