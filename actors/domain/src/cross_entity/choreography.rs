//! Flows over several entities. No state machine calls another one: each publishes events, and a command for another entity follows from an
//! event. [`Event::consequences`] has what follows from every event; a flow whose order matters has a page of its own below this module.

pub mod rental;

use super::notification::{Audience, Notification, NotificationDetails};
use crate::account_holder::Holder;
use crate::allocation;
use crate::billing_account;
use crate::event::Event;
use crate::id::{
    AllocationId, BrowserSessionId, NodeId, PaymentId, ProcessorEventId, RolloutId, TerminalSessionId, UserId,
};
use crate::node;
use crate::payment::{self, ProcessorCall};
use crate::rollout;
use crate::tenant;
use crate::terminal_session;

/// The command that follows from an event: an instruction or a fact for another entity, or the call that finds it out.
#[derive(Clone, Debug, PartialEq)]
pub enum Reaction {
    /// No command follows: the event is for observers.
    Nothing,
    /// The provisioning worker counts the allocation against its tenant's quota and finds a node that reserves the devices.
    Place(AllocationId),
    Node(NodeId, node::Instruction),
    Allocation(AllocationId, allocation::Fact),
    Terminal(TerminalSessionId, terminal_session::Instruction),
    Billing {
        holder: Holder,
        instruction: billing_account::Instruction,
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
        instruction: tenant::Instruction,
    },
    Rollout(RolloutId, rollout::Fact),
    /// The provisioning worker reads the next nodes of the rollout's selector and sends them to it.
    FindRolloutNodes(RolloutId),
}

/// What follows from an event: a command, and notifications.
#[derive(Clone, Debug, PartialEq)]
pub struct Consequences {
    pub reaction: Reaction,
    /// Empty where the row of the event says [`NotificationScope::None`](crate::event::NotificationScope::None).
    pub notifications: Vec<Notification>,
}

impl Consequences {
    /// The event is for observers.
    pub(super) const NONE: Self = Self { reaction: Reaction::Nothing, notifications: Vec::new() };

    pub(super) const fn command(reaction: Reaction) -> Self {
        Self { reaction, notifications: Vec::new() }
    }

    pub(super) fn notify(mut self, audience: Audience, data: NotificationDetails) -> Self {
        self.notifications.push(Notification { audience, data });
        self
    }

    pub(super) fn notify_renter(self, allocation_id: AllocationId, data: NotificationDetails) -> Self {
        let data = NotificationDetails { allocation_id: Some(allocation_id), ..data };
        self.notify(Audience::Renter(allocation_id), data)
    }

    /// A resent event is for the payment alone: the holder was notified the first time.
    pub(super) fn notify_payment_holder(
        self,
        payment_id: PaymentId,
        is_resent: bool,
        data: NotificationDetails,
    ) -> Self {
        let data = NotificationDetails { payment_id: Some(payment_id), ..data };
        if is_resent { self } else { self.notify(Audience::PaymentHolder(payment_id), data) }
    }
}

/// An event, and what follows from it.
#[derive(Clone, Copy, Debug)]
pub struct EventConsequences {
    /// The event's subject.
    pub subject: &'static str,
    /// `None` for an event of another subject.
    consequences: fn(Event) -> Option<Consequences>,
}

impl EventConsequences {
    /// What follows from the event, where it is the row's.
    #[must_use]
    pub fn of(&self, event: &Event) -> Option<Consequences> {
        (event.subject() == self.subject).then(|| event.clone()).and_then(self.consequences)
    }
}

/// A row: `"subject", Variant { fields } => consequences`.
macro_rules! on {
    ($subject:literal, $variant:ident { $($fields:tt)* } => $consequences:expr) => {
        EventConsequences {
            subject: $subject,
            consequences: |event| {
                let Event::$variant { $($fields)* } = event else { return None };
                Some($consequences)
            },
        }
    };
}
use on;
