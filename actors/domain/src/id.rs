//! Typed identifiers. `{id}` is a UUIDv7 in text form (decisions, *preamble*), so that ids sort by the time they were made.

use crate::machine::Machine;
use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

macro_rules! typed_id {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }

        impl From<Uuid> for $name {
            fn from(id: Uuid) -> Self {
                Self(id)
            }
        }

        impl std::str::FromStr for $name {
            type Err = uuid::Error;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::parse_str(text).map(Self)
            }
        }
    )+};
}

typed_id! {
    /// A GPU machine in the inventory. A removed node returns only under a new id.
    NodeId,
    /// GPUs of one node that one user rents.
    AllocationId,
    /// An entry of the SKU catalog.
    SkuId,
    /// A registered public key.
    SshKeyId,
    /// A program that acts for a user.
    ServiceAccountId,
    /// One of a service account's keys; the key itself is never stored.
    ServiceAccountKeyId,
    /// A unit of work for a node's agent.
    TaskId,
    /// An enrollment token's public handle; the token itself is never stored.
    TokenId,
    /// A domain event, and the command that is its reaction.
    EventId,
    /// The identity of a command: a repeated command has the same id.
    CommandId,
    /// A replica of the control plane, as the others see it.
    MemberId,
    /// A platform role bound to a subject.
    BindingId,
    /// The policy values of one scope.
    PolicyId,
    /// One version of a policy value.
    PolicyValueId,
    /// One shell on an allocation's machine.
    TerminalSessionId,
    /// The keys of one purpose.
    KeySetId,
    /// The billing account of a user or an organization.
    BillingAccountId,
    /// An operator's announcement to all connected clients.
    AnnouncementId,
    /// A payment through the payment processor.
    PaymentId,
    /// A refund of a payment or of an allocation's cost.
    RefundId,
    /// An event of the payment processor, by one id of its own.
    ProcessorEventId,
    /// A receiver of notifications outside of the API.
    NotificationEndpointId,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal: $machine:path),+ $(,)?) => {
        /// The kind of an entity, which determines its state machine.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum EntityKind {
            $($(#[$doc])* $kind,)+
        }

        impl EntityKind {
            pub const ALL: &'static [Self] = &[$(Self::$kind),+];

            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $name),+ }
            }

            /// The kind of that name, as in URLs, tables and the supervision tree.
            #[must_use]
            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.as_str() == name)
            }

            /// Calls `visitor` with the kind's state machine: the one place where a kind becomes a type.
            pub fn visit<V: Visitor>(self, visitor: V) -> V::Output {
                match self { $(Self::$kind => visitor.visit::<$machine>()),+ }
            }
        }
    };
}

kinds! {
    Node = "node": crate::node::Node,
    Allocation = "allocation": crate::allocation::Allocation,
    Sku = "sku": crate::sku::Sku,
    /// One user's SSH keys and the allocations counted against their quota.
    Tenant = "tenant": crate::tenant::Tenant,
    /// The platform roles that are bound to one subject.
    Bindings = "bindings": crate::role_bindings::RoleBindings,
    /// A program that acts for its owner, and the keys by which it authenticates.
    ServiceAccount = "service_account": crate::service_account::ServiceAccount,
    /// The policy values of one scope.
    Policy = "policy": crate::policy::ScopeValues,
    /// One shell on an allocation's machine, and its connection.
    TerminalSession = "terminal_session": crate::terminal_session::TerminalSession,
    /// The keys of one purpose, and the state of each in its rotation.
    KeySet = "key_set": crate::key_set::KeySet,
    /// The prepaid money of a user or an organization, and the meters of the allocations that spend it.
    BillingAccount = "billing_account": crate::billing_account::BillingAccount,
    /// An operator's announcement to all connected clients.
    Announcement = "announcement": crate::announcement::Announcement,
    /// A payment through the payment processor, and its refunds and reversals.
    Payment = "payment": crate::payment::Payment,
    /// An event of the payment processor.
    ProcessorEvent = "processor_event": crate::processor_event::ProcessorEvent,
    /// A receiver of a user's or an organization's notifications outside of the API, and its queue.
    NotificationEndpoint = "notification_endpoint": crate::notification_endpoint::NotificationEndpoint,
    /// The restarts of a part of the running cluster that operators asked for.
    Runtime = "runtime": crate::runtime::RestartRecord,
}

/// A function over an entity whose kind is known only at run time. See [`EntityKind::visit`].
pub trait Visitor {
    type Output;
    fn visit<M: Machine>(self) -> Self::Output;
}

impl fmt::Display for EntityKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One entity: its kind and its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntityRef {
    pub kind: EntityKind,
    pub id: Uuid,
}

impl fmt::Display for EntityRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.id)
    }
}

/// One of the 256 parts of the entities; the unit of ownership in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shard(pub u8);

impl Shard {
    pub const COUNT: usize = 256;

    pub fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).map(Self)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
