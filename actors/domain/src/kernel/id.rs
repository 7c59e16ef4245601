//! Typed identifiers. `{id}` is a UUIDv7 in text form (decisions 2, *Formats*), so that ids sort by the time they were made. Users, organizations
//! and projects are known by the text that the identity provider's token has for them.

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
    /// A health finding of a node.
    FindingId,
    /// The identity of a command: a repeated command has the same id.
    CommandId,
    /// A replica of the control plane, as the others see it.
    MemberId,
    /// A platform role bound to a subject.
    BindingId,
    /// The overrides of the table of health findings.
    HealthRulesId,
    /// An update of the agents of many nodes.
    RolloutId,
    /// The policy values of one scope.
    PolicyId,
    /// One version of a policy value.
    PolicyValueId,
    /// One shell on an allocation's machine.
    TerminalSessionId,
    /// A person's login to the web console.
    BrowserSessionId,
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

macro_rules! external_id {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::ops::Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<String> for $name {
            fn from(id: String) -> Self {
                Self(id)
            }
        }

        impl From<&str> for $name {
            fn from(id: &str) -> Self {
                Self(id.to_owned())
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.0 == *other
            }
        }
    )+};
}

external_id! {
    /// A user, by the subject of the identity provider's token.
    UserId,
    /// An organization, by the identity provider's name for it.
    OrgId,
    /// A project of an organization, by the identity provider's name for it.
    ProjectId,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal),+ $(,)?) => {
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
        }
    };
}

kinds! {
    Node = "node",
    Allocation = "allocation",
    Sku = "sku",
    /// One user's SSH keys and the allocations counted against their quota.
    Tenant = "tenant",
    /// The platform roles that are bound to one subject.
    Bindings = "bindings",
    /// A program that acts for its owner, and the keys by which it authenticates.
    ServiceAccount = "service_account",
    /// The policy values of one scope.
    Policy = "policy",
    /// The overrides of the table of health findings.
    HealthRules = "health_rules",
    /// An update of the agents of many nodes.
    Rollout = "rollout",
    /// One shell on an allocation's machine, and its connection.
    TerminalSession = "terminal_session",
    /// A person's login to the web console.
    BrowserSession = "browser_session",
    /// The keys of one purpose, and the state of each in its rotation.
    KeySet = "key_set",
    /// The prepaid money of a user or an organization, and the meters of the allocations that spend it.
    BillingAccount = "billing_account",
    /// An operator's announcement to all connected clients.
    Announcement = "announcement",
    /// A payment through the payment processor, and its refunds and reversals.
    Payment = "payment",
    /// An event of the payment processor.
    ProcessorEvent = "processor_event",
    /// A receiver of a user's or an organization's notifications outside of the API, and its queue.
    NotificationEndpoint = "notification_endpoint",
    /// The restarts of a part of the running cluster that operators asked for.
    Runtime = "runtime",
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
