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
    /// A GPU machine in the inventory. A removed node comes back only under a new one.
    NodeId,
    /// One rental of GPUs on one node.
    AllocationId,
    /// An entry of the SKU catalog.
    SkuId,
    /// A registered public key.
    SshKeyId,
    /// A program that acts for a user.
    ServiceAccountId,
    /// One of a service account's keys; the key itself is never kept.
    ServiceAccountKeyId,
    /// A unit of work for a node's agent.
    TaskId,
    /// An enrollment token's public handle; the token itself is never kept.
    TokenId,
    /// A domain event, and the command that carries out its consequence.
    EventId,
    /// What makes a command the same command when it comes twice.
    CommandId,
    /// A running control-plane process.
    MemberId,
    /// A platform role bound to a subject.
    BindingId,
    /// The policy values of one scope.
    PolicyId,
    /// One policy value that was written.
    PolicyValueId,
    /// One shell on an allocation's machine.
    TerminalSessionId,
    /// The keys of one purpose.
    KeySetId,
    /// The prepaid money of a user or an org.
    BillingAccountId,
    /// What an operator said to everybody.
    AnnouncementId,
    /// Money that somebody brings in through the payment processor.
    PaymentId,
    /// What somebody asked back, of a payment or of an allocation's cost.
    RefundId,
    /// What the payment processor told us under one id of its own.
    ProcessorEventId,
    /// Where somebody is told of events outside of the API.
    NotificationEndpointId,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal: $machine:path),+ $(,)?) => {
        /// Which machine an entity runs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Kind {
            $($(#[$doc])* $kind,)+
        }

        impl Kind {
            pub const ALL: &'static [Self] = &[$(Self::$kind),+];

            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $name),+ }
            }

            /// The kind of that name, as it stands in URLs, tables and the supervision tree.
            #[must_use]
            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.as_str() == name)
            }

            /// Calls `visitor` with the kind's machine: the one place where a kind becomes a type.
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
    /// One user's standing with the service: their SSH keys and the allocations counted against their quota.
    Tenant = "tenant": crate::tenant::Tenant,
    /// The platform roles that are bound to one subject.
    Bindings = "bindings": crate::bindings::Bindings,
    /// A program that acts for its owner, and the keys by which it is known.
    ServiceAccount = "service_account": crate::service_account::ServiceAccount,
    /// The policy values of one scope.
    Policy = "policy": crate::policy::ScopeValues,
    /// One shell on an allocation's machine, and who is connected to it.
    TerminalSession = "terminal_session": crate::terminal_session::TerminalSession,
    /// The keys of one purpose, and where each stands in its rotation.
    KeySet = "key_set": crate::key_set::KeySet,
    /// The prepaid money of a user or an org, and the meters of what it is spent on.
    BillingAccount = "billing_account": crate::billing_account::BillingAccount,
    /// What an operator said to everybody.
    Announcement = "announcement": crate::announcement::Announcement,
    /// Money that somebody brings in through the payment processor, and what goes back of it.
    Payment = "payment": crate::payment::Payment,
    /// What the payment processor told us, once.
    ProcessorEvent = "processor_event": crate::processor_event::ProcessorEvent,
    /// Where a user or an organization is told of events outside of the API, and the messages that wait for it.
    NotificationEndpoint = "notification_endpoint": crate::notification_endpoint::NotificationEndpoint,
    /// What operators had done to a part of the running cluster.
    Runtime = "runtime": crate::runtime::Operated,
}

/// What is done with an entity whose kind is known only when it is met. See [`Kind::visit`].
pub trait Visitor {
    type Output;
    fn visit<M: Machine>(self) -> Self::Output;
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One entity: what kind of machine, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntityRef {
    pub kind: Kind,
    pub id: Uuid,
}

impl fmt::Display for EntityRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.id)
    }
}

/// One of the 256 parts that the entities are spread over; the unit of ownership in the cluster.
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
