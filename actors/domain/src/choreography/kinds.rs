//! The state machine of each kind of entity: the one place where a kind becomes a type.

use crate::allocation::Allocation;
use crate::announcement::Announcement;
use crate::billing_account::BillingAccount;
use crate::id::EntityKind;
use crate::key_set::KeySet;
use crate::machine::Machine;
use crate::node::Node;
use crate::notification_endpoint::NotificationEndpoint;
use crate::payment::Payment;
use crate::policy_values::ScopeValues;
use crate::processor_event::ProcessorEvent;
use crate::role_bindings::RoleBindings;
use crate::runtime::RestartRecord;
use crate::service_account::ServiceAccount;
use crate::sku::Sku;
use crate::tenant::Tenant;
use crate::terminal_session::TerminalSession;

/// A function over an entity whose kind is known only at run time. See [`EntityKind::visit`].
pub trait Visitor {
    type Output;
    fn visit<M: Machine>(self) -> Self::Output;
}

impl EntityKind {
    /// Calls `visitor` with the kind's state machine.
    pub fn visit<V: Visitor>(self, visitor: V) -> V::Output {
        match self {
            Self::Node => visitor.visit::<Node>(),
            Self::Allocation => visitor.visit::<Allocation>(),
            Self::Sku => visitor.visit::<Sku>(),
            Self::Tenant => visitor.visit::<Tenant>(),
            Self::Bindings => visitor.visit::<RoleBindings>(),
            Self::ServiceAccount => visitor.visit::<ServiceAccount>(),
            Self::Policy => visitor.visit::<ScopeValues>(),
            Self::TerminalSession => visitor.visit::<TerminalSession>(),
            Self::KeySet => visitor.visit::<KeySet>(),
            Self::BillingAccount => visitor.visit::<BillingAccount>(),
            Self::Announcement => visitor.visit::<Announcement>(),
            Self::Payment => visitor.visit::<Payment>(),
            Self::ProcessorEvent => visitor.visit::<ProcessorEvent>(),
            Self::NotificationEndpoint => visitor.visit::<NotificationEndpoint>(),
            Self::Runtime => visitor.visit::<RestartRecord>(),
        }
    }
}
